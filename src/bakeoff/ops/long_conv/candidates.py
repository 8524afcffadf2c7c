"""The candidates with kernels; `causal` is True, as their declarations ask for."""

from typing import Any

from torch import Tensor

from bakeoff.ops.long_conv.autograd import METHODS, convolved
from bakeoff.ops.long_conv.direct_major import EitherLayout
from bakeoff.ops.long_conv.fft import FFT
from bakeoff.ops.long_conv.run import Arguments, OnRows
from bakeoff.ops.long_conv.toeplitz import TOEPLITZ

__all__ = ["direct", "fft", "toeplitz"]

METHODS["long_conv.direct"] = EitherLayout()
METHODS["long_conv.toeplitz"] = OnRows(TOEPLITZ)
METHODS["long_conv.fft"] = OnRows(FFT())


def direct(u: Any, h: Any, skip: Any, gate_in: Any, gate_out: Any, causal: bool) -> Tensor:
    """A few taps one after another."""
    del causal
    return convolved("long_conv.direct", Arguments(u, h, skip, gate_in, gate_out))


def toeplitz(u: Any, h: Any, skip: Any, gate_in: Any, gate_out: Any, causal: bool) -> Tensor:
    """Products with Toeplitz matrices."""
    del causal
    return convolved("long_conv.toeplitz", Arguments(u, h, skip, gate_in, gate_out))


def fft(u: Any, h: Any, skip: Any, gate_in: Any, gate_out: Any, causal: bool) -> Tensor:
    """FFTs that stay on the chip."""
    del causal
    return convolved("long_conv.fft", Arguments(u, h, skip, gate_in, gate_out))
