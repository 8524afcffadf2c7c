"""A linear layer over classes and its cross entropy, without all logits at once."""

from typing import Literal

import torch

from bakeoff.autocast import as_autocast
from bakeoff.ops.linear_cross_entropy.op import OP
from bakeoff.select import call

__all__ = ["OP", "linear_cross_entropy"]


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    impl: str | None = None,
) -> torch.Tensor:
    """The cross entropy of the classes that a linear layer scores.

    With l = x weight' + bias, or softcap * tanh((x weight' + bias) / softcap), and lse = log(sum_v exp(l_v)),
    the loss of a row with target t is (1 - label_smoothing) * (lse - l_t) + label_smoothing * (lse - mean(l))
    + z_loss * lse^2, and 0 where t is ignore_index. It is taken in float32 (float64 for float64 inputs);
    candidates round the products l to x's dtype first, as PyTorch does.

    The chunked candidates hold the logits of some rows at a time and take the gradients, in the forward pass
    unless reduction is "none"; those that nobody wants, and all under no_grad, are not computed.

    Args:
        x: [..., N, D], float16, bfloat16, float32 or float64, any strides. Under autocast x, weight and bias
            are cast to autocast's dtype.
        weight: [V, D], in x's dtype, as in torch.nn.Linear.
        target: [..., N], the classes, int32 or int64.
        bias: [V], in x's dtype.
        ignore_index: targets that don't count: their loss and gradients are 0.
        label_smoothing: the part of the target's probability that all classes share, 0 to 1.
        z_loss: the weight of lse^2, which the loss includes, >= 0.
        softcap: the bound of the logits, > 0; None for none.
        reduction: "mean" over the targets that count, 0 with zero gradients where none does (PyTorch gives
            nan); "sum"; or "none", each row's loss.
        impl: the candidate to run; by default the selected one.

    Returns:
        The loss, [] or for "none" [..., N], in float32, or float64 for float64 inputs. Gradients of x, weight
        and bias have their argument's dtype.

    Raises:
        ValueError: shapes or numbers that don't fit; the message says what was expected.
        TypeError: dtypes that don't fit.
        IndexError: on the CPU, a target that is no class. On a GPU the host doesn't look: PyTorch's own
            candidates stop the device, the Triton one gives NaN as that row's loss and gradients.
        bakeoff.errors.Unsupported: `impl` can't take these arguments; the message gives every reason.

    Source: z_loss: Chowdhery et al. 2022, PaLM, section 5; softcap: Gemma Team 2024, Gemma 2, section 2;
    label smoothing: Szegedy et al. 2016, Rethinking the Inception Architecture, section 7.

    Example:
        >>> import torch
        >>> x, weight = torch.zeros(3, 5), torch.randn(8, 5)
        >>> loss = linear_cross_entropy(x, weight, torch.tensor([0, 7, -100]))
        >>> round(loss.exp().item(), 4)
        8.0
    """
    x, weight, bias = map(as_autocast, (x, weight, bias))
    loss: torch.Tensor = call(
        OP, x, weight, target, bias, ignore_index, label_smoothing, z_loss, softcap, reduction, impl=impl
    )
    return loss
