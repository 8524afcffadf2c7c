"""Long filters with learned parameters, one per channel: y = q * (h * (k v)).

Shapes: B batch, T time, D channels, K poles a channel, L taps.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bakeoff.nn.initial import fill
from bakeoff.nn.memory_state import outliving
from bakeoff.ops import long_conv, pole_scan, spectral_filter

__all__ = ["MinimumPhase", "Past", "Poles", "Taps", "WholeRow"]

_OVERSAMPLING = 8  # of a minimum-phase filter's frequencies, so that its cepstrum hardly wraps around
_PEAKS = 64  # control points of its magnitude
_FASTEST = 80.0  # of a decay's logarithm: exp of more is infinite in float32, and infinity times age 0 is NaN


class Past:
    """What filters remember between the pieces of a sequence: its end, or the states of poles, by place."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}
        self.settled = False
        self._reach: dict[str, int] = {}
        self._made: dict[str, Tensor] = {}

    def behind(self, place: str, x: Tensor, reach: int) -> tuple[Tensor, int]:
        """x [B, T, C] behind up to `reach` earlier positions, and how many these are; keeps its end."""
        held = self.kept.get(place)
        whole = x if held is None else torch.cat([held, x], dim=1)
        end = whole[:, max(0, whole.shape[1] - reach) :]
        self.kept[place] = end if self.settled else end.clone()  # a view would keep all of it
        self._reach[place] = reach
        return whole, whole.shape[1] - x.shape[1]

    def settle(self) -> None:
        """From here on one position a call, and parameters stay: ends have their full length, with zeros
        before the first position, and what is made of parameters alone is kept."""
        self.settled = True
        for place, reach in self._reach.items():
            held = self.kept[place]
            self.kept[place] = F.pad(held, (0, 0, reach - held.shape[1], 0))

    def once(self, place: str, make: Callable[[], Tensor]) -> Tensor:
        """What `make` makes of parameters alone; once settled it is made once."""
        if not self.settled:
            return make()
        if place not in self._made:
            self._made[place] = make()
        return self._made[place]


def _wide(parameter: Tensor) -> Tensor:
    """In float32, or float64 as it is: filters in 16 bits would be other filters."""
    return parameter if parameter.dtype == torch.float64 else parameter.float()


def _rate(decay: Tensor) -> Tensor:
    return _wide(decay).clamp(max=_FASTEST).exp()


