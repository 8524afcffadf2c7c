"""rms_norm in Triton: the kernels. `tilings` says how they are launched.

Rows that fit in registers cross device memory once: 4 bytes an element forward and 6 backward in bf16. Longer
rows take a second pass (forward, mostly from L2) or a second kernel (backward, 10 bytes an element).

How rows lie in registers: `bakeoff.kernels.rows`.

Row strides come in units of ALIGN elements: the product tells the compiler what 16-byte accesses need
(`tl.multiple_of` on a kernel argument is dropped without a word).
"""

import triton
import triton.language as tl

from bakeoff.kernels.rows import columns, every, read, store_sums

__all__: list[str] = []


@triton.jit(do_not_specialize=["N", "x_units", "residual_units", "eps", "offset"])
def _forward(
    x, residual, weight, y, s,
    N: tl.int64, x_units: tl.int64, residual_units: tl.int64, eps: tl.float32, offset: tl.float32,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS whole rows; EVEN: N is a multiple of ROWS.

    With STAGES = 0 a program has one tile. Otherwise it keeps the weight in registers and walks over the
    tiles, of which so many are under way at a time. Reads x (and the residual), writes y (and s); about
    4 FLOPs an element.
    """
    if STAGES == 0:
        _forward_tile(
            tl.program_id(0).to(tl.int64), x, residual, weight, (), y, s,
            N, x_units, residual_units, eps, offset, D, BLOCK, ROWS, EVEN, ALIGN,
        )  # fmt: skip
    else:
        scale = ()
        if weight is not None:
            scale = read(weight, tl.zeros([1, 1], tl.int32), every(1), D, BLOCK, "")
        for tile in tl.range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0), num_stages=STAGES):
            _forward_tile(
                tile, x, residual, None, scale, y, s, N, x_units, residual_units, eps, offset,
                D, BLOCK, ROWS, EVEN, ALIGN,
            )  # fmt: skip


@triton.jit
def _forward_tile(
    tile, x, residual, weight, scale, y, s, N, x_units, residual_units, eps, offset,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    # The weight is read here, or given as pieces, `scale`; or there is none.
    PIECES: tl.constexpr = (D + BLOCK - 1) // BLOCK
    rows = (tile * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
    live = every(ROWS) if EVEN else rows < N
    values = read(x, rows * (x_units * ALIGN), live, D, BLOCK, "")
    if residual is not None:
        others = read(residual, rows * (residual_units * ALIGN), live, D, BLOCK, "")
        totals = ()
        for i in tl.static_range(PIECES):
            cols, inside = columns(i, D, BLOCK)
            # What is normalised is s as stored: the backward sees no other.
            total = (values[i].to(tl.float32) + others[i].to(tl.float32)).to(s.dtype.element_ty)
            tl.store(s + rows * D + cols, total, mask=inside & live)
            totals += (total,)
        values = totals
    if weight is not None:  # asked for after x, so that x's loads never wait for it
        scale = read(weight, tl.zeros([1, 1], tl.int32), every(1), D, BLOCK, "")
    square = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(PIECES):
        value = values[i].to(tl.float32)
        square += value * value
    scaling = tl.rsqrt(tl.sum(square, axis=1, keep_dims=True) * (1.0 / D) + eps)
    for i in tl.static_range(PIECES):
        cols, inside = columns(i, D, BLOCK)
        value = values[i].to(tl.float32) * scaling
        if len(scale) > 0:
            value *= scale[i].to(tl.float32) + offset
        tl.store(y + rows * D + cols, value.to(y.dtype.element_ty), mask=inside & live)


@triton.jit(do_not_specialize=["x_units", "residual_units", "eps", "offset"])
def _forward_long(
    x, residual, weight, y, s,
    x_units: tl.int64, residual_units: tl.int64, eps: tl.float32, offset: tl.float32,
    D: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """One row a program, in two passes over chunks of BLOCK: the mean square, then y, re-reading from L2."""
    row = tl.program_id(0).to(tl.int64)
    x += row * (x_units * ALIGN)
    y += row * D
    if residual is not None:
        residual += row * (residual_units * ALIGN)
        s += row * D
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, D, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < D
        value = tl.load(x + cols, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if residual is not None:
            value += tl.load(residual + cols, mask=inside, other=0.0).to(tl.float32)
            stored = value.to(s.dtype.element_ty)
            tl.store(s + cols, stored, mask=inside)
            value = stored.to(tl.float32)
        total += value * value
    scaling = tl.rsqrt(tl.sum(total, axis=0) * (1.0 / D) + eps)
    for start in tl.range(0, D, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < D
        value = tl.load(x + cols, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if residual is not None:
            value += tl.load(residual + cols, mask=inside, other=0.0).to(tl.float32)
            value = value.to(s.dtype.element_ty).to(tl.float32)
        value *= scaling
        if weight is not None:
            value *= tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + offset
        tl.store(y + cols, value.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "dy_units", "ds_units", "s_units", "eps", "offset"])
def _backward(
    dy, ds, s, weight, dx, dresidual, partial,
    N: tl.int64, dy_units: tl.int64, ds_units: tl.int64, s_units: tl.int64,
    eps: tl.float32, offset: tl.float32,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, HOLD: tl.constexpr,
    ALIGN: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS whole rows, walked by persistent programs that keep the weight's gradient in registers.

    r from s again (cheaper than storing it), n = s*r, g = dy*(offset+w): dx = r*(g - n*mean(g*n)) + ds;
    partial[program] = sum over its rows of dy*n. HOLD: the weight stays in registers, too. Reads dy and s,
    writes dx; about 11 FLOPs an element.
    """
    held = ()
    if weight is not None and HOLD:
        held = _scale(weight, offset, D, BLOCK)
    dw = ()
    if partial is not None:
        for _ in tl.static_range((D + BLOCK - 1) // BLOCK):
            dw += (tl.zeros([ROWS, BLOCK], tl.float32),)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = (tile * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
        live = rows < N
        grads = read(dy, rows * (dy_units * ALIGN), live, D, BLOCK, LOAD)
        values = read(s, rows * (s_units * ALIGN), live, D, BLOCK, LOAD)
        scale = held
        if weight is not None and not HOLD:
            scale = _scale(weight, offset, D, BLOCK)
        scaling, normed, mean = _normalized(values, grads, scale, eps, D, BLOCK, ROWS)
        if partial is not None:
            dw = _with_products(dw, grads, normed)
        if dx is not None:
            for i in tl.static_range((D + BLOCK - 1) // BLOCK):
                cols, inside = columns(i, D, BLOCK)
                mask = inside & live
                grad = (_scaled(grads, scale, i) - normed[i] * mean) * scaling
                if ds is not None:
                    at = rows * (ds_units * ALIGN) + cols
                    grad += tl.load(ds + at, mask=mask, other=0.0, eviction_policy=LOAD).to(tl.float32)
                at = rows * D + cols
                tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=mask, cache_modifier=STORE)
                if dresidual is not None:
                    tl.store(dresidual + at, grad.to(dresidual.dtype.element_ty), mask=mask)
    if partial is not None:
        store_sums(partial + tl.program_id(0).to(tl.int64) * D, dw, D, BLOCK)


@triton.jit
def _normalized(
    values, grads, scale, eps, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    # Of rows s and dy in pieces: r, n in pieces, mean(g*n).
    PIECES: tl.constexpr = (D + BLOCK - 1) // BLOCK
    # Both sums over a row in one reduction across the program's threads, unless registers are too short.
    JOINT: tl.constexpr = PIECES * BLOCK < 16384
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    dots = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(PIECES):
        value = values[i].to(tl.float32)
        squares += value * value
        if JOINT:
            dots += _scaled(grads, scale, i) * value
    if JOINT:
        square, dot = tl.split(tl.sum(tl.join(squares, dots), axis=1) * (1.0 / D))
        scaling = tl.rsqrt(square + eps)[:, None]
        mean = dot[:, None] * scaling
    else:
        scaling = tl.rsqrt(tl.sum(squares, axis=1) * (1.0 / D) + eps)[:, None]
    normed = ()
    for i in tl.static_range(PIECES):
        value = values[i].to(tl.float32) * scaling
        normed += (value,)
        if not JOINT:
            dots += _scaled(grads, scale, i) * value
    if not JOINT:
        mean = (tl.sum(dots, axis=1) * (1.0 / D))[:, None]
    return scaling, normed, mean


@triton.jit
def _with_products(dw, grads, normed):
    # dw + dy * n, in pieces.
    sums = ()
    for i in tl.static_range(len(dw)):
        sums += (dw[i] + grads[i].to(tl.float32) * normed[i],)
    return sums


@triton.jit
def _scaled(grads, scale, i: tl.constexpr):
    # The i-th piece of dy * (offset + weight).
    grad = grads[i].to(tl.float32)
    return grad * scale[i] if len(scale) > 0 else grad


@triton.jit
def _scale(weight, offset, D: tl.constexpr, BLOCK: tl.constexpr):
    # offset + weight in float32, as a tuple of [1, BLOCK].
    pieces = ()
    for i in tl.static_range((D + BLOCK - 1) // BLOCK):
        cols, inside = columns(i, D, BLOCK)
        pieces += (tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + offset,)
    return pieces


@triton.jit(do_not_specialize=["dy_units", "s_units", "eps", "offset"])
def _row_sums(
    dy, s, weight, sums, dy_units: tl.int64, s_units: tl.int64, eps: tl.float32, offset: tl.float32,
    D: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """r and mean(g*n) of one long row a program, which `_backward_long` needs before it can start a row."""
    row = tl.program_id(0).to(tl.int64)
    dy += row * (dy_units * ALIGN)
    s += row * (s_units * ALIGN)
    square = tl.zeros([BLOCK], tl.float32)
    dot = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, D, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < D
        grad = tl.load(dy + cols, mask=inside, other=0.0).to(tl.float32)
        if weight is not None:
            grad *= tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + offset
        value = tl.load(s + cols, mask=inside, other=0.0).to(tl.float32)
        square += value * value
        dot += grad * value
    scaling = tl.rsqrt(tl.sum(square, axis=0) * (1.0 / D) + eps)
    tl.store(sums + 2 * row, scaling)
    tl.store(sums + 2 * row + 1, tl.sum(dot, axis=0) * (1.0 / D) * scaling)


@triton.jit(do_not_specialize=["N", "dy_units", "ds_units", "s_units", "offset"])
def _backward_long(
    dy, ds, s, weight, sums, dx, dresidual, partial,
    N: tl.int64, dy_units: tl.int64, ds_units: tl.int64, s_units: tl.int64, offset: tl.float32,
    D: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """A block of columns (axis 1) of every P-th row (axis 0) a program; `_backward` with its sums given."""
    first = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < D
    if weight is not None:
        scale = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + offset
    dw = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(first, N, tl.num_programs(0)):
        grad = tl.load(dy + row * (dy_units * ALIGN) + cols, mask=inside, other=0.0).to(tl.float32)
        normed = tl.load(s + row * (s_units * ALIGN) + cols, mask=inside, other=0.0).to(tl.float32)
        scaling = tl.load(sums + 2 * row)
        normed *= scaling
        dw += grad * normed
        if dx is not None:
            if weight is not None:
                grad *= scale
            grad = (grad - normed * tl.load(sums + 2 * row + 1)) * scaling
            if ds is not None:
                through = tl.load(ds + row * (ds_units * ALIGN) + cols, mask=inside, other=0.0)
                grad += through.to(tl.float32)
            tl.store(dx + row * D + cols, grad.to(dx.dtype.element_ty), mask=inside)
            if dresidual is not None:
                tl.store(dresidual + row * D + cols, grad.to(dresidual.dtype.element_ty), mask=inside)
    if partial is not None:
        tl.store(partial + first * D + cols, dw.to(partial.dtype.element_ty), mask=inside)
