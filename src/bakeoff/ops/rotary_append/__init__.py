"""The tokens that a cache of keys and values grows by: rotated, and stored where they belong, in one pass."""

import torch
from torch import Tensor

from bakeoff.ops.rotary_append.op import OP
from bakeoff.select import call

__all__ = ["OP", "rotary_append_"]


def rotary_append_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    at: Tensor,
    *,
    impl: str | None = None,
) -> Tensor:
    """q' = rotary(q), in place k_cache[:, :, at + t] = rotary(k)[:, t], v_cache[:, :, at + t] = v[:, t].

    What a step of decoding does between the projection and attention. `at` stays on the device, so that
    the step may be a CUDA graph.

    Args:
        q: [B, T, H, D] queries of T tokens, float16, bfloat16, float32 or float64; views of a fused
            projection are taken as they are.
        k: [B, T, K, D] keys of the same dtype.
        v: [B, T, K, D] values.
        k_cache: [B, K, S, D] of the same dtype, S >= T; written.
        v_cache: as k_cache.
        cos: [T or more, R/2] with R <= D, the rows of these tokens' positions, as of `rotary`.
        sin: as cos.
        at: [1], int32 or int64: the place of the first token. Its value is not checked, which would wait for
            the device: where a token has no room the kernel stores nothing, and PyTorch stops the device.
        impl: the candidate to run; by default the selected one.

    Returns:
        q', [B, T, H, D], newly allocated and dense.

    Raises:
        RuntimeError: an argument wants a gradient, and gradients are recorded.
        ValueError: shapes that don't fit. TypeError: dtypes that don't fit.
        bakeoff.errors.Unsupported: `impl` can't take these arguments; the message gives every reason.

    Source: Su et al. 2021, RoFormer, section 3.4, for the rotation.

    Example:
        >>> import torch
        >>> from bakeoff.ops import rotary_append_
        >>> from bakeoff.ops.rotary import rotary_tables
        >>> q, k, v = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 1, 4), torch.ones(1, 1, 1, 4)
        >>> k_cache, v_cache = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4)
        >>> cos, sin = (table[1:] for table in rotary_tables(2, 4))
        >>> rotary_append_(q, k, v, k_cache, v_cache, cos, sin, torch.tensor([1])).shape
        torch.Size([1, 1, 2, 4])
        >>> v_cache[0, 0, :, 0]
        tensor([0., 1., 0.])
    """
    given = (q, k, v, k_cache, v_cache, cos, sin)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in given):
        raise RuntimeError(
            "rotary_append_ carries no gradients: use rotary, or call it under torch.no_grad()"
        )
    with torch.no_grad():
        turned: Tensor = call(OP, q, k, v, k_cache, v_cache, cos, sin, at, impl=impl)
    # Autograd must refuse what was saved of old values, and knows nothing of kernels that write by address.
    torch.autograd.graph.increment_version([t for t in (k_cache, v_cache) if not t.is_inference()])
    return turned
