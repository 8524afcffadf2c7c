"""The ``chunked`` candidate of memory_scan: the dual form, and a backward that keeps the states at chunks'
starts.

Autograd would keep all that a chunk computes; this runs a chunk again and differentiates it by itself.
"""

from typing import Any

import torch

from bakeoff.autocast import without_autocast
from bakeoff.derivatives import once_differentiable
from bakeoff.ops.memory_scan.plain import chunk_step, working_dtype

__all__ = ["chunked"]


def chunked(*args: Any) -> tuple[torch.Tensor, ...]:
    """The arguments of `bakeoff.ops.memory_scan.reference.memory_scan`, all by position."""
    return _Chunked.apply(*args)  # type: ignore[no-any-return, no-untyped-call]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        q, k, v, *parts, lr, decay, forget, chunk, read, orthogonalize = (*args, 0)[:17]
        real = working_dtype(q, parts[0])
        state = [part.to(real) for part in parts]
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        starts = []
        with without_autocast(q):
            for index in range(-(-q.shape[1] // chunk)):
                starts += state
                here = slice(index * chunk, (index + 1) * chunk)
                piece = [x[:, here] for x in (q, k, v, lr, decay, forget)]
                out, *state = chunk_step(piece, state[:4], state[:4], state[4:], read, orthogonalize)
                o[:, here] = out
        ctx.save_for_backward(q, k, v, lr, decay, forget, *starts)
        ctx.chunk, ctx.how, ctx.dtypes = chunk, (read, orthogonalize), [part.dtype for part in parts]
        ctx.arguments = len(args)
        if not starts:
            state = [part.clone() for part in state]
        return (o, *state)

    @staticmethod
    @once_differentiable("memory_scan's 'chunked'", "pass impl='eager'")
    def backward(ctx: Any, do: torch.Tensor, *coming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, starts = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
        found = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in tokens]
        going = list(coming)
        with without_autocast(do):
            for index in range(len(starts) // 8 - 1, -1, -1):
                here = slice(index * ctx.chunk, (index + 1) * ctx.chunk)
                piece = [x[:, here].detach().requires_grad_() for x in tokens]
                state = [x.detach().requires_grad_() for x in starts[8 * index : 8 * index + 8]]
                with torch.enable_grad():
                    made = chunk_step(piece, state[:4], state[:4], state[4:], *ctx.how)
                grads = torch.autograd.grad(
                    made, [*piece, *state], [do[:, here].to(made[0].dtype), *going], materialize_grads=True
                )
                for whole, part in zip(found, grads[:6], strict=True):
                    whole[:, here] = part
                going = list(grads[6:])
        going = [x.to(dtype) for x, dtype in zip(going, ctx.dtypes, strict=True)]
        return (*found[:3], *going, *found[3:], *[None] * (ctx.arguments - 14))
