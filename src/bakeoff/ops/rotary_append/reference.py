"""The definition of `rotary_append_` in plain PyTorch."""

import torch
from torch import Tensor

from bakeoff.ops.rotary.reference import reference as rotary

__all__ = ["reference"]


def reference(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Tensor, sin: Tensor, at: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What k_cache and v_cache hold after the call, and q': token t is turned by row t of the tables and
    stands at place at + t of the caches."""
    turned_q, turned_k = rotary(q, k, cos, sin)
    return _with(k_cache, turned_k, at), _with(v_cache, v, at), turned_q


def _with(cache: Tensor, x: Tensor, at: Tensor) -> Tensor:
    """cache [B, K, S, D] with x [B, T, K, D] from place `at` on."""
    T, S = x.shape[1], cache.shape[2]
    if T == 0 or S == 0:
        return cache.clone()
    token = torch.arange(S, device=cache.device) - at
    new = x.transpose(1, 2).index_select(2, token.clamp(0, T - 1))
    return torch.where(((token >= 0) & (token < T))[:, None], new, cache)
