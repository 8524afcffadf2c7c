"""Attention over dense rows by many kernels, each with its log-sum-exp and its backward apart.

PyTorch's own, matrix products, and those of the flash-attn packages, which are imported on the first call.
Written against flash-attn 2.8, FlashAttention-3's flash_attn_interface and flash-attn-4 4.0.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bakeoff.attention_backends.inputs import exact, laid_as

__all__ = ["BACKENDS", "Backend"]

_CHUNK = 1 << 26  # scores of matrix products that exist at a time
aten = torch.ops.aten


class Backend(NamedTuple):
    """Attention over rows [N, H, L, D] with its lse [N, H, L], and its backward given out and lse.

    Where it isn't causal, keys and values may have another L than queries; `out` and `lse` given to the
    backward may be those of a softmax that has more keys beside these.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    """(q, k, v, causal, scale) -> out, lse"""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(dout, q, k, v, out, lse, causal, scale) -> dq, dk, dv"""


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    made = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return made[0], made[1]


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    seed = q.new_zeros(2, dtype=torch.uint64)  # dropout's, which there is none of
    found: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed.new_empty(0),
        scale=scale,
    )  # fmt: skip
    return found


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if 1 in (q.shape[2], k.shape[2]):  # it refuses single rows
        out, lse = exact(_math)(q, k, v, causal, scale)
        return out.to(q.dtype), lse
    made = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return made[0], made[1].reshape(q.shape[:3])


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if 1 in (q.shape[2], k.shape[2]):
        dq, dk, dv = exact(_math_backward)(dout, q, k, v, out, lse, causal, scale)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    # PyTorch keeps cuDNN's plans by the strides of q, k and v alone. A plan that was made for a dout or out
    # laid out in another way reads this one's at the wrong places, and beyond its end.
    dout, out = laid_as(q, dout), laid_as(q, out)
    seed = q.new_zeros((), dtype=torch.int64)
    found: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse[..., None], seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
        scale=scale,
    )  # fmt: skip
    return found


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    made = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return made[0], made[1][..., : q.shape[2]]


def _efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # Its kernels take the output's strides to be those it was made with, [N, L, H, D], and read elsewhere
    # otherwise; and the lse to have room up to a multiple of 32 rows.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
    seed = q.new_zeros((), dtype=torch.int64)
    found = aten._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
    )
    return found[0], found[1], found[2]


def _math(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """By matrix products, some rows at a time; `seen` [N, H, L] says which rows there are."""
    q, k, v = _widened(q, k, v)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    for n, rows in _chunks(q):
        scores = _scores(q, k, n, rows, causal, scale, seen)
        top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).min)
        weights = torch.exp(scores - top)
        total = weights.sum(-1)
        out[n, :, rows] = weights @ v[n] / total.clamp(min=torch.finfo(q.dtype).tiny)[..., None]
        lse[n, :, rows] = torch.log(total) + top[..., 0]
    return out, lse


def _math_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float,
    seen: Tensor | None = None, dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, dout = _widened(q, k, v, dout)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # of rows that are missing: weights of 0
    delta = (dout * out).sum(-1)
    delta = delta if dlse is None else delta - dlse
    for n, rows in _chunks(q):
        scores = _scores(q, k, n, rows, causal, scale, seen)
        weights = torch.exp(scores - lse[n, :, rows, None])
        dv[n] += weights.mT @ dout[n, :, rows]
        slope = weights * (dout[n, :, rows] @ v[n].mT - delta[n, :, rows, None]) * scale
        dq[n, :, rows] = slope @ k[n]
        dk[n] += slope.mT @ q[n, :, rows]
    return dq, dk, dv


def _scores(
    q: Tensor, k: Tensor, n: slice, rows: slice, causal: bool, scale: float, seen: Tensor | None
) -> Tensor:
    scores = q[n, :, rows] @ k[n].mT * scale
    if causal:
        place = torch.arange(k.shape[2], device=q.device)
        scores = scores.masked_fill(place > place[rows, None], -torch.inf)
    if seen is not None:
        scores = scores.masked_fill(~(seen[n, :, rows, None] & seen[n, :, None, :]), -torch.inf)
    return scores


def _chunks(q: Tensor) -> Iterator[tuple[slice, slice]]:
    N, H, L, _ = q.shape
    rows = max(1, min(L, _CHUNK // max(1, H * L)))
    items = max(1, _CHUNK // max(1, H * L * rows))
    for n in range(0, N, items):
        for row in range(0, L, rows):
            yield slice(n, n + items), slice(row, row + rows)


def _widened(*tensors: Tensor) -> list[Tensor]:
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _flash_attn(version: int, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    """The flash-attn packages take [N, L, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if version == 2:
        from flash_attn.flash_attn_interface import _flash_attn_forward as forward

        out, lse = forward(q, k, v, 0.0, scale, causal, -1, -1, 0.0, None, False)[:2]
    elif version == 3:
        from flash_attn_interface import _flash_attn_forward as forward

        out, lse = forward(q, k, v, softmax_scale=scale, causal=causal)[:2]
    else:
        from flash_attn.cute.interface import _flash_attn_fwd

        out, lse = _flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)[:2]
    return out.transpose(1, 2), lse


def _flash_attn_backward(
    version: int, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float,
) -> Any:  # fmt: skip
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    if version == 4:
        from flash_attn.cute.interface import _flash_attn_bwd

        slopes = _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=scale, causal=causal)[:3]
        return tuple(x.transpose(1, 2) for x in slopes)
    slopes = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if version == 2:
        from flash_attn.flash_attn_interface import _flash_attn_backward as backward

        backward(dout, q, k, v, out, lse, *slopes, 0.0, scale, causal, -1, -1, 0.0, None, False)
    else:
        from flash_attn_interface import _flash_attn_backward as backward

        backward(dout, q, k, v, out, lse, *[None] * 6, *slopes, scale, causal)
    return tuple(x.transpose(1, 2) for x in slopes)


BACKENDS = {
    "flash": Backend(_flash, _flash_backward),
    "cudnn": Backend(_cudnn, _cudnn_backward),
    "efficient": Backend(_efficient, _efficient_backward),
    **{
        f"flash_attn_{version}": Backend(
            partial(_flash_attn, version), partial(_flash_attn_backward, version)
        )
        for version in (2, 3, 4)
    },
    "math": Backend(exact(_math), exact(_math_backward)),
}
