"""memory_update's Triton candidate under the interpreter against the float64 reference."""

import pytest
import torch
from torch import Tensor

from bakeoff.kernels import variants
from bakeoff.ops import memory_update_
from bakeoff.ops.memory_update import IN_PLACE, OP
from bakeoff.ops.memory_update.kernels import Tiling, tilings
from bakeoff.ops.memory_update.op import GATES, MEMORY, MOMENTUM
from bakeoff.ops.memory_update.reference import memory_update as reference
from bakeoff.ops.memory_update.triton import memory_update as triton
from bakeoff.select.contests.poison import Poison
from bakeoff.select.contests.verify import verify, yardsticks

# Relative to the largest element: float32 sums in another order; roundings of every step in 16 bits.
BOUND = {torch.float32: 2e-5, torch.float16: 1.5e-2}
SHAPES = [(1, 1, 1, 1, 1), (2, 5, 3, 4, 2), (2, 70, 33, 17, 20), (1, 40, 16, 80, 130)]


def tensors(G, N, D, H, V, *, dtype=torch.float32, weighted=True):
    """All tensors of a call, with gradients; a norm of about 1."""
    shapes = ((G, H, D), (G, H), (G, V, H), (G, V))
    made = {"k": torch.randn(G, N, D).to(dtype), "v": torch.randn(G, N, V).to(dtype)}
    made |= {name: torch.randn(shape) / shape[-1] ** 0.5 for name, shape in zip(MEMORY, shapes, strict=True)}
    made |= {name: torch.randn(shape) for name, shape in zip(MOMENTUM, shapes, strict=True)}
    made |= {name: 0.1 + 0.8 * torch.rand(G) for name in GATES}
    if weighted:
        made["row_weight"] = torch.rand(G, N)
    return {name: t.requires_grad_() for name, t in made.items()}


def arguments(made, max_norm=None, reduction="sum"):
    given = {**made, "max_norm": max_norm, "reduction": reduction}
    return [given.get(name) for name in OP.params]


def cotangents(outputs, used=slice(0, 10)):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t.dtype) for t in outputs[:-1][used]
    ]


def step(fn, args, used=slice(0, 10)):
    outputs = fn(*args)
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    pairs = zip(outputs[:-1][used], cotangents(outputs, used), strict=True)
    roots, arriving = zip(*[(out, dy) for out, dy in pairs if out.requires_grad], strict=True)
    slopes = torch.autograd.grad(roots, leaves, arriving, allow_unused=True)
    slopes = [torch.zeros_like(a) if s is None else s for s, a in zip(slopes, leaves, strict=True)]
    return [*outputs, *slopes]


def wide(args):
    return [a.detach().double().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args]


def assert_equals(got, want, bound):
    for i, (mine, truth) in enumerate(zip(got, want, strict=True)):
        assert mine.shape == truth.shape, i
        if mine.dtype == torch.bool:
            assert torch.equal(mine, truth)
            continue
        scale = truth.abs().max().clamp(min=1e-3)
        error = ((mine.to(truth.dtype) - truth).abs().max() / scale).item()
        assert error <= bound, (i, error)


def assert_native(args, used=slice(0, 10), fn=triton):
    everything = [a for a in args if isinstance(a, Tensor)]
    before = [a.detach().clone() for a in everything]
    with Poison() as poison:
        got = step(fn, args, used)
    assert not poison.broken()
    assert all(torch.equal(a, b) for a, b in zip(before, everything, strict=True))
    assert_equals(got, step(reference, wide(args), used), BOUND[args[0].dtype])


@pytest.mark.parametrize(
    ("shape", "max_norm"),
    [*[(shape, 0.5) for shape in SHAPES], (SHAPES[1], None)],
    ids=str,
)
def test_forward_and_gradients(shape, max_norm):
    assert_native(arguments(tensors(*shape), max_norm))


@pytest.mark.parametrize("reduction", ["mean", "token_sum"])
def test_16_bit_rows(reduction):
    assert_native(arguments(tensors(2, 40, 24, 17, 20, dtype=torch.float16), 0.5, reduction))


def test_large_rows_in_float16():
    """Some products of two rows are beyond float16's largest number; what is left of their sums has fewer
    right digits."""
    made = tensors(1, 64, 24, 40, 32, dtype=torch.float16, weighted=False)
    with torch.no_grad():
        made["k"] *= 500
        made["v"] *= 500
    args = arguments(made, reduction="mean")
    assert_equals(step(triton, args), step(reference, wide(args)), 0.2)


