"""AdamW's step over a whole list of tensors, and the global norm of their gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bakeoff.ops.adamw.group import Group, Hyper
from bakeoff.ops.adamw.op import NORM, OP, check, check_hyper, update_case
from bakeoff.ops.adamw.run import DTYPES
from bakeoff.ops.adamw.run import guard as _guard
from bakeoff.ops.adamw.run import overlap as _overlap
from bakeoff.ops.adamw.run import update as _update

__all__ = ["NORM", "OP", "adamw_", "global_norm"]


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
        master: float32 weights that the parameters are roundings of; or int16 remainders, which extend
            bfloat16 parameters to float32 ones bit for bit.
        impl: the candidate to run; by default the selected one.

    Returns:
        Nothing: params, exp_avg, exp_avg_sq, step and master are updated in place.

    Raises:
        ValueError: lengths, shapes or settings that don't fit.
        TypeError: dtypes that don't fit, sparse gradients, something else than a tensor.
        bakeoff.errors.Unsupported: `impl` can't take this group; the message gives every reason.

    Source: Loshchilov & Hutter 2019, Decoupled Weight Decay Regularization, algorithm 2, in PyTorch's order.

    Example:
        >>> import torch
        >>> p, g, m, v = (torch.full((3,), x) for x in (1.0, 0.5, 0.0, 0.0))
        >>> step = torch.zeros(())
        >>> adamw_([p], [g], [m], [v], lr=0.1, beta1=0.9, beta2=0.99, eps=0.0, weight_decay=0.0, step=step)
        >>> p, step
        (tensor([0.9000, 0.9000, 0.9000]), tensor(1.))
    """
    check_hyper(lr, beta1, beta2, eps, weight_decay)
    steps = list(step) if isinstance(step, Sequence) else [step]
    wider = None if master is None else list(master)
    group = Group(list(params), list(grads), list(exp_avg), list(exp_avg_sq), steps, wider)
    if not group.params:
        return
    group = _checked(group)
    device = group.params[0].device
    given = {"clip_coef": clip_coef, "found_inf": found_inf, "grad_scale": grad_scale, "lr_mult": lr_mult}
    scalars = [None if value is None else _scalar(name, value, device) for name, value in given.items()]
    rate = _scalar("lr", lr, device) if isinstance(lr, Tensor) else lr
    how = Hyper(rate, beta1, beta2, eps, weight_decay, False, *scalars)
    _update(group, how, impl, overlapping=_overlap(group.params))


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
    listed = list(grads)
    if not listed:
        raise ValueError("global_norm: no gradients given")
    _alike("global_norm", "grads", listed)
    return _guard(listed, None, False, None, None, None, impl).norm


def _checked(group: Group) -> Group:
    """The group with counters that have no dimensions; raises for lists that don't fit."""
    columns = {"grads": group.grads, "exp_avg": group.exp_avg, "exp_avg_sq": group.exp_avg_sq}
    if group.master is not None:
        columns["master"] = group.master
    count = len(group.params)
    _alike("adamw_", "params", group.params)
    _apart("params", group.params)
    device = group.params[0].device
    for name, column in columns.items():
        if len(column) != count:
            raise ValueError(
                f"adamw_: {len(column)} tensors in {name}, expected one for each of {count} parameters"
            )
        _alike("adamw_", name, column)
        if name != "grads":
            _apart(name, column)
        if column[0].device != device:
            raise ValueError(f"adamw_: {name} is on {column[0].device}, the parameters on {device}")
        for i, (tensor, param) in enumerate(zip(column, group.params, strict=True)):
            if tensor.shape != param.shape:
                raise ValueError(
                    f"adamw_: {name}[{i}] has shape {tuple(tensor.shape)}, "
                    f"expected its parameter's, {tuple(param.shape)}"
                )
    if len(group.steps) not in (1, count):
        raise ValueError(f"adamw_: {len(group.steps)} steps; pass one for all parameters, or {count}")
    steps = [_scalar("step", step, device, torch.float32) for step in group.steps]
    if len({step.data_ptr() for step in steps}) < len(steps):
        raise ValueError(
            "adamw_: step lists a counter twice, which would advance it twice; pass one for all parameters, "
            "or one for each"
        )
    if group.exp_avg[0].dtype != group.exp_avg_sq[0].dtype:
        raise TypeError(
            f"adamw_: exp_avg is {group.exp_avg[0].dtype} and exp_avg_sq {group.exp_avg_sq[0].dtype}; "
            f"use one dtype for both"
        )
    wider = None if group.master is None else group.master[0].dtype
    first = group.params[0]
    check(update_case(1, 1, first.device, first.dtype, group.grads[0].dtype, group.exp_avg[0].dtype, wider))
    return group._replace(steps=steps)


def _alike(op: str, name: str, tensors: list[Tensor]) -> None:
    """Tensors with one device, one dtype, dense storage."""
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{op}: {name}[{i}] is {type(tensor).__name__}, not a tensor; leave what has no gradient out"
            )
        if tensor.layout != torch.strided:
            raise TypeError(f"{op}: {name}[{i}] is sparse; make it dense with .to_dense()")
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise ValueError(
                f"{op}: {name}[{i}] is {tensor.dtype} on {tensor.device}, the first is {first.dtype} on "
                f"{first.device}; make one call for each dtype and device"
            )
    if name != "master" and first.dtype not in DTYPES:
        raise TypeError(
            f"{op}: {name} are {first.dtype}; it takes real floating point tensors of float16, bfloat16, "
            f"float32 or float64"
        )


def _apart(name: str, tensors: list[Tensor]) -> None:
    """Raises for a tensor whose elements share memory, as an expanded one's do: it can't be updated."""
    for i, tensor in enumerate(tensors):
        spread = zip(tensor.stride(), tensor.shape, strict=True)
        if not tensor.is_contiguous() and any(step == 0 and size > 1 for step, size in spread):
            raise ValueError(f"adamw_: {name}[{i}] is expanded: its elements share memory; pass a .clone()")


def _scalar(name: str, value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor `value`, of one element, without dimensions and in the same memory."""
    kind = "scalar" if dtype is None else f"{str(dtype).removeprefix('torch.')} scalar"
    fix = f"torch.full((), value, dtype=torch.float32, device='{device}') makes one"
    if not isinstance(value, Tensor):
        raise TypeError(f"adamw_: {name} must be a {kind} tensor on {device}, got {value!r}; {fix}")
    if value.numel() != 1 or value.device != device or value.dtype != (dtype or value.dtype):
        raise ValueError(
            f"adamw_: {name} must be a {kind} on {device}, got {value.dtype} {tuple(value.shape)} on "
            f"{value.device}; {fix}"
        )
    return value.reshape(())
