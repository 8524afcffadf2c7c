"""qkv_rotary: the Triton candidate, interpreted, against the float64 reference; laws, checks, compiled
graphs."""

import doctest
import importlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bakeoff.errors import Unsupported
from bakeoff.kernels.counter import launches
from bakeoff.kernels.variants import text
from bakeoff.ops import qkv_rotary
from bakeoff.ops.qkv_rotary import OP, tilings
from bakeoff.ops.qkv_rotary.plain import eager
from bakeoff.ops.qkv_rotary.reference import reference
from bakeoff.ops.qkv_rotary.triton import qkv_rotary as candidate
from bakeoff.ops.rotary import rotary, rotary_tables
from bakeoff.ops.rotary.kernels import Tiling
from bakeoff.ops.rotary.normed.tilings import BackwardTiling
from bakeoff.select import Case, TensorMeta
from bakeoff.select.contests.poison import Poison
from bakeoff.select.contests.verify import verify, yardsticks
from bakeoff.select.declare.key import key, layout

# Of a result's largest element: a few roundings in float32, and the one to the result's dtype.
BOUND = {torch.float32: 1e-6, torch.float16: 6e-4}
NAMES = ("q'", "k'", "v", "dqkv", "dq_weight", "dk_weight")
FORMS = ("dense", "part", "head-major", "last strided")
PLAIN = (None, None, 1e-6, 0.0)
"""No weights."""


def joint(B, T, H, HK, D, *, dtype=torch.float32, form="dense"):
    """A leaf qkv in the given memory layout."""
    N = H + 2 * HK
    made = {
        "dense": lambda: torch.randn(B, T, N, D),
        "part": lambda: torch.randn(B, T, N + 3, D)[:, :, 2:-1],
        "head-major": lambda: torch.randn(B, N, T, D).transpose(1, 2),
        "last strided": lambda: torch.randn(B, T, D, N).transpose(2, 3),
    }[form]()
    return made.to(dtype).detach().requires_grad_()


def scales(D, dtype=torch.float32):
    return tuple((1 + 0.5 * torch.randn(D)).to(dtype).requires_grad_() for _ in "qk")


def arriving(outputs):
    return tuple(torch.randn(y.shape).to(y.dtype) for y in outputs)


def run(fn, qkv, cos, sin, kv_heads, *rest, dys):
    """Results and gradients of fn(qkv, cos, sin, kv_heads, interleaved, ids, weights, eps, offset)."""
    outputs = fn(qkv, cos, sin, kv_heads, *rest)
    leaves = [t for t in (qkv, *rest[2:4]) if t is not None]
    return (*outputs, *torch.autograd.grad(outputs, leaves, dys))


