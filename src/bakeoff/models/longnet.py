"""LongNet: dilated attention in place of attention, for text and for images.

Blocks are those of LLM-Med, with `bakeoff.ops.dilated_attention`: a token attends densely to its own short
segment and ever more sparsely to longer ones, so that cost grows linearly with length (Ding et al. 2023). Of
a branch with rate r, a head sees one token in r. Which one moves on from head to head and from layer to
layer, so that the layers together reach every token.

`LongNetLM` reads bytes in order. `ImageLongNet` reads grids, whose cells `bakeoff.token_order` lines up, so
that what is near in the grid shares a segment.

Shapes: B batch, T time or tokens, D d_model, H heads, K kv_heads, E = D / H, V vocab, r a rate.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Literal, get_args

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bakeoff.models.checks import check_cache, check_fields, check_ids, check_kind, check_symbols
from bakeoff.models.generation import Generates
from bakeoff.nn import MLP, HasRotaryTables, RMSNorm
from bakeoff.ops import dilated_attention, rotary
from bakeoff.ops.dilated_attention import phase_table
from bakeoff.token_order import TokenOrder, permute, token_order

__all__ = ["SIZES", "Cache", "Config", "ImageConfig", "ImageLongNet", "LongNetLM"]

Size = Literal["tiny", "small", "base"]
Order = Literal["row", "tile", "snake", "morton", "hilbert"]
Labels = Literal["image", "cell"]
_PIECE = 256  # symbols behind a cache that go at a time: their scores exist

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


class Cache:
    """What decoding remembers of a `LongNetLM` of this shape: of each layer and branch the keys and values
    that the branch selects in the segment it is in, and no others.

    At most the sum over branches of segment / rate tokens a head. A branch's row j is, for a head of phase s,
    the segment's token s + j * rate.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.length = 0
        self.layers: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(config.layers)]

    @property
    def rows(self) -> int | None:
        """How many rows it holds; None while it is empty."""
        return self.layers[0][0][0].shape[0] if self.layers[0] else None


