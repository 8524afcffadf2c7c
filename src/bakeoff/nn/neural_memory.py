"""A memory that learns while it reads: a small MLP of each row and head, trained token by token.

Shapes: B rows, T time, D dim, h heads, E = D / h, H = expansion E, G = B h groups.
"""

import math
import numbers
from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bakeoff.nn.initial import StartsAnew, fill
from bakeoff.nn.last_layer import last_layer_stream
from bakeoff.nn.memory_state import NeuralMemoryState
from bakeoff.nn.norm import RMSNorm
from bakeoff.ops.memory_scan import Memory, MemoryState, memory_stream
from bakeoff.ops.rms_norm import rms_norm
from bakeoff.ops.short_conv import short_conv

__all__ = ["LENGTH", "NeuralMemory", "Projected", "Read", "of_length"]

Read = Literal["after", "before", "chunk"]
_TAPS = 4
"""Of the short convolution."""
_SMALL = 0.02
"""Deviation of the first weights of projections."""
LENGTH = 3.0
"""Of keys and queries. All hidden units share biases, whose gradients tell no key from another: what a token
writes under its own key is 1 + |s(W1 k)|^2 as strong, of which at length 3 the 1 is a quarter, at length 1
three quarters."""
_VALUE = 1.0
"""What values are shorter than: a memory of long ones grows until its own next steps are too long."""
_SHORT = 1 / 64
"""Mean square of the elements of values that stay short, so that a model learns to write little of what need
not be kept: with all values of length 1 `mac` took far longer to recall anything behind many other tokens
(results/cpu/recall-values.csv)."""

_NARROW = 16
"""Width of heads times tokens of a chunk from which steps are of full length. With full ones everywhere, of
256 memories with rates at the largest 200 random tokens made these NaN: 191 with heads of 2 and chunk=1,
61 of 2 and 2, 134 of 4 and 1, 4 of 8 and 1, none from 12 on."""


