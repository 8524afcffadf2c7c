"""How attention and neural memories of a TitanMAC meet: as context, as gate, or memory alone.

Shapes: B rows, T time, D d_model, H heads, E = D / H, S segment, P persistent.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bakeoff.models.checks import check_no_recomputing
from bakeoff.nn import NeuralMemory, NeuralMemoryState
from bakeoff.nn.initial import StartsAnew, fill
from bakeoff.nn.memory_state import outliving
from bakeoff.nn.neural_memory import LENGTH, Projected, of_length
from bakeoff.ops import attention, rotary, swiglu
from bakeoff.ops.memory_scan import Memory

if TYPE_CHECKING:
    from bakeoff.models.titan_mac import Config

__all__ = ["MIXERS", "Mixer", "Past"]


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

    @classmethod
    def behind(cls, past: "Past | None") -> "Past":
        """`past`, or the empty one of whole rows, which each layer has for itself."""
        check_no_recomputing(past)
        return cls() if past is None else past

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


def attend(q: Tensor, k: Tensor, v: Tensor, persistent: Tensor | None, mask: Tensor) -> Tensor:
    """Attention [B, t, H E] of q [B, t, H, E] to persistent [2, P, H, E] and to k, v [B, n, H, E], these as
    mask [t, n] says."""
    if persistent is not None:
        first = _persistent_of(persistent, k)
        k, v = torch.cat([first[0], k], dim=1), torch.cat([first[1], v], dim=1)
        mask = F.pad(mask, (persistent.shape[1], 0), value=True)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


def _persistent_of(persistent: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Persistent keys and values [B, P, H, E] for those of B rows, such as `like` [B, n, H, E]."""
    if persistent is None:
        return like[:, :0], like[:, :0]
    own = persistent.to(like.dtype)[:, None].expand(-1, like.shape[0], -1, -1, -1)
    return own[0], own[1]


def _persistent(config: "Config") -> nn.Parameter | None:
    shape = (2, config.persistent, config.heads, config.head_dim)
    return nn.Parameter(torch.empty(shape)) if config.persistent else None


def _first_persistent(persistent: Tensor | None) -> None:
    if persistent is not None:
        nn.init.normal_(persistent, std=0.02)


def _memory(config: "Config", read: Literal["after", "before", "chunk"], chunk: int) -> NeuralMemory | None:
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


class AsContext(StartsAnew):
    """mac: y = attention of a segment to persistent, to itself and to what memory recalls at its positions;
    the memory learns from x + y; out(y * sigmoid(what it reads at x + y)).

    From y alone, as in the paper, no recall was learned: attention that does not know yet where to look gives
    neighbours nearly the same y.
    """

    def __init__(self, config: "Config") -> None:
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
        self.ask = Projected(D, (0,), D) if config.memory else None
        self.out = nn.Linear(D, D, bias=False)
        self.first_values()

    @torch.no_grad()
    def first_values(self) -> None:
        """Asks as the memory's own queries do."""
        _first_persistent(self.persistent)
        if self.memory is not None and self.ask is not None:
            fill(self.ask.linear.weight, self.memory.qkv.linear.weight.chunk(3)[0])

    def forward(self, x: Tensor, at: int | Tensor, cos: Tensor, sin: Tensor, past: Past | None) -> Tensor:
        """x [B, T, D], the first at position `at` of a segment, or of a settled step how many positions were
        before; cos, sin [S, E/2]; returns [B, T, D]."""
        if isinstance(at, Tensor):
            assert past is not None
            return self.step(x, at, cos, sin, past)
        past = Past.behind(past)
        q, asked = self.q(x), None
        if self.ask is not None:
            asked, past.asked = self.ask(x, past.asked)
            asked = of_length(LENGTH, asked, self.config.heads)
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
        gate, past.memory = self.memory(x + y, past.memory)
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
            recalled = self.memory.recall(of_length(LENGTH, asked, self.config.heads), past.before).to(
                x.dtype
            )
            seen = torch.stack([recalled, x], dim=2)
        B, n, E = x.shape[0], seen.shape[2], self.config.head_dim
        turns = cos.index_select(0, at), sin.index_select(0, at)
        q, k = rotary(self.q(x).unflatten(-1, (-1, E)), self.k(seen).view(B, 1, -1, E), *turns)
        places = P + n * at + torch.arange(n, device=x.device)
        for held, new in zip(past.ring, (k, self.v(seen)), strict=True):
            held.index_copy_(2, places, new.reshape(B, n, -1, E).transpose(1, 2))
        keys, values = (held.transpose(1, 2) for held in past.ring)
        y = attention(q, keys, values, lengths=places[-1:].expand(B) + 1).flatten(2)
        if self.memory is not None:
            gate, past.memory = self.memory(x + y, past.memory)
            y = y * gate.sigmoid()
        out: Tensor = self.out(y)
        return out


class AsGate(StartsAnew):
    """mag: out(y * sigmoid(what memory reads at x)), y = attention to persistent and the last S positions."""

    def __init__(self, config: "Config") -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.persistent = _persistent(config)
        self.memory = _memory(config, "after", config.chunk)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)
        self.first_values()

    def first_values(self) -> None:
        """Small persistent keys and values."""
        _first_persistent(self.persistent)

    def forward(self, x: Tensor, at: int | Tensor, cos: Tensor, sin: Tensor, past: Past | None) -> Tensor:
        """x [B, T, D], the first at position `at` of a segment, or of a settled step how many positions were
        before; cos, sin [2 S, E/2]; returns [B, T, D]."""
        if isinstance(at, Tensor):
            assert past is not None
            return self.step(x, at, cos, sin, past)
        past = Past.behind(past)
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
        if self.persistent is not None:
            first = _persistent_of(self.persistent, keys)
            keys, values = torch.cat([first[0], keys], dim=1), torch.cat([first[1], values], dim=1)
        held = self.config.persistent + (total + 1).clamp(max=S)  # the ring fills from its first place on
        y = attention(q, keys, values, lengths=held.expand(x.shape[0])).flatten(2)
        if self.memory is not None:
            gate, past.memory = self.memory(x, past.memory)
            y = y * gate.sigmoid()
        out: Tensor = self.out(y)
        return out


class Alone(nn.Module):
    """lmm: out(SiLU(gate(x)) * what memory reads at x)."""

    def __init__(self, config: "Config") -> None:
        super().__init__()
        self.memory = _memory(config, "after", config.chunk)
        self.gate = nn.Linear(config.d_model, config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, at: int | Tensor, cos: Tensor, sin: Tensor, past: Past | None) -> Tensor:
        """x [B, T, D]; the other arguments are for the other variants; returns [B, T, D]."""
        del at, cos, sin
        past = Past.behind(past)
        assert self.memory is not None
        y, past.memory = self.memory(x, past.memory)
        gate = self.gate(x)
        out: Tensor = self.out(swiglu(gate, y.to(gate.dtype)))
        return out

    def settle(self, past: Past) -> None:
        """A memory alone has its full size from the start."""


Mixer = AsContext | AsGate | Alone
MIXERS: dict[str, type[Mixer]] = {"mac": AsContext, "mag": AsGate, "lmm": Alone}
