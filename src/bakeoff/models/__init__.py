"""The models, one file each: ``bakeoff.models.llm_med``, ``bakeoff.models.byte_spectral``."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bakeoff.models import byte_spectral, llm_med

__all__ = ["build", "byte_spectral", "llm_med"]

_MODULES = ("byte_spectral", "llm_med")


def build(
    config: "llm_med.Config | byte_spectral.Config",
) -> "llm_med.LLMMed | byte_spectral.ByteSpectralLM":
    """The model that `config` describes, with fresh parameters. Anything else raises TypeError."""
    from bakeoff.models import byte_spectral, llm_med
    from bakeoff.models.checks import check_kind

    check_kind("config", config, llm_med.Config, byte_spectral.Config)

    if isinstance(config, byte_spectral.Config):
        return byte_spectral.ByteSpectralLM(config)
    return llm_med.LLMMed(config)


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return importlib.import_module(f"bakeoff.models.{name}")
    raise AttributeError(f"bakeoff has no model {name!r}; there are {', '.join(_MODULES)}")
