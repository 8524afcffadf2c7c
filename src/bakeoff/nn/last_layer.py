"""The memory whose last layer alone learns: a gated linear memory over fixed features, in chunks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bakeoff.ops.memory_scan import MemoryState
from bakeoff.ops.memory_scan.plain import coefficients

__all__ = ["last_layer_stream"]

Linear = tuple[Tensor, Tensor]
"""(W2 [G, E, H], b2 [G, E])"""


def last_layer_stream(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    decay: Tensor,
    forget: Tensor,
    state: MemoryState,
    *,
    chunk: int,
    read: str,
) -> tuple[Tensor, MemoryState]:
    """As `bakeoff.ops.memory_scan.memory_stream`, but for W1 and b1, which stay as they are.

    With features s = silu(W1 x + b1) the gradient of token i at the chunk's start is (dY_i s_i', dY_i),
    dY_i = 2 (W2 s_i + b2 - v_i), so that inside a chunk the memory is its start plus a sum of these:
    o_t = beta_t (W2 s_t + b2) + f_t (S2 s_t + s2) - sum_i G_ti (s_i . s_t + 1) dY_i.
    """
    first, dtype = state.memory[:2], q.dtype
    q, k = (F.silu(_answer(first, x.to(first[0].dtype))) for x in (q, k))
    memory, momentum, start = ((parts[2], parts[3]) for parts in (state.memory, state.momentum, state.start))
    if isinstance(state.filled, Tensor):  # of one token, with shapes and launches as of every other
        w, b = (torch.where(state.filled == 0, now, then) for now, then in zip(memory, start, strict=True))
        weights = coefficients(lr, decay, forget)
        y, memory, momentum = _piece(q, k, v, weights, (w, b), memory, momentum, read)
        counted = torch.remainder(state.filled + 1, chunk)
        kept = MemoryState((*first, *memory), (*state.momentum[:2], *momentum), (*first, w, b), counted)
        return y.to(dtype), kept
    out, begin, T, filled = [], 0, q.shape[1], state.filled
    while begin < T:
        end = min(T, begin + chunk - filled)
        if filled == 0:
            start = memory
        part = slice(begin, end)
        weights = coefficients(lr[:, part], decay[:, part], forget[:, part])
        y, memory, momentum = _piece(
            q[:, part], k[:, part], v[:, part], weights, start, memory, momentum, read
        )
        out.append(y.to(dtype))
        begin, filled = end, (filled + end - begin) % chunk
    kept = MemoryState((*first, *memory), (*state.momentum[:2], *momentum), (*first, *start), filled)
    return torch.cat(out, dim=1), kept


def _piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: tuple[Tensor, ...],
    start: Linear,
    memory: Linear,
    momentum: Linear,
    read: str,
) -> tuple[Tensor, Linear, Linear]:
    """Tokens of one chunk, of features q and k [G, b, H]; `weights` as of `coefficients`."""
    beta, f, G, slower, n = weights
    dy = 2 * (_answer(start, k) - v)
    if read == "chunk":
        out = _answer(start, q)
    else:
        rows = slice(1, None) if read == "after" else slice(-1)
        learned = (G[:, rows] * (q @ k.mT + 1)) @ dy
        out = beta[:, rows, None] * _answer(memory, q) + f[:, rows, None] * _answer(momentum, q) - learned
    keep, moved, slower = beta[:, -1, None], f[:, -1, None], slower[:, None]
    added, pushed = G[:, -1, :, None] * dy, n[..., None] * dy
    (w, b), (s, t) = memory, momentum
    after = keep[..., None] * w + moved[..., None] * s - added.mT @ k, keep * b + moved * t - added.sum(1)
    then = slower[..., None] * s - pushed.mT @ k, slower * t - pushed.sum(1)
    return out, after, then


def _answer(layer: tuple[Tensor, ...], x: Tensor) -> Tensor:
    """W x + b of x [G, T, H]."""
    return torch.baddbmm(layer[1][:, None], x, layer[0].mT)
