"""dilated_attention in plain PyTorch: the definition against a loop over pairs, laws, documents, refusals."""

import doctest
import itertools
import math
import sys
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

from bakeoff.attention_backends import rows
from bakeoff.attention_backends.rows import BACKENDS
from bakeoff.errors import Unsupported
from bakeoff.ops import dilated_attention
from bakeoff.ops.dilated_attention import OP, branches, phase_table, plain
from bakeoff.ops.dilated_attention import op as declaration
from bakeoff.ops.dilated_attention import reference as definition
from bakeoff.ops.dilated_attention.reference import dilated_attention as reference
from bakeoff.ops.dilated_attention.reference import pattern_of

Args = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*of all tokens are selected by no head")
        yield


def drawn(T: int, H: int = 4, kv: int = 2, D: int = 8, B: int = 1) -> Args:
    """q, k and v in double precision, with gradients."""
    generator = torch.Generator().manual_seed(T)
    shapes = [(B, T, H, D), (B, T, kv, D), (B, T, kv, D)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return tuple(x.requires_grad_() for x in tensors)  # type: ignore[return-value]


@pytest.mark.parametrize("causal", [False, True])
def test_what_lies_outside_of_documents_may_be_nan(causal: bool) -> None:
    borders, inside = torch.tensor([0, 5, 9]), slice(0, 9)
    found = []
    for outside in (0.0, math.nan):
        inputs = drawn(12)
        with torch.no_grad():
            for x in inputs:
                x[:, 9:] = outside
        y = dilated_attention(*inputs, (4, 9), (1, 2), causal=causal, cu_seqlens=borders)
        assert isinstance(y, Tensor)
        dy = torch.ones_like(y)
        dy[:, 9:] = outside
        found.append([y, *torch.autograd.grad(y, inputs, dy)])
    for clean, mine in zip(*found, strict=True):
        assert torch.equal(clean[:, inside], mine[:, inside])
        assert not mine[:, 9:].any()


@pytest.mark.parametrize(("B", "T", "H"), [(0, 5, 2), (2, 0, 2), (2, 5, 0)], ids=str)
def test_no_rows_have_no_gradients(B: int, T: int, H: int) -> None:
    inputs = drawn(T, H, 2, 8, B)
    y = dilated_attention(*inputs, (2, 4), (1, 2))
    assert isinstance(y, Tensor)
    gradients = torch.autograd.grad(y, inputs, torch.ones_like(y))
    assert all(torch.equal(grad, torch.zeros_like(x)) for grad, x in zip(gradients, inputs, strict=True))


def results(found: Any, inputs: Args) -> list[Tensor]:
    """y, lse and the gradients, given the same cotangents each time; unselected rows' lse counts for none."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for out in found:
        cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        total = total + (torch.where(torch.isfinite(out), out, 0.0) * cotangent).sum()
    return [*[out.detach() for out in found], *torch.autograd.grad(total, inputs)]


def by_pairs(
    q: Tensor, k: Tensor, v: Tensor, segments: Any, rates: Any, causal: bool, detached: bool, phases: Any
) -> tuple[Tensor, Tensor]:
    """The docstring's words, pair by pair: a softmax in each branch, mixed by their log-sum-exp."""
    _, T, H, D = q.shape
    G = H // k.shape[2]
    rows = []
    for h in range(H):
        kv = h // G
        for t in range(T):
            found = []
            for w, r, phase in zip(segments, rates, phases, strict=True):
                if t % w % r != phase[kv]:
                    continue
                end = t + 1 if causal else T
                keys = [u for u in range(end) if u // w == t // w and u % w % r == phase[kv]]
                scores = k[0, keys, kv] @ q[0, t, h] / math.sqrt(D)
                found.append((scores.logsumexp(0), scores.softmax(0) @ v[0, keys, kv]))
            if not found:
                rows.append((torch.zeros(D, dtype=q.dtype), torch.tensor(-math.inf, dtype=q.dtype)))
                continue
            lse = torch.stack([part[0] for part in found])
            weights = lse.detach().softmax(0) if detached else lse.softmax(0)
            rows.append((weights @ torch.stack([part[1] for part in found]), lse.logsumexp(0)))
    y = torch.stack([row[0] for row in rows]).view(1, H, T, D).transpose(1, 2)
    return y, torch.stack([row[1] for row in rows]).view(1, H, T)


PATTERNS = [((4, 8), (1, 2)), ((5, 9), (2, 3)), ((6,), (1,)), ((3, 7, 40), (1, 2, 4))]


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("segments", "rates"), PATTERNS)
def test_definition_is_what_its_words_say(segments: Any, rates: Any, causal: bool, detached: bool) -> None:
    inputs = drawn(19)
    pattern = pattern_of(segments, rates, "mod", 2)
    combine_grad = "detached" if detached else "exact"
    want = results(by_pairs(*inputs, segments, rates, causal, detached, pattern.phases), inputs)
    args = (segments, rates, causal, "mod", combine_grad, None, None, True)
    torch.testing.assert_close(results(reference(*inputs, *args), inputs), want)
    text = (",".join(map(str, segments)), ",".join(map(str, rates)))
    torch.testing.assert_close(results(plain.branches("math", *inputs, *text, *args[2:]), inputs), want)


def test_gradients_of_the_definition_by_differences() -> None:
    inputs = drawn(9, D=3)
    args = ((4, 8), (2, 2), True, "mod", "exact", None, None, False)
    assert torch.autograd.gradcheck(lambda *x: reference(*x, *args), inputs)


@pytest.mark.parametrize("stretches", [0, 100], ids=["all pairs", "branches"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("combine_grad", ["exact", "detached"])
@pytest.mark.parametrize(
    ("segments", "rates", "phase"),
    [("6,20", "1,3", "mod"), ("5,12", "2,4", "block"), ("4,9,50", "1,2,5", "0,0;1,0;4,2")],
)
def test_pieces_of_long_sequences_are_the_whole(
    segments: str, rates: str, phase: str, combine_grad: str, causal: bool, stretches: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    inputs = drawn(45)
    args = (segments, rates, causal, phase, combine_grad, None, None, True)
    want = results(reference(*inputs, *args), inputs)
    monkeypatch.setattr(definition, "_DENSE", 200)
    monkeypatch.setattr(definition, "_STRETCHES", stretches)
    monkeypatch.setattr(rows, "_CHUNK", 30)
    torch.testing.assert_close(results(reference(*inputs, *args), inputs), want)
    torch.testing.assert_close(results(plain.branches("math", *inputs, *args), inputs), want)


def test_fake_tensors_before_and_after_real_ones() -> None:
    """What is made once must not be a tensor of a mode, nor meet one."""
    inputs, phase = drawn(11), ((0, 0), (1, 0), (2, 3))  # a pattern of no other test
    args = ((3, 6, 11), (1, 2, 5))
    for _ in range(2):
        with FakeTensorMode() as mode:
            fake = dilated_attention(*(mode.from_tensor(x) for x in inputs), *args, phase=phase)
        real = dilated_attention(*inputs, *args, phase=phase)
        assert isinstance(fake, FakeTensor)
        assert not isinstance(real, FakeTensor)
        assert fake.shape == real.shape


@pytest.mark.parametrize("T", [0, 9])
@pytest.mark.parametrize("causal", [False, True])
def test_borders_of_no_document(T: int, causal: bool) -> None:
    inputs = drawn(T)
    args = ("4,12", "1,3", causal, "mod", "exact", torch.tensor([4]), None, True)
    for fn in (reference, partial(plain.branches, "math")):
        y, lse, *gradients = results(fn(*inputs, *args), inputs)
        assert (lse == -math.inf).all()
        assert not any(x.any() for x in (y, *gradients))


@pytest.mark.parametrize("combine_grad", ["exact", "detached"])
@pytest.mark.parametrize("causal", [False, True])
def test_documents_are_sequences_of_their_own(causal: bool, combine_grad: str) -> None:
    inputs, edges = drawn(37), [2, 9, 9, 30, 36]
    args = ("4,12", "1,3", causal, "mod", combine_grad)
    cu = torch.tensor(edges, dtype=torch.int32)
    y, lse = torch.zeros(1, 37, 4, 8, dtype=torch.float64), torch.full((1, 4, 37), -math.inf).double()
    for a, b in itertools.pairwise(edges):
        y[:, a:b], lse[..., a:b] = reference(*[x[:, a:b] for x in inputs], *args, None, None, True)
    want = results((y, lse), inputs)
    torch.testing.assert_close(results(reference(*inputs, *args, cu, None, True), inputs), want)
    torch.testing.assert_close(results(plain.branches("math", *inputs, *args, cu, None, True), inputs), want)


def test_one_long_segment_of_rate_1_is_attention() -> None:
    q, k, v = drawn(23)
    for causal in (False, True):
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
        ).transpose(1, 2)
        torch.testing.assert_close(dilated_attention(q, k, v, (64,), (1,), causal=causal), want)


def test_segments_may_be_swapped() -> None:
    """Whole segments of the longest branch don't know of each other."""
    q, k, v = drawn(32)
    order = torch.arange(32).view(4, 8)[[2, 0, 3, 1]].flatten()
    y = dilated_attention(q, k, v, (4, 8), (1, 2))
    moved = dilated_attention(*(x[:, order] for x in (q, k, v)), (4, 8), (1, 2))
    torch.testing.assert_close(moved, y[:, order])


def test_heads_of_equal_phase_may_be_swapped() -> None:
    q, k, v = drawn(20, H=4, kv=4)
    order = [2, 1, 0, 3]  # phases 0 1 0 1
    y = dilated_attention(q, k, v, (4, 8), (1, 2))
    torch.testing.assert_close(
        dilated_attention(*(x[:, :, order] for x in (q, k, v)), (4, 8), (1, 2)), y[:, :, order]
    )


@pytest.mark.parametrize("T", [40, 1200])
def test_the_future_changes_nothing(T: int) -> None:
    q, k, v = (x.detach().float() for x in drawn(T))
    before = dilated_attention(q, k, v, (8, 32), (1, 4), causal=True)
    cut = T // 2 + 1
    k[:, cut:], v[:, cut:], q[:, cut:] = 50.0, -50.0, 3.0
    after = dilated_attention(q, k, v, (8, 32), (1, 4), causal=True)
    assert torch.equal(before[:, :cut], after[:, :cut])


def test_a_row_that_no_branch_selects_is_nothing() -> None:
    q, k, v = inputs = drawn(16, H=1, kv=1)
    y, lse = dilated_attention(q, k, v, (8,), (4,), return_lse=True)  # phase 0: tokens 0, 4, 8, 12
    rest = torch.arange(16) % 4 != 0
    assert (y[:, rest] == 0).all()
    assert (lse[..., rest] == -math.inf).all()
    assert torch.isfinite(lse[..., ~rest]).all()
    for slope in torch.autograd.grad(y.sum(), inputs):
        assert (slope[:, rest] == 0).all()
        assert torch.isfinite(slope).all()


def test_blocks_of_heads_share_a_phase() -> None:
    assert pattern_of("8", "2", "block", 4).phases == ((0, 0, 1, 1),)
    assert pattern_of("8", "4", "block", 6).phases == ((0, 0, 1, 1, 2, 2),)
    assert pattern_of("8", "4", "mod", 6).phases == ((0, 1, 2, 3, 0, 1),)


def test_a_table_of_phases() -> None:
    q, k, v = drawn(20)
    same = dilated_attention(q, k, v, (4, 8), (1, 4), phase=phase_table((1, 4), 2))
    torch.testing.assert_close(same, dilated_attention(q, k, v, (4, 8), (1, 4)))
    other = dilated_attention(q, k, v, (4, 8), (1, 4), phase=phase_table((1, 4), 2, layer=1))
    assert not torch.allclose(same, other)
    assert {row for layer in range(2) for row in phase_table((4,), 2, layer)[0]} == {0, 1, 2, 3}


@pytest.mark.parametrize("T", [0, 1, 3])
def test_short_sequences(T: int) -> None:
    inputs = drawn(T)
    y = dilated_attention(*inputs, (4, 8), (1, 2), causal=True)
    slopes = torch.autograd.grad(y.sum(), inputs)
    assert y.shape == (1, T, 4, 8)
    if T == 1:
        torch.testing.assert_close(y[:, 0], inputs[2][:, 0].repeat_interleave(2, 1))
    assert all(torch.isfinite(x).all() for x in slopes)


def test_compiled_code_around_the_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formulas that torch.compile gets, with matrix products in place of a GPU's kernels."""
    monkeypatch.setitem(BACKENDS, "flash", BACKENDS["math"])
    for name, formula in (("_collected", "_collect"), ("_mixed", "_mix"), ("_added", "_add")):
        monkeypatch.setattr(branches, name, getattr(branches, formula))
    inputs = tuple(x.detach().float().requires_grad_() for x in drawn(32, B=2))
    for combine_grad in ("exact", "detached"):
        for segments, rates in (("8,16,64", "1,2,4"), ("8,16", "2,2")):
            args = (segments, rates, True, "mod", combine_grad, None, None, False)
            want = results([reference(*inputs, *args)], inputs)  # type: ignore[arg-type]
            got = results([branches.flash(*inputs, *args)], inputs)  # type: ignore[arg-type]
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_long_sequences_inside_torch_compile() -> None:
    """The branches are one op there, whatever the length."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return dilated_attention(q, k, v, (64, 600), (1, 2), causal=True)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for T in (600, 700):
        inputs = tuple(x.detach().float().requires_grad_() for x in drawn(T))
        want = dilated_attention(*inputs, (64, 600), (1, 2), causal=True)
        torch.testing.assert_close(results([compiled(*inputs)], inputs), results([want], inputs))  # type: ignore[arg-type]


@pytest.mark.parametrize("whole", [False, True], ids=["eager", "in torch.compile"])
def test_autocast_leaves_its_numbers_alone(whole: bool) -> None:
    """Scores and sums stay in float32."""
    inputs = tuple(x.detach().bfloat16().requires_grad_() for x in drawn(40))

    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return dilated_attention(q, k, v, (8, 40), (1, 2), causal=True)

    torch.compiler.reset()
    call = torch.compile(model, backend="eager", fullgraph=True) if whole else model
    want = results([call(*inputs)], inputs)  # type: ignore[arg-type]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = call(*inputs)
    torch.testing.assert_close(results([y], inputs), want, rtol=0, atol=0)  # type: ignore[arg-type]


def test_unreachable_tokens_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declaration, "_warned", set())
    q, k, v = drawn(22)  # a kind of call that no other test has made: known ones are not checked again
    with pytest.warns(UserWarning, match=r"50\.0% .* rate 4 .*phase=phase_table\(rates, 2, layer=layer\)"):
        dilated_attention(q, k, v, (4, 8), (1, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dilated_attention(*drawn(23), (4, 8), (1, 4))
        dilated_attention(q, k, v, (4, 8), (1, 2))
        dilated_attention(q, k, v, (4, 8), (1, 4), phase=phase_table((1, 4), 2, layer=1))


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"segments": (8,)}, ValueError, "1 segments and 2 rates"),
    ({"segments": (), "rates": ()}, ValueError, "|pass tuples"),
    ({"segments": (0, 8)}, ValueError, "at least 1"),
    ({"rates": (0, 1)}, ValueError, "at least 1"),
    ({"rates": (-1, 2)}, ValueError, "at least 1"),
    ({"segments": (8, 8)}, ValueError, "segments increase"),
    ({"segments": (8, 4)}, ValueError, "segments increase"),
    ({"rates": (2, 1)}, ValueError, "must not decrease"),
    ({"rates": (1, 9)}, ValueError, "rate 9 is above its segment 8"),
    ({"segments": (4, 2**31)}, ValueError, "at most 2147483647 .* as long as the row is the row"),
    ({"segments": (4, 8.5)}, TypeError, "tuples of whole numbers"),
    ({"segments": None}, TypeError, "None, not a tuple.*pass tuples of whole numbers"),
    ({"rates": 2}, TypeError, "2, not a tuple.*pass tuples of whole numbers"),
    ({"phase": None}, ValueError, "None, not a table.*expected 'mod', 'block' or a table"),
    ({"phase": (0, 1)}, ValueError, "'mod', 'block' or a table"),
    ({"phase": "odd"}, ValueError, "'mod', 'block' or a table"),
    ({"phase": [[0, 0]]}, ValueError, "2 rows"),
    ({"phase": [[0, 0], [0, 2]]}, ValueError, r"must lie in 0\.\.1"),
    ({"combine_grad": "none"}, ValueError, "exact, detached"),
    ({"causal": 1}, TypeError, "True or False"),
    ({"scale": 0.0}, ValueError, "above 0"),
    ({"scale": "0.5"}, TypeError, "scale is '0.5', expected a number or None"),
    ({"cu_seqlens": torch.tensor([0.0, 4.0])}, TypeError, "int32 or int64"),
]


@pytest.mark.parametrize(("changed", "error", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_refusals_carry_the_fix(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"segments": (4, 8), "rates": (1, 2)} | changed
    with pytest.raises(error if "|" not in message else (error, TypeError), match=message.lstrip("|")):
        dilated_attention(*drawn(8), **given)


@pytest.mark.parametrize("scale", [-1.0, math.nan])
def test_every_scale_is_looked_at(scale: float) -> None:
    """Also in calls of a kind that has been decided, which a scale is no part of."""
    inputs = drawn(8)
    for _ in range(3):
        dilated_attention(*inputs, (4,), (1,), scale=0.5)
    with pytest.raises(ValueError, match="dilated_attention: scale must be above 0 and finite"):
        dilated_attention(*inputs, (4,), (1,), scale=scale)


def test_refusals_of_shapes() -> None:
    q, k, v = drawn(8)
    with pytest.raises(ValueError, match="3 heads of q and 2 of k"):
        dilated_attention(q[:, :, :3], k, v, (4,), (1,))
    with pytest.raises(ValueError, match="k has shape"):
        dilated_attention(q, k[:, :5], v[:, :5], (4,), (1,))
    two = [x.expand(2, -1, -1, -1) for x in (q, k, v)]
    with pytest.raises(ValueError, match="one row"):
        dilated_attention(*two, (4,), (1,), cu_seqlens=torch.tensor([0, 8]))
    with pytest.raises(Unsupported, match="runs on CUDA"):
        dilated_attention(q, k, v, (4,), (1,), impl="cudnn")


def test_pairs_are_counted() -> None:
    for case in OP.cases():
        if case.cu_seqlens is None and case.q.shape[1] <= 1100:
            _, T, _, _ = case.q.shape
            pattern = pattern_of(case.segments, case.rates, case.phase, case.k.shape[2])
            t = torch.arange(T)
            held = plain_pairs(pattern, t, case.causal)
            group = case.q.shape[2] // case.k.shape[2]
            assert declaration.pairs(case) == case.q.shape[0] * group * held


def plain_pairs(pattern: Any, t: Tensor, causal: bool) -> int:
    from bakeoff.ops.dilated_attention.reference import seen_in

    return int(seen_in(pattern, t, t, torch.zeros_like(t), causal).sum())


def test_examples() -> None:
    module = sys.modules["bakeoff.ops.dilated_attention"]
    assert doctest.testmod(module).failed == 0


def test_segments_that_torch_compile_keeps_open() -> None:
    def quarters(q: Tensor, k: Tensor, v: Tensor) -> Any:
        T = q.shape[1]
        return dilated_attention(q, k, v, (T // 4, T), (1, 2), causal=True)

    program = torch.compile(quarters, dynamic=True, fullgraph=True, backend="aot_eager")
    for T in (32, 48):
        inputs = torch.randn(3, 1, T, 2, 8)
        torch.testing.assert_close(program(*inputs), quarters(*inputs))


@pytest.mark.parametrize("combine_grad", ["exact", "detached"])
@pytest.mark.parametrize("causal", [False, True])
def test_branches_by_flex_attention(causal: bool, combine_grad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyTorch's own FlexAttention forward, and with the formula it stands for, which has a gradient on
    the CPU, too."""

    def formula(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, scale: float, **options: Any) -> Any:
        scores = q @ k.mT * scale
        if block_mask is not None:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    monkeypatch.setattr(branches, "_flexed", branches._flexible)
    inputs = [torch.randn(2, 128, h, 16, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    args = ("32,64,256", "2,4,8", causal, "mod", combine_grad, None, None, True)  # some rows unselected
    want, lse = reference(*inputs, *args)
    with torch.no_grad():
        y, level = branches.flex(*inputs, *args)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(level, lse)
    monkeypatch.setattr(branches, "flex_attention", formula)
    y, level = branches.flex(*inputs, *args)
    torch.testing.assert_close(y, want)
    found, exact = (y, level), (want, lse)
    dy = [torch.randn_like(y), torch.randn_like(lse).masked_fill(lse == -torch.inf, 0.0)]
    if combine_grad == "detached":  # the lse has no gradient there
        found, exact, dy = found[:1], exact[:1], dy[:1]
    slopes = (torch.autograd.grad(outputs, inputs, dy) for outputs in (found, exact))
    for got, right in zip(*slopes, strict=True):
        torch.testing.assert_close(got, right)
