"""What selection can't be told of a group's tensors, and kernels that go by addresses rely on."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bakeoff.ops.adamw.group import Group
from bakeoff.ops.adamw.op import check_lists
from bakeoff.select import Case
from bakeoff.select.declare.lists import TensorList, as_list, check_apart, check_list

__all__ = ["check_sums", "fitting", "scalar"]


def fitting(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    step: Sequence[Tensor],
    master: Sequence[Tensor] | None,
) -> Group:
    """The group, with counters that have no dimensions; raises for lists that don't fit."""
    given = {"params": params, "grads": grads, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if master is not None:
        given["master"] = master
    for name, tensors in given.items():
        check_list(tensors, f"adamw_: {name}")
        if len(tensors) != len(params):
            raise ValueError(
                f"adamw_: {len(tensors)} tensors in {name}, expected one for each of {len(params)} parameters"
            )
    columns = {name: as_list(list(tensors), f"adamw_: {name}") for name, tensors in given.items()}
    device = columns["params"].device
    for name, column in columns.items():
        if name != "grads":
            _check_expanded(name, column)
        if column.device != device:
            raise ValueError(f"adamw_: {name} is on {column.device}, the parameters on {device}")
        for i, (tensor, param) in enumerate(zip(column, columns["params"], strict=True)):
            if tensor.shape != param.shape:
                raise ValueError(
                    f"adamw_: {name}[{i}] has shape {tuple(tensor.shape)}, "
                    f"expected its parameter's, {tuple(param.shape)}"
                )
    if len(step) not in (1, len(params)):
        raise ValueError(f"adamw_: {len(step)} steps; pass one for all parameters, or {len(params)}")
    counts = as_list([scalar("step", count, device, torch.float32) for count in step], "adamw_: step")
    if len(set(counts.addresses)) < len(counts):
        raise ValueError(
            "adamw_: step lists a counter twice, which would advance it twice; pass one for all parameters, "
            "or one for each"
        )
    metas = {name: column.meta for name, column in columns.items()}
    check_lists(Case({"master": None, **metas, "step": counts.meta}, str(device)))
    check_apart({name: column for name, column in columns.items() if name != "grads"}, "adamw_")
    return Group(**columns, step=counts)


def _check_expanded(name: str, tensors: TensorList) -> None:
    """Raises for a tensor whose elements share memory, as an expanded one's do: it can't be updated."""
    for i, tensor in enumerate(tensors if not tensors.meta.contiguous else ()):
        spread = zip(tensor.stride(), tensor.shape, strict=True)
        if any(step == 0 and size > 1 for step, size in spread):
            raise ValueError(f"adamw_: {name}[{i}] is expanded: its elements share memory; pass a .clone()")


def check_sums(value: Any, device: torch.device) -> None:
    """Raises for what can't receive a step's sums."""
    if not isinstance(value, Tensor):
        raise TypeError(f"adamw_: sums must be a float32 tensor [4] on {device}, got {value!r}")
    if value.shape != (4,) or value.dtype != torch.float32 or value.device != device or value.stride(0) != 1:
        raise ValueError(
            f"adamw_: sums must be float32 [4] on {device}, contiguous, got {value.dtype} "
            f"{tuple(value.shape)} on {value.device}; torch.zeros(4, device='{device}') makes one"
        )


def scalar(name: str, value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
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
