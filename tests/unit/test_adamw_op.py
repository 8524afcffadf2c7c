"""The ops adamw_ and global_norm on the CPU: arguments, scalars on the device, skipping, what they refuse."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import bakeoff
from bakeoff.ops.adamw import adamw_, global_norm
from bakeoff.ops.adamw.group import join, split
from bakeoff.ops.adamw.op import NORM, OP, norm_case, update_case
from bakeoff.select.contests.contest import contest
from tests.unit.test_adamw import ALL, SHAPES, distance


def lists(count: int = 2) -> dict[str, list[Tensor]]:
    return {
        name: [torch.rand(3) for _ in range(count)] for name in ("params", "grads", "exp_avg", "exp_avg_sq")
    }


HOW: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("impl", ALL)
def test_op_with_scalars_on_the_device(impl: str | None, shape: tuple[int, ...]) -> None:
    group = lists()
    want = [p.clone() for p in group["params"]]
    m, v = [m.clone() for m in group["exp_avg"]], [v.clone() for v in group["exp_avg_sq"]]
    grads = [g * 0.5 / 4 for g in group["grads"]]
    adamw_(want, grads, m, v, step=torch.tensor(2.0), impl="loop", **{**HOW, "lr": 3e-2})
    step, rate = torch.full(shape, 2.0), torch.full(shape, HOW["lr"])
    values = {"clip_coef": 0.5, "grad_scale": 4.0, "lr_mult": 3.0}
    if impl != "foreach":
        values["found_inf"] = 0.0
    scalars: Any = {name: torch.full(shape, value) for name, value in values.items()}
    adamw_(**group, step=step, impl=impl, **{**HOW, "lr": rate}, **scalars)
    assert distance(group["params"], want) < 1e-6
    assert distance(group["exp_avg"], m) < 1e-6
    assert step.item() == 3


@pytest.mark.parametrize("found", [1.0, 2.0, 0.5, math.nan, math.inf])
@pytest.mark.parametrize("impl", [impl for impl in ALL if impl != "foreach"])
def test_any_found_inf_but_0_skips(impl: str | None, found: float) -> None:
    """GradScaler adds up what it found on each device."""
    group, step = lists(), torch.tensor(2.0)
    group["grads"][1][0] = math.nan
    before = {name: [t.clone() for t in group[name]] for name in group}
    adamw_(**group, step=step, impl=impl, found_inf=torch.tensor(found), **HOW)
    for name in ("params", "exp_avg", "exp_avg_sq"):
        assert all(map(torch.equal, group[name], before[name]))
    assert step.item() == 2


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("impl", ALL)
def test_autograd_refuses_values_saved_before_a_step(impl: str | None, master: bool) -> None:
    group = lists()
    if master:
        group["master"] = [p.clone() for p in group["params"]]
        group["params"] = [p.bfloat16() for p in group["params"]]
    saved = group["master" if master else "params"][0].requires_grad_()
    loss = saved.square().sum()
    adamw_(**group, step=torch.zeros(()), impl=impl, **HOW)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("found", [None, 0.0, 1.0])
@pytest.mark.parametrize("impl", ALL)
def test_sums_of_gradients_directions_and_weights(impl: str | None, found: float | None) -> None:
    """u of a step is what it moves weights by, over the rate, where nothing decays."""
    if impl == "foreach" and found is not None:
        return
    group, step, sums = lists(), torch.zeros(()), torch.full((4,), math.nan)
    how = {**HOW, "weight_decay": 0.0}
    adamw_(**group, step=step, impl=impl, sums=sums, **how)
    assert sums[0] == 0
    before = [p.clone() for p in group["params"]]
    adamw_(**group, step=step, impl=impl, **how)
    u_prev = [(was - p) / HOW["lr"] for was, p in zip(before, group["params"], strict=True)]
    group["grads"] = [torch.randn(3) for _ in before]
    weights = [p.clone() for p in group["params"]]
    given = {} if found is None else {"found_inf": torch.tensor(found)}
    adamw_(**group, step=step, impl=impl, sums=sums, **how, **given)
    u = [(was - p) / HOW["lr"] for was, p in zip(weights, group["params"], strict=True)]
    pairs = ((group["grads"], u_prev), (group["grads"],) * 2, (weights,) * 2, (u, u))
    want = [sum((a * b).sum().item() for a, b in zip(*pair, strict=True)) for pair in pairs]
    assert sums.tolist() == pytest.approx([0.0] * 4 if found else want, rel=1e-3)


@pytest.mark.parametrize("impl", ALL)
def test_sums_of_parameters_that_share_memory(impl: str | None) -> None:
    memory, sums = torch.ones(5, 4).t(), torch.zeros(4)
    params = [memory[:3], memory[1:]]
    ones, zeros = ([torch.full_like(p, x) for p in params] for x in (1.0, 0.0))
    adamw_(params, ones, zeros, [z.clone() for z in zeros], step=torch.zeros(()), sums=sums, impl=impl, **HOW)
    assert sums[:2].tolist() == [0.0, 30.0]
    assert sums[3].item() == pytest.approx(30.0)


def test_one_counter_for_all_advances_once_where_memory_is_shared() -> None:
    memory, step = torch.ones(5, 4).t(), torch.zeros(())
    params = [memory[:3], memory[1:]]
    ones = [torch.ones_like(p) for p in params]
    zeros = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    adamw_(params, ones, *zeros, step=step, **{**HOW, "weight_decay": 0.0})
    assert step.item() == 1
    assert memory[:, 0].tolist() == pytest.approx([0.99, 0.98, 0.98, 0.99])


def test_op_without_tensors_does_nothing() -> None:
    adamw_([], [], [], [], step=torch.zeros(()), **HOW)


SAME = torch.rand(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grads": [torch.rand(3)]}, "1 tensors in grads, expected one for each of 2"),
        (
            {"exp_avg": [torch.rand(3), torch.rand(4)]},
            r"exp_avg\[1\] has shape \(4,\), expected its parameter's",
        ),
        ({"exp_avg": [torch.rand(3), torch.rand(3).double()]}, "one call for each dtype"),
        ({"exp_avg": [torch.rand(3).double(), torch.rand(3).double()]}, "use one dtype for both"),
        ({"grads": [torch.rand(3).to_sparse(), torch.rand(3)]}, "to_dense"),
        ({"params": [torch.ones(3).int()] * 2}, "floating point"),
        ({"step": torch.zeros(2)}, "float32 scalar"),
        ({"step": [torch.zeros(())] * 3}, "3 steps"),
        ({"step": torch.zeros((), dtype=torch.int64)}, "float32 scalar"),
        ({"step": 3}, r"step must be a float32 scalar tensor on cpu, got 3; torch.full\(\(\), value"),
        ({"step": [torch.zeros(())] * 2}, "lists a counter twice"),
        ({"grads": [None, torch.rand(3)]}, r"grads\[0\] is NoneType, not a tensor"),
        ({"found_inf": True}, "found_inf must be a scalar tensor on cpu, got True"),
        ({"params": [torch.ones(3).to(torch.float8_e5m2)] * 2}, "float16, bfloat16, float32 or float64"),
        ({"exp_avg": [torch.ones(3).to(torch.float8_e5m2)] * 2}, "exp_avg are torch.float8_e5m2"),
        ({"beta1": 1.0}, "beta1"),
        ({"lr": None}, r"lr must be in \[0, inf\), got None"),
        ({"lr": True}, "lr is True, expected a number"),
        ({"weight_decay": False}, "weight_decay is False, expected a number"),
        ({"eps": "x"}, r"eps must be in \[0, inf\), got 'x'"),
        ({"exp_avg": [torch.rand(1).expand(3), torch.rand(3)]}, r"exp_avg\[0\] is expanded"),
        ({"params": [torch.rand(3), torch.rand(1).expand(3)]}, r"params\[1\] is expanded"),
        ({"params": [SAME, SAME]}, r"params\[1\] lies in the memory of params\[0\].*list each tensor once"),
        ({"exp_avg": [SAME, torch.rand(3)], "exp_avg_sq": [torch.rand(3), SAME]}, "memory of exp_avg"),
        ({"clip_coef": torch.ones(2)}, "clip_coef must be a scalar"),
        ({"sums": torch.ones(3)}, r"sums must be float32 \[4\] on cpu, contiguous, got torch.float32 \(3,\)"),
        ({"sums": [0.0] * 4}, "sums must be a float32 tensor"),
        ({"master": [torch.rand(3).double()] * 2}, "must be float32, or int16"),
        ({"master": [torch.zeros(3, dtype=torch.int16)] * 2}, "int16 remainders extend bfloat16"),
    ],
)
def test_op_errors_name_the_argument(change: dict[str, Any], message: str) -> None:
    arguments = {**lists(), "step": torch.zeros(()), **HOW, **change}
    with pytest.raises((ValueError, TypeError), match=message):
        adamw_(**arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_global_norm(dtype: torch.dtype) -> None:
    grads = [torch.randn(shape).to(dtype) for shape in SHAPES]
    exact = torch.cat([g.double().flatten() for g in grads]).norm()
    norm = global_norm(grads)
    assert norm.dtype == torch.promote_types(dtype, torch.float32)
    assert norm.item() == pytest.approx(exact.item(), rel=1e-6)
    with pytest.raises(ValueError, match="no gradients"):
        global_norm([])
    with pytest.raises(TypeError, match=r"grads\[1\] is NoneType"):
        global_norm([grads[0], None])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"global_norm: grads are torch\.int64"):
        global_norm([torch.ones(3, dtype=torch.int64)])
    with pytest.raises(TypeError, match="global_norm: max_norm is True, expected a number"):
        NORM.check(norm_case(2, 8, "cpu", dtype).replace(max_norm=True))
    with pytest.raises(bakeoff.Unsupported, match="runs on CUDA"):
        global_norm(grads, impl="triton")


def test_contest_verifies_every_candidate() -> None:
    forms = {
        "float32": update_case(5, 500, "cpu", torch.float32),
        "sums": update_case(5, 500, "cpu", torch.float32, summed=True),
        "bf16": update_case(5, 500, "cpu", torch.bfloat16, scaled=True, guarded=True),
        "remainder": update_case(5, 500, "cpu", torch.bfloat16, None, torch.float32, torch.int16),
    }
    for case in forms.values():
        (verdict,) = contest(OP, case, budget_s=0.02, skip={"compiled": "takes long"})
        trials = {trial.candidate: trial for trial in verdict.trials}
        assert trials["loop"].errors is not None
        assert "runs on CUDA" in (trials["triton"].rejected or "")
        assert (trials["foreach"].rejected is None) == (case.found_inf is None)
        if case.exp_avg.dtype == case.params.dtype or case.master is not None:
            assert trials["fused"].rejected is None, trials["fused"].rejected
    (verdict,) = contest(NORM, norm_case(5, 500, "cpu", torch.float32), budget_s=0.02)
    assert verdict.winner == "eager"


def test_op_says_why_foreach_can_not_skip() -> None:
    with pytest.raises(bakeoff.Unsupported, match="no select"):
        adamw_(**lists(), step=torch.zeros(()), found_inf=torch.zeros(()), impl="foreach", **HOW)


@given(st.integers(-(2**31), 2**31 - 1))
def test_split_and_join_are_inverse_for_every_bit_pattern(bits: int) -> None:
    weight = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    high, low = split(weight)
    assert join(high, low).view(torch.int32).item() == bits
    if torch.isfinite(weight) and torch.isfinite(high):
        nearest = weight.bfloat16()
        assert (high.double() - weight.double()).abs() == (nearest.double() - weight.double()).abs()
