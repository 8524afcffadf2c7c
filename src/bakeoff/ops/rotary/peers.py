"""Third-party rotary embeddings behind the op's signature. What the adaptation costs counts as theirs.

None of them normalises heads in the same pass; QuACK does in the epilogue of the projection, which is another
op.

Written against liger-kernel 0.8.5, quack-kernels 0.6.5 and fla-core 0.6.0.
"""

from typing import Any

import torch

from bakeoff.alignment import aligned, aligned_gradient
from bakeoff.derivatives import once_differentiable

__all__ = ["fla", "liger", "quack"]

Pair = tuple[torch.Tensor, torch.Tensor]


class _Liger(torch.autograd.Function):
    """Liger's kernels turn their arguments in place, also the incoming gradients: they get copies."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
        from liger_kernel.ops.rope import rope_forward

        rotated = 2 * cos.shape[1]
        q, k, cos, sin = rope_forward(*_copies(q, k), cos, sin, rotary_dim=rotated)
        ctx.save_for_backward(cos, sin)
        ctx.rotated = rotated
        return q.transpose(1, 2), k.transpose(1, 2)

    @staticmethod
    @once_differentiable("rotary's 'liger'", "pass impl='eager'")
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from liger_kernel.ops.rope import rope_backward

        dq, dk = rope_backward(*_copies(dq, dk), *ctx.saved_tensors, rotary_dim=ctx.rotated)
        return dq.transpose(1, 2), dk.transpose(1, 2), None, None


def _copies(q: torch.Tensor, k: torch.Tensor) -> Pair:
    """New dense [B, T, H, D], seen as the [B, H, T, D] that Liger expects."""
    dense = torch.contiguous_format
    return q.clone(memory_format=dense).transpose(1, 2), k.clone(memory_format=dense).transpose(1, 2)


def liger(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: object) -> Pair:
    """Liger-Kernel: one launch for q and k, in place, one program a token."""
    T = q.shape[1]
    turned: Pair = _Liger.apply(q, k, cos[:T], sin[:T])  # type: ignore[no-untyped-call]
    return turned


def quack(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, *_: object
) -> Pair:
    """QuACK (CuTe DSL): one launch for q, one for k."""
    from quack.rotary import apply_rotary_emb

    q, k, cos, sin = map(aligned, (q, k, cos, sin))
    turned, turned_k = (aligned_gradient(apply_rotary_emb(x, cos, sin, interleaved)) for x in (q, k))
    return turned, turned_k


def fla(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, *_: object
) -> Pair:
    """flash-linear-attention: one launch for q, one for k."""
    from fla.modules.rotary import rotary_embedding

    return rotary_embedding(q, cos, sin, interleaved), rotary_embedding(k, cos, sin, interleaved)
