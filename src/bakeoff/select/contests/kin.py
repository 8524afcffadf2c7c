"""Kin: a relative of a case, which falls into the same room of a kernel by another door.

A key stands for many calls: other numbers of rows, rows as several dimensions, rows at other distances. What
is right at the sizes and strides that a contest times may still be wrong there.
"""

import math

import msgspec

from bakeoff.select.declare.case import Case, TensorMeta
from bakeoff.select.declare.key import layout
from bakeoff.select.declare.op import Op

__all__ = ["kin_of"]

_TILE = 64  # rows: the relative has one more than a multiple of it


def kin_of(op: Op, case: Case) -> Case | None:
    """`case` with fewer items, one more than a multiple of `_TILE` where there are so many; rows as two
    dimensions where the op takes that; and of what is not dense other strides of the same layout class.
    None where there is one item, or none."""
    tensors = {name: meta for name, meta in case.tensors.items() if name in op.batched}
    lists = {name: listed for name, listed in case.lists.items() if name in op.batched and listed.count > 1}
    fewer = {}
    for name, listed in lists.items():
        numel = listed.numel * (listed.count - 1) // listed.count
        fewer[name] = msgspec.structs.replace(listed, count=listed.count - 1, numel=numel)
    sizes = {meta.shape[0] if meta.shape else 0 for meta in tensors.values()}
    if (tensors and min(sizes) < 2) or not (tensors or lists):
        return None
    rows = min(sizes, default=0)
    flat = all(len(meta.shape) == op.features.get(name, 0) + 1 for name, meta in tensors.items())
    for lead in _leads(rows) if flat and len(sizes) == 1 else ():
        made = {n: _laid(meta, (*lead, *meta.shape[1:]), op.features[n]) for n, meta in tensors.items()}
        related = case.replace(**fewer, **made)
        if _valid(op, related) and _flattened(op, related):
            return related
    count = _fewer(rows) if len(sizes) == 1 else 0
    made = {}
    for name, meta in tensors.items():
        shape = (count or meta.shape[0] - 1, *meta.shape[1:])
        made[name] = _laid(meta, shape, op.features.get(name, len(shape)))
    related = case.replace(**fewer, **made)
    return related if _valid(op, related) else None


def _fewer(rows: int) -> int:
    return (rows - 1) // _TILE * _TILE + 1 if rows > _TILE else rows - 1


def _leads(rows: int) -> list[tuple[int, int]]:
    """Two dimensions of about so many rows."""
    if rows > 2 * _TILE:
        third = ((rows - 2 * _TILE - 1) // (3 * _TILE) * 3 * _TILE + 2 * _TILE + 1) // 3
        return [(3, third)]  # 3 * third is 129 + 192 k
    if rows > _TILE:
        return [(5, 13)]
    third = (rows - 1) // 3
    return [(3, third - 1 + third % 2)] if third > 2 else []


def _valid(op: Op, case: Case) -> bool:
    try:
        op.check(case)
        op.bucket(case)
    except Exception:  # noqa: BLE001  what an op makes of sizes it doesn't take
        return False
    return True


def _flattened(op: Op, case: Case) -> bool:
    """Whether calls of more row dimensions share their key with those of one."""
    return all(
        len(meta.shape) <= op.features.get(name, 0) + 1 for name, meta in op.bucket(case).tensors.items()
    )


def _laid(meta: TensorMeta, shape: tuple[int, ...], features: int) -> TensorMeta:
    """`meta` at another shape in its layout class: rows an odd distance apart and the outermost ones further,
    or features two apart."""
    dense = TensorMeta.dense(shape, meta.dtype, grad=meta.requires_grad)
    kind = layout(meta, features)
    if kind == "dense" or not shape or math.prod(shape) == 0:
        return dense
    lead = len(shape) - features
    if kind == "other" or not lead:
        return msgspec.structs.replace(dense, stride=tuple(2 * step for step in dense.stride))
    order = [0] if lead == 1 else [0, *range(lead - 1, 0, -1)]  # the inner row dimensions the other way round
    stride, step = list(dense.stride), dense.stride[lead - 1] + 1
    for i in reversed(order):
        stride[i] = step
        step *= shape[i]
        step += 3
    return msgspec.structs.replace(dense, stride=tuple(stride))
