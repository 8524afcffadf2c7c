"""The models, one file each: ``bakeoff.models.llm_med``, ``bakeoff.models.byte_spectral``,
``bakeoff.models.titan_mac``, ``bakeoff.models.longnet``."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bakeoff.models import byte_spectral, llm_med, longnet, titan_mac

__all__ = ["build", "byte_spectral", "llm_med", "longnet", "titan_mac"]

_MODULES = ("byte_spectral", "llm_med", "longnet", "titan_mac")


def build(
    config: "llm_med.Config | byte_spectral.Config | titan_mac.Config | longnet.Config",
) -> "llm_med.LLMMed | byte_spectral.ByteSpectralLM | titan_mac.TitanMAC | longnet.LongNetLM":
    """The model that `config` describes, with fresh parameters. Anything else raises TypeError."""
    from bakeoff.models import byte_spectral, llm_med, longnet, titan_mac
    from bakeoff.models.checks import check_kind

    check_kind("config", config, llm_med.Config, byte_spectral.Config, titan_mac.Config, longnet.Config)

    if isinstance(config, byte_spectral.Config):
        return byte_spectral.ByteSpectralLM(config)
    if isinstance(config, titan_mac.Config):
        return titan_mac.TitanMAC(config)
    if isinstance(config, longnet.Config):
        return longnet.LongNetLM(config)
    return llm_med.LLMMed(config)


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return importlib.import_module(f"bakeoff.models.{name}")
    raise AttributeError(f"bakeoff has no model {name!r}; there are {', '.join(_MODULES)}")
