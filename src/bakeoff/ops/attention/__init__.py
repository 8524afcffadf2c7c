"""Softmax attention: full, causal, in windows, over packed documents, and to a static cache."""

import torch

from bakeoff.ops.attention.op import OP
from bakeoff.select import call

__all__ = ["OP", "attention"]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """y[b,t,h] = sum_s w[s] v[b,s,g(h)] with w = softmax over s of scale q[b,t,h] . k[b,s,g(h)].

    The queries are the *last* T of the S positions: query t stands at place S - T + t. With `causal` it sees
    no position behind its place, with `window` the last so many up to it. A query that sees nothing gives 0,
    without NaN, and has no gradient.

    Args:
        q: [B, T, H, D], float16, bfloat16, float32 or float64. Positions (rotary) are applied before.
        k: [B, S, Hk, D], H a multiple of Hk; head h of q uses kv head g(h) = h // (H / Hk).
        v: as k.
        causal: whether a query sees no later position.
        window: how many positions a query sees at most, its own included; with `causal`.
        scale: of the scores, above 0; by default D^-0.5.
        cu_seqlens: [documents + 1], int32 or int64, the borders of documents packed into one row (B = 1,
            T = S), not decreasing. None sees another; positions outside all give 0. Values must be finite:
            plain PyTorch multiplies what isn't seen by 0, and a NaN or an infinity stays one.
        lengths: [B], int32 or int64, on the device: how many of the S positions are valid, as in a cache of
            fixed size; the queries are the last T of these. More than S count as S. What lies behind must be
            finite, as zeros are. It is never read on the host, so that a CUDA graph may hold the call.
        impl: the candidate to run; by default the selected one.

    Returns:
        y [B, T, H, D] in q's dtype.

    Raises:
        ValueError: shapes, a window or a scale that don't fit; the message says what to pass.
        TypeError: dtypes that don't fit, a window or a scale that is no number.
        bakeoff.errors.Unsupported: `impl` can't take these arguments; the message gives every reason.

    Source: Vaswani et al. 2017, section 3.2; shared heads: Ainslie et al. 2023; rows in parts for decoding:
    Dao et al. 2023 (Flash-Decoding).

    Example:
        >>> q, k, v = torch.randn(3, 2, 8, 4, 16)
        >>> y = attention(q, k, v, causal=True)
        >>> last = attention(q[:, -1:], k, v, causal=True)  # the queries are the last of the positions
        >>> torch.allclose(last, y[:, -1:], atol=1e-6)
        True
        >>> held = torch.full((2,), 5)  # of a cache with room for 8
        >>> torch.allclose(attention(q[:, 4:5], k, v, lengths=held), y[:, 4:5], atol=1e-6)
        True
    """
    return call(  # type: ignore[no-any-return]
        OP, q, k, v, causal, window, scale, cu_seqlens, lengths, impl=impl
    )
