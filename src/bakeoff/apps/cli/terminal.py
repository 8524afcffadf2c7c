"""What the commands share: the console, the device asked for, the ops, JSON."""

import importlib
import json
import os
import sys
from typing import Any

import click
import msgspec
import torch
from rich.console import Console
from rich.status import Status

from bakeoff.errors import BakeoffError
from bakeoff.select import Op, registry

__all__ = ["DeviceError", "console", "counted", "declared", "device_named", "print_json", "working"]


class DeviceError(BakeoffError, ValueError):
    """A device that this machine doesn't have."""


def console() -> Console:
    """Standard output: as wide as the terminal; into a file or pipe wide enough that tables don't fold.
    Brackets in what it prints are no markup, since paths may have them."""
    terminal = sys.stdout is not None and sys.stdout.isatty()  # None where it is closed
    plain = not terminal and "COLUMNS" not in os.environ
    return Console(width=160 if plain else None, markup=False)


def working(out: Console, text: str) -> Status:
    """A line that says what is being done: on `out` if that is a terminal, so that both share it, else on
    standard error."""
    return (out if out.is_terminal else Console(stderr=True)).status(text)


def counted(number: int, thing: str) -> str:
    """``1 contest``, ``2 contests``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def declared() -> dict[str, Op]:
    """Every op by name, sorted."""
    importlib.import_module("bakeoff.ops")
    return dict(sorted(registry.items()))


def device_named(name: str) -> str:
    """What --device says as tensors name it, "cpu" or "cuda:N"; "auto" is CUDA where there is one.

    Raises:
        DeviceError: no such device here.
    """
    if name == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"{name!r} is no device: use auto, cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise DeviceError(f"{name!r} is not supported: use auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"PyTorch {torch.__version__} sees no CUDA device here: use --device cpu, or see bakeoff doctor"
        )
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise DeviceError(
            f"there is no {name}; this machine has cuda:0 to cuda:{torch.cuda.device_count() - 1}"
        )
    return f"cuda:{index}"


def print_json(value: Any) -> None:
    """`value` as indented JSON on standard output."""
    click.echo(json.dumps(msgspec.to_builtins(value), indent=1))
