"""The ``cuda`` candidate of byte_spectral: what its kernels are launched on."""

from pathlib import Path

import torch
from torch import Tensor

from bakeoff.kernels.cuda import DATA, cuda_kernel
from bakeoff.kernels.op import kernel_op
from bakeoff.kernels.plan import Plan
from bakeoff.ops.byte_spectral.reference import frequencies, phases

__all__ = ["ROWS", "SOURCE", "THREADS", "cuda", "macros", "shared_bytes"]

SOURCE = Path(__file__).with_name("spectrum.cu")
ROWS, THREADS = 8, 128
"""Positions and threads of a block."""
_PROGRAMS, _PARTIALS = 264, 2**24
"""Most blocks of a backward, and most numbers that they may add up."""


def macros(C: int, W: int, K: int, D: int, features: str, dtype: torch.dtype) -> dict[str, int]:
    """What ``spectrum.cu`` is compiled with; D is 0 without a projection."""
    return {
        "C": C, "W": W, "K": K, "D": D, "PARTS": 2 if features == "complex" else 1, "LOG": features == "log",
        "ROWS": ROWS, "THREADS": THREADS, "DATA": DATA[dtype],
    }  # fmt: skip


def shared_bytes(C: int, W: int, K: int, features: str) -> int:
    """Of a block, backward, which needs more than forward: constants, what the tile sees, spectra."""
    span, bins, parts = ROWS + W - 1, C * K, 2 if features == "complex" else 1
    spectra = ROWS * bins * 2 + (ROWS * bins if parts == 1 else 0)
    return 4 * (2 * W * K + W + C * span + spectra + span + ROWS * bins * parts + C * span)


def results(
    ids: Tensor, table: Tensor, window: Tensor, omega: Tensor | None, features: str, weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Room for the features, [B, T, F] in table's dtype, or their projection, [B, T, D] in weight's."""
    del bias
    if weight is not None:
        return weight.new_empty((*ids.shape, weight.shape[1]))
    bins = window.shape[0] // 2 + 1 if omega is None else omega.shape[0]
    return table.new_empty((*ids.shape, table.shape[1] * bins * (2 if features == "complex" else 1)))


def forward(
    plan: Plan, ids: Tensor, table: Tensor, window: Tensor, omega: Tensor | None, features: str,
    weight: Tensor | None, bias: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """The features, or their projection."""
    if out.numel() == 0:
        return
    launch = _Launch(plan, ids, table, window, omega, features, weight)
    bias = None if bias is None else _floats(plan, bias)
    launch("spectrum", ids.shape[0] * launch.tiles, bias=bias, out=out)


def backward(
    plan: Plan, ids: Tensor, table: Tensor, window: Tensor, omega: Tensor | None, features: str,
    weight: Tensor | None, dout: Tensor, dtable: Tensor | None, dwindow: Tensor | None,
    domega: Tensor | None, dweight: Tensor | None, dbias: Tensor | None,
) -> None:  # fmt: skip
    """The gradients that there is room for: partial sums, a row a block, and what they add up to."""
    wanted = (dweight, dbias, dtable, dwindow, domega)
    if dout.numel() == 0:
        for gradient in wanted:
            if gradient is not None:
                plan.run(Tensor.zero_, gradient)
        return
    launch = _Launch(plan, ids, table, window, omega, features, weight)
    D = 0 if weight is None else weight.shape[1]
    bins = launch.macros["K"]
    sizes = (0 if weight is None else weight.numel(), D, table.numel(), window.shape[0], bins)
    columns, every = sum(sizes), ids.shape[0] * launch.tiles
    programs = max(1, min(every, _PROGRAMS, _PARTIALS // columns))
    partial = plan.zeros((programs, columns), torch.float32)
    launch("slopes", programs, dout=plan.contiguous(dout), partial=partial, all=every, columns=columns)
    sums, start = plan.derive(torch.sum, partial, 0), 0
    for gradient, size in zip(wanted, sizes, strict=True):
        if gradient is not None:
            plan.run(_put, gradient, sums, start)
        start += size


def _put(gradient: Tensor, sums: Tensor, start: int) -> None:
    """The numbers from `start` on, in the gradient's dtype."""
    gradient.copy_(sums[start : start + gradient.numel()].view_as(gradient))


class _Launch:
    """Launches of kernels on the tiles of a call."""

    def __init__(
        self, plan: Plan, ids: Tensor, table: Tensor, window: Tensor, omega: Tensor | None, features: str,
        weight: Tensor | None,
    ) -> None:  # fmt: skip
        T, C, W = ids.shape[1], table.shape[1], window.shape[0]
        K = W // 2 + 1 if omega is None else omega.shape[0]
        self.plan, self.tiles = plan, -(-T // ROWS)
        D, dtype = (0, table.dtype) if weight is None else (weight.shape[1], weight.dtype)
        self.macros = macros(C, W, K, D, features, dtype)
        self.shared = shared_bytes(C, W, K, features)
        ids, row = plan.rows(ids)
        grid = omega is None
        self.arguments = {
            "ids": ids, "table": _floats(plan, table), "window": _floats(plan, window),
            "phases": plan.derive(_phases, window if omega is None else omega, W, grid),
            "weight": None if weight is None else plan.contiguous(weight),
            "T": T, "row": row, "tiles": self.tiles,
        }  # fmt: skip

    def __call__(self, name: str, blocks: int, **arguments: object) -> None:
        """Launch a kernel on so many blocks."""
        kernel = cuda_kernel(SOURCE, name, self.plan.device, self.shared, **self.macros)
        self.plan.launch(kernel, (blocks,), threads=THREADS, **self.arguments, **arguments)


def _phases(omega: Tensor, length: int, grid: bool) -> Tensor:
    """cos and sin of m omega[k], [length, 2K]; with `grid` the frequencies of a transform of `length`."""
    rates = frequencies(None if grid else omega, length, omega.device)
    return torch.cat(phases(length, rates, torch.float32), 1)


def _floats(plan: Plan, t: Tensor) -> Tensor:
    return plan.contiguous(plan.derive(Tensor.float, t))


_op = kernel_op("byte_spectral.cuda", results=results, names=("out",), forward=forward, backward=backward)


def cuda(
    ids: Tensor, table: Tensor, window: Tensor, omega: Tensor | None, features: str, weight: Tensor | None,
    bias: Tensor | None, causal: bool,
) -> Tensor:  # fmt: skip
    """The windowed form, for float16, bfloat16 and float32."""
    del causal
    out: Tensor = _op(ids, table, window, omega, features, weight, bias)
    return out
