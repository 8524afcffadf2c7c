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
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bakeoff.models.caching import DecodeCache
from bakeoff.models.checks import check_cache, check_fields, check_ids, check_kind
from bakeoff.models.generation import Generates
from bakeoff.nn import MLP, HasRotaryTables, NeuralMemory, NeuralMemoryState, RMSNorm, attend_one
from bakeoff.nn.memory_state import outliving
from bakeoff.nn.neural_memory import Projected, unit
from bakeoff.ops import rotary, swiglu
from bakeoff.ops.memory_scan import Memory

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
    max_lr: float = 0.25
    """Largest learning rate of the memories, of a chunk's mean gradient."""
    forget: float = 0.01
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
            raise ValueError(
                f"segment={self.segment} must be a multiple of chunk={self.chunk}, so that a segment begins "
                f"with a memory that has learned all before it; chunk={math.gcd(self.segment, self.chunk)} is"
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


@dataclass
class Past:
    """What one layer remembers of earlier positions."""

    memory: NeuralMemoryState | None = None
    before: Memory | None = None
    """The memory at the segment's start."""
    asked: Tensor | None = None
    """State of the convolution of what is asked."""
    k: Tensor | None = None
    """Keys of the segment so far, [B, n, H, E], as they are attended to; of mac twice as many."""
    v: Tensor | None = None
    raw: Tensor | None = None
    """Of mag: the same keys before rotation."""
    last: tuple[Tensor, Tensor, Tensor] | None = None
    """Of mag: keys, rotated as this segment attends to them, values, and keys before rotation of the segment
    before."""
    ring: tuple[Tensor, Tensor] | None = None
    """Once settled: keys and values by place, which new ones overwrite. Of mac [B, H, P + n S, E], behind the
    persistent ones a segment's. Of mag [B, S, H, E], keys before rotation, of this segment up to here and of
    the one before it from here on."""

    def state(self) -> dict[str, Tensor]:
        """What a settled step makes anew."""
        found = {} if self.asked is None else {"asked": self.asked}
        if self.memory is not None:
            filled = torch.as_tensor(self.memory.scan.filled, device=self.memory.conv.device)
            found |= {**self.memory.tensors(), "filled": filled}
        if self.before is not None:
            found |= {f"before {i}": w for i, w in enumerate(self.before)}
        return found

    def put(self, state: dict[str, Tensor]) -> None:
        """Takes tensors for those that `state` gives."""
        self.asked = state.get("asked")
        if self.memory is not None:
            filled = self.memory.scan._replace(filled=state["filled"])
            self.memory = replace(self.memory, scan=filled).of(state)
        if self.before is not None:
            w1, b1, w2, b2 = (state[f"before {i}"] for i in range(4))
            self.before = w1, b1, w2, b2

    def detach(self) -> None:
        """Cuts the way of gradients into earlier pieces."""
        self.memory = self.memory.detach() if self.memory else None
        if self.before:
            w1, b1, w2, b2 = (w.detach() for w in self.before)
            self.before = w1, b1, w2, b2
        if self.last:
            turned, v, raw = (held.detach() for held in self.last)
            self.last = turned, v, raw
        for name in ("asked", "k", "v", "raw"):
            held = getattr(self, name)
            setattr(self, name, None if held is None else held.detach())


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
        return [tensor for past in self.layers for tensor in past.ring or ()]

    def widen(self, model: Any, at: Tensor) -> None:
        for block, past in zip(model.blocks, self.layers, strict=True):
            block.mixer.settle(past)
            past.k = past.v = past.raw = past.last = None

    def detach(self) -> None:
        """Lets a backward of what comes next stop here, as for training on pieces of long rows."""
        for past in self.layers:
            past.detach()


def attend(q: Tensor, k: Tensor, v: Tensor, persistent: Tensor | None, mask: Tensor) -> Tensor:
    """Attention [B, t, H E] of q [B, t, H, E] to persistent [2, P, H, E] and to k, v [B, n, H, E], these as
    mask [t, n] says."""
    if persistent is not None:
        first = _persistent_of(persistent, k)
        k, v = torch.cat([first[0], k], dim=1), torch.cat([first[1], v], dim=1)
        mask = F.pad(mask, (persistent.shape[1], 0), value=True)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


def _bias(seen: Tensor) -> Tensor:
    """What makes scores those of attention to what is seen alone."""
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -math.inf)


