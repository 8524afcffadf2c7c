"""The models, one file each: ``bakeoff.models.llm_med``."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bakeoff.models import llm_med

__all__ = ["llm_med"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"bakeoff.models.{name}")
    raise AttributeError(f"bakeoff has no model {name!r}; there is {', '.join(__all__)}")
