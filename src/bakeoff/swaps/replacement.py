"""What stands in a module's place of `forward` after a swap, and the proof that it ran.

Only the instance's attribute `forward` is set: the module object, its class, parameters, hooks and `__call__`
stay, so that `state_dict`, hooks, gradient checkpointing, FSDP2 and torch.compile see what they saw before,
and taking the attribute away is all there is to undoing.
"""

import copy
import functools
import inspect
from collections import Counter
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from bakeoff.swaps.own_globals import looked_up

__all__ = ["Found", "Replacement", "note", "replacement_of", "traced"]

_MARK = "_bakeoff_replacement"

_ran: Counter[str] = Counter()
_traced: Counter[str] = Counter()
_entries: set[Any] = set()
"""Every function that `_entry` has made."""


class Found(NamedTuple):
    """What can be put in the place of a module's forward."""

    kinds: tuple[str, ...]
    """What of swap's arguments it serves: of norms, rotary, mlp, attention, loss."""
    ops: tuple[str, ...]
    """The op that each kind calls."""
    build: Callable[..., Callable[..., Any]]
    """build(class, *options) is the function run as forward(module, ...)."""
    options: tuple[Any, ...]


class Replacement:
    """A module's own `forward` after the swap; counts how often each of its kinds ran."""

    def __init__(self, module: nn.Module, found: Found) -> None:
        self.module, self.found = module, found
        self.cls: Any = type(module)
        self.calls = dict.fromkeys(found.kinds, 0)

    @property
    def forward(self) -> MethodType:
        """What the module's attribute `forward` is set to."""
        own = self.cls.forward
        return MethodType(_entry(self.cls, own, looked_up(own), self.found.build, *self.found.options), self)

    def install(self) -> None:
        """Puts it in the place of the module's forward."""
        vars(self.module)[_MARK] = self
        self.module.forward = self.forward

    @property
    def stands(self) -> bool:
        """Whether it is what the module runs; not so once somebody has wrapped it. What accelerate unwraps
        again it binds to the module."""
        found = vars(self.module).get("forward")
        owner = getattr(found, "__self__", None)
        return owner is self or (owner is self.module and getattr(found, "__func__", None) in _entries)

    def remove(self) -> None:
        """Gives the module its own forward back."""
        del self.module.forward
        del vars(self.module)[_MARK]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Replacement":
        other = object.__new__(Replacement)
        memo[id(self)] = other
        other.module, other.found, other.cls = copy.deepcopy(self.module, memo), self.found, self.cls
        other.calls = dict.fromkeys(self.calls, 0)
        return other

    def __repr__(self) -> str:
        return f"<{self.cls.__name__}.forward through {' and '.join(self.found.ops)}>"


@functools.cache
def _entry(
    cls: Any,
    own: Callable[..., Any],
    globals_of_own: tuple[int, ...],
    build: Callable[..., Callable[..., Any]],
    *options: Any,
) -> Callable[..., Any]:
    """The function behind `forward`: one for all modules of a class, since torch.compile compiles anew what
    calls another function. It has the signature of the class's own forward, which trainers read. Where
    somebody has set the class's forward, or what that looks up among its globals, to something else, it is
    made anew."""
    del globals_of_own
    run = build(cls, *options)

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # accelerate takes the function of a bound method and binds it to the module.
        module = self.module if type(self) is Replacement else self
        if torch.compiler.is_compiling():
            return run(module, *args, **kwargs)
        calls = vars(module)[_MARK].calls
        before = [_ran[kind] for kind in calls]
        out = run(module, *args, **kwargs)
        for kind, count in zip(calls, before, strict=True):
            calls[kind] += _ran[kind] - count
        return out

    # Without __wrapped__, along which accelerate would unwrap it to the class's own.
    names = vars(forward)
    del names["__wrapped__"]
    names["__signature__"] = inspect.signature(own)
    _entries.add(forward)
    return forward


def replacement_of(module: nn.Module) -> Replacement | None:
    """What a swap has put in the place of the module's forward."""
    return vars(module).get(_MARK)


def note(kind: str) -> None:
    """A replacement of this kind runs now, or is traced by torch.compile."""
    if torch.compiler.is_compiling():
        _note_traced(kind)
    else:
        _ran[kind] += 1


def traced() -> Counter[str]:
    """How often torch.compile has traced a replacement of each kind in this process."""
    return Counter(_traced)


def _note_traced(kind: str) -> None:
    _traced[kind] += 1


_note_traced = torch.compiler.assume_constant_result(_note_traced)
