"""bakeoff runs the fastest *correct* implementation of every op of a PyTorch model, on this GPU, at these
shapes.

The public names load on first use, so that importing the package costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bakeoff import models, ops
    from bakeoff.causal import CausalityError, assert_causal
    from bakeoff.errors import BakeoffError, Unsupported
    from bakeoff.select.choose.explain import explain
    from bakeoff.select.choose.policy import configure, using
    from bakeoff.select.choose.tune import tune
    from bakeoff.swaps import swap, unswap

__version__ = "0.1.0"

__all__ = [
    "BakeoffError",
    "CausalityError",
    "Unsupported",
    "__version__",
    "assert_causal",
    "configure",
    "explain",
    "models",
    "ops",
    "swap",
    "tune",
    "unswap",
    "using",
]

_WHERE = {
    "BakeoffError": "bakeoff.errors",
    "CausalityError": "bakeoff.causal",
    "Unsupported": "bakeoff.errors",
    "assert_causal": "bakeoff.causal",
    "configure": "bakeoff.select.choose.policy",
    "explain": "bakeoff.select.choose.explain",
    "swap": "bakeoff.swaps",
    "tune": "bakeoff.select.choose.tune",
    "unswap": "bakeoff.swaps",
    "using": "bakeoff.select.choose.policy",
}

_MODULES = (
    "bench",
    "causal",
    "errors",
    "graphs",
    "hardware",
    "models",
    "nn",
    "ops",
    "optim",
    "parallel",
    "select",
    "token_order",
    "train",
)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"bakeoff.{name}")
    raise AttributeError(f"module 'bakeoff' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