def _persistent_of(persistent: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Persistent keys and values [B, P, H, E] for those of B rows, such as `like` [B, n, H, E]."""
    if persistent is None:
        return like[:, :0], like[:, :0]
    own = persistent.to(like.dtype)[:, None].expand(-1, like.shape[0], -1, -1, -1)
    return own[0], own[1]


def _persistent(config: Config) -> nn.Parameter | None:
    shape = (2, config.persistent, config.heads, config.head_dim)
    return nn.Parameter(0.02 * torch.randn(shape)) if config.persistent else None


def _memory(config: Config, read: Literal["after", "before", "chunk"], chunk: int) -> NeuralMemory | None:
    if not config.memory:
        return None
    return NeuralMemory(
        config.d_model, config.heads, config.expansion, chunk, read,
        max_lr=config.max_lr, forget=config.forget, momentum=config.momentum,
        per_token=config.per_token, ascent=config.ascent,
        learns=config.learns, norm_eps=config.norm_eps,
    )  # fmt: skip


def _behind(held: Tensor | None, new: Tensor) -> Tensor:
    return new if held is None else outliving(torch.cat([held, new], dim=1))


class AsContext(nn.Module):
    """mac: y = attention of a segment to persistent, to itself and to what memory recalls at its positions;
    the memory learns from y; out(y * sigmoid(what it reads at y))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        D = config.d_model
        self.config = config
        self.q = nn.Linear(D, D, bias=False)
        self.k = nn.Linear(D, D, bias=False)
        self.v = nn.Linear(D, D, bias=False)
        self.persistent = _persistent(config)
        segment = config.gate == "segment"
        chunk, read = (config.segment, "chunk") if segment else (config.chunk, "before")
        self.memory = _memory(config, read, chunk)  # type: ignore[arg-type]
        self.ask = Projected(D, 1) if config.memory else None
        self.out = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor, at: int, cos: Tensor, sin: Tensor, past: Past) -> Tensor:
        """x [B, T, D], the first at position `at` of a segment; cos, sin [S, E/2]; returns [B, T, D]."""
        q, asked = self.q(x), None
        if self.ask is not None:
            asked, past.asked = self.ask(x, past.asked)
            asked = unit(asked, self.config.heads)
        pieces, begin = [], 0
        while begin < x.shape[1]:
            end = min(begin + self.config.segment - at, x.shape[1])
            part = slice(begin, end)
            turns = cos[at : at + end - begin], sin[at : at + end - begin]
            recalled = None if asked is None else asked[:, part]
            pieces.append(self._piece(x[:, part], q[:, part], recalled, turns, at, past))
            begin, at = end, 0
        out: Tensor = self.out(pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1))
        return out

    def _piece(
        self, x: Tensor, q: Tensor, asked: Tensor | None, turns: tuple[Tensor, Tensor], at: int, past: Past
    ) -> Tensor:
        """Positions of one segment, from `at` on."""
        B, t, _ = x.shape
        E, seen = self.config.head_dim, x[:, :, None]
        if at == 0:
            past.k = past.v = None
        if self.memory is not None and asked is not None:
            if past.memory is None:
                past.memory = self.memory.start(x)
            if at == 0:
                past.before = past.memory.memory
            assert past.before is not None
            recalled = self.memory.recall(asked, past.before).to(x.dtype)
            seen = torch.stack([recalled, x], dim=2)  # [B, t, 2, D]: neighbours share a position
        n = seen.shape[2]
        q, k = rotary(q.unflatten(-1, (-1, E)), self.k(seen).view(B, t, -1, E), *turns)
        past.k = _behind(past.k, k.view(B, t * n, -1, E))
        past.v = _behind(past.v, self.v(seen).view(B, t * n, -1, E))
        places = torch.arange(at + t, device=x.device)
        mask = (places <= places[at:, None]).repeat_interleave(n, dim=1)
        y = attend(q, past.k, past.v, self.persistent, mask)
        if self.memory is None:
            return y
        gate, past.memory = self.memory(y, past.memory)
        gated: Tensor = y * gate.sigmoid()
        return gated

    def settle(self, past: Past) -> None:
        """Puts the segment so far into a ring of its full length, behind the persistent keys and values."""
        assert past.k is not None and past.v is not None
        size = self.config.segment * (1 + self.config.memory)
        first = _persistent_of(self.persistent, past.k)
        rings = (
            torch.cat([own, F.pad(held, (0, 0, 0, 0, 0, size - held.shape[1]))], dim=1)
            .transpose(1, 2)
            .contiguous()
            for own, held in zip(first, (past.k, past.v), strict=True)
        )
        past.ring = next(rings), next(rings)

    def step(self, x: Tensor, total: Tensor, cos: Tensor, sin: Tensor, past: Past) -> Tensor:
        """x [B, 1, D] behind `total` [1] positions; returns [B, 1, D]."""
        assert past.ring is not None
        at, seen, P = total % self.config.segment, x[:, :, None], self.config.persistent
        if self.memory is not None and self.ask is not None:
            assert past.memory is not None and past.before is not None
            asked, past.asked = self.ask(x, past.asked)
            pairs = zip(past.memory.memory, past.before, strict=True)
            w1, b1, w2, b2 = (torch.where(at == 0, now, before) for now, before in pairs)
            past.before = w1, b1, w2, b2
            recalled = self.memory.recall(unit(asked, self.config.heads), past.before).to(x.dtype)
            seen = torch.stack([recalled, x], dim=2)
        B, n, E = x.shape[0], seen.shape[2], self.config.head_dim
        turns = cos.index_select(0, at), sin.index_select(0, at)
        q, k = rotary(self.q(x).unflatten(-1, (-1, E)), self.k(seen).view(B, 1, -1, E), *turns)
        places = P + n * at + torch.arange(n, device=x.device)
        for held, new in zip(past.ring, (k, self.v(seen)), strict=True):
            held.index_copy_(2, places, new.reshape(B, n, -1, E).transpose(1, 2))
        seen = torch.arange(past.ring[0].shape[2], device=x.device) <= places[-1:]
        y = attend_one(q, *past.ring, _bias(seen))
        if self.memory is not None:
            gate, past.memory = self.memory(y, past.memory)
            y = y * gate.sigmoid()
        out: Tensor = self.out(y)
        return out


