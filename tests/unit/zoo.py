"""Deliberately bad candidates, and the small ops they compete in, importable by a worker process.

Most of them compute ``tanh(x) * w`` through one autograd Function that is right, and go wrong by a hook into
its forward or its backward. None of these ops is in the registry: `registered` puts one there for a test.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from bakeoff.kernels.variants import parse
from bakeoff.select import Candidate, Case, Cost, Op, TensorMeta, registry
from bakeoff.select.declare.key import round_rows, with_layout

HERE = "tests.unit.zoo"


# ----------------------------------------------------------------------------------------- the op
def reference(x: Any, w: Any, flag: Any = None) -> Any:
    return torch.tanh(x) * w


def eager(x: Any, w: Any, flag: Any = None) -> Any:
    return torch.tanh(x) * w


class _Product(torch.autograd.Function):
    """tanh(x) * w in float64, rounded once, so as good as any; `forward` and `backward` are hooks."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, forward: Any, backward: Any) -> Any:
        ctx.save_for_backward(x, w)
        ctx.hook = backward
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        y.copy_(torch.tanh(x.double()) * w.double())
        changed = forward(x, w, y) if forward else None
        return y if changed is None else changed

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, w = ctx.saved_tensors
        t, wide = torch.tanh(x.double()), dy.double()
        dx = (wide * w.double() * (1 - t * t)).to(x.dtype)
        dw = (wide * t).sum(tuple(range(x.dim() - 1))).to(w.dtype) if x.dim() > 1 else (wide * t).to(w.dtype)
        changed = ctx.hook(dy, dx, dw) if ctx.hook else None
        return *((dx, dw) if changed is None else changed), None, None


def product(forward: Any = None, backward: Any = None) -> Callable[..., Any]:
    """A candidate's call, right but for its hooks: forward(x, w, y), backward(dy, dx, dw)."""

    def call(x: Any, w: Any, flag: Any = None) -> Any:
        return _Product.apply(x, w, forward, backward)

    return call


good = product()


def check(case: Case) -> None:
    for name in ("x", "w"):
        if not isinstance(case.args[name], TensorMeta):
            raise TypeError(f"zoo: {name} must be a tensor, got {case.args[name]!r}")
    if case.w.shape != case.x.shape[-1:]:
        raise ValueError(f"zoo: w has shape {case.w.shape}, expected {case.x.shape[-1:]}")


def bucket(case: Case) -> Case:
    features = case.x.shape[-1]
    rows = case.x.numel // features if features else 0
    return case.replace(
        x=with_layout(case.x, (round_rows(rows), features)), w=with_layout(case.w, (features,))
    )


def op(*candidates: Candidate, name: str = "zoo", home: str = "", **changes: Any) -> Op:
    """An op of eager and `candidates`, not registered."""
    settings: dict[str, Any] = {
        "reference": reference,
        "check": check,
        "bucket": bucket,
        "cost": lambda case: Cost(2 * case.x.nbytes, 10 * case.x.numel),
        "cases": list,
        "heuristic": lambda case, regime: "eager",
        "features": {"x": 1, "w": 1},
        "batched": frozenset({"x"}),
    }
    incumbent = changes.pop("incumbent", Candidate("eager", eager))
    return Op(name=name, candidates=(incumbent, *candidates), home=home, **{**settings, **changes})


@contextlib.contextmanager
def registered(*ops: Op) -> Iterator[None]:
    """Known by name inside the block."""
    registry.update({o.name: o for o in ops})
    try:
        yield
    finally:
        for o in ops:
            registry.pop(o.name, None)


def case(
    rows: int | tuple[int, ...] = 32,
    features: int = 48,
    dtype: torch.dtype = torch.float32,
    *,
    grad: bool = True,
) -> Case:
    lead = (rows,) if isinstance(rows, int) else rows
    x = TensorMeta.dense((*lead, features), dtype, grad=grad)
    w = TensorMeta.dense((features,), dtype, grad=grad)
    return Case({"x": x, "w": w, "flag": None}, "cpu")


# ------------------------------------------------------------------------- wrong in what they give
def _last_tile(x: Any, w: Any, y: Any) -> None:
    y[:, 128:] = torch.tanh(x[:, 128:]) * w[: y[:, 128:].shape[1]]  # its column offset is missing


