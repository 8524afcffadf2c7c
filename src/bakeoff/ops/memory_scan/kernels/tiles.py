"""What all kernels of memory_scan share: tiles of matrices, products, the hidden units' slopes, packed
states."""

import triton
import triton.language as tl

__all__ = [
    "_length",
    "_matrix",
    "_over_tokens",
    "_pack",
    "_product",
    "_read_weights",
    "_slope",
    "_sum_of_parts",
    "_sums",
    "_tile",
    "_tokens",
    "_unpack",
    "_upright",
    "_vector",
    "_write_weights",
]


@triton.jit
def _tile(pointer, rows, columns, ROWS, COLUMNS):
    """[rows, columns] of a dense matrix of ROWS rows and COLUMNS columns, zeros outside, in float32."""
    mask = (rows[:, None] < ROWS) & (columns[None, :] < COLUMNS)
    at = rows[:, None] * COLUMNS + columns[None, :]
    return tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _tokens(pointer, rows, columns, ROWS, COLUMNS):
    """`_tile` of queries, keys, or what arrives: bfloat16 as it is, which products take whole."""
    mask = (rows[:, None] < ROWS) & (columns[None, :] < COLUMNS)
    at = rows[:, None] * COLUMNS + columns[None, :]
    tile = tl.load(pointer + at, mask=mask, other=0.0)
    if tile.dtype != tl.bfloat16:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _matrix(pointer, tile, rows, columns, ROWS, COLUMNS):
    """Stores a tile."""
    mask = (rows[:, None] < ROWS) & (columns[None, :] < COLUMNS)
    at = rows[:, None] * COLUMNS + columns[None, :]
    tl.store(pointer + at, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _vector(pointer, i, SIZE):
    return tl.load(pointer + i, mask=i < SIZE, other=0.0)


@triton.jit
def _product(a, b, total, PRECISION: tl.constexpr):
    """total + a b. "bf16x3" takes the first 16 bits of each float32 operand, as two parts in bfloat16: sums
    with a small part first. A tensor core rounds sums towards zero, so `total` stays outside."""
    if PRECISION == "bf16x3":
        a_1, b_1 = a.to(tl.bfloat16), b.to(tl.bfloat16)
        found = tl.zeros(total.shape, tl.float32)
        if a.dtype != tl.bfloat16:
            found = tl.dot((a - a_1.to(tl.float32)).to(tl.bfloat16), b_1, found)
        if b.dtype != tl.bfloat16:
            found = tl.dot(a_1, (b - b_1.to(tl.float32)).to(tl.bfloat16), found)
        return total + tl.dot(a_1, b_1, found)
    return total + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)


@triton.jit
def _sums(ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr):
    """Zeros to which `_over_tokens` adds."""
    return tl.zeros((COLUMNS, ROWS), tl.float32) if TURNED else tl.zeros((ROWS, COLUMNS), tl.float32)


@triton.jit
def _over_tokens(a, b, total, PRECISION: tl.constexpr, TURNED: tl.constexpr):
    """total + a b, where a has a row for each token. TURNED takes total' + b' a' instead, which has few rows,
    so that more than two warps share it by mma.sync."""
    if TURNED:
        total = _product(tl.trans(b), tl.trans(a), total, PRECISION)
    else:
        total = _product(a, b, total, PRECISION)
    return total


@triton.jit
def _upright(total, TURNED: tl.constexpr):
    """What `_over_tokens` has summed, a row for each token."""
    if TURNED:
        total = tl.trans(total)
    return total


@triton.jit
def _slope(z):
    """s(z), s'(z) and s''(z) of s(z) = z sigmoid(z)."""
    gate = tl.sigmoid(z)
    rest = 1 - gate
    return z * gate, gate * (1 + z * rest), gate * rest * (2 + z * (1 - 2 * gate))


@triton.jit
def _length(T, c, CHUNK: tl.constexpr):
    """How many tokens chunk c has; 0 before the first and behind the last."""
    return tl.where(c < 0, 0, tl.maximum(tl.minimum(CHUNK, T - c * CHUNK), 0))


@triton.jit
def _write_weights(table, t, length, CHUNK: tl.constexpr):
    """What a chunk of `length` tokens makes of the state: beta, f and m, then of each token's gradient in
    memory and in momentum, [BT, 1]."""
    W: tl.constexpr = CHUNK + 2
    some = length > 0
    beta = tl.load(table + length * W, mask=some, other=1.0)
    pushed = tl.load(table + length * W + 1, mask=some, other=0.0)
    kept = tl.load(table + (CHUNK + 1) * W + 1, mask=some, other=1.0)
    into_memory = tl.load(table + length * W + 2 + t, mask=t < length, other=0.0)[:, None]
    into_momentum = tl.load(table + (CHUNK + 1) * W + 2 + t, mask=t < length, other=0.0)[:, None]
    return beta, pushed, kept, into_memory, into_momentum


