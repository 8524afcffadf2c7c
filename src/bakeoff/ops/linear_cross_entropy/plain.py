"""PyTorch's own linear_cross_entropy: the ``eager``, ``compiled`` and ``auto-chunker`` candidates."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bakeoff.select.declare.compiled import compiled as compile_formula

__all__ = ["auto_chunked", "compiled", "eager"]


def eager(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
) -> Tensor:
    """F.linear in x's dtype, then F.cross_entropy of all logits in float32."""
    logits = F.linear(x, weight, bias).flatten(0, -2)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    classes = target.flatten().long()
    counted = classes != ignore_index
    each = "none" if reduction == "none" else "sum"
    loss = F.cross_entropy(
        logits, classes, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=each
    )
    if z_loss:
        # Not the sum times z_loss: PyTorch's forward mode makes float64 of a number times a scalar tensor.
        squares = (z_loss * torch.logsumexp(logits, -1).square()).masked_fill(~counted, 0)
        loss = loss + (squares if each == "none" else squares.sum())
    if reduction == "mean":
        loss = loss / counted.sum().clamp(min=1)
    return loss.view(target.shape) if each == "none" else loss


compiled = compile_formula(eager)
# By default it wants eight times as many logits as x and weight have elements, which large heads don't have.
auto_chunked = compile_formula(
    eager, {"auto_chunker.enable": True, "auto_chunker.amplify_ratio_threshold": 1}
)
