"""attention by PyTorch's kernels and the flash-attn packages, with stand-ins: what these are given."""

import itertools
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from bakeoff.ops.attention import OP, peers, pytorch
from bakeoff.ops.attention.reference import attention as reference

FORMS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True, "scale": 0.3},
    "window": {"causal": True, "window": 4},
    "documents": {"causal": True, "cu_seqlens": torch.tensor([1, 5, 5, 9])},
    "documents beyond the end": {"cu_seqlens": torch.tensor([0, 5, 20])},
    "lengths": {"causal": True, "lengths": torch.tensor([12, 3])},
}


def arguments(form: str) -> tuple[list[Tensor], tuple[Any, ...]]:
    named = FORMS[form]
    B, T = (1 if "cu_seqlens" in named else 2), (2 if "lengths" in named else 12)
    shapes = [(B, T, 4, 8), (B, 12, 2, 8), (B, 12, 2, 8)]
    names = ("causal", "window", "scale", "cu_seqlens", "lengths")
    args = tuple(named.get(name, False if name == "causal" else None) for name in names)
    return [torch.randn(shape, requires_grad=True) for shape in shapes], args


def dense(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: Any, causal: Any, window_size: Any, unbounded: Any
) -> Tensor:
    window = None if window_size == (unbounded, unbounded) else window_size[0] + 1
    assert window is None or window_size[1] == 0
    return reference(q, k, v, causal, window, softmax_scale)


