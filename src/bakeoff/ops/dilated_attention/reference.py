"""The definition of dilated_attention: which keys a query sees, and dense attention over them."""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

__all__ = ["Pattern", "dilated_attention", "numbers", "pattern_of", "seen_in"]

Sizes = str | Sequence[int]
"""Whole numbers, or their text: "2048,8192"."""
_DENSE = 1 << 26  # scores that exist at a time
_STRETCHES = 1 << 13  # of queries, up to which long rows go branch by branch


class Pattern(NamedTuple):
    """The branches of a call: segment lengths, rates, and a phase for each branch and kv head."""

    segments: tuple[int, ...]
    rates: tuple[int, ...]
    phases: tuple[tuple[int, ...], ...]


def numbers(sizes: Sizes) -> tuple[int, ...]:
    """Whole numbers as a tuple."""
    return tuple(int(size) for size in (sizes.split(",") if isinstance(sizes, str) else sizes))


def pattern_of(segments: Sizes, rates: Sizes, phase: str | Sequence[Sequence[int]], heads: int) -> Pattern:
    """The branches for `heads` kv heads. A table of phases is given as rows, or as their text "0,1;0,3"."""
    if not isinstance(phase, str):
        phase = ";".join(",".join(map(str, row)) for row in phase)
    return _pattern(numbers(segments), numbers(rates), phase, heads)