class AsGate(nn.Module):
    """mag: out(y * sigmoid(what memory reads at x)), y = attention to persistent and the last S positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.persistent = _persistent(config)
        self.memory = _memory(config, "after", config.chunk)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, at: int, cos: Tensor, sin: Tensor, past: Past) -> Tensor:
        """x [B, T, D], the first at position `at` of a segment; cos, sin [2 S, E/2]; returns [B, T, D]."""
        qkv, S = self.qkv(x).unflatten(-1, (3, -1, self.config.head_dim)), self.config.segment
        pieces, begin = [], 0
        while begin < x.shape[1]:
            end = min(begin + S - at, x.shape[1])
            if at == 0 and past.k is not None:
                self._next_segment(cos, sin, past)
            q, k, v = qkv[:, begin:end].unbind(2)
            places = slice(S + at, S + at + end - begin)
            past.raw, past.v = _behind(past.raw, k), _behind(past.v, v)
            q, k = rotary(q, k, cos[places], sin[places])
            past.k = _behind(past.k, k)
            pieces.append(self._attend(q, at, past))
            begin, at = end, 0
        y = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        if self.memory is not None:
            gate, past.memory = self.memory(x, past.memory)
            y = y * gate.sigmoid()
        out: Tensor = self.out(y)
        return out

    def _next_segment(self, cos: Tensor, sin: Tensor, past: Past) -> None:
        """The segment's keys and values become those of the segment before."""
        assert past.raw is not None and past.v is not None
        turned, _ = rotary(past.raw, past.raw[:, :, :0], cos, sin)
        past.last = outliving(turned), past.v, past.raw
        past.k = past.raw = past.v = None

    def _attend(self, q: Tensor, at: int, past: Past) -> Tensor:
        """Of q [B, t, H, E], from position `at` of the segment on."""
        assert past.k is not None and past.v is not None
        places = torch.arange(self.config.segment, device=q.device)
        end = at + q.shape[1]
        asking = places[at:end, None]
        k, v, mask = past.k, past.v, places[:end] <= asking
        if past.last is not None:  # of the segment before what is less than S positions away
            k, v = torch.cat([past.last[0], k], dim=1), torch.cat([past.last[1], v], dim=1)
            mask = torch.cat([places > asking, mask], dim=1)
        return attend(q, k, v, self.persistent, mask)

    def settle(self, past: Past) -> None:
        """Puts the segment so far, and from its end on the one before, into a ring."""
        assert past.raw is not None and past.v is not None
        S, now = self.config.segment, past.raw.shape[1]
        if past.last is None:
            rest = tuple(
                held.new_zeros(held.shape[0], S - now, *held.shape[2:]) for held in (past.raw, past.v)
            )
        else:
            rest = past.last[2][:, now:], past.last[1][:, now:]
        past.ring = torch.cat([past.raw, rest[0]], dim=1), torch.cat([past.v, rest[1]], dim=1)

    def step(self, x: Tensor, total: Tensor, cos: Tensor, sin: Tensor, past: Past) -> Tensor:
        """x [B, 1, D] behind `total` [1] positions; returns [B, 1, D]."""
        assert past.ring is not None
        S = self.config.segment
        at, places = total % S, torch.arange(S, device=x.device)
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.config.head_dim)).unbind(2)
        for held, new in zip(past.ring, (k, v), strict=True):
            held.index_copy_(1, at, new)
        keys, values = past.ring
        own = places <= at
        turns = places + S * own
        keys, _ = rotary(keys, keys[:, :, :0], cos.index_select(0, turns), sin.index_select(0, turns))
        q, _ = rotary(q, q[:, :, :0], cos.index_select(0, S + at), sin.index_select(0, S + at))
        seen = own | (total >= S)
        if self.persistent is not None:
            first = _persistent_of(self.persistent, keys)
            keys, values = torch.cat([first[0], keys], dim=1), torch.cat([first[1], values], dim=1)
            seen = F.pad(seen, (self.config.persistent, 0), value=True)
        y = attend_one(q, keys.transpose(1, 2), values.transpose(1, 2), _bias(seen))
        if self.memory is not None:
            gate, past.memory = self.memory(x, past.memory)
            y = y * gate.sigmoid()
        out: Tensor = self.out(y)
        return out


