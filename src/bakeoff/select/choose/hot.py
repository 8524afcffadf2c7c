"""The hot path: from a call that has been seen before to the candidate chosen for it.

A call is recognised by its fingerprint, looked up in a memo. Since building that takes longer than comparing,
the memo also keeps, per op, its first few kinds of calls as PyTorch's own compiled guards; what they don't
recognise goes by its fingerprint.
"""

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace

from bakeoff.modes import watched
from bakeoff.select.declare.lists import TensorList
from bakeoff.select.declare.op import Op

try:
    from torch._C._dynamo.guards import TensorGuards as _Guards
except ImportError:  # a private name: without it every call goes by its fingerprint
    _Guards = None  # type: ignore[assignment,misc]

__all__ = [
    "Memo",
    "before_capture",
    "capturing",
    "current",
    "fingerprint",
    "known",
    "memo",
    "process_memo",
    "transformed",
    "under_capture",
]

Memo = dict[Any, Any]
"""Implementations by fingerprint, and by op a tuple of guards: functions of a call's arguments that return
the implementation where the call is of their kind. `bakeoff.select.call` asks these first."""

memo: ContextVar[Memo | None] = ContextVar("bakeoff_memo", default=None)
"""Decisions made under the settings this context entered; None where it entered none of its own."""

process_memo: Memo = {}
"""Decisions for such contexts: they follow the settings the process entered last. Autograd's threads are
such contexts, so recomputation in backward selects as forward did."""

_MOST_GUARDED = 4
_has_grad, _is_deterministic = torch.is_grad_enabled, torch._C._get_deterministic_algorithms
_in_func = torch._C._are_functorch_transforms_active
_stream_captures: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing  # torch.cuda's, without a call
_SCALARS = frozenset({bool, float, int, str, type(None)})


def current() -> Memo:
    """The memo of the settings in force."""
    entered = memo.get()
    return process_memo if entered is None else entered


def capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream, also by code of the user's own."""
    return torch.cuda.is_initialized() and _stream_captures()


_CAPTURE = "under capture"


def under_capture(fingerprint: tuple[Any, ...]) -> tuple[Any, ...]:
    """The fingerprint of a call that is being captured, which may be decided otherwise."""
    return (_CAPTURE, fingerprint)


