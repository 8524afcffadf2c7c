"""The neural memory as one would write it with autograd: for every token a gradient and a memory of its own.

What published code does (per-sample gradients by `torch.func`), here with the results of memory_scan: the
eager formulation that whole steps are measured against.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bakeoff.nn import NeuralMemory
from bakeoff.ops.memory_scan import MemoryState
from bakeoff.ops.memory_scan.plain import coefficients

__all__ = ["autograd_stream", "by_autograd"]


def by_autograd(model: nn.Module) -> nn.Module:
    """`model`, its memories computed so from now on."""
    for module in model.modules():
        if isinstance(module, NeuralMemory):
            module.stream = autograd_stream
    return model


def _answer(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, x: Tensor) -> Tensor:
    return w2 @ F.silu(w1 @ x + b1) + b2


def _error(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (_answer(w1, b1, w2, b2, k) - v).square().sum()


_of_tokens = torch.func.vmap(torch.func.grad(_error, (0, 1, 2, 3)), (None, None, None, None, 0, 0))
_gradients = torch.func.vmap(_of_tokens)
_answers = torch.func.vmap(torch.func.vmap(_answer))


def autograd_stream(
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
    """As `bakeoff.ops.memory_scan.memory_stream`, from the start of a chunk on."""
    if state.filled:
        raise ValueError("autograd_stream begins at the start of a chunk: give whole rows")
    memory, momentum, start, out = state.memory, state.momentum, state.start, []
    with torch.autocast(q.device.type, enabled=False):
        q, k, v, dtype = q.to(lr.dtype), k.to(lr.dtype), v.to(lr.dtype), q.dtype
        for begin in range(0, q.shape[1], chunk):
            part, start = slice(begin, begin + chunk), memory
            beta, f, G, m, n = coefficients(lr[:, part], decay[:, part], forget[:, part])
            w1, b1, w2, b2 = start
            u = _gradients(w1, b1, w2, b2, k[:, part], v[:, part])
            every, last = [], []
            for weight, moving, own in zip(memory, momentum, u, strict=True):
                steps = "gt,g...->gt..."
                sums = torch.einsum("gti,gi...->gt...", G, own)
                every.append(torch.einsum(steps, beta, weight) + torch.einsum(steps, f, moving) - sums)
                last.append(torch.einsum("g,g...->g...", m, moving) - torch.einsum("gi,gi...->g...", n, own))
            rows = slice(1, None) if read == "after" else slice(-1)
            seen = [w[:, :1].expand_as(w[:, 1:]) if read == "chunk" else w[:, rows] for w in every]
            out.append(_answers(seen[0], seen[1], seen[2], seen[3], q[:, part]))
            w1, b1, w2, b2 = (w[:, -1] for w in every)
            s1, c1, s2, c2 = last
            memory, momentum = (w1, b1, w2, b2), (s1, c1, s2, c2)
    kept = MemoryState(memory, momentum, start, q.shape[1] % chunk)
    return torch.cat(out, dim=1).to(dtype), kept
