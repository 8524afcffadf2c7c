"""The rows of tokens that a model is tried on, and the manners in which they are changed."""

import torch
from torch import Tensor, nn

from bakeoff.causal.copies import device_of

__all__ = ["ROUNDS", "Edits", "token_rows"]

ROUNDS = 4
_TOKENS, _PLACES = 2**18, 64  # one place after the other: the most tokens, but so many places in any case
_FEW = 32  # places in training mode, which keeps what a backward needs
_DRAWN, _LONGER = 64, 4  # positions of rows drawn; the longer row has at most this many times as many


def token_rows(
    model: nn.Module, ids: Tensor | None, vocab: int | None, length: int | None, samples: int, seed: int
) -> tuple[Tensor, Tensor, int]:
    """The token rows [B >= 2, T] on the model's device, up to two longer ones, and the vocabulary's size."""
    vocab, longest = vocab or _vocab(model), _longest(model)
    if samples < 1 or vocab < 2 or (length is not None and length < 2):
        raise ValueError(f"samples={samples}, vocab={vocab}, length={length} must be at least 1, 2 and 2")
    draws = torch.Generator().manual_seed(seed)
    device = device_of(model) or (torch.device("cpu") if ids is None else ids.device)
    if ids is None:
        length = length or min(_DRAWN, longest or _DRAWN)
        wide = torch.randint(vocab, (samples, length), generator=draws)
    else:
        if ids.ndim != 2 or ids.is_floating_point() or ids.shape[0] < 1 or ids.shape[1] < 2:
            raise ValueError(f"ids are {ids.dtype} {tuple(ids.shape)}, expected integers [B >= 1, T >= 2]")
        wide = ids[:samples].long().cpu().clone()
        least, most = int(wide.min()), int(wide.max())
        if least < 0 or most >= vocab:
            held = least if least < 0 else most
            raise ValueError(f"ids hold {held}, outside of vocab={vocab}, 0 to {vocab - 1}: pass vocab=")
    if len(wide) == 1:  # a second row, to see whether the first depends on it
        wide = torch.cat([wide, torch.randint(vocab, wide.shape, generator=draws)])
    rows = wide[:, :length]
    # A place beyond a table of positions would end the process's use of a GPU: only where the limit is known.
    longest = longest or (wide.shape[1] if device.type == "cuda" else _LONGER * rows.shape[1])
    wide = wide[:2].repeat(1, _LONGER)[:, : min(longest, _LONGER * rows.shape[1])]
    return rows.to(device), wide.to(device), vocab


def _vocab(model: nn.Module) -> int:
    """By the configuration; else the first embedding as large as a linear layer, or the first; else 256."""
    for place in (getattr(model, "config", None), model):
        for name in ("vocab", "vocab_size", "n_vocab", "num_tokens"):
            if isinstance(found := getattr(place, name, None), int):
                return found
    tables = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)]
    heads = {part.out_features for part in model.modules() if isinstance(part, nn.Linear)}
    return next((size for size in tables if size in heads), next(iter(tables), 256))


def _longest(model: nn.Module) -> int | None:
    """The most positions that the configuration allows; None where it doesn't say."""
    for name in (
        "max_seq_len",
        "block_size",
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "context_length",
    ):
        if isinstance(found := getattr(getattr(model, "config", None), name, None), int):
            return found
    return None


class Edits:
    """Draws tokens, and rows that differ from `rows` [B, T] from a cut on."""

    def __init__(self, rows: Tensor, vocab: int, draws: torch.Generator) -> None:
        self.rows, self.vocab, self.draws = rows, vocab, draws
        tokens, counts = rows.unique(return_counts=True)
        self.frequent = tokens[counts.argsort(descending=True, stable=True)]

    def tokens(self, shape: torch.Size) -> Tensor:
        """Uniform tokens."""
        return torch.randint(self.vocab, shape, generator=self.draws).to(self.rows.device)

    def edited(self, rows: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """`rows` [B, T] changed from their cuts [B] on, in the manner of round `number`, and the cuts.

        At the cut itself the first rounds put the most frequent tokens, one after another: a gate on the next
        token shows nowhere else.
        """
        count, length = rows.shape
        cuts = torch.randint(1, length, (count,), generator=self.draws)
        cuts[0] = (length - 1, 1, max(1, length // 2), max(1, length // 4))[number]
        cuts = cuts.to(rows.device)
        places = torch.arange(length, device=rows.device)
        chosen = places == cuts[:, None] if number == 1 else places >= cuts[:, None]
        new = self.tokens(rows.shape)
        if number == 2:  # what the data holds
            index = torch.randint(self.rows.numel(), rows.shape, generator=self.draws).to(rows.device)
            new = self.rows.flatten()[index]
        elif number == 3:
            ends = torch.arange(count, device=rows.device) % 2 * (self.vocab - 1)  # where padding often is
            new = ends[:, None].expand_as(rows)
        if number < 3:
            turn = (number * count + torch.arange(count)) % len(self.frequent)
            new = torch.where(places == cuts[:, None], self.frequent[turn.to(rows.device)][:, None], new)
        edited = torch.where(chosen, new, rows)
        same = (places == cuts[:, None]) & (edited == rows)
        return torch.where(same, self._others(rows), edited), cuts

    def suffix(self, rows: Tensor, cuts: Tensor) -> Tensor:
        """`rows` [N, T] with uniform tokens from their `cuts` [N] on, other ones than before at the cut."""
        places = torch.arange(rows.shape[1], device=rows.device)
        new = torch.where(places > cuts[:, None], self.tokens(rows.shape), self._others(rows))
        return torch.where(places >= cuts[:, None], new, rows)

    def places(self, *, few: bool = False) -> Tensor:
        """All places but the first; in longer rows the multiples of a power of two: beyond 512 tokens, or so
        that there are at most 32 where they are to be `few`."""
        length, step = self.rows.shape[1], 1
        while (length - 1) // step > (_FEW if few else max(_PLACES, _TOKENS // length)):
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
