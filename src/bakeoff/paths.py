"""Paths as users write them."""

import errno
from pathlib import Path

__all__ = ["expanded"]


def expanded(path: str | Path) -> Path:
    """`path` with its ``~`` resolved; raises FileNotFoundError where that names no home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise FileNotFoundError(
            errno.ENOENT, "its ~ stands for no home folder here, write the path out", str(path)
        ) from None