class Alone(nn.Module):
    """lmm: out(SiLU(gate(x)) * what memory reads at x)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.memory = _memory(config, "after", config.chunk)
        self.gate = nn.Linear(config.d_model, config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, at: int | Tensor, cos: Tensor, sin: Tensor, past: Past) -> Tensor:
        """x [B, T, D]; the other arguments are for the other variants; returns [B, T, D]."""
        del at, cos, sin
        assert self.memory is not None
        y, past.memory = self.memory(x, past.memory)
        gate = self.gate(x)
        out: Tensor = self.out(swiglu(gate, y.to(gate.dtype)))
        return out

    def settle(self, past: Past) -> None:
        """A memory alone has its full size from the start."""

    step = forward


_MIXERS: dict[str, type[AsContext | AsGate | Alone]] = {"mac": AsContext, "mag": AsGate, "lmm": Alone}


class Block(nn.Module):
    """One layer. Takes and returns the stream as (branch, residual); their sum is the stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.mixer_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mixer = _MIXERS[config.variant](config)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = MLP(config.d_model, config.ff_dim)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        at: int | Tensor,
        cos: Tensor,
        sin: Tensor,
        past: Past,
        drops: bool,
    ) -> tuple[Tensor, Tensor]:
        """`at` is the first position's in its segment; of a settled step, how many positions were before."""
        if residual is None:  # the first layer: nothing to add yet
            h, residual = self.mixer_norm(x), x
        else:
            h, residual = self.mixer_norm(x, residual)
        if isinstance(at, Tensor):
            x = self.mixer.step(h, at, cos, sin, past)
        else:
            x = F.dropout(self.mixer(h, at, cos, sin, past), self.dropout, drops)
        h, residual = self.mlp_norm(x, residual)
        return F.dropout(self.mlp(h), self.dropout, drops), residual


