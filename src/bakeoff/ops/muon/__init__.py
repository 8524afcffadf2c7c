"""Muon's step over a list of matrices."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable, which imports all of torch._dynamo

from bakeoff.ops.adamw.update import overlap
from bakeoff.ops.muon.arguments import fitting, scalars, sums_for
from bakeoff.ops.muon.op import OP, check_settings
from bakeoff.ops.muon.settings import Settings
from bakeoff.ops.muon.update import take_step
from bakeoff.select.declare.lists import check_list

__all__ = ["OP", "muon_"]


@_disable_dynamo
@torch.no_grad()
def muon_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum: Sequence[Tensor],
    *,
    lr: float | Tensor,
    momentum_decay: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.0,
    steps: int = 5,
    scale: str = "match_rms",
    clip_coef: Tensor | None = None,
    found_inf: Tensor | None = None,
    grad_scale: Tensor | None = None,
    lr_mult: Tensor | None = None,
    direction: Sequence[Tensor] | None = None,
    sums: Tensor | None = None,
    impl: str | None = None,
) -> None:
    """One step of Muon on every matrix of a list, in place, without waiting for the device.

    g = grad * clip_coef / grad_scale;  m = momentum_decay*m + g;  u = g + momentum_decay*m, or m without
    nesterov;  X = u / (|u| + 1e-7);  `steps` times X <- a X + (b A + c A^2) X with A = X X' on the smaller
    side and a, b, c = 3.4445, -4.7750, 2.0315, which brings all singular values into about [0.7, 1.2];
    p = p*(1 - lr*weight_decay) - lr*scale*X.
    Matrices of one shape go as one batch, the iterations in bfloat16 on CUDA, in float32 elsewhere (float64
    for float64). Where found_inf is not 0 nothing changes. Gradients are never written.

    Args:
        params, grads, momentum: lists of equal length; the tensors of an entry are matrices of one shape,
            each list has one dtype (float16, bfloat16, float32 or float64), all on one device. The momentum
            may be wider than the parameters.
        lr: learning rate >= 0, a number or a scalar tensor (of one element) on the device.
        momentum_decay: decay of m, in [0, 1).
        nesterov: whether u looks one gradient ahead.
        weight_decay: decoupled from the gradient, >= 0.
        steps: iterations.
        scale: "match_rms": 0.2 sqrt(max(rows, columns)), so that elements of an update are about as large as
            AdamW's, whose rate and weight decay then fit; "spectral": sqrt(max(1, rows/columns)).
        clip_coef, grad_scale: scalar tensors on the device.
        found_inf: scalar tensor on the device; not 0 skips the step.
        lr_mult: scalar tensor on the device, which multiplies lr.
        direction: what the rate multiplied in the last step, scale*X, for each matrix; written.
        sums: float32 [4] on the device, which receives the sums over all elements of g*direction, g^2, p^2
            (from before the step) and the square of the new direction. All 0 where the step is skipped.
        impl: the candidate to run; by default the selected one for each shape.

    Returns:
        Nothing: params, momentum, direction and sums are written in place.

    Raises:
        ValueError: lengths, shapes or settings that don't fit.
        TypeError: dtypes that don't fit, sparse gradients, something else than a tensor.
        bakeoff.errors.Unsupported: `impl` can't take these matrices; the message gives every reason.

    Source: Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks; Liu et al. 2025, Muon
    is scalable for LLM training, for match_rms.

    Example:
        >>> import torch
        >>> p, g, m = torch.zeros(2, 2), torch.tensor([[3.0, 0.0], [0.0, 5.0]]), torch.zeros(2, 2)
        >>> muon_([p], [g], [m], lr=1.0, momentum_decay=0.0, scale="spectral")
        >>> (p + torch.eye(2)).abs().max() < 0.32, torch.equal(m, g)
        (tensor(True), True)
    """
    check_settings(lr, momentum_decay, weight_decay, steps, scale)
    check_list(params, "muon_: params")
    if not len(params):
        return
    matrices = fitting(params, grads, momentum, direction)
    device = matrices.params[0].device
    given = scalars(
        device, lr=lr, clip_coef=clip_coef, found_inf=found_inf, grad_scale=grad_scale, lr_mult=lr_mult
    )
    how = Settings(
        momentum_decay=momentum_decay, nesterov=nesterov, weight_decay=weight_decay, steps=steps, scale=scale,
        sums=None if sums is None else sums_for(sums, device), **given,
    )  # fmt: skip
    take_step(matrices, how, impl, overlapping=overlap(matrices.params))
