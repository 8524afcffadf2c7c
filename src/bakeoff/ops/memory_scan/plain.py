"""PyTorch's own memory_scan: the dual form, a chunk at a time, differentiated by autograd.

Inside a chunk the memory is never formed. Its answer to a query is that of the memory and the momentum at the
chunk's start, weighted with numbers that the gates alone make, less a masked attention to the chunk's keys.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.compiler import is_compiling

from bakeoff.autocast import without_autocast
from bakeoff.ops.memory_scan.reference import moved
from bakeoff.select.choose.hot import transformed
from bakeoff.select.declare.compiled import compiled as compile_formula

Ends = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]

__all__ = [
    "at_the_end",
    "chunk_step",
    "coefficients",
    "compiled",
    "eager",
    "product_dtype",
    "products",
    "products_backward",
    "working_dtype",
]


def eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    memory_w1: torch.Tensor,
    memory_b1: torch.Tensor,
    memory_w2: torch.Tensor,
    memory_b2: torch.Tensor,
    momentum_w1: torch.Tensor,
    momentum_b1: torch.Tensor,
    momentum_w2: torch.Tensor,
    momentum_b2: torch.Tensor,
    lr: torch.Tensor,
    decay: torch.Tensor,
    forget: torch.Tensor,
    chunk: int = 64,
    read: str = "after",
    orthogonalize: int = 0,
) -> tuple[torch.Tensor, ...]:
    """A loop over chunks. Products of 16-bit tokens are rounded to their dtype, the state stays float32."""
    parts = (memory_w1, memory_b1, memory_w2, memory_b2, momentum_w1, momentum_b1, momentum_w2, momentum_b2)
    with without_autocast(q):
        return _eager(q, k, v, parts, lr, decay, forget, chunk, read, orthogonalize)


def _eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    parts: tuple[torch.Tensor, ...],
    lr: torch.Tensor,
    decay: torch.Tensor,
    forget: torch.Tensor,
    chunk: int,
    read: str,
    orthogonalize: int,
) -> tuple[torch.Tensor, ...]:
    real = working_dtype(q, parts[0])
    state = tuple(part.to(real, copy=True) for part in parts)
    outs = [v[:, :0].to(real)]
    # The number of chunks, not T, is what torch.compile then makes a graph for.
    for index in range(-(-q.shape[1] // chunk)):
        piece = [x[:, index * chunk : (index + 1) * chunk] for x in (q, k, v, lr, decay, forget)]
        out, *new = chunk_step(piece, state[:4], state[:4], state[4:], read, orthogonalize)
        outs.append(out)
        state = tuple(new)
    return (torch.cat(outs, 1).to(q.dtype), *state)


def chunk_step(
    tokens: Sequence[torch.Tensor],
    start: Sequence[torch.Tensor],
    memory: Sequence[torch.Tensor],
    momentum: Sequence[torch.Tensor],
    read: str,
    orthogonalize: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Some tokens, q, k, v, lr, decay and forget, of one chunk: o in the working dtype, the new memory's
    four parts, the new momentum's.

    Gradients are taken at `start`, the memory at the chunk's start, which is `memory` too where these are its
    first tokens. With `orthogonalize` they are the whole of a chunk.
    """
    real = memory[0].dtype
    narrow = product_dtype(tokens[0], real)

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.to(narrow) @ b.to(narrow)).to(real)

    q, k, v, lr, decay, forget = (x.to(real) for x in tokens)
    w1, b1, w2, b2 = start
    z = mm(k, w1.mT) + b1[:, None]
    gate = torch.sigmoid(z)
    hidden = z * gate
    error = 2 * (mm(hidden, w2.mT) + b2[:, None] - v)
    slope = mm(error, w2) * gate * (1 + z * (1 - gate))
    if read == "chunk":
        o = mm(F.silu(mm(q, w1.mT) + b1[:, None]), w2.mT) + b2[:, None]
    if read == "chunk":
        ends = at_the_end(lr, decay, forget)
    else:
        beta, f, G, last, n = coefficients(lr, decay, forget)
        ends = (beta[:, -1], f[:, -1], G[:, -1]), (torch.zeros_like(last), last, n)
        rows = slice(1, None) if read == "after" else slice(-1)
        own, pushed, weights = beta[:, rows, None], f[:, rows, None], G[:, rows]
        (w1, b1, w2, b2), (s1, c1, s2, c2) = memory, momentum
        seen = weights * (mm(q, k.mT) + 1)
        zq = own * (mm(q, w1.mT) + b1[:, None]) + pushed * (mm(q, s1.mT) + c1[:, None]) - mm(seen, slope)
        hq = F.silu(zq)
        seen = weights * (mm(hq, hidden.mT) + 1)
        o = own * (mm(hq, w2.mT) + b2[:, None]) + pushed * (mm(hq, s2.mT) + c2[:, None]) - mm(seen, error)
    new = []
    for of_memory, (own, pushed, weights) in zip((True, False), ends, strict=True):
        rows_1, rows_2 = weights[..., None] * slope, weights[..., None] * error
        sums = (mm(rows_1.mT, k), rows_1.sum(1), mm(rows_2.mT, hidden), rows_2.sum(1))
        for m, s, u in zip(memory, momentum, sums, strict=True):
            shape = (-1, *[1] * (m.dim() - 1))
            step = pushed.view(shape) * s - u
            if of_memory and orthogonalize and m.dim() == 3:
                new.append(moved(m, own, step, orthogonalize, narrow))
            else:
                new.append(own.view(shape) * m + step)
    return (o, *new)


