"""train: a recipe with settings from the command line."""

import math
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from bakeoff.apps.cli.terminal import console, print_plain
from bakeoff.apps.outlet import lasting
from bakeoff.apps.train import Config, Result, SettingError, recipe, resolve, to_toml, train

__all__ = ["configured", "print_result", "program", "run", "signal_status"]

DEFAULT = "llm-med-tiny"


def configured(
    words: Sequence[str],
    file: Path | None,
    *,
    data: str | None = None,
    out: Path | None = None,
    resume: str | None = None,
) -> Config:
    """The configuration that ``[RECIPE] [KEY=VALUE]...`` and the options ask for. Raises ConfigError:
    SettingError for wrong usage."""
    named = bool(words) and "=" not in words[0]
    overrides = list(words[1:] if named else words)
    for key, value in (("data.path", data), ("train.run_dir", out), ("train.resume", resume)):
        if value is not None:
            if any(word.partition("=")[0].strip() == key for word in overrides):
                option = {"data.path": "--data", "train.run_dir": "--out", "train.resume": "--resume"}[key]
                raise SettingError(f"{key} and {option} set the same: leave one of them out")
            overrides.append(f"{key}={value}")
    return resolve(recipe(words[0] if named else DEFAULT), file, overrides)


def run(
    words: Sequence[str],
    file: Path | None,
    data: str | None,
    out: Path | None,
    resume: str | None,
    print_config: bool,
) -> None:
    """Train, and print the outcome; or only print the configuration, as TOML that --config reads."""
    config = configured(words, file, data=data, out=out, resume=resume)
    if print_config:
        click.echo(to_toml(config), nl=False)
        return
    with lasting(console(), last=True) as printer:
        result = train(config, console=printer)
        if os.environ.get("RANK", "0") == "0":  # torchrun shows every rank's output, and all have this result
            print_result(result, printer)
            if result.checkpoint:
                where = shlex.quote(str(result.run_dir))
                print_plain(printer, f"text from it: {program()} generate {where}")
    if result.stopped in signal.Signals.__members__:
        raise click.exceptions.Exit(signal_status(result.stopped))


def signal_status(name: str) -> int:
    """The exit status of a command that the signal called `name` ended: 128 and its number, as in a shell."""
    return 128 + signal.Signals[name]


def program() -> str:
    """How to call this command in a shell: by name if PATH leads to the one that runs, else by its path."""
    script = Path(sys.argv[0])
    if script.parts[-2:] == ("bakeoff", "__main__.py"):
        return f"{_typed(Path(sys.executable))} -m bakeoff"
    return _typed(script) if script.name == "bakeoff" else "bakeoff"


def _typed(path: Path) -> str:
    on_path = shutil.which(path.name)
    if on_path and Path(on_path).absolute() == path.absolute():
        return path.name
    here = os.path.relpath(path)
    return shlex.quote(min(here if os.sep in here else f"./{here}", str(path.absolute()), key=len))


def print_result(result: Result, out: Console) -> None:
    """The outcome of a run in three lines; in two where a signal came before anything was measured."""
    before, after = result.bits_per_byte_before, result.bits_per_byte_after
    speed = f"{result.steps} steps in {result.seconds:.0f} s, {result.tokens_per_s:,.0f} bytes/s"
    measured = f"held-out bits per byte: {before:.3f} before, {after:.3f} after"
    lines = [
        f"{speed}, {result.skipped} steps skipped, ended by {result.stopped}",
        *([] if math.isnan(after) else [measured]),
        f"run: {result.run_dir}",
    ]
    for line in lines:
        print_plain(out, line)
