"""A learned filter in the frequency domain, over whole sequences: for encoders."""

import torch

from bakeoff.ops.spectral_filter.op import OP
from bakeoff.select import call

__all__ = ["OP", "spectral_filter"]


def spectral_filter(x: torch.Tensor, weight: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """Multiplies the first K frequencies of each channel by `weight` and leaves the others as they are.

    X = rfft(x) over T; Y[f] = weight[f] X[f] for f < K, X[f] from K on; y = irfft(Y) of length T. With
    weight 1 it is the identity.

    Not causal, and no mask can make it so: multiplying frequencies is a circular convolution, in which the
    last position feeds the first. Use it where the whole input is known; `pole_scan` is the causal filter.

    Bin f is the frequency f / T: a weight learnt at one length means other frequencies at another. Frequency
    0 and, for even T, T / 2 are real numbers: of their weights the imaginary part has no effect, and its
    gradient is 0.

    Computed in float32 (float64 for float64 and complex128 inputs) and rounded once. The candidate ``fft``
    does it on the chip where T is a power of 2 from 256 on.

    Args:
        x: [B, T, C], float16, bfloat16, float32 or float64; any T, odd, prime or 1.
        weight: [K, C], complex64 or complex128, K <= T // 2 + 1. Parameters kept as reals [K, C, 2] are
            passed as torch.view_as_complex(weight).
        impl: the candidate to run; by default the selected one.

    Returns:
        y, of x's shape and dtype, in strides of the candidate's choice. The weight's gradient follows
        PyTorch's convention for complex tensors: a step against it goes downhill.

    Raises:
        ValueError: shapes that don't fit, such as more weights than frequencies.
        TypeError: dtypes that don't fit.
        bakeoff.errors.Unsupported: `impl` can't take these arguments; the message gives every reason.

    Source: Rao et al. 2021, Global Filter Networks for Image Classification, section 3.2, in one dimension.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 2.0, 3.0, 6.0]).view(1, 4, 1)
        >>> no_mean = torch.zeros(1, 1, dtype=torch.complex64)
        >>> spectral_filter(x, no_mean).flatten().tolist()
        [-2.0, -1.0, 0.0, 3.0]
    """
    return call(OP, x, weight, impl=impl)  # type: ignore[no-any-return]