def _ragged_rows(x: Any, w: Any, y: Any) -> None:
    y[x.shape[0] // 16 * 16 :] = 0  # the tail is left out


def _uninitialised(x: Any, w: Any, y: Any) -> Any:
    partial = torch.empty_like(y)
    partial[:, :-1] = y[:, :-1]
    return partial


def _unset_sum(dy: Any, dx: Any, dw: Any) -> Any:
    total = torch.empty_like(dw)
    total += dw  # adds to what was never set
    return dx, total


def _nan_on_zero_rows(x: Any, w: Any, y: Any) -> Any:
    length = x.double().norm(dim=-1, keepdim=True)
    return (y.double() / length * length).to(y.dtype)


_calls = iter(range(10**9))


def _racy(x: Any, w: Any, y: Any) -> None:
    if next(_calls) % 2:
        y[0, 0] = torch.nextafter(y[0, 0], torch.tensor(9.0, dtype=y.dtype))


def _past(start: int) -> Callable[..., None]:
    def write(x: Any, w: Any, y: Any) -> None:
        ctypes.memset(y.data_ptr() + (y.nbytes if start >= 0 else start), 0, 4)

    return write


def _double_x(x: Any, w: Any, y: Any) -> None:
    x.detach().mul_(2)


def _double_dy(dy: Any, dx: Any, dw: Any) -> None:
    dy.detach()[0].mul_(2)


def _only_dense_dy(dy: Any, dx: Any, dw: Any) -> Any:
    return None if dy.stride(0) else (dx.roll(1, 0), dw)


def _never_transposed_dy(dy: Any, dx: Any, dw: Any) -> Any:
    return (dx.roll(1, 0), dw) if dy.dim() > 1 and dy.stride(0) < dy.stride(1) else None


def out_of_memory(*_: Any) -> Any:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 900.00 GiB")


def launches() -> int:
    return launched[0]


launched = [0]


def _launch(x: Any, w: Any, y: Any) -> None:
    launched[0] += 1


def _missing(*_: Any) -> Any:
    raise ImportError("libcuda.so.1: cannot open shared object file")


def _not_there() -> Any:
    from tests.unit.nothing import here

    return here


_memory: dict[Any, torch.Tensor] = {}


def _static(kind: str, like: torch.Tensor) -> torch.Tensor:
    """Memory that every call of that kind and shape takes."""
    return _memory.setdefault((kind, like.shape, like.dtype), torch.zeros(like.shape, dtype=like.dtype))


def _save_in_static(x: Any, w: Any, y: Any) -> None:
    _static("x", x).copy_(x)
    _static("w", w).copy_(w)


def _static_gradients(dy: Any, dx: Any, dw: Any) -> Any:
    t, wide = torch.tanh(_static("x", dx).double()), dy.double()
    rows = tuple(range(dy.dim() - 1))
    return (wide * _static("w", dw).double() * (1 - t * t)).to(dx.dtype), (wide * t).sum(rows).to(dw.dtype)


def _remembered(x: Any, w: Any, y: Any) -> Any:
    return _memory.setdefault((x.data_ptr(), x.shape, x.stride(), x.dtype, w.data_ptr()), y.clone())


def _gradients_in_static(dy: Any, dx: Any, dw: Any) -> Any:
    return _static("dx", dx).copy_(dx), _static("dw", dw).copy_(dw)


def _remembered_weight(ctx: Any, dy: Any) -> Any:
    x, w = ctx.saved_tensors
    held = _memory.setdefault((w.data_ptr(), w.shape, w.dtype), w.detach().clone())
    return dy * held * (1 - torch.tanh(x) ** 2), (dy * torch.tanh(x)).sum(tuple(range(dy.dim() - 1))), None


class RemembersWeight(torch.autograd.Function):
    """Right, until the weight behind an address changes: then its backward knows the old one."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, flag: Any = None) -> Any:
        ctx.save_for_backward(x, w)
        return eager(x, w)

    backward = staticmethod(_remembered_weight)


def _past_a_copy(x: Any, w: Any, y: Any) -> Any:
    copy = y.clone()
    _past(0)(x, w, copy)
    return copy


# Which check meets it first depends on the addresses that the allocator gives out again.
REMEMBERS = "keeps [0-9]+ bytes|differs from run to run"

WRONG: dict[str, tuple[Candidate, str]] = {
    c.name: (c, reason)
    for c, reason in [
        (Candidate("small_factor", product(lambda x, w, y: y * 1.003)), r"output is wrong: .* error"),
        (
            Candidate("static_output", product(lambda x, w, y: _static("y", y).copy_(y))),
            "returns the memory of an earlier result",
        ),
        (
            Candidate("static_saved", product(_save_in_static, _static_gradients)),
            "with another call between its forward and its backward, gradient of",
        ),
        (
            Candidate("remembered", product(_remembered)),
            "does it remember by address.*output is wrong|wrong|" + REMEMBERS,
        ),
        (
            Candidate("remembered_weight", RemembersWeight.apply),
            "does it remember by address.*gradient of x is wrong|wrong|" + REMEMBERS,
        ),
        (
            Candidate("static_gradients", product(None, _gradients_in_static)),
            "returns the memory of an earlier gradient",
        ),
        (Candidate("wrong_dw", product(None, lambda dy, dx, dw: (dx, dw * 1.01))), "gradient of w is wrong"),
        (Candidate("wrong_dx", product(None, lambda dy, dx, dw: (dx * 0.99, dw))), "gradient of x is wrong"),
        (Candidate("last_tile", product(_last_tile)), r"output is wrong: max error .* at \[\d+, \d+\]"),
        (Candidate("ragged_rows", product(_ragged_rows)), r"output is wrong.*x \[3, 15, 192\]"),
        (
            Candidate("racy", product(_racy)),
            r"differs from run to run although declared .* deterministic=False",
        ),
        (Candidate("after", product(_past(0))), "writes outside its output"),
        (Candidate("before", product(_past(-4))), "writes outside its output"),
        (Candidate("after_a_copy", product(_past_a_copy)), "writes outside its output"),
        (Candidate("modifies_x", product(_double_x)), "modifies its input x"),
        (Candidate("modifies_dy", product(None, _double_dy)), "modifies the gradient it is given"),
        (Candidate("uninitialised", product(_uninitialised)), r"output is nan at \[0, 191\]"),
        (Candidate("unset_sum", product(None, _unset_sum)), r"gradient of w is nan at \[0\]"),
        (
            Candidate("nan_on_zero_rows", product(_nan_on_zero_rows)),
            r"output is nan at \[3, 0\] \(adversarial",
        ),
        (Candidate("silent", eager, launches=launches), "none of its own kernels ran"),
        (Candidate("no_dw", product(None, lambda dy, dx, dw: (dx, None))), "gives no gradient of w"),
        (Candidate("detached", lambda *a: good(*a).detach()), "gives no gradient of w"),
        (
            Candidate("wrong_dtype", lambda *a: good(*a).double()),
            r"returns torch.float64\[.*not torch.float32",
        ),
        (
            Candidate("wrong_shape", lambda *a: good(*a)[None]),
            r"returns torch.float32\[1, .*not torch.float32",
        ),
        (Candidate("two_outputs", lambda *a: (good(*a), good(*a))), "returns 2 tensors, not 1"),
        (Candidate("no_tensor", lambda *a: None), "returns a NoneType, not a tensor"),
        (Candidate("only_dense_dy", product(None, _only_dense_dy)), "gradient of x is wrong.*adversarial"),
        (Candidate("transposed_dy", product(None, _never_transposed_dy)), "gradient of x is wrong"),
        (Candidate("out_of_memory", out_of_memory), "CUDA out of memory"),
        (Candidate("missing", _missing), "ImportError: libcuda.so.1"),
        (Candidate("broken_import", load=_not_there), "ModuleNotFoundError"),
        (Candidate("absent", good, requires=("no_such_package",)), "no_such_package is not installed"),
        (Candidate("no_backward", good, has_backward=False), "has no backward"),
        (Candidate("picky", good, supports=lambda case: "wants even rows"), "wants even rows"),
        (
            Candidate("bad_supports", good, supports=lambda case: 1 / 0),
            r"supports\(\) fails: ZeroDivisionError",
        ),
    ]
}
HONEST_RACE = Candidate("honest_race", product(_racy), deterministic=False)
LAUNCHES = Candidate("launches", product(_launch), launches=launches)
GOOD = Candidate("good", good)


def turning_wrong(after: int) -> Candidate:
    """Right for its first `after` calls, which are those of verification."""
    calls = [0]

    def turn(x: Any, w: Any, y: Any) -> Any:
        calls[0] += 1
        return y * 2 if calls[0] > after else y

    return Candidate("turning", product(turn))


# ------------------------------------------------------------------------------ with a time of their own
class FakeTime:
    """Two clocks, in seconds, that only `costing` candidates move: the caller's and the device's."""

    def __init__(self) -> None:
        self.host = self.device = 0.0

    def tiled(
        self, name: str, us: Callable[[int, int], float], *axes: Sequence[int], **declares: Any
    ) -> Candidate:
        """A right candidate with variants, which takes ``us(forward rows, backward rows)``."""

        def run(forward: Tile, backward: Tile) -> Callable[..., Any]:
            return self.costing(name, us(forward.rows, backward.rows)).call

        return Candidate(name, Tiled(run, *axes), **declares)

    def costing(
        self, name: str, host_us: float | Callable[[int], float], device_us: float = 0.0, **declares: Any
    ) -> Candidate:
        """A right candidate whose n-th call takes ``host_us(n)``."""
        calls = [0]

        def call(x: Any, w: Any, flag: Any = None) -> Any:
            calls[0] += 1
            taken = host_us(calls[0]) if callable(host_us) else host_us
            self.host += taken * 1e-6
            self.device += (device_us or taken) * 1e-6
            return eager(x, w)

        return Candidate(name, call, **declares)


# ----------------------------------------------------------------------------- with launch configurations
class Tile(NamedTuple):
    rows: int
    warps: int = 4


class Tiled:
    """An implementation with variants: `run(forward, backward)` makes the callable for two tiles."""

    def __init__(
        self,
        run: Callable[[Tile, Tile], Callable[..., Any]],
        forward: Sequence[int],
        backward: Sequence[int] = (),
    ) -> None:
        self.run = run
        self.axes = {"forward": [Tile(n) for n in forward], "backward": [Tile(n) for n in backward or (1,)]}
        self.asked: list[Case] = []
        self.bound: dict[str, Callable[..., Any]] = {}

    def variants(self, case: Case) -> dict[str, list[Tile]]:
        self.asked.append(case)
        return self.axes

    def bind(self, text: str) -> Callable[..., Any]:
        if text not in self.bound:
            values: Any = parse(text, dict.fromkeys(self.axes, Tile))
            self.bound[text] = self.run(*(values.get(axis, tiles[0]) for axis, tiles in self.axes.items()))
        return self.bound[text]

    def __call__(self, *args: Any) -> Any:
        return self.run(*(tiles[0] for tiles in self.axes.values()))(*args)


def text_of(forward: int = 0, backward: int = 0) -> str:
    """The text of a variant by its rows; 0 is the default."""
    pairs = {"forward": forward, "backward": backward}.items()
    return " ".join(f"{axis}(rows={rows},warps=4)" for axis, rows in pairs if rows)


# ---------------------------------------------------------------------- what ends or stops a process
def aborts(*_: Any) -> Any:
    sys.stderr.write("free(): invalid pointer\n")
    sys.stderr.flush()
    os.abort()


def segfaults(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSEGV)
    threading.Event().wait()


def exits(*_: Any) -> Any:
    sys.stderr.write("x" * 300_000 + "\n")  # far more than a pipe holds
    sys.exit(3)


def interrupts(*_: Any) -> Any:
    raise KeyboardInterrupt("from within")


def hangs(*_: Any) -> Any:
    while True:
        pass


def loses_the_device(*_: Any) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


_until_timed = [0]


def crashes_when_timed(x: Any, w: Any, flag: Any = None) -> Any:
    _until_timed[0] += 1
    if _until_timed[0] > 21:  # verification takes 18 calls, the timer's first look four
        os._exit(9)
    return good(x, w)


def raises_when_timed(x: Any, w: Any, flag: Any = None) -> Any:
    _until_timed[0] += 1
    if _until_timed[0] > 21:
        raise RuntimeError("out of launches")
    return good(x, w)


def _wire() -> int:
    """The pipe by which a worker answers."""
    return int(sys.argv[1])


def closes_the_pipe(*_: Any) -> Any:
    os.close(_wire())
    threading.Event().wait()


def writes_garbage(x: Any, w: Any, flag: Any = None) -> Any:
    os.write(_wire(), b'{"stage": ["no", "answer"]}\n')
    return good(x, w)


def forks(x: Any, w: Any, flag: Any = None) -> Any:
    os.fork()
    return good(x, w)


def answers_itself(x: Any, w: Any, flag: Any = None) -> Any:
    os.write(_wire(), b'{"verdicts": []}\n')
    return good(x, w)


def prints(x: Any, w: Any, flag: Any = None) -> Any:
    sys.stdout.write("noise\n")
    sys.stderr.write("y" * 100_000)
    return good(x, w)


def tells(*_: Any) -> Any:
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    raise RuntimeError(f"deterministic {deterministic}, threads {threads}, precision {precision}")


def waits(*_: Any) -> Any:
    threading.Event().wait()


def _deadly(name: str) -> Candidate:
    return Candidate(name, globals()[name])


CRASHING = op(
    GOOD,
    *(
        _deadly(n)
        for n in (
            "aborts",
            "segfaults",
            "exits",
            "interrupts",
            "loses_the_device",
            "crashes_when_timed",
            "prints",
        )
    ),
    name="zoo_crashing",
    home=f"{HERE}:CRASHING",
)


def _tile_that(ends: Callable[..., Any], rows: int) -> Callable[[Tile, Tile], Callable[..., Any]]:
    """Right, but for the forward tile of so many rows, which does what `ends` does."""
    return lambda forward, backward: ends if forward.rows == rows else good


crashing_tiles = Tiled(_tile_that(aborts, 2), [1, 2, 4])
hanging_tiles = Tiled(_tile_that(hangs, 4), [1, 2, 4])
deadly_tiles = Tiled(lambda forward, backward: good if forward.rows == 1 else aborts, range(1, 9))
TILES = op(_deadly("crashing_tiles"), _deadly("hanging_tiles"), name="zoo_tiles", home=f"{HERE}:TILES")
DEADLY_TILES = op(_deadly("deadly_tiles"), name="zoo_deadly_tiles", home=f"{HERE}:DEADLY_TILES")

MEDDLING = op(
    GOOD,
    *(_deadly(n) for n in ("closes_the_pipe", "writes_garbage", "forks", "answers_itself")),
    name="zoo_meddling",
    home=f"{HERE}:MEDDLING",
)
HANGING = op(GOOD, _deadly("hangs"), name="zoo_hanging", home=f"{HERE}:HANGING")
WAITING = op(_deadly("waits"), name="zoo_waiting", home=f"{HERE}:WAITING")
SWITCHES = op(_deadly("tells"), name="zoo_switches", home=f"{HERE}:SWITCHES")
CALM = op(GOOD, name="zoo_calm", home=f"{HERE}:CALM")
HOPELESS = op(name="zoo_hopeless", home=f"{HERE}:HOPELESS", incumbent=_deadly("aborts"))
GPU_FULL = op(name="zoo_full", home=f"{HERE}:GPU_FULL", incumbent=_deadly("out_of_memory"))


# ----------------------------------------------------------------------------- ops of other forms
def _one(name: str, formula: Callable[..., Any], *candidates: Candidate, **changes: Any) -> Op:
    common: dict[str, Any] = {
        "reference": formula,
        "check": lambda case: None,
        "bucket": lambda case: case,
        "incumbent": Candidate("eager", formula),
        "features": {"x": 1},
        "cost": lambda case: Cost(1, 1),
    }
    return op(*candidates, name=name, **{**common, **changes})


def _mean(x: Any) -> Any:
    return x.mean()


def _order(x: Any) -> Any:
    return x.argmax(-1), x.amax(-1)


def _gather(x: Any, ids: Any) -> Any:
    return x[ids]


def _ids(name: str, meta: TensorMeta, generator: torch.Generator) -> Any:
    return torch.randint(8, meta.shape, generator=generator) if name == "ids" else None


def _copy(x: Any) -> Any:
    return x.clone()


def _dense(x: Any) -> Any:
    return x.contiguous()


MEAN = _one(
    "zoo_mean",
    _mean,
    Candidate("right", lambda x: (x.double().sum() / x.numel()).to(x.dtype)),
    Candidate("wrong", lambda x: x.sum() / (x.numel() - 1)),
    batched=frozenset(),
)
ORDER = _one(
    "zoo_order",
    _order,
    Candidate("right", lambda x: (x.flip(-1).flip(-1).argmax(-1), x.t().amax(0))),
    Candidate("off_by_one", lambda x: ((x.argmax(-1) + 1) % x.shape[-1], x.amax(-1))),
    Candidate("int32", lambda x: (x.argmax(-1).int(), x.amax(-1))),
)
GATHER = _one(
    "zoo_gather",
    _gather,
    Candidate("right", lambda x, ids: torch.index_select(x, 0, ids)),
    Candidate("wrong", lambda x, ids: x[ids.roll(1)]),
    draw=_ids,
    batched=frozenset(),
    features={"x": 2, "ids": 0},
)
COPY = _one(
    "zoo_copy", _copy, Candidate("alias", lambda x: x.view_as(x)), Candidate("right", lambda x: x + 0)
)
HALVES = _one(
    "zoo_halves",
    lambda x: (2 * x, x.narrow(-1, 0, 4)),
    Candidate("views", lambda x: (x + x, x[..., :4])),
    Candidate("copies", lambda x: (x + x, x[..., :4] + 0)),
)
DENSE = _one(
    "zoo_dense", _dense, Candidate("alias", lambda x: x.view_as(x)), Candidate("right", lambda x: x + 0)
)


def with_candidates(base: Op, *candidates: Candidate) -> Op:
    """`base` with other challengers under the same name, as after an update of the package."""
    return replace(base, candidates=(base.incumbent, *candidates))
