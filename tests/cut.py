"""Cases cut down to sizes that a CPU, or a checker of memory accesses, does at once."""

import math

from bakeoff.select import Case, ListMeta, Op, TensorMeta

__all__ = ["cut"]


def cut(
    op: Op,
    case: Case,
    most: int,
    device: str,
    *,
    outer: int | None = None,
    lists: int = 16,
    large: int = 1000,
    beyond: int = 30_000,
) -> Case:
    """The case on `device` with at most `most` of everything that counts rows; of the first of several such
    dimensions at most `outer`, where given. Tensors of a list have at most `lists` elements on average,
    or at most `most` on each side where they have a shape in common. What else is `beyond` and more, as large
    vocabularies are, becomes `large`.
    """
    args = dict(case.args)
    for name, meta in case.tensors.items():
        rows = len(meta.shape) - op.features.get(name, 0)
        limits = [outer if outer is not None and i == 0 < rows - 1 else most for i in range(rows)]
        shape = [min(size, limit) for size, limit in zip(meta.shape, limits, strict=False)]
        features = [large if size >= beyond else size for size in meta.shape[rows:]]
        args[name] = TensorMeta.dense((*shape, *features), meta.dtype, grad=meta.requires_grad)
    for name, listed in case.lists.items():
        count = min(listed.count, 16)
        if listed.shape is not None:
            sides = tuple(min(size, most) for size in listed.shape)
            args[name] = ListMeta(count, count * math.prod(sides), listed.dtype, shape=sides)
            continue
        each = min(-(-listed.numel // listed.count), lists)
        args[name] = ListMeta(count, count * each, listed.dtype)
    smaller = Case(args, device, case.name)
    # What a bucket does without must go: frequencies that a shorter sequence lacks.
    kept = op.bucket(smaller).tensors
    return smaller.replace(
        **{name: kept[name] for name, meta in smaller.tensors.items() if kept[name].numel < meta.numel}
    )
