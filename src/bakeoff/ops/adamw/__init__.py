"""AdamW's step over a whole list of tensors, and the global norm of their gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable, which imports all of torch._dynamo

from bakeoff.ops.adamw.arguments import check_sums, fitting, scalar
from bakeoff.ops.adamw.group import Hyper
from bakeoff.ops.adamw.op import NORM, OP, check_hyper
from bakeoff.ops.adamw.update import guard, overlap, take_step
from bakeoff.select.declare.lists import as_list, check_list

__all__ = ["NORM", "OP", "adamw_", "global_norm"]


@_disable_dynamo
@torch.no_grad()
def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Tensor | Sequence[Tensor],
    clip_coef: Tensor | None = None,
    found_inf: Tensor | None = None,
    grad_scale: Tensor | None = None,
    lr_mult: Tensor | None = None,
    sums: Tensor | None = None,
    master: Sequence[Tensor] | None = None,
    impl: str | None = None,
) -> None:
    """One step of AdamW on every tensor of a group, in place, without waiting for the device.

    t = step + 1;  g = grad * clip_coef / grad_scale;  p *= 1 - lr*weight_decay;
    m = beta1*m + (1 - beta1)*g;  v = beta2*v + (1 - beta2)*g^2;
    p -= lr/(1 - beta1^t) * m / (sqrt(v)/sqrt(1 - beta2^t) + eps).
    Computed in float32 (float64 for float64) and rounded once. Where found_inf is not 0 nothing changes, step
    included. Gradients are never written.

    Args:
        params, grads, exp_avg, exp_avg_sq: lists of equal length; the tensors of an entry have one shape,
            and each list has one dtype (float16, bfloat16, float32 or float64), all on one device. m and v
            may be wider than the parameters.
        lr: learning rate >= 0, a number or a scalar tensor (of one element) on the device.
        beta1, beta2: decay of m and v, in [0, 1).
        eps: added to the root, >= 0.
        weight_decay: decoupled from the gradient, >= 0.
        step: steps taken so far, a float32 scalar on the device for all tensors, or one for each; advanced.
        clip_coef, grad_scale: scalar tensors on the device.
        found_inf: scalar tensor on the device; not 0 skips the step.
        lr_mult: scalar tensor on the device, which multiplies lr.
        sums: float32 [4] on the device, which receives the sums over all elements of g*u_prev, g^2, p^2 (from
            before the step) and u^2, with u = m/(1 - beta1^t) / (sqrt(v)/sqrt(1 - beta2^t) + eps), what the
            rate multiplies in this step, and u_prev the same of the step before (0 before the first). So
            -lr*sums[0] is the slope of the loss in the last step's lr_mult. All 0 where the step is skipped.
        master: float32 weights that the parameters are roundings of; or int16 remainders, which extend
            bfloat16 parameters to float32 ones bit for bit.
        impl: the candidate to run; by default the selected one.

    Returns:
        Nothing: params, exp_avg, exp_avg_sq, step, master and sums are written in place.

    Raises:
        ValueError: lengths, shapes or settings that don't fit.
        TypeError: dtypes that don't fit, sparse gradients, something else than a tensor.
        bakeoff.errors.Unsupported: `impl` can't take this group; the message gives every reason.

    Source: Loshchilov & Hutter 2019, Decoupled Weight Decay Regularization, algorithm 2, in PyTorch's order;
    Baydin et al. 2018, Online Learning Rate Adaptation with Hypergradient Descent, for the sums.

    Example:
        >>> import torch
        >>> p, g, m, v = (torch.full((3,), x) for x in (1.0, 0.5, 0.0, 0.0))
        >>> step = torch.zeros(())
        >>> adamw_([p], [g], [m], [v], lr=0.1, beta1=0.9, beta2=0.99, eps=0.0, weight_decay=0.0, step=step)
        >>> p, step
        (tensor([0.9000, 0.9000, 0.9000]), tensor(1.))
    """
    check_hyper(lr, beta1, beta2, eps, weight_decay)
    check_list(params, "adamw_: params")
    if not len(params):
        return
    counts = step if isinstance(step, Sequence) else [step]
    group = fitting(params, grads, exp_avg, exp_avg_sq, counts, master)
    lr = scalar("lr", lr, group.params[0].device) if isinstance(lr, Tensor) else lr
    given = {"clip_coef": clip_coef, "found_inf": found_inf, "grad_scale": grad_scale, "lr_mult": lr_mult}
    device = group.params[0].device
    scalars = [None if value is None else scalar(name, value, device) for name, value in given.items()]
    if sums is not None:
        check_sums(sums, device)
    how = Hyper(lr, beta1, beta2, eps, weight_decay, False, *scalars)._replace(sums=sums)
    take_step(group, how, impl, overlapping=overlap(group.params))


@_disable_dynamo
@torch.no_grad()
def global_norm(grads: Sequence[Tensor], *, impl: str | None = None) -> Tensor:
    """The 2-norm of all gradients together: sqrt(sum of g^2), summed in a fixed order.

    Args:
        grads: tensors of one device and one dtype (float16, bfloat16, float32 or float64).
        impl: the candidate to run; by default the selected one.

    Returns:
        A scalar on the gradients' device, float32 (float64 for float64); the host does not wait for it.

    Raises:
        ValueError: no gradients, or several devices or dtypes.
        TypeError: something else than tensors of these dtypes.

    Source: Pascanu, Mikolov & Bengio 2013, On the difficulty of training recurrent neural networks, 3.2.

    Example:
        >>> import torch
        >>> global_norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
        tensor(5.)
    """
    check_list(grads, "global_norm: grads")
    if not len(grads):
        raise ValueError("global_norm: no gradients given")
    return guard([as_list(list(grads), "global_norm: grads")], impl=impl).norm
