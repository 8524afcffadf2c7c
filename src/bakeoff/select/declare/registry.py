"""The registry: ops by name, as each op's own module enters them."""

import difflib
import importlib

from bakeoff.errors import PolicyError
from bakeoff.select.declare.op import Op

__all__ = ["find_op", "register", "registry"]

registry: dict[str, Op] = {}
"""Every registered op by name."""


def register(op: Op) -> Op:
    """Make `op` known by its name: to `find_op`, `using(name=...)`, `explain("name")` and torch.compile.

    An op registered before under that name is replaced, as when a notebook's cell runs again.
    """
    registry[op.name] = op
    return op


def find_op(name: str) -> Op:
    """The registered op called `name`, or an error that names the nearest."""
    if name not in registry:
        # The one import of something above: the ops of this package register as they are imported, and who
        # asks for one by name need not have imported them. By name, because ops stand above selection.
        importlib.import_module("bakeoff.ops")
    if name not in registry:
        near = difflib.get_close_matches(name, registry, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; the ops are {', '.join(sorted(registry))}"
        raise PolicyError(f"there is no op {name!r}{hint}")
    return registry[name]
