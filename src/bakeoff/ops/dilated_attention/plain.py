"""dilated_attention in plain PyTorch: each branch by one of PyTorch's attention kernels, mixed by their lse.

The exact gradient needs no gradient of a branch's lse: with the lse and the output of the whole in place of
its own, a branch's ordinary backward gives its share of the exact gradient.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from bakeoff.attention_backends.inputs import exact, watched
from bakeoff.attention_backends.rows import BACKENDS
from bakeoff.derivatives import once_differentiable
from bakeoff.modes import watched as looked_at
from bakeoff.ops.dilated_attention.reference import Pattern, pattern_of
from bakeoff.ops.dilated_attention.reference import dilated_attention as reference

__all__ = ["branches", "eager", "pieces"]

_DENSE = 1 << 20  # scores up to which torch.compile gets one formula over all pairs


class Piece(NamedTuple):
    """Segments of one branch in which some kv heads select equally many rows: [segments, heads, rows]."""

    tokens: Tensor
    """Which tokens; one past the last where a row is missing."""
    heads: Tensor
    seen: Tensor | None
    """Which rows there are, where some may be missing."""


def pieces(pattern: Pattern, T: int, device: torch.device, cu: Tensor | None = None) -> Iterator[Piece]:
    """The rows that each branch selects, grouped so that every group is one call of an attention kernel."""
    for w, r, phases in zip(*pattern, strict=True):
        if cu is not None:
            yield _of_documents(w, r, phases, T, cu)
            continue
        whole = T // w
        for start, count, length in ((0, whole, w), (whole * w, 1, T - whole * w)):
            groups: dict[int, list[int]] = {}
            for head, phase in enumerate(phases):
                groups.setdefault(max(0, -(-(length - phase) // r)), []).append(head)
            for rows, heads in groups.items():
                if count and rows:
                    first = start + w * torch.arange(count, device=device)
                    yield _piece(first, [phases[head] for head in heads], heads, r, rows)


def _piece(first: Tensor, phases: Sequence[int], heads: Sequence[int], r: int, rows: int) -> Piece:
    own = _constant((tuple(phases), tuple(heads)), first.device)
    tokens = first[:, None, None] + own[0, :, None] + r * torch.arange(rows, device=first.device)
    return Piece(tokens, own[1], None)


def _constant(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Made once: a copy from the host waits for the device, and no CUDA graph can hold it. Where a dispatch
    mode looks on it may be a tensor of that mode, as fake ones are, which is of no use to others."""
    return _made(rows, device) if looked_at() else _kept(rows, device)


