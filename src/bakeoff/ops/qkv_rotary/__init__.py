"""Queries, keys and values from their joint projection: rotated, their heads normalised if asked for."""

from torch import Tensor

from bakeoff.ops.qkv_rotary.op import OP
from bakeoff.select import call

__all__ = ["OP", "qkv_rotary"]


def qkv_rotary(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    kv_heads: int | None = None,
    interleaved: bool = False,
    position_ids: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Takes a joint projection apart: heads of queries and keys rotated, as by `rotary`, and of values as
    they are.

    Of a token's H + 2 Hk heads, the first H are queries, the next Hk keys, the last Hk values.
    A pair (a, b) of a query's or a key's first R elements at position p becomes
    (a cos[p, i] - b sin[p, i], b cos[p, i] + a sin[p, i]), the i-th pair being elements (i, i + R/2), or
    (2 i, 2 i + 1) with `interleaved`. With `q_weight` and `k_weight` (QK-norm) each of these heads x is first
    x / sqrt(mean(x^2) + eps) * (offset + weight), rounded once, after the rotation.

    It equals `rotary` of two parts of qkv. What differs is the gradient: the Triton candidate makes that of
    qkv in one pass, where three parts' gradients would be written, then read and written again to join them.

    Args:
        qkv: [B, T, H + 2 Hk, D], float16, bfloat16, float32 or float64: what a linear layer gives, with its
            last dimension cut into heads, ``torch.unflatten(linear(x), -1, (-1, D))``. A view is taken as it
            is, without a copy, while its last dimension is contiguous.
        cos: [S, R/2] with R <= D, S >= T; float32 or another floating dtype of 16 bits or more. Token t takes
            row t, so a table made for the longest sequence serves every shorter one, but see `position_ids`.
        sin: as `cos`.
        kv_heads: Hk, at least 1; None means as many as queries have.
        interleaved: pairs are neighbours (GPT-J) instead of halves (GPT-NeoX, Llama).
        position_ids: int32 or int64, [T] or [B, T]: the row of each token. Values are not checked, which
            would stop the GPU; a token whose id is outside 0..S-1 becomes NaN in the rotated dimensions.
        q_weight: [D], of the queries' heads, any floating dtype of 16 bits or more, also another than qkv's.
            Given with `k_weight`, or neither.
        k_weight: [D], of the keys' heads, likewise.
        eps: added to the mean square, >= 0. Without weights it has no meaning.
        offset: added to the weights; 1 is Gemma's form. Needs weights.
        impl: the candidate to run; by default the selected one.

    Returns:
        (q', k', v) of qkv's dtype: q' [B, T, H, D] and k' [B, T, Hk, D], newly allocated and dense, and
        v [B, T, Hk, D], a view of qkv: it keeps qkv's memory, and nobody should write to it.

    Raises:
        ValueError: shapes that don't fit; the message says what was expected.
        TypeError: dtypes that don't fit.
        bakeoff.errors.Unsupported: `impl` can't take these arguments; the message gives every reason.

    Source: Su et al. 2021, RoFormer, section 3.4. Of QK-norm: Henry et al. 2020, Query-Key Normalization for
    Transformers, in the form with a learned weight a dimension (Dehghani et al. 2023, section 2, with rms in
    place of layer norm).

    Example:
        >>> import torch
        >>> from bakeoff.ops.rotary import rotary, rotary_tables
        >>> qkv = torch.randn(2, 16, 8 + 2 + 2, 64)
        >>> cos, sin = rotary_tables(16, 64)
        >>> q, k, v = qkv_rotary(qkv, cos, sin, kv_heads=2)
        >>> q.shape, k.shape, v.shape
        (torch.Size([2, 16, 8, 64]), torch.Size([2, 16, 2, 64]), torch.Size([2, 16, 2, 64]))
        >>> parts = qkv.split((8, 2, 2), dim=2)
        >>> bool(torch.allclose(q, rotary(parts[0], parts[1], cos, sin)[0])), bool((v == parts[2]).all())
        (True, True)
    """
    return call(  # type: ignore[no-any-return]
        OP, qkv, cos, sin, kv_heads, interleaved, position_ids, q_weight, k_weight, eps, offset, impl=impl
    )
