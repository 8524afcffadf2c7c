"""Paths as users write them, and what may lie there."""

import errno
import os
import stat
from pathlib import Path

__all__ = ["contents", "expanded", "write_whole"]


def expanded(path: str | Path) -> Path:
    """`path` with its ``~`` resolved; raises FileNotFoundError where that names no home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise FileNotFoundError(
            errno.ENOENT, "its ~ stands for no home folder here, write the path out", str(path)
        ) from None


def contents(path: Path, largest: int) -> bytes:
    """The bytes of a regular file of at most `largest` bytes; raises OSError for anything else.

    A pipe's other end is not waited for.
    """
    with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if status.st_size > largest:
            raise OSError(errno.EFBIG, f"it is larger than {largest >> 20} MiB", str(path))
        return file.read()


def write_whole(path: Path, data: bytes) -> None:
    """Writes `data` as the file `path`; readers, and a crash, find it as it was or with all of `data`.

    What a link leads to is replaced, and the link stays. Raises OSError; the file is then as it was.
    """
    place = path.resolve()
    beside = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)
