"""Rotary with QK-norm: the Triton candidate, interpreted, against the float64 reference; laws and checks."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from bakeoff.errors import Unsupported
from bakeoff.kernels.counter import launches
from bakeoff.kernels.variants import text
from bakeoff.ops.rms_norm import rms_norm
from bakeoff.ops.rotary import OP, rotary, rotary_tables
from bakeoff.ops.rotary.kernels import Tiling
from bakeoff.ops.rotary.normed import tilings
from bakeoff.ops.rotary.normed.tilings import BackwardTiling
from bakeoff.ops.rotary.normed.triton import normalize_rotate
from bakeoff.ops.rotary.plain import eager
from bakeoff.ops.rotary.reference import reference
from bakeoff.ops.rotary.triton import rotary as candidate
from bakeoff.select.contests.poison import Poison
from bakeoff.select.contests.verify import verify, yardsticks
from tests.interp.rotary_inputs import FORMS, shrunk, tensors

# Of a result's largest element: a few roundings in float32, and the one to the result's dtype.
BOUND = {torch.float32: 1e-6, torch.float16: 6e-4}
NAMES = ("q'", "k'", "dq", "dk", "dq_weight", "dk_weight")
CASES = [case for case in OP.cases() if case.q_weight is not None]


def weights(D, dtype=torch.float32):
    return tuple((1 + 0.5 * torch.randn(D)).to(dtype).requires_grad_() for _ in "qk")


def gradients(fn, q, k, qw, kw, dys, *rest):
    """Results and gradients of fn(q, k, cos, sin, interleaved, ids, weights, eps, offset)."""
    cos, sin, interleaved, ids, eps, offset = rest
    outputs = fn(q, k, cos, sin, interleaved, ids, qw, kw, eps, offset)
    return (*outputs, *torch.autograd.grad(outputs, (q, k, qw, kw), dys))


def assert_native(q, k, qw, kw, cos, sin, interleaved=False, ids=None, eps=1e-6, offset=0.0, *, fn=candidate,
                  dys=None):  # fmt: skip
    """Results and gradients agree with float64, inputs stay as they were, and no fence is broken."""
    dys = dys or tuple(torch.randn(x.shape).to(x.dtype) for x in (q, k))
    before = [t.detach().clone() for t in (q, k, qw, kw, cos, sin, *dys)]
    with Poison() as poison:
        got = gradients(fn, q, k, qw, kw, dys, cos, sin, interleaved, ids, eps, offset)
    assert not poison.broken()
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, qw, kw, cos, sin, *dys), strict=True))
    wide = [t.detach().double().requires_grad_() for t in (q, k, qw, kw)]
    dys = [dy.double() for dy in dys]
    want = gradients(reference, *wide, dys, cos.double(), sin.double(), interleaved, ids, eps, offset)
    for name, mine, truth, like in zip(NAMES, got, want, (q, k, q, k, qw, kw), strict=True):
        assert (mine.shape, mine.dtype) == (like.shape, like.dtype)
        size = max(1.0, truth.abs().max().item())
        torch.testing.assert_close(
            mine.double(), truth, rtol=0, atol=BOUND[mine.dtype] * size, msg=lambda m, n=name: f"{n}: {m}"
        )
    return got


SMALL = candidate.bind(
    "forward(tile=64,heads=64,access=16) backward(tile=64,heads=64,access=16,programs=3,stages=2)"
)
"""The candidate in tiny tiles, of which programs of the backward walk over several."""


def test_small_tiles_really_are_several():
    q, k = tensors(1, 33, 4, 2, 10)
    cut = BackwardTiling(64, 64, 16, 3, 2)
    grid, numbers = tilings.backward_launch(
        q, k, q, k, (33, 5), 5, position_ids=0, interleaved=False, sums=True, sms=1, tiling=cut
    )
    assert grid == (3,)
    assert -(-33 // numbers["BLOCK_T"]) * 4 // numbers["BLOCK_H"] > 3


@pytest.mark.parametrize("fn", [candidate, SMALL], ids=["default", "small"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize(
    "shape", [(2, 5, 4, 2, 16, 16), (1, 17, 3, 1, 11, 6), (3, 1, 6, 2, 9, 8), (1, 9, 1, 1, 2, 2)], ids=str
)
def test_forward_and_gradients(shape, interleaved, fn):
    B, T, H, HK, D, R = shape
    forms = itertools.cycle([(None, 0.0), ((T,), 1.0), ((B, T), 0.0)])
    for dtype, (ids, offset) in zip((torch.float32, torch.float16, torch.float16), forms, strict=False):
        q, k = tensors(B, T, H, HK, D, dtype=dtype)
        cos, sin = rotary_tables(T + 3, R)
        position_ids = None if ids is None else torch.randint(T + 3, ids)
        assert_native(q, k, *weights(D), cos, sin, interleaved, position_ids, offset=offset, fn=fn)


@pytest.mark.parametrize("form", FORMS)
def test_layouts_of_inputs(form):
    q, k = tensors(2, 6, 4, 2, 16, form=form)
    got = assert_native(q, k, *weights(16), *rotary_tables(6, 12))
    for result in got[:2]:
        assert (result.transpose(1, 2) if form == "head-major" else result).is_contiguous()
    assert all(gradient.is_contiguous() for gradient in got[2:])


@pytest.mark.parametrize("kind", ["expanded", "head-major", "one value", "last strided"])
def test_layouts_of_incoming_gradients(kind):
    q, k = tensors(2, 5, 4, 2, 8)
    make = {
        "expanded": lambda x: torch.randn(1, x.shape[1], 1, x.shape[3]).expand(x.shape),
        "head-major": lambda x: torch.randn(x.transpose(1, 2).shape).transpose(1, 2),
        "one value": lambda x: torch.ones(()).expand(x.shape),
        "last strided": lambda x: torch.randn(x.transpose(2, 3).shape).transpose(2, 3),
    }[kind]
    assert_native(q, k, *weights(8), *rotary_tables(5, 8), dys=(make(q), make(k)))


def test_weights_of_other_dtypes_and_layouts():
    q, k = tensors(1, 5, 2, 1, 8, dtype=torch.float16)
    tables = rotary_tables(5, 8)
    for qw, kw in (weights(8, torch.float16), (weights(8)[0], weights(8, torch.float16)[1])):
        assert_native(q, k, qw, kw, *tables)
    strided = torch.randn(16)[::2].requires_grad_()
    assert_native(q, k, strided, strided.detach().clone().requires_grad_(), *tables)


def test_rows_that_begin_anywhere():
    q = torch.randn(121)[1:].view(1, 5, 3, 8).requires_grad_()
    for fn in (candidate, eager):
        assert_native(
            q, torch.randn(1, 5, 1, 8, requires_grad=True), *weights(8), *rotary_tables(5, 8), fn=fn
        )


def test_no_eps_and_tiles_with_rows_to_spare():
    """Rows that a tile has too many are zeros: 0 / 0 of theirs must not reach the weights' gradients."""
    q, k = tensors(1, 5, 3, 1, 8)
    assert_native(q, k, *weights(8), *rotary_tables(5, 6), eps=0.0)