def _made(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(rows, device=device)


_kept = lru_cache(maxsize=256)(_made)


def _of_documents(w: int, r: int, phases: Sequence[int], T: int, cu: Tensor) -> Piece:
    """The segments of all documents, as many as there can be, without knowing their lengths."""
    cu = cu.to(torch.int64).clamp(0, T)
    if cu.numel() == 1:  # no document, which is like an empty one
        cu = cu.expand(2)
    counts = (cu[1:] - cu[:-1] + w - 1) // w
    after = counts.cumsum(0)
    slot = torch.arange(cu.numel() - 1 + T // w, device=cu.device)
    document = torch.searchsorted(after, slot, right=True).clamp(max=cu.numel() - 2)
    first = cu[document] + w * (slot - (after - counts)[document])
    last = torch.where(slot < after[-1], torch.minimum(first + w, cu[document + 1]), 0)
    found = _piece(first, phases, range(len(phases)), r, -(-min(w, T) // r))
    seen = found.tokens < last[:, None, None]
    return Piece(torch.where(seen, found.tokens, T), found.heads, seen)


def preferred(q: Tensor, cu_seqlens: Tensor | None, lse_gradient: bool) -> str:
    """The back end that `eager` takes: FlashAttention where it can, matrix products elsewhere."""
    if cu_seqlens is not None or lse_gradient or not q.is_cuda or q.dtype == torch.float64:
        return "math"
    D, half = q.shape[-1], q.dtype in (torch.float16, torch.bfloat16)
    ampere = torch.cuda.get_device_capability(q.device) >= (8, 0)
    return "flash" if half and D % 8 == 0 and D <= 256 and ampere else "math"


# All branches -------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """What is fixed in a call."""

    pattern: Pattern
    causal: bool
    detached: bool
    scale: float
    backend: str


def forward(call: _Call, q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None) -> tuple[Tensor, Tensor]:
    """y [B, T, H, D] and its lse [B, H, T]."""
    B, T, H, D = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    found = []
    lses = q.new_full((len(call.pattern.rates), B, T + 1, H), -torch.inf, dtype=wide)
    for branch, piece, place in _placed(call, q, k, cu):
        out, lse = _run(call, piece, *_rows(q, k, v, piece, place))
        out, lse = (x.view(B, *place[0].shape, *x.shape[3:]) for x in (out, lse.contiguous()))
        lses[branch][:, place[0], place[1]] = lse.to(wide)
        found.append((place, out, lse))
    seen = lses.amax(0) > -torch.inf
    total = lses.masked_fill(~seen, 0.0).logsumexp(0).masked_fill(~seen, -torch.inf)
    y = q.new_zeros((B, T + 1, H, D), dtype=wide)
    for (t, h, _), out, lse in found:
        y[:, t, h] += torch.exp(lse - total[:, t, h])[..., None] * out
    return y[:, :T].to(q.dtype), total[:, :T].mT.contiguous()


def backward(
    call: _Call, q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, y: Tensor, lse: Tensor,
    dy: Tensor, dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    B, T, H, D = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (x.new_zeros((B, T + 1, *x.shape[2:]), dtype=wide) for x in (q, k, v))
    for _, piece, place in _placed(call, q, k, cu):
        t, h, _ = place
        rows = _rows(q, k, v, piece, place)
        douts, outs, levels = (_taken(x, piece, t, h) for x in (dy, y, lse.mT))
        if call.detached:
            outs = _run(call, piece, *rows)[0].to(outs.dtype)
        extra: dict[str, Any] = {}
        if call.backend == "math":
            extra["seen"] = _seen(piece, rows[0])
            extra["dlse"] = None if dlse is None else _taken(dlse.mT, piece, t, h)
        slopes = BACKENDS[call.backend].backward(douts, *rows, outs, levels, call.causal, call.scale, **extra)
        mine, *others = (x.view(B, *t.shape, D).to(wide) for x in slopes)
        dq[:, t, h] += mine
        heads = (piece.heads.numel(), H // k.shape[2])
        for whole, slope in zip((dk, dv), others, strict=True):
            shared = slope.unflatten(2, heads).sum(3)
            whole[:, piece.tokens, piece.heads[:, None]] += shared
    return dq[:, :T].to(q.dtype), dk[:, :T].to(k.dtype), dv[:, :T].to(v.dtype)


def _placed(
    call: _Call, q: Tensor, k: Tensor, cu: Tensor | None
) -> Iterator[tuple[int, Piece, tuple[Tensor, Tensor, Tensor]]]:
    """The pieces of all branches, and for each the tokens, heads and kv heads of its rows."""
    G = q.shape[2] // k.shape[2]
    for branch in range(len(call.pattern.rates)):
        alone = Pattern(*[(part[branch],) for part in call.pattern])  # type: ignore[arg-type]
        for piece in pieces(alone, q.shape[1], q.device, cu):
            kv = piece.heads.repeat_interleave(G)
            h = kv * G + torch.arange(G, device=q.device).repeat(piece.heads.numel())
            yield branch, piece, (piece.tokens.repeat_interleave(G, 1), h[:, None], kv[:, None])


def _rows(
    q: Tensor, k: Tensor, v: Tensor, piece: Piece, place: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """A piece's rows of q, k and v, [B * segments, heads, rows, D]."""
    t, h, kv = place
    return _taken(q, piece, t, h), _taken(k, piece, t, kv), _taken(v, piece, t, kv)


def _taken(x: Tensor, piece: Piece, t: Tensor, h: Tensor) -> Tensor:
    """x [B, T, H, ...] at tokens t and heads h, [B * segments, heads, rows, ...]; zeros where a row is
    missing, as what lies outside of all documents may be NaN."""
    if piece.seen is None:
        return _flat(x[:, t, h])
    rows = x[:, t.clamp(max=x.shape[1] - 1), h]
    missing = (t == x.shape[1]).view(*t.shape, *[1] * (x.dim() - 3))
    return _flat(rows.masked_fill(missing, 0.0))


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, 1).contiguous()


def _run(call: _Call, piece: Piece, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    extra = {"seen": _seen(piece, q)} if call.backend == "math" else {}
    return BACKENDS[call.backend].forward(q, k, v, call.causal, call.scale, **extra)


def _seen(piece: Piece, q: Tensor) -> Tensor | None:
    """Which rows of [B * segments, heads, rows] there are."""
    if piece.seen is None:
        return None
    S, heads, _ = piece.seen.shape
    return piece.seen.repeat(q.shape[0] // S, 1, 1).repeat_interleave(q.shape[1] // heads, 1)


class _Differentiable(torch.autograd.Function):
    """All branches, in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None) -> Any:
        y, lse = forward(call, q, k, v, cu)
        ctx.call = call
        ctx.save_for_backward(q, k, v, cu, y, lse)
        ctx.set_materialize_grads(False)
        return y, lse

    @staticmethod
    @once_differentiable("dilated_attention", "its definition can, bakeoff.ops.dilated_attention.reference")
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, cu, y, lse = ctx.saved_tensors
        dy = torch.zeros_like(y) if dy is None else dy
        return None, *backward(ctx.call, q, k, v, cu, y, lse, dy, dlse), None


def branches(
    backend: str, q: Tensor, k: Tensor, v: Tensor, segments: str, rates: str, causal: bool, phase: str,
    combine_grad: str, cu_seqlens: Tensor | None, scale: float | None, return_lse: bool,
) -> Any:  # fmt: skip
    """dilated_attention by the back end of this name; "" is `preferred`'s."""
    if is_compiling():  # as one op, whatever the length
        lse_gradient = return_lse and torch.is_grad_enabled()
        y, lse = _traced(
            q, k, v, cu_seqlens, segments, rates, phase, causal, combine_grad == "detached",
            q.shape[-1] ** -0.5 if scale is None else scale, backend, lse_gradient,
        )  # fmt: skip
    else:
        backend = backend or preferred(q, cu_seqlens, return_lse and q.requires_grad)
        pattern = pattern_of(segments, rates, phase, k.shape[2])
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        call = _Call(pattern, causal, combine_grad == "detached", scale, backend)
        y, lse = _Differentiable.apply(call, q, k, v, cu_seqlens)  # type: ignore[no-untyped-call]
    return (y, lse) if return_lse else y


def eager(
    q: Tensor, k: Tensor, v: Tensor, segments: str, rates: str, causal: bool, phase: str,
    combine_grad: str, cu_seqlens: Tensor | None, scale: float | None, return_lse: bool,
) -> Any:  # fmt: skip
    """Branch by branch; the definition where transforms look on, and for few pairs inside torch.compile."""
    args = (q, k, v, segments, rates, causal, phase, combine_grad, cu_seqlens, scale, return_lse)
    if watched() or (is_compiling() and q.shape[0] * q.shape[2] * q.shape[1] ** 2 <= _DENSE):
        return exact(reference)(*args)
    return branches("", *args)


# Inside torch.compile -----------------------------------------------------------------------------------


@torch.library.custom_op("bakeoff::dilated_attention_branches", mutates_args=())
def _traced(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, segments: str, rates: str, phase: str, causal: bool,
    detached: bool, scale: float, backend: str, lse_gradient: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    backend = backend or preferred(q, cu, lse_gradient)
    pattern = pattern_of(segments, rates, phase, k.shape[2])
    return forward(_Call(pattern, causal, detached, scale, backend), q, k, v, cu)


@_traced.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide)


@torch.library.custom_op("bakeoff::dilated_attention_branches_backward", mutates_args=())
def _traced_backward(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, y: Tensor, lse: Tensor, dy: Tensor, dlse: Tensor,
    segments: str, rates: str, phase: str, causal: bool, detached: bool, scale: float, backend: str,
    lse_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    backend = backend or preferred(q, cu, lse_gradient)
    pattern = pattern_of(segments, rates, phase, k.shape[2])
    call = _Call(pattern, causal, detached, scale, backend)
    return backward(call, q, k, v, cu, y, lse, dy, dlse if lse_gradient else None)


@_traced_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    q, k, v, cu, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, cu, *output)


def _gradients(ctx: Any, dy: Tensor, dlse: Tensor) -> Any:
    found = _traced_backward(*ctx.saved_tensors, dy, dlse, *ctx.rest)
    return *found, *[None] * (1 + len(ctx.rest))


_traced.register_autograd(_gradients, setup_context=_save)
