"""From tensors to launches for pole_scan: layouts, buffers, and what forward leaves for backward."""

from functools import lru_cache
from typing import NamedTuple

import torch

from bakeoff.hardware import multiprocessors
from bakeoff.launch import Launcher
from bakeoff.ops.pole_scan import kernels
from bakeoff.ops.pole_scan.kernels import CHUNK, UNROLL, Tiling, backward, edges, forward, padded, poles
from bakeoff.ops.pole_scan.kernels.poles import TABLE_ROWS

__all__ = ["Scanned", "run_backward", "run_forward", "run_step"]

_prepare = Launcher(poles._prepare)
_local = Launcher(edges._local)
_carry = Launcher(edges._carry)
_forward = Launcher(forward._forward)
_backward_input = Launcher(backward._backward_input)
_backward_poles = Launcher(backward._backward_poles)
_finish = Launcher(backward._finish)
_step = Launcher(forward._step)

_FLAT = 128
_AHEAD = 8
_CARRY = 64


class Scanned(NamedTuple):
    """Forward's results, and its buffers, which backward needs."""

    y: torch.Tensor
    end: torch.Tensor
    table: torch.Tensor
    powers: torch.Tensor
    edges: torch.Tensor
    """[B, G, 2, poles, C]: the state at each of G chunks' beginning."""


@lru_cache(maxsize=4096)
def _tiling(B: int, T: int, C: int, K: int, device: int) -> Tiling:
    lanes = 64 if torch.version.hip else 32
    return kernels.tiling(B, T, C, K, multiprocessors(device), lanes)


def cut(u: torch.Tensor, coef: torch.Tensor) -> Tiling:
    """How this call is cut into chunks and programs."""
    B, T, C = u.shape
    return _tiling(B, T, C, coef.shape[1], u.get_device())


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with neighbouring channels side by side; a copy if need be."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _reals(z: torch.Tensor) -> torch.Tensor:
    """A contiguous complex tensor as [..., 2]."""
    return torch.view_as_real(z.resolve_conj().contiguous())