def assert_native(qkv, cos, sin, kv_heads, interleaved=False, ids=None, qw=None, kw=None, eps=1e-6,
                  offset=0.0, *, fn=candidate, dys=None):  # fmt: skip
    """Results and gradients agree with float64, inputs stay as they were, and no fence is broken."""
    rest = (interleaved, ids, qw, kw, eps, offset)
    with torch.no_grad():
        dys = dys or arriving(reference(qkv, cos, sin, kv_heads, *rest))
    leaves = [t for t in (qkv, qw, kw) if t is not None]
    kept = [*leaves, cos, sin, *dys]
    before = [t.detach().clone() for t in kept]
    with Poison() as poison:
        got = run(fn, qkv, cos, sin, kv_heads, *rest, dys=dys)
    assert not poison.broken()
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = (interleaved, ids, *(wide[1:] or (None, None)), eps, offset)
    want = run(
        reference, wide[0], cos.double(), sin.double(), kv_heads, *exact, dys=[dy.double() for dy in dys]
    )
    for name, mine, truth in zip(NAMES, got, want, strict=False):
        assert mine.shape == truth.shape
        assert mine.dtype == {"dq_weight": qw, "dk_weight": kw}.get(name, qkv).dtype
        size = max(1.0, truth.abs().max().item())
        torch.testing.assert_close(
            mine.double(), truth, rtol=0, atol=BOUND[mine.dtype] * size, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert all(result.is_contiguous() for result in (*got[:2], got[3]))
    assert got[2].untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    return got


SMALL = candidate.bind(
    "forward(tile=64,heads=64,access=16) backward(tile=64,heads=64,access=16,programs=3,stages=2)"
)
"""The candidate in tiny tiles, of which programs of the backward with weights walk over several."""


def test_small_tiles_really_are_several():
    q, k, v = joint(1, 33, 12, 4, 10).split((12, 4, 4), 2)
    cut = BackwardTiling(64, 64, 16, 3, 2)
    given = {"gq": q, "gk": k, "gv": v}
    grid, numbers = tilings.normed_launch(
        q, k, given, (33, 5), 5, position_ids=0, interleaved=False, sums=True, sms=1, tiling=cut
    )
    assert grid == (3,)
    assert -(-33 // numbers["BLOCK_T"]) * 12 // numbers["BLOCK_H"] > 3
    grid, numbers = tilings.plain_launch(
        q.shape, 4, given, 4, (33, 5), 5, position_ids=0, interleaved=False, tiling=cut
    )
    assert grid == (-(-33 // numbers["BLOCK_T"]) * 20 // numbers["BLOCK_H"],)
    assert min(33 / numbers["BLOCK_T"], 4 / numbers["BLOCK_H"]) > 1


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("fn", [candidate, SMALL], ids=["default", "small"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize(
    "shape", [(2, 5, 4, 2, 16, 16), (1, 17, 3, 1, 11, 6), (3, 1, 6, 2, 9, 8), (1, 9, 1, 1, 2, 2)], ids=str
)
def test_results_and_gradients(shape, interleaved, fn, normed):
    B, T, H, HK, D, R = shape
    forms = itertools.cycle([(None, 0.0), ((T,), 1.0), ((B, T), 0.0)])
    for dtype, (ids, offset) in zip((torch.float32, torch.float16, torch.float16), forms, strict=False):
        cos, sin = rotary_tables(T + 3, R)
        position_ids = None if ids is None else torch.randint(T + 3, ids)
        weights = (*scales(D), 1e-6, offset) if normed else PLAIN
        assert_native(
            joint(B, T, H, HK, D, dtype=dtype), cos, sin, HK, interleaved, position_ids, *weights, fn=fn
        )


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("D", [16, 48, 96, 256])
def test_heads_of_models(D, normed):
    for dtype in (torch.float32, torch.float16):
        weights = scales(D) if normed else ()
        assert_native(joint(1, 7, 3, 3, D, dtype=dtype), *rotary_tables(7, D), None, False, None, *weights)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("form", FORMS)
def test_layouts_of_the_projection(form, normed):
    weights = scales(16) if normed else ()
    got = assert_native(joint(2, 6, 4, 2, 16, form=form), *rotary_tables(6, 12), 2, False, None, *weights)
    assert got[3].is_contiguous()


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("kind", ["expanded", "head-major", "one value", "last strided", "mixed", "part"])
def test_layouts_of_incoming_gradients(kind, normed):
    qkv = joint(2, 5, 4, 2, 8)
    make = {
        "expanded": lambda x: torch.randn(1, x.shape[1], 1, x.shape[3]).expand(x.shape),
        "head-major": lambda x: torch.randn(x.transpose(1, 2).shape).transpose(1, 2),
        "one value": lambda x: torch.ones(()).expand(x.shape),
        "last strided": lambda x: torch.randn(x.transpose(2, 3).shape).transpose(2, 3),
        "part": lambda x: torch.randn(2, 5, 9, 8)[:, :, 1 : 1 + x.shape[2]],
    }
    kinds = ("head-major", "part", "expanded") if kind == "mixed" else (kind,) * 3
    dys = tuple(make[k](x) for k, x in zip(kinds, qkv.split((4, 2, 2), 2), strict=True))
    assert_native(qkv, *rotary_tables(5, 8), 2, False, None, *(scales(8) if normed else ()), dys=dys)


def test_weights_of_other_dtypes_and_layouts():
    qkv, tables = joint(1, 5, 2, 1, 8, dtype=torch.float16), rotary_tables(5, 8)
    for qw, kw in (scales(8, torch.float16), (scales(8)[0], scales(8, torch.float16)[1])):
        assert_native(qkv, *tables, 1, False, None, qw, kw)
    strided = torch.randn(16)[::2].requires_grad_()
    assert_native(qkv, *tables, 1, False, None, strided, strided.detach().clone().requires_grad_())


@pytest.mark.parametrize("weights", [(), scales(8)], ids=["plain", "normed"])
def test_parts_that_begin_anywhere(weights):
    qkv = torch.randn(201)[1:].view(1, 5, 5, 8).requires_grad_()
    for fn in (candidate, eager):
        for _ in range(3):
            assert_native(qkv, *rotary_tables(5, 8), 1, False, None, *weights, fn=fn)


def test_no_eps_and_tiles_with_rows_to_spare():
    """Rows that a tile has too many are zeros: 0 / 0 of theirs must not reach the weights' gradients."""
    assert_native(joint(1, 5, 3, 1, 8), *rotary_tables(5, 6), 1, False, None, *scales(8), eps=0.0)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("shape", [(0, 3, 2, 1, 8), (2, 0, 2, 1, 8)], ids=str)
def test_empty_tensors(shape, normed):
    qkv, kv_heads = joint(*shape), shape[3]
    weights = (*scales(8), 1e-6, 0.0) if normed else PLAIN
    for fn in (candidate, eager, reference):
        outputs = fn(qkv, *rotary_tables(3, 8), kv_heads, False, None, *weights)
        leaves = [t for t in (qkv, *weights[:2]) if t is not None]
        gradients = torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])
        assert [g.shape for g in gradients] == [t.shape for t in leaves]
        assert all(torch.equal(g, torch.zeros(8)) for g in gradients[1:])


@pytest.mark.parametrize("fn", [candidate, eager, reference])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_an_id_outside_the_table_gives_nan_there_alone(fn, normed):
    qkv, (cos, sin) = joint(1, 5, 2, 1, 10), rotary_tables(7, 8)
    weights = (*scales(10), 1e-6, 0.0) if normed else PLAIN
    ids = torch.tensor([3, 7, -1, 6, 1 << 40])
    q, k, v = fn(qkv, cos, sin, 1, False, ids, *weights)
    good = torch.tensor([True, False, False, True, False])
    assert all(out[:, ~good, :, :8].isnan().all() and out[..., 8:].isfinite().all() for out in (q, k))
    assert v.isfinite().all()
    (dqkv,) = torch.autograd.grad([out[:, good].sum() for out in (q, k, v)], qkv)
    assert dqkv[:, good].isfinite().all()
    assert dqkv[:, ~good][:, :, 3:].isfinite().all()


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_what_does_not_arrive_is_zeros(normed):
    """Of some results alone, the gradient is zero where the others' parts stand."""
    qkv, tables = joint(2, 3, 4, 2, 8), rotary_tables(3, 8)
    weights = (*scales(8), 1e-6, 0.0) if normed else PLAIN
    rest = (2, False, None, *weights)
    for fn in (candidate, SMALL):
        for some in [*itertools.combinations(range(3), 1), *itertools.combinations(range(3), 2)]:
            outputs = fn(qkv, *tables, *rest)
            dys = arriving(outputs)
            leaves = [t for t in (qkv, *weights[:2]) if t is not None]
            with Poison() as poison:
                got = torch.autograd.grad(
                    [outputs[i] for i in some], leaves, [dys[i] for i in some], allow_unused=True
                )
            assert not poison.broken()
            outputs = reference(qkv, *tables, *rest)
            want = torch.autograd.grad(
                [outputs[i] for i in some], leaves, [dys[i] for i in some], allow_unused=True
            )
            for mine, truth in zip(got, want, strict=True):
                assert (mine is None) == (truth is None)
                if mine is not None:
                    torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-5)


def test_only_what_is_wanted_is_computed():
    qkv, tables, (qw, kw) = joint(2, 3, 4, 2, 8), rotary_tables(3, 8), scales(8)
    full = candidate(qkv, *tables, 2, False, None, qw, kw, 1e-6, 0.0)
    dys = arriving(full)
    want = dict(zip(["qkv", "qw", "kw"], torch.autograd.grad(full, (qkv, qw, kw), dys), strict=True))
    for wanted in (["qkv"], ["qw"], ["kw"], ["qkv", "kw"], ["qw", "kw"]):
        leaves = {name: x.detach().requires_grad_(name in wanted)
                  for name, x in {"qkv": qkv, "qw": qw, "kw": kw}.items()}  # fmt: skip
        outputs = candidate(leaves["qkv"], *tables, 2, False, None, leaves["qw"], leaves["kw"], 1e-6, 0.0)
        assert [y.requires_grad for y in outputs] == [
            bool({"qkv", name} & {*wanted}) for name in ("qw", "kw", "qkv")
        ]
        used = [(y, dy) for y, dy in zip(outputs, dys, strict=True) if y.requires_grad]
        got = torch.autograd.grad([y for y, _ in used], [leaves[n] for n in wanted], [dy for _, dy in used])
        assert all(torch.equal(a, want[name]) for a, name in zip(got, wanted, strict=True))


def test_launches():
    """One forward; one back, two with weights. Values take none."""
    qkv, tables = joint(2, 9, 4, 2, 8), rotary_tables(9, 8)
    for weights, back in ((PLAIN, 1), ((*scales(8), 1e-6, 0.0), 2)):
        before = launches()
        outputs = SMALL(qkv, *tables, 2, False, None, *weights)
        assert launches() == before + 1
        leaves = [t for t in (qkv, *weights[:2]) if t is not None]
        torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])
        assert launches() == before + 1 + back


def test_a_second_derivative_is_refused():
    qkv, tables = joint(1, 3, 2, 1, 8), rotary_tables(3, 8)
    q, _, _ = candidate(qkv, *tables, 1, False, None, *PLAIN)
    dy = torch.ones_like(q).requires_grad_()
    (dqkv,) = torch.autograd.grad(q, qkv, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="qkv_rotary's kernels can't be differentiated twice"):
        torch.autograd.grad(dqkv.sum(), dy)


def test_values_share_the_projection_s_memory_and_nobody_may_write_to_them():
    for fn in (candidate, eager, reference):
        qkv = joint(1, 3, 2, 1, 8) * 1
        _, _, v = fn(qkv, *rotary_tables(3, 8), 1, False, None, *PLAIN)
        assert v.data_ptr() == qkv[:, :, 3:].data_ptr()
        with pytest.raises(RuntimeError, match="is a view"):
            v.add_(1)


@settings(max_examples=settings.default.max_examples // 5)
@given(
    B=st.integers(1, 2), T=st.integers(1, 9), H=st.integers(1, 6), HK=st.integers(1, 4), D=st.integers(2, 21),
    half=st.integers(1, 10), form=st.sampled_from(FORMS), interleaved=st.booleans(),
    ids=st.sampled_from([None, 1, 2]), dtype=st.sampled_from([torch.float32, torch.float16]),
    offset=st.sampled_from([None, 0.0, 1.0]), tile=st.sampled_from([64, 256, 4096]),
    programs=st.integers(1, 3),
)  # fmt: skip
def test_any_shape_and_stride(B, T, H, HK, D, half, form, interleaved, ids, dtype, offset, tile, programs):
    cos, sin = rotary_tables(T + 2, 2 * min(half, D // 2))
    position_ids = torch.randint(T + 2, (T,) if ids == 1 else (B, T)) if ids else None
    fn = candidate.bind(text({
        "forward": Tiling(tile, 64, 16), "backward": BackwardTiling(tile, 64, 16, programs, 1),
    }))  # fmt: skip
    weights = PLAIN if offset is None else (*scales(D), 1e-3, offset)
    qkv = joint(B, T, H, HK, D, dtype=dtype, form=form)
    assert_native(qkv, cos, sin, HK, interleaved, position_ids, *weights, fn=fn)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(
    "some", [slice(1, 3), pytest.param(slice(3, None), marks=pytest.mark.exhaustive)], ids=["first", "others"]
)
def test_variants_give_the_same(some, normed):
    """To the bit but for the order of sums."""
    qkv, tables = joint(2, 37, 12, 4, 48), rotary_tables(37, 20)
    weights = (*scales(48), 1e-6, 0.0) if normed else PLAIN
    with torch.no_grad():
        dys = arriving(candidate(qkv, *tables, 4, False, None, *weights))
    case = OP.case((qkv, *tables, 4, False, None, *weights))
    want = run(candidate, qkv, *tables, 4, False, None, *weights, dys=dys)
    for axis, found in candidate.variants(case).items():
        for tiling in found[some]:
            bound = candidate.bind(text({axis: tiling}))
            got = run(bound, qkv, *tables, 4, False, None, *weights, dys=dys)
            for mine, theirs in zip(got, want, strict=True):
                if normed:
                    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
                else:
                    assert torch.equal(mine, theirs)


# The op's laws, of every implementation that runs here.

IMPLEMENTATIONS = pytest.mark.parametrize("fn", [candidate, eager, reference])


@IMPLEMENTATIONS
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_equals_a_split_and_rotary(fn, normed):
    qkv, tables = joint(2, 5, 4, 2, 12), rotary_tables(5, 8)
    weights = (*scales(12), 1e-6, 0.5) if normed else PLAIN
    with torch.no_grad():
        dys = arriving(reference(qkv, *tables, 2, False, None, *weights))
    got = run(fn, qkv, *tables, 2, False, None, *weights, dys=dys)
    q, k, v = qkv.split((4, 2, 2), 2)
    named = {"q_weight": weights[0], "k_weight": weights[1], "eps": weights[2], "offset": weights[3]}
    outputs = (*rotary(q, k, *tables, **named, impl="eager"), v)
    leaves = [t for t in (qkv, *weights[:2]) if t is not None]
    want = (*outputs, *torch.autograd.grad(outputs, leaves, dys))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@IMPLEMENTATIONS
def test_heads_are_interchangeable_within_their_part_and_positions_are_not(fn):
    qkv, tables = joint(2, 6, 4, 2, 8), rotary_tables(6, 8)
    base = fn(qkv, *tables, 2, False, None, *PLAIN)
    order, times = torch.tensor([2, 0, 3, 1, 5, 4, 7, 6]), torch.tensor([3, 0, 1, 2, 5, 4])
    moved = fn(qkv[:, :, order], *tables, 2, False, None, *PLAIN)
    for mine, theirs, inside in zip(moved, base, (order[:4], order[4:6] - 4, order[6:] - 6), strict=True):
        assert torch.equal(mine, theirs[:, :, inside])
    late = fn(qkv[:, times], *tables, 2, False, None, *PLAIN)
    assert all((a - b[:, times]).abs().amax(-1).min() > 1e-4 for a, b in zip(late[:2], base, strict=False))
    assert torch.equal(late[2], base[2][:, times])


@pytest.mark.parametrize("fn", [reference, eager])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradcheck(fn, interleaved):
    qkv = torch.randn(2, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    qw, kw = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in "qk")
    cos, sin = (torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(
        lambda x, c, s, qw, kw: fn(x, c, s, 1, interleaved, None, qw, kw, 1e-3, 0.5), (qkv, cos, sin, qw, kw)
    )
    assert torch.autograd.gradcheck(lambda x: fn(x, cos, sin, 1, interleaved, None, *PLAIN), (qkv,))


# The declaration.


def shrunk(case):
    """The case on the CPU: few tokens and heads, the same head size, options and layout; fp16 for bf16."""
    B, T, _, D = case.qkv.shape
    B, T, K = min(B, 2), min(T, 5), min(case.kv_heads, 2)
    heads = min(case.qkv.shape[2] - 2 * case.kv_heads, 4) + 2 * K

    def dtype(meta):
        return torch.float16 if meta.dtype == torch.bfloat16 else meta.dtype

    row = heads * D * (1 if case.qkv.is_contiguous else 2)
    qkv = TensorMeta((B, T, heads, D), dtype(case.qkv), (T * row, row, D, 1), case.qkv.requires_grad)
    table = TensorMeta.dense((T, case.cos.shape[1]), dtype(case.cos))
    ids = case.position_ids and TensorMeta.dense((B, T), case.position_ids.dtype)
    weights = {
        name: meta and TensorMeta.dense(meta.shape, dtype(meta), grad=meta.requires_grad)
        for name, meta in (("q_weight", case.q_weight), ("k_weight", case.k_weight))
    }
    small = case.replace(qkv=qkv, cos=table, sin=table, kv_heads=K, position_ids=ids, **weights)
    return Case(small.args, "cpu", case.name)


DISTINCT = {str(shrunk(case).args): case for case in OP.cases()}.values()


@pytest.mark.parametrize("case", DISTINCT, ids=lambda case: case.name)
def test_the_grid_passes_the_contest_verification(case):
    small = shrunk(case)
    OP.check(small)
    triton = OP.candidate("triton")
    assert triton.reasons(small) == []
    errors, deterministic = verify(OP, triton, yardsticks(OP, small))
    assert deterministic
    assert errors.rms < 2 * torch.finfo(small.qkv.dtype).eps


@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: case.name)
def test_declaration_of_the_grid(case):
    OP.check(case)
    bucket = OP.bucket(case)
    OP.check(bucket)
    assert OP.bucket(bucket) == bucket
    assert layout(bucket.qkv, 2) == layout(case.qkv, 2)
    B, T, heads, D = case.qkv.shape
    cost, forward = OP.cost(case), OP.cost(case.without_grad())
    turned = B * T * (heads - case.kv_heads) * D * case.qkv.dtype.itemsize
    assert 2 * turned < forward.bytes < 2.4 * turned
    if case.qkv.requires_grad:
        passes = 2 * turned + 2 * case.qkv.nbytes + (turned if case.q_weight is not None else 0)
        assert passes < cost.bytes < 1.2 * passes
    assert OP.heuristic(case, "eager") == OP.heuristic(case, "graph") == "triton"
    assert OP.heuristic(case, "compiled") == "eager"


def test_keys():
    case = next(case for case in OP.cases() if case.name == "llm-med")
    assert (
        key(OP, case, "eager")
        == key(OP, case.replace(kv_heads=None), "eager")
        == (
            "qkv_rotary(qkv=bf16[48,512,24,48]', cos=fp32[512,24], sin=fp32[512,24], kv_heads=8, "
            "interleaved=False) cuda eager"
        )
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"qkv": torch.zeros(2, 3, 64)}, ValueError, r"expected \[B, T, N, D\].*torch.unflatten\(qkv, -1"),
        ({"qkv": torch.zeros(2, 3, 8, 8, dtype=torch.int64)}, TypeError, "qkv is torch.int64; convert it"),
        ({"qkv": torch.zeros(2, 3, 8, 8), "kv_heads": None}, ValueError, "8 heads a token, no multiple of 3"),
        ({"kv_heads": 4}, ValueError, "kv_heads = 4 keys and as many values leave none for queries"),
        ({"kv_heads": 0}, ValueError, "kv_heads must be >= 1, got 0"),
        ({"kv_heads": 1.5}, ValueError, "kv_heads must be a whole number, got 1.5"),
        ({"kv_heads": "2"}, ValueError, "kv_heads must be a finite number"),
        ({"cos": torch.zeros(3, 8), "sin": torch.zeros(3, 8)}, ValueError, r"must be cut: cos\[:, :4\]"),
        ({"cos": torch.zeros(2, 4), "sin": torch.zeros(2, 4)}, ValueError, "qkv_rotary: cos has 2 rows for"),
        ({"position_ids": torch.zeros(1, 3, dtype=torch.int64)}, ValueError, r"position_ids\[0\]"),
        ({"interleaved": 1}, TypeError, "interleaved is 1"),
        ({"q_weight": torch.ones(8)}, ValueError, "qkv_rotary: q_weight is given and k_weight is None"),
        ({"q_weight": torch.ones(7), "k_weight": torch.ones(7)}, ValueError, r"\[D\] with D = 8"),
        ({"offset": 1.0}, ValueError, "offset=1.0 is added to weights"),
        ({"eps": -1.0}, ValueError, "eps must be >= 0, got -1.0"),
    ],
)
def test_bad_arguments_name_the_fix(change, error, message):
    cos, sin = rotary_tables(3, 8)
    call = {"qkv": torch.zeros(2, 3, 8, 8), "cos": cos, "sin": sin, "kv_heads": 2} | change
    qkv, cos, sin = (call.pop(name) for name in ("qkv", "cos", "sin"))
    with pytest.raises(error, match=message):
        qkv_rotary(qkv, cos, sin, **call)


def test_what_triton_leaves_to_eager():
    qkv, (cos, sin) = joint(1, 3, 2, 1, 8), rotary_tables(3, 8)
    with pytest.raises(Unsupported, match="gradient of cos and sin"):
        qkv_rotary(qkv, cos.requires_grad_(), sin, kv_heads=1, impl="triton")
    q, _, _ = qkv_rotary(qkv, cos, sin, kv_heads=1)
    assert torch.autograd.grad(q.sum(), cos)[0].abs().sum() > 0
    with pytest.raises(Unsupported, match="float64"):
        qkv_rotary(qkv.double(), cos.detach(), sin, kv_heads=1, impl="triton")


def test_documented_examples():
    found = doctest.testmod(importlib.import_module("bakeoff.ops.qkv_rotary"))
    assert found.attempted
    assert not found.failed


# Inside torch.compile.


@pytest.mark.parametrize(
    ("form", "normed"),
    [
        ("dense", False),
        ("part", True),
        pytest.param("part", False, marks=pytest.mark.exhaustive),
        pytest.param("dense", True, marks=pytest.mark.exhaustive),
    ],
)
def test_registered_op_passes_opcheck(form, normed):
    weights = scales(8) if normed else (None, None)
    for ids in (None, torch.zeros(2, 3, dtype=torch.int64)):
        args = (joint(2, 3, 4, 2, 8, form=form), *rotary_tables(3, 8), 2, True, ids, *weights, 1e-6, 0.0)
        torch.library.opcheck(candidate.traced.forward, (*args, True, ""))


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_what_torch_compile_calls_agrees(normed):
    """Results, gradients, and gradients of some results, to the bit and in the same layout."""
    qkv, tables = joint(2, 3, 4, 2, 8), rotary_tables(3, 8)
    weights = (*scales(8), 1e-6, 0.0) if normed else PLAIN
    leaves = [t for t in (qkv, *weights[:2]) if t is not None]
    with torch.no_grad():
        dys = arriving(candidate(qkv, *tables, 2, False, None, *weights))
    runs = []
    for call in (candidate, lambda *args: candidate.traced(args, "", True)):
        outputs = call(qkv, *tables, 2, False, None, *weights)
        every = torch.autograd.grad(outputs, leaves, dys, retain_graph=True)
        values = torch.autograd.grad(outputs[2], qkv, dys[2], retain_graph=True)
        keys = torch.autograd.grad(outputs[1], qkv, dys[1])
        runs.append((*outputs, *every, *values, *keys))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
    outputs = candidate.traced((qkv, *tables, 2, False, None, *weights), "", True)
    (found,) = torch.autograd.grad(outputs[0], qkv, dys[0].requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="can't be differentiated twice"):
        torch.autograd.grad(found.sum(), dys[0])


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_whole_with_any_length(backend, normed):
    @torch.compile(backend=backend, fullgraph=True)
    def step(qkv, qw, kw, cos, sin):
        # A projection's gradient, as in a model: qkv is no leaf.
        q, k, v = qkv_rotary(qkv * 2, cos, sin, kv_heads=2, q_weight=qw, k_weight=kw, impl="triton")
        return (q * q).sum() + (k * k * k).sum() + (v**4).sum()

    torch.compiler.reset()
    for length in (4, 6, 9):
        qkv, (cos, sin) = joint(2, length, 4, 2, 8), rotary_tables(length, 8)
        qw, kw = scales(8) if normed else (None, None)
        leaves = [t for t in (qkv, qw, kw) if t is not None]
        got = torch.autograd.grad(step(qkv, qw, kw, cos, sin), leaves)
        q, k, v = reference(qkv * 2, cos, sin, 2, False, None, qw, kw, 1e-6, 0.0)
        want = torch.autograd.grad((q * q).sum() + (k * k * k).sum() + (v**4).sum(), leaves)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_the_compiled_graph_holds_the_ops_whole_and_takes_v_where_it_stands():
    graphs = []

    def keep(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    from torch._dynamo.backends.common import aot_autograd

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    call = torch.compile(
        lambda x, c, s: qkv_rotary(x * 2, c, s, kv_heads=2, impl="triton"), backend=backend, fullgraph=True
    )
    outputs = call(joint(2, 3, 4, 2, 8), *rotary_tables(3, 8))
    torch.autograd.backward(outputs, arriving(outputs))
    forward, backward = graphs
    assert sum("bakeoff.qkv_rotary_forward" in target for target in forward) == 1
    assert sum("bakeoff.qkv_rotary_backward" in target for target in backward) == 1
    copies = ("aten.cat", "aten.add", "slice_backward", "clone")
    assert not any(word in target for target in forward + backward for word in copies)
