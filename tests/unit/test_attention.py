"""attention in plain PyTorch: the definition against a loop over pairs, laws, forms, refusals, the guess."""

import itertools
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask

from bakeoff import hardware
from bakeoff.errors import Unsupported
from bakeoff.ops import attention
from bakeoff.ops.attention import OP, plain, pytorch
from bakeoff.ops.attention import reference as definition
from bakeoff.ops.attention.op import pairs
from bakeoff.ops.attention.reference import attention as reference
from bakeoff.ops.attention.reference import seen
from bakeoff.ops.dilated_attention import branches
from bakeoff.select import Case, TensorMeta
from bakeoff.select.declare.key import key


def drawn(B: int, T: int, S: int, H: int, K: int, D: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * T + S)
    shapes = [(B, T, H, D), (B, S, K, D), (B, S, K, D)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None,
    cu_seqlens: Tensor | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """Query by query, key by key."""
    (B, T, H, D), (S, K) = q.shape, k.shape[1:3]
    scale = D**-0.5 if scale is None else scale
    borders = [] if cu_seqlens is None else cu_seqlens.tolist()
    rows = []
    for b in range(B):
        held = S if lengths is None else max(0, min(S, int(lengths[b])))
        for t in range(T):
            place = held - T + t
            seen = []
            for s in range(held):
                if causal and s > place:
                    continue
                if window is not None and place - s >= window:
                    continue
                if borders and not any(a <= place < e and a <= s < e for a, e in itertools.pairwise(borders)):
                    continue
                seen.append(s)
            for h in range(H):
                g = h // (H // K)
                if not seen:
                    rows.append(0 * q[b, t, h])
                    continue
                scores = scale * torch.stack([q[b, t, h] @ k[b, s, g] for s in seen])
                weights = scores.softmax(0)
                rows.append(sum(w * v[b, s, g] for w, s in zip(weights, seen, strict=True)))
    return torch.stack(rows).view(B, T, H, D) if rows else q * 0


CU, HELD = "cu_seqlens", "lengths"
FORMS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "full": ((2, 5, 5, 4, 2, 6), {}),
    "causal": ((2, 6, 6, 2, 2, 6), {"causal": True, "scale": 0.7}),
    "window": ((1, 9, 9, 4, 1, 6), {"causal": True, "window": 3}),
    "window of one": ((1, 4, 4, 2, 1, 6), {"causal": True, "window": 1}),
    "the last queries": ((2, 3, 8, 2, 1, 6), {"causal": True}),
    "the last queries, window": ((2, 3, 8, 2, 2, 6), {"causal": True, "window": 4}),
    "more queries than keys": ((1, 7, 4, 2, 2, 6), {"causal": True}),
    "more queries than keys, full": ((1, 7, 4, 2, 2, 6), {}),
    "documents": ((1, 12, 12, 2, 1, 6), {"causal": True, CU: torch.tensor([2, 5, 5, 10])}),
    "documents, full": ((1, 8, 8, 2, 2, 6), {CU: torch.tensor([0, 3, 8], dtype=torch.int32)}),
    "documents, window": ((1, 9, 9, 2, 2, 6), {"causal": True, "window": 2, CU: torch.tensor([0, 5, 9])}),
    "one query of a cache": ((4, 1, 7, 4, 2, 6), {HELD: torch.tensor([7, 3, 0, 100])}),
    "queries of a cache": ((3, 3, 7, 4, 2, 6), {"causal": True, HELD: torch.tensor([7, 4, 2]).int()}),
    "queries of a cache, window": (
        (2, 3, 9, 2, 1, 6), {"causal": True, "window": 2, HELD: torch.tensor([8, 5])},
    ),
    "many queries of a cache": ((2, 18, 20, 2, 1, 6), {"causal": True, HELD: torch.tensor([20, 9])}),
}  # fmt: skip


