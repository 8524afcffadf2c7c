"""Requirements: a candidate that has a property, and the same one for all numbers of rows.

Buckets let calls of few and of many rows run different candidates, and so differ in bits. Where batch
invariance is required, all keys of a family, which differ in rows, gradients and regime alone, share one
candidate, in its default configuration.
"""

import re

from bakeoff.errors import PolicyError
from bakeoff.select.choose import policy
from bakeoff.select.contests.verdict import Verdict
from bakeoff.select.declare.candidate import Candidate
from bakeoff.select.declare.case import Case
from bakeoff.select.declare.op import Op

__all__ = ["family", "required"]

_TENSOR = re.compile(r"(\w+)=(\w+)\[([\d,*]*)\](?::\w+)?'?")


def family(op: Op, name: str) -> str:
    """The key `name` without what may differ between calls that must agree: the sizes that count rows,
    layouts, gradients, and the regime."""

    def open_rows(found: re.Match[str]) -> str:
        sizes = found[3].split(",")
        rows = len(sizes) - op.features.get(found[1], len(sizes))
        return f"{found[1]}={found[2]}[{','.join(['*'] * rows + sizes[rows:])}]"

    return _TENSOR.sub(open_rows, name).rpartition(" ")[0]


def required(op: Op, case: Case, name: str) -> tuple[Candidate, str]:
    """The candidate that is batch invariant in every verdict of the family of the key `name`, the fastest
    over all of them, and why. Raises PolicyError where none is."""
    own = family(op, name)
    rows = [row for key, row in policy.store.rows(op, case.device).items() if family(op, key) == own]
    rows = [row for row in rows if row.regime != "compiled"]
    if not rows:
        raise PolicyError(
            f"no verdict for {own} says which candidate is batch invariant: run bakeoff.tune(step) first"
        )
    shares = {c.name: _time(c.name, rows) for c in op.candidates if not c.baseline and not c.reasons(case)}
    fit = {candidate: share for candidate, share in shares.items() if share is not None}
    if not fit:
        raise PolicyError(
            f"{op.name}: no candidate was seen to be batch invariant in every verdict for {own}; measure "
            f"them again with bakeoff.tune(step, force=True), or require nothing"
        )
    best = min(fit, key=lambda candidate: fit[candidate])
    return op.by_name[best], "batch invariant, as is required, in every verdict of its family"


def _time(candidate: str, rows: list[Verdict]) -> float | None:
    """What a candidate takes over all rows, each in units of its winner's time; None unless it is batch
    invariant in all of them."""
    total = 0.0
    for row in rows:
        trial = next((t for t in row.trials if t.candidate == candidate), None)
        if trial is None or trial.rejected or trial.timing is None or not trial.batch_invariant:
            return None
        total += trial.timing.us / row.timings[row.winner].us
    return total