def before_capture(fingerprint: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The fingerprint that a captured call has outside of capture; None for one that is not captured."""
    return fingerprint[1] if fingerprint[0] is _CAPTURE else None


def transformed() -> bool:
    """Whether more than autograd looks at calls now: transforms of torch.func, forward-mode derivatives,
    torch.jit.trace, dispatch modes (make_fx is one, FlopCounterMode too). Plain PyTorch composes with them;
    kernels and compiled code don't."""
    return (
        forward_ad._current_level >= 0
        or _in_func()
        or torch._C._get_tracing_state() is not None
        or (torch._C._len_torch_dispatch_stack() > 0 and watched())
    )


def known(op: Op, args: Sequence[Any]) -> Callable[..., Any] | None:
    """The implementation that was chosen for such a call before, or None; asked where no guard of `op`
    recognises the call, which gets a guard if there is room for one."""
    if transformed():
        return None
    decided = current()
    implementation: Callable[..., Any] | None = decided.get(fingerprint(op, args))
    guards = decided.get(op, ())
    if implementation is not None and len(guards) < _MOST_GUARDED:
        decided[op] = (*guards, *_guard(op, args, implementation))
    return implementation


def _guard(op: Op, args: Sequence[Any], call: Callable[..., Any]) -> list[Callable[[Sequence[Any]], Any]]:
    """A function of a call's arguments that returns `call` if they are of the kind of `args`, else None; or
    nothing where there can be none.

    It is written out for them, since a loop over arguments takes longer than comparing them. PyTorch's guards
    compare dispatch keys, too: those of torch.jit.trace and of most modes are others, but not make_fx's. A
    nested tensor has no strides, for which they end the process, also where torch.func has wrapped it.
    """
    given = {f"a{i}": a for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
    if _Guards is None or len({id(tensor) for tensor in given.values()}) < len(given):
        return []  # guards take a tensor that is passed twice for another kind of call
    names: dict[str, Any] = {"call": call, "forward_ad": forward_ad, "fx": _symbolic_trace}
    names |= {"has_grad": _has_grad, "is_deterministic": _is_deterministic, "in_func": _in_func}
    names |= {"stream_captures": _stream_captures, "inf": math.inf}
    # The cheapest first, as a call of another kind fails every guard before its own.
    conditions = []
    lists = [a for a in args if isinstance(a, TensorList)]
    for i, a in enumerate(args):
        names |= {f"class{i}": a.__class__, f"value{i}": None if f"a{i}" in given else a}
        if isinstance(a, TensorList):
            names[f"value{i}"] = a.kind
            conditions.append(f"a{i}.__class__ is class{i} and a{i}.kind == value{i}")
        elif f"a{i}" in given:
            conditions.append(f"a{i}.__class__ is class{i} and not a{i}.is_nested")
        elif op.params[i] in op.settings and _positive(a):
            conditions.append(f"a{i}.__class__ is class{i} and 0 < a{i} < inf")
        elif a is None or isinstance(a, bool):
            conditions.append(f"a{i} is value{i}")
        else:  # the class first: no tensor is asked whether it equals a number
            conditions.append(f"a{i}.__class__ is class{i} and a{i} == value{i}")
    if any(tensor.requires_grad for tensor in given.values()) or any(a.wants_grad for a in lists):
        conditions.append(f"has_grad() is {_has_grad()}")
    conditions.append(f"is_deterministic() is {_is_deterministic()}")
    conditions.append("forward_ad._current_level < 0 and not in_func() and not fx._is_fx_tracing_flag")
    if given:
        names["check"] = _Guards(*given.values(), dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        conditions.append(f"check({', '.join(given)})")
    if any(tensor.is_cuda for tensor in given.values()) or any(a.device.type == "cuda" for a in lists):
        conditions.append(f"stream_captures() is {_stream_captures()}")
    arguments = "".join(f"a{i}, " for i in range(len(args)))
    # Names, numbers and words of this function's own; the call's values are bound to names.
    exec(f"def guard(args):\n {arguments}= args\n if {' and '.join(conditions)}: return call", names)  # noqa: S102
    return [names["guard"]]


def _positive(setting: Any) -> bool:
    """Whether this is a number above 0 and finite, all of which are one kind of setting. Of others each is a
    kind of its own, so that the op's checks look at it."""
    return setting.__class__ in (float, int) and 0 < setting < math.inf


def fingerprint(op: Op, args: Sequence[Any]) -> tuple[Any, ...]:
    """Everything a selection for `op` may depend on, exactly, as a hashable tuple; reads metadata only.

    Two calls with one fingerprint get one decision. The class is part of it, so that a tensor subclass
    never inherits a plain tensor's decision, nor 1 that of True. Flat, because that is faster than nested
    tuples, and still unambiguous: six entries a tensor, two for anything else, of which the first is a class.
    A tensor's layout includes whether its memory holds the negative or the conjugate of its values. Calls on
    a GPU that a CUDA graph captures have fingerprints of their own. Raises RuntimeError for a tensor without
    a shape or strides.
    """
    parts = [op, _has_grad(), _is_deterministic()]
    on_gpu = False
    device: Any
    layout: Any
    if op.settings:
        named = zip(op.params, args, strict=True)
        args = [a.__class__ if name in op.settings and _positive(a) else a for name, a in named]
    for a in args:
        kind = a.__class__
        if kind is TensorList:
            on_gpu = on_gpu or a.device.type == "cuda"
            parts += (kind, a.kind)
        elif kind in _SCALARS or not isinstance(a, torch.Tensor):
            parts += (kind, a)
        else:
            device = a.get_device()
            if device >= 0:
                on_gpu = True
            elif not a.is_cpu or a.is_mkldnn:  # meta tensors have the CPU's number
                device = (a.device, a.layout)
            layout = a.is_contiguous() or (a.layout, a.stride())
            if a.is_neg() or a.is_conj():
                layout = (layout, a.is_neg(), a.is_conj())
            parts += (kind, a.shape, a.dtype, device, a.requires_grad, layout)
    return under_capture(tuple(parts)) if on_gpu and capturing() else tuple(parts)
