"""ByteSpectralLM: a byte model that mixes time by long causal filters instead of attention.

Bytes become a learned embedding plus the projected spectrum of the last `window` bytes. Each block mixes over
time by y = q * (h * (k v)), where q, k, v are projections behind a short convolution and h is one long causal
filter per channel (Fu et al. 2023, H3; Poli et al. 2023, Hyena), then over channels by a gated MLP. A filter
is the same at every position, so it can't look anything up by content: every `attention_every`-th block may
use attention instead (Arora et al. 2023, Zoology).

Causal by construction: filters are parametrised in time (a multiplier of frequencies, even on padded rows,
reaches into the future).

Shapes: B batch, T time, D d_model, K poles a channel, L taps.
"""

import math
from typing import Any, Literal, get_args

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bakeoff.models.caching import DecodeCache, rows_at
from bakeoff.models.checks import (
    check_capacity,
    check_fields,
    check_kind,
    check_no_recomputing,
    check_symbols,
    check_values,
)
from bakeoff.models.language import Block, LanguageModel
from bakeoff.models.ngrams import NGrams, check_ngrams, with_ngrams
from bakeoff.nn import KeyValues, QKNorm, RMSNorm, attend
from bakeoff.nn.filters import MinimumPhase, Past, Poles, Taps, WholeRow
from bakeoff.nn.initial import StartsAnew, fill
from bakeoff.nn.memory_state import outliving
from bakeoff.ops import byte_spectral, short_conv

__all__ = ["SIZES", "ByteSpectralLM", "Cache", "Config"]

Size = Literal["tiny", "small", "base"]
Filter = Literal["poles", "taps", "minimum_phase"]
Features = Literal["magnitude", "log", "complex"]

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 128, "layers": 2, "heads": 4, "max_seq_len": 256},
    "small": {"d_model": 384, "layers": 6, "heads": 8, "max_seq_len": 1024},
    "base": {"d_model": 768, "layers": 12, "heads": 12, "max_seq_len": 2048},
}
_SHORT = 4  # taps of the short convolution


