"""A neural memory as an argument: four tensors."""

from typing import Any

from torch import Tensor

__all__ = ["check_parts"]


def check_parts(op: str, memory: Any, momentum: Any) -> None:
    """Raises ValueError for what isn't (w1, b1, w2, b2)."""
    for name, given in (("memory", memory), ("momentum", momentum)):
        if isinstance(given, Tensor) or not hasattr(given, "__len__") or len(given) != 4:
            raise ValueError(f"{op}: {name} must be four tensors, (w1, b1, w2, b2), in a tuple or a list")
