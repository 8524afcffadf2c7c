"""The configurations of LongNet: what both models have, and that of the language model."""

import itertools
import math
from typing import Literal

import msgspec

from bakeoff.models.checks import check_fields

__all__ = ["SIZES", "Config", "Shape", "check_sizes"]

Size = Literal["tiny", "small", "base"]

SIZES: dict[str, dict[str, int | tuple[int, ...]]] = {
    "tiny": {"d_model": 128, "layers": 2, "heads": 4, "max_seq_len": 256, "segments": (64, 256),
             "rates": (1, 4)},
    "small": {"d_model": 384, "layers": 6, "heads": 6, "max_seq_len": 4096, "segments": (256, 1024, 4096),
              "rates": (1, 4, 16)},
    "base": {"d_model": 768, "layers": 12, "heads": 12, "max_seq_len": 16_384,
             "segments": (1024, 4096, 16_384), "rates": (1, 4, 16)},
}  # fmt: skip


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the configurations of both models have. Values that contradict each other raise ValueError, values
    of another type TypeError."""

    d_model: int = 384
    layers: int = 6
    heads: int = 6
    kv_heads: int = 0
    """Key/value heads, a divisor of `heads`; 0 means as many as `heads`."""
    segments: tuple[int, ...] = (256, 1024, 4096)
    """Tokens of a segment of each branch, increasing; longer than a row means the row."""
    rates: tuple[int, ...] = (1, 4, 16)
    """Of each branch: a head selects one token in so many."""
    d_ff: int = 0
    """Inner width of the gated MLP; 0 means 8/3 of d_model, rounded up to a multiple of 64."""
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    dropout: float = 0.0
    """Probability of dropping an element of a branch's output while training."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("d_model", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        pair = 2 * self.heads
        if self.d_model % pair:
            raise ValueError(
                f"d_model={self.d_model} must be a multiple of 2*heads={pair}, as rotary turns pairs in a "
                f"head; d_model={math.ceil(self.d_model / pair) * pair} is"
            )
        if self.kv_heads < 0 or self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads} (0 means no sharing)")
        if self.d_ff < 0:
            raise ValueError(f"d_ff={self.d_ff} must not be negative (0 means 8/3 of d_model)")
        if self.dropout >= 1.0:
            raise ValueError(f"dropout={self.dropout} must be in [0, 1)")
        if self.rope_base == 0.0:
            raise ValueError("rope_base=0 must be positive: the longest wavelength is about 2 pi rope_base")
        self._check_branches()

    def _check_branches(self) -> None:
        segments, rates = self.segments, self.rates
        for name, sizes in (("segments", segments), ("rates", rates)):
            check_sizes(name, sizes)
        if len(segments) != len(rates):
            raise ValueError(f"segments={segments} and rates={rates}: each branch has one of both")
        if any(a >= b for a, b in itertools.pairwise(segments)):
            raise ValueError(f"segments={segments} must increase")
        if any(a > b for a, b in itertools.pairwise(rates)):
            raise ValueError(f"rates={rates} must not decrease while segments increase")
        for segment, rate in zip(segments, rates, strict=True):
            if rate > segment:
                raise ValueError(f"rate {rate} is above its segment {segment}: a rate up to {segment} fits")
        reach = self.layers * self.n_kv_heads
        if rates[-1] > reach:
            raise ValueError(
                f"rate {rates[-1]} leaves {1 - reach / rates[-1]:.1%} of all tokens to no head of any layer: "
                f"{self.layers} layers of {self.n_kv_heads} key/value heads reach all up to rate {reach}"
            )

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def n_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def ff_dim(self) -> int:
        return self.d_ff or 64 * math.ceil(self.d_model * 8 / 3 / 64)


def check_sizes(name: str, sizes: object) -> None:
    """Raises unless these are whole numbers of at least 1, in a tuple of at least one."""
    if not isinstance(sizes, tuple) or any(type(size) is not int for size in sizes):
        raise TypeError(f"{name}={sizes!r} must be a tuple of int, such as (256, 1024)")
    if not sizes or min(sizes) < 1:
        raise ValueError(f"{name}={sizes} must hold at least one number, each at least 1")


class Config(Shape, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="longnet"):
    """The shape of a `LongNetLM`. Values that contradict each other raise ValueError, values of another type
    TypeError."""

    vocab: int = 256
    max_seq_len: int = 4096
    tie: bool = True
    """The head uses the embedding's weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("vocab", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @classmethod
    def sizes(cls, size: Size, **overrides: float | bool | tuple[int, ...]) -> "Config":
        """The named size, with some fields changed: ``Config.sizes("tiny", kv_heads=2)``."""
        if size not in SIZES:
            raise ValueError(f"no size {size!r}; there are {', '.join(SIZES)}")
        return cls(**{**SIZES[size], **overrides})  # type: ignore[arg-type]