class Config(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="byte-spectral",
):
    """The shape of a `ByteSpectralLM`. Values that contradict each other raise ValueError, values of another
    type TypeError."""

    d_model: int = 384
    layers: int = 6
    d_ff: int = 0
    """Inner width of the gated MLP; 0 means 8/3 of d_model, rounded up to a multiple of 64."""
    filter: Filter = "poles"
    """"poles": sums of damped oscillations, with a state of fixed size for decoding. "taps": free values
    under a decaying window. "minimum_phase": a free magnitude per frequency, made causal by its cepstrum."""
    poles: int = 8
    """Damped oscillations a channel."""
    taps: int = 0
    """Length of the other filters; 0 means max_seq_len."""
    window: int = 64
    """Bytes that the input's spectrum looks back at."""
    bins: int = 32
    """Frequencies of that spectrum."""
    channels: int = 1
    """Learned numbers that stand for a byte, each with a spectrum of its own."""
    features: Features = "magnitude"
    """What a spectrum is projected from: how much of each frequency there is, or with "complex" also where in
    the window, by real and imaginary parts; "log" compresses magnitudes."""
    ngrams: int = 0
    """Length of the longest n-grams: embeddings of the last 2, 3, ... bytes, found by a hash, are added to
    that of each byte; they start at 0. 0: none (Pagnoni et al. 2024, section 3.2.1)."""
    ngram_bits: int = 14
    """Each length of n-gram has a table of 2^ngram_bits rows, which unlike n-grams may share."""
    attention_every: int = 0
    """Every n-th block attends instead of filtering; 0: none does."""
    heads: int = 8
    """Of those blocks."""
    qk_norm: bool = False
    """Those blocks normalise each head of queries and keys, with learned scales (Henry et al. 2020)."""
    max_seq_len: int = 1024
    """The longest row of an encoder or a model with attention; of another, the length that filters are
    initialised for."""
    bidirectional: bool = False
    """An encoder: frequencies of the whole row are filtered, and the mean position is classified."""
    classes: int = 0
    """Of the encoder."""
    norm_eps: float = 1e-6
    dropout: float = 0.0
    """Probability of dropping an element of a branch's output while training."""
    tie: bool = True
    """The head uses the embedding's weight."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, kind in (("filter", Filter), ("features", Features)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(get_args(kind))}")
        check_ngrams(self.ngrams, self.ngram_bits)
        for name in ("d_model", "layers", "poles", "window", "bins", "channels", "heads", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("d_ff", "taps", "attention_every", "classes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.dropout >= 1.0:
            raise ValueError(f"dropout={self.dropout} must be in [0, 1)")
        if self.bidirectional != (self.classes > 0):
            raise ValueError(
                f"bidirectional={self.bidirectional} and classes={self.classes}: an encoder needs both, a "
                f"language model neither"
            )
        self._check_attention()

    def _check_attention(self) -> None:
        if self.attention_every > self.layers:
            raise ValueError(
                f"attention_every={self.attention_every} is more than layers={self.layers}: no block would "
                f"attend; use at most {self.layers}, or 0 for none"
            )
        pair = 2 * self.heads
        if self.attention_every and self.d_model % pair:
            raise ValueError(
                f"d_model={self.d_model} must be a multiple of 2*heads={pair}, as rotary turns pairs in a "
                f"head; d_model={math.ceil(self.d_model / pair) * pair} is"
            )
        if self.qk_norm and not self.attention_every:
            raise ValueError(
                f"qk_norm=True and attention_every=0: no block attends, and there is nothing to normalise; "
                f"use attention_every={self.layers}, or qk_norm=False"
            )
        if self.bidirectional and self.attention_every:
            raise ValueError("attention here is causal: attention_every must be 0 in a bidirectional model")

    @classmethod
    def sizes(cls, size: Size, **overrides: float | bool | str) -> "Config":
        """The named size, with some fields changed: ``Config.sizes("tiny", filter="taps")``."""
        if size not in SIZES:
            raise ValueError(f"no size {size!r}; there are {', '.join(SIZES)}")
        return cls(**{**SIZES[size], **overrides})  # type: ignore[arg-type]

    @property
    def vocab(self) -> int:
        return 256

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def ff_dim(self) -> int:
        return self.d_ff or 64 * math.ceil(self.d_model * 8 / 3 / 64)

    @property
    def spectral_dim(self) -> int:
        """Features a position."""
        return self.channels * self.bins * (2 if self.features == "complex" else 1)

    @property
    def n_taps(self) -> int:
        return self.taps or self.max_seq_len

    def attends(self, layer: int) -> bool:
        return self.attention_every > 0 and (layer + 1) % self.attention_every == 0


class Cache(DecodeCache):
    """What decoding remembers: the last bytes, as `NGrams` numbers them, too, per filter its state or last
    inputs, keys and values."""

    def __init__(self, config: Config, capacity: int | None = None) -> None:
        super().__init__()
        check_capacity(capacity)
        self.config = config
        self.bytes: Tensor | None = None
        self.symbols: Tensor | None = None
        self.past = Past()
        self.attention = KeyValues(config.layers, min(capacity or config.max_seq_len, config.max_seq_len))

    @property
    def rows(self) -> int | None:
        """How many rows it holds; None while it is empty."""
        return None if self.bytes is None else self.bytes.shape[0]

    @property
    def capacity(self) -> int | None:
        return self.attention.capacity if self.config.attention_every else None

    def state(self) -> dict[str, Tensor]:
        assert self.bytes is not None
        symbols = {} if self.symbols is None else {"symbols": self.symbols}
        return {"bytes": self.bytes, **symbols, **self.past.kept}

    def put(self, state: dict[str, Tensor]) -> None:
        rest = dict(state)
        self.bytes, self.symbols = rest.pop("bytes"), rest.pop("symbols", None)
        self.past.kept = rest

    def buffers(self) -> list[Tensor]:
        return self.attention.tensors()

    def grow(self, ids: Tensor) -> None:
        super().grow(ids)
        self.attention.length = self.length

    def widen(self, model: Any, at: Tensor) -> None:
        assert self.bytes is not None
        self.bytes = F.pad(self.bytes, (self.config.window - 1 - self.bytes.shape[1], 0))
        self.past.settle()
        self.attention.settle(at)

    def begin_step(self, at: Tensor) -> None:
        self.attention.begin_step()


def _filter(config: Config) -> Poles | Taps | WholeRow:
    D, length = config.d_model, config.max_seq_len
    if config.bidirectional:
        return WholeRow(D, length)
    if config.filter == "poles":
        return Poles(D, config.poles, length)
    return (Taps if config.filter == "taps" else MinimumPhase)(D, config.n_taps)


class Mixer(StartsAnew):
    """out(q * (h * (k v))), or attention instead; q, k, v are projections behind a convolution of 4 taps."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        D = config.d_model
        self.layer, self.head_dim = layer, config.head_dim
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.short = nn.Parameter(torch.empty(D, _SHORT))
        attends = config.attends(layer)
        self.filter = None if attends else _filter(config)
        self.norm = QKNorm(config.head_dim, config.norm_eps) if attends and config.qk_norm else None
        self.out = nn.Linear(D, D, bias=False)
        self.first_values()

    def first_values(self) -> None:
        """A convolution by 1: at first x as it is."""
        now = torch.arange(_SHORT, device=self.short.device) == 0
        fill(self.short, now.expand(self.short.shape))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        """x [B, T, D]; cos, sin [T, E/2] of these positions; returns [B, T, D]."""
        check_no_recomputing(cache)
        past = None if cache is None else cache.past
        place = f"{self.layer} short"
        held = None if past is None else past.kept.get(place)
        taps = self.short.flip(1) if past is None else past.once(place, lambda: self.short.flip(1))
        mixed, held = short_conv(x, taps, state=held)  # which takes the present input's tap last
        if past is not None:
            past.kept[place] = outliving(held)
        qkv = self.qkv(mixed)
        if self.filter is not None:
            q, k, v = qkv.chunk(3, dim=-1)
            y = self.filter(k, v, q, past, f"{self.layer} filter")
        else:
            heads = torch.unflatten(qkv, -1, (-1, self.head_dim))
            kept = None if cache is None else cache.attention
            y = attend(heads, heads.shape[2] // 3, cos, sin, kept, self.layer, self.norm)
        out: Tensor = self.out(y)
        return out


class Spectrum(nn.Module):
    """The projected spectra of the last bytes, of a byte's learned values. Starts at 0."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.features = config.features
        self.table = nn.Parameter(torch.empty(256, config.channels))
        self.window = nn.Parameter(torch.empty(config.window))
        self.omega = nn.Parameter(torch.empty(config.bins))
        self.weight = nn.Parameter(torch.empty(config.spectral_dim, config.d_model))
        self.bias = nn.Parameter(torch.empty(config.d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A byte's plain value, and random ones where it has more; half of a Hann window; frequencies up to
        pi; no weight."""
        device, W = self.table.device, len(self.window)
        values = 0.1 * torch.randn(self.table.shape, device=device)
        values[:, 0] += torch.arange(256, device=device) / 127.5 - 1
        values[:, 1:] *= 6.0  # about as large
        fill(self.table, values)
        # Of sum 1: with magnitudes that grow with the window, the first steps of its weight upset the model.
        window = torch.hann_window(2 * W + 1, device=device)[W:-1]
        fill(self.window, window / window.sum())
        fill(self.omega, torch.linspace(0, math.pi, len(self.omega), device=device))
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, ids: Tensor, window: Tensor | None = None) -> Tensor:
        """[B, T, D] of ids [B, T] uint8, under another window if one is given."""
        window = self.window if window is None else window
        return byte_spectral(
            ids, self.table, window, self.omega, features=self.features, weight=self.weight, bias=self.bias
        )

    def last(self, ids: Tensor, at: Tensor) -> Tensor:
        """[B, 1, D] of the last of ids [B, window], before the first `at` [1] of which there was nothing."""
        ago = torch.arange(len(self.window), device=ids.device)
        return self(ids, self.window * (ago <= at))[:, -1:]  # type: ignore[no-any-return]


