"""Suite "ops": a contest for every cell of the ops' grids, all candidates and installed peers in one run."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from bakeoff.apps.bench import results
from bakeoff.apps.bench.results import File, Row, cell_of, keep, open_file
from bakeoff.apps.bench.suites import Cell, cells
from bakeoff.errors import ContestError
from bakeoff.select import Op, Verdict
from bakeoff.select.contests.contest import regimes_of
from bakeoff.select.contests.side_by_side import Wanted, Workers

__all__ = ["Hear", "known", "run_ops"]

Hear = Callable[[Cell, list[Verdict], str], None]
"""Called for every cell with its verdicts, or with the reason why there are none."""


def run_ops(
    ops: Sequence[Op],
    device: str,
    out: Path,
    *,
    regimes: Sequence[str] | None = None,
    direction: str | None = None,
    text: str = "",
    budget_s: float = 2.0,
    resume: bool = False,
    jobs: int = 1,
    thorough: bool = False,
    variants: bool = False,
    hear: Hear = lambda cell, verdicts, reason: None,
    announce: Callable[[str], None] = lambda stage: None,
) -> File:
    """Hold a contest for every cell whose name or shapes contain `text`, of one `direction` or of each, and
    write it to `out` at once.

    Rows of the same cells in `out` are replaced, those of other cells stay; all must come from the same
    machine and versions. With `resume`, cells that `out` has with today's sources are left out.
    Contests are held `jobs` at a time (`bakeoff.select.contests.side_by_side`). A cell that can't be
    measured (out of memory, say) becomes a row with the reason. A candidate is one row, which names the
    launch configuration it was measured with; `thorough` tries all that it declares, and `variants` keeps the
    times of what was tried.

    Raises:
        ResultsError: `out` can't be read or written, or belongs to another machine or other versions.
    """
    env = results.environment(device)
    file = open_file(out, env)
    open_ = [
        (cell, each)
        for op in ops
        for cell in cells(op, device, text, direction)
        for each in [tuple(regimes or regimes_of(cell.case))]
        if not (resume and known(file, cell, each))
    ]
    with Workers(jobs, announce) as workers:
        while open_:
            together, open_ = open_[: workers.jobs], open_[workers.jobs :]
            round_ = [
                Wanted(cell.op, cell.case, each, budget_s, {}, True, thorough) for cell, each in together
            ]
            for i, outcome in workers.hold(round_):
                cell, each = together[i]
                reason, verdicts = "", list[Verdict]()
                if isinstance(outcome, ContestError):
                    reason = str(outcome)
                    rows = [results.failed_row(cell, regime, reason) for regime in each]
                else:
                    verdicts = outcome
                    rows_of = partial(results.rows_of_verdict, cell, variants=variants)
                    rows = [row for verdict in verdicts for row in rows_of(verdict)]
                file = results.changed(out, env, partial(keep, rows=rows))
                hear(cell, verdicts, reason)
    return file


def known(file: File, cell: Cell, regimes: Sequence[str]) -> list[Row]:
    """The rows that `file` has for a cell, one per regime and candidate; none unless all are there and
    current."""
    measured: list[Row] = []
    for regime in regimes:
        contest = (cell.op.name, cell.case.name, regime, cell.direction)
        rows = [row for row in file.rows if "op" in row and cell_of(row) == contest and results.current(row)]
        if {row["candidate"] for row in rows} != set(cell.op.by_name):
            return []
        measured += [msgspec.convert(row, Row) for row in rows]
    return measured
