"""demo, train, tune, generate, export."""

from typing import Any

import click

from bakeoff.apps.cli.commands import options
from bakeoff.apps.cli.commands.group import Command, WithSettings
from bakeoff.apps.cli.commands.options import FILE, Finite

__all__ = ["demo", "export", "generate", "train", "tune"]


@click.command(cls=Command)
@click.option(
    "--seconds",
    type=Finite(1),
    help="Training time of each model. [default: 45 on the CPU, up to 60 on a GPU]",
)
@options.data
@options.out("Folder of the runs. [default: runs/demo-DATE-TIME]")
@click.option("--quick", is_flag=True, help="A few seconds of everything, to see that it works.")
@options.device
def demo(**values: Any) -> None:
    """Look at the machine, tune, train two models on real text, and compare them.

    Some minutes in all. Trains LLM-Med and byte-spectral, with equal parameters and for equal time: tiny ones
    on the CPU, where seconds are those of a processor, so that a busy machine trains as much; small ones on a
    GPU. Without --data the text is the Python standard library's sources on this
    machine.

    Examples:
      bakeoff demo
      bakeoff demo --data book.txt --seconds 300 --out runs/book
    """
    from bakeoff.apps.cli.demo import run

    run(**values)


@click.command(cls=WithSettings)
@options.recipe_words
@options.config
@options.data
@options.out("Folder of the run (train.run_dir). [default: runs/RECIPE-DATE-TIME]")
@click.option(
    "--resume", help="auto: go on with the run in --out; never; or a run to start from (train.resume)."
)
@click.option("--print-config", is_flag=True, help="Print the resolved configuration as TOML and stop.")
def train(**values: Any) -> None:
    """Train a recipe on bytes.

    RECIPE is llm-med-tiny (the default; a minute on 4 CPU cores), llm-med, llm-med-base, llm-med-published,
    byte-spectral-tiny, byte-spectral, titan-mac-tiny, titan-mac, longnet-tiny or longnet.
    Settings come from the recipe, then the --config file, then KEY=VALUE arguments; the last one counts.
    Ctrl-C finishes the step, saves and measures; the same command with --out goes on from there. SIGTERM and
    SIGHUP do the same. The exit status is 0 where the run came to its end, 128 and the signal's number where
    a signal ended it (130 for Ctrl-C, 143 for SIGTERM), 1 after an error, 2 for wrong options or settings.

    Examples:
      bakeoff train llm-med-tiny
      bakeoff train llm-med --data corpus/ --out runs/a train.steps=5000 optim.lr=6e-4
      bakeoff train llm-med select.rms_norm=eager model.kv_heads=2
      bakeoff train llm-med --print-config > mine.toml
    """
    from bakeoff.apps.cli.training import run

    run(**values)


@click.command(cls=WithSettings)
@options.recipe_words
@options.config
@options.data
@options.budget("Seconds for all contests. [default: 60; with --thorough an hour]")
@click.option("--peers", is_flag=True, help="Let installed third-party candidates compete; takes longer.")
@click.option("--force", is_flag=True, help="Measure again what the table has already.")
@options.thorough
@click.option(
    "--missed", is_flag=True, help="In place of a recipe's step: settle what earlier runs had no verdict for."
)
def tune(**values: Any) -> None:
    """Hold the contests of one real step of a recipe.

    Prints the selection: every candidate's time, share of the machine's limit, error, and why it runs or
    doesn't. The verdicts go to this machine's table; every later run at these shapes uses them. Calls for
    which the budget left no time are listed; they run what the op's heuristic says.

    Examples:
      bakeoff tune llm-med
      bakeoff tune llm-med train.batch_size=64 --budget 120 --force
      bakeoff tune llm-med --peers --budget 600
      bakeoff tune llm-med --thorough
      bakeoff tune --missed --budget 300
    """
    from bakeoff.apps.cli.tuning import run

    run(**values)


@click.command(cls=Command)
@click.argument("run", type=FILE)
@click.option("--prompt", default="def ", show_default=True, help="Text to go on from; -: standard input.")
@click.option("--max-new", type=click.IntRange(1), default=400, show_default=True, help="Bytes to write.")
@click.option(
    "--temperature", type=Finite(0), default=0.8, show_default=True, help="0: always the likeliest byte."
)
@click.option("--top-k", type=click.IntRange(0), default=0, help="Only the k likeliest bytes; 0: all.")
@click.option(
    "--top-p",
    type=Finite(0, 1, min_open=True),
    default=1.0,
    help="Only the likeliest bytes whose probabilities add up to this.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)
@options.device
def generate(**values: Any) -> None:
    """Text from a trained run.

    RUN is the folder that bakeoff train printed, or one of its checkpoints. Bytes are printed as they come.

    Examples:
      bakeoff generate runs/llm-med-tiny-20260101-120000 --prompt 'class ' --max-new 1000
      bakeoff generate runs/a --temperature 0
      head -c 500 setup.py | bakeoff generate runs/a --prompt -
    """
    from bakeoff.apps.cli.generating import stream

    stream(**values)


@click.command(cls=Command)
@click.argument("run", type=FILE)
@options.out("Folder to write, new or empty. [default: RUN-exported, here]")
def export(**values: Any) -> None:
    """A trained run for programs without bakeoff.

    RUN is the folder that bakeoff train printed, or one of its checkpoints. Writes its weights as
    safetensors, its configuration, and its model as a self-contained program of torch.export, which is
    checked to give the model's logits.

    Examples:
      bakeoff export runs/a --out a
      python -c 'import torch; program = torch.export.load("a/program.pt2").module()'
    """
    from bakeoff.apps.cli.exporting import run

    run(**values)
