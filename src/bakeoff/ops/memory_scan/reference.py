"""The definition of memory_scan: the plain recurrence, one token after the other."""

import torch
from torch.utils.checkpoint import checkpoint

__all__ = ["COEFFICIENTS", "LEAST", "iterated", "memory_scan", "moved", "recurrence"]

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LEAST = 1e-7
"""Added to lengths that are divided by."""


def memory_scan(
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
    """Shapes as in `bakeoff.ops.memory_scan`, memory and momentum by their parts: o, then these eight.

    Backward runs each chunk's tokens again: autograd would keep a memory per token. With `orthogonalize` a
    memory that begins at 0 tells by what a chunk would move the one at its start.
    """
    real = torch.promote_types(torch.promote_types(q.dtype, memory_w1.dtype), torch.float32)
    tokens = [t.to(real) for t in (q, k, v, lr, decay, forget)]
    memory = [t.to(real, copy=True) for t in (memory_w1, memory_b1, memory_w2, memory_b2)]
    momentum = [t.to(real, copy=True) for t in (momentum_w1, momentum_b1, momentum_w2, momentum_b2)]
    outs = [tokens[2][:, :0]]
    for start in range(0, q.shape[1], chunk):
        part = [t[:, start : start + chunk] for t in tokens]
        begin = [torch.zeros_like(w) for w in memory] if orthogonalize else memory
        out, *state = checkpoint(
            recurrence,
            *part,
            *memory,
            *begin,
            *momentum,
            read,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        outs.append(out)
        if orthogonalize:
            kept = (1 - part[5]).prod(1)
            state[:4] = [
                moved(m, kept, step, orthogonalize, real) if m.dim() == 3 else kept[:, None] * m + step
                for m, step in zip(memory, state[:4], strict=True)
            ]
        memory, momentum = state[:4], state[4:]
    return (torch.cat(outs, 1).to(q.dtype), *memory, *momentum)


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lr: torch.Tensor,
    decay: torch.Tensor,
    forget: torch.Tensor,
    *rest: torch.Tensor | str,
) -> tuple[torch.Tensor, ...]:
    """Some tokens of one chunk. `rest`: the memory at the chunk's start, at which gradients are taken, the
    memory and the momentum now, four tensors each, and `read`. Gives o and the eight new ones."""
    read = str(rest[-1])
    parts = [t for t in rest if isinstance(t, torch.Tensor)]
    start, memory, momentum = parts[:4], parts[4:8], parts[8:]
    outs = []
    for t in range(q.shape[1]):
        step, keep_momentum, keep = ((x[:, t, None]) for x in (lr, decay, 1 - forget))
        before = memory
        momentum = [
            _times(keep_momentum, s) - _times(step, u)
            for s, u in zip(momentum, _gradient(start, k[:, t], v[:, t]), strict=True)
        ]
        memory = [_times(keep, m) + s for m, s in zip(memory, momentum, strict=True)]
        outs.append(_answer({"after": memory, "before": before, "chunk": start}[read], q[:, t]))
    return (torch.stack(outs, 1), *memory, *momentum)


def _times(number: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """One number a group, [G, 1], times a part of the memory."""
    return number[..., None] * part if part.dim() == 3 else number * part


def _answer(memory: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """M(x), [G, Dv]."""
    w1, b1, w2, b2 = memory
    hidden = torch.nn.functional.silu(_apply(w1, x) + b1)
    return _apply(w2, hidden) + b2


def _gradient(memory: list[torch.Tensor], k: torch.Tensor, v: torch.Tensor) -> Parts:
    """The gradient of |M(k) - v|^2 in each part of the memory, in closed form."""
    w1, b1, w2, b2 = memory
    z = _apply(w1, k) + b1
    gate = torch.sigmoid(z)
    hidden = z * gate
    error = 2 * (_apply(w2, hidden) + b2 - v)
    slope = _apply(w2.mT, error) * gate * (1 + z * (1 - gate))
    return slope[..., None] * k[:, None], slope, error[..., None] * hidden[:, None], error


def _apply(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A matrix a group [G, n, m] times a vector a group [G, m]."""
    return (weight @ x[..., None])[..., 0]


def moved(
    weight: torch.Tensor, kept: torch.Tensor, step: torch.Tensor, steps: int, narrow: torch.dtype
) -> torch.Tensor:
    """The matrices after a chunk: kept W + NS(step), whose rows then get the lengths of W's.

    Args:
        weight: W [G, rows, columns], before the chunk.
        kept: [G], what forgetting leaves of W.
        step: [G, rows, columns], by what the chunk moves W without orthogonalisation.
        steps, narrow: as in `iterated`.

    Source: Zhang et al. 2025, Test-Time Training Done Right, for the rows' lengths.
    """
    new = kept[:, None, None] * weight + iterated(step, steps, narrow)[0]
    found: torch.Tensor = new * (weight.norm(dim=2, keepdim=True) / (new.norm(dim=2, keepdim=True) + LEAST))
    return found


def iterated(
    matrices: torch.Tensor, steps: int, narrow: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """NS(X), the nearest half-orthogonal matrices, roughly, of [G, rows, columns], and X before each step.

    X/|X|, then `steps` times X <- a X + (b A + c A^2) X with A = X X'; products are taken in `narrow`.

    Source: Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if tall else matrices
    x = (wide / (wide.norm(dim=(1, 2), keepdim=True) + LEAST)).to(narrow)
    states = []
    for _ in range(steps):
        states.append(x)
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    done: torch.Tensor = x.mT if tall else x
    return done.to(matrices.dtype), states
