"""The kernel that takes a controller's step, against the same step in PyTorch."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bakeoff.optim import NestedController
from bakeoff.optim.kernels import advance, fits

FIRM = {"wait": 2, "margin": 0.02, "decay": 0.9}


def in_kernel(controller: NestedController, sums: Tensor, loss: Tensor | None) -> None:
    c = controller
    advance(
        c._state, sums, loss, ratio=c.ratio, rate=c.rate, inner=c.inner, margin=c.margin, pull=c.pull,
        decay=c.decay, wait=c.wait,
    )  # fmt: skip


def drawn(groups: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    sums = torch.rand(groups, 4, generator=generator) + 0.1
    sums[:, 0] -= 0.5
    return sums


@pytest.mark.parametrize(("groups", "hidden"), [(1, 1), (3, 16), (5, 7)])
def test_the_kernel_takes_the_same_steps(groups: int, hidden: int) -> None:
    """Through skipped groups, infinities, NaNs and losses that are missing or broken."""
    settings: dict[str, Any] = {"hidden": hidden, **FIRM}
    plain, fused = NestedController(groups, **settings), NestedController(groups, **settings)
    assert fits(groups, hidden)
    for step in range(24):
        sums = drawn(groups, step)
        if step % 5 == 3:
            sums[0] = 0.0
        if step == 11:
            sums[-1, 1] = math.inf
        if step == 13:
            sums[0, 0] = math.nan
        loss = None if step == 6 else torch.tensor([math.nan, 2.0][step != 8] / (1.0 + step))
        plain.advance(sums, loss)
        in_kernel(fused, sums, loss)
        if step == 7:
            assert (fused.multipliers != 1.0).any(), "something is learned by now"
        for name, own in plain.state_dict().items():
            torch.testing.assert_close(
                fused.state_dict()[name], own, rtol=2e-4, atol=2e-5, msg=f"{name} {step}"
            )


def test_multipliers_start_at_exactly_one() -> None:
    controller = NestedController(3)
    in_kernel(controller, drawn(3, 0), torch.tensor(1.0))
    assert controller.multipliers.tolist() == [1.0] * 3


def test_what_one_program_cannot_hold_is_left_to_pytorch() -> None:
    assert not fits(1024, 64)
