"""Options and arguments that several commands share, and the types of their values."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

__all__ = [
    "FILE",
    "Finite",
    "as_json",
    "budget",
    "config",
    "data",
    "device",
    "out",
    "recipe_words",
    "regime_choice",
]


class _File(click.Path):
    """A path; an empty one, as of an unset variable, is refused: it would mean the folder here."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty: give a path, . for the folder here, or leave it out.", param, ctx)
        return super().convert(value, param, ctx)


FILE = _File(path_type=Path)


class Finite(click.FloatRange):
    """A number in a range; nan and inf are refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs instead of text.")
config = click.option("--config", "file", type=FILE, help="A TOML file whose settings replace the recipe's.")
data = click.option("--data", help="File or folder to train on, as bytes (data.path).")
device = click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
recipe_words = click.argument("words", metavar="[RECIPE] [KEY=VALUE]...", nargs=-1)
regime_choice = click.option(
    "--regime",
    type=click.Choice(["eager", "graph", "compiled"]),
    default="eager",
    show_default=True,
    help="How the call is issued: eagerly, in a CUDA graph, or inside torch.compile.",
)


thorough = click.option(
    "--thorough",
    is_flag=True,
    help="Try every launch configuration that kernels declare, not the first few: minutes a contest.",
)


def budget(help_text: str, default: float | None = None) -> Decorator:
    """--budget: a positive number of seconds."""
    positive = Finite(0, min_open=True)
    return click.option(
        "--budget", type=positive, default=default, show_default=default is not None, help=help_text
    )


def out(help_text: str) -> Decorator:
    """--out: the file or folder to write."""
    return click.option("--out", type=FILE, help=help_text)
