"""The ``cuda`` candidate of dilated_attention: what its kernels are launched on."""

import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bakeoff.kernels.cuda import DATA, cuda_kernel
from bakeoff.kernels.op import kernel_op
from bakeoff.kernels.plan import Plan
from bakeoff.ops.dilated_attention.reference import Pattern, pattern_of
from bakeoff.ops.dilated_attention.tables import classes_of, planned_tables

__all__ = ["SOURCE", "Tile", "cuda", "macros", "shared_bytes", "tile_of"]

SOURCE = Path(__file__).with_name("attention.cu")


class Tile(NamedTuple):
    """How a head is cut: rows of a block, tokens of the other side at a time, threads."""

    rows: int
    keys: int
    threads: int


def tile_of(D: int) -> Tile:
    """What fits into the 48 KiB of shared memory that every GPU gives a block."""
    if D <= 64:
        return Tile(32, 32, 128)
    return Tile(16, 16, 128) if D <= 128 else Tile(8, 8, 64)


def macros(D: int, dtype: torch.dtype, *, causal: bool, backward: bool) -> dict[str, int]:
    """What ``attention.cu`` is compiled with."""
    rows, keys, threads = tile_of(D)
    return {
        "D": D, "ROWS": rows, "KEYS": keys, "THREADS": threads, "CAUSAL": causal, "DATA": DATA[dtype],
        "BACKWARD": backward,
    }  # fmt: skip


def shared_bytes(D: int, *, backward: bool) -> int:
    """Of a block: rows of both sides, and scores."""
    rows, keys, _ = tile_of(D)
    floats = (rows + keys) * (D + 1) * (1 + backward) + rows * (keys + 1) * (1 + backward)
    return 4 * floats


def results(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, segments: str, rates: str, phase: str,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Room for y, [B, T, H, D], and lse, [B, H, T]."""
    del k, v, cu_seqlens, segments, rates, phase, causal, scale
    B, T, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, T), dtype=torch.float32)


def forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, segments: str, rates: str,
    phase: str, causal: bool, scale: float, y: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """y and lse in one launch."""
    if y.numel() == 0:
        return
    pattern = pattern_of(segments, rates, phase, k.shape[2])
    tensors, numbers = _laid_out(plan, q=q, k=k, v=v)
    launches = _Launches(plan, q, k, cu_seqlens, pattern, causal, scale, backward=False)
    launches("attend", q.shape[2], **tensors, y=y, lse=lse, **numbers)


def backward(
    plan: Plan, dy: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, y: Tensor,
    lse: Tensor, cu_seqlens: Tensor | None, segments: str, rates: str, phase: str, causal: bool,
    scale: float, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
) -> None:  # fmt: skip
    """The gradients that there is room for. The first launch also makes what the second needs."""
    if y.numel() == 0:
        for gradient in (dk, dv):
            if gradient is not None:
                plan.run(Tensor.zero_, gradient)
        return
    pattern = pattern_of(segments, rates, phase, k.shape[2])
    dy = plan.zeros(q.shape, q.dtype) if dy is None else dy
    dlse = None if dlse is None else plan.contiguous(dlse)
    tensors, numbers = _laid_out(plan, q=q, k=k, v=v, dy=dy)
    launches = _Launches(plan, q, k, cu_seqlens, pattern, causal, scale, backward=True)
    delta = plan.empty(lse.shape, torch.float32)
    launches("query_slopes", q.shape[2], **tensors, y=y, lse=lse, dlse=dlse, delta=delta, dq=dq, **numbers)
    if dk is not None or dv is not None:
        launches("key_slopes", k.shape[2], **tensors, lse=lse, delta=delta, dk=dk, dv=dv, **numbers)


class _Launches:
    """Launches of kernels on the tiles of a call."""

    def __init__(
        self, plan: Plan, q: Tensor, k: Tensor, cu_seqlens: Tensor | None, pattern: Pattern, causal: bool,
        scale: float, *, backward: bool,
    ) -> None:  # fmt: skip
        B, T, H, D = q.shape
        self.plan, self.batch, self.device = plan, B, plan.device
        tile = tile_of(D)
        self.threads, self.shared = tile.threads, shared_bytes(D, backward=backward)
        self.macros = macros(D, q.dtype, causal=causal, backward=backward)
        classes = classes_of(pattern.segments, pattern.rates, T, tile.rows, causal)
        tables = planned_tables(plan, pattern, T, cu_seqlens)
        blocks = -(-min(pattern.segments[0], T) // (classes * tile.rows))
        self.tiles = tables["intervals"].shape[0] * classes * blocks
        self.shared_arguments = {
            **tables, "classes": classes, "blocks": blocks, "tiles": self.tiles,
            "count": len(pattern.rates), "T": T, "heads": H, "shared_by": H // k.shape[2],
            "scale_bits": struct.unpack("i", struct.pack("f", scale))[0],
        }  # fmt: skip

    def __call__(self, name: str, heads: int, **arguments: Any) -> None:
        """Launch a kernel on every tile of so many heads."""
        kernel = cuda_kernel(SOURCE, name, self.device, self.shared, **self.macros)
        grid = (self.batch * heads * self.tiles,)
        self.plan.launch(kernel, grid, threads=self.threads, **arguments, **self.shared_arguments)


def _laid_out(plan: Plan, **tensors: Tensor) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The tensors with a dense last dimension, and their strides."""
    laid = {n: x if x.stride(-1) == 1 or x.shape[-1] == 1 else plan.contiguous(x) for n, x in tensors.items()}
    return laid, {
        f"{name}_{letter}": x.stride(place) if x.shape[place] > 1 else 0
        for name, x in laid.items()
        for place, letter in enumerate("bth")
    }


attend = kernel_op(
    "dilated_attention.cuda",
    results=results,
    forward=forward,
    backward=backward,
    names=("y", "lse"),
    materialize=False,
)
"""(q, k, v, cu_seqlens, segments, rates, phase, causal, scale) -> (y, lse)."""


def cuda(
    q: Tensor, k: Tensor, v: Tensor, segments: str, rates: str, causal: bool, phase: str,
    combine_grad: str, cu_seqlens: Tensor | None, scale: float | None, return_lse: bool,
) -> Any:  # fmt: skip
    """y, or (y, lse), with exact gradients."""
    del combine_grad
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    y, lse = attend(q, k, v, cu_seqlens, segments, rates, phase, causal, scale)
    return (y, lse) if return_lse else y
