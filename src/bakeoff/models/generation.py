"""Text from a causal model: sampling, and continuing prompts by `decode` with a cache.

Shapes: B batch, T time, V vocab.
"""

import math
from collections.abc import Iterator
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from bakeoff.models.checks import check_ids, check_sampling

__all__ = ["Generates", "Sampling", "sample"]

_COLDEST = 1e-30  # below, logits over the temperature overflow float32; sampling is greedy far above


class Sampling(TypedDict, total=False):
    """The keywords of `Generates.stream`."""

    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    generator: torch.Generator | None


class Generates:
    """What a model that decodes can do with a prompt. The model says how it decodes."""

    def decode(self, ids: Tensor, cache: Any) -> Tensor:
        """Logits [B, T, V] of ids [B, T] that follow what `cache` holds; the cache then holds them, too."""
        raise NotImplementedError

    def make_cache(self) -> Any:
        """An empty cache for `decode`, with the number of positions it holds as `length`."""
        raise NotImplementedError

    def context(self) -> int | None:
        """How many positions `decode` sees at most, or None for any number. ValueError if it can't decode."""
        raise NotImplementedError

    def generate(self, prompt: Tensor, max_new: int, **sampling: Unpack[Sampling]) -> Tensor:
        """prompt [B, T] continued by `max_new` sampled symbols: [B, T + max_new], int64.

        Keywords and errors are those of `stream`.
        """
        new = [symbols[:, None] for symbols in self.stream(prompt, max_new, **sampling)]
        return torch.cat([prompt.long(), *new], dim=1)

    def stream(
        self,
        prompt: Tensor,
        max_new: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Yields `max_new` times the next symbol of every row, [B] int64.

        Args:
            prompt: [B, T], T >= 1. Of a prompt longer than the model's context the end is used.
            temperature: divides the logits; 0 takes the likeliest symbol.
            top_k: only the k likeliest symbols; 0 means all.
            top_p: only the likeliest symbols that together hold this probability.
            seed: makes the draw repeatable; or give a `generator` of the model's device.

        When the context is full the cache is rebuilt from its last half, so that text may grow past it.
        Raises TypeError or ValueError for a bad prompt or setting, before anything runs.
        """
        context = self.context()
        check_ids("prompt", prompt)
        check_sampling(max_new, temperature, top_k, top_p, seed)
        if seed is not None:
            if generator is not None:
                raise ValueError("give seed or generator, not both")
            generator = torch.Generator(prompt.device).manual_seed(seed)
        return self._stream(prompt.long(), max_new, context, temperature, top_k, top_p, generator)

    def _stream(
        self,
        seen: Tensor,
        max_new: int,
        context: int | None,
        temperature: float,
        top_k: int,
        top_p: float,
        generator: torch.Generator | None,
    ) -> Iterator[Tensor]:
        if context is not None:
            seen = seen[:, -context:]
        fresh, cache = seen, self.make_cache()
        for _ in range(max_new):
            if context is not None and cache.length + fresh.shape[1] > context:
                fresh, cache = seen[:, -max(1, context // 2) :], self.make_cache()
            with torch.no_grad():  # not around the yield, where it would switch the caller's gradients off
                logits = self.decode(fresh, cache)[:, -1]
                new = sample(logits, temperature, top_k, top_p, generator)
            fresh = new[:, None]
            if context is not None:  # what a full cache is rebuilt from
                seen = torch.cat([seen, fresh], dim=1)[:, -context:]
            yield new


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One symbol per row, [B] int64, drawn from softmax(logits [B, V] / temperature).

    `top_k` keeps the k likeliest symbols, `top_p` then the fewest that hold that much probability (always
    at least one; Holtzman et al. 2020). Temperature 0 takes the likeliest.
    """
    if temperature < _COLDEST:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if 0 < top_k < logits.shape[-1]:
        likeliest, where = logits.topk(top_k)
        logits = torch.full_like(logits, -math.inf).scatter(-1, where, likeliest)
    if top_p < 1.0:
        ordered, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        surplus = ordered.cumsum(dim=-1) - ordered >= top_p  # the mass before it already suffices
        surplus[:, 0] = False  # even for a top_p that is 0 in float32
        logits = logits.masked_fill(surplus.scatter(-1, order, surplus), -math.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]