@triton.jit
def _read_weights(table, t, length, CHUNK: tl.constexpr, SHIFT: tl.constexpr, BT: tl.constexpr):
    """How much of memory and of momentum each query saw, [BT, 1]."""
    W: tl.constexpr = CHUNK + 2
    own, push = (t[:, None] < length).to(tl.float32), tl.zeros((BT, 1), tl.float32)
    if SHIFT >= 0:
        row = (t + SHIFT) * W
        own = tl.load(table + row, mask=t < length, other=0.0)[:, None]
        push = tl.load(table + row + 1, mask=t < length, other=0.0)[:, None]
    return own, push


@triton.jit
def _sum_of_parts(
    parts, PARTS: tl.constexpr, ROWS: tl.constexpr, rows, columns, LENGTH, COLUMNS, AT_ONCE: tl.constexpr
):
    """The sum of PARTS matrices of ROWS rows, of which LENGTH count; AT_ONCE are on their way at once."""
    total = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for start in range(0, PARTS, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            part = start + i
            length = tl.where(part < PARTS, LENGTH, 0)
            total += _tile(parts + part * ROWS * COLUMNS, rows, columns, length, COLUMNS)
    return total


@triton.jit(do_not_specialize=["packed_g", "at"])
def _pack(
    w1, b1, w2, b2, m1, c1, m2, c2, packed, packed_g: tl.int64, at: tl.int64,
    N1: tl.constexpr, H: tl.constexpr, N2: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Memory and momentum of one group, BLOCK elements of each a program, into one row of `packed`.
    P: tl.constexpr = N1 + H + N2 + V
    g = tl.program_id(0).to(tl.int64)
    packed += g * packed_g + at * 2 * P
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_1 = i < N1
    in_2 = (i >= N1) & (i < N1 + H)
    in_3 = (i >= N1 + H) & (i < N1 + H + N2)
    in_4 = (i >= N1 + H + N2) & (i < P)
    memory = tl.load(w1 + g * N1 + i, mask=in_1, other=0.0)
    memory += tl.load(b1 + g * H + i - N1, mask=in_2, other=0.0)
    memory += tl.load(w2 + g * N2 + i - N1 - H, mask=in_3, other=0.0)
    memory += tl.load(b2 + g * V + i - N1 - H - N2, mask=in_4, other=0.0)
    momentum = tl.load(m1 + g * N1 + i, mask=in_1, other=0.0)
    momentum += tl.load(c1 + g * H + i - N1, mask=in_2, other=0.0)
    momentum += tl.load(m2 + g * N2 + i - N1 - H, mask=in_3, other=0.0)
    momentum += tl.load(c2 + g * V + i - N1 - H - N2, mask=in_4, other=0.0)
    tl.store(packed + i, memory, mask=i < P)
    tl.store(packed + P + i, momentum, mask=i < P)


@triton.jit(do_not_specialize=["packed_g", "at"])
def _unpack(
    w1, b1, w2, b2, m1, c1, m2, c2, packed, packed_g: tl.int64, at: tl.int64,
    N1: tl.constexpr, H: tl.constexpr, N2: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The other way.
    P: tl.constexpr = N1 + H + N2 + V
    g = tl.program_id(0).to(tl.int64)
    packed += g * packed_g + at * 2 * P
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_1 = i < N1
    in_2 = (i >= N1) & (i < N1 + H)
    in_3 = (i >= N1 + H) & (i < N1 + H + N2)
    in_4 = (i >= N1 + H + N2) & (i < P)
    memory = tl.load(packed + i, mask=i < P, other=0.0)
    momentum = tl.load(packed + P + i, mask=i < P, other=0.0)
    tl.store(w1 + g * N1 + i, memory, mask=in_1)
    tl.store(b1 + g * H + i - N1, memory, mask=in_2)
    tl.store(w2 + g * N2 + i - N1 - H, memory, mask=in_3)
    tl.store(b2 + g * V + i - N1 - H - N2, memory, mask=in_4)
    tl.store(m1 + g * N1 + i, momentum, mask=in_1)
    tl.store(c1 + g * H + i - N1, momentum, mask=in_2)
    tl.store(m2 + g * N2 + i - N1 - H, momentum, mask=in_3)
    tl.store(c2 + g * V + i - N1 - H - N2, momentum, mask=in_4)