def coefficients(lr: torch.Tensor, decay: torch.Tensor, forget: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a chunk's gates [..., b] make of memory, momentum and gradients, without a division.

    M_t = beta_t M_0 + f_t S_0 - sum_i G_ti u_i and S_b = m S_0 - sum_i n_i u_i. Gives beta, f [..., b + 1]
    and G [..., b + 1, b], in row t what holds after t tokens, then m [...] and n [..., b].
    """
    kept, pushed = (_products(F.pad(x, (1, 0), value=1.0)) for x in (1 - forget, decay))
    pushed = pushed * F.pad(lr, (1, 0), value=1.0)[..., None, :]
    # The momentum before the first token isn't added to the memory: row 0 counts for nothing.
    total = kept @ F.pad(pushed[..., 1:, :], (0, 0, 1, 0))
    return kept[..., 0], total[..., 0], total[..., 1:], pushed[..., -1, 0], pushed[..., -1, 1:]


def at_the_end(lr: torch.Tensor, decay: torch.Tensor, forget: torch.Tensor) -> Ends:
    """The last rows of `coefficients` alone, in a number of steps that grows with the logarithm of b: for
    memory and momentum what is left of the memory, of the momentum, [...], and the weights of the tokens'
    gradients, [..., b].
    """
    kept, pushed = (_behind(x) for x in (1 - forget, decay))
    # G_bi / lr_i = K_i + decay_{i+1} G_{b,i+1} / lr_{i+1}, K_i what the memory keeps of token i.
    factor, total, step = F.pad(decay[..., 1:], (0, 1)), kept, 1
    while step < lr.shape[-1]:
        total = total + factor * F.pad(total[..., step:], (0, step))
        factor = factor * F.pad(factor[..., step:], (0, step))
        step *= 2
    m = decay[..., 0] * pushed[..., 0]
    # A token of rate 1 before which there is no memory: the momentum at the start, decayed once.
    memory = (1 - forget[..., 0]) * kept[..., 0], decay[..., 0] * total[..., 0], lr * total
    return memory, (torch.zeros_like(m), m, lr * pushed)


def _behind(x: torch.Tensor) -> torch.Tensor:
    """The product of all of x [..., b] behind each."""
    total, step = F.pad(x[..., 1:], (0, 1), value=1.0), 1
    while step < x.shape[-1]:
        total = total * F.pad(total[..., step:], (0, step), value=1.0)
        step *= 2
    return total


def _products(x: torch.Tensor) -> torch.Tensor:
    if not is_compiling() and transformed():  # transforms go through PyTorch's own functions alone
        return products(x)
    return _Products.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        found = products(x)
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, dfound: torch.Tensor) -> torch.Tensor:
        return products_backward(ctx.saved_tensors[0], dfound)


def products(x: torch.Tensor) -> torch.Tensor:
    """P[t, i] = x_{i+1} ... x_t for t >= i, else 0, of x [..., n]."""
    size = x.shape[-1]
    below = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    one, zero = (torch.full((), number, dtype=x.dtype, device=x.device) for number in (1, 0))
    return torch.where(below, torch.where(below.tril(-1), x[..., None], one).cumprod(-2), zero)


def products_backward(found: torch.Tensor, dfound: torch.Tensor) -> torch.Tensor:
    """The gradient of x, given what `products` found. x_l stands in P[t, i] for i < l <= t, between P[t, l]
    and P[l - 1, i]. PyTorch's own gradient of a cumulative product asks on the host whether there is a
    zero."""
    behind = (found.mT @ dfound.tril())[..., 1:, :]
    return F.pad((behind * found[..., :-1, :]).sum(-1), (1, 0))


def working_dtype(q: torch.Tensor, memory: torch.Tensor) -> torch.dtype:
    """float64 if a tensor has that precision, else float32."""
    return torch.promote_types(torch.promote_types(q.dtype, memory.dtype), torch.float32)


def product_dtype(q: torch.Tensor, real: torch.dtype) -> torch.dtype:
    """What matrix products are taken in: 16 bits where q has 16."""
    return q.dtype if q.dtype.itemsize == 2 else real


compiled = compile_formula(eager)
