"""The memory whose last layer alone learns: a gated linear memory over fixed features, in chunks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bakeoff.ops.memory_scan import MemoryState

__all__ = ["last_layer_stream"]

_LEAST = 1e-30  # of what is kept of a step: below, its logarithm would be infinite
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
    first, filled, dtype = state.memory[:2], int(state.filled), q.dtype
    q, k = (F.silu(_answer(first, x.to(first[0].dtype))) for x in (q, k))
    memory, momentum, start = ((parts[2], parts[3]) for parts in (state.memory, state.momentum, state.start))
    out, begin, T = [], 0, q.shape[1]
    while begin < T:
        end = min(T, begin + chunk - filled)
        if filled == 0:
            start = memory
        part = slice(begin, end)
        weights = _coefficients(lr[:, part], decay[:, part], forget[:, part])
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
    """Tokens of one chunk, of features q and k [G, b, H]; `weights` as of `_coefficients`."""
    beta, f, m, n, G = weights
    dy = 2 * (_answer(start, k) - v)
    if read == "chunk":
        out = _answer(start, q)
    else:
        by, fy, Gy = (beta, f, G) if read == "after" else _one_earlier(beta, f, G)
        learned = (Gy * (q @ k.mT + 1)) @ dy
        out = by[..., None] * _answer(memory, q) + fy[..., None] * _answer(momentum, q) - learned
    keep, moved, slower = beta[:, -1, None], f[:, -1, None], m[:, -1, None]
    added, pushed = G[:, -1, :, None] * dy, n[:, -1, :, None] * dy
    (w, b), (s, t) = memory, momentum
    after = keep[..., None] * w + moved[..., None] * s - added.mT @ k, keep * b + moved * t - added.sum(1)
    then = slower[..., None] * s - pushed.mT @ k, slower * t - pushed.sum(1)
    return out, after, then


def _answer(layer: tuple[Tensor, ...], x: Tensor) -> Tensor:
    """W x + b of x [G, T, H]."""
    return torch.baddbmm(layer[1][:, None], x, layer[0].mT)


def _coefficients(lr: Tensor, decay: Tensor, forget: Tensor) -> tuple[Tensor, ...]:
    """beta, f, m [G, b] and n, G [G, b, b]: what the memory and the momentum before, and each token's
    gradient, weigh in the momentum (m, n) and in the memory (beta, f, G) after each token."""
    kept, slowed = _products(1 - forget), _products(decay)
    n = slowed * lr[:, None, :]
    m = decay.cumprod(1)
    return (1 - forget).cumprod(1), (kept @ m[..., None])[..., 0], m, n, kept @ n


def _products(factors: Tensor) -> Tensor:
    """[G, b, b]: for i <= t the product of factors [G, b] over i+1 .. t, else 0."""
    logs = factors.clamp(min=_LEAST).log().cumsum(1)
    b = factors.shape[1]
    lower = torch.ones(b, b, dtype=torch.bool, device=factors.device).tril()
    return (logs[:, :, None] - logs[:, None, :]).masked_fill(~lower, -torch.inf).exp()


def _one_earlier(beta: Tensor, f: Tensor, G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The coefficients of the memory before each token."""
    return F.pad(beta[:, :-1], (1, 0), value=1.0), F.pad(f[:, :-1], (1, 0)), F.pad(G[:, :-1], (0, 0, 1, 0))
