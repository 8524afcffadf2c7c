"""train and tune: recipes from the command line."""

import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import torch
from rich.console import Console

from bakeoff.apps.cli.terminal import console, counted, device_named, working
from bakeoff.apps.outlet import lasting
from bakeoff.apps.render import explained, selection_table
from bakeoff.apps.train import Config, Result, recipe, resolve, to_toml, train
from bakeoff.apps.train.data import Batches, ByteCorpus, split
from bakeoff.apps.train.step import Stepper
from bakeoff.models import build
from bakeoff.select import TuneReport, using
from bakeoff.select import tune as tune_step

__all__ = ["configured", "print_config", "print_result", "program", "run", "tune_recipe"]

DEFAULT = "llm-med-tiny"


def configured(
    words: Sequence[str],
    file: Path | None,
    *,
    data: str | None = None,
    out: Path | None = None,
    resume: str | None = None,
) -> Config:
    """The configuration that ``[RECIPE] [KEY=VALUE]...`` and the options ask for. Raises ConfigError."""
    named = bool(words) and "=" not in words[0]
    overrides = list(words[1:] if named else words)
    for key, value in (("data.path", data), ("train.run_dir", out), ("train.resume", resume)):
        if value is not None:
            overrides.append(f"{key}={value}")
    return resolve(recipe(words[0] if named else DEFAULT), file, overrides)


def print_config(config: Config) -> None:
    """The configuration as TOML that --config reads."""
    click.echo(to_toml(config), nl=False)


def run(config: Config) -> None:
    """Train, and say what came of it."""
    with lasting(console(), last=True) as out:
        result = train(config, console=out)
        if os.environ.get("RANK", "0") != "0":
            return  # torchrun shows every rank's output; one says it all
        print_result(result, out)
        if result.checkpoint:
            text = f"text from it: {program()} generate {shlex.quote(str(result.run_dir))}"
            out.print(text, highlight=False, soft_wrap=True)


def program() -> str:
    """What a shell runs this command by: its name where PATH finds the one that runs, else its path."""
    ran = Path(sys.argv[0])
    if ran.parts[-2:] == ("bakeoff", "__main__.py"):
        return f"{_typed(Path(sys.executable))} -m bakeoff"
    return _typed(ran) if ran.name == "bakeoff" else "bakeoff"


def _typed(path: Path) -> str:
    found = shutil.which(path.name)
    if found and Path(found).absolute() == path.absolute():
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
        out.print(line, highlight=False, markup=False, soft_wrap=True)


def tune_recipe(config: Config, budget: float, *, peers: bool, force: bool) -> None:
    """Hold the contests of one real step of `config` and print what was decided."""
    out = console()
    with working(out, "preparing one step") as status:
        report, device = rehearsed(config, budget, peers=peers, force=force, announce=status.update)
    out.print(
        selection_table(
            explained(v, device, "measured now" if report.measured else "table") for v in report.verdicts
        )
    )
    print_unsettled(report, out)
    held, known = counted(report.measured, "contest"), counted(len(report.verdicts), "verdict")
    out.print(f"{held} held, {known} in force, {report.seconds:.1f} s", highlight=False)


def print_unsettled(report: TuneReport, out: Console) -> None:
    """The calls that no contest settled, and why."""
    for key, reason in report.unsettled.items():
        out.print(
            f"not settled: {key}: {reason}", style="yellow", highlight=False, markup=False, soft_wrap=True
        )


def rehearsed(
    config: Config,
    budget_s: float,
    *,
    announce: Callable[[str], None],
    peers: bool = False,
    force: bool = False,
) -> tuple[TuneReport, str]:
    """Tune for one step of `config` (which changes nothing) on its device: (report, device)."""
    device = device_named(config.train.device)
    corpus = ByteCorpus.open(config.data.path)
    training, _ = split(corpus, config.data.holdout, config.seq_len)
    batches = Batches(
        corpus, training, seq_len=config.seq_len, batch_size=config.train.batch_size, seed=config.train.seed
    )
    rows = batches.batch(0).to(device)
    with using(config.select.policy or None, **config.select.ops):
        model = build(config.model).to(device).train()
        stepper = Stepper(model, config, torch.device(device))
        report = tune_step(
            lambda: stepper.rehearse(rows), budget_s, peers=peers, force=force, announce=announce
        )
        return report, device
