"""A whole training step as one CUDA graph, and a guard against waiting for the device.

Issuing a step's thousand kernels one by one costs the host more than a small model costs the GPU. Captured
once, the step is replayed by one call: the same kernels on the same addresses, new data in fixed buffers.
"""

import contextlib
import functools
import gc
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from bakeoff.errors import BakeoffError

__all__ = ["CapturedStep", "NotCapturable", "capture_step", "forbid_sync"]

P = ParamSpec("P")
R = TypeVar("R")

_SYNC = "called a synchronizing CUDA operation"
# Ops whose result the host must see, callers before the ops they call.
_WAITING = (
    "aten::item",
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::equal",
    "aten::repeat_interleave",
)
# What all of PyTorch's random functions come down to.
_RANDOM = {f"aten::{name}_" for name in ("bernoulli", "cauchy", "exponential", "geometric", "log_normal")}
_RANDOM |= {"aten::normal_", "aten::random_", "aten::uniform_", "aten::randperm"}
_INSIDE = (str(Path(torch.__file__).parent), __file__, contextlib.__file__, warnings.__file__)


class NotCapturable(BakeoffError, RuntimeError):
    """The step can't become a CUDA graph.

    Attributes:
        reason: what is in the way and how to remove it.
        op: the first operation in the way (``aten::item``), or "".
        where: ``file:line: source`` of the call that led to it, or "".
        ran: whether the step was made all the same, uncaptured. If not, the step changed nothing on the
            device; clear the gradients before making it again.
        result: what the step returned, where it ran.
    """

    def __init__(
        self, reason: str, *, op: str = "", where: str = "", ran: bool = False, result: Any = None
    ) -> None:
        blamed = f" [{op} at {where}]" if op and where else f" [{op or where}]" if op or where else ""
        super().__init__(reason + blamed)
        self.reason, self.op, self.where, self.ran, self.result = reason, op, where, ran, result


def capture_step(
    step: Callable[P, R],
    *,
    warmup: int = 3,
    pool: tuple[int, int] | None = None,
    generators: Sequence[torch.Generator] = (),
) -> "CapturedStep[P, R]":
    """Makes `step` (forward, loss, backward, clip, optimizer, schedule) one CUDA graph.

    Every call of the result is one step with that call's data: the first `warmup` calls run eagerly, the
    next captures and replays, all later ones replay. So captured training makes the same steps as eager
    training, bit for bit under deterministic algorithms, dropout included. The last two warm-up calls are
    watched for whatever a graph can't hold or would silently freeze.

    Args:
        step: called with tensors (at any depth of tuples, lists and dicts) and constants; returns device
            tensors. Everything that changes from step to step must be a tensor: data, learning rate, step
            counts (``AdamW(capturable=True, lr=torch.tensor(..., device="cuda"))``; a tensor lr may also be
            filled between calls). Python runs once, at capture, and never again: no schedulers, counters or
            metrics inside.
        warmup: eager calls before the capture, at least 3: one for whatever is built on first use
            (optimizer state, torch.compile, contests), two to compare.
        pool: another graph's `CapturedStep.pool`, to share memory between graphs that never run at once.
        generators: CUDA generators that the step draws from beside the default one.

    Returns:
        A `CapturedStep`. What a call returns is the caller's own copy, detached: return the loss, not the
        logits. Inputs in pinned or device memory are copied into the fixed buffers without waiting.

    Raises:
        NotCapturable: here on a machine without CUDA; from the call in which another reason is found: a host
            sync, a copy from host memory, random numbers drawn on the CPU, operations or numbers that differ
            from step to step, an optimizer without ``capturable``, an enclosing autocast.
        ValueError: `warmup` below 3.

    Composition: autocast belongs inside the step. For gradient accumulation capture the whole step with its
    loop over micro-batches, or capture forward and backward of one micro-batch and, between calls, zero
    gradients in place (``set_to_none=False``). A step may call ``torch.compile``d modules, but not with
    ``mode="reduce-overhead"``, which captures by itself. The selection regime is the caller's: enter
    ``bakeoff.using(regime="graph")`` around the calls, warm-up included.

    Two things are frozen without notice: a number multiplied in as ``loss * weight`` (make it a tensor),
    and a choice by Python's `random` that falls equal in both watched calls. Tensors that the step uses
    must stay in place: after ``optimizer.load_state_dict`` call `CapturedStep.reset`.

    Source: Nguyen et al. 2021, Accelerating PyTorch with CUDA Graphs.

    Example:
        >>> def step(ids, targets):
        ...     loss = model(ids, targets)[1]
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad(set_to_none=True)
        ...     return loss
        >>> captured = capture_step(step)          # doctest: +SKIP
        >>> try:                                   # doctest: +SKIP
        ...     loss = captured(ids, targets)
        ... except NotCapturable as why:
        ...     print(why)
        ...     captured, loss = step, why.result if why.ran else step(ids, targets)
    """
    if warmup < 3:
        raise ValueError(f"warmup={warmup} must be at least 3: one call to build, two to compare")
    if not torch.cuda.is_available():
        raise NotCapturable("needs CUDA, which this machine does not offer to PyTorch")
    return CapturedStep(step, warmup, pool, generators)


