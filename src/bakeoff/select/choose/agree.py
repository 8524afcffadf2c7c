"""Agreement across ranks: rank 0 decides, everybody holds the same verdicts and no others."""

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import torch.distributed as dist

from bakeoff.errors import ContestError
from bakeoff.select.choose import policy
from bakeoff.select.choose.tune import TuneReport, tune
from bakeoff.select.contests.verdict import Verdict

__all__ = ["agree", "tune_together"]


class Decision(msgspec.Struct):
    """What rank 0 tells the others: its verdicts, or why there are none."""

    verdicts: list[Verdict]
    error: str = ""


def tune_together(step: Callable[[], object], budget_s: float = 30.0, **options: Any) -> TuneReport:
    """`tune` for a job of several ranks: every rank runs `step` (its collectives need all), rank 0 holds the
    contests, and every rank receives its verdicts. An error of rank 0's contests is raised on every rank."""
    policy.store.agreed = None  # what was agreed before is decided anew
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return tune(step, budget_s, **options)
    first = dist.get_rank() == 0
    try:
        report = tune(step, budget_s if first else 0.0, **options)
    except Exception as error:
        if first:
            _share(Decision([], f"{type(error).__name__}: {error}"))
        raise
    verdicts = agree(list(report.verdicts))
    return TuneReport(tuple(verdicts), report.measured, report.unsettled if first else {}, report.seconds)


def agree(verdicts: list[Verdict]) -> list[Verdict]:
    """Take rank 0's verdicts on every rank, in place of whatever this rank's tables hold.

    One broadcast and one gather, at start; nothing on the hot path. From here on only these verdicts decide,
    and a key without one falls to the heuristic, which is the same everywhere; nothing is tuned.

    Raises:
        ContestError: rank 0 failed, or the ranks ended up with different verdicts (they are named).
    """
    decision = _share(Decision(verdicts))
    if decision.error:
        raise ContestError(f"rank 0 could not decide: {decision.error}")
    policy.store.agreed_by = "rank 0"
    policy.store.agreed = {verdict.key: verdict for verdict in decision.verdicts}
    policy.forget()
    held = msgspec.json.encode(sorted(policy.store.agreed.items()))
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(held).hexdigest())
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise ContestError(f"ranks {odd} hold other verdicts than rank 0")
    return decision.verdicts


def _share(decision: Decision) -> Decision:
    """Rank 0's decision, on every rank."""
    sent: list[Any] = [msgspec.json.encode(decision)]
    dist.broadcast_object_list(sent, src=0)
    return msgspec.json.decode(sent[0], type=Decision)
