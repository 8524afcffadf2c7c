"""What selection can't be told of a list of matrices, and kernels that go by addresses rely on."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bakeoff.ops.muon.op import REAL
from bakeoff.ops.muon.settings import Matrices
from bakeoff.select.declare.lists import TensorList, check_apart, check_list

__all__ = ["fitting", "scalars", "sums_for"]


def fitting(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum: Sequence[Tensor],
    direction: Sequence[Tensor] | None,
) -> Matrices:
    """The matrices; raises for lists that don't fit."""
    given = {"params": params, "grads": grads, "momentum": momentum}
    if direction is not None:
        given["direction"] = direction
    columns: dict[str, TensorList] = {}
    for name, tensors in given.items():
        check_list(tensors, f"muon_: {name}")
        if len(tensors) != len(params):
            raise ValueError(
                f"muon_: {len(tensors)} tensors in {name}, expected one for each of {len(params)} parameters"
            )
        column = columns[name] = TensorList.of(list(tensors), f"muon_: {name}")
        if not REAL.allow(column.meta.dtype):
            raise TypeError(f"muon_: {name} are {column.meta.dtype}; {REAL.advice.format(name=name)}")
        if column.device != columns["params"].device:
            raise ValueError(
                f"muon_: {name} is on {column.device}, the parameters on {columns['params'].device}"
            )
        for i, (tensor, param) in enumerate(zip(column, columns["params"], strict=True)):
            _check(f"{name}[{i}]", tensor, param, written=name != "grads")
    check_apart({name: column for name, column in columns.items() if name != "grads"}, "muon_")
    return Matrices(**columns)


def _check(label: str, tensor: Tensor, param: Tensor, *, written: bool) -> None:
    if tensor.ndim != 2:
        raise ValueError(
            f"muon_: {label} has shape {tuple(tensor.shape)}, expected a matrix; step other tensors by "
            f"adamw_, or pass a filter as filter.flatten(1)"
        )
    if tensor.shape != param.shape:
        raise ValueError(
            f"muon_: {label} has shape {tuple(tensor.shape)}, expected its parameter's, {tuple(param.shape)}"
        )
    spread = zip(tensor.stride(), tensor.shape, strict=True)
    if written and any(step == 0 and size > 1 for step, size in spread):
        raise ValueError(f"muon_: {label} is expanded: its elements share memory; pass a .clone()")


def scalars(device: torch.device, **given: Any) -> dict[str, Any]:
    """The settings that may be scalar tensors, without dimensions; `lr` may be a number, others None."""
    found = {}
    for name, value in given.items():
        if value is None or (name == "lr" and not isinstance(value, Tensor)):
            found[name] = value
            continue
        fix = f"torch.full((), value, dtype=torch.float32, device='{device}') makes one"
        if not isinstance(value, Tensor):
            raise TypeError(f"muon_: {name} must be a scalar tensor on {device}, got {value!r}; {fix}")
        if value.numel() != 1 or value.device != device:
            raise ValueError(
                f"muon_: {name} must be a scalar on {device}, got {value.dtype} {tuple(value.shape)} on "
                f"{value.device}; {fix}"
            )
        found[name] = value.reshape(())
    return found


def sums_for(value: Any, device: torch.device) -> Tensor:
    """What receives a step's sums; raises for what can't."""
    if not isinstance(value, Tensor):
        raise TypeError(f"muon_: sums must be a float32 tensor [4] on {device}, got {value!r}")
    if value.shape != (4,) or value.dtype != torch.float32 or value.device != device or value.stride(0) != 1:
        raise ValueError(
            f"muon_: sums must be float32 [4] on {device}, contiguous, got {value.dtype} "
            f"{tuple(value.shape)} on {value.device}; torch.zeros(4, device='{device}') makes one"
        )
    return value
