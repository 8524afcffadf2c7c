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
    """Copies of tensors, gaps included, with NaN on both sides of each; and the memory they all lie in.

    As far as PyTorch knows, each has a storage of its own, as a model's tensors do.
    """
    spans = [1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in tensors]
    starts, end = [], 0
    for t, span in zip(tensors, spans, strict=True):
        starts.append(end + GUARD)
        end += GUARD + -(-span * t.element_size() // _APART) * _APART
    raw = torch.full((end + GUARD,), NAN, dtype=torch.uint8, device=tensors[0].device)
    copies = []
    for t, span, start in zip(tensors, spans, starts, strict=True):
        if t.numel() == 0:
            copies.append(torch.empty_like(t))
            continue
        inside = raw[start : start + span * t.element_size()].view(t.dtype).as_strided(t.shape, t.stride())
        copies.append(dlpack.from_dlpack(torch._C._to_dlpack(inside)))
    torch._foreach_copy_(copies, list(tensors))
    return copies, raw


def same_memory(raw: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether memory of `fenced_list` holds these tensors bit for bit, and the fences around them stand."""
    return torch.equal(raw, fenced_list(tensors)[1])


def rows_of(tensors: Sequence[Tensor], meta: ListMeta) -> Tensor:
    """All elements as one tensor [rows, width], so that each stretch of each tensor is judged by itself; rows
    are filled up with zeros. `meta` describes the whole list where `tensors` are a part of it."""
    width = min(_WIDEST, 1 << max(0, (meta.numel // max(meta.count, 1)) - 1).bit_length())
    dtype, device = tensors[0].dtype, tensors[0].device
    filler = torch.zeros(width, dtype=dtype, device=device)
    parts = []
    for t in tensors:
        parts += [t.detach().reshape(-1), filler[: -t.numel() % width]]
    return torch.cat(parts).view(-1, width)