def _pattern(segments: tuple[int, ...], rates: tuple[int, ...], phase: str, heads: int) -> Pattern:
    if phase == "mod":
        rows = [tuple(head % rate for head in range(heads)) for rate in rates]
    elif phase == "block":
        rows = [tuple(head // -(-heads // rate) for head in range(heads)) for rate in rates]
    else:
        rows = [numbers(row) for row in phase.split(";")]
    return Pattern(segments, rates, tuple(rows))


def dilated_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Sizes,
    rates: Sizes,
    causal: bool = False,
    phase: str | Sequence[Sequence[int]] = "mod",
    combine_grad: str = "exact",
    cu_seqlens: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention with bias log m(t, u), m being the number of branches in which query t sees key u.

    Arguments as in `bakeoff.ops.dilated_attention`. Long sequences go some queries at a time, and what is
    between is computed again in backward; without documents a softmax over each branch's keys, mixed by the
    branches' log-sum-exps, which is the same function, leaves out pairs that no branch has.
    """
    B, T, H, D = q.shape
    pattern = pattern_of(segments, rates, phase, k.shape[2])
    scale = 1 / math.sqrt(D) if scale is None else scale
    wide = torch.promote_types(q.dtype, torch.float32)
    qw, kw, vw = (x.to(wide) for x in (q, k, v))
    origin = _origins(T, cu_seqlens, q.device)
    if B * H * T * T <= _DENSE:
        y, lse = _attend(qw, kw, vw, 0, 0, pattern, causal, scale, combine_grad, origin)
    else:
        # Keys of any segment that these queries lie in; the borders of documents aren't known here.
        reach = pattern.segments if cu_seqlens is None else (T,)
        rows, parts = max(1, _DENSE // max(1, B * H * min(T, 2 * max(reach)))), []
        stretches = _stretches(pattern, T, B * H) if cu_seqlens is None else []
        attend = _attend_by_branch if stretches else partial(_attend, origin=origin)
        for first, last in stretches or [(i, min(T, i + rows)) for i in range(0, T, rows)]:
            low = min(first // w * w for w in reach)
            high = min(T, max(-(-last // w) * w for w in reach))
            parts.append(
                checkpoint(
                    attend, qw[:, first:last], kw[:, low:high], vw[:, low:high], first, low, pattern, causal,
                    scale, combine_grad, use_reentrant=False,
                )
            )  # fmt: skip
        y, lse = torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts], 2)
    return (y.to(q.dtype), lse) if return_lse else y.to(q.dtype)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: int,
    low: int,
    pattern: Pattern,
    causal: bool,
    scale: float,
    combine_grad: str,
    origin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries from token `first` on against keys from token `low` on: y [B, T, H, D] and lse [B, H, T]."""
    B, T, H, D = q.shape
    S, G = k.shape[1], H // k.shape[2]
    t = torch.arange(T, device=q.device) + first
    u = torch.arange(S, device=q.device) + low
    scores = torch.einsum("bthgd,bshd->bhgts", q.reshape(B, T, H // G, G, D), k) * scale
    held = seen_in(pattern, t, u, origin, causal)  # [branches, kv heads, T, S]
    if combine_grad == "exact":
        bias = held.to(scores.dtype).sum(0).log()[None, :, None]
        total, y = _softmax(scores + bias, v)
    else:
        each = [_softmax(scores + mask.to(scores.dtype).log()[None, :, None], v) for mask in held]
        total, y = _mixed([lse for lse, _ in each], [out for _, out in each], combine_grad)
    return y.permute(0, 3, 1, 2, 4).reshape(B, T, H, D), total.reshape(B, H, T)


def _stretches(pattern: Pattern, T: int, each: int) -> list[tuple[int, int]]:
    """Stretches of tokens that no branch's segment border cuts, with at most `_DENSE` scores of a branch for
    `each` rows and heads; none where there are so many that they would take longer than all pairs."""
    keys = max(-(-min(w, T) // r) for w, r in zip(pattern.segments, pattern.rates, strict=True))
    rows = max(1, _DENSE // max(1, each * keys))
    if sum(T // w for w in pattern.segments) + T // rows > _STRETCHES:
        return []
    borders = sorted({T, *(i for w in pattern.segments for i in range(0, T, w))})
    return [
        (first, min(first + rows, border))
        for start, border in itertools.pairwise(borders)
        for first in range(start, border, rows)
    ]


def _attend_by_branch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: int,
    low: int,
    pattern: Pattern,
    causal: bool,
    scale: float,
    combine_grad: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_attend`, of queries between which no segment has its border: a softmax for each branch."""
    B, n, H, D = q.shape
    kv, end = k.shape[2], low + k.shape[1]
    q = q.unflatten(2, (kv, H // kv))
    outs, lses = [], []
    for w, r, phases in zip(*pattern, strict=True):
        start = first // w * w
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:4], -torch.inf)
        for phase in sorted(set(phases)):
            heads = [head for head, own in enumerate(phases) if own == phase]
            skip = (phase - (first - start)) % r
            if skip >= n:
                continue
            keys = slice(start + phase - low, min(start + w, end) - low, r)
            scores = torch.einsum("bthgd,bshd->bthgs", q[:, skip::r, heads], k[:, keys, heads]) * scale
            if causal:
                t = torch.arange(first + skip, first + n, r, device=q.device)
                u = torch.arange(low + keys.start, low + keys.stop, r, device=q.device)
                scores = scores.masked_fill((u > t[:, None])[:, None, None], -torch.inf)
            out[:, skip::r, heads] = torch.einsum("bthgs,bshd->bthgd", scores.softmax(-1), v[:, keys, heads])
            lse[:, skip::r, heads] = scores.logsumexp(-1)
        outs.append(out)
        lses.append(lse)
    total, y = _mixed(lses, outs, combine_grad)
    return y.reshape(B, n, H, D), total.reshape(B, n, H).transpose(1, 2)


def _mixed(
    lses: list[torch.Tensor], outs: list[torch.Tensor], combine_grad: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-sum-exp over all branches, and their outputs [..., D] weighted by their own."""
    each = torch.stack(lses)
    seen = each.amax(0) > -torch.inf
    total = each.masked_fill(~seen, 0.0).logsumexp(0)
    weights = torch.exp(each - total)
    if combine_grad != "exact":
        weights = weights.detach()
    return total.masked_fill(~seen, -torch.inf), (weights[..., None] * torch.stack(outs)).sum(0)


def _softmax(scores: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-sum-exp of [B, h, g, T, S] and the values weighted; rows that see nothing give -inf and 0."""
    seen = (scores.detach() > -torch.inf).any(-1)
    finite = scores.masked_fill(~seen[..., None], 0.0)
    lse = finite.logsumexp(-1).masked_fill(~seen, -torch.inf)
    shares = finite.softmax(-1).masked_fill(~seen[..., None], 0.0)
    return lse, torch.einsum("bhgts,bshd->bhgtd", shares, v)


def seen_in(
    pattern: Pattern, t: torch.Tensor, u: torch.Tensor, origin: torch.Tensor, causal: bool
) -> torch.Tensor:
    """Whether query t sees key u in each branch, [branches, kv heads, T, S] of bool."""
    start = origin[t]
    same = (start[:, None] == origin[u]) & (start >= 0)[:, None]
    if causal:
        same = same & (u <= t[:, None])
    branches = []
    for w, r, phases in zip(*pattern, strict=True):
        phase = torch.tensor(phases, device=t.device)[:, None]
        of_t, of_u = t - start, u - origin[u]
        selected_t, selected_u = (of_t % w % r == phase), (of_u % w % r == phase)
        segment = (of_t // w)[:, None] == of_u // w
        branches.append(selected_t[:, :, None] & selected_u[:, None, :] & (same & segment))
    return torch.stack(branches)


def _origins(T: int, cu_seqlens: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """The first token of each token's document, or -1 for a token of no document."""
    if cu_seqlens is None:
        return torch.zeros(T, dtype=torch.int64, device=device)
    t = torch.arange(T, device=device)
    document = torch.searchsorted(cu_seqlens.to(torch.int64), t, right=True) - 1
    inside = (document >= 0) & (document < cu_seqlens.numel() - 1)
    return torch.where(inside, cu_seqlens[document.clamp(0, cu_seqlens.numel() - 1)].to(torch.int64), -1)
