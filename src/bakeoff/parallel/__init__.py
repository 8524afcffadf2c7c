"""More than one GPU: what torchrun launched, as a `World`, models spread over it, sequences in parts."""

from bakeoff.parallel.context import attention, context_plan, dilated_attention
from bakeoff.parallel.exchange import borders
from bakeoff.parallel.plan import ContextPlan
from bakeoff.parallel.spread import full, groups_of, let_go, replicas, sharded
from bakeoff.parallel.watch import RankError
from bakeoff.parallel.world import ALONE, World, joined, launched, local_rank, own_device

__all__ = [
    "ALONE",
    "ContextPlan",
    "RankError",
    "World",
    "attention",
    "borders",
    "context_plan",
    "dilated_attention",
    "full",
    "groups_of",
    "joined",
    "launched",
    "let_go",
    "local_rank",
    "own_device",
    "replicas",
    "sharded",
]