class Projected(StartsAnew):
    """SiLU of a short causal convolution of W x: x [B, T, D] to [B, T, parts width].

    At first each part is little more than W x of the token that stands `back` places before.
    """

    def __init__(self, dim: int, back: Sequence[int], width: int) -> None:
        super().__init__()
        self.back = tuple(back)
        self.linear = nn.Linear(dim, len(back) * width, bias=False)
        self.short = nn.Parameter(torch.empty(len(back) * width, _TAPS))
        self.first_values()

    def first_values(self) -> None:
        """Small weights, and taps near 1 of the token that each part begins with."""
        nn.init.normal_(self.linear.weight, std=_SMALL)
        width = len(self.short) // len(self.back)
        short = 0.1 * (2 * torch.rand(len(self.back), width, _TAPS, device=self.short.device) - 1)
        for part, places in zip(short, self.back, strict=True):
            part[:, _TAPS - 1 - places] += 1.0
        fill(self.short, short.flatten(0, 1))

    def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The result, and the state [B, taps - 1, parts width] with which the next piece goes on."""
        mixed = self.linear(x)
        before = None if state is None else state.to(mixed.dtype)
        return short_conv(mixed, self.short, activation="silu", state=before)


def of_length(length: float, x: Tensor, heads: int, short: float = 1e-6) -> Tensor:
    """x [B, T, n D] as [B, T, n h, E], every head divided by sqrt(|x|^2 + short E) / length: what has a mean
    square far below `short` stays short."""
    x = x.unflatten(-1, (heads, -1))
    weight = torch.full(x.shape[-1:], length * x.shape[-1] ** -0.5, dtype=x.dtype, device=x.device)
    out: Tensor = rms_norm(x, weight, eps=short)  # type: ignore[assignment]
    return out


class NeuralMemory(StartsAnew):
    """y_t = norm(M_t(q_t)), M a two-layer MLP per row and head that learns k_t -> v_t by gradient descent.

    With u_t the gradient of |M(k_t) - v_t|^2, taken at the memory of the start of t's chunk: S_t = decay_t
    S_{t-1} - lr_t u_t, M_t = (1 - forget_t) M_{t-1} + S_t. q, k, v are SiLU of a short convolution of
    projections of x; q and k have length 3, v is divided by sqrt(|v|^2 + E / 64). decay, forget and theta
    are sigmoids of learned functions of x per token and head, lr_t = max_lr n theta_t (1 - decay_t) /
    (chunk K_t), K_t a bound of the squared length of M(k_t)'s gradient, at first and once M holds v_t, of
    length 1: the steps of a chunk together correct its errors by 2 max_lr of their size at most while K_t
    holds, so that below 1 no gate makes the memory diverge, not even where all keys are equal. Narrow heads
    have keys that are alike with values that aren't, and what tells them apart outgrows K_t, the more the
    fewer tokens a gradient is the mean of: hence n = min(1, chunk E / 16), with learns="last", whose K_t is
    exact, 1. M begins at learned values, S at 0; both belong to one row alone. W2 is 0 at first: what is
    read is normalised, and random answers would drown what was written. Queries and keys are at first the
    same function of a token, but a key is that of the token before: asked with a token, the memory gives
    what followed it.

    Args:
        dim: D, a multiple of heads.
        heads: h memories a row, each of E = D / h inputs and outputs.
        expansion: hidden units of a memory over E.
        chunk: tokens that share the memory at which gradients are taken; 1 is exact online descent.
        read: "after": y_t is read from M_t, "before": from M_{t-1}, "chunk": from the memory at the start of
            t's chunk. All are causal.
        max_lr: as above, > 0; above 1 the memory may diverge.
        decay, forget: what these gates begin with, in (0, 1).
        momentum: False sets decay = 0: S_t = -lr_t u_t.
        per_token: False makes the gates learned constants of a head.
        ascent: turns the sign of the inner gradient (an ablation); errors then grow, and where heads are
            narrow and rows long, without end.
        learns: "all" of the memory or its "last" layer alone, the first being an ordinary parameter then.

    `forward(x, state=None)` takes x [B, T, D] of any T >= 1 and returns (y [B, T, D], state): whole rows, or
    pieces that each go on with the state of the one before, give the same y. The memory learns under no_grad
    and inference_mode, too.

    Raises ValueError for settings outside these ranges, x of another shape or device, a state of another
    configuration, device or number of rows; TypeError for x of another dtype than the parameters', but under
    autocast, or a state of parameters of another dtype.

    Source: Behrouz et al. 2024, Titans: Learning to Memorize at Test Time, sections 3.1 and 4.4.

    >>> memory = NeuralMemory(16, heads=2, chunk=4)
    >>> x = torch.randn(3, 10, 16)
    >>> whole, _ = memory(x)
    >>> first, state = memory(x[:, :7])
    >>> rest, _ = memory(x[:, 7:], state)
    >>> torch.allclose(torch.cat([first, rest], dim=1), whole, atol=1e-5)
    True
    """

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        expansion: int = 2,
        chunk: int = 64,
        read: Read = "after",
        *,
        max_lr: float = 0.8,
        decay: float = 0.9,
        forget: float = 0.001,
        momentum: bool = True,
        per_token: bool = True,
        ascent: bool = False,
        learns: Literal["all", "last"] = "all",
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        _check(dim, heads, expansion, chunk, read, max_lr, decay, forget, learns)
        _check_kinds(bool, "True or False", momentum=momentum, per_token=per_token, ascent=ascent)
        _check_kinds(numbers.Real, "a number", norm_eps=norm_eps)
        if not 0.0 <= norm_eps < math.inf:
            raise ValueError(f"norm_eps={norm_eps} must be finite and at least 0: 1e-6 is usual")
        self.dim, self.heads, self.chunk, self.read = dim, heads, chunk, read
        self.max_lr, self.momentum, self.ascent, self.learns = max_lr, momentum, ascent, learns
        self.stream = memory_stream if learns == "all" else last_layer_stream
        self.top_lr = max_lr * (min(1.0, chunk * (dim // heads) / _NARROW) if learns == "all" else 1.0)
        E, H = dim // heads, expansion * (dim // heads)
        self.qkv = Projected(dim, (0, 1, 0), dim)
        self._gates_begin = (0.0, _logit(forget), *([_logit(decay)] if momentum else []))
        self.gates = nn.Linear(dim, len(self._gates_begin) * heads) if per_token else None
        if self.gates is None:
            self.gate_bias = nn.Parameter(torch.empty(len(self._gates_begin) * heads))
        self.w1 = nn.Parameter(torch.empty(heads, H, E))
        self.b1 = nn.Parameter(torch.empty(heads, H))
        self.w2 = nn.Parameter(torch.empty(heads, E, H))
        self.b2 = nn.Parameter(torch.empty(heads, E))
        self.norm = RMSNorm(E, norm_eps)
        self.first_values()
        self.config = (
            f"dim={dim} heads={heads} expansion={expansion} chunk={chunk} read={read} momentum={momentum} "
            f"per_token={per_token} ascent={ascent} learns={learns}"
        )

    @torch.no_grad()
    def first_values(self) -> None:
        """Keys' projection is the queries', gates are their biases but for small weights, the memory's first
        layer is normal and its second one 0."""
        q, _, v = self.qkv.linear.weight.chunk(3)
        fill(self.qkv.linear.weight, torch.cat([q, q, v]))
        bias = torch.tensor(self._gates_begin, device=self.w1.device).repeat_interleave(self.heads)
        if self.gates is None:
            fill(self.gate_bias, bias)
        else:
            nn.init.normal_(self.gates.weight, std=_SMALL)
            fill(self.gates.bias, bias)
        H, E = self.w1.shape[1:]
        fill(self.w1, torch.randn(self.w1.shape, device=self.w1.device) * math.sqrt(2 / (E + H)))
        for rest in (self.b1, self.w2, self.b2):
            nn.init.zeros_(rest)

    def start(self, x: Tensor) -> NeuralMemoryState:
        """The state before the first token of rows such as x [B, T, D]."""
        w1, b1, w2, b2 = (_own(p, x.shape[0]) for p in (self.w1, self.b1, self.w2, self.b2))
        memory = w1, b1, w2, b2
        at_rest = torch.zeros_like(w1), torch.zeros_like(b1), torch.zeros_like(w2), torch.zeros_like(b2)
        conv = x.new_zeros(x.shape[0], _TAPS - 1, 3 * self.dim)
        return NeuralMemoryState(self.config, MemoryState(memory, at_rest, memory), conv).outliving()

    def reset(self, state: NeuralMemoryState, rows: Tensor) -> NeuralMemoryState:
        """`state` with the rows chosen by the bool tensor rows [B] as before their first token.

        Nothing waits for the device. Where the state is within a chunk, a reset row's first chunk is what is
        left of that.
        """
        if not isinstance(rows, Tensor) or rows.dtype != torch.bool or rows.ndim != 1:
            raise TypeError("rows must be a bool tensor [B], true where a row begins anew")
        self._check_state(state, rows.shape[0], rows.device, "rows has a place for")
        groups = rows.repeat_interleave(self.heads, output_size=rows.shape[0] * self.heads)
        fresh, tensors = self.start(state.conv).tensors(), state.tensors()
        for name, old in tensors.items():
            chosen = (rows if name == "conv" else groups).view(-1, *[1] * (old.ndim - 1))
            tensors[name] = torch.where(chosen, fresh[name].to(old.dtype), old)
        return state.of(tensors).outliving()

    def recall(self, q: Tensor, memory: Memory) -> Tensor:
        """norm(M(q)) [B, T, D] of q [B, T, h, E] from memories that stay as they are."""
        w1, b1, w2, b2 = (w.to(q.dtype) for w in memory)
        hidden = F.silu(torch.baddbmm(b1[:, None], _grouped(q), w1.mT))
        return self._normed(torch.baddbmm(b2[:, None], hidden, w2.mT), q.shape[0])

    def forward(self, x: Tensor, state: NeuralMemoryState | None = None) -> tuple[Tensor, NeuralMemoryState]:
        """(y [B, T, D], the state after x) of x [B, T, D], which goes on from `state`."""
        if x.ndim != 3 or x.shape[-1] != self.dim or not x.numel():
            raise ValueError(f"x has shape {tuple(x.shape)}, expected [B, T, {self.dim}], at least one token")
        weight = self.qkv.linear.weight
        if x.device != weight.device:
            raise ValueError(
                f"x is on {x.device}, the parameters on {weight.device}: move one with .to(device)"
            )
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"x is {x.dtype}, the parameters are {weight.dtype}: cast one with .to(dtype)")
        if state is None:
            state = self.start(x)
        else:
            self._check_state(state, x.shape[0], x.device)
        qkv, conv = self.qkv(x, state.conv)
        qk = of_length(LENGTH, qkv[..., : 2 * self.dim], 2 * self.heads)
        q, k = _grouped(qk[:, :, : self.heads]), _grouped(qk[:, :, self.heads :])
        v = _grouped(of_length(_VALUE, qkv[..., 2 * self.dim :], self.heads, short=_SHORT))
        y, scan = self.stream(q, k, v, *self._gates(x, k), state.scan, chunk=self.chunk, read=self.read)
        return self._normed(y, x.shape[0]), NeuralMemoryState(self.config, scan, conv).outliving()

    def _gates(self, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Learning rate, decay of the momentum and share forgotten of x [B, T, D] with keys k [G, T, E], each
        [G, T] in float32 or wider."""
        raw = self.gates(x) if self.gates is not None else self.gate_bias.expand(*x.shape[:2], -1)
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32)).unflatten(-1, (-1, self.heads))
        lr, forget, *decay = raw.permute(2, 0, 3, 1).flatten(1, 2).sigmoid().unbind(0)
        lr = (-1 if self.ascent else 1) * self.top_lr / self.chunk * lr / self._gain(k)
        return (lr * (1 - decay[0]), decay[0], forget) if decay else (lr, torch.zeros_like(lr), forget)

    def _gain(self, k: Tensor) -> Tensor:
        """K [G, T] of keys k [G, T, E]: a bound of the squared length of an answer's gradient, with
        s = s(W1 k + b1) 1 + |s|^2 from W2 and b2, and (1 + |k|^2) |W2 s'|^2 from W1 and b1, where to the
        initial W2 comes what it holds once the value is learned, v s^T / (1 + |s|^2)."""
        wide = torch.promote_types(self.w1.dtype, torch.float32)
        z = (k.unflatten(0, (-1, self.heads)).to(self.w1.dtype) @ self.w1.mT).to(wide) + self.b1[:, None]
        gate = z.sigmoid()
        hidden = z * gate
        gain: Tensor = 1 + hidden.square().sum(-1)
        if self.learns == "all":
            slope = (gate * (1 + z * (1 - gate))).square()
            learned = _VALUE**2 * (slope * hidden.square()).sum(-1) / gain.square()
            first = (slope * self.w2.square().sum(1)[:, None]).sum(-1)
            gain = gain + (1 + LENGTH**2) * (first + learned)
        return gain.flatten(0, 1)

    def _normed(self, y: Tensor, rows: int) -> Tensor:
        """y [G, T, E], every head normalised, as [B, T, D]."""
        y = y.unflatten(0, (rows, self.heads)).transpose(1, 2)
        out: Tensor = self.norm(y).flatten(2)
        return out

    def _check_state(
        self, state: NeuralMemoryState, rows: int, device: torch.device, given: str = "x has"
    ) -> None:
        if not isinstance(state, NeuralMemoryState):
            raise TypeError(f"state must be a NeuralMemoryState, got {type(state).__name__}")
        if state.config != self.config:
            raise ValueError(
                f"state is of another NeuralMemory, {state.config}; this one is {self.config}: begin with "
                "state=None"
            )
        if state.rows != rows:
            raise ValueError(
                f"{given} {rows} rows, the state has {state.rows}: carry on the same rows, or begin with "
                "state=None"
            )
        wide = torch.promote_types(self.w1.dtype, torch.float32)
        if state.memory[0].dtype != wide:
            raise TypeError(
                f"the state is {state.memory[0].dtype}, that of these parameters is {wide}: begin with "
                "state=None"
            )
        if state.conv.device != device:
            raise ValueError(
                f"the state is on {state.conv.device}, expected {device}: call state.to('{device}')"
            )

    def extra_repr(self) -> str:
        return f"{self.config} max_lr={self.max_lr}"


