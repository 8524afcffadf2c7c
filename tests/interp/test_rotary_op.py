"""What surrounds the rotary kernels: definition, tables, public call, checks, declaration, torch.compile."""

import doctest
import itertools
import math

import pytest
import torch

from bakeoff.errors import Unsupported
from bakeoff.kernels.variants import text
from bakeoff.ops.rotary import OP, rotary, rotary_tables
from bakeoff.ops.rotary.kernels import tilings
from bakeoff.ops.rotary.plain import eager
from bakeoff.ops.rotary.reference import reference
from bakeoff.ops.rotary.triton import rotary as candidate
from bakeoff.ops.rotary.triton import rotate
from bakeoff.select import TensorMeta
from bakeoff.select.contests.verify import verify, yardsticks
from bakeoff.select.declare.key import layout
from tests.interp.rotary_inputs import shrunk

CASES = [case for case in OP.cases() if case.q_weight is None]
FLOAT8 = torch.float8_e4m3fn
PLAIN = (None,) * 4
"""No weights, eps and offset."""


def tensors(B, T, H, HK, D, form="dense"):
    """Leaves q and k: dense, transposed from [B, H, T, D], or cut from a fused projection."""
    if form == "head-major":
        q, k = (torch.randn(B, n, T, D).transpose(1, 2) for n in (H, HK))
    elif form == "fused":
        q, k = torch.randn(B, T, H + 2 * HK, D).split([H, HK, HK], 2)[:2]
    else:
        q, k = (torch.randn(B, T, n, D) for n in (H, HK))
    return q.detach().requires_grad_(), k.detach().requires_grad_()


@pytest.mark.parametrize("fn", [reference, eager])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradcheck_also_of_the_tables(fn, interleaved):
    q, k = (torch.randn(2, 3, n, 6, dtype=torch.float64, requires_grad=True) for n in (2, 1))
    cos, sin = (torch.randn(5, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ids = torch.randint(5, (2, 3))
    assert torch.autograd.gradcheck(lambda *a: fn(*a, interleaved, None), (q, k, cos, sin))
    assert torch.autograd.gradcheck(lambda *a: fn(*a, interleaved, ids), (q, k, cos, sin))


def test_tables():
    cos, sin = rotary_tables(100_000, 8)
    assert cos.dtype == sin.dtype == torch.float32
    angle = torch.tensor(99_999.0, dtype=torch.float64)
    assert abs(sin[-1, 0].double() - angle.sin()) < 1e-7
    some, _ = rotary_tables(torch.tensor([0.0, 0.5, 7.0]), 8, base=500.0, dtype=torch.float64)
    assert some[1, 1].item() == pytest.approx(math.cos(0.5 * 500.0 ** (-2 / 8)))
    assert torch.equal(some[0], torch.ones(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="even and positive, not 7"):
        rotary_tables(4, 7)
    with pytest.raises(ValueError, match=r"expected \[T\]"):
        rotary_tables(torch.zeros(2, 2), 8)


def test_public_call_runs_triton_by_name():
    q, k = tensors(2, 3, 4, 2, 8)
    cos, sin = rotary_tables(3, 8)
    turned = rotary(q, k, cos, sin, interleaved=True, impl="triton")
    assert type(turned[0].grad_fn).__name__ == "rotaryBackward"
    torch.testing.assert_close(turned, rotary(q, k, cos, sin, interleaved=True, impl="eager"))
    torch.testing.assert_close(turned, rotary(q, k, cos, sin, interleaved=True))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"positions": -1}, ValueError, "positions is -1, expected a length"),
        ({"positions": 2.0}, TypeError, "positions is 2.0, expected a length or a tensor"),
        ({"positions": torch.ones(2, 2)}, ValueError, r"positions has shape \(2, 2\), expected \[T\]"),
        ({"dim": "8"}, TypeError, "dim is '8', expected a whole number"),
        ({"dim": 7}, ValueError, "even and positive, not 7"),
        ({"base": 0.0}, ValueError, "base is 0.0, expected a positive"),
        ({"base": math.nan}, ValueError, "base is nan"),
        ({"base": math.inf}, ValueError, "base is inf"),
        ({"dtype": torch.int32}, TypeError, "dtype is torch.int32, expected a floating one"),
    ],
)
def test_bad_tables_name_the_fix(change, error, text):
    with pytest.raises(error, match=text):
        rotary_tables(**({"positions": 3, "dim": 8} | change))


@pytest.mark.parametrize("T", [1, 3])
def test_gradients_that_begin_at_odd_places(T):
    """Plain PyTorch turns pairs as complex numbers, which begin at even places; what arrives may not."""
    q, k = (torch.randn(2, T, n, 6, requires_grad=True) for n in (2, 1))
    cos, sin = rotary_tables(T, 6)
    arriving = (
        torch.randn(1 + q.numel())[1:].view(q.shape),
        torch.randn(2, 7)[:, None, None, 1:].expand(k.shape),
    )
    for interleaved in (False, True):
        y = eager(q, k, cos, sin, interleaved, None)
        got = torch.autograd.grad(y, (q, k), arriving)
        want = torch.autograd.grad(reference(q, k, cos, sin, interleaved), (q, k), arriving)
        torch.testing.assert_close(got, want)