def run_forward(
    u: torch.Tensor,
    log_radius: torch.Tensor,
    theta: torch.Tensor,
    coef: torch.Tensor,
    state: torch.Tensor | None,
) -> Scanned:
    """y, the last state, and the buffers."""
    B, T, C = u.shape
    K = coef.shape[1]
    how = cut(u, coef)
    G = -(-T // CHUNK)
    N = how.poles * C
    u = _rows(u)
    y = torch.empty((B, T, C), dtype=u.dtype, device=u.device)
    end = torch.empty((B, C, K), dtype=torch.complex64, device=u.device)
    table = torch.empty((TABLE_ROWS, how.poles, C), dtype=torch.float32, device=u.device)
    powers = torch.empty((4, how.poles, C), dtype=torch.float64, device=u.device)
    _prepare(
        (-(-N // _FLAT), 1, 1),
        log_radius.contiguous(), theta.contiguous(), _reals(coef), table, powers,
        C, K, CHUNK, T - (G - 1) * CHUNK,
        KP=how.poles, BLOCK=_FLAT, num_warps=4,
    )  # fmt: skip
    edges = _edges(u, table, powers, None if state is None else _reals(state), end, K, how, False)
    _forward(
        (-(-C // how.block) * B * G, 1, 1), u, table, edges, y,
        T, C, G, CHUNK, u.stride(0), u.stride(1),
        KP=how.poles, UNROLL=UNROLL, BLOCK=how.block, num_warps=how.warps,
    )  # fmt: skip
    return Scanned(y, end, table, powers, edges)


def _edges(
    x: torch.Tensor,
    table: torch.Tensor,
    powers: torch.Tensor,
    first: torch.Tensor | None,
    last: torch.Tensor | None,
    K: int,
    how: Tiling,
    backwards: bool,
) -> torch.Tensor:
    """The states at the chunks' beginnings (backwards: what they are handed at their ends), beginning with
    `first`; what comes out at the other end is put into `last`."""
    B, T, C = x.shape
    G = -(-T // CHUNK)
    edges = torch.empty((B, G, 2, how.poles, C), dtype=torch.float32, device=x.device)
    group = min(how.poles, 4 * how.group)
    _local(
        (-(-C // how.block) * (how.poles // group) * B * G, 1, 1),
        x, table, edges, T, C, G, CHUNK, x.stride(0), x.stride(1),
        KP=how.poles, GROUP=group, UNROLL=UNROLL, BLOCK=how.block,
        REVERSED=backwards, num_warps=how.warps,
    )  # fmt: skip
    _carry(
        (B * -(-how.poles * C // _CARRY), 1, 1), edges, powers, first,
        None if last is None else torch.view_as_real(last), C, K, G,
        KP=how.poles, AHEAD=_AHEAD, BLOCK=_CARRY, REVERSED=backwards, num_warps=2,
    )  # fmt: skip
    return edges


def run_backward(
    dy: torch.Tensor | None,
    dend: torch.Tensor | None,
    u: torch.Tensor,
    coef: torch.Tensor,
    state: torch.Tensor | None,
    table: torch.Tensor,
    powers: torch.Tensor,
    edges: torch.Tensor,
    want_input: bool,
    want_poles: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of u, log_radius, theta, coef and state; None for what isn't wanted.

    `want_input` asks for those of u and, where there is one, of the state; `want_poles` for the others.
    """
    B, T, C = u.shape
    K = coef.shape[1]
    how = cut(u, coef)
    G = -(-T // CHUNK)
    blocks = -(-C // how.block)
    u = _rows(u)
    dy = u.new_zeros(C).expand(B, T, C) if dy is None else _rows(dy)
    du = dstate = dlog_radius = dtheta = dcoef = None
    if want_input and state is not None:
        dstate = torch.empty((B, C, K), dtype=torch.complex64, device=u.device)
    handed = _edges(dy, table, powers, None if dend is None else _reals(dend), dstate, K, how, True)
    if want_input:
        du = torch.empty((B, T, C), dtype=u.dtype, device=u.device)
        _backward_input(
            (blocks * B * G, 1, 1), dy, table, handed, du, T, C, G, CHUNK, dy.stride(0), dy.stride(1),
            KP=how.poles, UNROLL=UNROLL, BLOCK=how.block, num_warps=how.warps,
        )  # fmt: skip
    if want_poles:
        partial = torch.empty((how.shares, 4, how.poles, C), dtype=torch.float64, device=u.device)
        _backward_poles(
            (blocks * (how.poles // how.group) * how.shares, 1, 1),
            u, dy, table, edges, handed, partial, T, C, G, CHUNK, B * G, how.shares,
            u.stride(0), u.stride(1), dy.stride(0), dy.stride(1),
            KP=how.poles, GROUP=how.group, UNROLL=UNROLL, BLOCK=how.block, num_warps=how.warps,
        )  # fmt: skip
        dlog_radius = torch.empty((C, K), dtype=torch.float32, device=u.device)
        dtheta = torch.empty_like(dlog_radius)
        dcoef = torch.empty((C, K), dtype=torch.complex64, device=u.device)
        _finish(
            (-(-how.poles * C // _CARRY), 1, 1),
            partial, dlog_radius, dtheta, torch.view_as_real(dcoef), C, K, how.shares,
            KP=how.poles, AHEAD=_AHEAD, BLOCK=_CARRY, num_warps=2,
        )  # fmt: skip
    return du, dlog_radius, dtheta, dcoef, dstate


def run_step(
    u: torch.Tensor,
    log_radius: torch.Tensor,
    theta: torch.Tensor,
    coef: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One position, T = 1, in one launch."""
    B, _, C = u.shape
    K = coef.shape[1]
    poles = padded(K)
    block = max(1, 256 // poles)
    items = 4
    u = _rows(u)
    y = torch.empty((B, 1, C), dtype=u.dtype, device=u.device)
    end = torch.empty((B, C, K), dtype=torch.complex64, device=u.device)
    _step(
        (-(-C // block) * -(-B // items), 1, 1),
        u, log_radius.contiguous(), theta.contiguous(), _reals(coef),
        None if state is None else _reals(state),
        y, torch.view_as_real(end), B, C, K, u.stride(0),
        KP=poles, BLOCK=block, ITEMS=items, num_warps=4,
    )  # fmt: skip
    return y, end