@pytest.mark.parametrize(
    "shape", [(0, 3, 2, 2, 8), (2, 0, 2, 2, 8), (1, 3, 0, 2, 8), (1, 3, 2, 0, 8), (1, 3, 0, 0, 8)]
)
def test_empty_tensors(shape):
    B, T, H, HK, D = shape
    q, k = tensors(B, T, H, HK, D)
    qw, kw = weights(D)
    for fn in (candidate, eager, reference):
        dys = torch.ones_like(q), torch.ones_like(k)
        got = gradients(fn, q, k, qw, kw, dys, *rotary_tables(3, 8), False, None, 1e-6, 0.0)
        assert [t.shape for t in got] == [t.shape for t in (q, k, q, k, qw, kw)]
        for x, gradient in ((q, got[4]), (k, got[5])):
            assert x.numel() or torch.equal(gradient, torch.zeros(D))


@pytest.mark.parametrize("fn", [candidate, eager, reference])
@pytest.mark.parametrize("interleaved", [False, True])
def test_an_id_outside_the_table_gives_nan_there_alone(fn, interleaved):
    q, k = tensors(1, 5, 2, 1, 10)
    qw, kw = weights(10)
    cos, sin = rotary_tables(7, 8)
    ids = torch.tensor([3, 7, -1, 6, 1 << 40])
    out, _ = fn(q, k, cos, sin, interleaved, ids, qw, kw, 1e-6, 0.0)
    good = torch.tensor([True, False, False, True, False])
    assert out[:, ~good, :, :8].isnan().all()
    assert out[..., 8:].isfinite().all()
    want, _ = reference(q[:, good], k[:, good], cos, sin, interleaved, ids[good], qw, kw, 1e-6, 0.0)
    torch.testing.assert_close(out[:, good], want)
    (dq,) = torch.autograd.grad(out[:, good].sum(), q)
    assert dq[:, good].isfinite().all()


