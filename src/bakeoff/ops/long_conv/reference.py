"""The definition of long_conv, in plain PyTorch."""

import torch

__all__ = ["empty", "fast_length", "long_conv", "spread", "widest"]


def long_conv(
    u: torch.Tensor,
    h: torch.Tensor,
    skip: torch.Tensor | None = None,
    gate_in: torch.Tensor | None = None,
    gate_out: torch.Tensor | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """The convolution by zero-padded FFTs, every step in float32 or wider, rounded once; see `bakeoff.ops`.

    In float64 it differs from the sum over s, term by term, by some 1e-15 of the largest output.
    """
    if u.numel() == 0:
        return empty(u, h, skip, gate_in, gate_out)
    wide = widest(u, h, skip, gate_in, gate_out)
    v = u.to(wide) if gate_in is None else u.to(wide) * gate_in.to(wide)
    T = u.shape[1]
    h = h[:, :T]
    n = fast_length(T + h.shape[1] - 1)  # no shorter, or the end would wrap around to the start
    spectrum = torch.fft.rfft(v.mT, n) * torch.fft.rfft(spread(h.to(wide), n, causal))
    y: torch.Tensor = torch.fft.irfft(spectrum, n)[..., :T].mT
    if skip is not None:
        y = y + v * skip.to(wide)
    return (y if gate_out is None else y * gate_out.to(wide)).to(u.dtype)


def empty(u: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    """What an empty u gives: nothing, with zeros for the gradients of `others`."""
    return (u + 0 * sum(other.sum() for other in others if other is not None)).to(u.dtype)


def spread(h: torch.Tensor, n: int, causal: bool) -> torch.Tensor:
    """The filter [C, L] on a circle of n positions; symmetric to both sides of 0 if not causal."""
    L = h.shape[1]
    right: torch.Tensor = torch.nn.functional.pad(h, (0, n - L))
    if causal:
        return right
    return right + torch.nn.functional.pad(h[:, 1:].flip(1), (n - L + 1, 0))


def widest(*tensors: torch.Tensor | None) -> torch.dtype:
    """The dtype to compute in: float32, or float64 if a tensor is."""
    wide = torch.float64 in [tensor.dtype for tensor in tensors if tensor is not None]
    return torch.float64 if wide else torch.float32


_ODD: tuple[int, ...] = tuple(sorted(3**a * 5**b for a in range(7) for b in range(5) if 3**a * 5**b < 1000))


def fast_length(least: int) -> int:
    """A small even n >= least without prime factors above 5: what FFTs are fast at.

    In torch.compile a multiple of 2^b, with no prime above 127 for n up to 500,000: a formula that leaves the
    length open, where others would have it compile anew for every length. So in torch.jit.trace, where a
    length is a tensor and the trace holds for others.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        step = 16 if least <= 2048 else 256 if least <= 32768 else 4096
        return -(-least // step) * step
    return min(odd << max(1, (-(-least // odd) - 1).bit_length()) for odd in _ODD)
