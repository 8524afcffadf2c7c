"""The definition of attention: which positions a query sees, and one softmax over them."""

import math

import torch
from torch.utils.checkpoint import checkpoint

__all__ = ["attention", "seen"]

_DENSE = 1 << 26  # scores that exist at a time


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """y[b,t,h] = sum_s softmax_s(scale q[b,t,h].k[b,s,g(h)]) v[b,s,g(h)] over the s that t sees.

    Arguments as in `bakeoff.ops.attention`. Many queries go some at a time, and what is between is computed
    again in backward.
    """
    B, T, H, D = q.shape
    scale = 1 / math.sqrt(D) if scale is None else scale
    wide = torch.promote_types(q.dtype, torch.float32)
    qw, kw, vw = (x.to(wide) for x in (q, k, v))
    args = (causal, window, scale, cu_seqlens, lengths)
    if B * H * T * k.shape[1] <= _DENSE:
        return _attend(qw, kw, vw, 0, T, *args).to(q.dtype)
    rows = max(1, _DENSE // max(1, B * H * k.shape[1]))
    parts = [
        checkpoint(_attend, qw[:, first : first + rows], kw, vw, first, T, *args, use_reentrant=False)
        for first in range(0, T, rows)
    ]
    return torch.cat(parts, 1).to(q.dtype)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, T: int, causal: bool, window: int | None,
    scale: float, cu_seqlens: torch.Tensor | None, lengths: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """y of the queries from `first` on, of T."""
    B, rows, H, D = q.shape
    K = k.shape[2]
    t = first + torch.arange(rows, device=q.device)
    there = seen(t, T, k.shape[1], causal, window, cu_seqlens, lengths, q.device)[:, None, None]
    grouped = q.reshape(B, rows, K, H // K, D).permute(0, 2, 3, 1, 4)  # [B, K, G, rows, D]
    scores = scale * grouped @ k.permute(0, 2, 3, 1)[:, :, None]
    scores = scores.masked_fill(~there, -torch.inf)
    none = ~there.any(-1, keepdim=True)
    weights = scores.masked_fill(none, 0.0).softmax(-1).masked_fill(none, 0.0)
    y = weights @ v.transpose(1, 2)[:, :, None]
    return y.permute(0, 3, 1, 2, 4).reshape(B, rows, H, D)


def seen(
    t: torch.Tensor, T: int, S: int, causal: bool, window: int | None, cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None, device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """[1 or B, queries, S]: whether queries t of T see the S positions."""
    s = torch.arange(S, device=device)
    if lengths is None:
        place = (S - T + t)[None, :, None]  # of each query
        there = (s >= 0).expand(1, t.shape[0], -1)
    else:
        held = lengths.long().clamp(0, S)[:, None, None]
        place = held - T + t[:, None]
        there = (s < held).expand(-1, t.shape[0], -1)
    if causal:
        there = there & (s <= place)
    if window is not None:
        there = there & (s > place - window)
    if cu_seqlens is not None:
        cu = cu_seqlens.long()
        own, other = (torch.searchsorted(cu, x, right=True) for x in (t, s))
        inside = (own > 0) & (own < cu.shape[0])
        there = there & (own[:, None] == other) & inside[:, None]
    return there
