"""The ``triton`` candidate of pole_scan: what its kernels are launched on."""

from typing import Any

import torch
from torch import Tensor

from bakeoff import hardware
from bakeoff.kernels.op import kernel_op
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.pole_scan import kernels
from bakeoff.ops.pole_scan.kernels import BackwardTiling, ForwardTiling, poles
from bakeoff.ops.pole_scan.kernels import backward as backward_kernels
from bakeoff.ops.pole_scan.kernels import edges as edge_kernels
from bakeoff.ops.pole_scan.kernels import forward as forward_kernels

__all__ = ["pole_scan"]

_prepare = TritonKernel(poles._prepare)
_local = TritonKernel(edge_kernels._local)
_carry = TritonKernel(edge_kernels._carry)
_forward = TritonKernel(forward_kernels._forward)
_backward_input = TritonKernel(backward_kernels._backward_input)
_backward_poles = TritonKernel(backward_kernels._backward_poles)
_finish = TritonKernel(backward_kernels._finish)
_step = TritonKernel(forward_kernels._step)

_ALL_POLES = {"BLOCK": 128, "num_warps": 4}
_EACH_POLE = {"BLOCK": 64, "AHEAD": 8, "num_warps": 2}


def results(
    u: Tensor, log_radius: Tensor, theta: Tensor, coef: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Room for y, [B, T, C], and for the last state, [B, C, K]."""
    del log_radius, theta, state
    return u.new_empty(u.shape), u.new_empty((u.shape[0], *coef.shape), dtype=torch.complex64)


def keeps(
    u: Tensor, log_radius: Tensor, theta: Tensor, coef: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the poles' table and powers, and the states at the chunks' beginnings."""
    del log_radius, theta, state
    return tuple(u.new_empty(shape, dtype=dtype) for shape, dtype in _buffers(u, coef))  # type: ignore[return-value]


def _buffers(u: Tensor, coef: Tensor) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of table, powers and edges."""
    B, T, C = u.shape
    K = kernels.padded(coef.shape[1])
    chunks = (T + kernels.CHUNK - 1) // kernels.CHUNK
    return [
        ((poles.TABLE_ROWS, K, C), torch.float32),
        ((4, K, C), torch.float64),
        ((B, chunks, 2, K, C), torch.float32),
    ]


def forward(
    plan: Plan,
    u: Tensor,
    log_radius: Tensor,
    theta: Tensor,
    coef: Tensor,
    state: Tensor | None,
    y: Tensor,
    end: Tensor,
    table: Tensor | None,
    powers: Tensor | None,
    edges: Tensor | None,
    tiling: ForwardTiling | None,
) -> None:
    """y, the last state, and what backward needs of both."""
    if u.numel() == 0:
        _replace(plan, end, state)
        return
    B, T, C = u.shape
    K = coef.shape[1]
    u = _channels_adjacent(plan, u)
    log_radius, theta, coef = plan.contiguous(log_radius), plan.contiguous(theta), plan.reals(coef)
    first, last = None if state is None else plan.reals(state), plan.reals(end)
    if T == 1 and table is None:
        block, items = max(1, 256 // kernels.padded(K)), 4
        plan.launch(
            _step, (-(-C // block) * -(-B // items),), u=u, log_radius=log_radius, theta=theta, coef=coef,
            state=first, y=y, end=last, B=B, C=C, K=K, u_b=u.stride(0),
            KP=kernels.padded(K), BLOCK=block, ITEMS=items, num_warps=4,
        )  # fmt: skip
        return
    if table is None or powers is None or edges is None:
        table, powers, edges = (plan.empty(*buffer) for buffer in _buffers(u, coef))
    lanes = hardware.warp_size(u.get_device())
    tiling = tiling or kernels.forward_tilings(C, K, lanes)[0]
    KP, G, L = kernels.padded(K), edges.shape[1], kernels.CHUNK
    plan.launch(
        _prepare, (-(-KP * C // _ALL_POLES["BLOCK"]),), log_radius=log_radius, theta=theta, coef=coef,
        table=table, powers=powers, C=C, K=K, L=L, LAST=T - (G - 1) * L, KP=KP, **_ALL_POLES,
    )  # fmt: skip
    strides = u.stride()
    _find_edges(plan, u, strides, edges, table, powers, first, last, T, K, tiling, lanes, backwards=False)
    block = lanes * tiling.warps
    plan.launch(
        _forward, (-(-C // block) * B * G,), u=u, table=table, edges=edges, y=y,
        T=T, C=C, G=G, L=L, u_b=strides[0], u_t=strides[1],
        KP=KP, UNROLL=tiling.unroll, BLOCK=block, num_warps=tiling.warps,
    )  # fmt: skip


def backward(
    plan: Plan,
    u: Tensor,
    coef: Tensor,
    table: Tensor,
    powers: Tensor,
    edges: Tensor,
    dy: Tensor | None,
    dend: Tensor | None,
    du: Tensor | None,
    dlog_radius: Tensor | None,
    dtheta: Tensor | None,
    dcoef: Tensor | None,
    dstate: Tensor | None,
    tiling: BackwardTiling | None,
) -> None:
    """The gradients that there is room for."""
    pole_gradients = [gradient for gradient in (dlog_radius, dtheta, dcoef) if gradient is not None]
    if u.numel() == 0:
        for gradient in pole_gradients:
            plan.run(Tensor.zero_, gradient)
        if dstate is not None:
            _replace(plan, dstate, dend)
        return
    B, T, C = u.shape
    K = coef.shape[1]
    device = u.get_device()
    lanes = hardware.warp_size(device)
    tiling = tiling or kernels.backward_tilings(C, K, lanes)[0]
    u = _channels_adjacent(plan, u)
    if dy is None:
        strides: tuple[int, ...] = (0, 0, 1)
        dy = plan.zeros((C,), u.dtype)
    else:
        dy = _channels_adjacent(plan, dy)
        strides = dy.stride()
    first = None if dend is None else plan.reals(dend)
    last = None if dstate is None else plan.reals(dstate)
    handed = plan.empty(edges.shape, torch.float32)
    KP, G, L = kernels.padded(K), edges.shape[1], kernels.CHUNK
    block = lanes * tiling.warps
    blocks = -(-C // block)
    shares = kernels.shares(B * G, C, K, tiling, hardware.multiprocessors(device), lanes)
    if pole_gradients:
        partial = plan.empty((shares, 4, KP, C), torch.float64)
        dcoef = None if dcoef is None else plan.reals(dcoef)
    _find_edges(plan, dy, strides, handed, table, powers, first, last, T, K, tiling, lanes, backwards=True)
    walk = {"UNROLL": tiling.unroll, "BLOCK": block, "num_warps": tiling.warps}
    if du is not None:
        plan.launch(
            _backward_input, (blocks * B * G,), dy=dy, table=table, handed=handed, du=du,
            T=T, C=C, G=G, L=L, dy_b=strides[0], dy_t=strides[1], KP=KP, **walk,
        )  # fmt: skip
    if pole_gradients:
        plan.launch(
            _backward_poles, (blocks * (KP // tiling.grad_group) * shares,),
            u=u, dy=dy, table=table, edges=edges, handed=handed, partial=partial,
            T=T, C=C, G=G, L=L, CHUNKS=B * G, SHARES=shares,
            u_b=u.stride(0), u_t=u.stride(1), dy_b=strides[0], dy_t=strides[1],
            KP=KP, GROUP=tiling.grad_group, **walk,
        )  # fmt: skip
        plan.launch(
            _finish, (-(-KP * C // _EACH_POLE["BLOCK"]),),
            partial=partial, dlog_radius=dlog_radius, dtheta=dtheta, dcoef=dcoef,
            C=C, K=K, SHARES=shares, KP=KP, **_EACH_POLE,
        )  # fmt: skip


def _find_edges(
    plan: Plan,
    x: Tensor,
    strides: tuple[int, ...],
    edges: Tensor,
    table: Tensor,
    powers: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    T: int,
    K: int,
    tiling: ForwardTiling | BackwardTiling,
    lanes: int,
    *,
    backwards: bool,
) -> None:
    """Fills `edges` with the states at the chunks' beginnings (backwards: what chunks are handed at their
    ends), beginning with `first`; what comes out at the other end goes into `last`. x is [B, T, C] with
    `strides` from one sequence and from one position to the next."""
    B, G, _, KP, C = edges.shape
    block = lanes * tiling.warps
    plan.launch(
        _local, (-(-C // block) * (KP // tiling.group) * B * G,), x=x, table=table, edges=edges,
        T=T, C=C, G=G, L=kernels.CHUNK, x_b=strides[0], x_t=strides[1],
        KP=KP, GROUP=tiling.group, UNROLL=tiling.unroll, BLOCK=block, REVERSED=backwards,
        num_warps=tiling.warps,
    )  # fmt: skip
    plan.launch(
        _carry, (B * -(-KP * C // _EACH_POLE["BLOCK"]),), edges=edges, powers=powers, state=first, end=last,
        C=C, K=K, G=G, KP=KP, REVERSED=backwards, **_EACH_POLE,
    )  # fmt: skip


def _channels_adjacent(plan: Plan, x: Tensor) -> Tensor:
    """`x` [B, T, C] with neighbouring channels side by side; a copy if need be."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else plan.contiguous(x)


def _replace(plan: Plan, target: Tensor, source: Tensor | None) -> None:
    """Copies `source`, or zeros if there is none, into `target`."""
    if source is None:
        plan.run(Tensor.zero_, target)
    else:
        plan.run(Tensor.copy_, target, source)


def _forward_tilings(case: Any) -> list[ForwardTiling]:
    C, K = case.coef.shape
    return kernels.forward_tilings(C, K, hardware.warp_size(hardware.index(case.device)))


def _backward_tilings(case: Any) -> list[BackwardTiling]:
    C, K = case.coef.shape
    return kernels.backward_tilings(C, K, hardware.warp_size(hardware.index(case.device)))


pole_scan = kernel_op(
    "pole_scan",
    results=results,
    names=("y", "end"),
    keeps=keeps,
    kept=("table", "powers", "edges"),
    forward=forward,
    backward=backward,
    materialize=False,
    tilings={
        "forward": Tilings(ForwardTiling, _forward_tilings),
        "backward": Tilings(BackwardTiling, _backward_tilings),
    },
)
"""For float16, bfloat16 and float32."""
