"""rotary_append_ in plain PyTorch."""

import torch
from torch import Tensor

from bakeoff.ops.rotary.reference import reference as rotary

__all__ = ["eager"]


@torch.no_grad()
def eager(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Tensor, sin: Tensor, at: Tensor
) -> Tensor:
    """A rotation, and a copy into each cache."""
    turned, k = rotary(q, k, cos, sin)
    places = at.long()
    if q.shape[1] != 1:
        places = places + torch.arange(q.shape[1], device=at.device)
    k_cache.index_copy_(2, places, k.transpose(1, 2))
    v_cache.index_copy_(2, places, v.transpose(1, 2))
    return turned
