"""adamw_ and global_norm in Triton: kernels over all tensors of a group at once, and their tilings.

A program takes a chunk of one tensor: it looks the tensor up in a pointer table (`bakeoff.ops.adamw.tables`).
Whole blocks of 16-byte aligned tensors are read and written unmasked, 16 bytes a thread; the rest of a chunk,
and tensors that lie at odd addresses, take a masked loop in the same kernel.
"""

from typing import NamedTuple

import triton
import triton.language as tl

__all__ = ["NormTiling", "Tiling", "norm_tilings", "tilings"]


@triton.jit(do_not_specialize=["source", "count"])
def _fetch(target, source: tl.int64, count: tl.int32, BLOCK: tl.constexpr):
    """target[i] = the i-th word at address `source`, in pinned memory, which devices can read."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    address = source.to(tl.int64)  # which the interpreter takes to be 32 bits wide where it is small
    words = tl.load(address.to(tl.pointer_type(tl.int32)) + i, mask=i < count, other=0)
    tl.store(target + i, words, mask=i < count)


@triton.jit(do_not_specialize=["N", "count"])
def _sum_squares(
    table, chunks, partial, N: tl.int64, count: tl.int32,
    GRAD: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """partial[program] = sum of squares over chunks pid, pid + programs, ...: always in the same order.

    Reads each gradient once; 2 FLOPs an element.
    """
    total = tl.zeros([BLOCK], tl.float32)
    for c in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        tensor = tl.load(chunks + 2 * c).to(tl.int64)
        start = tl.load(chunks + 2 * c + 1).to(tl.int64) * CHUNK
        address = tl.load(table + N + tensor)
        left = tl.minimum(tl.load(table + tensor) - start, CHUNK).to(tl.int32)
        whole = tl.where((address & 15) == 0, left // BLOCK * BLOCK, 0)
        aligned = tl.multiple_of(address.to(tl.pointer_type(GRAD)), 16) + start
        for first in tl.range(0, whole, BLOCK):
            g = tl.load(aligned + first + tl.arange(0, BLOCK)).to(tl.float32)
            total += g * g
        grad = address.to(tl.pointer_type(GRAD)) + start
        for first in tl.range(whole, left, BLOCK):
            at = first + tl.arange(0, BLOCK)
            g = tl.load(grad + at, mask=at < left, other=0.0).to(tl.float32)
            total += g * g
    tl.store(partial + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["P", "max_norm"])
def _judge(
    partial, verdict, skipped, found_inf, grad_scale, P: tl.int32, max_norm: tl.float32,
    CLIP: tl.constexpr, SKIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: verdict[0], [4], [8] = norm, clip coefficient, whether to skip, which `skipped` counts."""
    sums = tl.zeros([BLOCK], tl.float64)
    for first in tl.range(0, P, BLOCK):
        at = first + tl.arange(0, BLOCK)
        sums += tl.load(partial + at, mask=at < P, other=0.0).to(tl.float64)
    norm = tl.sqrt(tl.sum(sums, axis=0))
    if grad_scale is not None:
        norm /= tl.load(grad_scale).to(tl.float64)
    coefficient = max_norm / (norm + 1e-6)
    coefficient = tl.where((coefficient >= 1.0) | (not CLIP), 1.0, coefficient)  # a NaN stays one
    skip = ((norm != norm) | (norm == float("inf"))) & SKIP
    if found_inf is not None:
        skip = skip | (tl.load(found_inf).to(tl.float32) != 0.0)
    tl.store(verdict, norm.to(tl.float32))
    tl.store(verdict + 4, coefficient.to(tl.float32))
    tl.store(verdict + 8, skip.to(tl.float32))
    if skipped is not None:
        tl.store(skipped, tl.load(skipped) + skip.to(tl.int64))