class Attention(nn.Module):
    """Dilated attention with rotary positions; keys and values shared by groups of heads."""

    def __init__(self, config: Shape, layer: int, causal: bool) -> None:
        super().__init__()
        self.layer, self.causal = layer, causal
        self.heads, self.kv_heads, self.head_dim = config.heads, config.n_kv_heads, config.head_dim
        self.segments, self.rates = config.segments, config.rates
        self.phases = phase_table(config.rates, self.kv_heads, layer)
        self.qkv = nn.Linear(config.d_model, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        """x [B, T, D]; cos, sin [T, at most E/2] of these positions; returns [B, T, D]."""
        heads = torch.unflatten(self.qkv(x), -1, (-1, self.head_dim))
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        q, k = rotary(q, k, cos, sin)
        y = self._behind(q, k, v, cache) if cache is not None and cache.length else self._attend(q, k, v)
        if cache is not None:
            self._keep(k, v, cache)
        out: Tensor = self.out(y.flatten(2))
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = dilated_attention(q, k, v, self.segments, self.rates, causal=self.causal, phase=self.phases)
        assert isinstance(y, Tensor)
        return y

    def _branches(self, device: torch.device) -> Iterator[tuple[int, int, Tensor]]:
        """Segment, rate and phases [K, 1] of each branch, without a copy from the host."""
        first = self.layer * self.kv_heads
        head = torch.arange(first, first + self.kv_heads, device=device)[:, None]
        for segment, rate in zip(self.segments, self.rates, strict=True):
            yield segment, rate, head % rate

    def _behind(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> Tensor:
        """Attention [B, T, H, E] to what the cache holds and to these: one softmax, in which a key counts as
        often as branches show it."""
        start, T = cache.length, q.shape[1]
        t = torch.arange(start, start + T, device=q.device)
        among = torch.zeros((), dtype=q.dtype, device=q.device)
        counts, keys, values = [], [k.transpose(1, 2)], [v.transpose(1, 2)]
        for (segment, rate, phase), held in zip(
            self._branches(q.device), cache.layers[self.layer], strict=True
        ):
            begin = start // segment * segment
            selected = t % segment % rate == phase  # [K, T]
            same = (t // segment == (t // segment)[:, None]) & (t <= t[:, None])
            among = among + (selected[:, :, None] & selected[:, None] & same).to(q.dtype)
            rows = -(-(start - begin) // rate)
            u = begin + phase + rate * torch.arange(rows, device=q.device)  # [K, rows]
            asking = selected & (t < begin + segment)
            counts.append((asking[:, :, None] & (u < start)[:, None]).to(q.dtype))
            for kept, part in zip((keys, values), held, strict=True):
                kept.append(part[:, :, :rows])
        return self._weighted(q, torch.cat(keys, 2), torch.cat(values, 2), torch.cat([among, *counts], -1))

    def _weighted(self, q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> Tensor:
        """[B, T, H, E] of keys [B, K, n, E] that count so often, [K, T, n]; 0 where none does."""
        B, T, H, _ = q.shape
        G = H // self.kv_heads
        seen = (counts > 0).any(-1, keepdim=True)
        bias = torch.where(seen, counts, 1.0).log().to(q.dtype).repeat(1, G, 1)
        grouped = q.unflatten(2, (-1, G)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, K, G T, E]
        y = F.scaled_dot_product_attention(grouped, k, v, bias[None])
        y = torch.where(seen.repeat(1, G, 1), y, 0.0)
        return y.view(B, -1, G, T, q.shape[3]).permute(0, 3, 1, 2, 4).reshape(B, T, H, -1)

    def _keep(self, k: Tensor, v: Tensor, cache: Cache) -> None:
        """Stores those of k, v [B, T, K, E] that a branch selects in the segment of the next position."""
        start, end = cache.length, cache.length + k.shape[1]
        layer, limit = cache.layers[self.layer], cache.config.max_seq_len
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        head = torch.arange(self.kv_heads, device=k.device)[:, None]
        for branch, (segment, rate, phase) in enumerate(self._branches(k.device)):
            if len(layer) == branch:
                shape = (k.shape[0], self.kv_heads, -(-min(segment, limit) // rate), self.head_dim)
                with torch.inference_mode(False):  # a cache that begins under it may go on without
                    layer.append((k.new_zeros(shape), v.new_zeros(shape)))
            begin = end // segment * segment
            first = max(begin, start)
            low, high = (first - begin) // rate, -(-(end - begin) // rate)
            u = begin + phase + rate * torch.arange(low, high, device=k.device)  # [K, rows]
            new, place = ((u >= first) & (u < end))[..., None], (u - start).clamp(0, k.shape[2] - 1)
            held = layer[branch]
            news = (
                torch.where(new, x[:, head, place], part[:, :, low:high])
                for x, part in zip((k, v), held, strict=True)
            )
            layer[branch] = _put(held[0], next(news), low), _put(held[1], next(news), low)


def _put(held: Tensor, new: Tensor, low: int) -> Tensor:
    """`held` with `new` as its rows from `low` on."""
    high = low + new.shape[2]
    if held.requires_grad or new.requires_grad:  # what a backward will read stays as it is
        return held.slice_scatter(new, 2, low, high)
    held[:, :, low:high] = new
    return held


class Block(nn.Module):
    """One layer. Takes and returns the stream as (branch, residual); their sum is the stream."""

    def __init__(self, config: Shape, layer: int, causal: bool) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config, layer, causal)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = MLP(config.d_model, config.ff_dim)

    def forward(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        if residual is None:  # the first layer: nothing to add yet
            h, residual = self.attention_norm(x), x
        else:
            h, residual = self.attention_norm(x, residual)
        drops = self.training and cache is None  # decoding never drops
        x = F.dropout(self.attention(h, cos, sin, cache), self.dropout, drops)
        h, residual = self.mlp_norm(x, residual)
        x = F.dropout(self.mlp(h), self.dropout, drops)
        return x, residual


class LongNet(HasRotaryTables):
    """The blocks and the last norm, which both models have."""

    def __init__(self, config: Shape, causal: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, layer, causal) for layer in range(config.layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal weights of deviation 0.02; the projections that end a branch are divided by
        sqrt(2 * layers), so that the stream's variance does not grow with depth (Radford et al. 2019)."""
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                ends_branch = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=0.02 * (2 * len(self.blocks)) ** (-0.5 * ends_branch))
            else:
                nn.init.ones_(parameter)

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        """x [B, T, D] through all blocks and the norm."""
        residual = None
        for block in self.blocks:
            x, residual = block(x, residual, cos, sin, cache)
        y: Tensor = self.norm(x, residual)[0]
        return y


class LongNetLM(Generates, LongNet):
    """A causal language model over `config.vocab` symbols, bytes by default.

    >>> model = LongNetLM(Config.sizes("tiny"))
    >>> ids = torch.randint(256, (2, 96))
    >>> logits, _ = model(ids)                     # [2, 96, 256]
    >>> _, loss = model(ids[:, :-1], ids[:, 1:])   # mean cross entropy in nats
    """

    def __init__(self, config: Config) -> None:
        check_kind("config", config, Config)
        super().__init__(config, causal=True)
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.d_model)
        self.head = None if config.tie else nn.Linear(config.d_model, config.vocab, bias=False)
        self.make_tables(config.max_seq_len, config.head_dim, config.rope_base)
        self.reset_parameters()

    def forward(
        self, ids: Tensor, targets: Tensor | None = None, *, return_logits: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """(logits, loss) of whole rows.

        Args:
            ids: [B, T] symbols, uint8, int32 or int64, 1 <= T <= config.max_seq_len. Their values are not
                checked, which would wait for the device.
            targets: [B, T] next symbols, -100 where none counts. Without them the loss is None.
            return_logits: give logits beside the loss, too.

        Returns:
            logits [B, T, V], or None with targets unless asked for; loss, the mean cross entropy in nats, a
            float32 scalar (float64 in a float64 model), or None.

        Raises:
            TypeError: ids or targets of another dtype. ValueError: another shape, or T too long.
        """
        self._check(ids)
        if targets is not None:
            check_ids("targets", targets)
            if targets.shape != ids.shape:
                raise ValueError(
                    f"targets have shape {tuple(targets.shape)}, ids {tuple(ids.shape)}: make them equal"
                )
        logits = self._logits(ids, None)
        if targets is None:
            return logits, None
        return (logits if return_logits else None), _loss(logits, targets)

    def decode(self, ids: Tensor, cache: Cache) -> Tensor:
        """Logits [B, T, V] of ids [B, T] that follow what `cache` holds; the cache then holds them, too."""
        check_kind("cache", cache, Cache)
        self._check(ids, cache.length)
        check_cache(cache, self.config, ids)
        found = []
        for piece in ids.split(_PIECE, dim=1) if cache.length else (ids,):
            found.append(self._logits(piece, cache))
            cache.length += piece.shape[1]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def _check(self, ids: Tensor, held: int = 0) -> None:
        check_ids("ids", ids)
        length, limit = held + ids.shape[1], self.config.max_seq_len
        if length > limit:
            raise ValueError(
                f"a row of {length} symbols is longer than max_seq_len={limit}: cut it, or build the model "
                f"with Config(max_seq_len={length}) or more (weights do not depend on it)"
            )

    def _logits(self, ids: Tensor, cache: Cache | None) -> Tensor:
        start = cache.length if cache is not None else 0
        cos, sin = self.cos[start : start + ids.shape[1]], self.sin[start : start + ids.shape[1]]
        x = self.run(self.embed(ids.long()), cos, sin, cache)
        return F.linear(x, self.embed.weight if self.head is None else self.head.weight)

    def flops_per_token(self, length: int) -> int:
        """Floating-point operations of forward and backward per symbol, in rows of `length` symbols.

        6 per weight of a matrix product, and 6 * layers * d_model * segment / rate^2 for each branch.
        """
        config = self.config
        products = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        products += self.embed.weight.numel() if self.head is None else 0
        branches = zip(config.segments, config.rates, strict=True)
        keys = sum(min(segment, length) / rate**2 for segment, rate in branches)
        return int(6 * products + 6 * config.layers * config.d_model * keys)

    def make_cache(self) -> Cache:
        """An empty cache for `decode`."""
        return Cache(self.config)

    def context(self) -> int:
        """How many positions `decode` sees at most."""
        return self.config.max_seq_len


class ImageConfig(
    Shape, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="image-longnet"
):
    """The shape of an `ImageLongNet`. Values that contradict each other raise ValueError, values of another
    type TypeError."""

    shape: tuple[int, ...] = (64, 64)
    """Sizes of an image or a volume, in pixels."""
    patch: int = 1
    """Pixels of a cell along each axis, which divides all sizes."""
    channels: int = 3
    """Of a pixel. 0: images hold symbols, one a pixel, as whole numbers."""
    symbols: int = 0
    """With `channels=0`: how many different symbols there are."""
    classes: int = 10
    labels: Labels = "image"
    """What has a class: the whole image, or each cell."""
    order: Order = "hilbert"
    """How cells are lined up, a kind of `bakeoff.token_order`."""
    tile: int = 0
    """With `order="tile"`: cells of a tile along each axis; 0 means the order's default."""
    segments: tuple[int, ...] = (256, 1024, 4096)
    rope_base: float = 100.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes("shape", self.shape)
        for name, kind in (("order", Order), ("labels", Labels)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(get_args(kind))}")
        for name in ("patch", "classes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if len(self.shape) not in (2, 3) or any(size % self.patch for size in self.shape):
            raise ValueError(f"shape={self.shape} must be 2 or 3 multiples of patch={self.patch}")
        if min(self.channels, self.symbols) < 0 or bool(self.channels) == bool(self.symbols):
            raise ValueError(
                f"channels={self.channels} and symbols={self.symbols}: one of them is above 0, the other is 0"
            )
        if self.symbols and self.patch > 1:
            raise ValueError(f"patch={self.patch} must be 1 where images hold symbols")
        if self.tile < 0 or (self.tile and self.order != "tile"):
            raise ValueError(f"tile={self.tile} must not be negative, and belongs to order='tile'")
        if self.head_dim < 2 * len(self.shape):
            raise ValueError(
                f"heads of {self.head_dim} are too narrow: each of {len(self.shape)} axes turns a pair; "
                f"d_model={2 * len(self.shape) * self.heads} is enough"
            )

    @property
    def grid(self) -> tuple[int, ...]:
        """Cells along each axis."""
        return tuple(size // self.patch for size in self.shape)


class ImageLongNet(LongNet):
    """Classes of images or volumes, or of each of their cells.

    Cells are embedded, given a learned vector for their place on each axis, lined up once in the
    configuration's order, and put back at the end. Attention is in both directions; each axis turns pairs of
    its own of every head by rotary.

    >>> model = ImageLongNet(ImageConfig(shape=(32, 32), patch=2, d_model=48, layers=3, segments=(64, 256),
    ...                                  rates=(1, 4)))
    >>> logits, _ = model(torch.randn(2, 3, 32, 32))   # [2, 10]
    >>> logits.shape
    torch.Size([2, 10])
    """

    perm: Tensor
    inverse: Tensor

    def __init__(self, config: ImageConfig) -> None:
        check_kind("config", config, ImageConfig)
        super().__init__(config, causal=False)
        self.config = config
        cells, grid, D = math.prod(config.grid), config.grid, config.d_model
        self.embed: nn.Embedding | nn.Linear = (
            nn.Embedding(config.symbols, D)
            if config.symbols
            else nn.Linear(config.channels * config.patch ** len(grid), D, bias=False)
        )
        self.places = nn.ParameterList(nn.Parameter(torch.empty(size, D)) for size in grid)
        self.head = nn.Linear(D, config.classes, bias=False)
        # Kept with the weights: models trained in one order are not for another.
        self.register_buffer("perm", torch.empty(cells, dtype=torch.int32))
        self.register_buffer("inverse", torch.empty(cells, dtype=torch.int32))
        axis_dim = config.head_dim // (2 * len(grid)) * 2
        self.make_tables(max(grid), axis_dim, config.rope_base)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As of `LongNetLM`; the tables of the order are made, too."""
        super().reset_parameters()
        order = self.order()
        self.perm.copy_(order.perm)
        self.inverse.copy_(order.inverse)

    def order(self) -> TokenOrder:
        """The order of the cells, on the CPU."""
        return token_order(self.config.order, self.config.grid, tile=self.config.tile or None)

    def forward(
        self, images: Tensor, targets: Tensor | None = None, *, return_logits: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """(logits, loss) of images.

        Args:
            images: [B, channels, *shape], floating; of symbols [B, *shape], uint8, int32 or int64, whose
                values are not checked.
            targets: [B], or [B, *grid] with labels="cell": classes, -100 where none counts. Without them the
                loss is None.
            return_logits: give logits beside the loss, too.

        Returns:
            logits [B, classes] or [B, *grid, classes], or None with targets unless asked for; loss, the mean
            cross entropy in nats, a float32 scalar (float64 in a float64 model), or None.

        Raises:
            TypeError: images or targets of another dtype. ValueError: another shape.
        """
        self._check(images, targets)
        grid = self.config.grid
        x = self.embed(images.long() if self.config.symbols else self._patches(images))
        for axis, place in enumerate(self.places):
            x = x + place.view(*(size if i == axis else 1 for i, size in enumerate(grid)), -1).to(x.dtype)
        x = permute(x.flatten(1, -2), self.perm, self.inverse)
        x = self.run(x, *self._turns())
        if self.config.labels == "image":
            logits = self.head(x.mean(1))
        else:
            logits = permute(self.head(x), self.inverse, self.perm).unflatten(1, grid)
        if targets is None:
            return logits, None
        return (logits if return_logits else None), _loss(logits, targets)

    def _patches(self, images: Tensor) -> Tensor:
        """[B, C, *shape] as the pixels of each cell, [B, *grid, C patch ...]."""
        axes, patch = len(self.config.shape), self.config.patch
        for axis in range(axes):
            images = images.unflatten(2 + 2 * axis, (-1, patch))
        order = (0, *range(2, 2 + 2 * axes, 2), 1, *range(3, 3 + 2 * axes, 2))
        return images.permute(order).flatten(1 + axes)

    def _turns(self) -> tuple[Tensor, Tensor]:
        """cos and sin [cells, pairs] of the cells in their order; each axis has pairs of its own."""
        grid, cell = self.config.grid, self.perm.long()
        at = [cell // math.prod(grid[axis + 1 :]) % size for axis, size in enumerate(grid)]
        return torch.cat([self.cos[place] for place in at], 1), torch.cat(
            [self.sin[place] for place in at], 1
        )

    def _check(self, images: Tensor, targets: Tensor | None) -> None:
        config = self.config
        if config.symbols:
            check_symbols("images", images)
        elif not isinstance(images, Tensor) or not images.is_floating_point():
            raise TypeError("images must be a floating tensor [B, channels, *shape]: call images.float()")
        want = (config.shape) if config.symbols else (config.channels, *config.shape)
        if images.ndim != 1 + len(want) or images.shape[1:] != want or not images.shape[0]:
            raise ValueError(f"images have shape {tuple(images.shape)}, expected [B, *{want}], B at least 1")
        if targets is None:
            return
        check_symbols("targets", targets)
        labelled = (images.shape[0], *(config.grid if config.labels == "cell" else ()))
        if targets.shape != labelled:
            raise ValueError(f"targets have shape {tuple(targets.shape)}, expected {labelled}")


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of logits [..., classes] and targets [...], at least in float32."""
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(exact.flatten(0, -2), targets.flatten().long())