def test_only_what_is_wanted_is_computed():
    q, k = tensors(2, 3, 4, 2, 8)
    qw, kw = weights(8)
    tables = rotary_tables(3, 8)
    full = candidate(q, k, *tables, False, None, qw, kw, 1e-6, 0.0)
    dys = torch.randn_like(q), torch.randn_like(k)
    want = dict(zip(["q", "k", "qw", "kw"], torch.autograd.grad(full, (q, k, qw, kw), dys), strict=True))
    for wanted in (["q"], ["k"], ["qw"], ["kw"], ["q", "kw"], ["k", "qw", "kw"]):
        leaves = {name: x.detach().requires_grad_(name in wanted)
                  for name, x in {"q": q, "k": k, "qw": qw, "kw": kw}.items()}  # fmt: skip
        outputs = candidate(
            leaves["q"], leaves["k"], *tables, False, None, leaves["qw"], leaves["kw"], 1e-6, 0.0
        )
        assert outputs[0].requires_grad == bool({"q", "qw"} & {*wanted})
        assert outputs[1].requires_grad == bool({"k", "kw"} & {*wanted})
        used = [(y, dy) for y, dy in zip(outputs, dys, strict=True) if y.requires_grad]
        got = torch.autograd.grad([y for y, _ in used], [leaves[n] for n in wanted], [dy for _, dy in used])
        assert all(torch.equal(a, want[name]) for a, name in zip(got, wanted, strict=True))
    # Of one result alone, what the other depends on has none.
    again = candidate(q, k, *tables, False, None, qw, kw, 1e-6, 0.0)
    got = torch.autograd.grad(again[0], (q, k, qw, kw), dys[0], allow_unused=True)
    assert got[1] is None
    assert got[3] is None
    assert torch.equal(got[0], want["q"])
    assert torch.equal(got[2], want["qw"])


def test_one_launch_forward_and_two_back():
    q, k = tensors(2, 9, 4, 2, 8)
    qw, kw = weights(8)
    before = launches()
    outputs = SMALL(q, k, *rotary_tables(9, 8), False, None, qw, kw, 1e-6, 0.0)
    assert launches() == before + 1
    torch.autograd.grad(outputs, (q, k, qw, kw), [torch.ones_like(x) for x in outputs])
    assert launches() == before + 3


