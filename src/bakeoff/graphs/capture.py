"""The step that becomes a CUDA graph."""

import contextlib
import functools
import gc
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from bakeoff.graphs.not_capturable import NotCapturable, blamed_line
from bakeoff.graphs.watch import Watched, compare, watching

__all__ = ["CapturedStep", "capture_step", "capture_stream"]

P = ParamSpec("P")
R = TypeVar("R")

_KEPT: list[torch.cuda.CUDAGraph] = []


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
            filled between calls, and `bakeoff.optim.AdamW` keeps a number lr on the device by itself). Python
            runs once, at capture, and never again: no schedulers, counters or metrics inside.
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
    ``bakeoff.using(regime="graph")`` around the calls, warm-up included. Collectives of NCCL are captured
    with the rest. DistributedDataParallel is made inside ``torch.cuda.stream(capture_stream(device))``, and
    wants 11 calls or more of warm-up, as it times its first ten; shards (`fully_shard`, from PyTorch 2.11 on)
    are told to `reshard()` after every pass outside of the step, or the next would have weights of before the
    replays; `reset` the step before the process group is destroyed, which waits for graphs.

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
        self._stream = capture_stream(self.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None
        self._inputs: list[Any] = []
        self._spec: TreeSpec | None = None
        self._described: list[object] = []
        self._watched: list[Watched] = []
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

    def keep(self) -> None:
        """Keeps the graph until the process ends: destroying one that waits for a lost rank never ends."""
        if self._graph is not None:
            _KEPT.append(self._graph)

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
                # What depends on how far the device has come, such as memory in use, must not differ.
                torch.cuda.synchronize(self.device)
                with watching() as seen:
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
        seen.refuse()
        self._refuse_new_numbers()
        self._numbers = seen.numbers()
        if len(self._watched) == 2:
            compare(self._watched[0].ops, seen.ops)
            self._watched = []

    def _refuse_new_numbers(self) -> None:
        """Raises where somebody has set an optimizer's number since the step that was watched."""
        for optimizer, group, name, value in self._numbers:
            if group[name] != value:
                raise NotCapturable(
                    f"{optimizer}'s {name} changed from {value} to {group[name]}, which no graph sees: "
                    f"leave it, make it a tensor if it may be one, {name}=torch.tensor(..., device='cuda'), "
                    f"or reset() the capture"
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
                where=blamed_line(traceback.extract_tb(error.__traceback__)),
            ) from error
        finally:
            if collecting:
                gc.enable()
        held = sum(leaf.nbytes for leaf in self._inputs if isinstance(leaf, Tensor))
        self.bytes = max(0, torch.cuda.memory_reserved() - before) + held
        self._graph, self._result = graph, result


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device: blocks of a shared pool belong to the stream they were made on.

    What ties parameters to the current stream for good, as DistributedDataParallel does when it is made, must
    be done on this one.
    """
    return torch.cuda.Stream(device)


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
