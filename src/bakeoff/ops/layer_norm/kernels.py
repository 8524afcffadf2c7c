"""layer_norm in Triton: the kernels. `bakeoff.kernels.row_tilings` says how they are launched.

Rows that fit in registers cross device memory once: 4 bytes an element forward and 6 backward in bf16. The
mean comes first and then the centred squares, both from registers, so that a large mean costs no digits.
Longer rows are read three times forward, mostly from L2, and twice backward, 10 bytes an element.

The forward keeps three numbers a row for the backward, `stats`: the mean, r = 1 / sqrt(var + eps), and r
times what the mean was rounded by, which counts where float32 rows have a large mean. A row's n is
(s - mean) * r - that.

How rows lie in registers: `bakeoff.kernels.rows`. Row strides come in units of ALIGN elements: the product
tells the compiler what 16-byte accesses need.
"""

import triton
import triton.language as tl

from bakeoff.kernels.rows import columns, every, read, store_sums

__all__: list[str] = []


@triton.jit(do_not_specialize=["N", "x_units", "residual_units", "eps"])
def _forward(
    x, residual, weight, bias, y, s, stats,
    N: tl.int64, x_units: tl.int64, residual_units: tl.int64, eps: tl.float32,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS whole rows; EVEN: N is a multiple of ROWS.

    With STAGES = 0 a program has one tile. Otherwise it keeps weight and bias in registers and walks over the
    tiles, of which so many are under way at a time. Reads x (and the residual), writes y (and s); about
    6 FLOPs an element.
    """
    if STAGES == 0:
        _forward_tile(
            tl.program_id(0).to(tl.int64), x, residual, weight, bias, (), (), y, s, stats,
            N, x_units, residual_units, eps, D, BLOCK, ROWS, EVEN, ALIGN,
        )  # fmt: skip
    else:
        scale, shift = _affine(weight, bias, D, BLOCK)
        for tile in tl.range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0), num_stages=STAGES):
            _forward_tile(
                tile, x, residual, None, None, scale, shift, y, s, stats, N, x_units, residual_units, eps,
                D, BLOCK, ROWS, EVEN, ALIGN,
            )  # fmt: skip


@triton.jit
def _forward_tile(
    tile, x, residual, weight, bias, scale, shift, y, s, stats, N, x_units, residual_units, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    # Weight and bias are read here, or given as pieces, `scale` and `shift`; or there are none.
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
    if weight is not None or bias is not None:  # asked for after x, so that x's loads never wait for them
        scale, shift = _affine(weight, bias, D, BLOCK)
    mean, scaling, rest = _moments(values, eps, D, BLOCK, ROWS, values[0].dtype == tl.float32)
    if stats is not None:
        tl.store(stats + rows * 3, mean, mask=live)
        tl.store(stats + rows * 3 + 1, scaling, mask=live)
        tl.store(stats + rows * 3 + 2, rest, mask=live)
    for i in tl.static_range(PIECES):
        cols, inside = columns(i, D, BLOCK)
        value = (values[i].to(tl.float32) - mean) * scaling - rest
        if len(scale) > 0:
            value *= scale[i].to(tl.float32)
        if len(shift) > 0:
            value += shift[i].to(tl.float32)
        tl.store(y + rows * D + cols, value.to(y.dtype.element_ty), mask=inside & live)


@triton.jit
def _affine(weight, bias, D: tl.constexpr, BLOCK: tl.constexpr):
    # Weight and bias as pieces, as far as they are there.
    scale = ()
    shift = ()
    if weight is not None:
        scale = _vector(weight, D, BLOCK)
    if bias is not None:
        shift = _vector(bias, D, BLOCK)
    return scale, shift


@triton.jit
def _vector(vector, D: tl.constexpr, BLOCK: tl.constexpr):
    # A weight or a bias as pieces.
    return read(vector, tl.zeros([1, 1], tl.int32), every(1), D, BLOCK, "")


@triton.jit
def _moments(
    values, eps, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    # Of rows in pieces: the mean, r, and what the mean was rounded by times r, which only EXACT asks for.
    PIECES: tl.constexpr = (D + BLOCK - 1) // BLOCK
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(PIECES):
        total += values[i].to(tl.float32)
    mean = _mean(tl.sum(total, axis=1, keep_dims=True), D)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    rests = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(PIECES):
        _, inside = columns(i, D, BLOCK)
        centred = tl.where(inside, values[i].to(tl.float32) - mean, 0.0)
        squares += centred * centred
        if EXACT:
            rests += centred
    if EXACT:
        rest, square = tl.split(_mean(tl.sum(tl.join(rests, squares), axis=1), D))
        rest, square = rest[:, None], square[:, None]
    else:
        square = _mean(tl.sum(squares, axis=1, keep_dims=True), D)
        rest = tl.zeros([ROWS, 1], tl.float32)
    scaling = tl.rsqrt(tl.maximum(square - rest * rest, 0.0) + eps)
    return mean, scaling, rest * scaling


@triton.jit
def _mean(total, D: tl.constexpr):
    # total / D, rounded once: the mean of equal numbers is that number. total * (1 / D) is up to a unit off,
    # and as part of a difference would be fused into it, which then is none from the mean that is stored.
    if (D & (D - 1)) == 0:
        return total * (1.0 / D)  # as exact, and fusing it changes nothing
    return tl.div_rn(total, tl.full(total.shape, D, tl.float32))


@triton.jit(do_not_specialize=["x_units", "residual_units", "eps"])
def _forward_long(
    x, residual, weight, bias, y, s, stats,
    x_units: tl.int64, residual_units: tl.int64, eps: tl.float32,
    D: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """One row a program, in three passes over chunks of BLOCK: the mean, the centred squares, then y."""
    EXACT: tl.constexpr = (x if s is None else s).dtype.element_ty == tl.float32
    row = tl.program_id(0).to(tl.int64)
    x += row * (x_units * ALIGN)
    y += row * D
    if residual is not None:
        residual += row * (residual_units * ALIGN)
        s += row * D
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, D, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        value = _chunk(x, residual, s, cols, cols < D)
        if residual is not None:
            tl.store(s + cols, value.to(s.dtype.element_ty), mask=cols < D)
        total += value
    mean = _mean(tl.sum(total, axis=0), D)
    squares = tl.zeros([BLOCK], tl.float32)
    rests = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, D, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        centred = tl.where(cols < D, _chunk(x, residual, s, cols, cols < D) - mean, 0.0)
        squares += centred * centred
        if EXACT:
            rests += centred
    rest = _mean(tl.sum(rests, axis=0), D)
    scaling = tl.rsqrt(tl.maximum(_mean(tl.sum(squares, axis=0), D) - rest * rest, 0.0) + eps)
    rest *= scaling
    if stats is not None:
        tl.store(stats + row * 3, mean)
        tl.store(stats + row * 3 + 1, scaling)
        tl.store(stats + row * 3 + 2, rest)
    for start in tl.range(0, D, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < D
        value = (_chunk(x, residual, s, cols, inside) - mean) * scaling - rest
        if weight is not None:
            value *= tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            value += tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + cols, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _chunk(x, residual, s, cols, inside):
    # s of a row, rounded as it is stored, in float32.
    value = tl.load(x + cols, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if residual is not None:
        value += tl.load(residual + cols, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        value = value.to(s.dtype.element_ty).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["N", "dy_units", "ds_units", "s_units"])
def _backward(
    dy, ds, s, stats, weight, dx, dresidual, dweight, dbias,
    N: tl.int64, dy_units: tl.int64, ds_units: tl.int64, s_units: tl.int64,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, HOLD: tl.constexpr,
    ALIGN: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS whole rows, walked by persistent programs that keep sums over rows in registers.

    g = dy*w: dx = r*(g - mean(g) - n*mean(g*n)) + ds; dweight[program] and dbias[program] are the sums over
    its rows of dy*n and dy. HOLD: the weight stays in registers, too. Reads dy and s, writes dx; about
    12 FLOPs an element.
    """
    PIECES: tl.constexpr = (D + BLOCK - 1) // BLOCK
    held = ()
    if weight is not None and HOLD:
        held = _vector(weight, D, BLOCK)
    dw = ()
    db = ()
    for _ in tl.static_range(PIECES):
        if dweight is not None:
            dw += (tl.zeros([ROWS, BLOCK], tl.float32),)
        if dbias is not None:
            db += (tl.zeros([ROWS, BLOCK], tl.float32),)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = (tile * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
        live = rows < N
        grads = read(dy, rows * (dy_units * ALIGN), live, D, BLOCK, LOAD)
        values = read(s, rows * (s_units * ALIGN), live, D, BLOCK, LOAD)
        mean = tl.load(stats + rows * 3, mask=live, other=0.0)
        scaling = tl.load(stats + rows * 3 + 1, mask=live, other=0.0)
        rest = tl.load(stats + rows * 3 + 2, mask=live, other=0.0)
        scale = held
        if weight is not None and not HOLD:
            scale = _vector(weight, D, BLOCK)
        dw = _with_products(dw, grads, values, mean, scaling, rest)
        db = _with(db, grads)
        if dx is not None:
            mean_g, mean_gn = _means(grads, values, scale, mean, scaling, rest, D, BLOCK, ROWS)
            for i in tl.static_range(PIECES):
                cols, inside = columns(i, D, BLOCK)
                normed = (values[i].to(tl.float32) - mean) * scaling - rest
                grad = (_scaled(grads, scale, i) - mean_g - normed * mean_gn) * scaling
                through = None if ds is None else ds + rows * (ds_units * ALIGN)
                _store_gradient(grad, through, dx, dresidual, rows * D, cols, inside & live, LOAD, STORE)
    if dweight is not None:
        store_sums(dweight + tl.program_id(0).to(tl.int64) * D, dw, D, BLOCK)
    if dbias is not None:
        store_sums(dbias + tl.program_id(0).to(tl.int64) * D, db, D, BLOCK)


@triton.jit
def _store_gradient(
    grad, ds, dx, dresidual, start, cols, mask, LOAD: tl.constexpr, STORE: tl.constexpr
):  # fmt: skip
    # grad + ds, a piece, to dx and dresidual as far as they are there.
    if ds is not None:
        grad += tl.load(ds + cols, mask=mask, other=0.0, eviction_policy=LOAD).to(tl.float32)
    at = start + cols
    tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=mask, cache_modifier=STORE)
    if dresidual is not None:
        tl.store(dresidual + at, grad.to(dresidual.dtype.element_ty), mask=mask)


@triton.jit
def _means(
    grads, values, scale, mean, scaling, rest, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    # mean(g) and mean(g*n) of rows, in one reduction across the program's threads. Where there is no column
    # dy is 0, and so is g.
    gs = tl.zeros([ROWS, BLOCK], tl.float32)
    dots = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range((D + BLOCK - 1) // BLOCK):
        g = _scaled(grads, scale, i)
        gs += g
        dots += g * ((values[i].to(tl.float32) - mean) * scaling - rest)
    mean_g, mean_gn = tl.split(_mean(tl.sum(tl.join(gs, dots), axis=1), D))
    return mean_g[:, None], mean_gn[:, None]


@triton.jit
def _with_products(dw, grads, values, mean, scaling, rest):
    # dw + dy * n, in pieces.
    sums = ()
    for i in tl.static_range(len(dw)):
        normed = (values[i].to(tl.float32) - mean) * scaling - rest
        sums += (dw[i] + grads[i].to(tl.float32) * normed,)
    return sums


@triton.jit
def _with(db, grads):
    # db + dy, in pieces.
    sums = ()
    for i in tl.static_range(len(db)):
        sums += (db[i] + grads[i].to(tl.float32),)
    return sums


@triton.jit
def _scaled(grads, scale, i: tl.constexpr):
    # The i-th piece of dy * weight.
    grad = grads[i].to(tl.float32)
    return grad * scale[i].to(tl.float32) if len(scale) > 0 else grad


@triton.jit(do_not_specialize=["dy_units", "s_units"])
def _row_means(
    dy, s, stats, weight, means, dy_units: tl.int64, s_units: tl.int64,
    D: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """mean(g) and mean(g*n) of one long row a program, which `_backward_long` needs to start with."""
    row = tl.program_id(0).to(tl.int64)
    dy += row * (dy_units * ALIGN)
    s += row * (s_units * ALIGN)
    mean = tl.load(stats + row * 3)
    scaling = tl.load(stats + row * 3 + 1)
    rest = tl.load(stats + row * 3 + 2)
    gs = tl.zeros([BLOCK], tl.float32)
    dots = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, D, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < D
        g = tl.load(dy + cols, mask=inside, other=0.0).to(tl.float32)
        if weight is not None:
            g *= tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(s + cols, mask=inside, other=0.0).to(tl.float32)
        gs += g
        dots += g * ((value - mean) * scaling - rest)
    tl.store(means + 2 * row, _mean(tl.sum(gs, axis=0), D))
    tl.store(means + 2 * row + 1, _mean(tl.sum(dots, axis=0), D))


@triton.jit(do_not_specialize=["N", "dy_units", "ds_units", "s_units"])
def _backward_long(
    dy, ds, s, stats, weight, means, dx, dresidual, dweight, dbias,
    N: tl.int64, dy_units: tl.int64, ds_units: tl.int64, s_units: tl.int64,
    D: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """A block of columns (axis 1) of every P-th row (axis 0) a program; `_backward` with its means given."""
    first = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < D
    if weight is not None:
        scale = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(first, N, tl.num_programs(0)):
        grad = tl.load(dy + row * (dy_units * ALIGN) + cols, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(s + row * (s_units * ALIGN) + cols, mask=inside, other=0.0).to(tl.float32)
        scaling = tl.load(stats + row * 3 + 1)
        normed = (value - tl.load(stats + row * 3)) * scaling - tl.load(stats + row * 3 + 2)
        dw += grad * normed
        db += grad
        if dx is not None:
            if weight is not None:
                grad *= scale
            grad = (grad - tl.load(means + 2 * row) - normed * tl.load(means + 2 * row + 1)) * scaling
            if ds is not None:
                through = tl.load(ds + row * (ds_units * ALIGN) + cols, mask=inside, other=0.0)
                grad += through.to(tl.float32)
            tl.store(dx + row * D + cols, grad.to(dx.dtype.element_ty), mask=inside)
            if dresidual is not None:
                tl.store(dresidual + row * D + cols, grad.to(dresidual.dtype.element_ty), mask=inside)
    if dweight is not None:
        tl.store(dweight + first * D + cols, dw.to(dweight.dtype.element_ty), mask=inside)
    if dbias is not None:
        tl.store(dbias + first * D + cols, db.to(dbias.dtype.element_ty), mask=inside)
