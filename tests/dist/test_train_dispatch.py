"""What a step on shards costs the host: no operation on DTensors, and few exchanges."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from bakeoff.apps.train import Config
from bakeoff.apps.train.config import Optim, Train
from bakeoff.apps.train.step import Stepper
from bakeoff.models.llm_med import Config as ModelConfig
from bakeoff.models.llm_med import LLMMed
from bakeoff.optim.groups import ParamGroup
from bakeoff.parallel import World, spread

Ranks = Callable[..., None]

LAYERS, PARTS = 4, 2


class Watched(TorchDispatchMode):
    """Collects operations that are given a DTensor, and counts exchanges between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.on_dtensors: list[str] = []
        self.exchanges: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.on_dtensors.append(str(func))
        for name in ("allgather", "reduce_scatter", "allreduce"):
            self.exchanges[name] += f"c10d.{name}" in str(func).replace("._", ".")
        return func(*args, **(kwargs or {}))


def not_again(*_: Any) -> None:
    raise AssertionError("the lists of tensors were made anew")


def warm_step(rank: int, name: str, unit: int, gathered: int, scattered: int) -> None:
    config = Config(
        model=ModelConfig(d_model=24, layers=LAYERS, heads=2, max_seq_len=32),
        optim=Optim(name=name),
        train=Train(batch_size=2 * PARTS, accumulate=PARTS, device="cpu"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spread, "_UNIT", unit)
        stepper = Stepper(LLMMed(config.model), config, torch.device("cpu"), World(rank, 2), "fsdp")
        rows = torch.randint(256, (PARTS, 17), dtype=torch.uint8)
        for _ in range(2):  # the state of parameters is made in the first
            stepper(rows, 1e-3)
        patch.setattr(ParamGroup, "_anew", not_again)
        stepper(rows, 1e-3)
    with Watched() as watched:
        stepper(rows, 1e-3)
    assert not watched.on_dtensors
    reduced = 3 if name == "deep-nested" else 2  # the loss, the norm; sums that the controller looks at
    assert watched.exchanges == {"allgather": gathered, "reduce_scatter": scattered, "allreduce": reduced}


@pytest.mark.parametrize("name", ["adamw", "muon", "deep-nested"])
def test_a_small_model_is_gathered_once_a_step(ranks: Ranks, name: str) -> None:
    ranks(2, warm_step, name, 1 << 20, 1, 1)


def test_layers_are_gathered_twice_a_part_but_for_the_last(ranks: Ranks) -> None:
    """What belongs to no layer is gathered once a step."""
    ranks(2, warm_step, "adamw", 1, 1 + PARTS * (2 * LAYERS - 1), 1 + LAYERS)
