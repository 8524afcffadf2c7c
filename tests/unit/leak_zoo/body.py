"""What the animals of the leak guard's zoo share: an embedding, a residual mixer over time, a head."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bakeoff.causal import assert_causal

V, D, T = 32, 16, 24  # vocabulary, width, positions of a row


class Body(nn.Module):
    """Embedding, a residual mixer over time, head; the animals differ in `mix`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.head = nn.Linear(D, V)
        self.build()

    def build(self) -> None:
        """The mixer's own parameters."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return torch.zeros_like(h)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        return self.head(h + self.mix(h, ids))


def following(x: Tensor) -> Tensor:
    """x one position ahead; the last position sees zeros."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


def past(x: Tensor) -> Tensor:
    """x one position back; the first position sees zeros."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)


def steps(h: Tensor) -> Tensor:
    """Positions 0..T-1."""
    return torch.arange(h.shape[1], device=h.device)


def attend(h: Tensor, mask: Tensor | None, axis: int = -1) -> Tensor:
    """One head of attention with queries, keys and values h; `mask` is true where a key is seen."""
    scores = h @ h.transpose(1, 2) / h.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(dim=axis).nan_to_num() @ h


def lower(h: Tensor, diagonal: int = 0) -> Tensor:
    """The causal mask [T, T]."""
    return torch.ones(h.shape[1], h.shape[1], dtype=torch.bool, device=h.device).tril(diagonal)


@dataclass
class Animal:
    """A model, how it is tried, and what the guard must say of it.

    `at` is the first position and how far it sees, where they are certain.
    """

    build: type[nn.Module]
    says: str = "sees its future"
    length: int = T
    settings: dict[str, Any] = field(default_factory=dict)
    autocast: bool = False
    at: tuple[int | None, int | None] = (None, None)

    @property
    def name(self) -> str:
        return self.build.__name__


def attempt(animal: Animal, device: str, seed: int) -> None:
    """The guard on `animal`, with rows as real text has them: one token in five is a newline."""
    torch.manual_seed(seed)
    ids = torch.randint(V, (4, animal.length)).where(torch.rand(4, animal.length) < 0.8, 10)
    model = animal.build().to(device)
    if seed % 2:
        model.eval()
    with torch.autocast(device, dtype=torch.bfloat16, enabled=animal.autocast):
        assert_causal(model, ids.to(device), vocab=V, seed=seed, **animal.settings)
