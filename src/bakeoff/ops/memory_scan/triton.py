"""The ``triton`` candidate of memory_scan: what its kernels are launched on."""

from typing import Any

import torch
from torch import Tensor

from bakeoff.kernels.op import kernel_op
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.memory_scan.kernels import (
    PAIR,
    Tiling,
    backward_keys,
    backward_queries,
    forward,
    tiles,
    tilings,
)
from bakeoff.ops.memory_scan.kernels import gates as gate_tables

__all__ = ["memory_scan"]

_tables, _tables_backward = (TritonKernel(k) for k in (gate_tables._tables, gate_tables._tables_backward))
_pack, _unpack = TritonKernel(tiles._pack), TritonKernel(tiles._unpack)
_errors, _learn = TritonKernel(forward._errors), TritonKernel(forward._learn)
_query_hidden, _answers = TritonKernel(forward._query_hidden), TritonKernel(forward._answers)
_from_answers = TritonKernel(backward_queries._from_answers)
_to_tokens = TritonKernel(backward_queries._to_tokens)
_to_states, _to_errors = TritonKernel(backward_keys._to_states), TritonKernel(backward_keys._to_errors)

_SHIFTS = {"after": 1, "before": 0, "chunk": -1}
_BLOCK = 1024
_SUMS = 16
"""Columns a program that sums what others left in parts, and tokens where these are spread over programs."""
_ALIKE = {"enable_fp_fusion": False}
"""For launches where several threads sum the same products, each in an order of its own, and all store the
sum: where a product were added without being rounded, their last bits would differ, and be a race."""


