"""The definition of short_conv, in plain PyTorch."""

import torch
from torch import Tensor

__all__ = ["boundaries", "last_inputs", "short_conv"]


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y[t] = activation(bias + sum_j weight[W-1-j] * x[t-j]) in each channel, and the last W-1 inputs.

    Shapes and dtypes as in `bakeoff.ops.short_conv`. Computes in float32, or in float64 where an argument is,
    and casts once at the end. Differentiable by autograd, twice if wanted.
    """
    given = [t.dtype for t in (x, weight, bias) if t is not None]
    wide = torch.float64 if torch.float64 in given else torch.float32
    T, past = x.shape[1], weight.shape[1] - 1
    if cu_seqlens is None:
        before = x.new_zeros(x.shape[0], past, x.shape[2]) if state is None else state
        whole = torch.cat([before, x], dim=1)
        shifted = [whole[:, past - j : past - j + T] for j in range(past + 1)]
        end = whole[:, T:].clone()
    else:
        starts, ends, row = boundaries(cu_seqlens, T)
        count = cu_seqlens.shape[0] - 1
        before = x.new_zeros(count, past, x.shape[2]) if state is None else state
        shifted = []
        for j in range(past + 1):
            source = torch.arange(T, device=x.device) - j
            short = source - starts[row]  # below 0: so many positions into the state, from its end
            inside = x[:, source.clamp(min=0)]
            if j:
                outside = before[row, (past + short).clamp(max=past - 1)]
                inside = torch.where((short < 0)[None, :, None], outside[None], inside)
            shifted.append(inside)
        end = last_inputs(x, before, starts, ends)
    z = sum(xj.to(wide) * weight[:, past - j].to(wide) for j, xj in enumerate(shifted))
    assert isinstance(z, Tensor)
    if bias is not None:
        z = z + bias.to(wide)
    y = z * torch.sigmoid(z) if activation == "silu" else z
    return y.to(x.dtype), end


def boundaries(cu_seqlens: Tensor, T: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of N packed sequences the first positions and those behind the last ones, [N] each, and which sequence
    each of T positions is in."""
    inner = cu_seqlens[1:-1].long().clamp(0, T)
    edge = torch.zeros(1, dtype=torch.long, device=inner.device)
    row = torch.searchsorted(inner, torch.arange(T, device=inner.device), right=True)
    return torch.cat([edge, inner]), torch.cat([inner, edge + T]), row


def last_inputs(x: Tensor, before: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """The last inputs [N, W-1, C] of packed sequences x [1, T, C]; of one that is shorter, first what is left
    of those `before` it."""
    past = before.shape[1]
    if x.shape[1] == 0:
        return before.clone()
    source = ends[:, None] - past + torch.arange(past, device=x.device)  # [N, W-1]
    short = source - starts[:, None]
    inside = x[0, source.clamp(min=0)]
    if past == 0:
        return inside
    outside = torch.gather(before, 1, (past + short).clamp(0, past - 1)[..., None].expand_as(inside))
    return torch.where((short < 0)[..., None], outside, inside)
