"""PyTorch's own short_conv: the ``eager`` candidate."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bakeoff.ops.short_conv.reference import boundaries
from bakeoff.ops.short_conv.reference import short_conv as reference

__all__ = ["eager"]


def eager(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """A depthwise F.conv1d behind the state, then F.silu: one rounding more than the definition has."""
    if x.numel() == 0 or weight.shape[1] == 1:
        return reference(x, weight, bias, activation, state, cu_seqlens)
    if cu_seqlens is not None:
        return _packed(x, weight, bias, activation, state, cu_seqlens)
    if state is None:
        state = x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[2])
    whole = torch.cat([state, x], dim=1)
    return _convolve(whole, weight, bias, activation), whole[:, x.shape[1] :].clone()


def _convolve(whole: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """[B, T, C] of [B, W-1+T, C], the inputs before the first position included."""
    wide = torch.promote_types(whole.dtype, weight.dtype)
    taps = weight[:, None].to(wide)
    offset = None if bias is None else bias.to(wide)
    y = F.conv1d(whole.mT.to(wide), taps, offset, groups=whole.shape[2]).mT
    return (F.silu(y) if activation == "silu" else y).to(whole.dtype)


def _packed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    state: Tensor | None,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """All sequences in one row, each behind its own W-1 earlier inputs."""
    T, C, past = x.shape[1], x.shape[2], weight.shape[1] - 1
    count = cu_seqlens.shape[0] - 1
    starts, ends, row = boundaries(cu_seqlens, T)
    places = torch.arange(T, device=x.device) + (row + 1) * past
    items = torch.arange(count, device=x.device)
    behind = torch.arange(past, device=x.device)
    whole = x.new_zeros(T + count * past, C).index_copy(0, places, x[0])
    if state is not None:
        heads = (starts + items * past)[:, None] + behind
        whole = whole.index_copy(0, heads.flatten(), state.flatten(0, 1))
    tails = (ends + items * past)[:, None] + behind
    y = _convolve(whole[None], weight, bias, activation)
    return y[:, places - past], whole[tails]