@settings(max_examples=settings.default.max_examples // 5)
@given(
    B=st.integers(1, 2), T=st.integers(1, 9), H=st.integers(1, 6), HK=st.integers(1, 4), D=st.integers(2, 21),
    half=st.integers(1, 10), form=st.sampled_from(FORMS), interleaved=st.booleans(),
    ids=st.sampled_from([None, 1, 2]), dtype=st.sampled_from([torch.float32, torch.float16]),
    offset=st.sampled_from([0.0, 1.0]), tile=st.sampled_from([64, 256, 4096]), programs=st.integers(1, 3),
)  # fmt: skip
def test_any_shape_and_stride(B, T, H, HK, D, half, form, interleaved, ids, dtype, offset, tile, programs):
    q, k = tensors(B, T, H, HK, D, dtype=dtype, form=form)
    cos, sin = rotary_tables(T + 2, 2 * min(half, D // 2))
    position_ids = torch.randint(T + 2, (T,) if ids == 1 else (B, T)) if ids else None
    fn = candidate.bind(text({
        "forward": Tiling(tile, 64, 16), "backward": BackwardTiling(tile, 64, 16, programs, 1),
    }))  # fmt: skip
    assert_native(q, k, *weights(D), cos, sin, interleaved, position_ids, 1e-3, offset, fn=fn)


# The op's laws, of every implementation that runs here.

IMPLEMENTATIONS = pytest.mark.parametrize("fn", [candidate, eager, reference])


@IMPLEMENTATIONS
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_equals_two_normalisations_and_a_rotation(fn, offset):
    q, k = tensors(2, 5, 4, 2, 12)
    qw, kw = weights(12)
    tables = rotary_tables(5, 8)
    dys = torch.randn_like(q), torch.randn_like(k)
    got = gradients(fn, q, k, qw, kw, dys, *tables, False, None, 1e-6, offset)
    normed = (rms_norm(x, w, 1e-6, offset=offset, impl="eager") for x, w in ((q, qw), (k, kw)))
    outputs = reference(*normed, *tables)
    want = (*outputs, *torch.autograd.grad(outputs, (q, k, qw, kw), dys))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@IMPLEMENTATIONS
def test_the_size_of_a_head_is_forgotten_and_the_weights_is_kept(fn):
    q, k = tensors(2, 5, 4, 2, 12)
    qw, kw = weights(12)
    tables = rotary_tables(5, 12)
    base = fn(q, k, *tables, False, None, qw, kw, 0.0, 0.0)
    scaled = fn(5.0 * q, 0.25 * k, *tables, False, None, qw, 3.0 * kw, 0.0, 0.0)
    torch.testing.assert_close(scaled, (base[0], 3.0 * base[1]))
    ones = torch.ones(12)
    unit = fn(q, k, *tables, False, None, ones, ones, 0.0, 0.0)
    torch.testing.assert_close(unit[0].norm(dim=-1), torch.full(q.shape[:3], 12**0.5))
    # Rotations keep lengths, so that a gradient along x is none at all.
    (dq,) = torch.autograd.grad(unit[0], q, torch.randn_like(q))
    assert (F.cosine_similarity(dq, q, dim=-1)).abs().max() < 1e-5


@IMPLEMENTATIONS
def test_heads_are_interchangeable_and_positions_are_not(fn):
    q, k = tensors(2, 6, 4, 4, 8)
    qw, kw = weights(8)
    tables = rotary_tables(6, 8)
    turned, _ = fn(q, k, *tables, False, None, qw, kw, 1e-6, 0.0)
    heads, times = torch.tensor([2, 0, 3, 1]), torch.tensor([3, 0, 1, 2, 5, 4])
    assert torch.equal(fn(q[:, :, heads], k, *tables, False, None, qw, kw, 1e-6, 0.0)[0], turned[:, :, heads])
    moved, _ = fn(q[:, times], k, *tables, False, None, qw, kw, 1e-6, 0.0)
    assert (moved - turned[:, times]).abs().amax(-1).min() > 1e-4


@pytest.mark.parametrize("fn", [reference, eager])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradcheck(fn, interleaved):
    q, k = (torch.randn(2, 2, n, 5, dtype=torch.float64, requires_grad=True) for n in (2, 1))
    qw, kw = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in "qk")
    cos, sin = (torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(
        lambda q, k, c, s, qw, kw: fn(q, k, c, s, interleaved, None, qw, kw, 1e-3, 0.5),
        (q, k, cos, sin, qw, kw),
    )


# The declaration.


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_grid_passes_the_contest_verification(case):
    small = shrunk(case)
    OP.check(small)
    triton = OP.candidate("triton")
    assert triton.reasons(small) == []
    errors, deterministic = verify(OP, triton, yardsticks(OP, small))
    assert deterministic
    assert errors.rms < 2 * torch.finfo(small.q.dtype).eps


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_declaration_of_the_grid(case):
    OP.check(case)
    bucket = OP.bucket(case)
    OP.check(bucket)
    assert OP.bucket(bucket) == bucket
    cost, forward = OP.cost(case), OP.cost(case.without_grad())
    passes = case.q.nbytes + case.k.nbytes
    assert 2 * passes < forward.bytes < 2.4 * passes
    if case.needs_grad:
        assert 5 * passes < cost.bytes < 5.5 * passes
    assert OP.heuristic(case, "eager") == OP.heuristic(case, "graph") == "triton"
    assert OP.heuristic(case, "compiled") == "eager"
    for peer in ("liger", "quack", "fla"):
        assert any("normalises no heads" in reason for reason in OP.candidate(peer).reasons(case)) or (
            OP.candidate(peer).absent
        )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k_weight": None}, ValueError, "q_weight is given and k_weight is None: pass both"),
        ({"q_weight": None}, ValueError, "k_weight is given and q_weight is None"),
        ({"q_weight": None, "k_weight": None, "offset": 1.0}, ValueError, "offset=1.0 is added to weights"),
        ({"q_weight": torch.ones(7)}, ValueError, r"q_weight has shape \(7,\), expected \[D\] with D = 8"),
        ({"k_weight": torch.ones(8, dtype=torch.int64)}, TypeError, "k_weight is torch.int64"),
        ({"eps": -1.0}, ValueError, "eps must be >= 0, got -1.0"),
        ({"eps": None}, ValueError, "eps and offset must be numbers"),
        ({"offset": float("nan")}, ValueError, "offset must be a finite number"),
    ],
)
def test_bad_arguments_name_the_fix(change, error, message):
    named = {"q_weight": torch.ones(8), "k_weight": torch.ones(8), "eps": 1e-6, "offset": 0.0} | change
    with pytest.raises(error, match=message):
        rotary(torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 2, 8), *rotary_tables(3, 8), **named)


