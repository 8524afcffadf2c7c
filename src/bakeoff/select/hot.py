"""The hot path: from a call that has been seen before to the candidate chosen for it.

A call is recognised by its fingerprint, looked up in a memo. Since building that takes longer than comparing,
the memo also keeps, per op, its first few kinds of calls as PyTorch's own compiled guards; what they don't
recognise goes by its fingerprint.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from operator import itemgetter
from typing import Any

import torch
from torch.autograd import forward_ad

try:
    from torch._C._dynamo.guards import TensorGuards as _Guards
except ImportError:  # a private name: without it every call goes by its fingerprint
    _Guards = None  # type: ignore[assignment,misc]

__all__ = ["Memo", "current", "fingerprint", "known", "memo", "process_memo", "transformed"]

Memo = dict[Any, Any]
"""Candidates' callables by fingerprint, and by op the list of its guarded kinds of calls."""

memo: ContextVar[Memo | None] = ContextVar("bakeoff_memo", default=None)
"""Decisions made under the settings this context entered; None where it entered none of its own."""

process_memo: Memo = {}
"""Decisions for such contexts: they follow the settings the process entered last. Autograd's threads are
such contexts, so recomputation in backward selects as forward did."""

_MOST_GUARDED = 4
_has_grad, _is_deterministic = torch.is_grad_enabled, torch._C._get_deterministic_algorithms
_SCALARS = frozenset({bool, float, int, str, type(None)})


def current() -> Memo:
    """The memo of the settings in force."""
    entered = memo.get()
    return process_memo if entered is None else entered


def transformed() -> bool:
    """Whether more than autograd looks at calls now: transforms of torch.func, forward-mode derivatives,
    torch.jit.trace. Plain PyTorch composes with them; kernels and compiled code don't."""
    return (
        forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


def known(op: object, args: Sequence[Any]) -> Callable[..., Any] | None:
    """What runs this call by an earlier decision, or None."""
    decided = current()
    guarded = decided.get(op)
    if guarded is not None and forward_ad._current_level < 0:
        mode = _has_grad(), _is_deterministic()
        for tensors, others, expected, check, call in guarded:
            # A set, because it compares by hash first: nobody asks a tensor whether it equals a number.
            if (mode, others(args)) in expected:
                given = tensors(args)
                for tensor in given:
                    if tensor.__class__ in _SCALARS:  # None, say, in an optional tensor's place
                        break
                    if tensor.is_nested:  # it has no strides, for which check() ends the process
                        return None
                else:
                    # It compares dispatch keys, too: those of torch.func and torch.jit.trace are others.
                    if check(*given):
                        return call  # type: ignore[no-any-return]
    if transformed():
        return None
    found: Callable[..., Any] | None = decided.get(fingerprint(op, args))
    if found is not None and (guarded is None or len(guarded) < _MOST_GUARDED):
        _guard(decided, op, args, found)
    return found


def _guard(decided: Memo, op: object, args: Sequence[Any], call: Callable[..., Any]) -> None:
    """Recognise calls like this one by compiled guards from now on."""
    where = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    given = [args[i] for i in where]
    if _Guards is None or len({id(t) for t in given}) < len(given):
        return  # guards take a tensor that is passed twice for another kind of call
    tensors, others = _picker(where), _picker([i for i in range(len(args)) if i not in where])
    check = _Guards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    mode = _has_grad(), _is_deterministic()
    decided.setdefault(op, []).append((tensors, others, {(mode, others(args))}, check, call))


def _picker(where: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Takes these positions of a sequence, as a tuple."""
    if len(where) > 1:
        return itemgetter(*where)
    return lambda args: tuple([args[i] for i in where])


def fingerprint(op: object, args: Sequence[Any]) -> tuple[Any, ...]:
    """Everything a selection for `op` may depend on, exactly, as a hashable tuple; reads metadata only.

    Two calls with one fingerprint get one decision. The class is part of it, so that a tensor subclass
    never inherits a plain tensor's decision. Flat, because that is faster than nested tuples, and still
    unambiguous: six entries a tensor, of which the first is a class, and one for anything else. Raises
    RuntimeError for a tensor without a shape or strides.
    """
    found = [op, _has_grad(), _is_deterministic()]
    place: Any
    for a in args:
        kind = a.__class__
        if kind in _SCALARS or not isinstance(a, torch.Tensor):
            found.append(a)
        else:
            place = a.get_device()
            if place < 0 and (not a.is_cpu or a.is_mkldnn):  # meta tensors have the CPU's number
                place = (a.device, a.layout)
            strides = a.is_contiguous() or (a.layout, a.stride())
            found += (kind, a.shape, a.dtype, place, a.requires_grad, strides)
    return tuple(found)
