"""Features, or their projection."""

import triton
import triton.language as tl

from bakeoff.ops.byte_spectral.kernels.spectrum import (
    _dot,
    _features,
    _phases,
    _spectrum,
    _strip,
    _tile,
    _values,
    _window,
)


@triton.jit(do_not_specialize=["T", "row"])
def _forward(
    ids, table, window, omega, weight, bias, out, T: tl.int64, row: tl.int64,
    C: tl.constexpr, W: tl.constexpr, K: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, BW: tl.constexpr, BJ: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr,
    SPAN: tl.constexpr, FEATURES: tl.constexpr, EPS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """BT positions (axis 0) times BD channels (axis 1) a program; without a weight all features.

    F is the number of features of one column of the table.
    """
    ids, first, before, count = _tile(tl.program_id(0).to(tl.int64), ids, T, row, BT, BW)
    i = tl.arange(0, BT)
    f = tl.arange(0, BF)
    phases = _phases(omega, W, K, BW, BJ)
    scale = _window(window, W, BW)
    if weight is not None:
        d = tl.program_id(1) * BD + tl.arange(0, BD)
        total = tl.zeros([BT, BD], tl.float32)
    for c in range(C):
        value = _strip(_values(ids, table + c, before, count, C, BW, SPAN), count, W, BT, BW) * scale
        found = _features(_spectrum(value, phases, BT, BJ, SPLIT), BT, BJ, FEATURES, EPS, SPLIT)
        if weight is None:
            at = out + first * (C * F) + c * F + (i[:, None] * (C * F) + f[None, :])
            tl.store(at, found.to(out.dtype.element_ty), mask=(i < count)[:, None] & (f < F)[None, :])
        else:
            at = weight + c * F * D + (f[:, None] * D + d[None, :])
            rows = tl.load(at, mask=(f < F)[:, None] & (d < D)[None, :], other=0.0)
            total = _dot(found.to(rows.dtype), rows, total, SPLIT)
    if weight is not None:
        if bias is not None:
            total += tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        at = out + first * D + (i[:, None] * D + d[None, :])
        tl.store(at, total.to(out.dtype.element_ty), mask=(i < count)[:, None] & (d < D)[None, :])
