"""The short causal depthwise convolution in front of sequence mixers, with its activation and its state."""

from typing import Literal

import torch

from bakeoff.ops.short_conv.op import OP
from bakeoff.select import call

__all__ = ["OP", "short_conv"]


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Literal["silu"] | None = None,
    state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y[b, t, c] = act(bias[c] + sum_{j=0}^{W-1} weight[c, W-1-j] * x[b, t-j, c]), W taps a channel.

    Inputs before position 0 are those in `state`, or 0. y[b, t] depends on x[b, ..t] alone. A sequence may be
    fed in pieces, each with the state that the one before returned; T = 1 is a decoding step. Computed in
    float32 (float64 if x, weight or bias has that precision) and rounded once.

    Args:
        x: [B, T, C], float16, bfloat16, float32 or float64, any strides. T = 0 returns the state as it was.
        weight: [C, W], 1 <= W <= 8, any of these dtypes. The last column multiplies the present input, as in
            torch.nn.Conv1d, whose weight [C, 1, W] is passed as ``conv.weight[:, 0]``.
        bias: [C], in weight's dtype.
        activation: "silu", which multiplies the sum by its sigmoid, or None.
        state: [B, W-1, C] in x's dtype, the inputs before position 0, the latest last; None stands for zeros.
            With `cu_seqlens` it is [N, W-1, C].
        cu_seqlens: [N+1], int32 or int64: N sequences packed into one row, B = 1, where sequence n has
            positions cu_seqlens[n] to cu_seqlens[n+1] - 1. No sum reaches into another sequence. Values must
            not decrease, the first is 0 and the last T; they are not checked, which would wait for the
            device. Sequences may be empty.
        impl: the candidate to run; by default the selected one.

    Returns:
        (y, state): y [B, T, C] in x's dtype, in strides of the candidate's choice; the last W-1 inputs of
        each sequence, in the shape and dtype that `state` has. Both carry gradients.

    Raises:
        ValueError: shapes that don't fit; the message says what was expected.
        TypeError: dtypes that don't fit.
        bakeoff.errors.Unsupported: `impl` can't take these arguments; the message gives every reason.

    Source: Poli et al. 2023, Hyena Hierarchy, section 3.3 (the short filter of its projections); Gu & Dao
    2023, Mamba, section 3.4, with SiLU.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1)
        >>> y, state = short_conv(x, torch.tensor([[10.0, 1.0]]))
        >>> y.flatten()
        tensor([ 1., 12., 23., 34.])
        >>> _, state = short_conv(x[:, :3], torch.tensor([[10.0, 1.0]]))
        >>> short_conv(x[:, 3:], torch.tensor([[10.0, 1.0]]), state=state)[0].flatten()
        tensor([34.])
    """
    return call(OP, x, weight, bias, activation, state, cu_seqlens, impl=impl)  # type: ignore[no-any-return]
