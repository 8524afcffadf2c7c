"""linear_cross_entropy's matrix products, made so that cuBLAS is fast and rounds once."""

import torch
from torch import Tensor

__all__ = ["add_sum", "add_to_classes", "add_to_rows", "logits_of", "multiplicable", "pieces", "to_rows"]

_EVEN = 8  # classes: for other numbers of them cuBLAS takes slow kernels, however rows are padded
_SHORT = 512  # classes: sums over no more gain nothing from being cut, and one slow product beats two


def multiplicable(weight: Tensor) -> Tensor:
    """`weight` as products read it in place, either dimension dense; otherwise each would copy it."""
    V, D = weight.shape
    row, column = weight.stride()
    return weight if (column == 1 and row >= D) or (row == 1 and column >= V) else weight.contiguous()


def pieces(V: int) -> list[slice]:
    """The classes; of many, those apart that are beyond a multiple of `_EVEN`."""
    even = V // _EVEN * _EVEN if V > _SHORT else V
    return [slice(0, V)] if even == V else [slice(0, even), slice(even, V)]


def logits_of(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x weight' + bias."""
    for classes in pieces(weight.shape[0]):
        if bias is None:
            torch.mm(x, weight[classes].t(), out=out[:, classes])
        else:
            torch.addmm(bias[classes], x, weight[classes].t(), out=out[:, classes])


def to_rows(grads: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = grads weight, rounded once: of long sums cuBLAS rounds parts to the dtype of the product, and the
    gradient of a row whose best class is its target is a small difference of such parts."""
    wide = torch.promote_types(out.dtype, torch.float32)
    at_once = out.dtype == wide or not out.is_cuda or weight.shape[0] <= _SHORT
    total = out if at_once else out.new_empty(out.shape, dtype=wide)
    add_to_rows(total, grads, weight, first=True)
    if total is not out:
        out.copy_(total)


def add_to_rows(total: Tensor, grads: Tensor, weight: Tensor, *, first: bool) -> None:
    """total = grads weight, or total += it."""
    for classes in pieces(weight.shape[0]):
        _add_product(total, grads[:, classes], weight[classes], first=first and classes.start == 0)


def add_to_classes(total: Tensor, grads: Tensor, x: Tensor, *, first: bool) -> None:
    """total = grads' x, or total += it."""
    for classes in pieces(total.shape[0]):
        _add_product(total[classes], grads[:, classes].t(), x, first=first)


def add_sum(total: Tensor, grads: Tensor, *, first: bool) -> None:
    """total = the sum of rows of `grads`, or total += it, in total's dtype."""
    if first:
        torch.sum(grads, 0, dtype=total.dtype, out=total)
    else:
        total.add_(grads.sum(0, dtype=total.dtype))


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """total = a b, or total += a b; float32 sums of 16-bit products lose nothing on the way."""
    if total.dtype == a.dtype:
        torch.mm(a, b, out=total) if first else torch.addmm(total, a, b, out=total)
    elif total.is_cuda:
        if first:
            torch.mm(a, b, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        _add_product(total, a.to(total.dtype), b.to(total.dtype), first=first)
