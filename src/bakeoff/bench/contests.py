"""Suite "ops": a contest for every cell of the ops' grids, all candidates and installed peers in one run."""

import contextlib
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
    if resume:
        wanted = [(cell, each) for cell, each in wanted if not known(file, cell, each)]
    compile_ahead([cell for cell, _ in wanted], jobs, announce)
    with Worker(announce=announce) as worker:
        for cell, each in wanted:
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
    waiting = list(reversed(cells))
    done = 0

    def work() -> None:
        nonlocal done
        with Worker() as worker:
            while waiting:
                with contextlib.suppress(IndexError, ContestError):  # what is wrong, the contest will find
                    cell = waiting.pop()
                    worker.contest(cell.op, cell.case, (), 0.0)
                done += 1
                announce(f"compiled for {done} of {len(cells)} cells")

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(jobs, len(cells)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


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
