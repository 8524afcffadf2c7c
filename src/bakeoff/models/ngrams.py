"""Embeddings of hashed n-grams, which models add to those of single symbols (Pagnoni et al. 2024, 3.2.1)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from bakeoff.nn.initial import StartsAnew

__all__ = ["NGrams", "check_ngrams", "with_ngrams"]

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # Knuth's multiplicative hashing: 2^64 / golden ratio
_LOW = (1 << 32) - 1


def check_ngrams(longest: int, bits: int) -> None:
    """Raises ValueError where a model's `ngrams` or `ngram_bits` is out of range."""
    if longest < 0 or longest == 1 or longest > 16:
        raise ValueError(f"ngrams={longest} must be 2 to 16 symbols, or 0 for none")
    if not 1 <= bits <= 24:
        raise ValueError(f"ngram_bits={bits} must be 1 to 24: tables have 2^ngram_bits rows")


class NGrams(StartsAnew):
    """The sum of the embeddings of the n-grams that end in each symbol, n = 2 to `longest`, by hash.

    Before the first symbol of a row stands one that is no symbol, so that n-grams reach back over it. All
    start at 0.
    """

    def __init__(self, longest: int, bits: int, d_model: int) -> None:
        super().__init__()
        self.bits, self.before = bits, longest - 1
        self.tables = nn.ModuleList(nn.Embedding(1 << bits, d_model) for _ in range(self.before))
        self.first_values()

    def first_values(self) -> None:
        """Zeros."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, ids: Tensor, held: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """([B, T, D], the last [B, longest - 1] symbols), of ids [B, T] int64 behind the symbols `held`."""
        T = ids.shape[1]
        ids = ids + 1  # 0 is the symbol before the first
        whole = F.pad(ids, (self.before, 0)) if held is None else torch.cat([held, ids], dim=1)
        total: Tensor | None = None
        for table, rows in zip(self.tables, self.rows(whole, T), strict=True):
            embedded = table(rows)
            total = embedded if total is None else total + embedded
        assert total is not None
        return total, whole[:, T:]

    def rows(self, whole: Tensor, T: int) -> list[Tensor]:
        """The rows [B, T] of each table for the last T of `whole` [B, T + longest - 1]."""
        found, key = [], whole[:, self.before :]
        for n in range(1, self.before + 1):
            key = _times_odd(key, plus=whole[:, self.before - n : self.before - n + T])
            mixed = _times_odd(key ^ (key >> 32))  # by a product alone, some rows would be empty
            found.append((mixed >> (64 - self.bits)) & ((1 << self.bits) - 1))
        return found


def with_ngrams(x: Tensor, ngrams: NGrams | None, ids: Tensor, cache: Any) -> Tensor:
    """x [B, T, D] and the embeddings of the n-grams that end at ids [B, T], if there are any. `cache.symbols`
    are the last symbols before, and then the last of all."""
    if ngrams is None:
        return x
    more, last = ngrams(ids, None if cache is None else cache.symbols)
    if cache is not None:
        cache.symbols = last.clone()  # a view would keep all of it
    return x + more  # type: ignore[no-any-return]


def _times_odd(key: Tensor, plus: Tensor | int = 0) -> Tensor:
    """key * _ODD + plus modulo 2^64, for 0 <= plus < 2^32."""
    if is_compiling() and key.device.type == "cpu":
        return _in_halves(key, plus)
    return key * _ODD + plus


def _in_halves(key: Tensor, plus: Tensor | int) -> Tensor:
    """The same by sums and products below 2^63: compiled to C++, which leaves an overflow undefined, keys
    of which symbols are known to be small were taken for numbers whose product fits."""
    odd_high, odd_low = _ODD >> 32, _ODD & _LOW
    high, low = key >> 32, key & _LOW
    product = low * odd_low + plus
    upper = (product >> 32) + low * odd_high + (high * odd_low & _LOW)
    signed = ((upper & _LOW) ^ (1 << 31)) - (1 << 31)
    return signed * (1 << 32) + (product & _LOW)