def test_nothing_to_turn_gives_the_tables_zero_gradients():
    cos, sin = (table.requires_grad_() for table in rotary_tables(3, 8))
    q = torch.zeros(0, 3, 4, 8, requires_grad=True)
    for fn, ids in itertools.product((rotary, reference), (None, torch.zeros(0, 3, dtype=torch.int64))):
        a, b = fn(q, q, cos, sin, position_ids=ids)
        for found, of in zip(
            torch.autograd.grad(a.sum() + b.sum(), (q, cos, sin)), (q, cos, sin), strict=True
        ):
            assert torch.equal(found, torch.zeros_like(of))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"q": torch.zeros(3, 4, 8)}, ValueError, r"q has shape \(3, 4, 8\), expected \[B, T, H, D\]"),
        ({"k": torch.zeros(2, 3, 2, 6)}, ValueError, r"k has shape .*expected \[B, T, Hk, D\].* D = 8"),
        ({"k": torch.zeros(2, 3, 2, 8, dtype=torch.float16)}, TypeError, "cast one of them"),
        ({"q": torch.zeros(2, 3, 4, 8, dtype=torch.int64)}, TypeError, "q is torch.int64; convert it"),
        ({"q": torch.zeros(2, 3, 4, 8).to(FLOAT8)}, TypeError, "q is torch.float8_e4m3fn.*at least 16 bits"),
        ({"k": torch.zeros(2, 3, 2, 8).to(FLOAT8)}, TypeError, "k is torch.float8_e4m3fn.*at least 16 bits"),
        ({"cos": torch.zeros(3, 4).to(FLOAT8)}, TypeError, "cos is torch.float8_e4m3fn.*at least 16 bits"),
        ({"sin": torch.zeros(3, 4).to(FLOAT8)}, TypeError, "sin is torch.float8_e4m3fn.*at least 16 bits"),
        ({"cos": torch.zeros(3, 1, 4)}, ValueError, r"cos has shape \(3, 1, 4\), expected \[S, R/2\]"),
        ({"sin": torch.zeros(4, 4)}, ValueError, r"sin has shape \(4, 4\), expected cos's, \(3, 4\)"),
        ({"cos": torch.zeros(3, 8), "sin": torch.zeros(3, 8)}, ValueError, r"must be cut: cos\[:, :4\]"),
        (
            {"cos": torch.zeros(3, 0), "sin": torch.zeros(3, 0)},
            ValueError,
            r"cos has shape \(3, 0\), expected .*R/2 >= 1",
        ),
        ({"cos": torch.zeros(2, 4), "sin": torch.zeros(2, 4)}, ValueError, "2 rows for T = 3"),
        ({"position_ids": torch.zeros(1, 3, dtype=torch.int64)}, ValueError, r"position_ids\[0\]"),
        ({"position_ids": torch.zeros(3)}, TypeError, "expected int32 or int64"),
        ({"interleaved": 1}, TypeError, "interleaved is 1"),
        ({"interleaved": torch.ones(1)}, TypeError, "interleaved is a tensor"),
    ],
)
def test_bad_arguments_name_the_fix(change, error, text):
    cos, sin = rotary_tables(3, 8)
    call = {"q": torch.zeros(2, 3, 4, 8), "k": torch.zeros(2, 3, 2, 8), "cos": cos, "sin": sin} | change
    q, k, cos, sin = (call.pop(name) for name in ("q", "k", "cos", "sin"))
    with pytest.raises(error, match=text):
        rotary(q, k, cos, sin, **call)


def test_what_triton_leaves_to_eager():
    q, k = tensors(2, 3, 4, 2, 8)
    cos, sin = rotary_tables(3, 8)
    with pytest.raises(Unsupported, match="gradient of cos and sin"):
        rotary(q, k, cos.requires_grad_(), sin, impl="triton")
    turned, _ = rotary(q, k, cos, sin)
    assert torch.autograd.grad(turned.sum(), cos)[0].abs().sum() > 0
    with pytest.raises(Unsupported, match="float64"):
        rotary(q.double(), k.double(), cos.detach(), sin, impl="triton")
    for peer in ("liger", "quack", "fla"):
        with pytest.raises(Unsupported, match=r"is not installed|runs on"):
            rotary(q, k, cos.detach(), sin, impl=peer)


DISTINCT = {str(shrunk(case).args): case for case in CASES}.values()


@pytest.mark.parametrize("case", DISTINCT, ids=lambda case: case.name)
def test_the_grid_passes_the_contest_verification(case):
    small = shrunk(case)
    OP.check(small)
    triton = OP.candidate("triton")
    assert triton.reasons(small) == []
    errors, deterministic = verify(OP, triton, yardsticks(OP, small))
    assert deterministic
    assert errors.rms < torch.finfo(small.q.dtype).eps


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_declaration_of_the_grid(case):
    OP.check(case)
    bucket = OP.bucket(case)
    OP.check(bucket)
    assert OP.bucket(bucket) == bucket
    assert layout(bucket.q, 2) == layout(case.q, 2)
    assert bucket.q.shape[2:] == case.q.shape[2:]
    cost, forward = OP.cost(case), OP.cost(case.without_grad())
    moved = 2 * (case.q.nbytes + case.k.nbytes)
    assert moved < forward.bytes < 1.2 * moved
    assert cost.bytes == (2 * forward.bytes if case.needs_grad else forward.bytes)
    assert cost.flops <= 2 * 3 * (case.q.numel + case.k.numel)
    assert OP.heuristic(case, "eager") == OP.heuristic(case, "graph") == "triton"
    assert OP.heuristic(case, "compiled") == "eager"


