"""Which packages can be used here, and their versions."""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from functools import cache

import torch

__all__ = ["missing", "package_version"]


def missing(package: str) -> str | None:
    """Why a package can't be used, or None."""
    try:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
        if package == "triton" and torch.cuda.is_available():  # an installed triton may still fail to import
            importlib.import_module(package)
    except Exception as error:  # a broken installation may raise anything
        return f"{package} can't be imported ({type(error).__name__}: {error})"
    return None


def package_version(package: str) -> str:
    """The installed version of an importable package, or "?"."""
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        return "?"
    for name in _distributions().get(package, [package]):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "?"


@cache
def _distributions() -> Mapping[str, list[str]]:
    """The distributions behind each importable package; cached, since reading them takes a second."""
    return importlib.metadata.packages_distributions()