@pytest.mark.parametrize("used", [slice(0, 4), slice(4, 8), slice(8, 9), slice(9, 10), slice(2, 3)], ids=str)
def test_gradients_of_some_results(used):
    clipped = used != slice(8, 9)
    assert_native(arguments(tensors(2, 20, 8, 16, 5, weighted=clipped), 0.5 if clipped else None), used)


@pytest.mark.parametrize(
    "wanted", [["k"], ["v", "lr"], ["row_weight"], ["memory_b1"], ["momentum_w2", "decay"]]
)
def test_gradients_of_some_arguments(wanted):
    made = tensors(2, 20, 8, 16, 5)
    assert_native(arguments({n: t.detach().requires_grad_(n in wanted) for n, t in made.items()}, 0.5))


@pytest.mark.parametrize("sum_rows", [pytest.param(16, marks=pytest.mark.exhaustive), 32])
def test_more_than_one_tile_on_each_axis(sum_rows):
    tiling = Tiling(32, 16, 32, 4, 2, sum_rows, 16, 32, 4, 2)
    text = variants.text({"forward": tiling, "backward": tiling})
    assert_native(arguments(tensors(2, 70, 40, 33, 20), 0.5), fn=triton.bind(text))


def test_strided_and_expanded_arguments():
    made = tensors(2, 20, 8, 16, 5)
    made["k"] = torch.randn(2, 20, 24)[..., 8:16].requires_grad_()
    made["v"] = torch.randn(20, 2, 5).transpose(0, 1).requires_grad_()
    made["memory_w1"] = torch.randn(2, 8, 16).mT.requires_grad_()
    made["lr"] = torch.tensor([0.3]).expand(2).requires_grad_()
    assert_native(arguments(made, 0.5))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_group_that_is_not_finite_is_skipped(value):
    made = tensors(3, 20, 8, 16, 5)
    whole = step(triton, arguments(made, 0.5))
    with torch.no_grad():
        made["v"][1, 3, 2] = value
    got = step(triton, arguments(made, 0.5))
    assert got[10].tolist() == [True, False, True]
    for i, name in enumerate((*MEMORY, *MOMENTUM)):
        assert torch.equal(got[i][1], made[name][1])
    arriving = cotangents(got[:11])
    for name, slope in zip([n for n in OP.params if n in made], got[11:], strict=True):
        assert torch.isfinite(slope).all(), name
        if name in (*MEMORY, *MOMENTUM):
            assert torch.equal(slope[1], arriving[(*MEMORY, *MOMENTUM).index(name)][1])
        else:
            assert not slope[1].any(), name
    for mine, theirs in zip(got, whole, strict=True):
        assert torch.equal(mine[::2], theirs[::2])


def test_in_place():
    made = {name: t.detach() for name, t in tensors(2, 20, 8, 16, 5).items()}
    made["k"][1, 2, 3] = float("nan")
    want = triton(*arguments(made, 0.5))
    memory, momentum = ([made[name].clone() for name in names] for names in (MEMORY, MOMENTUM))
    skipped = torch.zeros(2, dtype=torch.int64)
    told = memory_update_(
        made["k"], made["v"], memory, momentum, *(made[gate] for gate in GATES),
        max_norm=0.5, reduction="sum", row_weight=made["row_weight"], skipped=skipped, impl="triton",
    )  # fmt: skip
    for mine, theirs in zip((*memory, *momentum, *told), want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    assert skipped.tolist() == [0, 1]
    assert memory[0]._version > 0


def test_every_variant_is_a_tiling_that_fits():
    for case in OP.cases():
        found = tilings(case, 132)
        assert len(found) > 4
        for tiling in found:
            assert {tiling.rows, tiling.cols, tiling.sum_rows, tiling.sum_cols} <= {64, 128, 256}


@pytest.mark.parametrize("op", [OP, IN_PLACE], ids=lambda op: op.name)
def test_the_contest_s_verification(op):
    made = tensors(2, 40, 24, 20, 17)
    args = arguments(made, 0.5)
    if op is IN_PLACE:
        args = [a.detach() if isinstance(a, Tensor) else a for a in args] + [
            torch.zeros(2, dtype=torch.int64)
        ]
    verify(op, op.candidate("triton"), yardsticks(op, op.case(args)))


def test_opcheck():
    args = arguments(tensors(1, 6, 4, 4, 3), 0.5)
    torch.library.opcheck(triton.op.traced.forward, (*args, True, ""))
