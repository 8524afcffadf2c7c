"""TitanMAC: attention over one segment at a time, and beyond it a memory that learns while it reads.

Every block has a `bakeoff.nn.NeuralMemory` beside its attention (Behrouz et al. 2024, Titans). As "context"
(mac), a segment attends to what the memory, as it was before the segment, recalls at its positions; the
memory then learns from what attention gave. As a "gate" (mag), attention over a sliding window is multiplied
by what the memory reads. Alone (lmm), the memory is all that mixes time.

Causal by construction: what is recalled at a position is visible from that position on alone, and the memory
read for a position's output has learned from earlier positions alone. Whole rows go through the very code
that decoding goes through, segment by segment.

Shapes: B rows, T time, D d_model, H heads, E = D / H, S segment, P persistent.
"""

import math
from typing import Any, Literal, get_args

import msgspec
from torch import Tensor, nn

from bakeoff.models.caching import DecodeCache
from bakeoff.models.checks import (
    check_capacity,
    check_fields,
    check_kind,
)
from bakeoff.models.language import Block, LanguageModel
from bakeoff.models.titan_mixers import MIXERS, Past
from bakeoff.nn import RMSNorm

__all__ = ["SIZES", "Cache", "Config", "TitanMAC"]

Size = Literal["tiny", "byte", "seed", "base"]
Variant = Literal["mac", "mag", "lmm"]
Gate = Literal["token", "segment"]
Learns = Literal["all", "last"]

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 128, "layers": 2, "heads": 4, "segment": 64, "persistent": 4, "max_seq_len": 256},
    "byte": {"d_model": 256, "layers": 4, "heads": 4, "segment": 128, "max_seq_len": 1024},
    "seed": {"d_model": 512, "layers": 6, "heads": 8, "segment": 512, "max_seq_len": 2048},
    "base": {"d_model": 768, "layers": 12, "heads": 12, "segment": 512, "max_seq_len": 4096},
}


class Config(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="titan-mac"
):
    """The shape of a `TitanMAC`. Values that contradict each other raise ValueError, values of another type
    TypeError."""

    variant: Variant = "mac"
    """"mac": memory as context. "mag": memory as gate. "lmm": memory alone."""
    vocab: int = 256
    d_model: int = 512
    layers: int = 6
    heads: int = 8
    """Of attention, and memories of a row and layer."""
    d_ff: int = 0
    """Inner width of the gated MLP; 0 means 8/3 of d_model, rounded up to a multiple of 64."""
    segment: int = 512
    """Positions that attend to each other (mac), or that attention looks back at (mag)."""
    persistent: int = 16
    """Learned keys and values of every layer that all positions attend to."""
    memory: bool = True
    """False leaves the memories out."""
    expansion: int = 2
    """Hidden units of a memory over d_model / heads."""
    chunk: int = 64
    """Tokens that share the memory at which the inner gradients are taken."""
    gate: Gate = "token"
    """The memory that gates an output of mac: as it was before this token, or before this segment. With
    "segment" a memory is first used in the segment after the one it learned."""
    momentum: bool = True
    """The memories' learning has momentum."""
    per_token: bool = True
    """The memories' rates are functions of the token; False: constants of a head."""
    ascent: bool = False
    """The memories climb their loss (an ablation)."""
    learns: Learns = "all"
    """Layers of a memory that learn while it reads."""
    max_lr: float = 0.8
    """Largest learning rate of the memories; 1 is where they may become unstable."""
    forget: float = 0.001
    """What a memory forgets at a token, before that is learned."""
    max_seq_len: int = 2048
    """Length of the rows it is trained on. Longer rows work, too."""
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    dropout: float = 0.0
    """Probability of dropping an element of a branch's output while training."""
    tie: bool = True
    """The head uses the embedding's weight."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, kind in (("variant", Variant), ("gate", Gate), ("learns", Learns)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(get_args(kind))}")
        for name in ("vocab", "d_model", "layers", "heads", "segment", "expansion", "chunk", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("d_ff", "persistent"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("rope_base", "max_lr", "forget"):
            if getattr(self, name) == 0.0:
                raise ValueError(f"{name}=0 must be positive")
        for name in ("dropout", "forget"):
            if getattr(self, name) >= 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1)")
        self._check_shape()

    def _check_shape(self) -> None:
        pair = 2 * self.heads
        if self.d_model % pair:
            raise ValueError(
                f"d_model={self.d_model} must be a multiple of 2*heads={pair}, as rotary turns pairs in a "
                f"head; d_model={math.ceil(self.d_model / pair) * pair} is"
            )
        if self.variant == "mac" and self.memory and self.segment % self.chunk:
            most = min(self.chunk, self.segment)
            near = next(size for size in range(most, 0, -1) if self.segment % size == 0)
            raise ValueError(
                f"segment={self.segment} must be a multiple of chunk={self.chunk}, so that a segment begins "
                f"with a memory that has learned all before it; with chunk={near} it is"
            )
        if self.variant == "lmm" and not self.memory:
            raise ValueError("variant='lmm' with memory=False mixes no time: use mac or mag without memory")

    @classmethod
    def sizes(cls, size: Size, **overrides: float | bool | str) -> "Config":
        """The named size, with some fields changed: ``Config.sizes("tiny", variant="lmm")``."""
        if size not in SIZES:
            raise ValueError(f"no size {size!r}; there are {', '.join(SIZES)}")
        return cls(**{**SIZES[size], **overrides})  # type: ignore[arg-type]

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def ff_dim(self) -> int:
        return self.d_ff or 64 * math.ceil(self.d_model * 8 / 3 / 64)


class Cache(DecodeCache):
    """What decoding remembers: per layer the memory and the keys and values that may still be attended to."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.rows: int | None = None
        """How many rows it holds; None while it is empty."""
        self.layers = [Past() for _ in range(config.layers)]

    def state(self) -> dict[str, Tensor]:
        layers = enumerate(self.layers)
        return {f"{i} {name}": tensor for i, past in layers for name, tensor in past.state().items()}

    def put(self, state: dict[str, Tensor]) -> None:
        for i, past in enumerate(self.layers):
            past.put({name: state[f"{i} {name}"] for name in past.state()})

    def buffers(self) -> list[Tensor]:
        pairs = (past.ring or (past.k, past.v) for past in self.layers)
        return [tensor for pair in pairs for tensor in pair if tensor is not None]

    def grow(self, ids: Tensor) -> None:
        super().grow(ids)
        self.rows = ids.shape[0]

    def widen(self, model: Any, at: Tensor) -> None:
        for block, past in zip(model.blocks, self.layers, strict=True):
            block.mixer.settle(past)
            past.k = past.v = past.raw = past.last = None

    def detach(self) -> None:
        """Lets a backward of what comes next stop here, as for training on pieces of long rows."""
        for past in self.layers:
            past.detach()


