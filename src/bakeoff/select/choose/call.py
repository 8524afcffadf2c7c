"""Calling an op: the selected candidate runs."""

from typing import Any

from torch.compiler import is_compiling

from bakeoff.select.choose import hot
from bakeoff.select.choose.dispatch import dispatch
from bakeoff.select.choose.traced import traced_call
from bakeoff.select.declare.op import Op

__all__ = ["call"]


def call(op: Op, *args: Any, impl: str | None = None) -> Any:
    """Run the candidate of `op` that is selected for these arguments, or `impl`.

    This is the hot path: a call of a kind that the memo knows is looked up right here, because one more
    function call would be a measurable part of its cost.
    """
    if is_compiling():
        return traced_call(op, args, impl)
    if impl is None:
        try:
            decided = hot.memo.get()
            if decided is None:
                decided = hot.process_memo
            for guard in decided.get(op, ()):
                known = guard(args)
                if known is not None:
                    break
            else:
                known = hot.known(op, args)
        except (TypeError, ValueError, AttributeError, RuntimeError):
            known = None  # no tensor, one without strides, nothing to hash: dispatch names what is wrong
        if known is not None:
            return known(*args)
    return dispatch(op, args, impl)
