"""Attention block by block: float32 accumulators, maxima and sums that no step rounds.

A block has queries and keys of one branch, and every block of every branch goes into one softmax: the
mixture of branches by their log-sum-exp is just that. With `detached` mixing weights each branch has its own.
On a GPU, blocks of 16 bits in which no row is missing go through PyTorch's attention kernels, which give each
one's output, rounded once, and its log-sum-exp; all others through products of matrices in float32.
"""

from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from bakeoff import hardware
from bakeoff.attention_backends.inputs import readable, width_refused
from bakeoff.attention_backends.rows import BACKENDS
from bakeoff.select.declare.compiled import compiled
from bakeoff.select.declare.installed import missing

__all__ = [
    "Rows",
    "Slopes",
    "State",
    "add_keys",
    "add_own",
    "add_state",
    "dotted",
    "finished",
    "kernel",
    "narrow",
    "started",
    "take",
    "take_back",
]

_SCORES = 1 << 26  # that exist at a time

Function = TypeVar("Function", bound=Callable[..., Any])


def _quick(plain: Function) -> Function:
    """`plain` as one kernel by torch.compile, where its first tensor is on a GPU for which that works."""
    fast = compiled(plain)

    @wraps(plain)
    def run(x: Tensor, *rest: Any) -> Any:
        return (fast if x.is_cuda and _compiles(str(x.device)) else plain)(x, *rest)

    return cast("Function", run)


@cache
def _compiles(device: str) -> bool:
    return missing("triton") is None and hardware.without_triton(device) is None


class Rows(NamedTuple):
    """A block on a device: [segments, kv heads, rows]. For a missing row, `queries` and `keys` are one past
    the last."""

    branch: int
    queries: Tensor
    """Local tokens."""
    keys: Tensor
    """Local tokens, or places in the rows of a peer."""
    last: Tensor
    """The last token that each query may see."""
    tokens: Tensor
    """Which token each key is; beyond all queries' last where it is missing."""
    masked: bool
    """Whether any query may not see any key."""
    whole: bool
    """Whether no row is missing."""
    diagonal: bool
    """Whether the keys are the queries' own tokens."""
    span: tuple[int, int] | None
    """Where the queries of all segments follow on each other: the first, and one past the last."""

    @property
    def by_kernel(self) -> bool:
        """Whether an attention kernel's mask, none or causal, is this block's."""
        return self.whole and (self.diagonal or not self.masked)


class State(NamedTuple):
    """Running softmaxes, [branches or 1, B, tokens, kv heads, queries a kv head(, D)]; where rows are missing
    there is a token more, which takes what is written for them."""

    acc: Tensor
    top: Tensor
    total: Tensor


class Slopes(NamedTuple):
    """Backward: what all blocks share, and the gradient of q that they add to; shapes as in `State`."""

    dy: Tensor
    outputs: Tensor | None
    """Where kernels may find `delta` by them: in q's dtype, of each softmax."""
    lse: Tensor
    delta: Tensor
    dq: Tensor


def started(q: Tensor, branches: int) -> State:
    """Softmaxes of nothing yet for q [B, tokens, kv heads, queries a kv head, D]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    acc = q.new_zeros((branches, *q.shape), dtype=wide)
    top = q.new_full(acc.shape[:-1], -torch.inf, dtype=wide)
    return State(acc, top, torch.zeros_like(top))


def finished(state: State, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs of each softmax, their mixture, in this dtype, and its log-sum-exp); queries that saw nothing
    give 0 and -inf."""
    if len(state.acc) == 1:
        y, lse = _divide(state.acc[0], state.top[0], state.total[0], dtype)
        return y[None], y, lse
    seen = state.total > 0
    outputs = state.acc / torch.where(seen, state.total, 1.0)[..., None]
    each = torch.where(seen, state.top + state.total.log(), -torch.inf)
    best = each.amax(0)
    lse = each.sub(torch.where(best > -torch.inf, best, 0.0)).exp().sum(0).log() + best
    weights = torch.exp(each - torch.where(best > -torch.inf, lse, 0.0))
    return outputs.to(dtype), (weights[..., None] * outputs).sum(0).to(dtype), lse


