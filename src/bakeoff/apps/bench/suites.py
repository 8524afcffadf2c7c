"""What is measured: an op's grid on this device, in both directions."""

import math
from collections.abc import Iterator

import msgspec

from bakeoff.apps.bench.exact import exact
from bakeoff.apps.bench.notation import write_case
from bakeoff.select import Case, ListMeta, Op, TensorMeta
from bakeoff.select.declare.key import layout, with_layout

__all__ = ["Cell", "cells", "chosen", "cpu_cases", "shrunk"]

CPU_ELEMENTS = 2**18  # the largest tensor of a case on the CPU


class Cell(msgspec.Struct, frozen=True):
    """A case in one direction: "forward", or "both" (forward, then backward to every tensor that wants
    it)."""

    op: Op
    case: Case
    direction: str


def cells(op: Op, device: str, text: str = "", direction: str | None = None) -> Iterator[Cell]:
    """The op's grid on `device`, forward before both unless one `direction` is asked for, where `text` is
    part of the op's and case's name or of its shapes."""
    if device.startswith("cuda"):
        grid = [Case(c.args, device, c.name) for c in op.cases() if _matches(op, c, c, text)]
    else:
        grid = cpu_cases(op, text)
    for case in grid:
        if direction != "both":
            yield Cell(exact(op), case.without_grad(), "forward")
        if case.needs_grad and direction != "forward":
            yield Cell(exact(op), case, "both")


def cpu_cases(op: Op, text: str = "") -> list[Case]:
    """The op's grid with fewer rows, on the CPU; cases that become equal are taken once.

    Feature sizes, dtypes, flags and layouts stay, so every form of the op is still there. `text` selects
    cases as in `cells`; it may also match the name or shapes before rows were cut.
    """
    distinct: dict[str, Case] = {}
    for case in op.cases():
        small = shrunk(op, Case(case.args, "cpu"), CPU_ELEMENTS)
        if _matches(op, case, small, text):
            name = write_case(op, small)
            distinct.setdefault(name, Case(small.args, "cpu", name))
    return list(distinct.values())


def _matches(op: Op, case: Case, measured: Case, text: str) -> bool:
    return chosen(text, f"{op.name} {case.name} {write_case(op, case)} {write_case(op, measured)}")


def chosen(text: str, name: str) -> bool:
    """Whether `name` holds `text`, or one of several texts between bars: "4096x768|residual"."""
    return any(part in name for part in text.split("|"))


def shrunk(op: Op, case: Case, elements: int) -> Case:
    """`case` with its row dimensions cut until no tensor has more than `elements` elements.

    All row dimensions are cut to one bound, halved as often as needed, so that equal sizes stay equal and
    longer ones no shorter. Where a single row is larger, one row is left.
    """
    bound = 1 << 30
    while bound > 1 and max(meta.numel for meta in case.data.values()) > elements:
        bound //= 2
        case = case.replace(**{name: _cut(op, name, meta, bound) for name, meta in case.tensors.items()})
        case = case.replace(**{name: _cut_list(meta, bound) for name, meta in case.lists.items()})
        # A bucket drops what has no effect, such as the part of a filter beyond the sequence's length.
        kept = op.bucket(case).tensors
        case = case.replace(
            **{name: kept[name] for name, meta in case.tensors.items() if kept[name].numel < meta.numel}
        )
    op.check(case)
    return case


def _cut_list(meta: ListMeta, bound: int) -> ListMeta:
    """At most `bound` tensors, of as many elements each as before, until they are fewer than that; of a
    common shape, all of whose sizes are at most `bound`."""
    count = min(meta.count, bound)
    if meta.shape is not None:
        shape = tuple(min(size, bound) for size in meta.shape)
        return ListMeta(count, count * math.prod(shape), meta.dtype, meta.contiguous, shape)
    numel = min(meta.numel * count // meta.count, count * bound)
    return ListMeta(count, numel, meta.dtype, meta.contiguous)


def _cut(op: Op, name: str, meta: TensorMeta, bound: int) -> TensorMeta:
    features = op.features.get(name, len(meta.shape))
    rows = len(meta.shape) - features
    shape = (*(min(n, bound) for n in meta.shape[:rows]), *meta.shape[rows:])
    if shape == meta.shape:
        return meta
    if layout(meta, features) != "other":
        return with_layout(meta, shape, features)
    order = sorted(range(len(shape)), key=lambda i: -meta.stride[i])  # the same permutation, packed
    packed = TensorMeta.dense([shape[i] for i in order], meta.dtype).stride
    stride = tuple(packed[order.index(i)] for i in range(len(shape)))
    return TensorMeta(shape, meta.dtype, stride, meta.requires_grad)
