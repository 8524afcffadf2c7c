"""The fused candidate of dilated_attention under the interpreter against the float64 reference."""

import math
import warnings
from typing import Any

import pytest
import torch

from bakeoff.ops.dilated_attention import OP, kernels, tables
from bakeoff.ops.dilated_attention.reference import dilated_attention as reference
from bakeoff.ops.dilated_attention.triton import fused
from bakeoff.select.contests.poison import Poison
from bakeoff.select.contests.verify import verify, yardsticks

warnings.filterwarnings("ignore", message=".*of all tokens are selected by no head")


def small(classes: int = 0, split: int = 0) -> Any:
    """The candidate in tiles of 16, so that a few tokens are several of them."""
    queries, keys = "q_rows=16,q_keys=16,q_warps=4,q_stages=1", "k_rows=16,k_keys=16,k_warps=4,k_stages=1"
    text = f"forward(rows=16,keys=16,warps=4,stages=1,classes={classes},split={split})"
    return fused.bind(f"{text} backward({queries},{keys},classes={classes},split={split})")


def drawn(T: int, H: int, kv: int, D: int, B: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(T)
    shapes = [(B, T, H, D), (B, T, kv, D), (B, T, kv, D)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def results(call: Any, inputs: list[torch.Tensor], args: Any) -> list[torch.Tensor]:
    """y, lse and the gradients; the cotangent of y is transposed in memory."""
    generator = torch.Generator().manual_seed(1)
    outs = call(*inputs, *args)
    cotangents = [
        torch.randn(out.mT.shape, generator=generator, dtype=torch.float64).mT.to(out.dtype) for out in outs
    ]
    outs = [torch.where(torch.isfinite(out), out, 0.0) for out in outs]
    return [*[out.detach() for out in outs], *torch.autograd.grad(outs, inputs, cotangents)]


def compare(candidate: Any, inputs: list[torch.Tensor], args: Any, bound: float = 3e-6) -> None:
    with Poison() as poison:
        got = results(candidate, inputs, args)
    assert not poison.broken()
    wide = [x.detach().double().requires_grad_() for x in inputs]
    for name, mine, want in zip(
        ("y", "lse", "dq", "dk", "dv"), got, results(reference, wide, args), strict=True
    ):
        error = (mine.double() - want).norm() / want.norm().clamp(min=1e-30)
        assert error < bound, (name, error.item())


CASES = [
    # T, H, kv heads, D, segments, rates, causal, phase, classes, split
    (70, 2, 2, 16, "16,32,64", "1,2,4", False, "mod", 0, 0),
    (70, 2, 2, 16, "16,32,64", "1,2,4", True, "block", 1, 0),
    (61, 2, 1, 24, "20,50", "1,3", True, "mod", 0, 0),
    (45, 3, 3, 8, "10,25", "2,4", False, "1,0,1;3,0,2", 2, 0),
    (45, 2, 1, 24, "10,25", "2,3", True, "mod", 0, 1),
    (1, 2, 2, 16, "4,8", "1,2", True, "mod", 0, 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_reference(case: Any) -> None:
    T, H, kv, D, segments, rates, causal, phase, classes, split = case
    combine_grad = "detached" if T == 45 else "exact"
    args = (segments, rates, causal, phase, combine_grad, None, None, True)
    compare(small(classes, split), drawn(T, H, kv, D), args)


@pytest.mark.parametrize("causal", [False, True])
def test_documents(causal: bool) -> None:
    cu = torch.tensor([3, 9, 9, 40, 47], dtype=torch.int32)
    args = ("10,25", "1,2", causal, "mod", "exact", cu, 0.3, True)
    compare(small(split=int(causal)), drawn(53, 1, 1, 16), args)


def test_strides_and_half_precision() -> None:
    """Heads of one packed tensor, transposed; two rows of a batch."""
    packed = torch.randn(2, 2, 33, 3, 20).half()
    inputs = [x.transpose(1, 2).detach() for x in packed.unbind(3)]  # [B, T, H, D]
    assert not inputs[0].is_contiguous()
    args = ("16,32", "1,2", True, "mod", "exact", None, None, True)
    compare(small(), [x.requires_grad_() for x in inputs], args, 2e-3)


def test_gradients_nobody_wants_are_not_made() -> None:
    q, k, v = drawn(20, 1, 1, 16)
    args = ("8,16", "1,2", False, "mod", "exact", None, None, False)
    want = torch.autograd.grad(small()(q, k, v, *args).sum(), [q, v])
    for wanted in (0, 1):
        x = [q, v][wanted]
        others = [t if t is x else t.detach() for t in (q, k, v)]
        (slope,) = torch.autograd.grad(small()(*others, *args).sum(), [x])
        assert torch.equal(slope, want[wanted])


def test_the_future_changes_nothing() -> None:
    q, k, v = (x.detach() for x in drawn(50, 1, 1, 16))
    args = ("8,32", "1,4", True, "mod", "exact", None, None, True)
    before = small()(q, k, v, *args)
    k[:, 30:], v[:, 30:], q[:, 30:] = 40.0, -7.0, 5.0
    y, lse = small()(q, k, v, *args)
    assert torch.equal(y[:, :30], before[0][:, :30])
    assert torch.equal(lse[..., :30], before[1][..., :30])


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_passes_the_contest_verification() -> None:
    """On ordinary and hostile inputs: large means and scales, tiny values, zeros, one hot element. Not
    causal: where a query has one key its gradient is exactly 0, of which any rounding is infinitely far."""
    q, k, v = drawn(34, 2, 2, 16, B=2)
    case = OP.case((q, k, v, "16,32", "1,2", False, "mod", "exact", None, None, False))
    _, deterministic = verify(OP, OP.candidate("fused"), yardsticks(OP, case))
    assert deterministic


@pytest.mark.parametrize(("segments", "rates", "T"), [((8, 16), (1, 2), 50), ((6, 10), (1, 2), 47)])
def test_intervals_are_cut_by_every_border(segments: Any, rates: Any, T: int) -> None:
    del rates
    table = tables.intervals(segments, T)
    starts = sorted({start for w in segments for start in range(0, T, w)})
    assert table[:, 0].tolist() == starts
    assert table[:, 1].tolist() == [*starts[1:], T]
    cu = torch.tensor([0, 11, 30, T])
    found = tables.document_intervals(cu, segments, T)
    found = found[found[:, 1] > found[:, 0]]
    assert sum((end - start) for start, end, *_ in found.tolist()) == T
    for start, end, origin, limit in found.tolist():
        if origin < limit:
            assert cu.tolist().count(origin) == 1
            assert all((start - origin) // w == (end - 1 - origin) // w for w in segments)


def test_number_of_classes() -> None:
    """Long tiles where nothing is causal; none that rows can't fill; short ones where time matters."""
    segments, rates = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)
    assert tables.classes_of(segments, rates, 1 << 17, 128, False) == 16
    assert tables.classes_of(segments, rates, 1 << 17, 128, True) < 16
    assert tables.classes_of((256, 1024), (1, 64), 4096, 128, False) == 1
    assert tables.classes_of((2048,), (8,), 1, 128, False) == 1
    assert math.isclose(kernels.width_of(48), 64)