def take(state: State, rows: Rows, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    """Adds a block to `state`; k and v [segments, kv heads, rows, B, D]."""
    acc, top, total = (part[rows.branch % len(state.acc)] for part in state)
    name = kernel(q) if rows.by_kernel else None
    if name is not None:
        query, key, value = _for_kernel(rows, q, k, v)
        out, lse = BACKENDS[name].forward(query, key, value, rows.masked, scale)
        out, lse = (x.unflatten(0, (q.shape[0], -1)) for x in (out, lse))
        held = [_seen(x.flatten(2, 3), rows) for x in (acc, top, total)]
        tokens = None if rows.span else _by_head(rows.queries, out.shape[2])
        _merge(held[0], held[1], held[2], out, lse, tokens)
        return
    heads = torch.arange(q.shape[2], device=q.device)[:, None]
    for n, part in _chunks(rows, q):
        t, key, value = rows.queries[n, :, part], k[n].to(acc.dtype), v[n].to(acc.dtype)
        scores = _scores(rows, n, part, q[:, t, heads].to(acc.dtype), key, scale)
        old = top[:, t, heads]
        new = torch.maximum(old, scores.amax(-1))
        base = torch.where(new > -torch.inf, new, 0.0)
        weights, kept = torch.exp(scores - base[..., None]), torch.exp(old - base)
        top[:, t, heads] = new
        total[:, t, heads] = total[:, t, heads] * kept + weights.sum(-1)
        acc[:, t, heads] = acc[:, t, heads] * kept[..., None] + torch.einsum(
            "bnhqgk,nhkbd->bnhqgd", weights, value
        )


def take_back(
    slopes: Slopes, rows: Rows, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Adds a block's share to the gradient of q; returns those of its k and v."""
    wide = slopes.dq.dtype
    name = kernel(q) if rows.by_kernel and slopes.outputs is not None else None
    if name is not None:
        return _take_back_by(name, slopes, rows, q, k, v, scale)
    delta = slopes.delta[rows.branch % len(slopes.delta)]
    heads = torch.arange(q.shape[2], device=q.device)[:, None]
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for n, part in _chunks(rows, q):
        t, key, value = rows.queries[n, :, part], k[n].to(wide), v[n].to(wide)
        query, dy = q[:, t, heads].to(wide), slopes.dy[:, t, heads].to(wide)
        scores = _scores(rows, n, part, query, key, scale)
        weights = torch.exp(scores - slopes.lse[:, t, heads][..., None])
        dv[n] += torch.einsum("bnhqgk,bnhqgd->nhkbd", weights, dy)
        slope = torch.einsum("bnhqgd,nhkbd->bnhqgk", dy, value) - delta[:, t, heads][..., None]
        slope *= weights * scale
        dk[n] += torch.einsum("bnhqgk,bnhqgd->nhkbd", slope, query)
        slopes.dq[:, t, heads] += torch.einsum("bnhqgk,nhkbd->bnhqgd", slope, key)
    return dk, dv


def narrow(dtype: torch.dtype) -> bool:
    """Whether attention kernels of some GPU take this dtype."""
    return dtype.itemsize == 2


def kernel(q: Tensor) -> str | None:
    """The attention kernel for blocks of these queries, or None."""
    if not q.is_cuda or width_refused("flash", q.shape[-1], q.dtype):
        return None
    generation = hardware.generation(q.device.index)
    if generation < 8:
        return None
    fastest = generation >= 9 and not torch.are_deterministic_algorithms_enabled()
    return "cudnn" if fastest and not width_refused("cudnn", q.shape[-1], q.dtype) else "flash"


def _take_back_by(
    name: str, slopes: Slopes, rows: Rows, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """`take_back` by the kernel `name`."""
    assert slopes.outputs is not None
    query, key, value = _for_kernel(rows, q, k, v)
    own = slopes.outputs[rows.branch % len(slopes.outputs)]
    dout, out, lse = (_picked(x.flatten(2, 3), rows).flatten(0, 1) for x in (slopes.dy, own, slopes.lse))
    dout, out, lse = readable(dout), readable(out), lse.contiguous()
    dq, dk, dv = BACKENDS[name].backward(dout, query, key, value, out, lse, rows.masked, scale)
    dq = dq.unflatten(0, (q.shape[0], -1))
    _add(slopes.dq.flatten(2, 3), rows, dq)
    if q.shape[3] > 1:
        dk, dv = (x.unflatten(1, (q.shape[2], -1)).sum(2, dtype=slopes.dq.dtype) for x in (dk, dv))
    dk, dv = (x.unflatten(0, (q.shape[0], -1)).permute(1, 2, 3, 0, 4) for x in (dk, dv))
    return dk, dv


def add_own(x: Tensor, rows: Rows, part: Tensor) -> None:
    """Adds [segments, kv heads, rows, B, D] to x [B, tokens, kv heads, D] where a block's keys are own
    tokens, and so its queries."""
    _add(x, rows, part.permute(3, 0, 1, 2, 4))


def add_keys(x: Tensor, rows: Rows, part: Tensor) -> None:
    """Adds [segments, kv heads, rows, B, D] to x [B, tokens, kv heads, D] where a block's keys are own
    tokens, and its queries are not."""
    _add_at(x, _by_head(rows.keys, x.shape[2]), part.permute(3, 0, 1, 2, 4))


def add_state(state: State, part: State, tokens: Tensor, heads: Tensor) -> None:
    """Adds softmaxes of other keys, [branches or 1, B, rows, queries a kv head(, D)], at these tokens and kv
    heads."""
    _join(*state, *part, tokens, heads)


def _add(x: Tensor, rows: Rows, part: Tensor) -> None:
    """Adds [B, segments, heads, rows, D] to x [B, tokens, heads, D] at a block's queries."""
    if rows.span:
        _seen(x, rows).add_(part)
    else:
        _add_at(x, _by_head(rows.queries, x.shape[2]), part)


def _for_kernel(rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """[B segments, heads, rows, D] of each, as kernels read them."""
    parts = [x.permute(3, 0, 1, 2, 4).flatten(0, 1) for x in (k, v)]
    if q.shape[3] > 1:
        parts = [x.repeat_interleave(q.shape[3], 1) for x in parts]
    return [readable(x) for x in (_picked(q.flatten(2, 3), rows).flatten(0, 1), *parts)]


def _picked(x: Tensor, rows: Rows) -> Tensor:
    """x [B, tokens, heads(, D)] of a block's queries, [B, segments, heads, rows(, D)]."""
    if rows.span:
        return _seen(x, rows)
    found: Tensor = x[:, _by_head(rows.queries, x.shape[2]), _heads(x)]
    return found


def _seen(x: Tensor, rows: Rows) -> Tensor:
    """A view of x as `_picked` where queries follow on each other; all of x where they don't."""
    if not rows.span:
        return x
    first, end = rows.span
    apart: Tensor = x[:, first:end].unflatten(1, rows.queries.shape[::2])
    return apart.transpose(2, 3)


def _by_head(tokens: Tensor, heads: int) -> Tensor:
    """Tokens [segments, kv heads or 1, rows] for all `heads`, unless they are one for all."""
    return tokens if tokens.shape[1] == 1 else tokens.repeat_interleave(heads // tokens.shape[1], 1)


def _heads(x: Tensor) -> Tensor:
    return torch.arange(x.shape[2], device=x.device)[:, None]


@_quick
def _merge(acc: Tensor, top: Tensor, total: Tensor, out: Tensor, lse: Tensor, tokens: Tensor | None) -> None:
    """Adds a block's output and lse [B, segments, heads, rows(, D)] to a softmax that lies in the same way,
    or, with `tokens`, to [B, tokens, heads(, D)] there."""
    if tokens is None:
        new = torch.maximum(top, lse)
        kept, weight = torch.exp(top - new), torch.exp(lse - new)
        acc.copy_(acc * kept[..., None] + weight[..., None] * out)
        total.copy_(total * kept + weight)
        top.copy_(new)
        return
    at = (slice(None), tokens, _heads(acc))
    new = torch.maximum(top[at], lse)
    kept, weight = torch.exp(top[at] - new), torch.exp(lse - new)
    acc[at] = acc[at] * kept[..., None] + weight[..., None] * out
    total[at] = total[at] * kept + weight
    top[at] = new


@_quick
def _join(
    acc: Tensor, top: Tensor, total: Tensor, more: Tensor, its_top: Tensor, its_total: Tensor,
    tokens: Tensor, heads: Tensor,
) -> None:  # fmt: skip
    """Adds the softmaxes `more` to those at `tokens` and `heads`; either may have seen nothing yet."""
    at = (slice(None), slice(None), tokens, heads)
    new = torch.maximum(top[at], its_top)
    base = torch.where(new > -torch.inf, new, 0.0)
    kept, weight = torch.exp(top[at] - base), torch.exp(its_top - base)
    acc[at] = acc[at] * kept[..., None] + more * weight[..., None]
    total[at] = total[at] * kept + its_total * weight
    top[at] = new


@_quick
def _divide(acc: Tensor, top: Tensor, total: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The output of a softmax in this dtype, and its log-sum-exp."""
    seen = total > 0
    y = acc / torch.where(seen, total, 1.0)[..., None]
    return y.to(dtype), torch.where(seen, top + total.log(), -torch.inf)


@_quick
def _add_at(x: Tensor, tokens: Tensor, part: Tensor) -> None:
    """Adds [B, segments, heads, rows, D] to x [B, tokens, heads, D] at `tokens`."""
    at = (slice(None), tokens, _heads(x))
    x[at] = x[at] + part


@_quick
def dotted(dy: Tensor, outputs: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over features of dy times each softmax's output, in this dtype."""
    return (dy.to(dtype) * outputs).sum(-1)


def _scores(rows: Rows, n: slice, part: slice, q: Tensor, k: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("bnhqgd,nhkbd->bnhqgk", q, k) * scale
    if rows.masked:
        unseen = rows.tokens[n, :, None, :] > rows.last[n, :, part, None]
        scores.masked_fill_(unseen[None, :, :, :, None], -torch.inf)
    return scores


def _chunks(rows: Rows, q: Tensor) -> Iterator[tuple[slice, slice]]:
    """Segments and query rows whose scores fit."""
    segments, _, count = rows.queries.shape
    width = q.shape[0] * q.shape[2] * q.shape[3] * rows.keys.shape[2]  # scores a query row of all heads
    step = max(1, min(count, _SCORES // max(1, width)))
    items = max(1, _SCORES // max(1, width * step))
    for n in range(0, segments, items):
        for row in range(0, count, step):
            yield slice(n, n + items), slice(row, row + step)
