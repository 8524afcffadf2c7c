"""What the commands share: the console, JSON, the ops."""

import importlib
import json
import os
import sys
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.status import Status

from bakeoff.select import Op, registry

__all__ = ["console", "counted", "declared", "print_json", "print_plain", "working"]


def console() -> Console:
    """Standard output: as wide as the terminal; where it is a file or pipe, wide enough that no table wraps.
    Brackets are printed as they are, not read as rich's markup, since paths may contain them."""
    terminal = sys.stdout is not None and sys.stdout.isatty()  # None where it is closed
    plain = not terminal and "COLUMNS" not in os.environ
    return Console(width=160 if plain else None, markup=False)


def working(out: Console, text: str) -> Status:
    """A line that says what is being done: on `out` if that is a terminal, where rich keeps it below
    the other output; else on standard error."""
    return (out if out.is_terminal else Console(stderr=True)).status(text)


def print_plain(out: Console, text: str) -> None:
    """Print a line as it is: no colours, no markup, no line breaks added."""
    out.print(text, highlight=False, markup=False, soft_wrap=True)


def counted(number: int, thing: str) -> str:
    """``1 contest``, ``2 contests``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def declared() -> dict[str, Op]:
    """Every op by name, sorted."""
    importlib.import_module("bakeoff.ops")
    return dict(sorted(registry.items()))


def print_json(value: Any) -> None:
    """`value` as indented JSON on standard output."""
    click.echo(json.dumps(msgspec.to_builtins(value), indent=1))