class _Sizes:
    """A call's sizes, and what its launches share."""

    def __init__(
        self,
        q: Tensor,
        v: Tensor,
        w1: Tensor,
        chunk: int,
        read: str,
        tiling: Tiling | None,
        direction: str = "forward",
    ):
        self.G, self.T, self.D = q.shape
        self.V, self.H = v.shape[2], w1.shape[1]
        # A few tokens, as in decoding, take the kernels of a short chunk. Not every length has its own, as
        # these take seconds to compile.
        self.chunk = min(chunk, 16) if self.T <= 16 else chunk
        self.C = -(-self.T // self.chunk)
        self.P = self.H * self.D + self.H + self.V * self.H + self.V
        tiling = tiling or tilings(direction, self.H, max(self.D, self.V), q.itemsize)[0]
        self.shift = _SHIFTS[read]
        self.BH = tiling.hidden
        self.hidden = -(-self.H // self.BH)
        self.BD, self.BV = (min(tiling.width, _power(size)) for size in (self.D, self.V))
        self.inputs, self.outputs = -(-self.D // self.BD), -(-self.V // self.BV)
        self.sums_in, self.sums_out = -(-self.D // _SUMS), -(-self.V // _SUMS)
        self.all = {
            "CHUNK": self.chunk, "D": self.D, "H": self.H, "V": self.V, "T": self.T, "C": self.C,
            "BT": _power(self.chunk), "BE": _SUMS, "BH": self.BH,
            "BD": self.BD, "BV": self.BV, "SHIFT": self.shift, "PARTS": self.hidden,
            "ALL_PARTS": self.hidden + self.sums_out, "PRECISION": _precision(q), "TURNED": tiling.turned,
            "num_warps": PAIR, "num_stages": tiling.stages,
        }  # fmt: skip
        self.chunk_by_chunk = {"num_warps": tiling.warps}

    def kept(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what the forward leaves for the backward: the states at chunks' starts and
        ends, the gates' tables and rates, and of each token Z, A, the query's hidden units, and E."""
        G, T, H, W = self.G, self.T, self.H, self.chunk + 2
        shapes = [
            (G, self.C + 1, 2 * self.P),
            (G, self.C, W, W),
            (G, self.C, self.chunk, W),
            *[(G, T, H)] * 3,
            (G, T, self.V),
        ]
        return [(shape, torch.float32) for shape in shapes]


def _precision(q: Tensor) -> str:
    """How products are taken: more exactly than the tokens are rounded, as the state sums over all chunks."""
    if torch.version.hip or q.device.type == "cpu":  # interpreted, where bfloat16 is wrong
        return "ieee"
    return "bf16x3" if q.dtype.itemsize == 2 else "tf32x3"


def _power(size: int) -> int:
    """The least power of two that is no smaller, at least the 16 that a product of tiles takes."""
    return max(16, 1 << (size - 1).bit_length())


def results(
    q: Tensor, k: Tensor, v: Tensor,
    memory_w1: Tensor, memory_b1: Tensor, memory_w2: Tensor, memory_b2: Tensor,
    momentum_w1: Tensor, momentum_b1: Tensor, momentum_w2: Tensor, momentum_b2: Tensor,
    lr: Tensor, decay: Tensor, forget: Tensor, chunk: int, read: str, orthogonalize: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Room for o, and for the eight parts of the state."""
    parts = (memory_w1, memory_b1, memory_w2, memory_b2, momentum_w1, momentum_b1, momentum_w2, momentum_b2)
    return v.new_empty(v.shape), *(part.new_empty(part.shape) for part in parts)  # type: ignore[return-value]


def keeps(
    q: Tensor, k: Tensor, v: Tensor,
    memory_w1: Tensor, memory_b1: Tensor, memory_w2: Tensor, memory_b2: Tensor,
    momentum_w1: Tensor, momentum_b1: Tensor, momentum_w2: Tensor, momentum_b2: Tensor,
    lr: Tensor, decay: Tensor, forget: Tensor, chunk: int, read: str, orthogonalize: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Room for what the backward needs."""
    sizes = _Sizes(q, v, memory_w1, chunk, read, None)
    return tuple(q.new_empty(shape, dtype=dtype) for shape, dtype in sizes.kept())  # type: ignore[return-value]


def _fill(
    plan: Plan,
    q: Tensor, k: Tensor, v: Tensor,
    memory_w1: Tensor, memory_b1: Tensor, memory_w2: Tensor, memory_b2: Tensor,
    momentum_w1: Tensor, momentum_b1: Tensor, momentum_w2: Tensor, momentum_b2: Tensor,
    lr: Tensor, decay: Tensor, forget: Tensor, chunk: int, read: str,
    o: Tensor, new_memory_w1: Tensor, new_memory_b1: Tensor, new_memory_w2: Tensor, new_memory_b2: Tensor,
    new_momentum_w1: Tensor, new_momentum_b1: Tensor, new_momentum_w2: Tensor, new_momentum_b2: Tensor,
    states: Tensor | None, gates: Tensor | None, rates: Tensor | None, z: Tensor | None, a: Tensor | None,
    zq: Tensor | None, e: Tensor | None, tiling: Tiling | None,
) -> None:  # fmt: skip
    """Chunk after chunk its keys and its update, then all queries."""
    sizes = _Sizes(q, v, memory_w1, chunk, read, tiling)
    made = [t if t is not None else plan.empty(*room) for t, room in
            zip((states, gates, rates, z, a, zq, e), sizes.kept(), strict=True)]  # fmt: skip
    states, gates, rates, z, a, zq, e = made
    q, k, v = plan.contiguous(q), plan.contiguous(k), plan.contiguous(v)
    old = (memory_w1, memory_b1, memory_w2, memory_b2, momentum_w1, momentum_b1, momentum_w2, momentum_b2)
    new = (new_memory_w1, new_memory_b1, new_memory_w2, new_memory_b2,
           new_momentum_w1, new_momentum_b1, new_momentum_w2, new_momentum_b2)  # fmt: skip
    old = tuple(plan.contiguous(part) for part in old)  # type: ignore[assignment]
    lr, decay, forget = plan.contiguous(lr), plan.contiguous(decay), plan.contiguous(forget)
    _move(plan, _pack, old, states, sizes)
    G, C = sizes.G, sizes.C
    parts = plan.empty((G, sizes.hidden, sizes.chunk, sizes.V), torch.float32)
    shared = {
        "q": q, "k": k, "v": v, "lr": lr, "decay": decay, "forget": forget, "states": states, "gates": gates,
        "rates": rates, "z": z, "a": a, "zq": zq, "e": e, "o": o, "parts": parts, **sizes.all,
    }  # fmt: skip
    _launch(plan, _tables, (G * C,), shared, num_warps=1)
    errors = (G, sizes.sums_out * (_power(sizes.chunk) // _SUMS))
    for c in range(-1, C):
        if c >= 0:
            _launch(plan, _errors, errors, shared, c=c, ROWS=_SUMS, **_ALIKE)
        _launch(plan, _learn, (G, sizes.hidden), shared, c=c, **sizes.chunk_by_chunk)
    _launch(plan, _errors, errors, shared, c=C, ROWS=_SUMS, **_ALIKE)
    _launch(plan, _query_hidden, (G * C, sizes.hidden), shared)
    _launch(plan, _answers, (G * C, sizes.outputs), shared)
    _move(plan, _unpack, new, states, sizes, C)


def _launch(
    plan: Plan, kernel: TritonKernel, grid: tuple[int, ...], shared: dict[str, Any], **more: Any
) -> None:
    """Launch a kernel on what it takes of all these."""
    names = {*kernel.runtime, *kernel.constexprs, "num_warps", "num_stages", *_ALIKE}
    plan.launch(kernel, grid, **{name: x for name, x in (shared | more).items() if name in names})


def _move(
    plan: Plan, kernel: TritonKernel, parts: tuple[Tensor, ...], packed: Tensor, sizes: _Sizes, at: int = 0
) -> None:
    """Between the parts of a state and their place in `packed`."""
    names = ("w1", "b1", "w2", "b2", "m1", "c1", "m2", "c2")
    plan.launch(
        kernel, (sizes.G, -(-sizes.P // _BLOCK)), **dict(zip(names, parts, strict=True)), packed=packed,
        at=at, packed_g=packed.stride(0), N1=sizes.H * sizes.D, H=sizes.H, N2=sizes.V * sizes.H, V=sizes.V,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def _fill_gradients(
    plan: Plan,
    q: Tensor, k: Tensor, v: Tensor, memory_w1: Tensor, lr: Tensor, decay: Tensor, forget: Tensor,
    chunk: int, read: str,
    states: Tensor, gates: Tensor, rates: Tensor, z: Tensor, a: Tensor, zq: Tensor, e: Tensor,
    do: Tensor, dnew_memory_w1: Tensor, dnew_memory_b1: Tensor, dnew_memory_w2: Tensor, dnew_memory_b2:
    Tensor,
    dnew_momentum_w1: Tensor, dnew_momentum_b1: Tensor, dnew_momentum_w2: Tensor, dnew_momentum_b2: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    dmemory_w1: Tensor | None, dmemory_b1: Tensor | None, dmemory_w2: Tensor | None, dmemory_b2: Tensor |
    None,
    dmomentum_w1: Tensor | None, dmomentum_b1: Tensor | None, dmomentum_w2: Tensor | None,
    dmomentum_b2: Tensor | None,
    dlr: Tensor | None, ddecay: Tensor | None, dforget: Tensor | None, tiling: Tiling | None,
) -> None:  # fmt: skip
    """What is behind the queries of all chunks at once, then chunk after chunk, from the last, behind its
    keys."""
    s = _Sizes(q, v, memory_w1, chunk, read, tiling, "backward")
    G, T, D, H, V, C, b = s.G, s.T, s.D, s.H, s.V, s.C, s.chunk

    def room(given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return plan.empty(shape, dtype) if given is None else given

    q, k, do = plan.contiguous(q), plan.contiguous(k), plan.contiguous(do)
    decay, forget = plan.contiguous(decay), plan.contiguous(forget)
    after = tuple(
        plan.contiguous(part)
        for part in (dnew_memory_w1, dnew_memory_b1, dnew_memory_w2, dnew_memory_b2,
                     dnew_momentum_w1, dnew_momentum_b1, dnew_momentum_w2, dnew_momentum_b2)
    )  # fmt: skip
    shapes = ((G, H, D), (G, H), (G, V, H), (G, V))
    before = tuple(
        room(part, shape)
        for part, shape in zip(
            (dmemory_w1, dmemory_b1, dmemory_w2, dmemory_b2, dmomentum_w1, dmomentum_b1, dmomentum_w2,
            dmomentum_b2), shapes * 2, strict=True,
        )
    )  # fmt: skip
    dq, dk, dv = room(dq, q.shape, q.dtype), room(dk, q.shape, q.dtype), room(dv, v.shape, q.dtype)
    dlr, ddecay, dforget = (room(x, lr.shape) for x in (dlr, ddecay, dforget))
    dzq, df, dh = (plan.empty((G, T, H), torch.float32) for _ in range(3))
    de, de_queries = (plan.empty((G, T, V), torch.float32) for _ in range(2))
    dk_queries = plan.empty((G, T, D), torch.float32)
    dread = plan.empty((G, C, s.hidden, 2, b), torch.float32)
    dwritten = plan.empty((G, C, s.hidden + s.sums_out, 2, b), torch.float32)
    dlast = plan.empty((G, C, s.hidden + s.sums_out, 3), torch.float32)
    dweights = plan.empty((G, C, b, b), torch.float32)
    sides = [plan.empty((G, 2 * s.P), torch.float32) for _ in range(2)]
    back = plan.empty((2, G, 2, b, H), torch.float32)
    dk_parts = plan.empty((G, s.hidden, b, D), torch.float32)
    de_parts = plan.empty((G, s.hidden, b, V), torch.float32)

    shared = {
        "q": q, "k": k, "do": do, "decay": decay, "forget": forget, "states": states, "gates": gates,
        "rates": rates, "z": z, "a": a, "zq": zq, "e": e, "dq": dq, "dk": dk, "dv": dv, "dlr": dlr,
        "ddecay": ddecay, "dforget": dforget, "dzq": dzq, "df": df, "dh": dh, "de": de, "back": back,
        "de_queries": de_queries, "dk_queries": dk_queries, "de_parts": de_parts, "dk_parts": dk_parts,
        "dread": dread, "dwritten": dwritten, "dlast": dlast, "dweights": dweights, **s.all,
    }  # fmt: skip
    _launch(plan, _from_answers, (G * C, s.hidden), shared)
    _launch(plan, _to_tokens, (G * C, max(s.inputs, s.outputs)), shared)
    _move(plan, _pack, after, sides[0], s)
    for c in range(C, -1, -1):
        coming, going = sides
        _launch(plan, _to_states, (G, s.hidden), shared, coming=coming, going=going, c=c, **s.chunk_by_chunk)
        summed = {"coming": going, "going": coming, "c": c, **_ALIKE}
        _launch(plan, _to_errors, (G, s.sums_out + s.sums_in), shared, **summed)
        sides = [going, coming]
    _move(plan, _unpack, before, sides[0], s)
    _launch(plan, _tables_backward, (G * C,), shared, num_warps=1)


def _of(direction: str) -> Tilings:
    def found(case: Any) -> list[Tiling]:
        width = max(case.q.shape[2], case.v.shape[2])
        return tilings(direction, case.memory_w1.shape[1], width, case.q.dtype.itemsize)

    return Tilings(Tiling, found)


memory_scan = kernel_op(
    "memory_scan",
    results=results,
    names=(
        "o",
        *(f"new_{whole}_{part}" for whole in ("memory", "momentum") for part in ("w1", "b1", "w2", "b2")),
    ),
    keeps=keeps,
    kept=("states", "gates", "rates", "z", "a", "zq", "e"),
    forward=_fill,
    backward=_fill_gradients,
    tilings={direction: _of(direction) for direction in ("forward", "backward")},
)
"""For float16, bfloat16 and float32 with chunks of up to 64 tokens."""
