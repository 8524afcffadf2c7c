"""More than one GPU: what torchrun launched, as a `World`, and models spread over it."""

from bakeoff.parallel.spread import full, replicas, sharded, total_norm
from bakeoff.parallel.watch import RankError
from bakeoff.parallel.world import ALONE, World, joined, launched, local_rank

__all__ = [
    "ALONE",
    "RankError",
    "World",
    "full",
    "joined",
    "launched",
    "local_rank",
    "replicas",
    "sharded",
    "total_norm",
]
