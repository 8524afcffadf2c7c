"""attention in plain PyTorch: its scaled_dot_product_attention, and two products for few queries."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention import SDPBackend, sdpa_kernel

from bakeoff.attention_backends.inputs import differentiable, exact, readable, shares, watched
from bakeoff.ops.attention.reference import attention as reference
from bakeoff.ops.attention.reference import seen

__all__ = ["FEW", "by_products", "eager", "planned", "products"]

FEW = 16
"""Queries a row up to which kernels made for long ones compute a tile of mostly nothing."""
_MASK = 1 << 26  # elements of a mask that exist at a time
_STEP = 64
_UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def planned(T: int, S: int) -> bool:
    """Whether cuDNN may be asked: it plans anew for each length, which takes it longer than a whole model
    takes for a symbol, so that only whole rows of lengths in steps of 64 are given to it."""
    return T == S and T % _STEP == 0


@exact
def eager(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None,
    cu_seqlens: Tensor | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """What PyTorch takes by default, without cuDNN where that would plan too often; the definition where
    transforms look on."""
    if watched():
        return reference(q, k, v, causal, window, scale, cu_seqlens, lengths)
    T, S = q.shape[1], k.shape[1]
    if lengths is not None and T == 1 and window is None and not _wants_grad(q, k, v):
        return _one_query(q, k, v, scale, lengths)
    if lengths is not None and T <= FEW:
        return by_products(q, k, v, causal, window, scale, cu_seqlens, lengths)
    if q.is_cuda and not is_compiling():
        q, k, v = readable(q), readable(k), readable(v)
    some = lengths is not None or window is not None or cu_seqlens is not None
    if some or (causal and T != S and T > 1):
        return _masked(q, k, v, causal, window, scale, cu_seqlens, lengths)
    if T != S:  # one query, which sees all
        causal = False
    if not q.is_cuda or (T == S if is_compiling() else planned(T, S) or not _half(q)):
        return _sdpa(q, k, v, None, causal, scale)
    with _unplanned(q):
        return _sdpa(q, k, v, None, causal, scale)


def _unplanned(q: Tensor) -> AbstractContextManager[Any]:
    """PyTorch's choice without cuDNN."""
    return sdpa_kernel(_UNPLANNED) if q.is_cuda else nullcontext()


def _half(q: Tensor) -> bool:
    return q.dtype in (torch.float16, torch.bfloat16)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    shared = shares(q, k)
    if shared and q.is_cuda and (mask is not None or not _half(q)):  # what else would hold all scores
        G = q.shape[2] // k.shape[2]
        k, v, shared = k.repeat_interleave(G, 2), v.repeat_interleave(G, 2), False
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=shared)
    return (differentiable(y) if y.is_cuda else y).transpose(1, 2)


def _masked(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None,
    cu_seqlens: Tensor | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """With a mask, some queries at a time where it would be large; of a window only what these reach."""
    T, S = q.shape[1], k.shape[1]
    if is_compiling():
        rows, reach = T, None
    else:
        rows = max(1, min(T, _MASK // max(1, S if lengths is None else S * q.shape[0])))
        reach = window if lengths is None else None
        if reach is not None and 4 * reach <= S:
            rows = min(rows, max(2 * reach, 1024))
    parts = []
    for first in range(0, T, rows) if rows < T else (0,):
        last = min(T, first + rows) if rows < T else T
        low, high = 0, S
        if reach is not None and rows < T:  # query t stands at S - T + t
            low, high = max(0, S - T + first - reach + 1), max(0, S - T + last)
        t = torch.arange(first, last, device=q.device)
        there = seen(t, T, S, causal, window, cu_seqlens, lengths, q.device)[:, None, :, low:high]
        none = ~there.any(-1, keepdim=True)
        # A row that sees nothing gets weights that mean nothing, and is left out behind them: no NaN is made.
        mine = q if rows == T else q[:, first:last]
        some = slice(low, high)
        with _unplanned(q):
            y = _sdpa(mine, k[:, some], v[:, some], there | none, False, scale)
        parts.append(y.masked_fill(none.transpose(1, 2), 0.0))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@exact
def by_products(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None,
    cu_seqlens: Tensor | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """`products`, whatever autocast says."""
    return products(q, k, v, causal, window, scale, cu_seqlens, lengths)


def products(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None,
    cu_seqlens: Tensor | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """Two products and a softmax, scores in float32 or wider; heads in groups share keys where they lie."""
    (B, T, H, D), (S, K) = q.shape, k.shape[1:3]
    G, scores = H // K, _scores(q, k)
    t = torch.arange(T, device=q.device)
    there = seen(t, T, S, causal, window, cu_seqlens, lengths, q.device)[:, None, None]
    scores = scores.view(B, K, G, T, S) * (1 / math.sqrt(D) if scale is None else scale)
    scores = scores.masked_fill(~there, -torch.inf)
    none = ~there.any(-1, keepdim=True)
    weights = scores.masked_fill(none, 0.0).softmax(-1).masked_fill(none, 0.0)
    y = torch.bmm(weights.to(v.dtype).view(B * K, G * T, S), _heads_first(v))
    return y.view(B, K, G, T, D).permute(0, 3, 1, 2, 4).reshape(B, T, H, D)


def _one_query(q: Tensor, k: Tensor, v: Tensor, scale: float | None, lengths: Tensor) -> Tensor:
    """`products` of one query a row, which sees all that its row holds, without gradients: fewer passes."""
    (B, _, H, D), (S, K) = q.shape, k.shape[1:3]
    held = torch.arange(S, device=q.device) < lengths[:, None]
    bias = torch.where(held, 0.0, -torch.inf).view(B, 1, 1, S)
    by = 1 / math.sqrt(D) if scale is None else scale
    scores = torch.add(bias, _scores(q, k).view(B, K, H // K, S), alpha=by)
    weights = scores.softmax(-1).to(v.dtype).view(B * K, H // K, S)
    y = torch.bmm(weights, _heads_first(v)).view(B, 1, H, D)
    return y.masked_fill((lengths <= 0).view(B, 1, 1, 1), 0.0)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q . k [B K, G T, S] in float32 or wider; heads in groups share keys where they lie."""
    (B, T, H, D), K = q.shape, k.shape[2]
    grouped = q.unflatten(2, (K, H // K)).permute(0, 2, 3, 1, 4).reshape(B * K, H // K * T, D)
    keys = _heads_first(k)
    if q.dtype in (torch.float32, torch.float64):
        return torch.bmm(grouped, keys.mT)
    if q.is_cuda and not _wants_grad(q, k):
        return torch.bmm(grouped, keys.mT, out_dtype=torch.float32)
    return torch.bmm(grouped.float(), keys.mT.float())


def _heads_first(x: Tensor) -> Tensor:
    """[B, S, K, D] as [B K, S, D]."""
    return x.transpose(1, 2).flatten(0, 1)


def _wants_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