def _grouped(x: Tensor) -> Tensor:
    """x [B, T, h, E] as [G, T, E]."""
    return x.transpose(1, 2).flatten(0, 1)


def _own(parameter: Tensor, rows: int) -> Tensor:
    """A copy [G, ...] of the initial memory [h, ...] for every row, in float32 or wider."""
    wide = parameter.to(torch.promote_types(parameter.dtype, torch.float32))
    return wide.expand(rows, *wide.shape).flatten(0, 1)


def _logit(share: float) -> float:
    return math.log(share / (1 - share))


def _check_kinds(kind: type, called: str, **given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise TypeError(f"{name}={value!r} must be {called}")


def _check(
    dim: int,
    heads: int,
    expansion: int,
    chunk: int,
    read: str,
    max_lr: float,
    decay: float,
    forget: float,
    learns: str,
) -> None:
    sizes = {"dim": dim, "heads": heads, "expansion": expansion, "chunk": chunk}
    _check_kinds(numbers.Integral, "a whole number", **sizes)
    _check_kinds(numbers.Real, "a number", max_lr=max_lr, decay=decay, forget=forget)
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    if dim % heads:
        raise ValueError(f"dim={dim} must be a multiple of heads={heads}")
    if read not in get_args(Read):
        raise ValueError(f"read={read!r} must be one of {', '.join(get_args(Read))}")
    if learns not in ("all", "last"):
        raise ValueError(f"learns={learns!r} must be 'all' or 'last'")
    if not 0.0 < max_lr < math.inf:
        raise ValueError(f"max_lr={max_lr} must be positive and finite: 0.8 is usual, 0 would never write")
    for name, share in (("decay", decay), ("forget", forget)):
        if not 0.0 < share < 1.0:
            raise ValueError(f"{name}={share} must be in (0, 1): gates begin there and are learned")
