"""PyTorch's own pole_scan: ``eager`` (FFT), ``scan`` (chunks) and ``compiled`` (the latter's formula).

All powers of poles are taken in float64: n * theta in float32 is off by 1e-3 radians at n = 32768.
Arithmetic on complex numbers is written out in reals, [re | im] side by side along the pole dimension,
which makes products with powers real matrix products, and which Inductor can fuse.

Sizes are formed so that torch.compile can leave T open: it would compile anew for every length on which
one of them depends in another way, and gives up after a few.
"""

import torch
import torch.nn.functional as F

from bakeoff.autocast import without_autocast
from bakeoff.select.declare.compiled import compiled as compile_formula

__all__ = ["compiled", "eager", "scan"]

_CHUNK = 64


def eager(
    u: torch.Tensor,
    log_radius: torch.Tensor,
    theta: torch.Tensor,
    coef: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The impulse response as one batched matrix product of powers, then a zero-padded real FFT."""
    if u.numel() == 0:
        return _empty(u, log_radius, theta, coef, state)
    with without_autocast(u):
        return _eager(u, log_radius, theta, coef, state)


def _eager(
    u: torch.Tensor,
    log_radius: torch.Tensor,
    theta: torch.Tensor,
    coef: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    B, T, C = u.shape
    real = _real(u, log_radius, theta, coef)
    S = _fine_steps(T)
    A = -(-T // S)
    fine = _powers(log_radius, theta, torch.arange(S, device=u.device))
    coarse = _powers(log_radius, theta, S * torch.arange(A, device=u.device))
    rows = _product(_halves(coef)[..., None], coarse, -3)  # [C, 2, K, A]
    x = u.to(real)
    # Re(rows * fine) = re re - im im.
    wave = torch.stack((fine[:, 0], -fine[:, 1]), 1).flatten(1, 2).to(real)  # [C, 2K, S]
    h = (rows.flatten(1, 2).mT.to(real) @ wave).flatten(1)[:, :T]
    size = _fast_length(2 * T - 1)
    y = torch.fft.irfft(torch.fft.rfft(x.mT, size) * torch.fft.rfft(h, size), size)[..., :T].mT
    back = F.pad(x.flip(1), (0, 0, 0, A * S - T)).view(B, A, S, C).permute(3, 0, 1, 2)
    parts = back.reshape(C, B * A, S) @ fine.flatten(1, 2).mT.to(real)  # [C, BA, 2K]
    parts = parts.view(C, B, A, 2, -1).permute(0, 1, 3, 4, 2)
    end = _product(parts, coarse[:, None].to(real), -3).sum(-1).movedim(0, 1)  # [B, C, 2, K]
    if state is not None:
        start = _halves(state)
        first = _product(start, _powers(log_radius, theta, 1)[..., 0], -2)
        echo = _product(first[..., None], rows, -3)  # [B, C, 2, K, A]
        echo = echo.to(real).flatten(2, 3).movedim(1, 0).mT @ wave[:, None]
        y = y + echo.flatten(2)[..., :T].permute(1, 2, 0)
        end = end + _product(start, _powers(log_radius, theta, T)[..., 0], -2).to(real)
    return y.to(u.dtype), _complex(end)


def scan(
    u: torch.Tensor,
    log_radius: torch.Tensor,
    theta: torch.Tensor,
    coef: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunks: a Toeplitz product inside, their states by an associative scan in log2(chunks) steps."""
    if u.numel() == 0:
        return _empty(u, log_radius, theta, coef, state)
    args = (u, log_radius, theta, _reals(coef), None if state is None else _reals(state))
    with without_autocast(u):
        y, end = _scan(*args)
    return y, torch.view_as_complex(end)


def _scan(
    u: torch.Tensor,
    log_radius: torch.Tensor,
    theta: torch.Tensor,
    coef: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scan` with complex numbers as [..., 2]."""
    B, T, C = u.shape
    K = log_radius.shape[1]
    real = torch.promote_types(_real(u, log_radius, theta), coef.dtype)
    Q = _CHUNK
    A = -(-T // Q)
    n = torch.arange(Q + 1, device=u.device)
    powers = _powers(log_radius, theta, n)  # [C, 2, K, Q + 1]
    wave = _product(coef.mT[..., None], powers, -3)  # coef p^n
    h = wave[:, 0].sum(1)  # [C, Q + 1]
    lag = n[:Q, None] - n[None, :Q]
    inside = torch.where(lag >= 0, h[:, lag.clamp(min=0)], 0.0).to(real)  # [C, Q (t), Q (s)]
    x = F.pad(u.to(real), (0, 0, 0, A * Q - T)).view(B, A, Q, C).permute(3, 0, 1, 2).reshape(C, B * A, Q)
    gather = powers[..., :Q].flip(-1).flatten(1, 2).to(real)  # [C, 2K, Q]: p^(Q-1-s)
    total = (x @ gather.mT).view(C, B, A, 2, K)
    if state is not None:  # as if it were the sum over a chunk before the first
        total = torch.cat((state.to(real).permute(1, 0, 3, 2)[:, :, None], total), 2)
    else:
        total = F.pad(total, (0, 0, 0, 0, 1, 0))
    step = 1
    while step <= A:  # inclusive scan; after it total[a] is Z before chunk a
        decay = _powers(log_radius, theta, Q * step)[..., 0].to(real)
        moved = _product(total[:, :, : A + 1 - step], decay[:, None, None], -2)
        total = total + F.pad(moved, (0, 0, 0, 0, step, 0))
        step *= 2
    carry = torch.stack((wave[:, 0, :, 1:], -wave[:, 1, :, 1:]), 1).flatten(1, 2).to(real)  # [C, 2K, Q]
    before = total[:, :, :A]
    y = x @ inside.mT + before.reshape(C, B * A, 2 * K) @ carry
    y = y.view(C, B, A * Q).permute(1, 2, 0)[:, :T]
    left = T - (A - 1) * Q
    tail = powers[..., (left - 1 - n[:Q]).clamp(min=0)].flatten(1, 2).to(real)  # where x is padding, anything
    last = x.view(C, B, A, Q)[:, :, -1] @ tail.mT  # [C, B, 2K]
    decay = _powers(log_radius, theta, left)[..., 0].to(real)[:, None]
    end = last.view(C, B, 2, K) + _product(before[:, :, -1], decay, -2)
    y = y.to(u.dtype)
    if T == 1:  # a decoding step's result has but one natural layout, which callers take a .view of
        y = y.contiguous()
    return y, end.permute(1, 0, 3, 2).contiguous()


def _powers(log_radius: torch.Tensor, theta: torch.Tensor, n: torch.Tensor | int) -> torch.Tensor:
    """p^n in float64 as [C, 2, K, n], n a vector or a number."""
    size = torch.exp(log_radius.double()[..., None] * n)
    angle = theta.double()[..., None] * n
    return torch.stack((size * angle.cos(), size * angle.sin()), 1)


def _product(a: torch.Tensor, b: torch.Tensor, dim: int) -> torch.Tensor:
    """The complex product, `dim` of both, counted from the end, being [re, im]."""
    ar, ai = a.unbind(dim)
    br, bi = b.unbind(dim)
    return torch.stack((ar * br - ai * bi, ar * bi + ai * br), dim)


def _reals(z: torch.Tensor) -> torch.Tensor:
    """[...] complex as [..., 2] real."""
    return torch.view_as_real(z.resolve_conj())


def _halves(z: torch.Tensor) -> torch.Tensor:
    """[..., K] complex as [..., 2, K] real."""
    return _reals(z).mT


def _complex(z: torch.Tensor) -> torch.Tensor:
    """[..., 2, K] real as [..., K] complex."""
    return torch.view_as_complex(z.mT.contiguous())


def _real(*tensors: torch.Tensor) -> torch.dtype:
    """float64 if any tensor has that precision, else float32."""
    wide = any(t.dtype in (torch.float64, torch.complex128) for t in tensors)
    return torch.float64 if wide else torch.float32


def _empty(
    u: torch.Tensor,
    log_radius: torch.Tensor,
    theta: torch.Tensor,
    coef: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """No y, and the state as it was, in the dtype it would have; the poles' gradients are zeros."""
    real = _real(u, log_radius, theta, coef)
    wide = torch.complex128 if real == torch.float64 else torch.complex64
    if state is None:
        state = torch.zeros((u.shape[0], *coef.shape), dtype=wide, device=u.device)
    y = u + 0 * (log_radius.sum() + theta.sum() + coef.real.sum())
    return y.to(u.dtype), state.to(wide, copy=True)


def _fine_steps(T: int) -> int:
    """How many steps the finer of the two levels of powers has: about the root of T."""
    if T <= 2048:
        return 1 if T == 1 else 32
    return 128 if T <= 32768 else 512


def _fast_length(n: int) -> int:
    """The least 2^a or 3 * 2^a that is not below n: lengths at which FFTs are fast.

    In torch.compile a multiple of 2^b, with no prime above 127, for n up to 500,000; so in torch.jit.trace,
    where a length is a tensor and the trace holds for others.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        step = 16 if n <= 2048 else 256 if n <= 32768 else 4096
        return -(-n // step) * step
    power = 1 << (n - 1).bit_length()
    return 3 * power // 4 if n <= 3 * power // 4 else power


compiled = compile_formula(scan)
