"""Devices by the names that users give them."""

import contextlib

import torch

from bakeoff.errors import DeviceError

__all__ = ["current_device", "named_device", "on", "synchronize"]

_NAMES = "auto, cpu, cuda or cuda:N"


def named_device(name: str) -> torch.device:
    """The device called "auto" (CUDA where there is one), "cpu", "cuda" (the first GPU) or "cuda:N"; a GPU's
    has its index.

    Raises:
        DeviceError: no such device on this machine.

    Example:
        >>> named_device("cpu")
        device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"{name!r} is no device: use {_NAMES}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise DeviceError(f"{name!r} is not supported: use {_NAMES}")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"{name!r}: PyTorch {torch.__version__} sees no CUDA device here: use cpu, or see bakeoff doctor"
        )
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        here = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise DeviceError(f"there is no {name}: this machine has {here}")
    return torch.device("cuda", index)


def current_device(name: str) -> torch.device:
    """`named_device`, from then on this process's current one if it is a GPU."""
    device = named_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def on(device: str | torch.device) -> contextlib.AbstractContextManager[object]:
    """Inside, a GPU is the current one, for code that doesn't look where its tensors are."""
    device = torch.device(device)
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def synchronize(device: str | torch.device) -> None:
    """Wait until `device` has finished all work in its queues; on the CPU there is none to wait for."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
