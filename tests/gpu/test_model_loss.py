"""The models' loss by linear_cross_entropy's kernels: gradients, nan, a captured step."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bakeoff.apps.train.config import Config as RunConfig
from bakeoff.apps.train.config import Optim, Train
from bakeoff.apps.train.step import Stepper
from bakeoff.models.llm_med import Config, LLMMed
from bakeoff.select import using

CUDA = torch.device("cuda", 0)
MODEL: dict[str, Any] = {"d_model": 128, "layers": 2, "heads": 4, "max_seq_len": 256}
KERNELS = pytest.mark.parametrize("candidate", ["eager", "triton"])


def batch() -> tuple[Tensor, Tensor]:
    """An odd number of rows, of which some targets don't count."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(256, (3, 251), generator=draw).to(CUDA)
    targets = ids.roll(-1, 1)
    targets[:, ::7] = -100
    return ids, targets


def gradients(model: LLMMed, loss: Tensor) -> list[Tensor]:
    return [g.double() for g in torch.autograd.grad(loss, list(model.parameters()))]


def by_logits(model: LLMMed, ids: Tensor, targets: Tensor) -> Tensor:
    logits = model(ids)[0].flatten(0, -2)  # type: ignore[union-attr]
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())


def apart(one: list[Tensor], other: list[Tensor]) -> float:
    """How far all gradients are apart, as a part of the other's."""
    far = sum(float((a - b).square().sum()) for a, b in zip(one, other, strict=True))
    return math.sqrt(far / sum(float(b.square().sum()) for b in other))


@KERNELS
@pytest.mark.parametrize("changes", [{}, {"tie": False, "logit_cap": 2.0}], ids=["tied", "capped"])
def test_gradients_are_as_near_the_exact_ones_as_by_logits(candidate: str, changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, (ids, targets) = LLMMed(Config(**MODEL, **changes)).to(CUDA), batch()
    exact = copy.deepcopy(model).double()
    want = gradients(exact, by_logits(exact, ids, targets))
    with torch.autocast("cuda", torch.bfloat16):
        loss = by_logits(model, ids, targets)
    usual = apart(gradients(model, loss), want)
    with torch.autocast("cuda", torch.bfloat16), using(linear_cross_entropy=candidate):
        loss = model(ids, targets)[1]
    assert apart(gradients(model, loss), want) <= 1.1 * usual


@KERNELS
def test_no_target_that_counts_gives_nan(candidate: str) -> None:
    model, (ids, targets) = LLMMed(Config(**MODEL)).to(CUDA), batch()
    with torch.autocast("cuda", torch.bfloat16), using(linear_cross_entropy=candidate):
        loss = model(ids, torch.full_like(targets, -100))[1]
    assert loss.isnan()


@KERNELS
def test_a_replayed_step_is_the_eager_one(candidate: str) -> None:
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(256, (4, 257), dtype=torch.uint8, generator=draw).to(CUDA)
    losses = []
    for capture in (False, True):
        torch.manual_seed(0)
        train = Train(batch_size=4, precision="bf16", device="cuda")
        config = RunConfig(model=Config(**MODEL), optim=Optim(lr=1e-3), train=train)
        with using(regime="graph", linear_cross_entropy=candidate):
            stepper = Stepper(LLMMed(Config(**MODEL)).to(CUDA).train(), config, CUDA)
            if capture:
                stepper.capture()
            for _ in range(4):
                stepper(rows, 1e-3)
            assert not stepper.uncaptured
        losses.append(stepper.read(4)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
