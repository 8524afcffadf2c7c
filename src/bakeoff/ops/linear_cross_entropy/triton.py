"""The ``triton`` candidate of linear_cross_entropy: PyTorch's products and one kernel between them.

Where classes are few, the kernel makes its logits itself, and x's gradient is a product that divides by the
number of targets before it rounds.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from bakeoff.kernels.triton import TritonKernel
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.linear_cross_entropy import kernels
from bakeoff.ops.linear_cross_entropy.chunks import (
    Chunked,
    chunked_op,
    classes_at_once,
    default_rows,
    sums_are_wide,
)
from bakeoff.ops.linear_cross_entropy.method import Method, Terms
from bakeoff.ops.linear_cross_entropy.products import logits_of, to_rows

__all__ = ["Tiling", "default", "linear_cross_entropy"]

_short_kernel = TritonKernel(kernels._short)
_joined_kernel = TritonKernel(kernels._product_and_rows)
_long_kernel = TritonKernel(kernels._long)
_part_kernel = TritonKernel(kernels._part)
_slopes_kernel = TritonKernel(kernels._part_slopes)
_to_rows_kernel = TritonKernel(kernels._to_rows)
_begin_kernel = TritonKernel(kernels._begin)
_finish_kernel = TritonKernel(kernels._finish)
_multiply_kernel = TritonKernel(kernels._multiply)

_BUDGET = 1 << 28  # bytes of a chunk's logits
_BLOCK_BUDGET = 1 << 27  # bytes of a block of classes, beside which there are float32 sums of x's gradient
_WHOLE = 16384  # a row that is read once
_TILE = 8192  # of a longer one
_FEW = 2048  # elements that a program has, or fewer, where rows are short
_FINISH = 4096  # losses that are added up at a time
_COUNT = 16384  # targets that are counted at a time
_JOINED = 512  # classes up to which one kernel makes a row's logits and uses them up
_MULTIPLY = 2048  # elements that a program multiplies at a time
_PROGRAMS = 2048  # that do so: where nothing is to do, fewer begin and end sooner
_CELLS = 1 << 14  # logits that such a kernel's program holds, in registers
_OWN = 4096  # classes up to which x's gradient is a product of our own


class Tiling(NamedTuple):
    """How rows are cut, and how the kernel is launched."""

    rows: int
    """Of a chunk."""
    wide: int
    """1: the weight's gradient is summed up over chunks in float32, else in its own dtype."""
    block: int
    """Classes that a program reads at a time."""
    warps: int
    each: int = 1
    """Rows that a program has, where `block` holds a row."""
    classes: int = 0
    """Above 0: the weight's gradient is made in blocks of so many classes of all rows, not in chunks."""
    head: int = 0
    """Above 0: only that of so many rows, to which chunks of the others are added."""
    tile: int = 0
    """Above 0: logits are made and used up by one kernel, so many rows a program; `block` holds a row."""