def packed(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, **named: Any,
) -> Tensor:  # fmt: skip
    """As the packages do, it writes nothing for positions outside all documents."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert cu_seqlens_q.dtype == torch.int32
    assert q.dim() == 3
    borders = cu_seqlens_q.tolist()
    longest = max(b - a for a, b in itertools.pairwise(borders))
    assert max_seqlen_q == max_seqlen_k >= longest
    parts = [
        dense(*(x[None, a:b] for x in (q, k, v)), **named)[0] for a, b in itertools.pairwise(borders) if b > a
    ]  # fmt: skip
    unwritten = q.new_full((q.shape[0] - borders[-1], *q.shape[1:]), torch.nan)
    return torch.cat([q.new_full((borders[0], *q.shape[1:]), torch.nan), *parts, unwritten])


def cached(
    q: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor, softmax_scale: Any, causal: Any,
    window_size: Any, unbounded: Any,
) -> Tensor:  # fmt: skip
    assert cache_seqlens.dtype == torch.int32
    window = None if window_size == (unbounded, unbounded) else window_size[0] + 1
    return reference(q, k, v, causal, window, softmax_scale, None, cache_seqlens)


def stand_in(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}[version]
    module = types.ModuleType(place)
    unbounded = None if version == 4 else -1

    def as_it_returns(function: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            y = function(*args, **named, unbounded=unbounded)
            return (y, torch.zeros(1)) if version == 4 else y

        return call

    vars(module).update(flash_attn_func=as_it_returns(dense), flash_attn_varlen_func=as_it_returns(packed))
    if version != 4:
        vars(module).update(flash_attn_with_kvcache=as_it_returns(cached))
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, place, module)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("version", [2, 3, 4])
def test_flash_attn_packages_are_given_what_they_take(
    version: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "lengths" and version == 4:
        case = OP.case([*arguments(form)[0], *arguments(form)[1]])
        reason = peers.supports(type(case)(case.args, "cuda"), "flash_attn_4")
        assert reason == "has no kernel for static caches"
        return
    stand_in(version, monkeypatch)
    inputs, args = arguments(form)
    same(getattr(peers, f"flash_attn_{version}")(*inputs, *args), reference(*inputs, *args), inputs)


def same(y: Tensor, want: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(y, want)
    dy = torch.randn_like(y)
    for got, right in zip(*(torch.autograd.grad(out, inputs, dy) for out in (y, want)), strict=True):
        torch.testing.assert_close(got, right)


def test_packages_that_are_not_there_are_absent_with_the_reason() -> None:
    for name in ("flash_attn_2", "flash_attn_3", "flash_attn_4", "flex_flash"):
        candidate = OP.candidate(name)
        assert candidate.absent is None or "is not installed" in candidate.absent
        assert candidate.third_party


@pytest.mark.parametrize("form", [form for form in FORMS if form != "lengths"])
def test_flash_is_given_what_it_takes(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, max_q: int, max_k: int, dropout: float,
        causal: bool, debug: bool, *, scale: Any, window_size_left: int = -1, window_size_right: int = -1,
    ) -> Any:  # fmt: skip
        assert not dropout
        assert not debug
        named = {
            "softmax_scale": scale,
            "causal": causal,
            "window_size": (window_size_left, window_size_right),
        }
        if cu_q is None:
            assert (max_q, max_k) == (q.shape[1], k.shape[1])
            return (dense(q, k, v, unbounded=-1, **named),)
        rows = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
        return (packed(q, k, v, unbounded=-1, **rows, **named),)

    monkeypatch.setattr(pytorch, "aten", types.SimpleNamespace(_flash_attention_forward=kernel))
    inputs, args = arguments(form)
    same(pytorch.flash(*inputs, *args), reference(*inputs, *args), inputs)


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient", "math"])
@pytest.mark.parametrize("K", [4, 2])
def test_pytorch_s_kernels_exist_with_these_arguments_and_have_gradients(name: str, K: int) -> None:
    inputs = [
        torch.empty(2, 128, heads, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, K, K)
    ]
    y = getattr(pytorch, name)(*inputs, True, None, None, None, None)
    assert y.shape == inputs[0].shape
    slopes = torch.autograd.grad(y, inputs, torch.empty_like(y))
    assert [x.shape for x in slopes] == [x.shape for x in inputs]


def test_cudnn_is_given_gradients_as_its_plans_expect_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch finds a plan by the strides of q, k and v; the gradient's must follow from those of y."""
    seen = []

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.empty_like(q)

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> Any:
            seen.append((dout.stride(), dout.data_ptr() % 16, dout.clone()))
            return dout, dout, dout

    def kernel(q: Tensor, k: Tensor, v: Tensor, bias: None, lse: bool, *_: Any, **__: Any) -> Any:
        assert lse
        return (Kernel.apply(q, k, v),)

    fake = types.SimpleNamespace(_scaled_dot_product_cudnn_attention=kernel)
    monkeypatch.setattr(pytorch, "aten", fake)
    q = torch.randn(2, 8, 4, 16, requires_grad=True)
    dy = torch.randn(2, 8, 4, 16)
    shifted = torch.cat([dy.flatten()[:1], dy.flatten()])[1:].view_as(dy)
    gapped = torch.cat([dy, dy], -1)[..., :16]
    for given in (dy, dy.mT.contiguous().mT, dy[:1, :1].expand_as(dy), gapped, shifted):
        y = pytorch.cudnn(q, q, q, True, None, None, None, None)
        assert y.is_contiguous()
        torch.autograd.grad(y, q, given)
        stride, beyond, got = seen.pop()
        assert (stride, beyond) == (q.transpose(1, 2).stride(), 0)
        assert torch.equal(got, given.transpose(1, 2))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 3])
def test_flex_masks_what_the_definition_masks(window: int | None) -> None:
    """Uncompiled, where FlexAttention is a formula."""
    for T, S in ((6, 6), (2, 6), (5, 5)):
        q, k, v = (torch.randn(1, n, heads, 16) for n, heads in ((T, 4), (S, 2), (S, 2)))
        mask = pytorch._blocks(T, S, window or 0, q.device)
        got = pytorch._flexible(mask, 0.3, "", q, k, v)
        torch.testing.assert_close(got, reference(q, k, v, True, window, 0.3))