def test_bucket_of_rows_and_of_shared_ids():
    q, k = tensors(2, 100, 4, 2, 8)
    ids = torch.zeros(100, dtype=torch.int32)
    bucket = OP.bucket(OP.case((q, k, *rotary_tables(300, 8), False, ids, *PLAIN)))
    assert (bucket.q.shape, bucket.k.shape) == ((2, 112, 4, 8), (2, 112, 2, 8))
    assert bucket.cos.shape == (320, 4)
    assert bucket.position_ids == TensorMeta.dense((2, 112), torch.int32)
    without = OP.bucket(OP.case((q, k, *rotary_tables(300, 8), False, None, *PLAIN)))
    assert without.cos.shape == (112, 4)


# Inside torch.compile.


@pytest.mark.parametrize("form", ["dense", "head-major", "fused"])
def test_registered_op_passes_opcheck(form):
    q, k = tensors(2, 3, 4, 2, 8, form=form)
    cos, sin = rotary_tables(3, 8)
    for ids in (None, torch.zeros(2, 3, dtype=torch.int64)):
        orders = (q.stride(1) < q.stride(2), k.stride(1) < k.stride(2))
        for way in (False, True):
            given = (q, k, cos, sin, True, ids, way, *orders, True, "")
            torch.library.opcheck(rotate.traced.forward, given)


def test_compiles_whole_with_any_length():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    @torch.compile(backend=count, fullgraph=True)
    def step(q, k, cos, sin):
        q, k = rotary(q, k, cos, sin, impl="triton")
        return (q * k).sum()

    for length in (4, 6, 9):
        q, k = tensors(2, length, 2, 2, 8)
        cos, sin = rotary_tables(length, 8)
        got = torch.autograd.grad(step(q, k, cos, sin), (q, k))
        turned = reference(q, k, cos, sin)
        want = torch.autograd.grad((turned[0] * turned[1]).sum(), (q, k))
        torch.testing.assert_close(got, want)
    assert len(graphs) == 2  # one for the first length, one for all others


def test_inductor_sees_eager_without_complex_numbers():
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return graph

    q, k = tensors(2, 3, 2, 2, 8)
    cos, sin = rotary_tables(3, 8)
    got = torch.compile(lambda *a: rotary(*a, impl="eager"), backend=keep, fullgraph=True)(q, k, cos, sin)
    torch.testing.assert_close(got, eager(q, k, cos, sin, False, None))
    assert len(graphs) == 1
    assert "complex" not in graphs[0]


@pytest.mark.parametrize("documented", [rotary, rotary_tables])
def test_documented_examples(documented):
    (example,) = doctest.DocTestFinder().find(
        documented, globs={"rotary": rotary, "rotary_tables": rotary_tables}
    )
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize("form", ["dense", "head-major", "fused"])
def test_the_registered_op_agrees(form):
    """Results and gradients of first and second order, to the bit and in the same layout."""
    q, k = tensors(2, 3, 4, 2, 8, form=form)
    cos, sin = rotary_tables(3, 8)
    orders = (form == "head-major",) * 2
    dys = [torch.randn_like(x).requires_grad_() for x in (q, k)]
    runs = []
    for call in (rotate, lambda *args: rotate.traced(args, "", True)):
        turned = call(q, k, cos, sin, False, None, False, *orders)
        gradients = torch.autograd.grad(turned, (q, k), dys, create_graph=True)
        runs.append((*turned, *gradients, *torch.autograd.grad(gradients, dys, (q.detach(), k.detach()))))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize(
    "some", [slice(1, 4), pytest.param(slice(4, None), marks=pytest.mark.exhaustive)], ids=["first", "others"]
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_variants_give_the_same_bits(some, interleaved):
    q, k = tensors(2, 37, 12, 4, 48)
    cos, sin = rotary_tables(37, 48 if interleaved else 20)
    dys = torch.randn_like(q), torch.randn_like(k)
    assert candidate.variants(CASES[0]) == {"forward": tilings(None)}
    assert candidate.bind("") is candidate
    names = [text({"forward": tiling}) for tiling in tilings(None)[some]]
    assert all(candidate.bind(name) is candidate.bind(name) for name in names)
    runs = []
    for fn in (candidate, *map(candidate.bind, names)):
        turned = fn(q, k, cos, sin, interleaved, None)
        runs.append((*turned, *torch.autograd.grad(turned, (q, k), dys)))
    for default, *others in zip(*runs, strict=True):
        assert all(torch.equal(default, other) for other in others)
