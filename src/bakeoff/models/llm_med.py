"""LLM-Med: a byte-level decoder of the usual kind, and the showcase of selection.

Pre-norm blocks of attention (rotary positions, optional key/value sharing) and a gated MLP, tied head. On
request what makes it a strong baseline: normalised queries and keys, a short convolution in front of them,
embeddings of hashed n-grams.
The residual stream travels as a pair (branch, residual): the sum of the two is formed inside the next
RMSNorm, so that adding and normalising is one pass over memory. Every call of an op goes through selection.

Shapes: B batch, T time, D d_model, H heads, K kv_heads, E = D / H, V vocab.
"""

import math
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from bakeoff.models.caching import DecodeCache, rows_at
from bakeoff.models.checks import (
    check_capacity,
    check_fields,
    check_kind,
    check_no_recomputing,
)
from bakeoff.models.language import Block, LanguageModel
from bakeoff.models.ngrams import NGrams, check_ngrams, with_ngrams
from bakeoff.nn import KeyValues, QKNorm, RMSNorm, attend
from bakeoff.nn.initial import StartsAnew, fill
from bakeoff.nn.memory_state import outliving
from bakeoff.ops import short_conv

__all__ = ["SIZES", "Cache", "Config", "LLMMed"]

Size = Literal["tiny", "small", "base"]

_MOST_TAPS = 8  # that `short_conv` takes

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 128, "layers": 2, "heads": 4, "max_seq_len": 256},
    "small": {"d_model": 384, "layers": 6, "heads": 8, "max_seq_len": 1024},
    "base": {"d_model": 768, "layers": 12, "heads": 12, "max_seq_len": 2048},
}


class Config(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="llm-med"
):
    """The shape of an `LLMMed`. Values that contradict each other raise ValueError, values of another type
    TypeError."""

    vocab: int = 256
    d_model: int = 384
    layers: int = 6
    heads: int = 8
    kv_heads: int = 0
    """Key/value heads, a divisor of `heads`; 0 means as many as `heads`."""
    d_ff: int = 0
    """Inner width of the gated MLP; 0 means 8/3 of d_model, rounded up to a multiple of 64."""
    max_seq_len: int = 1024
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    dropout: float = 0.0
    """Probability of dropping an element of a branch's output while training."""
    logit_cap: float = 0.0
    """Logits become cap * tanh(logits / cap); 0 leaves them alone."""
    qk_norm: bool = False
    """Each head of queries and keys is normalised, with learned scales (Henry et al. 2020)."""
    conv: int = 0
    """Taps of a causal depthwise convolution in front of the projection to queries, keys and values; 0: none.
    It starts as the identity (So et al. 2021 have one behind the projection)."""
    ngrams: int = 0
    """Length of the longest n-grams: embeddings of the last 2, 3, ... symbols, found by a hash, are added to
    that of each symbol; they start at 0. 0: none (Pagnoni et al. 2024, section 3.2.1)."""
    ngram_bits: int = 14
    """Each length of n-gram has a table of 2^ngram_bits rows, which unlike n-grams may share."""
    tie: bool = True
    """The head uses the embedding's weight."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("vocab", "d_model", "layers", "heads", "max_seq_len"):
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
        if self.conv < 0 or self.conv == 1 or self.conv > _MOST_TAPS:
            raise ValueError(f"conv={self.conv} must be 2 to {_MOST_TAPS} taps, or 0 for no convolution")
        check_ngrams(self.ngrams, self.ngram_bits)
        if self.rope_base == 0.0:
            raise ValueError("rope_base=0 must be positive: the longest wavelength is about 2 pi rope_base")

    @classmethod
    def sizes(cls, size: Size, **overrides: float | bool) -> "Config":
        """The named size, with some fields changed: ``Config.sizes("tiny", kv_heads=2)``."""
        if size not in SIZES:
            raise ValueError(f"no size {size!r}; there are {', '.join(SIZES)}")
        return cls(**{**SIZES[size], **overrides})  # type: ignore[arg-type]

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def n_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def ff_dim(self) -> int:
        return self.d_ff or 64 * math.ceil(self.d_model * 8 / 3 / 64)


class Cache(DecodeCache):
    """What decoding remembers of an `LLMMed` of this shape: keys and values of up to `capacity` positions,
    the last inputs of each convolution, the last symbols."""

    def __init__(self, config: Config, capacity: int | None = None) -> None:
        super().__init__()
        check_capacity(capacity)
        self.config = config
        self.attention = KeyValues(config.layers, min(capacity or config.max_seq_len, config.max_seq_len))
        self.inputs: dict[str, Tensor] = {}
        """Of each layer's convolution, the last [B, conv - 1, D]."""
        self.symbols: Tensor | None = None
        """The last [B, ngrams - 1], as `NGrams` numbers them."""

    @property
    def rows(self) -> int | None:
        """How many rows it holds; None while it is empty."""
        return self.attention.rows

    @property
    def capacity(self) -> int:
        return self.attention.capacity

    def state(self) -> dict[str, Tensor]:
        return {**self.inputs, **({} if self.symbols is None else {"symbols": self.symbols})}

    def put(self, state: dict[str, Tensor]) -> None:
        self.inputs = {name: tensor for name, tensor in state.items() if name != "symbols"}
        self.symbols = state.get("symbols")

    def buffers(self) -> list[Tensor]:
        return self.attention.tensors()

    def grow(self, ids: Tensor) -> None:
        super().grow(ids)
        self.attention.length = self.length

    def widen(self, model: Any, at: Tensor) -> None:
        self.attention.settle(at)

    def begin_step(self, at: Tensor) -> None:
        self.attention.begin_step()


