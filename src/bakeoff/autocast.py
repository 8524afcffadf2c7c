"""What torch.autocast does to a function's tensors, for functions that it knows nothing of."""

import contextlib
from typing import Any

import torch

__all__ = ["as_autocast", "without_autocast"]


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Keeps autocast from x's device: what is computed inside has the dtypes that are named there."""
    if _casts(x):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


def as_autocast(x: Any) -> Any:
    """`x` as autocast, where it is on, hands it to a matrix product; float64 and what isn't a floating tensor
    stay."""
    if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64 and _casts(x):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _casts(x: torch.Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)  # "meta" has no autocast to ask for