class Poles(nn.Module):
    """h[n] = Re sum_k coef_k p_k^n + skip [n = 0], p = exp(-e^decay + i theta).

    Time constants are spread from 1 to the model's length, frequencies from 0 to pi; scaled so that noise
    keeps its variance (as in Orvieto et al. 2023).
    """

    def __init__(self, channels: int, poles: int, length: int) -> None:
        super().__init__()
        D, K, self.length = channels, poles, length
        self.decay = nn.Parameter(torch.empty(D, K))
        self.theta = nn.Parameter(torch.empty(D, K))
        self.coef = nn.Parameter(torch.empty(D, K, 2))
        self.skip = nn.Parameter(torch.empty(D))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Time constants and frequencies drawn as above, normal coefficients, no skip."""
        shape, device = self.coef.shape, self.coef.device
        time = torch.exp(torch.rand(shape[:2], device=device) * math.log(self.length))
        fill(self.decay, -time.log())
        fill(self.theta, math.pi * torch.rand(shape[:2], device=device) ** 2)
        scale = (1 - torch.exp(-2 / time)).sqrt() / math.sqrt(shape[1])
        fill(self.coef, torch.randn(shape, device=device) * scale[..., None])
        nn.init.zeros_(self.skip)

    def forward(self, k: Tensor, v: Tensor, q: Tensor, past: Past | None, place: str) -> Tensor:
        """q * (h * (k v)), all [B, T, D]."""
        u = k * v
        state = None if past is None else past.kept.get(place)
        coef = torch.view_as_complex(_wide(self.coef))
        radius = -_rate(self.decay) if past is None else past.once(place, lambda: -_rate(self.decay))
        y, state = pole_scan(u, radius, _wide(self.theta), coef, state=state)
        if past is not None:
            past.kept[place] = outliving(state)
        return q * (y + self.skip.to(u.dtype) * u)


class Taps(nn.Module):
    """h as it is, under a decaying window whose time constants are spread from 1 to its length."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.empty(channels, taps))
        self.decay = nn.Parameter(torch.empty(channels, 1))
        self.skip = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal taps, time constants as above, no skip."""
        (D, L), device = self.taps.shape, self.taps.device
        time = torch.exp(torch.linspace(0, 1, D, device=device)[:, None] * math.log(max(L, 2)))
        fill(self.taps, torch.randn(D, L, device=device) / time.sqrt())
        fill(self.decay, -time.log())
        nn.init.zeros_(self.skip)

    def response(self) -> Tensor:
        """h [D, L] in float32, or float64 in a float64 model."""
        taps = _wide(self.taps)
        age = torch.arange(taps.shape[1], device=taps.device, dtype=taps.dtype)
        return taps * torch.exp(-_rate(self.decay) * age)

    def forward(self, k: Tensor, v: Tensor, q: Tensor, past: Past | None, place: str) -> Tensor:
        """q * (h * (k v)), all [B, T, D]."""
        if past is None:
            return long_conv(v, self.response(), skip=self.skip, gate_in=k, gate_out=q)
        if past.settled:
            return q * self._last(k * v, past, place)
        h = self.response()
        whole, before = past.behind(place, k * v, h.shape[1] - 1)
        return q * long_conv(whole, h, skip=self.skip)[:, before:]

    def _last(self, u: Tensor, past: Past, place: str) -> Tensor:
        """h * u of one position, u [B, 1, D], term by term."""

        def reversed_in_time() -> Tensor:
            h = self.response()
            now = h[:, :1] + _wide(self.skip)[:, None]
            return torch.cat([now, h[:, 1:]], dim=1).mT.flip(0).contiguous()

        h = past.once(place, reversed_in_time)
        whole, _ = past.behind(place, u, h.shape[0] - 1)
        return (whole * h).sum(1, keepdim=True).to(u.dtype)


class MinimumPhase(Taps):
    """The causal filter of a free magnitude response: of all with that magnitude the one whose energy comes
    first, cut to its taps. Its log-spectrum is that of the cepstrum folded to positive times (Oppenheim &
    Schafer, ch. 13).
    """

    def __init__(self, channels: int, taps: int) -> None:
        nn.Module.__init__(self)
        self.length = taps
        self.log_magnitude = nn.Parameter(torch.empty(channels, _PEAKS))
        self.skip = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal logarithms of deviation 0.3, no skip."""
        shape, device = self.log_magnitude.shape, self.log_magnitude.device
        fill(self.log_magnitude, 0.3 * torch.randn(shape, device=device))
        nn.init.zeros_(self.skip)

    def response(self) -> Tensor:
        """h [D, L] in float32, or float64 in a float64 model."""
        n = _OVERSAMPLING * self.length
        curve = F.interpolate(
            _wide(self.log_magnitude)[:, None], n // 2 + 1, mode="linear", align_corners=True
        )
        cepstrum = torch.fft.irfft(curve[:, 0], n)
        folded = F.pad(2 * cepstrum[:, : n // 2], (0, n - n // 2))
        folded = torch.cat([cepstrum[:, :1], folded[:, 1:]], dim=1)
        h: Tensor = torch.fft.irfft(torch.fft.rfft(folded).exp(), n)
        return h[:, : self.length]


class WholeRow(nn.Module):
    """The encoder's filter: a free factor for each of the lower frequencies of the row; 1 at the start."""

    def __init__(self, channels: int, length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length // 2 + 1, channels, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Factors of 1."""
        fill(self.weight, torch.tensor([1.0, 0.0], device=self.weight.device).expand(self.weight.shape))

    def forward(self, k: Tensor, v: Tensor, q: Tensor, past: Past | None, place: str) -> Tensor:
        """q * filtered(k v), all [B, T, D]."""
        del past, place
        weight = torch.view_as_complex(_wide(self.weight))[: k.shape[1] // 2 + 1]
        return q * spectral_filter(k * v, weight)
