"""compare: which of two recipes with equal parameters is better."""

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bakeoff.apps.cli.terminal import console, counted, print_plain, working
from bakeoff.apps.compare import CompareError, compare, pair, table
from bakeoff.apps.compare.document import path_of
from bakeoff.apps.train import RECIPES
from bakeoff.device import current_device

__all__ = ["at_size", "run"]

FIRST, SECOND = "byte-spectral", "llm-med"
LENGTHS = "256,1024,4096"
CPU_MINUTES, GPU_MINUTES = 1.0, 3.0


def run(
    words: Sequence[str],
    data: str | None,
    minutes: float | None,
    steps: int | None,
    seeds: int,
    lengths: str | None,
    size: str | None,
    device: str,
    out: Path | None,
    resume: bool,
    models: Sequence[str] = (),
    **planned: Any,
) -> None:
    """Compare two recipes, or the models of a plan, and print the result and where it is."""
    if models:
        from bakeoff.apps.cli.planning import run as run_plan

        if names := [word for word in words if "=" not in word]:
            raise click.UsageError(f"--model names the models of a plan: leave {' '.join(names)} out")
        if lengths is not None:
            raise click.UsageError(
                "a plan trains with --rows and measures no other lengths: leave --lengths out"
            )
        if resume:
            raise click.UsageError("a plan always goes on with --out: leave --resume out")
        run_plan(models, words, data, minutes, steps, seeds, size, device, out, **planned)
        return
    _refuse_plans(planned)
    if minutes is not None and steps is not None:
        raise click.UsageError("--minutes and --steps are two limits: give one of them")
    if resume and out is None:
        raise click.UsageError("--resume goes on with the comparison in --out: give that folder")
    device = str(current_device(device))
    cuda = device.startswith("cuda")
    if minutes is None and steps is None:
        minutes = GPU_MINUTES if cuda else CPU_MINUTES
    first, second = _names(words, size or ("small" if cuda else "tiny"))
    overrides = [word for word in words if "=" in word]
    both = pair(first, second, overrides, data=data, device=device, minutes=minutes, steps=steps)
    out = out or Path("runs", f"compare-{time.strftime('%Y%m%d-%H%M%S')}")
    printer = console()
    limit = f"{minutes:g} minute{'' if minutes == 1 else 's'}" if minutes is not None else f"{steps} steps"
    print_plain(
        printer,
        f"{first} against {second} on {device}: {counted(seeds, 'seed')} each, {limit} a run, to {out}",
    )
    with working(printer, "measuring the device's limits") as status:
        document = compare(
            *both,
            out,
            seeds=seeds,
            lengths=_lengths(LENGTHS if lengths is None else lengths),
            resume=resume,
            say=functools.partial(print_plain, printer),
            announce=status.update,
        )
    printer.print()
    printer.print(table(document))
    print_plain(printer, f"results: {path_of(out)}")


def _refuse_plans(planned: dict[str, Any]) -> None:
    """Raises for an option that only a plan has."""
    given = [name for name, value in planned.items() if value is not None and name != "task_steps"]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"{options}: of a plan, whose models --model names, once for each")


def _names(words: Sequence[str], size: str) -> tuple[str, str]:
    """The recipes that the words without '=' name, or the default ones; in this size if they have it."""
    names = [word for word in words if "=" not in word]
    if len(names) > 2:
        raise click.UsageError(f"two recipes are compared, got {', '.join(names)}")
    first, second = [*names, *(FIRST, SECOND)[len(names) :]]
    return at_size(first, size), at_size(second, size)


def at_size(name: str, size: str) -> str:
    """The recipe's name in this size, if it has it."""
    tiny = f"{name}-tiny"
    return tiny if size == "tiny" and tiny in RECIPES else name


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise CompareError(f"--lengths {text!r}: give whole numbers, such as 256,1024,4096") from None