def test_what_triton_leaves_to_eager():
    q, k = tensors(1, 3, 2, 1, 8)
    qw, kw = weights(8)
    cos, sin = rotary_tables(3, 8)
    with pytest.raises(Unsupported, match="float16, bfloat16 and float32 weights"):
        rotary(q, k, cos, sin, q_weight=qw.double(), k_weight=kw, impl="triton")
    wide, ones = torch.zeros(1, 1, 1, 8192), torch.ones(8192)
    with pytest.raises(Unsupported, match="head dimension over 4096"):
        rotary(wide, wide, *rotary_tables(1, 8), q_weight=ones, k_weight=ones, impl="triton")
    assert rotary(q, k, cos, sin, q_weight=qw.double(), k_weight=kw)[0].dtype == torch.float32


def test_calls_without_weights_have_the_keys_they_had():
    from bakeoff.select.declare.key import key

    case = next(case for case in OP.cases() if case.name == "llm-med")
    assert key(OP, case, "eager") == (
        "rotary(q=bf16[48,512,8,48]', k=bf16[48,512,8,48]', cos=fp32[512,24], sin=fp32[512,24], "
        "interleaved=False) cuda eager"
    )


# Inside torch.compile.


@pytest.mark.parametrize("form", ["dense", "head-major"])
def test_registered_op_passes_opcheck_and_agrees(form):
    q, k = tensors(2, 3, 4, 2, 8, form=form)
    qw, kw = weights(8)
    orders = (form == "head-major",) * 2
    args = (q, k, *rotary_tables(3, 8), True, None, qw, kw, 1e-6, 0.0, *orders)
    torch.library.opcheck(normalize_rotate.traced.forward, (*args, True, ""))
    dys = torch.randn_like(q), torch.randn_like(k)
    runs = []
    for call in (normalize_rotate, lambda *args: normalize_rotate.traced(args, "", True)):
        outputs = call(*args)
        runs.append((*outputs, *torch.autograd.grad(outputs, (q, k, qw, kw), dys)))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


def test_compiles_whole_with_any_length():
    @torch.compile(backend="eager", fullgraph=True)
    def step(q, k, qw, kw, cos, sin):
        q, k = rotary(q, k, cos, sin, q_weight=qw, k_weight=kw, impl="triton")
        return (q * q).sum() + (k * k * k).sum()

    for length in (4, 6):
        q, k = tensors(2, length, 2, 2, 8)
        qw, kw = weights(8)
        cos, sin = rotary_tables(length, 8)
        got = torch.autograd.grad(step(q, k, qw, kw, cos, sin), (q, k, qw, kw))
        a, b = reference(q, k, cos, sin, False, None, qw, kw, 1e-6, 0.0)
        want = torch.autograd.grad((a * a).sum() + (b * b * b).sum(), (q, k, qw, kw))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
