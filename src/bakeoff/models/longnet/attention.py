"""Attention of LongNet: over whole rows, over rows that ranks share, and behind a cache."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bakeoff.models.checks import check_no_recomputing
from bakeoff.models.language import Block
from bakeoff.models.longnet.cache import Cache, Slots
from bakeoff.models.longnet.shape import Shape
from bakeoff.nn import attend_one
from bakeoff.ops import dilated_attention, qkv_rotary
from bakeoff.ops.dilated_attention import phase_table

__all__ = ["Attention", "blocks_of"]


class Attention(nn.Module):
    """Dilated attention with rotary positions; keys and values shared by groups of heads."""

    def __init__(self, config: Shape, layer: int, causal: bool) -> None:
        super().__init__()
        self.layer, self.causal = layer, causal
        self.heads, self.kv_heads, self.head_dim = config.heads, config.n_kv_heads, config.head_dim
        self.segments, self.rates = config.segments, config.rates
        self.attends: Callable[..., Any] = dilated_attention
        self.phases = phase_table(config.rates, self.kv_heads, layer)
        self.qkv = nn.Linear(config.d_model, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        """x [B, T, D]; cos, sin [T, at most E/2] of these positions; returns [B, T, D]."""
        check_no_recomputing(cache)
        qkv = torch.unflatten(self.qkv(x), -1, (-1, self.head_dim))
        q, k, v = qkv_rotary(qkv, cos, sin, kv_heads=self.kv_heads)
        if cache is not None and cache.slots is not None:
            return self.out(self._step(q, k, v, cache.slots))  # type: ignore[no-any-return]
        y = self._behind(q, k, v, cache) if cache is not None and cache.length else self._attend(q, k, v)
        if cache is not None:
            self._keep(k, v, cache)
        out: Tensor = self.out(y.flatten(2))
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = self.attends(q, k, v, self.segments, self.rates, causal=self.causal, phase=self.phases)
        assert isinstance(y, Tensor)
        return y

    def _step(self, q: Tensor, k: Tensor, v: Tensor, slots: Slots) -> Tensor:
        """Attention [B, 1, H E] of one position to itself and to what `slots` holds, which then holds it."""
        held = slots.layers[self.layer]
        for part, new in zip(held, (k, v), strict=True):
            part[:, :, :1] = new.transpose(1, 2)
        y = attend_one(q, held[0], held[1], slots.counts[self.layer])
        seen = slots.seen[self.layer].expand(-1, self.heads // self.kv_heads * self.head_dim).flatten()
        old = held.index_select(3, slots.rows)
        chosen = slots.chosen[self.layer][..., None]
        held.index_copy_(3, slots.rows, torch.where(chosen, held[:, :, :, :1], old))
        return torch.where(seen, y, 0.0)

    def _branches(self, device: torch.device) -> Iterator[tuple[int, int, Tensor]]:
        """Segment, rate and phases [K, 1] of each branch, without a copy from the host."""
        first = self.layer * self.kv_heads
        head = torch.arange(first, first + self.kv_heads, device=device)[:, None]
        for segment, rate in zip(self.segments, self.rates, strict=True):
            yield segment, rate, head % rate

    def _behind(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> Tensor:
        """Attention [B, T, H, E] to what the cache holds and to these: one softmax, in which a key counts as
        often as branches show it."""
        start, T = cache.length, q.shape[1]
        t = torch.arange(start, start + T, device=q.device)
        among = torch.zeros((), dtype=q.dtype, device=q.device)
        counts, keys, values = [], [k.transpose(1, 2)], [v.transpose(1, 2)]
        for (segment, rate, phase), held in zip(
            self._branches(q.device), cache.layers[self.layer], strict=True
        ):
            begin = start // segment * segment
            selected = t % segment % rate == phase  # [K, T]
            same = (t // segment == (t // segment)[:, None]) & (t <= t[:, None])
            among = among + (selected[:, :, None] & selected[:, None] & same).to(q.dtype)
            rows = -(-(start - begin) // rate)
            u = begin + phase + rate * torch.arange(rows, device=q.device)  # [K, rows]
            asking = selected & (t < begin + segment)
            counts.append((asking[:, :, None] & (u < start)[:, None]).to(q.dtype))
            for kept, part in zip((keys, values), held, strict=True):
                kept.append(part[:, :, :rows])
        return self._weighted(q, torch.cat(keys, 2), torch.cat(values, 2), torch.cat([among, *counts], -1))

    def _weighted(self, q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> Tensor:
        """[B, T, H, E] of keys [B, K, n, E] that count so often, [K, T, n]; 0 where none does."""
        B, T, H, _ = q.shape
        G = H // self.kv_heads
        seen = (counts > 0).any(-1, keepdim=True)
        bias = torch.where(seen, counts, 1.0).log().to(q.dtype).repeat(1, G, 1)
        grouped = q.unflatten(2, (-1, G)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, K, G T, E]
        y = F.scaled_dot_product_attention(grouped, k, v, bias[None])
        y = torch.where(seen.repeat(1, G, 1), y, 0.0)
        return y.view(B, -1, G, T, q.shape[3]).permute(0, 3, 1, 2, 4).reshape(B, T, H, -1)

    def _keep(self, k: Tensor, v: Tensor, cache: Cache) -> None:
        """Stores those of k, v [B, T, K, E] that a branch selects in the segment of the next position."""
        start, end = cache.length, cache.length + k.shape[1]
        layer, limit = cache.layers[self.layer], cache.config.max_seq_len
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        head = torch.arange(self.kv_heads, device=k.device)[:, None]
        for branch, (segment, rate, phase) in enumerate(self._branches(k.device)):
            if len(layer) == branch:
                shape = (k.shape[0], self.kv_heads, -(-min(segment, limit) // rate), self.head_dim)
                with torch.inference_mode(False):  # a cache that begins under it may go on without
                    layer.append((k.new_zeros(shape), v.new_zeros(shape)))
            begin = end // segment * segment
            first = max(begin, start)
            low, high = (first - begin) // rate, -(-(end - begin) // rate)
            u = begin + phase + rate * torch.arange(low, high, device=k.device)  # [K, rows]
            new, place = ((u >= first) & (u < end))[..., None], (u - start).clamp(0, k.shape[2] - 1)
            held = layer[branch]
            news = (
                torch.where(new, x[:, head, place], part[:, :, low:high])
                for x, part in zip((k, v), held, strict=True)
            )
            layer[branch] = _put(held[0], next(news), low), _put(held[1], next(news), low)


def blocks_of(config: Shape, causal: bool) -> nn.ModuleList:
    """The layers, in which heads select other tokens each."""
    layers = range(config.layers)
    return nn.ModuleList(Block(config, attention=Attention(config, layer, causal)) for layer in layers)


def _put(held: Tensor, new: Tensor, low: int) -> Tensor:
    """`held` with `new` as its rows from `low` on."""
    high = low + new.shape[2]
    if held.requires_grad or new.requires_grad:  # what a backward will read stays as it is
        return held.slice_scatter(new, 2, low, high)
    held[:, :, low:high] = new
    return held