class TitanMAC(LanguageModel):
    """A causal language model over `config.vocab` symbols, bytes by default. Every row begins with fresh
    memories.

    Rows have no end, and a step of decoding costs the same however long the text is: what is older than the
    attention's window is in the memories alone.

    >>> import torch
    >>> model = TitanMAC(Config.sizes("tiny"))
    >>> ids = torch.randint(256, (2, 96))
    >>> logits, _ = model(ids)                     # [2, 96, 256]
    >>> _, loss = model(ids[:, :-1], ids[:, 1:])   # mean cross entropy in nats
    """

    config: Config
    kept = Cache

    def __init__(self, config: Config) -> None:
        super().__init__()
        check_kind("config", config, Config)
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.d_model)
        mixer = MIXERS[config.variant]
        self.blocks = nn.ModuleList(Block(config, mixer=mixer(config)) for _ in range(config.layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = None if config.tie else nn.Linear(config.d_model, config.vocab, bias=False)
        # A segment, and for a sliding window the one before; rotary turns by distance, so rows have no end.
        self.make_tables(2 * config.segment, config.head_dim, config.rope_base)
        self.first_values()

    def longest(self) -> None:
        return None

    def _hidden(self, ids: Tensor, cache: Cache | None) -> Tensor:
        at: int | Tensor = cache.length % self.config.segment if cache is not None else 0
        if cache is not None and cache.at is not None:
            at = cache.at
        pasts = cache.layers if cache is not None else [None] * len(self.blocks)
        return self._through(self.embed(ids.long()), cache, at, self.cos, self.sin, pasts=pasts)

    def flops_per_token(self, length: int) -> int:
        """Floating-point operations of forward and backward per symbol, in rows of `length` symbols.

        6 per weight of a matrix product, 12 * d_model for each key that a query attends to, and three times
        those of a memory's forward: 22 E H and 4 chunk (E + H) a head.
        """
        config, mac = self.config, self.config.variant == "mac"
        products = self._matrix_weights()
        if mac and config.memory:  # keys and values of what is recalled, too
            products += 2 * config.layers * config.d_model**2
        near = min(length, config.segment)
        keys = {"mac": (1 + config.memory) * near / 2, "mag": near, "lmm": -config.persistent}[config.variant]
        attending = 12 * config.d_model * (config.persistent + keys)
        E, H, b = config.head_dim, config.expansion * config.head_dim, min(config.chunk, length)
        memory = 3 * config.heads * (22 * E * H + 4 * b * (E + H)) * config.memory
        return int(6 * products + config.layers * (attending + memory))

    def make_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for `decode`, of the same size for any number of positions."""
        check_capacity(capacity)
        return Cache(self.config)
