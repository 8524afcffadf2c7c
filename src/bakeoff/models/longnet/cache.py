"""What decoding remembers of a LongNetLM."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bakeoff.models.caching import DecodeCache
from bakeoff.models.longnet.shape import Config

__all__ = ["Cache", "Slots"]


class Cache(DecodeCache):
    """What decoding remembers of a `LongNetLM` of this shape: of each layer and branch the keys and values
    that the branch selects in the segment it is in, and no others.

    At most the sum over branches of segment / rate tokens a head. A branch's row j is, for a head of phase s,
    the segment's token s + j * rate.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.layers: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(config.layers)]
        self.slots: Slots | None = None
        """Once settled, in place of `layers`."""

    @property
    def rows(self) -> int | None:
        """How many rows it holds; None while it is empty."""
        if self.slots is not None:
            return self.slots.layers[0].shape[1]
        return self.layers[0][0][0].shape[0] if self.layers[0] else None

    def buffers(self) -> list[Tensor]:
        if self.slots is not None:
            return self.slots.layers
        return [tensor for layer in self.layers for pair in layer for tensor in pair]

    def widen(self, model: Any, at: Tensor) -> None:
        self.slots = Slots(self.config, self.layers)
        self.layers = []

    def begin_step(self, at: Tensor) -> None:
        assert self.slots is not None
        self.slots.begin_step(at)


class Slots:
    """The keys and values of a settled cache, per layer [2, B, K, N, E]: slot 0 is of the present position,
    the next ones hold the branches' rows one behind the other, the last ones, up to a multiple of 16, none.

    What of it a position sees is the same for all layers but for their heads' phases, so it is found once.
    """

    def __init__(self, config: Config, layers: list[list[tuple[Tensor, Tensor]]]) -> None:
        device, K = layers[0][0][0].device, config.n_kv_heads
        widths = [held[0].shape[2] for held in layers[0]]
        starts = [1 + sum(widths[:branch]) for branch in range(len(widths))]
        spare = -(1 + sum(widths)) % 16
        self.layers = [
            F.pad(
                torch.stack([torch.cat(parts, dim=2) for parts in zip(*layer, strict=True)]), (0, 0, 1, spare)
            )
            for layer in layers
        ]
        branch = [0, *(b for b, width in enumerate(widths) for _ in range(width)), *[0] * spare]
        row = [0, *(row for width in widths for row in range(width)), *[0] * spare]
        none = [True, *[False] * sum(widths), *[True] * spare]
        self._branch = torch.tensor(branch, device=device)
        self._none = torch.tensor(none, device=device)
        self._segments = torch.tensor(config.segments, device=device)
        self._rates = torch.tensor(config.rates, device=device)
        self._starts = torch.tensor(starts, device=device)
        head = torch.arange(config.layers * K, device=device).view(-1, K, 1)
        self._phases = head % self._rates  # [layers, K, branches]
        rate = self._rates[self._branch]
        self._behind = head % rate + rate * torch.tensor(row, device=device)  # of a slot behind its segment's
        self.rows = self.chosen = self.seen = self.counts = self._starts

    def begin_step(self, at: Tensor) -> None:
        """Finds, for the position behind `at` [1] others: the branches' rows that it goes to, [branches];
        which heads choose it, [layers, K, branches]; whether any branch does, [layers, K, 1]; and the
        logarithm of how many show each slot to it, [layers, K, N]."""
        inside = at % self._segments
        self.rows = self._starts + inside // self._rates
        self.chosen = inside % self._rates == self._phases
        shown = self.chosen.sum(-1, keepdim=True)
        self.seen = shown > 0
        earlier = (at - inside)[self._branch] + self._behind < at
        counts = (self.chosen[..., self._branch] & earlier).masked_fill(self._none, False).to(shown.dtype)
        counts[..., :1] = shown
        wide = torch.promote_types(self.layers[0].dtype, torch.float32)
        self.counts = torch.where(self.seen, counts, 1).to(wide).log()
