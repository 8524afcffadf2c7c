"""From tensors to launches: allocations, strides, and the two kernels' direct launches.

A launch costs microseconds of Python, as much as a small kernel runs. For dense, aligned tensors everything
that depends on metadata alone is worked out at the first call of a signature; later calls allocate their
results and go to the driver. Every other call takes the `Launcher`.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from triton import knobs

from bakeoff.kernels.counter import count
from bakeoff.launch import Launcher
from bakeoff.layout import rows_of
from bakeoff.ops.rms_norm import kernels

__all__ = ["run_backward", "run_forward"]

_forward = Launcher(kernels._forward)
_forward_long = Launcher(kernels._forward_long)
_backward = Launcher(kernels._backward)
_row_sums = Launcher(kernels._row_sums)
_backward_long = Launcher(kernels._backward_long)
_sum_partials = Launcher(kernels._sum_partials)


class _Ready(NamedTuple):
    """A compiled kernel with its grid and constexprs."""

    run: Callable[..., None]
    function: Any
    packed: Any
    programs: int
    constants: tuple[Any, ...]


class _ReadyBackward(NamedTuple):
    main: _Ready
    last: _Ready | None
    partial_shape: tuple[int, int]
    N: int
    units: int


_ready_forward: dict[tuple[Any, ...], tuple[_Ready, int, int]] = {}
_ready_backward: dict[tuple[Any, ...], _ReadyBackward] = {}


def _launch_and_keep(launcher: Launcher, grid: tuple[int, int, int], args: Any, meta: Any) -> _Ready:
    """Launch once through Triton and keep what later launches of the same signature need."""
    count()
    compiled = launcher.kernel[grid](*args, **meta)
    constants = tuple(meta[name] for name in launcher.kernel.arg_names if name in meta)
    return _Ready(compiled.run, compiled.function, compiled.packed_metadata, grid[0], constants)


def _direct(device: int) -> bool:
    """Whether launches may go straight to the driver: CUDA, on the current device, nobody listening."""
    return device >= 0 and device == torch.cuda.current_device() and not knobs.runtime.launch_enter_hook.calls


@lru_cache
def _multiprocessors(device: int) -> int:
    if device < 0:  # the interpreter
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def _alignment(strides: int) -> int:
    """The largest power of two up to 16 that divides every stride or-ed into `strides`."""
    bits = strides | 16
    return bits & -bits


def run_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y and, with a residual, s."""
    device = x.get_device()
    dense = x.is_contiguous()
    x_pointer = pointers = x.data_ptr()
    weight_type = residual_type = weight_pointer = residual_pointer = s = s_pointer = None
    if weight is not None:
        dense = dense and weight.is_contiguous()
        weight_type, weight_pointer = weight.dtype, weight.data_ptr()
        pointers |= weight_pointer
    if residual is not None:
        dense = dense and residual.is_contiguous()
        residual_type, residual_pointer = residual.dtype, residual.data_ptr()
        pointers |= residual_pointer
    if not dense or pointers & 15 or not _direct(device):
        return _any_forward(x, weight, eps, residual, offset, None)
    key = (x.shape, x.dtype, weight_type, residual_type, device)
    found = _ready_forward.get(key)
    if found is None:
        return _any_forward(x, weight, eps, residual, offset, key)
    ready, N, units = found
    y = torch.empty_like(x)
    if residual_type is not None:
        s = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual_type))
        s_pointer = s.data_ptr()
    count()
    ready.run(
        ready.programs, 1, 1, torch._C._cuda_getCurrentRawStream(device), ready.function, ready.packed,
        None, None, None, x_pointer, residual_pointer, weight_pointer, y.data_ptr(), s_pointer,
        N, units, units, eps, offset, *ready.constants,
    )  # fmt: skip
    return y, s


