"""dilated_attention by one of PyTorch's attention kernels a branch, with compiled code around them.

Where rates divide segments and segments divide T, every branch is one call. torch.compile then makes one
kernel of collecting a branch's rows and one of mixing what comes back; a branch of rate 1 is read where it
lies. Elsewhere branches go in the pieces of `plain`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from bakeoff.attention_backends.flex import flex_refused
from bakeoff.attention_backends.inputs import exact, readable, width_refused
from bakeoff.attention_backends.rows import BACKENDS
from bakeoff.derivatives import once_differentiable
from bakeoff.modes import kept_tensors
from bakeoff.ops.dilated_attention import plain
from bakeoff.ops.dilated_attention.reference import Pattern, pattern_of
from bakeoff.select.declare.case import Case
from bakeoff.select.declare.compiled import compiled, compiler_missing

__all__ = [
    "cudnn",
    "efficient",
    "even",
    "flash",
    "flash_attn_2",
    "flash_attn_3",
    "flash_attn_4",
    "flex",
    "flex_flash",
    "flex_supports",
    "gradients",
    "supports",
]


_BASE_OF_FLASH_WRONG = torch.__version__ < "2.13"  # compared as versions
"""FlexAttention then takes FlashAttention's lse for one of base 2 and multiplies it by ln 2."""


def even(pattern: Pattern, T: int) -> bool:
    """Whether all segments are alike and every head selects equally many rows of each."""
    pairs = zip(pattern.segments, pattern.rates, strict=True)
    return T > 0 and all(T % min(w, T) == 0 and min(w, T) % r == 0 for w, r in pairs)