def default(N: int, V: int, D: int, dtype: torch.dtype) -> Tiling:
    """For N rows, V classes and D features."""
    rows = default_rows(N, V, dtype.itemsize, _BUDGET)
    block = max(64, triton.next_power_of_2(V)) if V <= _WHOLE else _TILE
    wide = int(sums_are_wide(N, V, D, rows, dtype))
    classes = classes_at_once(N, V, D, rows, dtype, _BLOCK_BUDGET)
    if block <= _JOINED and dtype.itemsize == 2:
        tile, warps = min(_CELLS // block, 128), 4 if block < 128 else 8
        return Tiling(rows, wide, block, warps, 1, classes, tile=tile)
    return _with_logits(Tiling(rows, wide, block, 1, 1, classes))


def _with_logits(tiling: Tiling) -> Tiling:
    """With logits that PyTorch makes: some `_FEW` elements a program."""
    each = max(1, min(_FEW // tiling.block, triton.next_power_of_2(tiling.rows)))
    return tiling._replace(each=each, warps=max(1, min(16, each * tiling.block // 512)), tile=0)


def tilings(case: Any) -> list[Tiling]:
    """The default, other blocks or numbers of rows a program, logits that PyTorch makes, chunks of half as
    many rows, float32 sums, and chunks for some or all rows instead of blocks of classes."""
    V, D = case.weight.shape
    N, dtype = case.target.numel, case.x.dtype
    first = default(N, V, D, dtype)
    found = [first]
    if first.tile:
        found += [first._replace(tile=first.tile // 2, warps=4), _with_logits(first)]
    elif V > _WHOLE:
        found += [first._replace(block=4096, warps=8), first._replace(block=16384, warps=32)]
        if V <= 2 * _WHOLE and not (case.label_smoothing or case.softcap):  # else registers run out
            found.append(first._replace(block=2 * _WHOLE, warps=32))
    else:
        if first.warps > 1:
            found.append(first._replace(warps=first.warps // 2))
        if first.block < _FEW:
            found.append(first._replace(each=2 * first.each, warps=min(2 * first.warps, 8)))
    if first.classes:
        found += [first._replace(head=max(D // 64, 1) * 64), first._replace(classes=0)]
    half = max(first.rows // 2, 1)
    wide = int(sums_are_wide(N, V, D, half, dtype))
    found += [first._replace(rows=half, wide=wide, classes=0), first._replace(wide=1, classes=0)]
    return list(dict.fromkeys(found))


def together(N: int, V: int, tiling: Tiling) -> int:
    """See `bakeoff.ops.linear_cross_entropy.method.Method`: a program's, if chunks hold whole programs."""
    each = tiling.tile or (tiling.each if tiling.block >= V else 1)
    return each if not tiling.classes and (tiling.rows >= N or tiling.rows % each == 0) else 1


def chunk(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    logits: Tensor,
    target: Tensor,
    losses: Tensor,
    scale: Tensor,
    terms: Terms,
    gradients: bool,
    tiling: Tiling,
) -> None:
    """See `bakeoff.ops.linear_cross_entropy.method.Method`."""
    if not tiling.tile:
        logits_of(x, weight, bias, logits)
        rows(logits, target, losses, scale, terms, gradients, tiling)
        return
    N, V = logits.shape
    _joined_kernel(
        (triton.cdiv(N, tiling.tile),),
        x=x.contiguous(),
        weight=weight.contiguous(),
        bias=x if bias is None else bias.contiguous(),
        logits=logits,
        target=target.contiguous(),
        losses=losses,
        scale=scale,
        N=N,
        row_units=logits.stride(0) // kernels.PADDED.value,
        scale_step=scale.stride(0),
        ignore_index=terms.ignore_index,
        smoothing=terms.label_smoothing,
        z_loss=terms.z_loss,
        softcap=terms.softcap,
        V=V,
        D=x.shape[1],
        ROWS=tiling.tile,
        BLOCK=tiling.block,
        DEPTH=64,
        SMOOTH=terms.label_smoothing > 0,
        CAP=terms.softcap > 0,
        BIAS=bias is not None,
        GRADIENTS=gradients,
        TOGETHER=losses.numel() != N,
        num_warps=tiling.warps,
        num_stages=3,
    )


def rows(
    logits: Tensor,
    target: Tensor,
    losses: Tensor,
    scale: Tensor,
    terms: Terms,
    gradients: bool,
    tiling: Tiling,
) -> None:
    """The losses of rows, each or those of a program together, and where `gradients` the derivative of each
    row's by its logits times its `scale` in the place of the logits."""
    N, V = logits.shape
    short = tiling.block >= V
    programs = triton.cdiv(N, tiling.each) if short else N
    cut: dict[str, Any] = {"TAIL": _tail(V, tiling.block)}
    if short:
        cut = {"N": N, "ROWS": tiling.each, "TOGETHER": losses.numel() != N}
    kernel = _short_kernel if short else _long_kernel
    kernel(
        (programs,),
        logits=logits,
        target=target.contiguous(),
        losses=losses,
        scale=scale,
        row_units=logits.stride(0) // kernels.PADDED.value,
        scale_step=scale.stride(0),
        ignore_index=terms.ignore_index,
        smoothing=terms.label_smoothing,
        z_loss=terms.z_loss,
        softcap=terms.softcap,
        V=V,
        BLOCK=tiling.block,
        SMOOTH=terms.label_smoothing > 0,
        CAP=terms.softcap > 0,
        GRADIENTS=gradients,
        num_warps=tiling.warps,
        **cut,
    )


def part(
    logits: Tensor, target: Tensor, begin: int, state: Tensor, first: bool, terms: Terms, tiling: Tiling
) -> None:
    """See `bakeoff.ops.linear_cross_entropy.method.Method`."""
    N, V = logits.shape
    block, warps = _cut(V, tiling)
    _part_kernel(
        (N,),
        logits=logits,
        target=target,
        state=state,
        row_units=logits.stride(0) // kernels.PADDED.value,
        begin=begin,
        N=N,
        ignore_index=terms.ignore_index,
        softcap=terms.softcap,
        V=V,
        BLOCK=block,
        TAIL=_tail(V, block),
        SMOOTH=terms.label_smoothing > 0,
        CAP=terms.softcap > 0,
        FIRST=first,
        num_warps=warps,
    )


def slopes(
    logits: Tensor,
    target: Tensor,
    begin: int,
    most: Tensor,
    weights: Tensor,
    factors: Tensor,
    V: int,
    terms: Terms,
    tiling: Tiling,
) -> None:
    """See `bakeoff.ops.linear_cross_entropy.method.Method`."""
    N, here = logits.shape
    block, warps = _cut(here, tiling)
    _slopes_kernel(
        (N,),
        logits=logits,
        target=target,
        mosts=most,
        weights=weights,
        factors=factors,
        row_units=logits.stride(0) // kernels.PADDED.value,
        begin=begin,
        ignore_index=terms.ignore_index,
        even=terms.label_smoothing / V,
        rest=1.0 - terms.label_smoothing,
        softcap=terms.softcap,
        V=here,
        BLOCK=block,
        TAIL=_tail(here, block),
        SMOOTH=terms.label_smoothing > 0,
        CAP=terms.softcap > 0,
        num_warps=warps,
    )


def _tail(V: int, block: int) -> int:
    """The tile of what is left of V behind whole blocks."""
    return max(64, int(triton.next_power_of_2(V % block)))


def _cut(V: int, tiling: Tiling) -> tuple[int, int]:
    """Block and warps for a row's part of V classes."""
    block = min(tiling.block, max(64, int(triton.next_power_of_2(V))))
    return block, max(1, tiling.warps * block // tiling.block)


def scales(V: int, dtype: torch.dtype) -> bool:
    """See `bakeoff.ops.linear_cross_entropy.method.Method`. Float16 has no room for p / count."""
    return V <= _OWN and dtype == torch.bfloat16


def own_to_rows(grads: Tensor, weight: Tensor, out: Tensor, factor: Tensor | None) -> None:
    """See `bakeoff.ops.linear_cross_entropy.method.Method`."""
    V, D = weight.shape
    if V > _OWN or out.dtype.itemsize != 2:
        to_rows(grads, weight, out)
        return
    room, N = out.contiguous(), out.shape[0]
    width = 128 if D > 64 else 64
    _to_rows_kernel(
        (triton.cdiv(N, 128) * triton.cdiv(D, width),),
        grads=grads,
        weight=weight.contiguous(),
        out=room,
        factor=grads if factor is None else factor,
        N=N,
        row_units=grads.stride(0) // kernels.PADDED.value,
        V=V,
        D=D,
        ROWS=128,
        COLS=width,
        DEPTH=64,
        SCALED=factor is not None,
        num_warps=8,
        num_stages=3,
    )
    if room is not out:
        out.copy_(room)


def begin(
    target: Tensor, terms: Terms, reduction: str, share: float, numbers: Tensor, factor: Tensor | None
) -> None:
    """See `bakeoff.ops.linear_cross_entropy.method.Method`."""
    N = target.numel()
    block = max(128, min(_COUNT, triton.next_power_of_2(N))) if reduction == "mean" else 128
    _begin_kernel(
        (1,),
        target=target.contiguous(),
        numbers=numbers,
        factor=numbers if factor is None else factor,
        ignore_index=terms.ignore_index,
        share=share,
        N=N,
        MEAN=reduction == "mean",
        FACTOR=factor is not None,
        BLOCK=block,
        num_warps=max(1, block // 512),
    )


def finish(losses: Tensor, numbers: Tensor, loss: Tensor) -> None:
    """See `bakeoff.ops.linear_cross_entropy.method.Method`."""
    N = losses.numel()
    _finish_kernel(
        (1,),
        losses=losses,
        numbers=numbers,
        loss=loss,
        N=N,
        BLOCK=max(128, min(_FINISH, triton.next_power_of_2(N))),
        num_warps=8,
    )


def multiply(
    scaled: bool,
    dloss: Tensor,
    factor: Tensor,
    of_x: Tensor,
    dx: Tensor | None,
    of_weight: Tensor,
    dweight: Tensor | None,
    of_bias: Tensor,
    dbias: Tensor | None,
) -> None:
    """See `bakeoff.ops.linear_cross_entropy.method.Method`."""
    sizes = [0 if out is None else out.numel() for out in (dx, dweight, dbias)]
    if not any(sizes):
        return
    _multiply_kernel(
        (min(triton.cdiv(max(sizes), _MULTIPLY), _PROGRAMS),),
        of_x=of_x,
        of_weight=of_weight,
        of_bias=of_bias,
        dloss=dloss,
        factor=factor,
        dx=of_x if dx is None else dx,
        dweight=of_weight if dweight is None else dweight,
        dbias=of_bias if dbias is None else dbias,
        X=sizes[0],
        W=sizes[1],
        B=sizes[2],
        BLOCK=_MULTIPLY,
        SCALED=scaled,
        SAME_X=dx is of_x,
        SAME_W=dweight is of_weight,
        num_warps=4,
    )


linear_cross_entropy = Chunked(
    chunked_op(
        "linear_cross_entropy",
        Method(begin, together, chunk, own_to_rows, scales, part, slopes, finish, multiply, default),
        Tilings(Tiling, tilings),
    )
)
"""For float16, bfloat16 and float32."""
