"""PyTorch's own `rotary`: the ``eager`` and ``compiled`` candidates."""

import torch
import torch.nn.functional as F

from bakeoff.ops.rotary.reference import reference, table_rows
from bakeoff.select.declare.compiled import compiled as compile_formula

__all__ = ["compiled", "eager"]


def eager(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    position_ids: torch.Tensor | None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch: a rotation is a complex product, which takes three kernels a tensor instead of nine;
    heads are normalised by F.rms_norm.

    Inside torch.compile it is the reference instead: Inductor fuses that, but no complex numbers.
    """
    if torch.compiler.is_compiling():
        return reference(q, k, cos, sin, interleaved, position_ids, q_weight, k_weight, eps, offset)
    if q_weight is not None and k_weight is not None:
        normed = _normed(q, q_weight, eps, offset), _normed(k, k_weight, eps, offset)
        turned = eager(*normed, cos, sin, interleaved, position_ids)
        return turned[0].to(q.dtype), turned[1].to(k.dtype)
    wide = torch.promote_types(torch.promote_types(q.dtype, cos.dtype), torch.float32)
    turn = torch.complex(
        table_rows(cos, q.shape[1], position_ids).to(wide), table_rows(sin, q.shape[1], position_ids).to(wide)
    )
    return _turned(q, turn, interleaved), _turned(k, turn, interleaved)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """Each head normalised and scaled: as it is where the dtypes agree, else on float32 copies."""
    if x.dtype == weight.dtype and not offset:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide) + offset, eps)


def _turned(x: torch.Tensor, turn: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if x.numel() == 0:  # no strides to speak of
        nothing = turn.real.sum() + turn.imag.sum()  # the tables' gradients are zero, not absent
        return x + nothing.to(x.dtype)
    half = turn.shape[-1]
    pairs = x[..., : 2 * half].unflatten(-1, (half, 2) if interleaved else (2, half))
    if not interleaved:
        pairs = pairs.transpose(-1, -2)
    # With a memory format, cast and rearrangement are one kernel; without a cast there is only the latter.
    pairs = pairs.to(turn.real.dtype, memory_format=torch.contiguous_format).contiguous()
    turned = torch.view_as_real(torch.view_as_complex(_even(pairs)) * turn)
    if turned.requires_grad:
        # What arrives becomes complex numbers, too.
        turned.register_hook(lambda arriving: None if arriving is None else _even(arriving))
    if not interleaved:
        turned = turned.transpose(-1, -2)
    turned = turned.to(x.dtype, memory_format=torch.contiguous_format).flatten(-2)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), -1)


def _even(pairs: torch.Tensor) -> torch.Tensor:
    """The pairs, copied where they don't begin at even places in memory, as complex numbers do."""
    if pairs.storage_offset() % 2 or any(step % 2 for step in pairs.stride()[:-1]):
        return pairs.clone(memory_format=torch.contiguous_format)
    return pairs


compiled = compile_formula(reference)
