"""Lists of tensors in a contest: sizes as models have them, hostile memory, comparison as rows."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import dlpack

from bakeoff.select.contests.poison import GUARD, NAN
from bakeoff.select.declare.case import TensorMeta
from bakeoff.select.declare.lists import ListMeta

__all__ = ["drawn_list", "fenced_list", "rows_of", "same_memory", "shapes"]

_MODEL = (0.01, 1.0, 0.003, 0.7, 0.01, 3.0, 0.02, 2.0)
"""Sizes of a model's tensors relative to each other: vectors of biases and scales between matrices."""
_TINY = (0.9, 1.0, 0.6, 1.1, 0.7)
"""Likewise of lists that hold but vectors."""
_LEAST = 1024  # elements of a tensor on average, for a list that holds matrices
_COLUMNS = (32, 8, 2)  # of matrices, the most that fit
_APART = 512  # bytes: where PyTorch's allocator on CUDA places tensors
_WIDEST = 4096  # elements of a row that is judged by itself


def shapes(count: int, numel: int) -> list[tuple[int, ...]]:
    """Shapes of `count` tensors of `numel` elements together: a large embedding, matrices, and vectors of
    sizes that no block divides."""
    if count == numel:
        return [()] * count
    pattern = _MODEL if numel > _LEAST * count else _TINY
    weights = [pattern[i % len(pattern)] for i in range(count)]
    share = (0.75 if pattern is _MODEL else 1.0) * numel / sum(weights)  # the embedding gets the rest
    sizes = [int(weight * share) for weight in weights]
    if pattern is _MODEL:  # what is as large as a matrix is one
        sizes = [n - n % _COLUMNS[0] if w > 0.5 else n for n, w in zip(sizes, weights, strict=True)]
    sizes[min(1, count - 1)] += numel - sum(sizes)
    return [_shape(size) for size in sizes]


def _shape(size: int) -> tuple[int, ...]:
    for columns in _COLUMNS:
        if size >= columns**2 and size % columns == 0:
            return (size // columns, columns)
    return (size,)


def drawn_list(flat: Tensor, meta: ListMeta) -> list[Tensor]:
    """Tensors of memory of their own that hold the elements of `flat`, one after the other."""
    tensors, start = [], 0
    common = None if meta.shape is None else [meta.shape] * meta.count
    for shape in common or shapes(meta.count, meta.numel):
        size = torch.Size(shape).numel()
        stride = TensorMeta.dense(shape, meta.dtype).stride
        if not meta.contiguous and len(shape) == 2:
            stride = (1, shape[0])
        tensor = torch.empty_strided(shape, stride, dtype=meta.dtype, device=flat.device)
        tensors.append(tensor.copy_(flat[start : start + size].view(shape)))
        start += size
    return tensors


def fenced_list(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Copies of tensors of one dtype, gaps included, with NaN on both sides of each; and the memory they all
    lie in.

    As far as PyTorch knows, each has a storage of its own, as a model's tensors do.
    """
    views, raw = _in_one_memory(tensors)
    return [v if v.numel() == 0 else dlpack.from_dlpack(torch._C._to_dlpack(v)) for v in views], raw


def same_memory(raw: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether memory of `fenced_list` holds these tensors bit for bit, and the fences around them stand."""
    return torch.equal(raw, _in_one_memory(tensors)[1])


def _in_one_memory(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Copies as views of one memory, which holds NaN elsewhere."""
    dtype = tensors[0].dtype
    places, end = [], 0  # in elements
    guard, apart = GUARD // dtype.itemsize, _APART // dtype.itemsize
    for t in tensors:
        span = 1 + sum([(n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)])
        places.append((t.shape, t.stride(), end + guard))
        end += guard + -(-span // apart) * apart
    raw = torch.full(((end + guard) * dtype.itemsize,), NAN, dtype=torch.uint8, device=tensors[0].device)
    elements = raw.view(dtype)
    views = [
        elements.as_strided(*place) if t.numel() else torch.empty_like(t)
        for t, place in zip(tensors, places, strict=True)
    ]
    torch._foreach_copy_(views, list(tensors))
    return views, raw


def rows_of(tensors: Sequence[Tensor], meta: ListMeta) -> Tensor:
    """All elements as one tensor [rows, width], so that each stretch of each tensor is judged by itself; rows
    are filled up with zeros. `meta` describes the whole list where `tensors` are a part of it."""
    width = min(_WIDEST, 1 << max(0, (meta.numel // max(meta.count, 1)) - 1).bit_length())
    dtype, device = tensors[0].dtype, tensors[0].device
    filler = torch.zeros(width, dtype=dtype, device=device)
    parts = []
    for t in tensors:
        parts.append(t.detach().reshape(-1))
        if t.numel() % width:
            parts.append(filler[: -t.numel() % width])
    return torch.cat(parts).view(-1, width)