class CapturedStep(Generic[P, R]):
    """A step that becomes a CUDA graph; made by `capture_step`. For one thread at a time."""

    def __init__(
        self,
        step: Callable[P, R],
        warmup: int,
        pool: tuple[int, int] | None,
        generators: Sequence[torch.Generator],
    ) -> None:
        self.step, self.warmup, self.generators = step, warmup, generators
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.calls = 0
        """Steps made since the beginning or the last `reset`."""
        self.bytes = 0
        """Device memory held for the graph: its private pool and the input buffers. 0 before capture; memory
        that the driver keeps for the graph itself is not counted."""
        self._asked_pool: Any = pool  # torch has a name for this pair that only type checkers see
        self._stream = _capture_stream(self.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None
        self._inputs: list[Any] = []
        self._spec: TreeSpec | None = None
        self._described: list[object] = []
        self._watched: list[_Watched] = []
        self._numbers: list[tuple[str, dict[str, Any], str, object]] = []

    @property
    def captured(self) -> bool:
        """Whether the graph exists."""
        return self._graph is not None

    @property
    def pool(self) -> tuple[int, int] | None:
        """The graph's memory pool, for another `capture_step`; None before capture."""
        return self._graph.pool() if self._graph is not None else None

    def reset(self) -> None:
        """Gives up the graph and its memory; the next calls warm up and capture anew."""
        if self._graph is not None:
            torch.cuda.synchronize(self.device)
            self._graph.reset()
        self._graph = self._result = self._spec = None
        self._inputs, self._described, self._watched, self._numbers = [], [], [], []
        self.calls = self.bytes = 0

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device(self.device):
            self._load(args, kwargs)
            if self._graph is None and self.calls < self.warmup:
                result = self._warm()
            else:
                if self._graph is None:
                    self._capture()
                assert self._graph is not None
                self._refuse_new_numbers()
                self._graph.replay()
                result = self._result
            self.calls += 1
            return _own(result)  # type: ignore[no-any-return]

    def _load(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copies the call's tensors into the fixed buffers; everything else must be as in the first call."""
        leaves, spec = tree_flatten((args, kwargs))
        described = [_describe(leaf) for leaf in leaves]
        if self._spec is None:
            self._spec, self._described = spec, described
            self._inputs = [
                torch.empty_like(leaf, device=self.device, requires_grad=False)
                if isinstance(leaf, Tensor)
                else leaf
                for leaf in leaves
            ]
        elif spec != self._spec or described != self._described:
            pairs = zip(self._described, described, strict=False)
            changed = next((f"{was} became {now}" for was, now in pairs if was != now), "other arguments")
            raise ValueError(
                f"a captured step takes the same shapes, dtypes and constants every time, not {changed}: "
                "call the plain step for an odd batch, and pass numbers that change as tensors"
            )
        with torch.no_grad():
            for held, leaf in zip(self._inputs, leaves, strict=True):
                if isinstance(leaf, Tensor):
                    held.copy_(leaf, non_blocking=True)

    def _run(self) -> Any:
        assert self._spec is not None
        args, kwargs = tree_unflatten(self._inputs, self._spec)
        return self.step(*args, **kwargs)

    def _warm(self) -> Any:
        """One eager step, on the stream that will be captured, so that autograd's bookkeeping matches it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        watch = self.calls >= self.warmup - 2
        with torch.cuda.stream(self._stream):
            if not watch:
                result = self._run()
            else:
                with _watching() as seen:
                    result = self._run()
                self._watched.append(seen)
        torch.cuda.current_stream().wait_stream(self._stream)
        if watch:
            try:
                self._judge()
            except NotCapturable as why:
                self.calls += 1
                # Rebound, so that the traceback keeps no autograd graph of this stream alive.
                result = why.result = _own(result)
                why.ran = True
                raise
        return result

    def _judge(self) -> None:
        """Raises for what the watched steps did that a graph can't do."""
        seen = self._watched[-1]
        if seen.waits:
            raise NotCapturable(
                "the step waits for the device: keep the value on the device, or read it outside of the step",
                op=next((op for op in _WAITING if op in seen.on_device), ""),
                where=seen.waits[0],
            )
        if seen.host_copy:
            raise NotCapturable(
                "the step copies from host memory, which a replay would read again at an old address: pass "
                "the tensor as an argument, or build it on the device",
                op=seen.host_copy,
            )
        if seen.cpu_random:
            raise NotCapturable(
                "the step draws random numbers on the CPU, which replays would repeat: draw on the device"
            )
        for optimizer in seen.optimizers:
            if any(group.get("capturable") is False for group in optimizer.param_groups):
                name = type(optimizer).__name__
                raise NotCapturable(f"{name} is not capturable: build it with {name}(..., capturable=True)")
        self._refuse_new_numbers()
        self._numbers = [
            (type(optimizer).__name__, group, name, value)
            for optimizer in seen.optimizers
            for group in optimizer.param_groups
            for name, value in group.items()
            if isinstance(value, int | float)
        ]
        if len(self._watched) == 2:
            _compare(self._watched[0].ops, seen.ops)
            self._watched = []

    def _refuse_new_numbers(self) -> None:
        """Raises where somebody has set an optimizer's number since the step that was watched."""
        for optimizer, group, name, value in self._numbers:
            if group[name] != value:
                raise NotCapturable(
                    f"{optimizer}'s {name} changed from {value} to {group[name]}, which no graph sees: "
                    f"make it a tensor, {name}=torch.tensor(..., device='cuda'), or reset() the capture"
                )

    def _capture(self) -> None:
        if torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled():
            raise NotCapturable(
                "autocast is entered outside of the step, whose cast weights would be frozen: enter it inside"
            )
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        collecting = gc.isenabled()
        gc.disable()  # a collected graph or event would call the driver in the middle of the capture
        try:
            with torch.cuda.stream(self._stream):
                # thread_local: data loading threads may go on allocating and pinning memory.
                graph.capture_begin(self._asked_pool, capture_error_mode="thread_local")
                try:
                    result = self._run()
                    graph.capture_end()
                except BaseException:
                    _abandon(graph, self.device)
                    raise
        except Exception as error:
            said = str(error).partition("\n")[0] or type(error).__name__
            raise NotCapturable(
                f"the capture failed ({said}); set the gradients to None before the next plain step",
                where=_blame(error.__traceback__),
            ) from error
        finally:
            if collecting:
                gc.enable()
        held = sum(leaf.nbytes for leaf in self._inputs if isinstance(leaf, Tensor))
        self.bytes = max(0, torch.cuda.memory_reserved() - before) + held
        self._graph, self._result = graph, result


@contextlib.contextmanager
def forbid_sync() -> Iterator[None]:
    """Inside, an operation that makes the host wait for the GPU raises RuntimeError, at its line.

    Covers PyTorch's own operations (``.item()``, ``nonzero``, copies to pageable memory), not explicit
    ``torch.cuda.synchronize()`` and not other libraries. Nests; does nothing on a machine without CUDA.

    Example:
        >>> with forbid_sync():
        ...     total = torch.ones(3).sum()
    """
    if not torch.cuda.is_available():
        yield
        return
    with _sync_mode("error"):
        yield


@contextlib.contextmanager
def _sync_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures on a device: blocks of a shared pool belong to the stream they were made on."""
    return torch.cuda.Stream(device)


class _Watched:
    """What one eager step did."""

    def __init__(self) -> None:
        self.ops: list[tuple[str, list[str]]] = []
        """Every operation in order, with its tensors' dtypes and shapes, and its numbers."""
        self.on_device: set[str] = set()
        self.waits: list[str] = []
        """Where the host waited."""
        self.host_copy = ""
        self.cpu_random = False
        self.optimizers: list[Optimizer] = []

    def read(self, events: Sequence[Any]) -> None:
        """Takes the operations from the profiler's event tree, children before the next sibling."""
        for event in sorted(events, key=lambda e: e.start_time_ns):
            # Without a namespace: autograd's nodes, and labels that people put on pieces of a step.
            if event.tag.name == "TorchOp" and "::" in event.name and not event.name.startswith("autograd::"):
                inputs = event.extra_fields.inputs
                devices = [value.device.type for value in inputs if hasattr(value, "device")]
                self.ops.append((event.name, [_show(value) for value in inputs]))
                if "cuda" in devices:
                    self.on_device.add(event.name)
                self.cpu_random |= event.name in _RANDOM and devices[:1] == ["cpu"]
                if event.name == "aten::copy_" and devices[:2] == ["cuda", "cpu"]:
                    self.host_copy = self.host_copy or event.name
            self.read(event.children)


@contextlib.contextmanager
def _watching() -> Iterator[_Watched]:
    """Records a step from outside of dispatch: modes would make torch.compile fall back for good."""
    if torch._C._autograd._profiler_enabled():
        raise NotCapturable("a running profiler hides the warm-up from us: start it after the capture")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's own start and stop lines are no news
    seen = _Watched()

    def warned(message: Warning | str, *rest: Any, **named: Any) -> None:
        if _SYNC in str(message):
            seen.waits.append(_frame(traceback.extract_stack()))
        else:
            show(message, *rest, **named)

    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.optimizers.append(optimizer))
    show = warnings.showwarning
    cpu = [torch.profiler.ProfilerActivity.CPU]
    try:
        with warnings.catch_warnings(), _sync_mode("warn"):
            warnings.filterwarnings("always", _SYNC)
            warnings.showwarning = warned
            with torch.profiler.profile(activities=cpu, record_shapes=True, acc_events=True) as profiler:
                yield seen
    finally:
        hook.remove()
    seen.read(profiler.profiler.kineto_results.experimental_event_tree())


def _compare(first: list[tuple[str, list[str]]], second: list[tuple[str, list[str]]]) -> None:
    """Raises where two steps differ in what they do or in a number they use."""
    for (was, before), (now, after) in zip(first, second, strict=False):
        if was != now:
            raise NotCapturable(f"one step runs {was} where the next runs {now}; a graph repeats one", op=now)
        for old, new in zip(before, after, strict=True):
            if old != new:
                raise NotCapturable(
                    f"an argument changes from {old} to {new} between two steps and would be frozen: keep it "
                    "in a device tensor, or set it outside of the step",
                    op=now,
                )
    if len(first) != len(second):
        raise NotCapturable(f"one step runs {len(first)} operations, the next {len(second)}")


def _show(value: Any) -> str:
    if hasattr(value, "sizes"):
        return f"{value.dtype}{list(value.sizes)}"
    if isinstance(value, list):
        return f"[{', '.join(map(_show, value))}]"
    return repr(value)


def _describe(leaf: Any) -> object:
    """What of an argument must be the same in every call."""
    if isinstance(leaf, Tensor):
        if leaf.requires_grad:
            raise ValueError("a captured step's arguments are data: pass x.detach(), without requires_grad")
        return tuple(leaf.shape), leaf.dtype
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return leaf
    name = type(leaf).__name__
    raise TypeError(f"a captured step takes tensors and constants, not {name}: pass torch.as_tensor(x)")


def _own(result: Any) -> Any:
    """The step's result in memory that the next replay does not write."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), result)


def _frame(stack: traceback.StackSummary) -> str:
    """The innermost line that is neither torch's nor ours."""
    for frame in reversed(stack):
        if not frame.filename.startswith(_INSIDE):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def _blame(trace: TracebackType | None) -> str:
    return _frame(traceback.extract_tb(trace))


def _abandon(graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
    """Ends a failed capture. PyTorch raises before it has tidied up: allocator and generator are freed here.

    The calls raise where there is nothing left to do, which differs between PyTorch's versions.
    """
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, graph.pool())
    generator = torch.cuda.default_generators[device.index]
    state = generator.get_state()
    try:
        torch.empty(1, device=device).uniform_()
    except RuntimeError:  # it still believes to be captured: go on from the same place with a fresh state
        generator.graphsafe_set_state(generator.clone_state())
    else:
        generator.set_state(state)
