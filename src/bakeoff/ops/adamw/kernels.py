"""adamw_ and global_norm in Triton: kernels over all tensors of a group at once, their tilings and launches.

A program takes a chunk of one tensor: it looks the tensor up in a pointer table (`bakeoff.ops.adamw.tables`).
Whole blocks of 16-byte aligned tensors are read and written unmasked, 16 bytes a thread; the rest of a chunk,
and tensors that lie at odd addresses, take a masked loop in the same kernel.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bakeoff.launch import Launcher
from bakeoff.ops.adamw.group import Group, Guard, Hyper, log_beta
from bakeoff.ops.adamw.tables import Table, table_for

__all__ = ["Tiling", "guard", "norm", "update"]

_SHARED = 4  # floats at the start of `constants`: gradient factor, whether to skip, decay, unused


@triton.jit(do_not_specialize=["source", "count"])
def _fetch(target, source: tl.int64, count: tl.int32, BLOCK: tl.constexpr):
    """target[i] = the i-th word at address `source`, in pinned memory, which devices can read."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(source.to(tl.pointer_type(tl.int32)) + i, mask=i < count, other=0)
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
    log_beta1: tl.float64, log_beta2: tl.float64, sign: tl.float32, BLOCK: tl.constexpr,
):  # fmt: skip
    """Advances the S step counters, unless skipping, and writes what `_update` needs of them.

    constants: gradient factor, skip, decay, 0, then (lr/(1 - beta1^t), 1/sqrt(1 - beta2^t)) for each counter.
    The powers are taken in float64: 1 - beta2 has but 13 correct bits in float32.
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
    t = tl.load(at, mask=inside, other=1.0) + advance
    tl.store(at, t, mask=inside)
    t = t.to(tl.float64)
    step_size = rate / (1.0 - tl.exp(log_beta1 * t))
    scaling = 1.0 / tl.sqrt(1.0 - tl.exp(log_beta2 * t))
    tl.store(constants + 4 + 2 * i, step_size.to(tl.float32), mask=inside)
    tl.store(constants + 5 + 2 * i, scaling.to(tl.float32), mask=inside)


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
def _joined(high, low):
    """The float32 weight of a bfloat16's bits and an int16 remainder."""
    return ((high.to(tl.int32) << 16) + low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _block(
    param, grad, exp_avg, exp_avg_sq, master, at, mask,
    factor, decay, step_size, scaling, rest1, beta2, rest2, eps, MASTER: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Moves the elements `at`, of which those inside `mask` exist."""
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
    p, m, v = _moved(p, g, m, v, factor, decay, step_size, scaling, rest1, beta2, rest2, eps)
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


@triton.jit(do_not_specialize=["N", "rest1", "beta2", "rest2", "eps"])
def _update(
    table, chunks, constants,
    N: tl.int64, rest1: tl.float32, beta2: tl.float32, rest2: tl.float32, eps: tl.float32,
    PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, MASTER: tl.constexpr, EACH: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor a program.

    Rows of `table`: size; addresses of param, grad, step, exp_avg, exp_avg_sq, master. Reads p, g, m, v and
    writes p, m, v: 28 bytes an element in float32, about 15 FLOPs.
    """
    tensor = tl.load(chunks + 2 * tl.program_id(0).to(tl.int64)).to(tl.int64)
    start = tl.load(chunks + 2 * tl.program_id(0).to(tl.int64) + 1).to(tl.int64) * CHUNK
    factor = tl.load(constants)
    skip = tl.load(constants + 1)
    decay = tl.load(constants + 2)
    step_size = tl.load(constants + 4 + 2 * tensor * EACH)
    scaling = tl.load(constants + 5 + 2 * tensor * EACH)
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
        _block(
            param, grad, exp_avg, exp_avg_sq, master, at, None,
            factor, decay, step_size, scaling, rest1, beta2, rest2, eps, MASTER, False,
        )  # fmt: skip
    param = p_at.to(tl.pointer_type(PARAM)) + start
    grad = g_at.to(tl.pointer_type(GRAD)) + start
    exp_avg = m_at.to(tl.pointer_type(STATE)) + start
    exp_avg_sq = v_at.to(tl.pointer_type(STATE)) + start
    master = w_at.to(tl.pointer_type(WEIGHT)) + start
    for first in tl.range(whole, left, BLOCK):
        at = first + tl.arange(0, BLOCK)
        _block(
            param, grad, exp_avg, exp_avg_sq, master, at, at < left,
            factor, decay, step_size, scaling, rest1, beta2, rest2, eps, MASTER, True,
        )  # fmt: skip


_launch_fetch = Launcher(_fetch)
_launch_sum_squares = Launcher(_sum_squares)
_launch_judge = Launcher(_judge)
_launch_prepare = Launcher(_prepare)
_launch_update = Launcher(_update)

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_tables: OrderedDict[object, Table] = OrderedDict()


class Tiling(NamedTuple):
    """How tensors are cut: programs take chunks, and walk them in blocks."""

    chunk: int
    block: int
    warps: int
    programs: int = 0
    """Programs for each multiprocessor that walk the chunks together; 0 for one program a chunk."""


# By the moments' bytes; chosen among some fifteen tilings on an H100, whose rows are still to be committed.
UPDATE = {4: Tiling(2048, 2048, 8), 2: Tiling(1024, 1024, 4)}
NORM = Tiling(8192, 4096, 8, 8)
PREPARE_BLOCK = 256
FETCH_BLOCK = 1024
JUDGE_BLOCK = 1024


def fetch(source: int, target: Tensor) -> None:
    """Copies from an address in pinned memory to an int32 `target`, by a kernel."""
    count = target.numel()
    _launch_fetch((-(-count // FETCH_BLOCK), 1, 1), target, source, count, BLOCK=FETCH_BLOCK, num_warps=4)


def update(group: Group, how: Hyper, tiling: Tiling | None = None) -> None:
    """Takes one AdamW step in two launches, whatever the number of tensors."""
    tiling = tiling or UPDATE[group.exp_avg[0].element_size()]
    params, steps = group.params, group.steps
    device = params[0].device
    n, each = len(params), len(steps) > 1
    table = table_for(params, tiling.chunk, device, _tables, fetch)
    columns = [params, group.grads, steps if len(steps) == n else steps * n, group.exp_avg, group.exp_avg_sq]
    kind = None
    if group.master is not None:
        columns.append(group.master)
        kind = "remainder" if group.master[0].dtype == torch.int16 else "float32"
    rows = table.rows(*columns)
    constants = torch.empty(_SHARED + 2 * len(steps), dtype=torch.float32, device=device)
    lr_at, lr = (how.lr, 0.0) if isinstance(how.lr, Tensor) else (None, float(how.lr))
    _launch_prepare(
        (-(-len(steps) // PREPARE_BLOCK), 1, 1), rows, constants,
        lr_at, how.lr_mult, how.clip_coef, how.found_inf, how.grad_scale,
        n, len(steps), lr, float(how.weight_decay), log_beta(how.beta1), log_beta(how.beta2),
        -1.0 if how.maximize else 1.0, BLOCK=PREPARE_BLOCK, num_warps=4,
    )  # fmt: skip
    if table.count == 0:
        return
    _launch_update(
        (table.count, 1, 1), rows, table.chunks, constants,
        n, 1.0 - how.beta1, float(how.beta2), 1.0 - how.beta2, float(how.eps),
        PARAM=tl.int16 if kind == "remainder" else _DTYPES[params[0].dtype],
        GRAD=_DTYPES[group.grads[0].dtype], STATE=_DTYPES[group.exp_avg[0].dtype],
        MASTER=kind, EACH=int(each), CHUNK=tiling.chunk, BLOCK=tiling.block, num_warps=tiling.warps,
    )  # fmt: skip


def guard(
    grads: Sequence[Tensor],
    max_norm: float | None,
    skip_nonfinite: bool,
    found_inf: Tensor | None,
    grad_scale: Tensor | None,
    skipped: Tensor | None,
    tiling: Tiling = NORM,
) -> Guard:
    """Judges gradients of one device by their global norm, in a launch for each dtype and one more."""
    device = grads[0].device
    programs = tiling.programs * _multiprocessors(device.index if device.type == "cuda" else -1)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        by_dtype.setdefault(grad.dtype, []).append(grad)
    partial = torch.empty((len(by_dtype), programs), dtype=torch.float32, device=device)
    for part, (dtype, members) in zip(partial, by_dtype.items(), strict=True):
        table = table_for(members, tiling.chunk, device, _tables, fetch)
        _launch_sum_squares(
            (programs, 1, 1), table.rows(members), table.chunks, part, len(members), table.count,
            GRAD=_DTYPES[dtype], CHUNK=tiling.chunk, BLOCK=tiling.block, num_warps=tiling.warps,
        )  # fmt: skip
    verdict = torch.empty((3, 4), dtype=torch.float32, device=device)  # rows of 16 bytes: aligned scalars
    _launch_judge(
        (1, 1, 1), partial, verdict, skipped, found_inf, grad_scale,
        partial.numel(), 0.0 if max_norm is None else float(max_norm),
        CLIP=max_norm is not None, SKIP=bool(skip_nonfinite), BLOCK=JUDGE_BLOCK, num_warps=4,
    )  # fmt: skip
    return Guard(verdict[0, 0], verdict[1, 0], verdict[2, 0])


def norm(grads: Sequence[Tensor]) -> Tensor:
    """The gradients' global norm, float32 on their device, in two launches."""
    return guard(grads, None, False, None, None, None).norm


@lru_cache
def _multiprocessors(device: int) -> int:
    if device < 0:  # the interpreter
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
