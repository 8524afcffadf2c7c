"""Agreement across ranks: rank 0 decides, everybody holds the same verdicts."""

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import torch.distributed as dist

from bakeoff.errors import ContestError
from bakeoff.select import policy
from bakeoff.select.tune import TuneReport, tune
from bakeoff.select.verdict import Verdict

__all__ = ["agree", "tune_together"]


def tune_together(
    step: Callable[[], object], budget_s: float = 30.0, device: str = "cpu", **options: Any
) -> TuneReport:
    """`tune` for a job of several ranks: every rank runs `step` (its collectives need all), rank 0 holds the
    contests, and every rank receives its verdicts."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return tune(step, budget_s, **options)
    rank = dist.get_rank()
    report = tune(step, budget_s if rank == 0 else 0.0, **options)
    verdicts = agree(list(report.verdicts), device)
    return TuneReport(tuple(verdicts), report.measured, report.unsettled if rank == 0 else {}, report.seconds)


def agree(verdicts: list[Verdict], device: str) -> list[Verdict]:
    """Take rank 0's verdicts on every rank and make sure that all hold the same ones.

    One broadcast and one gather, at start; nothing on the hot path.
    """
    sent: list[Any] = [msgspec.json.encode(verdicts) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sent, src=0)
    agreed = msgspec.json.decode(sent[0], type=list[Verdict])
    for verdict in agreed:
        policy.store.fresh[device, verdict.key] = verdict
    policy.forget()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(sent[0]).hexdigest())
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise ContestError(f"ranks {odd} hold other verdicts than rank 0")
    return agreed