class Attention(StartsAnew):
    """Causal attention with rotary positions; keys and values shared by groups of heads."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = config.heads, config.n_kv_heads, config.head_dim
        self.qkv = nn.Linear(config.d_model, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)
        self.norm = QKNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.short = nn.Parameter(torch.empty(config.d_model, config.conv)) if config.conv else None
        self.first_values()

    def first_values(self) -> None:
        """A convolution by 1."""
        if self.short is not None:
            now = torch.arange(self.short.shape[1], device=self.short.device) == self.short.shape[1] - 1
            fill(self.short, now.expand(self.short.shape))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        """x [B, T, D]; cos, sin [T, E/2] of these positions; returns [B, T, D]."""
        check_no_recomputing(cache)
        if self.short is not None:
            place = f"inputs {self.layer}"
            x, inputs = short_conv(x, self.short, state=None if cache is None else cache.inputs.get(place))
            if cache is not None:
                cache.inputs[place] = outliving(inputs)
        qkv = torch.unflatten(self.qkv(x), -1, (-1, self.head_dim))
        held = None if cache is None else cache.attention
        out: Tensor = self.out(attend(qkv, self.kv_heads, cos, sin, held, self.layer, self.norm))
        return out


class LLMMed(LanguageModel):
    """A causal language model over `config.vocab` symbols, bytes by default.

    >>> model = LLMMed(Config.sizes("tiny"))
    >>> ids = torch.randint(256, (2, 16))
    >>> logits, _ = model(ids)                     # [2, 16, 256]
    >>> _, loss = model(ids[:, :-1], ids[:, 1:])   # mean cross entropy in nats
    """

    config: Config
    kept = Cache

    def __init__(self, config: Config) -> None:
        super().__init__()
        check_kind("config", config, Config)
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.d_model)
        self.ngrams = NGrams(config.ngrams, config.ngram_bits, config.d_model) if config.ngrams else None
        layers = range(config.layers)
        self.blocks = nn.ModuleList(Block(config, attention=Attention(config, layer)) for layer in layers)
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = None if config.tie else nn.Linear(config.d_model, config.vocab, bias=False)
        self.softcap = config.logit_cap or None
        self.make_tables(config.max_seq_len, config.head_dim, config.rope_base)
        self.first_values()

    def _hidden(self, ids: Tensor, cache: Cache | None) -> Tensor:
        cos, sin = (rows_at(table, ids.shape[1], cache) for table in (self.cos, self.sin))
        x = with_ngrams(self.embed(ids.long()), self.ngrams, ids.long(), cache)
        return self._through(x, cache, cos, sin)

    def flops_per_token(self, length: int) -> int:
        """Floating-point operations of forward and backward per symbol, in rows of `length` symbols.

        6 per weight of a matrix product or a convolution, and 6 * layers * d_model * length for causal
        attention.
        """
        products = self._matrix_weights() + self.config.layers * self.config.d_model * self.config.conv
        return 6 * products + 6 * self.config.layers * self.config.d_model * length

    def make_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for `decode`, of up to `capacity` positions."""
        return Cache(self.config, capacity)
