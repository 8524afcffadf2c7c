"""Ops that hold their contests at exactly the case given, not at the bucket's representative.

``bakeoff.apps.bench.exact:rms_norm`` is such a twin of rms_norm, so that a worker process can import it.
"""

from dataclasses import replace
from typing import Any

from bakeoff.errors import PolicyError
from bakeoff.select import Case, Op, find_op

__all__ = ["exact"]

_twins: dict[str, Op] = {}


def exact(op: Op) -> Op:
    """The twin of a registered op whose bucket is the case itself."""
    if op.name not in _twins:
        _twins[op.name] = replace(op, bucket=_itself, home=f"{__name__}:{op.name}")
    return _twins[op.name]


def _itself(case: Case) -> Case:
    return case


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        try:
            return exact(find_op(name))
        except PolicyError:
            pass
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
