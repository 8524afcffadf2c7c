"""Keys: what a decision depends on, and how exact calls fall into buckets."""

import math
from collections.abc import Sequence

from bakeoff.select.declare.case import Case, TensorMeta
from bakeoff.select.declare.lists import ListMeta
from bakeoff.select.declare.op import Op

__all__ = ["REGIMES", "key", "layout", "list_text", "round_list", "round_rows", "rows_rounded", "with_layout"]

REGIMES = ("eager", "graph", "compiled")

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def round_rows(n: int) -> int:
    """`n` rounded up to a power of two times 1, 1.25, 1.5 or 1.75; exact up to 8."""
    if n <= 8:
        return n
    step = 1 << ((n - 1).bit_length() - 3)
    return -(-n // step) * step


def layout(meta: TensorMeta, features: int = 1) -> str:
    """The layout class: "dense", "strided" (dense features, any stride over rows) or "other"."""
    if meta.is_contiguous:
        return "dense"
    shape, stride = meta.shape[-features:], meta.stride[-features:]
    return "strided" if TensorMeta(shape, meta.dtype, stride).is_contiguous else "other"


def with_layout(meta: TensorMeta, shape: Sequence[int], features: int = 1) -> TensorMeta:
    """`meta` at another shape, in a canonical form of its layout class.

    "strided" becomes rows twice as far apart as dense ones; "other" a transposed last pair of dimensions.
    """
    dense = TensorMeta.dense(shape, meta.dtype, grad=meta.requires_grad)
    kind = layout(meta, features)
    if kind == "dense" or not shape:
        return dense
    if kind == "strided":
        rows = len(shape) - features
        stride = (*(2 * s for s in dense.stride[:rows]), *dense.stride[rows:])
    elif len(shape) == 1:
        stride = (2,)
    else:
        swapped = (*shape[:-2], shape[-1], shape[-2])
        turned = TensorMeta.dense(swapped, meta.dtype).stride
        stride = (*turned[:-2], turned[-1], turned[-2])
    return TensorMeta(tuple(shape), meta.dtype, stride, meta.requires_grad)


def rows_rounded(case: Case) -> Case:
    """The representative case of an op over rows: in every tensor all dimensions but the last count rows,
    which
    become one dimension, rounded up; tensors of one dimension stay as they are."""
    plain = {}
    for name, meta in case.tensors.items():
        if len(meta.shape) > 1:
            rows = math.prod(meta.shape[:-1])
            plain[name] = with_layout(meta, (round_rows(rows), meta.shape[-1]))
    return case.replace(**plain)


def list_text(meta: ListMeta) -> str:
    """A list of tensors as keys write it, with the elements of all: ``fp32[148 tensors, 124000000]``; or with
    the shape that they have in common: ``fp32[12 tensors of 768x2048]``."""
    dtype = str(meta.dtype).removeprefix("torch.")
    strided = "" if meta.contiguous else ":strided"
    sizes = f", {meta.numel}" if meta.shape is None else f" of {'x'.join(map(str, meta.shape))}"
    return f"{_SHORT.get(dtype, dtype)}[{meta.count} tensors{sizes}]{strided}"


def round_list(meta: ListMeta) -> ListMeta:
    """The number of tensors and their elements rounded up, every tensor contiguous and of any shape."""
    return ListMeta(round_rows(meta.count), round_rows(meta.numel), meta.dtype)


def key(op: Op, case: Case, regime: str) -> str:
    """The readable key of a case: ``rms_norm(x=bf16[8192,4096]', ...) cuda eager``.

    A prime marks a tensor whose gradient is wanted; layouts other than dense are named after the shape.
    In the compiled regime row counts are wild: one compiled graph serves every length.
    """
    representative = op.bucket(case)
    parts = []
    for name, value in representative.args.items():
        if isinstance(value, ListMeta):
            parts.append(f"{name}={list_text(value)}")
        elif isinstance(value, TensorMeta):
            features = op.features.get(name, len(value.shape))
            rows = len(value.shape) - features
            dims = [
                "*" if regime == "compiled" and i < rows else str(size) for i, size in enumerate(value.shape)
            ]
            dtype = str(value.dtype).removeprefix("torch.")
            kind = layout(value, features)
            text = f"{_SHORT.get(dtype, dtype)}[{','.join(dims)}]"
            text += "" if kind == "dense" or regime == "compiled" else f":{kind}"
            parts.append(f"{name}={text}{chr(39) if value.requires_grad else ''}")
        elif value is not None and name not in op.settings:
            parts.append(f"{name}={value}")
    return f"{op.name}({', '.join(parts)}) {case.device.split(':')[0]} {regime}"
