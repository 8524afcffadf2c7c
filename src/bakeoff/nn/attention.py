"""Causal attention, of whole rows and of rows that go on.

Shapes: B batch, T time, H heads, K key/value heads, E the width of a head, N keys that are held.
"""

import math

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from bakeoff.ops.attention import attention
from bakeoff.ops.qkv_rotary import qkv_rotary
from bakeoff.ops.rotary_append import rotary_append_

__all__ = ["KeyValues", "QKNorm", "attend", "attend_one"]


class KeyValues:
    """Keys and values of the positions seen so far, per layer [B, K, capacity, E], and their count."""

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self.at: Tensor | None = None
        """Once settled: where the next position goes, [1], on the device."""
        self.lengths: Tensor | None = None
        """Once settled: how many positions each row holds, with the one that comes now, [B]."""

    @property
    def rows(self) -> int | None:
        """How many rows it holds; None while it is empty. Not every layer need attend."""
        return next((pair[0].shape[0] for pair in self.layers if pair is not None), None)

    def tensors(self) -> list[Tensor]:
        """All that it holds, each of which is written in place."""
        return [tensor for pair in self.layers if pair is not None for tensor in pair]

    def settle(self, at: Tensor) -> None:
        """From here on one position a call, whose place is `at` [1]: shapes and addresses stay as they
        are."""
        if self.rows is not None:
            self.at = at

    def begin_step(self) -> None:
        """Lets the position that comes now be seen; once a step, before the first layer."""
        if self.at is not None and self.rows is not None:
            self.lengths = self.at.expand(self.rows) + 1

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k, v [B, K, T, E] behind `length`; returns all keys and values up to there, once settled all
        places.

        `length` itself moves once per pass, after the last layer.
        """
        held = self.layers[layer]
        if held is None:
            shape = (k.shape[0], k.shape[1], self.capacity, k.shape[3])
            with torch.inference_mode(False):  # a cache that begins under it may go on without
                held = k.new_zeros(shape), v.new_zeros(shape)
            self.layers[layer] = held
        if self.at is not None:
            for kept, new in zip(held, (k, v), strict=True):
                kept.index_copy_(2, self.at, new)
            return held
        end = self.length + k.shape[2]
        if end > self.capacity:
            raise ValueError(f"{end} positions are more than the cache's capacity of {self.capacity}")
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

    def append(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """One position, q [B, 1, H, E] and k, v [B, 1, K, E], rotated and stored in one pass: q' and all
        places of keys and values [B, K, capacity, E]. None before this is settled, where gradients are
        recorded, on the CPU, and for torch.compile, which traces nothing that writes in place.
        """
        held = self.layers[layer]
        recorded = torch.is_grad_enabled() and q.requires_grad
        if self.at is None or held is None or recorded or not q.is_cuda or is_compiling():
            return None
        return rotary_append_(q, k, v, *held, cos, sin, self.at), *held


class QKNorm(nn.Module):
    """The weights [E] by which heads of queries and of keys are scaled once they are normalised; they start
    at 1."""

    def __init__(self, head_dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.q = nn.Parameter(torch.empty(head_dim))
        self.k = nn.Parameter(torch.empty(head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones."""
        nn.init.ones_(self.q)
        nn.init.ones_(self.k)


def attend(
    qkv: Tensor, kv_heads: int, cos: Tensor, sin: Tensor, cache: KeyValues | None, layer: int,
    norm: QKNorm | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention [B, T, H E] of a joint projection qkv [B, T, H + 2 K, E], K being `kv_heads`: of its
    queries to its keys and values, and to what `cache` holds of this layer; cos, sin [T, E/2] of these
    positions. With a `norm`, heads of queries and keys are normalised first."""
    lengths = None if cache is None else cache.lengths
    if cache is not None and norm is None:
        q, k, v = qkv.split((qkv.shape[2] - 2 * kv_heads, kv_heads, kv_heads), dim=2)
        appended = cache.append(layer, q, k, v, cos, sin)
        if appended is not None:
            q, k, v = appended[0], *(x.transpose(1, 2) for x in appended[1:])
            return attention(q, k, v, causal=True, lengths=lengths).flatten(2)
    if norm is None:
        q, k, v = qkv_rotary(qkv, cos, sin, kv_heads=kv_heads)
    else:
        q, k, v = qkv_rotary(qkv, cos, sin, kv_heads=kv_heads, q_weight=norm.q, k_weight=norm.k, eps=norm.eps)
    if cache is not None:
        k, v = (x.transpose(1, 2) for x in cache.extend(layer, k.transpose(1, 2), v.transpose(1, 2)))
    return attention(q, k, v, causal=True, lengths=lengths).flatten(2)


def attend_one(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention [B, 1, H E] of one position q [B, 1, H, E] to k, v [B, K, N, E]; heads share them in groups.

    `bias`, [N] or [K, N], is added to the scores. Two products and a softmax, scores in float32 or wider: for
    one query PyTorch's attention kernels compute a tile of them.
    """
    B, _, H, E = q.shape
    K, N = k.shape[1:3]
    grouped, keys = q.reshape(B * K, H // K, E), k.flatten(0, 1).mT
    if q.dtype in (torch.float32, torch.float64):
        scores = torch.bmm(grouped, keys)
    elif q.is_cuda:
        scores = torch.bmm(grouped, keys, out_dtype=torch.float32)
    else:
        scores = torch.bmm(grouped.float(), keys.float())
    scores = torch.add(bias.view(-1, 1, N), scores.view(B, K, -1, N), alpha=1 / math.sqrt(E))
    weights = scores.softmax(-1).to(v.dtype).flatten(0, 1)
    return torch.bmm(weights, v.flatten(0, 1)).view(B, 1, H * E)
