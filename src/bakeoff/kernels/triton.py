"""Launching one Triton kernel in a few microseconds.

``kernel[grid](...)`` re-derives the kernel's specialisation from every argument on every call. Here the
compiled kernel is remembered under what can really change it (constexprs, dtypes, pointer alignment), and
later launches go straight to the driver.

Contract for a kernel: constexprs are declared after the runtime arguments, and every runtime integer and
float is listed in ``do_not_specialize``, so that its value never selects another binary. Under Triton's
interpreter the same call runs the interpreted kernel.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton import knobs

from bakeoff.kernels import counter
from bakeoff.kernels.ahead import Missing, a_kernel_is_missing

__all__ = ["Compiled", "TritonKernel", "name_in_profiles"]


class Compiled(NamedTuple):
    """A kernel in the driver, for one set of dtypes, constexprs and options."""

    run: Callable[..., None]
    function: Any
    packed: Any
    constants: tuple[Any, ...]
    """The constexprs, in the kernel's order."""

    def replay(self, grid: str, arguments: str, prefix: str) -> tuple[str, dict[str, Any]]:
        """The line of Python that launches it on `stream`, and the objects that line names."""
        words = [_Word(word) for word in f"{grid}, stream, {arguments}".split(", ") if word]
        given = [*words[:4], self.function, self.packed, None, None, None, *words[4:], *self.constants]
        launcher: Any = self.run
        passed = _passed_on(launcher, given)
        scope = {f"{prefix}run": launcher if passed is None else launcher.launch}
        return f"{prefix}run({_written(passed or given, prefix, scope)})", scope


class _Word(str):
    """What stands for a value in a written-out launch."""

    __slots__ = ()


def _passed_on(run: Callable[..., None], given: Sequence[Any]) -> Sequence[Any] | None:
    """What a launcher of Triton's, which is Python, passes on to the function in C behind it: Python that
    takes a microsecond a launch, always with the same outcome. None for a launcher that computes with what
    it is given, as one that allocates scratch memory does, or has no such function.
    """
    passed: list[Sequence[Any]] = []
    try:
        probe: Any = copy.copy(run)
        probe.launch  # noqa: B018
        probe.launch = lambda *args: passed.append(args)
        probe(*given)
    except (AttributeError, TypeError):
        return None
    return passed[0] if len(passed) == 1 else None


def _written(values: Sequence[Any], prefix: str, scope: dict[str, Any]) -> str:
    """`values` as Python, whose objects are put into `scope`."""
    words = []
    for value in values:
        if isinstance(value, _Word):
            words.append(value)
        elif value is None or type(value) in (int, bool):
            words.append(_Word(repr(value)))
        elif type(value) in (list, tuple) and any(isinstance(each, _Word) for each in value):
            words.append(_Word(f"({_written(value, prefix, scope)},)"))
        else:
            name = _Word(f"{prefix}{len(scope)}")
            scope[name] = value
            words.append(name)
    return ", ".join(words)


def name_in_profiles(function: Callable[..., Any]) -> str:
    """What a profiler calls a kernel: `_forward` of bakeoff.ops.rms_norm.kernels is rms_norm_forward.

    >>> from bakeoff.ops.rms_norm import kernels
    >>> name_in_profiles(kernels._forward.fn)
    'rms_norm_forward'
    """
    own = function.__name__.strip("_")
    folders = [part for part in function.__module__.split(".") if part not in ("bakeoff", "ops", "kernels")]
    return "_".join([*(part for part in folders if part != own), own])


class TritonKernel:
    """Launches one ``@triton.jit`` function.

    ``kernel(grid, x=x, N=N, BLOCK=1024, num_warps=4)``: everything by the names that the function gives its
    arguments, constexprs and compile options beside them. A misaligned pointer or an installed launch hook
    takes Triton's own, slower path.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        if getattr(function, "_repr", self) is None:  # else it has a name of its own, or Triton has none
            function._repr = lambda specialization: name_in_profiles(function.fn)
        kinds = {name: p.annotation for name, p in inspect.signature(function.fn).parameters.items()}
        self.runtime = tuple(name for name, kind in kinds.items() if kind is not tl.constexpr)
        """The names of the arguments that a launch passes, in order."""
        self.constexprs = tuple(name for name in kinds if name not in self.runtime)
        self._own = frozenset(self.runtime)
        self._compiled: dict[tuple[Any, ...], Compiled] = {}

    def __call__(self, grid: tuple[int, ...], /, **named: Any) -> Compiled | None:
        """Launch once. The result is what later launches of the same kind may use, or None where they
        can't."""
        counter.count()
        key, device, values = self._told(named)
        if key is None:
            with torch.cuda.device(device):
                self.function[grid](**named)
            return None
        compiled = self._compiled.get(key)
        if compiled is None or device != torch.cuda.current_device():
            if compiled is None:
                a_kernel_is_missing(device)
            with torch.cuda.device(device):
                built = self.function[grid](**named)
            constants = tuple(named[name] for name in self.constexprs if name in named)
            compiled = Compiled(built.run, built.function, built.packed_metadata, constants)
            self._compiled[key] = compiled
            return compiled
        run, function, packed, constants = compiled
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(x, y, z, stream, function, packed, None, None, None, *values, *constants)
        return compiled

    def missing(self, grid: tuple[int, ...], /, **named: Any) -> Missing:
        """The kernel of such a launch, if it isn't compiled: see `bakeoff.kernels.ahead`."""
        key = self._told(named)[0]
        if key is None or key in self._compiled:
            return {}
        return {(self.function, key): lambda: self.function.warmup(grid=grid, **named)}

    def _told(self, named: Mapping[str, Any]) -> tuple[tuple[Any, ...] | None, int, list[Any]]:
        """What tells the compiled kernel of a launch, the device, and the values to pass; no key where a
        launch takes Triton's own path, and no device, -1, on the CPU, where the interpreter runs it."""
        pointers, device = 0, -1
        values: list[Any] = []
        types: list[Any] = []
        for name in self.runtime:
            value = named[name]
            if isinstance(value, torch.Tensor):
                pointer = value.data_ptr()
                pointers |= pointer
                device = value.get_device()
                values.append(pointer)
                types.append(value.dtype)
            else:
                values.append(value)
                types.append(value.__class__)
        if device < 0 or pointers & 15 or knobs.runtime.launch_enter_hook.calls:
            return None, device, values
        return (device, *types, *[item for item in named.items() if item[0] not in self._own]), device, values
