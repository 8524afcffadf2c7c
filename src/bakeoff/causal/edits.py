"""The rows of tokens that a model is tried on, and the manners in which they are changed."""

import torch
from torch import Tensor, nn

from bakeoff.causal.copies import device_of

__all__ = ["ROUNDS", "Edits", "token_rows"]

ROUNDS = 4
_TOKENS, _PLACES = 2**18, 64  # one place after the other: the most tokens, but so many places in any case


def token_rows(
    model: nn.Module, ids: Tensor | None, vocab: int | None, length: int | None, samples: int, seed: int
) -> tuple[Tensor, int]:
    """The token rows [B >= 2, T] on the model's device, and the vocabulary's size."""
    config = getattr(model, "config", None)
    vocab = vocab or int(getattr(config, "vocab", 256))
    if samples < 1 or vocab < 2 or (length is not None and length < 2):
        raise ValueError(f"samples={samples}, vocab={vocab}, length={length} must be at least 1, 2 and 2")
    draws = torch.Generator().manual_seed(seed)
    if ids is None:
        length = length or min(64, int(getattr(config, "max_seq_len", 64)))
        rows = torch.randint(vocab, (samples, length), generator=draws)
    else:
        if ids.ndim != 2 or ids.is_floating_point() or ids.shape[0] < 1 or ids.shape[1] < 2:
            raise ValueError(f"ids are {ids.dtype} {tuple(ids.shape)}, expected integers [B >= 1, T >= 2]")
        rows = ids[:samples, :length].long().cpu()
        least, most = int(rows.min()), int(rows.max())
        if least < 0 or most >= vocab:
            held = least if least < 0 else most
            raise ValueError(f"ids hold {held}, outside of vocab={vocab}, 0 to {vocab - 1}: pass vocab=")
    if len(rows) == 1:  # a second row, to see whether the first depends on it
        rows = torch.cat([rows, torch.randint(vocab, rows.shape, generator=draws)])
    return rows.to(device_of(model)), vocab


class Edits:
    """Draws tokens, and rows that differ from `rows` [B, T] from a cut on."""

    def __init__(self, rows: Tensor, vocab: int, draws: torch.Generator) -> None:
        self.rows, self.vocab, self.draws = rows, vocab, draws
        tokens, counts = rows.unique(return_counts=True)
        self.frequent = tokens[counts.argsort(descending=True, stable=True)]

    def tokens(self, shape: torch.Size) -> Tensor:
        """Uniform tokens."""
        return torch.randint(self.vocab, shape, generator=self.draws).to(self.rows.device)

    def edited(self, number: int) -> tuple[Tensor, Tensor]:
        """Rows changed from their cuts [B] on, in the manner of round `number`, and the cuts.

        At the cut itself the first rounds put the most frequent tokens, one after another: a gate on the next
        token shows nowhere else.
        """
        rows, (count, length) = self.rows, self.rows.shape
        cuts = torch.randint(1, length, (count,), generator=self.draws)
        cuts[0] = (length - 1, 1, max(1, length // 2), max(1, length // 4))[number]
        cuts = cuts.to(rows.device)
        places = torch.arange(length, device=rows.device)
        chosen = places == cuts[:, None] if number == 1 else places >= cuts[:, None]
        new = self.tokens(rows.shape)
        if number == 2:  # what the data holds
            index = torch.randint(rows.numel(), rows.shape, generator=self.draws).to(rows.device)
            new = rows.flatten()[index]
        elif number == 3:
            new = torch.where(new[:, :1] < self.vocab // 2, 0, self.vocab - 1).expand_as(rows)
        if number < 3:
            turn = (number * count + torch.arange(count)) % len(self.frequent)
            new = torch.where(places == cuts[:, None], self.frequent[turn.to(rows.device)][:, None], new)
        edited = torch.where(chosen, new, rows)
        same = (places == cuts[:, None]) & (edited == rows)
        return torch.where(same, self._others(rows), edited), cuts

    def places(self) -> Tensor:
        """All places but the first; in rows longer than 512 tokens the multiples of a power of two."""
        length, step = self.rows.shape[1], 1
        while (length - 1) // step > max(_PLACES, _TOKENS // length):
            step *= 2
        return torch.arange(step, length, step, device=self.rows.device)

    def single(self, rows: Tensor, places: Tensor) -> Tensor:
        """`rows` [N, T], each with another token at its own one of `places` [N]."""
        chosen = torch.arange(rows.shape[1], device=rows.device) == places[:, None]
        return torch.where(chosen, self._others(rows), rows)

    def _others(self, rows: Tensor) -> Tensor:
        """Uniform tokens, none of which is that of `rows`."""
        step = 1 + torch.randint(self.vocab - 1, rows.shape, generator=self.draws).to(rows.device)
        return (rows + step) % self.vocab
