"""The definition of linear_cross_entropy, in plain PyTorch."""

import torch
from torch import Tensor

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> Tensor:
    """The cross entropy of logits x weight' + bias, capped to softcap * tanh(logits / softcap) if asked for,
    plus z_loss * logsumexp(logits)^2; 0 for targets equal to `ignore_index`.

    Computes and returns float32, or float64 for float64 inputs. The mean is over the targets that count, and
    0 where none does. Differentiable by autograd, twice if wanted.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = x.to(wide) @ weight.to(wide).mT
    if bias is not None:
        logits = logits + bias.to(wide)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    counted = target != ignore_index
    classes = target.long().masked_fill(~counted, 0)[..., None]
    log_p = torch.log_softmax(logits, -1)
    loss = -(1 - label_smoothing) * log_p.gather(-1, classes).squeeze(-1)
    if label_smoothing:
        loss = loss - label_smoothing * log_p.mean(-1)
    if z_loss:
        loss = loss + z_loss * torch.logsumexp(logits, -1).square()
    loss = loss.masked_fill(~counted, 0)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / counted.sum().clamp(min=1)
