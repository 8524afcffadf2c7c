"""Causal attention, of whole rows and of rows that go on.

Shapes: B batch, T time, H heads, K key/value heads, E the width of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from bakeoff.ops.rotary import rotary

__all__ = ["KeyValues", "attend"]


class KeyValues:
    """Keys and values of the positions seen so far, per layer [B, K, capacity, E], and their count."""

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * layers

    @property
    def rows(self) -> int | None:
        """How many rows it holds; None while it is empty."""
        held = self.layers[0] if self.layers else None
        return None if held is None else held[0].shape[0]

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k, v [B, K, T, E] behind `length`; returns all keys and values up to there.

        `length` itself moves once per pass, after the last layer.
        """
        held = self.layers[layer]
        if held is None:
            shape = (k.shape[0], k.shape[1], self.capacity, k.shape[3])
            with torch.inference_mode(False):  # a cache that begins under it may go on without
                held = k.new_empty(shape), v.new_empty(shape)
        end = self.length + k.shape[2]
        if any(tensor.requires_grad for tensor in (k, v, *held)):  # what a backward will read stays as it is
            held = (
                held[0].slice_scatter(k, 2, self.length, end),
                held[1].slice_scatter(v, 2, self.length, end),
            )
        else:
            for kept, new in zip(held, (k, v), strict=True):
                kept[:, :, self.length : end] = new
        self.layers[layer] = held
        return held[0][:, :, :end], held[1][:, :, :end]


def attend(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: KeyValues | None, layer: int
) -> Tensor:
    """Causal attention [B, T, H E] of q [B, T, H, E] to k, v [B, T, K, E] and to what `cache` holds of this
    layer; cos, sin [T, E/2] of these positions."""
    q, k = rotary(q, k, cos, sin)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    t = q.shape[2]
    mask, prefix = None, cache.length if cache is not None else 0
    if cache is not None:
        k, v = cache.extend(layer, k, v)
        if prefix and t > 1:  # rows behind a prefix see it and what precedes them
            mask = torch.ones(t, prefix + t, dtype=torch.bool, device=q.device).tril(prefix)
    shared = k.shape[1] != q.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not prefix, enable_gqa=shared)
    return y.transpose(1, 2).flatten(2)
