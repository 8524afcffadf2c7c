"""Suite "ops": a contest for every cell of the ops' grids, all candidates and installed peers in one run."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from bakeoff.bench import results
from bakeoff.bench.results import File, Row, cell_of, keep, open_file
from bakeoff.bench.suites import Cell, cells
from bakeoff.errors import ContestError
from bakeoff.select import Op, Verdict
from bakeoff.select.contest import regimes_of
from bakeoff.select.worker import Worker

__all__ = ["Hear", "compile_ahead", "known", "run_ops"]

Hear = Callable[[Cell, list[Verdict], str], None]
"""Hears of every cell: its verdicts, or why there are none."""


def run_ops(
    ops: Sequence[Op],
    device: str,
    out: Path,
    *,
    regimes: Sequence[str] | None = None,
    text: str = "",
    budget_s: float = 2.0,
    resume: bool = False,
    jobs: int = 0,
    hear: Hear = lambda cell, verdicts, reason: None,
    announce: Callable[[str], None] = lambda stage: None,
) -> File:
    """Hold a contest for every cell whose name or shapes contain `text`, and write each to `out` at once.

    Rows that `out` holds of the same cells are replaced, those of other cells stay, as long as they come from
    the same machine and versions. With `resume`, cells that `out` holds with today's sources are left out.
    `jobs` processes compile for all cells before the first is measured (`compile_ahead`). A cell that can't
    be measured (out of memory, say) becomes a row with the reason.

    Raises:
        ResultsError: `out` can't be read or written, or belongs to another machine or other versions.
    """
    env = results.environment(device)
    file = open_file(out, env)
    wanted = [
        (cell, tuple(regimes or regimes_of(cell.case))) for op in ops for cell in cells(op, device, text)
    ]

    def there(cell: Cell, each: tuple[str, ...]) -> bool:
        return resume and bool(known(file, cell, each))

    compile_ahead([cell for cell, each in wanted if not there(cell, each)], jobs, announce)
    with Worker(announce=announce) as worker:
        for cell, each in wanted:
            if there(cell, each):
                continue
            reason, verdicts = "", list[Verdict]()
            try:
                verdicts = worker.contest(cell.op, cell.case, each, budget_s, for_the_record=True)
                rows = [row for verdict in verdicts for row in results.rows_of_verdict(cell, verdict)]
            except ContestError as error:
                reason = str(error)
                rows = [results.failed_row(cell, regime, reason) for regime in each]
            file = results.changed(out, env, partial(keep, rows=rows))
            hear(cell, verdicts, reason)
    return file


def compile_ahead(cells: Sequence[Cell], jobs: int, announce: Callable[[str], None]) -> None:
    """Verify the candidates of `cells` in `jobs` processes, which leaves their compiled code in the caches on
    disk of Triton, Inductor and others: a contest then spends its time on measuring."""
    waiting, done = iter(cells), itertools.count(1)
    errors: list[Exception] = []

    def work() -> None:
        try:
            with Worker() as worker:
                for cell in waiting:
                    with contextlib.suppress(ContestError):  # which the contest itself will meet and say
                        worker.contest(cell.op, cell.case, (), 0.0)
                    announce(f"compiled for {next(done)} of {len(cells)} cells")
        except Exception as error:  # noqa: BLE001  raised below
            errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(jobs, len(cells)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        list(waiting)  # interrupted, no thread begins another
    if errors:
        raise errors[0]


def known(file: File, cell: Cell, regimes: Sequence[str]) -> list[Row]:
    """The rows that `file` holds of a cell, one per regime and candidate; none unless all are there and
    measured today's sources."""
    found = []
    for regime in regimes:
        place = (cell.op.name, cell.case.name, regime, cell.direction)
        rows = [row for row in file.rows if "op" in row and cell_of(row) == place and results.current(row)]
        if {row["candidate"] for row in rows} != set(cell.op.by_name):
            return []
        found += [msgspec.convert(row, Row) for row in rows]
    return found