class TitanMAC(Generates, HasRotaryTables):
    """A causal language model over `config.vocab` symbols, bytes by default.

    >>> model = TitanMAC(Config.sizes("tiny"))
    >>> ids = torch.randint(256, (2, 96))
    >>> logits, _ = model(ids)                     # [2, 96, 256]
    >>> _, loss = model(ids[:, :-1], ids[:, 1:])   # mean cross entropy in nats
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        check_kind("config", config, Config)
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = None if config.tie else nn.Linear(config.d_model, config.vocab, bias=False)
        # A segment, and for a sliding window the one before; rotary turns by distance, so rows have no end.
        self.make_tables(2 * config.segment, config.head_dim, config.rope_base)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal matrices of deviation 0.02; those that end a branch are divided by sqrt(2 * layers), so that
        the stream's variance does not grow with depth. Memories and their gates keep their own start."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                ends_branch = name.endswith((".out", ".down"))
                nn.init.normal_(module.weight, std=0.02 * (2 * self.config.layers) ** (-0.5 * ends_branch))

    def forward(
        self, ids: Tensor, targets: Tensor | None = None, *, return_logits: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """(logits, loss) of whole rows, every one of which begins with fresh memories.

        Args:
            ids: [B, T] symbols, uint8, int32 or int64, T >= 1. Their values are not checked, which would wait
                for the device.
            targets: [B, T] next symbols, -100 where none counts. Without them the loss is None.
            return_logits: give logits beside the loss, too.

        Returns:
            logits [B, T, V], or None with targets unless asked for; loss, the mean cross entropy in nats, a
            float32 scalar (float64 in a float64 model), or None.

        Raises:
            TypeError: ids or targets of another dtype. ValueError: another shape.
        """
        check_ids("ids", ids)
        if targets is not None:
            check_ids("targets", targets)
            if targets.shape != ids.shape:
                raise ValueError(
                    f"targets have shape {tuple(targets.shape)}, ids {tuple(ids.shape)}: make them equal"
                )
        logits = self._logits(ids, None)
        if targets is None:
            return logits, None
        exact = logits if logits.dtype == torch.float64 else logits.float()
        loss = F.cross_entropy(exact.flatten(0, 1), targets.flatten().long())
        return (logits if return_logits else None), loss

    def decode(self, ids: Tensor, cache: Cache) -> Tensor:
        """Logits [B, T, V] of ids [B, T] that follow what `cache` holds; the cache then holds them, too.

        A step costs the same however long the text is: what is older than the attention's window is in the
        memories alone.
        """
        check_kind("cache", cache, Cache)
        check_ids("ids", ids)
        check_cache(cache, self.config, ids)
        with cache.step():
            logits = self._logits(ids, cache)
        cache.length += ids.shape[1]
        cache.rows = ids.shape[0]
        return logits

    def _logits(self, ids: Tensor, cache: Cache | None) -> Tensor:
        at: int | Tensor = cache.length % self.config.segment if cache is not None else 0
        if cache is not None and cache.at is not None:
            at = cache.at
        layers = cache.layers if cache is not None else [Past() for _ in self.blocks]
        drops = self.training and cache is None  # decoding never drops
        x, residual = self.embed(ids.long()), None
        for block, past in zip(self.blocks, layers, strict=True):
            x, residual = block(x, residual, at, self.cos, self.sin, past, drops)
        x, _ = self.norm(x, residual)
        return F.linear(x, self.embed.weight if self.head is None else self.head.weight)

    def flops_per_token(self, length: int) -> int:
        """Floating-point operations of forward and backward per symbol, in rows of `length` symbols.

        6 per weight of a matrix product, 12 * d_model for each key that a query attends to, and three times
        those of a memory's forward: 22 E H and 4 chunk (E + H) a head.
        """
        config, mac = self.config, self.config.variant == "mac"
        products = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        if mac and config.memory:  # keys and values of what is recalled, too
            products += 2 * config.layers * config.d_model**2
        products += self.embed.weight.numel() if self.head is None else 0
        near = min(length, config.segment)
        keys = {"mac": (1 + config.memory) * near / 2, "mag": near, "lmm": -config.persistent}[config.variant]
        attending = 12 * config.d_model * (config.persistent + keys)
        E, H, b = config.head_dim, config.expansion * config.head_dim, min(config.chunk, length)
        memory = 3 * config.heads * (22 * E * H + 4 * b * (E + H)) * config.memory
        return int(6 * products + config.layers * (attending + memory))

    def make_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for `decode`, of the same size for any number of positions."""
        del capacity
        return Cache(self.config)

    def context(self) -> None:
        """`decode` goes on without end."""
