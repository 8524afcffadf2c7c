"""Rotary position embedding of queries and keys in one pass, their heads normalised first if asked for."""

import torch

from bakeoff.ops.rotary.op import OP
from bakeoff.ops.rotary.reference import rotary_tables
from bakeoff.select import call

__all__ = ["OP", "rotary", "rotary_tables"]


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    position_ids: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates the first R dimensions of every head of `q` and `k` by its position.

    A pair (a, b) at position p becomes (a cos[p, i] - b sin[p, i], b cos[p, i] + a sin[p, i]), the i-th pair
    being dimensions (i, i + R/2), or (2 i, 2 i + 1) with `interleaved`. Dimensions from R on pass through
    unchanged. All heads of a position turn alike, so that a query and a key meet at the angle of their
    distance.

    With `q_weight` and `k_weight` (QK-norm) each head x of q and of k is first
    x / sqrt(mean(x^2) + eps) * (offset + weight), over all of its D dimensions, and then rotated: in one pass
    over both tensors, rounded once.

    Args:
        q: [B, T, H, D], float16, bfloat16, float32 or float64. Views are taken as they are, without a copy,
            while their last dimension is contiguous: slices of a fused projection, a transposed [B, H, T, D].
        k: [B, T, Hk, D] of the same dtype; Hk may differ from H (grouped queries).
        cos: [S, R/2] with R <= D, S >= T; float32 or another floating dtype of 16 bits or more. Token t takes
            row t, so a table made for the longest sequence serves every shorter one, but see `position_ids`.
        sin: as `cos`.
        interleaved: pairs are neighbours (GPT-J) instead of halves (GPT-NeoX, Llama).
        position_ids: int32 or int64, [T] or [B, T]: the row of each token. Values are not checked, which
            would stop the GPU; a token whose id is outside 0..S-1 becomes NaN in the rotated dimensions.
        q_weight: [D], of q's heads, any floating dtype of 16 bits or more, also another than q's. Given with
            `k_weight`, or neither.
        k_weight: [D], of k's heads, likewise.
        eps: added to the mean square, >= 0. Without weights it has no meaning.
        offset: added to the weights; 1 is Gemma's form. Needs weights.
        impl: the candidate to run; by default the selected one.

    Returns:
        (q', k') of the arguments' shapes and dtypes, newly allocated and dense. The Triton candidate gives
        back a transposed [B, H, T, D] for one; everything else lies in the order [B, T, H, D].

    Raises:
        ValueError: shapes that don't fit; the message says what was expected.
        TypeError: dtypes that don't fit.
        bakeoff.errors.Unsupported: `impl` can't take these arguments; the message gives every reason.

    Source: Su et al. 2021, RoFormer, section 3.4. Of QK-norm: Henry et al. 2020, Query-Key Normalization for
    Transformers, in the form with a learned weight a dimension (Dehghani et al. 2023, section 2, with rms in
    place of layer norm).

    Example:
        >>> import torch
        >>> q, k = torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64)
        >>> cos, sin = rotary_tables(16, 64)
        >>> turned, _ = rotary(q, k, cos, sin)
        >>> bool(torch.allclose(turned.norm(dim=-1), q.norm(dim=-1)))
        True
        >>> qn, _ = rotary(q, k, cos, sin, q_weight=torch.ones(64), k_weight=torch.ones(64), eps=0.0)
        >>> bool(torch.allclose(qn.norm(dim=-1), torch.tensor(8.0)))
        True
    """
    return call(  # type: ignore[no-any-return]
        OP, q, k, cos, sin, interleaved, position_ids, q_weight, k_weight, eps, offset, impl=impl
    )