@triton.jit(do_not_specialize=["N", "S", "lr", "weight_decay", "log_beta1", "log_beta2", "sign"])
def _prepare(
    table, constants, lr_at, lr_mult, clip_coef, found_inf, grad_scale,
    N: tl.int64, S: tl.int32, lr: tl.float64, weight_decay: tl.float64,
    log_beta1: tl.float64, log_beta2: tl.float64, sign: tl.float32, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Advances the S step counters, unless skipping, and writes what `_update` needs of them.

    constants: gradient factor, skip, decay, 0, then (lr/(1 - beta1^t), 1/sqrt(1 - beta2^t)) for each counter.
    The powers are taken in float64: 1 - beta2 has but 13 correct bits in float32. WIDTH is 2; or 5 for sums,
    which need 1/(1 - beta1^t), too, and it and 1/sqrt(1 - beta2^t) of the step before; 0, 1 where none was.
    """
    rate = lr
    if lr_at is not None:
        rate = tl.load(lr_at).to(tl.float64)
    if lr_mult is not None:
        rate *= tl.load(lr_mult).to(tl.float64)
    advance = 1.0
    if found_inf is not None:
        advance = tl.where(tl.load(found_inf).to(tl.float32) != 0.0, 0.0, 1.0)
    if tl.program_id(0) == 0:
        factor = sign
        if clip_coef is not None:
            factor *= tl.load(clip_coef).to(tl.float32)
        if grad_scale is not None:
            factor /= tl.load(grad_scale).to(tl.float32)
        tl.store(constants, factor)
        tl.store(constants + 1, 1.0 - advance)
        tl.store(constants + 2, (1.0 - rate * weight_decay).to(tl.float32))
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < S
    at = tl.load(table + 3 * N + i, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    before = tl.load(at, mask=inside, other=1.0)
    t = before + advance
    tl.store(at, t, mask=inside)
    t = t.to(tl.float64)
    step_size = rate / (1.0 - tl.exp(log_beta1 * t))
    scaling = 1.0 / tl.sqrt(1.0 - tl.exp(log_beta2 * t))
    tl.store(constants + 4 + WIDTH * i, step_size.to(tl.float32), mask=inside)
    tl.store(constants + 5 + WIDTH * i, scaling.to(tl.float32), mask=inside)
    if WIDTH == 5:
        first = before == 0.0
        s = tl.where(first, 1.0, before).to(tl.float64)
        started = tl.where(first, 0.0, 1.0 / (1.0 - tl.exp(log_beta1 * s)))
        scaling = tl.where(first, 1.0, 1.0 / tl.sqrt(1.0 - tl.exp(log_beta2 * s)))
        tl.store(constants + 6 + WIDTH * i, (1.0 / (1.0 - tl.exp(log_beta1 * t))).to(tl.float32), mask=inside)
        tl.store(constants + 7 + WIDTH * i, started.to(tl.float32), mask=inside)
        tl.store(constants + 8 + WIDTH * i, scaling.to(tl.float32), mask=inside)


@triton.jit
def _moved(p, g, m, v, factor, decay, step_size, scaling, rest1, beta2, rest2, eps):
    """`bakeoff.ops.adamw.reference.moved` in float32, with the constants that `_prepare` wrote."""
    g = g.to(tl.float32) * factor
    m = m.to(tl.float32)
    m += (g - m) * rest1
    v = v.to(tl.float32) * beta2 + g * g * rest2
    p = p * decay - step_size * (m / (tl.sqrt(v) * scaling + eps))
    return p, m, v


@triton.jit
def _directed(m, v, started, scaling, eps):
    """`bakeoff.ops.adamw.reference.direction`, with the constants that `_prepare` wrote."""
    u = started * (m.to(tl.float32) / (tl.sqrt(v.to(tl.float32)) * scaling + eps))
    return tl.where(started == 0.0, 0.0, u)  # 0/0 before the first step


@triton.jit
def _joined(high, low):
    """The float32 weight of a bfloat16's bits and an int16 remainder."""
    return ((high.to(tl.int32) << 16) + low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _block(
    param, grad, exp_avg, exp_avg_sq, master, at, mask,
    factor, decay, step_size, scaling, started, started_prev, scaling_prev, rest1, beta2, rest2, eps,
    MASTER: tl.constexpr, MASKED: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Moves the elements `at`, of which those inside `mask` exist; returns each one's share of the four sums,
    or zeros."""
    if MASKED:
        g = tl.load(grad + at, mask=mask, other=0.0)
        m = tl.load(exp_avg + at, mask=mask, other=0.0)
        v = tl.load(exp_avg_sq + at, mask=mask, other=0.0)
        if MASTER == "remainder":
            p = _joined(tl.load(param + at, mask=mask, other=0), tl.load(master + at, mask=mask, other=0))
        elif MASTER == "float32":
            p = tl.load(master + at, mask=mask, other=0.0)
        else:
            p = tl.load(param + at, mask=mask, other=0.0).to(tl.float32)
    else:
        g = tl.load(grad + at)
        m = tl.load(exp_avg + at)
        v = tl.load(exp_avg_sq + at)
        if MASTER == "remainder":
            p = _joined(tl.load(param + at), tl.load(master + at))
        elif MASTER == "float32":
            p = tl.load(master + at)
        else:
            p = tl.load(param + at).to(tl.float32)
    slope, gg, pp, uu = 0.0, 0.0, 0.0, 0.0
    if SUMS:
        scaled = g.to(tl.float32) * factor
        u = _directed(m, v, started_prev, scaling_prev, eps)
        if MASKED:
            u = tl.where(mask, u, 0.0)
        slope, gg, pp = scaled * u, scaled * scaled, p * p
    p, m, v = _moved(p, g, m, v, factor, decay, step_size, scaling, rest1, beta2, rest2, eps)
    if SUMS:
        u = _directed(m, v, started, scaling, eps)
        if MASKED:
            u = tl.where(mask, u, 0.0)
        uu = u * u
    tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask=mask)
    if MASTER == "remainder":
        bits = p.to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16
        tl.store(param + at, high.to(tl.int16), mask=mask)
        tl.store(master + at, (bits - (high << 16)).to(tl.int16), mask=mask)
    else:
        tl.store(param + at, p.to(param.dtype.element_ty), mask=mask)
        if MASTER == "float32":
            tl.store(master + at, p, mask=mask)
    return slope, gg, pp, uu


@triton.jit(do_not_specialize=["N", "rest1", "beta2", "rest2", "eps"])
def _update(
    table, chunks, constants, partial,
    N: tl.int64, rest1: tl.float32, beta2: tl.float32, rest2: tl.float32, eps: tl.float32,
    PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, MASTER: tl.constexpr, EACH: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor a program.

    Rows of `table`: size; addresses of param, grad, step, exp_avg, exp_avg_sq, master. Reads p, g, m, v and
    writes p, m, v: 28 bytes an element in float32, about 15 FLOPs. `partial`, where given, [4, programs]:
    each one's sums of g*u_prev, g^2, p^2, u^2, which cost some 15 FLOPs more and no reads. Threads add up
    what is theirs until the chunk's end: to add up across threads after every block takes a third longer.
    """
    SUMS: tl.constexpr = partial is not None
    tensor = tl.load(chunks + 2 * tl.program_id(0).to(tl.int64)).to(tl.int64)
    start = tl.load(chunks + 2 * tl.program_id(0).to(tl.int64) + 1).to(tl.int64) * CHUNK
    factor = tl.load(constants)
    skip = tl.load(constants + 1)
    decay = tl.load(constants + 2)
    step_size = tl.load(constants + 4 + WIDTH * tensor * EACH)
    scaling = tl.load(constants + 5 + WIDTH * tensor * EACH)
    started, started_prev, scaling_prev = 0.0, 0.0, 0.0
    if SUMS:
        started = tl.load(constants + 6 + WIDTH * tensor * EACH)
        started_prev = tl.load(constants + 7 + WIDTH * tensor * EACH)
        scaling_prev = tl.load(constants + 8 + WIDTH * tensor * EACH)
        zeros = tl.zeros([BLOCK], tl.float32)
        slope, gg, pp, uu = zeros, zeros, zeros, zeros
    size = tl.load(table + tensor)
    p_at = tl.load(table + N + tensor)
    g_at = tl.load(table + 2 * N + tensor)
    m_at = tl.load(table + 4 * N + tensor)
    v_at = tl.load(table + 5 * N + tensor)
    w_at = p_at
    if MASTER is not None:
        w_at = tl.load(table + 6 * N + tensor)
    WEIGHT: tl.constexpr = tl.int16 if MASTER == "remainder" else tl.float32
    # Skipping leaves nothing to do rather than multiplying by zero: a NaN survives that.
    left = tl.where(skip != 0.0, 0, tl.minimum(size - start, CHUNK)).to(tl.int32)
    whole = tl.where(((p_at | g_at | m_at | v_at | w_at) & 15) == 0, left // BLOCK * BLOCK, 0)
    param = tl.multiple_of(p_at.to(tl.pointer_type(PARAM)), 16) + start
    grad = tl.multiple_of(g_at.to(tl.pointer_type(GRAD)), 16) + start
    exp_avg = tl.multiple_of(m_at.to(tl.pointer_type(STATE)), 16) + start
    exp_avg_sq = tl.multiple_of(v_at.to(tl.pointer_type(STATE)), 16) + start
    master = tl.multiple_of(w_at.to(tl.pointer_type(WEIGHT)), 16) + start
    for first in tl.range(0, whole, BLOCK):
        at = first + tl.arange(0, BLOCK)
        more = _block(
            param, grad, exp_avg, exp_avg_sq, master, at, None,
            factor, decay, step_size, scaling, started, started_prev, scaling_prev, rest1, beta2, rest2, eps,
            MASTER, False, SUMS,
        )  # fmt: skip
        if SUMS:
            slope, gg, pp, uu = slope + more[0], gg + more[1], pp + more[2], uu + more[3]
    param = p_at.to(tl.pointer_type(PARAM)) + start
    grad = g_at.to(tl.pointer_type(GRAD)) + start
    exp_avg = m_at.to(tl.pointer_type(STATE)) + start
    exp_avg_sq = v_at.to(tl.pointer_type(STATE)) + start
    master = w_at.to(tl.pointer_type(WEIGHT)) + start
    for first in tl.range(whole, left, BLOCK):
        at = first + tl.arange(0, BLOCK)
        more = _block(
            param, grad, exp_avg, exp_avg_sq, master, at, at < left,
            factor, decay, step_size, scaling, started, started_prev, scaling_prev, rest1, beta2, rest2, eps,
            MASTER, True, SUMS,
        )  # fmt: skip
        if SUMS:
            slope, gg, pp, uu = slope + more[0], gg + more[1], pp + more[2], uu + more[3]
    if SUMS:  # all four at once: one exchange between warps
        each = tl.join(tl.join(slope, gg), tl.join(pp, uu))  # [BLOCK, i, j]: of sum i + 2 j
        found = tl.sum(tl.sum(tl.reshape(each, [BLOCK // 32, 32, 2, 2]), axis=1), axis=0)
        which = tl.arange(0, 2)[:, None] + 2 * tl.arange(0, 2)[None, :]
        tl.store(partial + tl.program_id(0) + which.to(tl.int64) * tl.num_programs(0), found)


@triton.jit(do_not_specialize=["P"])
def _add_up(partial, sums, P: tl.int64, BLOCK: tl.constexpr):
    """sums[program] = the sum of partial[program, :P], in float64 and in a fixed order. 4 programs."""
    row = partial + tl.program_id(0).to(tl.int64) * P
    total = tl.zeros([BLOCK], tl.float64)
    for first in tl.range(0, P, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(row + at, mask=at < P, other=0.0).to(tl.float64)
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0).to(tl.float32))


class Tiling(NamedTuple):
    """How tensors are cut: a program takes a chunk, and walks it in blocks."""

    chunk: int
    block: int
    warps: int


class NormTiling(NamedTuple):
    """How tensors are cut: programs walk chunks together, in blocks."""

    chunk: int
    block: int
    warps: int
    programs: int
    """Programs for each multiprocessor."""


def tilings(bytes_of_a_moment: int, sums: bool = False) -> list[Tiling]:
    """Tilings of `_update`, the default first: 8 elements a thread, in one block a program, so that as many
    loads are in flight as registers hold; more threads where elements are wide. With sums, chunks of several
    blocks, whose threads exchange sums once."""
    first = Tiling(2048, 2048, 8) if bytes_of_a_moment == 4 else Tiling(1024, 1024, 4)
    if sums:
        first = Tiling(4096, 1024, 4)
    chunks = (2048, 1024, 4096, 8192, 512)
    forms = ((2048, 8), (1024, 4), (1024, 8), (512, 4), (2048, 4))
    others = [Tiling(chunk, block, warps) for chunk in chunks for block, warps in forms if block <= chunk]
    return list(dict.fromkeys([first, *others]))[:16]


def norm_tilings() -> list[NormTiling]:
    """Tilings of `_sum_squares`, the default first: 16 elements a thread and as many threads as fit at
    once."""
    forms = (
        (8192, 4096, 8),
        (8192, 2048, 4),
        (4096, 2048, 8),
        (16384, 4096, 8),
        (8192, 2048, 8),
        (4096, 1024, 4),
    )
    most = [NormTiling(chunk, block, warps, 64 // warps) for chunk, block, warps in forms]
    return [*most, *[tiling._replace(programs=tiling.programs // 2) for tiling in most[:4]]]