def arguments(form: str) -> tuple[list[Tensor], tuple[Any, ...]]:
    shape, named = FORMS[form]
    names = ("causal", "window", "scale", "cu_seqlens", "lengths")
    return drawn(*shape), tuple(named.get(name, False if name == "causal" else None) for name in names)


def results(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(y.mT.shape, generator=generator, dtype=torch.float64).mT.to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


@pytest.mark.parametrize("form", FORMS)
def test_definition_is_the_sum_over_pairs(form: str) -> None:
    inputs, args = arguments(form)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    for got, want in zip(
        results(reference(*wide, *args), wide), results(by_hand(*wide, *args), wide), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("form", FORMS)
def test_eager_is_the_definition(form: str) -> None:
    inputs, args = arguments(form)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    want = results(reference(*wide, *args), wide)
    for got, right in zip(results(plain.eager(*inputs, *args), inputs), want, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_products_are_the_definition(form: str) -> None:
    inputs, args = arguments(form)
    for got, want in zip(
        results(plain.by_products(*inputs, *args), inputs),
        results(reference(*inputs, *args), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", [form for form in FORMS if "cache" not in form])
def test_large_masks_are_made_piece_by_piece(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "_MASK", 17)
    inputs, args = arguments(form)
    for got, want in zip(
        results(plain._masked(*inputs, *args), inputs),
        results(reference(*inputs, *args), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_the_definition_goes_some_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, args = arguments("the last queries, window")
    whole = results(reference(*inputs, *args), inputs)
    monkeypatch.setattr(definition, "_DENSE", 33)
    for got, want in zip(results(reference(*inputs, *args), inputs), whole, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("form", ["causal", "window", "documents", "queries of a cache"])
def test_gradcheck(form: str) -> None:
    inputs, args = arguments(form)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *x: reference(*x, *args), wide, fast_mode=True)


def test_rows_that_see_nothing_give_zero_and_no_gradient() -> None:
    inputs = drawn(1, 6, 4, 2, 2, 8)
    y = attention(*inputs, causal=True)
    assert not y[:, :2].any()
    dq, dk, dv = torch.autograd.grad(y, inputs, torch.full_like(y, 1e4))
    assert not dq[:, :2].any()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


def test_documents_are_rows_of_their_own() -> None:
    inputs = drawn(1, 11, 11, 4, 2, 8)
    packed = attention(*inputs, causal=True, cu_seqlens=torch.tensor([0, 4, 11]))
    for first, last in ((0, 4), (4, 11)):
        alone = attention(*(x[:, first:last] for x in inputs), causal=True)
        torch.testing.assert_close(packed[:, first:last], alone)


def test_a_cache_with_room_is_the_row_without() -> None:
    q, k, v = (x.detach() for x in drawn(2, 9, 9, 4, 2, 8))
    whole = attention(q, k, v, causal=True)
    room = [torch.cat([x, torch.zeros_like(x)], 1) for x in (k, v)]
    for t in range(9):
        held = torch.full((2,), t + 1)
        one = attention(q[:, t : t + 1], *room, lengths=held)
        torch.testing.assert_close(one, whole[:, t : t + 1])
        some = attention(q[:, : t + 1], *room, causal=True, lengths=held)
        torch.testing.assert_close(some, whole[:, : t + 1])


def test_shared_heads_are_repeated_heads() -> None:
    q, k, v = drawn(2, 7, 7, 6, 2, 8)
    repeated = attention(q, k.repeat_interleave(3, 2), v.repeat_interleave(3, 2), causal=True)
    torch.testing.assert_close(attention(q, k, v, causal=True), repeated)


def test_order_of_keys_does_not_matter_without_places() -> None:
    q, k, v = drawn(1, 5, 8, 2, 2, 8)
    order = torch.randperm(8)
    torch.testing.assert_close(attention(q, k[:, order], v[:, order]), attention(q, k, v))


@pytest.mark.parametrize(
    "shape", [(0, 3, 3, 2, 2, 8), (2, 0, 3, 2, 2, 8), (2, 3, 0, 2, 2, 8), (2, 0, 0, 2, 2, 8)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_empty_tensors(shape: Any, causal: bool) -> None:
    inputs = drawn(*shape)
    y = attention(*inputs, causal=causal)
    assert y.shape == inputs[0].shape
    assert not y.any()
    assert [x.shape for x in torch.autograd.grad(y.sum(), inputs)] == [x.shape for x in inputs]


@pytest.mark.parametrize("layout", ["heads first", "rows apart", "expanded", "columns apart"])
def test_layouts(layout: str) -> None:
    turn = {
        "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "rows apart": lambda x: torch.cat([x, torch.full_like(x, torch.nan)], -1)[..., : x.shape[-1]],
        "expanded": lambda x: x[:1].expand_as(x),
        "columns apart": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    }[layout]
    inputs = [turn(x.detach()) for x in drawn(2, 6, 6, 4, 2, 8)]
    for more in ({}, {"window": 3}, {"lengths": torch.tensor([6, 4])}):
        dense = [x.contiguous() for x in inputs]
        torch.testing.assert_close(
            attention(*inputs, causal=True, **more), attention(*dense, causal=True, **more)
        )


def test_half_precision_keeps_scores_in_float32() -> None:
    q, k, v = (x.detach() for x in drawn(2, 1, 40, 4, 2, 16, torch.bfloat16))
    y = attention(q, k, v, lengths=torch.tensor([40, 3]))
    want = reference(q.double(), k.double(), v.double(), lengths=torch.tensor([40, 3]))
    assert y.dtype == torch.bfloat16
    assert (y.double() - want).norm() < 2**-7 * want.norm()
    with torch.autocast("cpu", torch.bfloat16):
        same = attention(*(x.float() for x in (q, k, v)), lengths=torch.tensor([40, 3]))
    assert same.dtype == torch.float32
    torch.testing.assert_close(same.double(), want, rtol=1e-4, atol=1e-4)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "heads": ({"shape": (1, 4, 4, 3, 2, 8)}, ValueError, "3 heads of q and 2 of k"),
    "window without causal": ({"window": 3}, ValueError, "with causal=True"),
    "window of zero": ({"window": 0, "causal": True}, ValueError, "at least 1"),
    "window no number": ({"window": 2.5, "causal": True}, TypeError, "whole number"),
    "window a flag": ({"window": True, "causal": True}, TypeError, "whole number"),
    "scale": ({"scale": -1.0}, ValueError, "fold a sign into q"),
    "infinite scale": ({"scale": math.inf}, ValueError, "finite"),
    "scale of a tensor": ({"scale": torch.tensor(0.5)}, TypeError, "scale is a tensor, expected a number"),
    "scale a flag": ({"scale": True}, TypeError, "scale is True, expected a number or None"),
    "causal": ({"causal": 1}, TypeError, "expected True or False"),
    "documents of rows": ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "packed documents come as one"),
    "documents and lengths": (
        {"shape": (1, 4, 4, 2, 2, 8), "cu_seqlens": torch.tensor([0, 4]), "lengths": torch.tensor([4])},
        ValueError, "exclude each other",
    ),
    "lengths of other rows": ({"lengths": torch.tensor([4])}, ValueError, "lengths has shape"),
    "lengths as floats": ({"lengths": torch.tensor([4.0, 4.0])}, TypeError, "expected int32 or int64"),
    "lengths as numbers": ({"lengths": [4, 4]}, TypeError, "lengths must be a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what: str) -> None:
    given, error, text = REFUSED[what]
    named = {name: value for name, value in given.items() if name != "shape"}
    with pytest.raises(error, match=text):
        attention(*drawn(*given.get("shape", (2, 4, 4, 2, 2, 8))), **named)


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf])
def test_every_scale_is_looked_at(scale: float) -> None:
    """Also in calls of a kind that has been decided, which a scale is no part of."""
    q, k, v = drawn(2, 4, 4, 2, 2, 8)
    for _ in range(3):
        attention(q, k, v, scale=0.5)
    with pytest.raises(ValueError, match=f"attention: scale must be above 0 and finite, got {scale}"):
        attention(q, k, v, scale=scale)


def test_second_derivatives() -> None:
    """PyTorch's kernels have none; its products do, and so does the definition."""
    inputs = drawn(1, 4, 4, 2, 2, 3, torch.float64)
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, partial(attention, impl="math")),
        ({"causal": True}, partial(attention, impl="math")),
        ({"causal": True, "window": 2}, reference),
        ({"cu_seqlens": torch.tensor([0, 1, 4])}, reference),
    ]
    for given, fn in cases:
        assert torch.autograd.gradgradcheck(partial(fn, **given), inputs, fast_mode=True)


def test_values_must_be_as_keys() -> None:
    q, k, v = drawn(2, 4, 4, 2, 2, 8)
    with pytest.raises(ValueError, match="v has shape"):
        attention(q, k, v[..., :4])
    with pytest.raises(TypeError, match="cast one of them"):
        attention(q, k.double(), v)


def case(
    T: int, S: int, D: int = 64, *, grad: bool = True, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> Case:
    q, k = (TensorMeta.dense((4, n, 8, D), dtype, grad=grad) for n in (T, S))
    args = {
        "q": q,
        "k": k,
        "v": k,
        "causal": True,
        "window": None,
        "scale": None,
        "cu_seqlens": None,
        "lengths": None,
    }
    return Case({**args, **more}, "cuda")


LENGTHS = TensorMeta.dense((4,), torch.int64)


def test_cudnn_is_never_asked_for_lengths_that_change_by_one() -> None:
    """It makes a plan for each, which takes 8 ms."""
    cudnn = OP.candidate("cudnn")
    for T, S in ((1, 1024), (8, 1024), (1, 1), (16, 16), (300, 1024), (1001, 1001)):
        assert "plans anew" in (cudnn.supports(case(T, S, causal=False)) or "")
    assert cudnn.supports(case(1, 64, lengths=LENGTHS)) == "takes no lengths"
    assert cudnn.supports(case(1024, 1024)) is None


def test_what_grows_never_shares_a_verdict_with_whole_rows() -> None:
    """A bucket keeps whether there are fewer queries than keys, whose verdicts say nothing of each other."""
    for T in (*range(1, 40), 250, 1000, 1023, 1024):
        for S in (T, T + 1, T + 70, max(1, T - 1)):
            found = OP.bucket(case(T, S))
            queries, keys = found.q.shape[1], found.k.shape[1]
            assert (queries < keys, queries > keys) == (T < S, T > S)
            assert OP.bucket(found) == found
    assert key(OP, case(1000, 1001), "eager") != key(OP, case(1000, 1000), "eager")


def test_a_cache_lies_in_its_bucket_as_it_does_in_memory() -> None:
    q, k, v = torch.zeros(2, 1, 8, 48), *(torch.zeros(2, 4, 100, 48).transpose(1, 2) for _ in range(2))
    found = OP.bucket(OP.case((q, k, v, True, None, None, None, torch.ones(2, dtype=torch.int64)))).k
    assert found.shape == (2, 112, 4, 48)
    assert found.stride == (4 * 112 * 48, 48, 112 * 48, 1)


@pytest.mark.parametrize("regime", ["eager", "graph", "compiled"])
def test_the_guess(regime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "capability", lambda device: (9, 0))
    guess = lambda case: OP.heuristic(case, regime)  # noqa: E731
    assert guess(case(1, 1024, grad=False, lengths=LENGTHS)) == "decode"
    assert guess(case(1, 1024, grad=False)) == "decode"
    assert guess(case(1, 1024, grad=True, lengths=LENGTHS)) == "eager"
    assert guess(case(40, 1024, grad=False)) == "flash"
    assert guess(case(1024, 1024, window=100)) == "flash"
    assert guess(case(1024, 1024, window=100, dtype=torch.float32)) == "eager"
    assert guess(case(1024, 1024)) == guess(case(1024, 1024, grad=False)) == "eager"
    assert guess(Case(case(1, 9, grad=False).args, "cpu")) == "eager"


def test_pairs_are_those_that_are_seen() -> None:
    forms = [
        (5, 5, True, None), (3, 9, True, 4), (9, 4, True, None), (9, 4, True, 2), (3, 9, False, None),
        (4, 4, True, 1), (7, 7, True, 100), (5, 5, True, 4),
    ]  # fmt: skip
    for T, S, causal, window in forms:
        there = seen(torch.arange(T), T, S, causal, window, None, None, torch.device("cpu"))
        assert pairs(case(T, S, causal=causal, window=window)) == 4 * there.sum().item()


def test_lengths_stay_on_the_device_while_torch_compile_traces() -> None:
    torch.compiler.reset()

    def step(q: Tensor, k: Tensor, v: Tensor, held: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, lengths=held) + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    q, k, v = (x.detach() for x in drawn(2, 1, 9, 4, 2, 8))
    for held in (torch.tensor([3, 9]), torch.tensor([1, 0])):
        torch.testing.assert_close(compiled(q, k, v, held), step(q, k, v, held))


def test_kernels_that_cannot_take_a_call_say_why() -> None:
    q, k, v = drawn(2, 4, 4, 2, 2, 8)
    with pytest.raises(Unsupported, match="has no backward"):
        attention(q, k, v, impl="decode")
    decode = OP.candidate("decode")
    assert decode.supports(case(17, 90, grad=False)) == "takes up to 16 queries a row, not 17"
    assert decode.supports(case(1, 90, 264, grad=False)) == "takes heads up to 256 wide, not 264"
    assert decode.supports(case(16, 90, grad=False, lengths=LENGTHS)) is None
    with pytest.raises(Unsupported, match="runs on CUDA"):
        attention(q, k, v, impl="flash")


def test_math_by_name() -> None:
    inputs = drawn(2, 5, 5, 4, 2, 8)
    got, want = (attention(*inputs, causal=True, impl=impl) for impl in ("math", "eager"))
    torch.testing.assert_close(results(got, inputs), results(want, inputs))
    reason = pytorch.supports(case(1 << 15, 1 << 15), "math")
    assert reason is not None
    assert "34,359,738,368 scores" in reason


def test_kernels_that_add_up_in_any_order_say_so() -> None:
    """FlashAttention's and cuDNN's gradients differ from run to run; PyTorch's default is one of these."""
    assert {c.name for c in OP.candidates if c.deterministic} == {"compiled", "math", "flex", "decode"}
    torch.use_deterministic_algorithms(True)
    try:
        reasons = {c.name: c.reasons(case(1024, 1024)) for c in OP.candidates}
    finally:
        torch.use_deterministic_algorithms(False)
    text = "is not deterministic, and torch.use_deterministic_algorithms is on"
    assert text not in reasons["eager"]
    assert text not in reasons["flash"]
    assert text in reasons["cudnn"]


def test_the_documents_examples_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "attention.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    found: list[dict[str, Any]] = [{} for _ in examples]
    for example, names in zip(examples, found, strict=True):
        exec(example, names)
    assert found[0]["one"].shape == (2, 1, 8, 64)
    assert [found[1][name].shape[2] for name in "qkv"] == [8, 2, 2]


@pytest.mark.parametrize("made", [partial(pytorch._blocks, 128, 256, 0), partial(branches._causal, 384)])
def test_masks_that_were_made_under_a_mode_are_not_kept(made: Callable[[torch.device], BlockMask]) -> None:
    device = torch.device("cpu")
    with FakeTensorMode():
        assert isinstance(made(device).kv_indices, FakeTensor)
    with torch.inference_mode():
        held = made(device)
    assert not isinstance(held.kv_indices, FakeTensor)
    assert not held.kv_indices.is_inference()
    assert made(device) is held