class ByteSpectralLM(LanguageModel):
    """A causal language model over bytes, or with ``bidirectional=True`` an encoder that classifies rows:
    its targets are classes [B], its logits [B, classes].

    With poles and without attention, rows have no end and a step of decoding costs the same however long the
    text is.

    >>> model = ByteSpectralLM(Config.sizes("tiny"))
    >>> ids = torch.randint(256, (2, 16))
    >>> logits, _ = model(ids)                     # [2, 16, 256]
    >>> _, loss = model(ids[:, :-1], ids[:, 1:])   # mean cross entropy in nats
    """

    config: Config
    kept = Cache
    length_is_free = ""  # filters of all taps have as many

    def __init__(self, config: Config) -> None:
        super().__init__()
        check_kind("config", config, Config)
        self.config = config
        self.embed = nn.Embedding(256, config.d_model)
        self.ngrams = NGrams(config.ngrams, config.ngram_bits, config.d_model) if config.ngrams else None
        self.spectrum = Spectrum(config)
        self.blocks = nn.ModuleList(
            Block(config, mixer=Mixer(config, layer)) for layer in range(config.layers)
        )
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        own = config.bidirectional or not config.tie
        self.head = nn.Linear(config.d_model, config.classes or 256, bias=False) if own else None
        length = config.max_seq_len if config.attention_every else 0
        self.make_tables(length, config.head_dim if length else 2)
        self.first_values()

    def longest(self) -> int | None:
        return self.config.max_seq_len if self.config.attention_every or self.config.bidirectional else None

    def context(self) -> int | None:
        if self.config.bidirectional:
            raise ValueError("an encoder sees whole rows and can't decode: use bidirectional=False")
        return self.longest()

    def _check_targets(self, targets: Tensor, ids: Tensor) -> None:
        if not self.config.bidirectional:
            super()._check_targets(targets, ids)
            return
        check_symbols("targets", targets)
        if targets.shape != ids.shape[:1]:
            raise ValueError(
                f"targets have shape {tuple(targets.shape)}, expected {tuple(ids.shape[:1])} for ids "
                f"{tuple(ids.shape)}"
            )
        check_values("targets", targets, (ids.device,), self.config.classes, ignored=-100)

    def _hidden(self, ids: Tensor, cache: Cache | None) -> Tensor:
        cos, sin = (rows_at(table, ids.shape[1], cache) for table in (self.cos, self.sin))
        x = self.embed(ids.long()) + self._spectra(ids.to(torch.uint8), cache)
        x = with_ngrams(x, self.ngrams, ids.long(), cache)
        x = self._through(x, cache, cos, sin)
        return x.mean(dim=1) if self.config.bidirectional else x

    def _spectra(self, ids: Tensor, cache: Cache | None) -> Tensor:
        if cache is None:
            return self.spectrum(ids)  # type: ignore[no-any-return]
        whole = ids if cache.bytes is None else torch.cat([cache.bytes, ids], dim=1)
        last = whole[:, max(0, whole.shape[1] - self.config.window + 1) :]
        if cache.at is not None:
            cache.bytes = last
            return self.spectrum.last(whole, cache.at)
        cache.bytes = last.clone()  # not a view of ids, which the caller may change
        return self.spectrum(whole)[:, whole.shape[1] - ids.shape[1] :]  # type: ignore[no-any-return]

    def flops_per_token(self, length: int) -> int:
        """Floating-point operations of forward and backward per byte, in rows of `length` bytes.

        6 per weight of a matrix product, 6 * d_model * length for each layer of causal attention, and those
        of two real FFTs of twice the length for each filter, three times.
        """
        config = self.config
        products = self._matrix_weights()
        products += config.window * 2 * config.bins * config.channels + self.spectrum.weight.numel()
        attending = sum(config.attends(layer) for layer in range(config.layers))
        fft = 3 * 2 * 2 * 5 * math.ceil(math.log2(2 * max(length, 1)))
        mixing = 6 * attending * length + (config.layers - attending) * fft
        return 6 * products + config.d_model * mixing

    def make_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for `decode`; with attention, of up to `capacity` positions."""
        return Cache(self.config, capacity)
