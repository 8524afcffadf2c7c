"""tune: the contests of one step of a recipe."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from bakeoff.apps.cli.terminal import console, counted, working
from bakeoff.apps.cli.training import configured
from bakeoff.apps.render import explained, selection_table
from bakeoff.apps.train import Config
from bakeoff.apps.train.data import Batches, ByteCorpus, split
from bakeoff.apps.train.step import Stepper
from bakeoff.device import current_device
from bakeoff.models import build
from bakeoff.select import TuneReport, tune, tune_missed, using

__all__ = ["print_unsettled", "rehearsed", "run"]

_BUDGET_S, _THOROUGH_S = 60.0, 3600.0


def run(
    words: Sequence[str],
    file: Path | None,
    data: str | None,
    budget: float | None,
    peers: bool,
    force: bool,
    thorough: bool,
    missed: bool = False,
) -> None:
    """Hold the contests of one real step of the configured recipe, or those for what calls have missed, and
    print what was decided."""
    if missed and (words or file or data):
        raise click.UsageError(
            "--missed takes no step of a recipe: leave out the recipe, KEY=VALUE, --config and --data",
            click.get_current_context(),
        )
    out = console()
    budget_s = (_THOROUGH_S if thorough else _BUDGET_S) if budget is None else budget
    with working(out, "preparing") as status:
        options: Any = {"peers": peers, "force": force, "thorough": thorough, "announce": status.update}
        if missed:
            report, device = tune_missed(budget_s, **options), "cuda" if torch.cuda.is_available() else "cpu"
        else:
            report, device = rehearsed(configured(words, file, data=data), budget_s, **options)
    if missed and not report.verdicts and not report.unsettled:
        out.print(
            "nothing was missed: every call so far found its verdict, or none was made", highlight=False
        )
        return
    source = "measured now" if report.measured else "table"
    out.print(selection_table(explained(verdict, device, source) for verdict in report.verdicts))
    print_unsettled(report, out)
    held, known = counted(report.measured, "contest"), counted(len(report.verdicts), "verdict")
    out.print(f"{held} held, {known} in force, {report.seconds:.1f} s", highlight=False)


def print_unsettled(report: TuneReport, out: Console) -> None:
    """The calls for which no contest was held, and why."""
    for key, reason in report.unsettled.items():
        text = f"no contest for {key}: {reason}"
        out.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)


def rehearsed(
    config: Config,
    budget_s: float,
    *,
    announce: Callable[[str], None],
    peers: bool = False,
    force: bool = False,
    thorough: bool = False,
) -> tuple[TuneReport, str]:
    """Tune for one step of `config` on its device; the step changes no parameter.

    Returns (report, device).
    """
    device = current_device(config.train.device)
    corpus = ByteCorpus.open(config.data.path)
    training, _ = split(corpus, config.data.holdout, config.seq_len)
    batches = Batches(
        corpus, training, seq_len=config.seq_len, batch_size=config.train.batch_size, seed=config.train.seed
    )
    rows = batches.batch(0).to(device)
    with using(config.select.policy or None, **config.select.forced()):
        model = build(config.model).to(device).train()
        stepper = Stepper(model, config, device)
        report = tune(
            lambda: stepper.rehearse(rows),
            budget_s,
            peers=peers,
            force=force,
            thorough=thorough,
            announce=announce,
        )
        return report, str(device)