def _collect(pattern: Pattern, x: Tensor) -> tuple[Tensor, ...]:
    """The rows of x [B, T, H, D] or [B, T, H] that each branch selects, [B S, H, L, ...]."""
    T, H = x.shape[1:3]
    h = torch.arange(H, device=x.device)[:, None]
    found = []
    for longest, r, phases in zip(*pattern, strict=True):
        w = min(longest, T)
        segment = torch.arange(T // w, device=x.device)[:, None, None] * w
        row = torch.arange(w // r, device=x.device) * r
        phase = torch.tensor(phases, device=x.device).repeat_interleave(H // len(phases))[:, None]
        found.append(x[:, segment + phase + row, h].flatten(0, 1))
    return tuple(found)


def _spread(pattern: Pattern, B: int, T: int, *parts: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What each branch has for every token and head, and whether it selects it: [B, T, H, ...]."""
    H, device = parts[0].shape[1], parts[0].device
    t, h = torch.arange(T, device=device)[:, None], torch.arange(H, device=device)
    spread, selected = [], []
    for longest, r, phases, part in zip(*pattern, parts, strict=True):
        w = min(longest, T)
        phase = torch.tensor(phases, device=device).repeat_interleave(H // len(phases))
        spread.append(part.unflatten(0, (B, T // w))[:, t // w, h, t % w // r])
        selected.append(t % w % r == phase)
    return spread, selected


def _mix(pattern: Pattern, B: int, T: int, *parts: Tensor) -> tuple[Tensor, Tensor]:
    """y [B, T, H, D] and lse [B, H, T] from the branches' outputs and, behind them, their lse."""
    count = len(pattern.rates)
    outs, selected = _spread(pattern, B, T, *parts[:count])
    lses, _ = _spread(pattern, B, T, *parts[count:])
    lses = [lse.masked_fill(~sel, -torch.inf) for lse, sel in zip(lses, selected, strict=True)]
    top = torch.stack(lses).amax(0).detach()
    shift = torch.where(top > -torch.inf, top, 0.0)
    weights = [torch.exp(lse - shift) for lse in lses]
    total = torch.stack(weights).sum(0)
    mixed = torch.zeros_like(outs[0], dtype=torch.float32)
    for weight, out in zip(weights, outs, strict=True):
        mixed = mixed + torch.where(weight > 0, weight, 0.0)[..., None] * out
    y = mixed / torch.where(total > 0, total, 1.0)[..., None]
    return y.to(parts[0].dtype), (shift + torch.log(total)).mT.contiguous()


def _add(pattern: Pattern, B: int, T: int, *parts: Tensor) -> Tensor:
    """The sum over branches, [B, T, H, D]."""
    spread, selected = _spread(pattern, B, T, *parts)
    found = torch.zeros_like(spread[0], dtype=torch.float32)
    for part, sel in zip(spread, selected, strict=True):
        found = found + torch.where(sel[..., None], part, 0.0)
    return found.to(parts[0].dtype)


_collected, _mixed, _added = compiled(_collect), compiled(_mix), compiled(_add)


def _rows(pattern: Pattern, x: Tensor) -> list[Tensor]:
    """As `_collect`, of which a branch of rate 1 is a view where kernels can read that."""
    strided = [branch for branch, rate in enumerate(pattern.rates) if rate > 1]
    alone = Pattern(*[tuple(part[i] for i in strided) for part in pattern])  # type: ignore[arg-type]
    others = iter(_collected(alone, x) if strided else ())
    T = x.shape[1]
    return [
        next(others) if r > 1 else readable(x.reshape(-1, min(w, T), *x.shape[2:]).transpose(1, 2))
        for w, r in zip(pattern.segments, pattern.rates, strict=True)
    ]


def gradients(
    name: str, pattern: Pattern, causal: bool, scale: float, q: Tensor, k: Tensor, v: Tensor, y: Tensor,
    lse: Tensor, outs: list[Tensor], dy: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv by the back end `name`, one call a branch, from y and the lse of all branches: exact ones
    need no more of the forward. Detached ones need what each branch gave, `outs`."""
    run, (B, T, H, _) = BACKENDS[name].backward, q.shape
    outs = outs or _rows(pattern, y)
    levels = [x.contiguous() for x in _rows(pattern, lse.mT)]
    found = [
        run(grad, *rows, out, level, causal, scale)
        for grad, rows, out, level in zip(
            _rows(pattern, dy), _all_rows(pattern, q, k, v), outs, levels, strict=True
        )
    ]
    dq, dk, dv = (_added(pattern, B, T, *parts) for parts in zip(*found, strict=True))
    G = H // k.shape[2]
    dk, dv = (x if G == 1 else x.unflatten(2, (-1, G)).sum(3) for x in (dk, dv))
    return dq, dk, dv


class _Even(torch.autograd.Function):
    """Branches that are one call each."""

    @staticmethod
    def forward(
        ctx: Any, name: str, pattern: Pattern, causal: bool, detached: bool, scale: float,
        q: Tensor, k: Tensor, v: Tensor,
    ) -> Any:  # fmt: skip
        run = BACKENDS[name].forward
        made = [run(*rows, causal, scale) for rows in _all_rows(pattern, q, k, v)]
        y, lse = _mixed(pattern, q.shape[0], q.shape[1], *[out for out, _ in made], *[lse for _, lse in made])
        ctx.fixed = (name, pattern, causal, scale)
        ctx.count = len(made) if detached else 0
        ctx.save_for_backward(q, k, v, y, lse, *[out for out, _ in made if detached])
        ctx.mark_non_differentiable(lse)
        return y, lse

    @staticmethod
    @once_differentiable("dilated_attention", "its definition can, bakeoff.ops.dilated_attention.reference")
    def backward(ctx: Any, dy: Tensor, dlse: Any) -> Any:
        del dlse
        (name, pattern, causal, scale), (q, k, v, y, lse, *outs) = ctx.fixed, ctx.saved_tensors
        found = gradients(name, pattern, causal, scale, q, k, v, y, lse, outs, dy)
        return *[None] * 5, *found


def _all_rows(pattern: Pattern, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    G = q.shape[2] // k.shape[2]
    k, v = (x if G == 1 else x.repeat_interleave(G, 2) for x in (k, v))
    return list(zip(*(_rows(pattern, x) for x in (q, k, v)), strict=True))


def _candidate(name: str) -> Callable[..., Any]:
    @exact
    def call(
        q: Tensor, k: Tensor, v: Tensor, segments: str, rates: str, causal: bool, phase: str,
        combine_grad: str, cu_seqlens: Tensor | None, scale: float | None, return_lse: bool,
    ) -> Any:  # fmt: skip
        pattern = pattern_of(segments, rates, phase, k.shape[2])
        if is_compiling() or not even(pattern, q.shape[1]):
            return plain.branches(
                name, q, k, v, segments, rates, causal, phase, combine_grad, cu_seqlens, scale, return_lse
            )
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        y, lse = _Even.apply(name, pattern, causal, combine_grad == "detached", scale, q, k, v)  # type: ignore[no-untyped-call]
        return (y, lse) if return_lse else y

    call.__doc__ = f"dilated_attention with {name} attention in each branch"
    return call


flash, cudnn, efficient = _candidate("flash"), _candidate("cudnn"), _candidate("efficient")
flash_attn_2, flash_attn_3, flash_attn_4 = (_candidate(f"flash_attn_{version}") for version in (2, 3, 4))


def _flexible(
    backend: str, pattern: Pattern, masks: tuple[Any, ...], detached: bool, scale: float,
    q: Tensor, k: Tensor, v: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All branches by FlexAttention. Its lse carries a gradient in Triton, so that autograd does the rest."""
    B, T, H, _ = q.shape
    G = H // k.shape[2]
    k, v = (x if G == 1 else x.repeat_interleave(G, 2) for x in (k, v))
    rows = zip(*(_collect(pattern, x) for x in (q, k, v)), masks, strict=True)
    options: Any = {"BACKEND": backend} if backend else None
    made = [
        flex_attention(
            own_q, own_k, own_v, block_mask=mask, scale=scale, return_lse=True, kernel_options=options
        )
        for own_q, own_k, own_v, mask in rows
    ]
    lses = [lse.detach() if detached else lse for _, lse in made]
    if backend == "FLASH" and _BASE_OF_FLASH_WRONG:
        lses = [lse / math.log(2) for lse in lses]
    return _mix(pattern, B, T, *[out for out, _ in made], *lses)


_flexed = compiled(_flexible)


@kept_tensors(maxsize=64)
def _causal(L: int, device: torch.device) -> BlockMask:
    """Which blocks of L causal rows there are to look at."""
    return create_block_mask(lambda b, h, t, u: u <= t, None, None, L, L, device=str(device))


def _flex(backend: str) -> Callable[..., Any]:
    @exact
    def call(
        q: Tensor, k: Tensor, v: Tensor, segments: str, rates: str, causal: bool, phase: str,
        combine_grad: str, cu_seqlens: Tensor | None, scale: float | None, return_lse: bool,
    ) -> Any:  # fmt: skip
        del cu_seqlens
        pattern = pattern_of(segments, rates, phase, k.shape[2])
        lengths = [min(w, q.shape[1]) // r for w, r in zip(pattern.segments, pattern.rates, strict=True)]
        masks = tuple(_causal(L, q.device) if causal else None for L in lengths)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        y, lse = _flexed(backend, pattern, masks, combine_grad == "detached", scale, q, k, v)
        return (y, lse) if return_lse else y

    call.__doc__ = (
        "dilated_attention with PyTorch's FlexAttention in each branch, collected and mixed in one program"
    )
    return call


flex, flex_flash = _flex(""), _flex("FLASH")


def supports(case: Case, name: str) -> str | None:
    """Why the branches can't be computed by the back end `name`, or None."""
    if not case.device.startswith("cuda"):
        return f"runs on CUDA, not on {case.device}"
    if case.cu_seqlens is not None:
        return "takes no packed documents"
    if case.return_lse and case.needs_grad:
        return "has no gradient of the lse"
    return width_refused(name, case.q.shape[-1], case.q.dtype) or compiler_missing(case)


def flex_supports(case: Case, backend: str = "") -> str | None:
    """Why FlexAttention can't compute the branches, or None."""
    if not case.device.startswith("cuda"):
        return f"runs on CUDA, not on {case.device}"
    if case.cu_seqlens is not None:
        return "takes no packed documents"
    if case.q.dtype == torch.float64:
        return "takes no float64"
    if case.return_lse and case.needs_grad and case.combine_grad == "detached":
        return "has no gradient of the lse beside detached weights"
    if not even(pattern_of(case.segments, case.rates, case.phase, case.k.shape[2]), case.q.shape[1]):
        return "takes branches whose rates divide their segments, and these T"
    if backend and case.needs_grad and case.combine_grad == "exact":
        return "has no gradient of a branch's lse, which exact gradients of the mixture need"
    return flex_refused(backend, case.q.dtype) or compiler_missing(case)
