"""optim.NestedController: what it learns, step by step, and what it makes of bad input."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bakeoff.optim import NestedController

AGREE = [1.0, 1.0, 4.0, 1.0]
"""Sums of a step whose gradient points where the last update did."""


def sums(*cosines: float, size: float = 1.0) -> Tensor:
    return torch.tensor([[c * size, size * size, 4.0, 1.0] for c in cosines])


def taught(cosine: float, steps: int = 40, groups: int = 2, **how: Any) -> NestedController:
    controller = NestedController(groups, **{"wait": 0, **how})
    for _ in range(steps):
        controller.advance(sums(*[cosine] * groups))
    return controller


def test_multipliers_start_at_exactly_one() -> None:
    controller = NestedController(3, wait=5)
    assert controller.multipliers.tolist() == [1.0] * 3
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        controller.advance(torch.rand(3, 4, generator=generator), torch.rand((), generator=generator))
        assert controller.multipliers.tolist() == [1.0] * 3


@pytest.mark.parametrize("ratio", [2.0, 4.0])
def test_multipliers_follow_the_hypergradient_and_stay_in_their_bounds(ratio: float) -> None:
    up, down = taught(1.0, 400, ratio=ratio), taught(-1.0, 400, ratio=ratio)
    assert (up.multipliers > 0.9 * ratio).all()
    assert (up.multipliers <= ratio).all()
    assert (down.multipliers < 1.1 / ratio).all()
    assert (down.multipliers >= 1 / ratio).all()


def test_cosines_within_the_margin_teach_nothing() -> None:
    for cosine in (0.09, -0.09):
        assert taught(cosine, margin=0.1).multipliers.tolist() == [1.0, 1.0]
    assert (taught(0.3, margin=0.1).multipliers > 1.0).all()


def test_the_pull_leads_back_to_one() -> None:
    controller = taught(1.0, 60, pull=0.1)
    high = controller.multipliers.clone()
    for _ in range(300):
        controller.advance(sums(0.0, 0.0))
    assert (controller.multipliers < high).all()
    assert controller.multipliers.tolist() == pytest.approx([1.0, 1.0], abs=0.1)


def test_the_gradient_is_autograds() -> None:
    """One lesson equals a step of gradient descent on pull*y^2/2 - beyond*log(multiplier), by autograd."""
    torch.manual_seed(0)
    controller = NestedController(3, wait=0, inner=1.0, rate=0.3, pull=0.05, margin=0.0)
    state = controller.state_dict()
    for _ in range(5):
        controller.advance(torch.rand(3, 4) + 0.1, torch.rand(()) + 1.0)
    state["weight2"].normal_()
    before = {name: t.clone() for name, t in state.items()}
    given = torch.rand(3, 4) + 0.1
    controller.advance(given, torch.tensor(1.5))
    names = ("weight1", "bias1", "weight2", "bias2")
    w1, b1, w2, b2 = leaves = [before[name].requires_grad_() for name in names]
    y = torch.tanh(before["x_last"] @ w1.T + b1) @ w2 + b2
    cosine = (given[:, 0] / given[:, 1].sqrt() / before["size"]).clamp(-1, 1)
    averaged = before["cosine"] + 0.1 * (cosine - before["cosine"])
    objective = (0.05 * y.square() / 2 - averaged * math.log(4.0) * torch.tanh(y)).sum() / 3
    for leaf, name, slope in zip(leaves, names, torch.autograd.grad(objective, leaves), strict=True):
        assert torch.allclose(state[name], leaf - 0.3 * slope, atol=1e-6), name


def test_inputs_are_standardised() -> None:
    controller, generator = NestedController(1, wait=10**6), torch.Generator().manual_seed(0)
    seen = []
    for _ in range(400):
        scale = math.exp(5.0 + 0.3 * torch.randn((), generator=generator).item())
        controller.advance(sums(0.0, size=scale))
        seen.append(controller.state_dict()["x"][0, 0].item())
    late = torch.tensor(seen[100:])
    assert late.mean().abs() < 0.2
    assert 0.8 < late.std() < 1.2
    assert late.abs().max() <= 3.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_group_that_is_not_finite_gets_one_and_teaches_nothing(bad: float, place: int) -> None:
    controller, other = taught(1.0), taught(1.0)
    given = sums(1.0, 1.0)
    given[0, place] = bad
    controller.advance(given)
    assert controller.multipliers[0] == 1.0
    assert controller.multipliers[1] > 1.5
    for name, tensor in controller.state_dict().items():
        assert tensor.isfinite().all(), name
        if name in ("count", "mean", "square", "cosine", "size", "x"):
            assert torch.equal(tensor[0], other.state_dict()[name][0]), name
    controller.advance(sums(1.0, 1.0))
    assert (controller.multipliers > 1.5).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_gives_one(bad: float) -> None:
    controller = taught(1.0)
    before = {name: t.clone() for name, t in controller.state_dict().items() if name != "multipliers"}
    controller.advance(sums(1.0, 1.0), torch.tensor(bad))
    assert controller.multipliers.tolist() == [1.0, 1.0]
    assert all(torch.equal(controller.state_dict()[name], t) for name, t in before.items())


def test_a_group_that_took_no_step_keeps_all() -> None:
    controller = taught(1.0)
    before = {name: t.clone() for name, t in controller.state_dict().items()}
    controller.advance(torch.zeros(2, 4), torch.tensor(3.0))
    assert all(torch.equal(controller.state_dict()[name], t) for name, t in before.items())


def test_parameters_of_size_zero_are_no_bad_input() -> None:
    controller = NestedController(1, wait=0)
    for _ in range(20):
        controller.advance(torch.tensor([[1.0, 1.0, 0.0, 1.0]]))
    assert controller.multipliers > 1.0


def test_depths_tell_groups_apart() -> None:
    controller = NestedController(2, wait=0, pull=0.0, inner=1.0, margin=0.0)
    for _ in range(400):
        controller.advance(sums(0.5, -0.5))
    assert controller.multipliers[0] > controller.multipliers[1]


def test_state_moves_to_another_controller_and_the_memory_stays() -> None:
    taught_one, fresh = taught(0.7), NestedController(2, seed=5, wait=0)
    multipliers = fresh.multipliers
    fresh.load_state_dict({name: t.clone() for name, t in taught_one.state_dict().items()})
    assert fresh.multipliers is multipliers
    for _ in range(5):
        taught_one.advance(sums(0.3, -0.2), torch.tensor(2.0))
        fresh.advance(sums(0.3, -0.2), torch.tensor(2.0))
    assert torch.equal(taught_one.multipliers, fresh.multipliers)
    with pytest.raises(ValueError, match=r"depth is \(3,\) in the state, \(2,\) here; use as many groups"):
        fresh.load_state_dict(NestedController(3).state_dict())
    with pytest.raises(ValueError, match="weight1 is missing"):
        fresh.load_state_dict({})
    assert torch.equal(taught_one.multipliers, fresh.multipliers)


def test_more_groups_leave_the_first_ones_alone() -> None:
    controller = taught(1.0)
    before = controller.multipliers.clone()
    controller.grow(3)
    assert torch.equal(controller.multipliers[:2], before)
    assert controller.multipliers[2] == 1.0
    controller.advance(sums(1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"groups": 0}, "at least 1"),
        ({"ratio": 1.0}, "ratio must be above 1"),
        ({"ratio": math.inf}, "ratio must be above 1"),
        ({"hidden": 0}, "at least 1"),
        ({"rate": -1.0}, "rate must be at least 0"),
        ({"pull": math.nan}, "pull must be at least 0"),
        ({"margin": 2.0}, "margin must be in"),
        ({"decay": 1.0}, "decay in"),
        ({"wait": -1}, "wait at least 0"),
        ({"depths": [0.0, math.nan]}, r"depths must lie in \[-1, 1\]"),
        ({"depths": [0.0, 2.0]}, r"depths must lie in \[-1, 1\]"),
        ({"depths": [0.0]}, "1 depths for 2 groups"),
    ],
)
def test_bad_settings_are_named(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NestedController(**{"groups": 2, **how})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            (torch.zeros(1, 4),),
            ValueError,
            r"sums have shape \(1, 4\), expected \(2, 4\): four for each group",
        ),
        (([[0.0] * 4] * 2,), TypeError, "sums must be a tensor on the device"),
        ((torch.ones(2, 4), torch.ones(3)), ValueError, r"the loss has shape \(3,\), expected one number"),
        ((torch.ones(2, 4), 2.0), TypeError, "loss must be a tensor on the device, got 2.0"),
    ],
)
def test_a_step_of_another_shape_is_refused(
    given: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    controller = NestedController(2)
    before = {name: t.clone() for name, t in controller.state_dict().items()}
    with pytest.raises(error, match=message):
        controller.advance(*given)
    assert all(torch.equal(before[name], t) for name, t in controller.state_dict().items())
