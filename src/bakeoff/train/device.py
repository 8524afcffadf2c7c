"""The device of a run, and what to say when its memory is full."""

import contextlib
from collections.abc import Iterator

import torch

from bakeoff.errors import BakeoffError
from bakeoff.train.config import Config, ConfigError

__all__ = ["TrainError", "memory_errors", "pick_device"]


class TrainError(BakeoffError, RuntimeError):
    """Training can't go on; the message says what to change."""


def pick_device(name: str) -> torch.device:
    """The device called "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N". Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"train.device={name!r} is no device: use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"train.device={name!r} is not supported: use auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"train.device={name!r}: PyTorch sees {count} CUDA devices here; use auto or cpu")
    return device


@contextlib.contextmanager
def memory_errors(config: Config) -> Iterator[None]:
    """Turns running out of memory, on the GPU or the host, into a TrainError that names the fix."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        starved = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not starved and "can't allocate memory" not in str(
            error
        ):  # the CPU allocator's plain RuntimeError
            raise
        train = config.train
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise TrainError(
            f"out of memory with train.batch_size={train.batch_size}, {config.seq_len} bytes a row, "
            f"train.accumulate={train.accumulate}: set train.accumulate={2 * train.accumulate} for the same "
            f"steps in about half the memory, or lower train.batch_size. ({first_line})"
        ) from error
