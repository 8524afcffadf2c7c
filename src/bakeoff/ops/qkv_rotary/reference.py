"""The definition of `qkv_rotary` in plain PyTorch."""

from torch import Tensor

from bakeoff.ops.rotary.reference import reference as rotary

__all__ = ["counts", "parts", "reference"]


def reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_heads: int | None = None,
    interleaved: bool = False,
    position_ids: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`rotary` of the heads of queries and of keys, and those of values as they are."""
    q, k, v = parts(qkv, kv_heads)
    q, k = rotary(q, k, cos, sin, interleaved, position_ids, q_weight, k_weight, eps, offset)
    return q, k, v


def parts(qkv: Tensor, kv_heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, T, H, D], keys and values [B, T, Hk, D] of qkv [B, T, H + 2 Hk, D], in its memory."""
    H, K = counts(qkv.shape[2], kv_heads)
    q, k, v = qkv.split((H, K, K), dim=2)
    return q, k, v


def counts(heads: int, kv_heads: int | None) -> tuple[int, int]:
    """H and Hk of H + 2 Hk heads."""
    K = heads // 3 if kv_heads is None else kv_heads
    return heads - 2 * K, K