def _any_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    offset: float,
    key: tuple[Any, ...] | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Any layout, length and device; remembers the launch under `key`, if given."""
    D = x.shape[-1]
    N = x.numel() // D
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    x, x_stride = rows_of(x)
    s, residual_stride = None, D
    if residual is not None:
        s = torch.empty_like(y, dtype=torch.promote_types(x.dtype, residual.dtype))
        residual, residual_stride = rows_of(residual)
    if N == 0:
        return y, s
    if weight is not None:
        weight = weight.contiguous()
    align = _alignment(x_stride | residual_stride)
    read = x.element_size() + (0 if residual is None else residual.element_size())
    tiling = kernels.forward_tiling(N, D, read, _multiprocessors(x.get_device()))
    units = (x_stride // align, residual_stride // align)
    meta: dict[str, Any] = {"D": D, "BLOCK": tiling.block, "ALIGN": align, "num_warps": tiling.warps}
    tensors = (x, residual, weight, y, s)
    if tiling.block < D:
        _forward_long((N, 1, 1), *tensors, *units, eps, offset, **meta)
        return y, s
    meta |= {"ROWS": tiling.rows, "EVEN": N % tiling.rows == 0}
    grid = (-(-N // tiling.rows), 1, 1)
    args = (*tensors, N, *units, eps, offset)
    if key is None:
        _forward(grid, *args, **meta)
    else:
        _ready_forward[key] = _launch_and_keep(_forward, grid, args, meta), N, units[0]
    return y, s


def run_backward(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    want_input: bool,
    want_weight: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x, of the residual where its dtype differs from x's (else None), and of the weight."""
    device = s.get_device()
    s_pointer, dy_pointer = s.data_ptr(), dy.data_ptr()
    pointers = s_pointer | dy_pointer
    dense = s.is_contiguous() and dy.is_contiguous() and residual_dtype == x_dtype and want_input
    weight_type = weight_pointer = ds_pointer = dw = dw_pointer = partial_pointer = None
    if weight is not None:
        dense = dense and weight.is_contiguous()
        weight_type, weight_pointer = weight.dtype, weight.data_ptr()
        pointers |= weight_pointer
    if ds is not None:
        dense = dense and ds.is_contiguous()
        ds_pointer = ds.data_ptr()
        pointers |= ds_pointer
    rest = (dy, ds, s, weight, eps, offset, x_dtype, residual_dtype, want_input, want_weight)
    if not dense or pointers & 15 or not _direct(device):
        return _any_backward(*rest, None)
    key = (s.shape, x_dtype, weight_type, ds_pointer is None, want_weight, device)
    found = _ready_backward.get(key)
    if found is None:
        return _any_backward(*rest, key)
    main, last, partial_shape, N, units = found
    stream = torch._C._cuda_getCurrentRawStream(device)
    dx = torch.empty_like(s)
    if want_weight and weight is not None:
        dw = torch.empty_like(weight)
        dw_pointer = partial_pointer = dw.data_ptr()
    if last is not None:
        partial = torch.empty(partial_shape, dtype=torch.float32, device=s.device)
        partial_pointer = partial.data_ptr()
    count()
    main.run(
        main.programs, 1, 1, stream, main.function, main.packed, None, None, None,
        dy_pointer, ds_pointer, s_pointer, weight_pointer, dx.data_ptr(), None, partial_pointer,
        N, units, units, units, eps, offset, *main.constants,
    )  # fmt: skip
    if last is not None:
        count()
        last.run(
            last.programs, 1, 1, stream, last.function, last.packed, None, None, None,
            partial_pointer, dw_pointer, main.programs, *last.constants,
        )  # fmt: skip
    return dx, None, dw


def _any_backward(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    want_input: bool,
    want_weight: bool,
    key: tuple[Any, ...] | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Any layout, length and device; remembers the launches under `key`, if given."""
    D = s.shape[-1]
    N = s.numel() // D
    dx = dresidual = dw = partial = None
    if want_input:
        dx = torch.empty(s.shape, dtype=x_dtype, device=s.device)
        if residual_dtype != x_dtype:
            dresidual = torch.empty(s.shape, dtype=residual_dtype, device=s.device)
    if N == 0:
        return dx, dresidual, torch.zeros_like(weight) if want_weight and weight is not None else None
    s, s_stride = rows_of(s)
    dy, dy_stride = rows_of(dy)
    ds_stride = D
    if ds is not None:
        ds, ds_stride = rows_of(ds)
    if weight is not None:
        weight = weight.contiguous()
    align = _alignment(s_stride | dy_stride | ds_stride)
    sms = _multiprocessors(s.get_device())
    tiling = kernels.backward_tiling(N, D, s.element_size(), want_weight and weight is not None, sms)
    programs = min(-(-N // tiling.rows), tiling.programs)
    if want_weight and weight is not None:
        dw = torch.empty_like(weight)
        # A program that has every row needs nobody to add up after it.
        partial = dw if programs == 1 else torch.empty((programs, D), dtype=torch.float32, device=s.device)
    units = (dy_stride // align, ds_stride // align, s_stride // align)
    meta: dict[str, Any] = {"D": D, "BLOCK": tiling.block, "ALIGN": align, "num_warps": tiling.warps}
    main = None
    if tiling.block < D:
        sums = torch.empty((N, 2), dtype=torch.float32, device=s.device)
        _row_sums((N, 1, 1), dy, s, weight, sums, units[0], units[2], eps, offset, **meta)
        grid = (programs, -(-D // tiling.block), 1)
        _backward_long(grid, dy, ds, s, weight, sums, dx, dresidual, partial, N, *units, offset, **meta)
    else:
        meta |= {"ROWS": tiling.rows, "STAGES": tiling.stages, "HOLD": tiling.hold, **tiling.hints}
        args = (dy, ds, s, weight, dx, dresidual, partial, N, *units, eps, offset)
        if key is None:
            _backward((programs, 1, 1), *args, **meta)
        else:
            main = _launch_and_keep(_backward, (programs, 1, 1), args, meta)
    last = None
    if partial is not None and dw is not None and partial is not dw:
        last = _sum(partial, dw, programs, keep=main is not None)
    if key is not None and main is not None:
        _ready_backward[key] = _ReadyBackward(main, last, (programs, D), N, units[0])
    return dx, dresidual, dw


def _sum(partial: torch.Tensor, dw: torch.Tensor, programs: int, *, keep: bool) -> _Ready | None:
    """Add the partial weight gradients up into `dw`."""
    D = dw.numel()
    block_p, block_d, warps = kernels.sum_tiling(D)
    grid = (-(-D // block_d), 1, 1)
    meta = {"D": D, "BLOCK_P": block_p, "BLOCK_D": block_d, "num_warps": warps}
    if keep:
        return _launch_and_keep(_sum_partials, grid, (partial, dw, programs), meta)
    _sum_partials(grid, partial, dw, programs, **meta)
    return None
