"""What one eager step does that a graph can't hold or would silently freeze."""

import contextlib
import os
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bakeoff.graphs.not_capturable import NotCapturable, blamed_line
from bakeoff.graphs.sync import WAITED, sync_mode

__all__ = ["KEEPS_PINNED", "Watched", "compare", "watching"]

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
KEEPS_PINNED = torch.__version__ >= "2.11"  # compared as versions
"""Whether pinned memory that is allocated during a capture stays as it is for as long as the graph."""
# What shards of FSDP2 are joined and parted with. They hand their kernels lists of addresses, by a copy from
# pinned memory of their own.
_COPYING = {"aten::_chunk_cat", "aten::split_with_sizes_copy"} if KEEPS_PINNED else set()
# What all of PyTorch's random functions come down to.
_RANDOM = {f"aten::{name}_" for name in ("bernoulli", "cauchy", "exponential", "geometric", "log_normal")}
_RANDOM |= {"aten::normal_", "aten::random_", "aten::uniform_", "aten::randperm"}


class Watched:
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

    def read(self, events: Sequence[Any], *, copies: bool = True) -> None:
        """Takes the operations from the profiler's event tree, children before the next sibling; `copies`
        from host memory count."""
        for event in sorted(events, key=lambda e: e.start_time_ns):
            # Without a namespace: autograd's nodes, and labels that people put on pieces of a step.
            if event.tag.name == "TorchOp" and "::" in event.name and not event.name.startswith("autograd::"):
                inputs = event.extra_fields.inputs
                devices = [value.device.type for value in inputs if hasattr(value, "device")]
                self.ops.append((event.name, [_show(value) for value in inputs]))
                if "cuda" in devices:
                    self.on_device.add(event.name)
                self.cpu_random |= event.name in _RANDOM and devices[:1] == ["cpu"]
                if copies and event.name == "aten::copy_" and devices[:2] == ["cuda", "cpu"]:
                    self.host_copy = self.host_copy or event.name
            self.read(event.children, copies=copies and event.name not in _COPYING)

    def refuse(self) -> None:
        """Raises `NotCapturable` for what a graph can't do."""
        if self.waits:
            raise NotCapturable(
                "the step waits for the device: keep the value on the device, or read it outside of the step",
                op=next((op for op in _WAITING if op in self.on_device), ""),
                where=self.waits[0],
            )
        if self.host_copy:
            raise NotCapturable(
                "the step copies from host memory, which a replay would read again at an old address: pass "
                "the tensor as an argument, or build it on the device",
                op=self.host_copy,
            )
        if self.cpu_random:
            raise NotCapturable(
                "the step draws random numbers on the CPU, which replays would repeat: draw on the device"
            )
        for optimizer in self.optimizers:
            if any(group.get("capturable") is False for group in optimizer.param_groups):
                name = type(optimizer).__name__
                raise NotCapturable(f"{name} is not capturable: build it with {name}(..., capturable=True)")

    def numbers(self) -> list[tuple[str, dict[str, Any], str, object]]:
        """The optimizers' numbers that a graph freezes: (optimizer, its parameter group, name, value).

        A group tells in `mirrored` which ones it keeps on the device, for replays to read.
        """
        return [
            (type(optimizer).__name__, group, name, value)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for name, value in group.items()
            if _is_numeric(value) and name not in getattr(group, "mirrored", ())
        ]


@contextlib.contextmanager
def watching() -> Iterator[Watched]:
    """Records a step from outside of dispatch: modes would make torch.compile fall back for good."""
    if torch._C._autograd._profiler_enabled():
        raise NotCapturable("a running profiler hides the warm-up from us: start it after the capture")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's own start and stop lines are no news
    seen = Watched()

    def warned(message: Warning | str, *rest: Any, **named: Any) -> None:
        if WAITED in str(message):
            seen.waits.append(blamed_line(traceback.extract_stack()))
        else:
            show(message, *rest, **named)

    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.optimizers.append(optimizer))
    show = warnings.showwarning
    cpu = [torch.profiler.ProfilerActivity.CPU]
    try:
        with warnings.catch_warnings(), sync_mode("warn"):
            warnings.filterwarnings("always", WAITED)
            warnings.showwarning = warned
            with torch.profiler.profile(activities=cpu, record_shapes=True, acc_events=True) as profiler:
                yield seen
    finally:
        hook.remove()
    seen.read(profiler.profiler.kineto_results.experimental_event_tree())


def compare(first: list[tuple[str, list[str]]], second: list[tuple[str, list[str]]]) -> None:
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


def _is_numeric(value: object) -> bool:
    """Whether this is a number, or several as betas are."""
    several = value if isinstance(value, tuple) else (value,)
    return all(isinstance(one, int | float) for one in several)


def _show(value: Any) -> str:
    if hasattr(value, "sizes"):
        return f"{value.dtype}{list(value.sizes)}"
    if isinstance(value, list):
        return f"[{', '.join(map(_show, value))}]"
    return repr(value)
