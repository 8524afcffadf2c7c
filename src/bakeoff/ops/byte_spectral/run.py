"""From tensors to launches of byte_spectral's kernels: allocations, strides and constants."""

from functools import lru_cache
from typing import Any

import torch

from bakeoff.launch import Launcher
from bakeoff.ops.byte_spectral import kernels
from bakeoff.ops.byte_spectral.kernels import backward, forward
from bakeoff.ops.byte_spectral.reference import EPS

__all__ = ["Gradients", "out_like", "run_backward", "run_forward"]

_forward = Launcher(forward._forward)
_backward = Launcher(backward._backward)
_sum_partials = Launcher(backward._sum_partials)

Gradients = tuple[
    torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None
]
"""Of table, window, omega, weight and bias; None where not wanted."""


@lru_cache
def _device_facts(device: int) -> tuple[int, int]:
    """Multiprocessors and generation, which from 8 on has tensor cores for bfloat16."""
    if device < 0:  # the interpreter, whose bfloat16 is wrong
        return 2, 0
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.major


def _sizes(table: torch.Tensor, window: torch.Tensor, omega: torch.Tensor | None) -> tuple[int, int, int]:
    W = window.shape[0]
    return table.shape[1], W, W // 2 + 1 if omega is None else omega.shape[0]


def out_like(
    ids: torch.Tensor,
    table: torch.Tensor,
    window: torch.Tensor,
    omega: torch.Tensor | None,
    features: str,
    weight: torch.Tensor | None,
) -> torch.Tensor:
    """An output, not yet written: [B, T, D] in weight's dtype or [B, T, F] in table's."""
    if weight is not None:
        return weight.new_empty((*ids.shape, weight.shape[1]))
    C, _, K = _sizes(table, window, omega)
    return table.new_empty((*ids.shape, C * K * (2 if features == "complex" else 1)))


def _dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _rows(ids: torch.Tensor) -> torch.Tensor:
    """`ids` with bytes of a row next to each other, rows at any distance."""
    return ids if ids.stride(1) == 1 else ids.contiguous()


def _constants(
    table: torch.Tensor,
    window: torch.Tensor,
    omega: torch.Tensor | None,
    features: str,
    weight: torch.Tensor | None,
    tensor_cores: bool,
) -> dict[str, Any]:
    C, W, K = _sizes(table, window, omega)
    result, D = (table, 1) if weight is None else (weight, weight.shape[1])
    sizes = kernels.constants(C, W, K, D, features, result.dtype, tensor_cores)
    return {**sizes, "EPS": EPS}


def run_forward(
    ids: torch.Tensor,
    table: torch.Tensor,
    window: torch.Tensor,
    omega: torch.Tensor | None,
    features: str,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The features, or their projection."""
    out = out_like(ids, table, window, omega, features, weight)
    if out.numel() == 0:
        return out
    ids = _rows(ids)
    B, T = ids.shape
    _, major = _device_facts(ids.get_device())
    meta = _constants(table, window, omega, features, weight, tensor_cores=major >= 8)
    D = meta["D"]
    tiling = kernels.forward_tiling(D, meta["SPLIT"], major)
    grid = (B * -(-T // tiling.positions), -(-D // tiling.channels), 1)
    _forward(
        grid, ids, table.contiguous(), window.contiguous(), _dense(omega), _dense(weight), _dense(bias), out,
        T, ids.stride(0), **meta, BT=tiling.positions, BD=tiling.channels,
        SPAN=kernels.span(tiling.positions, meta["W"]),
        num_warps=tiling.warps,
    )  # fmt: skip
    return out


def run_backward(
    dout: torch.Tensor,
    ids: torch.Tensor,
    table: torch.Tensor,
    window: torch.Tensor,
    omega: torch.Tensor | None,
    features: str,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    wanted: tuple[bool, bool, bool, bool, bool],
) -> Gradients:
    """The gradients that are wanted: partial sums and what they add up to."""
    arguments = (table, window, omega, weight, bias)
    dtable, dwindow, domega, dweight, dbias = found = tuple(
        torch.empty_like(argument, memory_format=torch.contiguous_format)
        if want and argument is not None
        else None
        for argument, want in zip(arguments, wanted, strict=True)
    )
    if dout.numel() == 0:
        return tuple(None if gradient is None else gradient.zero_() for gradient in found)  # type: ignore[return-value]
    ids = _rows(ids)
    B, T = ids.shape
    sms, major = _device_facts(ids.get_device())
    meta = _constants(table, window, omega, features, weight, tensor_cores=major >= 8)
    D = meta["D"]
    tiling = kernels.backward_tiling(D, features, meta["SPLIT"], sms, major)
    # Where each gradient's columns begin.
    a = weight.numel() if weight is not None and dweight is not None else 0
    b = a + (D if dbias is not None else 0)
    c = b + (table.numel() if dtable is not None else 0)
    d = c + (meta["W"] if dwindow is not None else 0)
    columns = d + (meta["K"] if domega is not None else 0)
    if columns == 0:
        return found  # type: ignore[return-value]
    tiles = B * -(-T // tiling.positions)
    programs = min(tiles, tiling.programs)
    partial = torch.empty((programs, columns), dtype=torch.float32, device=ids.device)
    _backward(
        (programs, 1, 1), ids, table.contiguous(), window.contiguous(), _dense(omega), _dense(weight),
        dout.contiguous(), partial, tiles, T, ids.stride(0), columns, a, b, **meta,
        BT=tiling.positions, BD=tiling.channels, SPAN=kernels.span(tiling.positions, meta["W"]),
        WEIGHT=dweight is not None, BIAS=dbias is not None,
        TABLE=dtable is not None, WINDOW=dwindow is not None, OMEGA=domega is not None,
        num_warps=tiling.warps, num_stages=1,
    )  # fmt: skip
    _sum_partials(
        (-(-columns // kernels.COLUMNS), 1, 1), partial, dweight, dbias, dtable, dwindow, domega,
        columns, programs, a, b, c, d,
        ROWS=kernels.ROWS, COLUMNS=kernels.COLUMNS, num_warps=kernels.SUM_WARPS,
    )  # fmt: skip
    return found  # type: ignore[return-value]
