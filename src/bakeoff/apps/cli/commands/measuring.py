"""bench, compare."""

from typing import Any

import click

from bakeoff.apps.cli.commands import options
from bakeoff.apps.cli.commands.group import Command
from bakeoff.apps.cli.commands.options import Finite

__all__ = ["bench", "compare"]


@click.command(cls=Command)
@click.argument("names", metavar="[OP]...", nargs=-1)
@click.option(
    "--suite",
    type=click.Choice(
        [
            "ops",
            "selection",
            "step",
            "decode",
            "launch",
            "recall",
            "text",
            "nested",
            "swap",
            "ranks",
            "context",
        ]
    ),
    default="ops",
    show_default=True,
    help="ops: all candidates and peers. selection: time lost by the choices, overhead of choosing, time to "
    "tune. step: a whole training step, eager, captured, compiled, and both. decode: bytes a second of every "
    "model's generate. launch: the host's and the device's time of every candidate at lengths from 256 to "
    "16384. recall: models with neural memories, without and with gated DeltaNet, trained to recall pairs "
    "that are out of attention's reach. text: the same models' held-out bits per byte. nested: training with "
    "learned multipliers of the learning rate and without. swap: a Hugging Face Llama's step, plain, "
    "compiled, patched by Liger, and swapped. ranks: training on one GPU, or on several that "
    "torchrun started. context: dilated attention over those.",
)
@click.option(
    "--regimes", help="Comma-separated: eager,graph,compiled. [default: all the device has but compiled]"
)
@click.option(
    "--direction",
    type=click.Choice(["forward", "both"]),
    help="Only calls alone (forward), or only calls with their backward (both). [default: each of the two]",
)
@options.device
@options.out("Results file. [default: results/GPU/SUITE.json]")
@click.option(
    "--filter",
    "text",
    default="",
    help="Only cases whose name or shapes (in --suite decode, recall and text: models whose name; in step: "
    "and ranks: model and mode; in swap: modes; in context: setting and method) contain this text, or one of "
    "several: 'A|B'.",
)
@options.budget(
    "Seconds measured per contest; verification comes on top. [default: 2; in --suite step 60, for all "
    "contests of a mode; in ranks 30, of a run]"
)
@click.option(
    "--resume", is_flag=True, help="Leave out what the results file holds, measured with today's sources."
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Contests whose candidates compile at the same time, in a process each; they are still measured "
    "one by one. Saves much time where there are many cores; each takes memory.",
)
@options.data
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Runs of each model in --suite recall and text.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    help="Training steps of a run in --suite recall and text. [default: by the device]",
)
@options.thorough
@click.option(
    "--variants", is_flag=True, help="Keep and print the time of every launch configuration that was tried."
)
def bench(**values: Any) -> None:
    """Measure ops over their grids, with installed peers, or whole training steps.

    All ops without OP; every candidate is verified, and measured in one run with the others.
    Every case is measured forward alone and with its backward, in each regime, and is written to the results
    file at once, so a run may be stopped and continued with --resume. On the CPU the cases have fewer rows.
    Rows of other cases in the file stay.

    Examples:
      bakeoff bench
      bakeoff bench rms_norm --filter 8192x4096 --budget 5
      bakeoff bench --suite selection --out results/h200/selection.json
      bakeoff bench --suite step --filter 'base reduce|base captured'
      bakeoff bench --suite decode --filter LLMMed
      bakeoff bench --suite launch rotary
      bakeoff bench --suite recall --filter lmm --steps 4000
      bakeoff bench --suite text --data enwik8 --seeds 3
      bakeoff bench --suite nested
      bakeoff bench --suite swap
      torchrun --nproc-per-node 2 -m bakeoff bench --suite context
      bakeoff bench --jobs 8
      bakeoff bench rms_norm --regimes graph --direction both
      bakeoff bench swiglu --thorough --variants
    """
    from bakeoff.apps.cli.benching import run

    run(**values)


@click.command(cls=Command)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="'RECIPE [KEY=VALUE]...'",
    help="A model of a plan, instead of FIRST and SECOND; repeat it. KEY is one of [model], or SECTION.KEY.",
)
@click.option("--lr", metavar="RATES", help="Plan: learning rates to choose among, such as 5e-4,1e-3,2e-3.")
@click.option(
    "--rows",
    metavar="LENGTHS",
    help="Plan: bytes a row to train with, such as 1024,8192. [default: the recipe's]",
)
@click.option("--flops", type=Finite(0, min_open=True), help="Plan: operations of every run, such as 1e16.")
@click.option(
    "--tasks", metavar="TASKS", help="Plan: beside text, train on recall, copy or both (recall,copy)."
)
@click.option(
    "--task-steps", type=click.IntRange(1), default=500, show_default=True, help="Plan: steps of each task."
)
@click.option(
    "--stop-after", type=Finite(0), metavar="MINUTES", help="Plan: start no run that would end later."
)
@click.argument("words", metavar="[FIRST] [SECOND] [KEY=VALUE]...", nargs=-1)
@options.data
@click.option(
    "--minutes",
    type=Finite(0, min_open=True),
    help="Wall time of every run. [default: 1 on the CPU, 3 on a GPU]",
)
@click.option("--steps", type=click.IntRange(1), help="Steps of every run, instead of --minutes.")
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Runs of each model; a winner needs 2 or more (3 are advised).",
)
@click.option(
    "--lengths",
    help="Context lengths in bytes at which speed is measured. [default: 256,1024,4096]",
)
@click.option(
    "--size",
    type=click.Choice(["tiny", "small"]),
    help="tiny takes each recipe's -tiny form, where it has one. [default: tiny on the CPU, small on a GPU]",
)
@options.device
@options.out("Folder of the comparison. [default: runs/compare-DATE-TIME]")
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with --out: what it holds is not done again; more seeds or lengths are added.",
)
def compare(**values: Any) -> None:
    """Train two recipes alike and say which is better.

    FIRST and SECOND are recipes, byte-spectral and llm-med by default. SECOND keeps its shape; FIRST gets the
    d_ff that makes their parameters equal. Both train on the same bytes in the same order, for equal time or
    equal steps, the two models in turns for each seed; then training and inference are timed at each of
    --lengths. Settings are those of SECOND's recipe. KEY=VALUE goes to both, first.KEY=VALUE and
    second.KEY=VALUE to one.

    At least 1 MiB of held-out bytes is scored (or all there are), of whole files, chosen by a hash of their
    path, where the data are a folder; train.eval_rows=N scores N rows instead. A winner is named only where
    held-out bits per byte differ by more than seed noise. Each result is written
    to OUT/compare.json at once, so Ctrl-C loses only the unfinished run; --resume goes on from there.

    With --model, any number of models are compared by a plan: each learning rate of --lr with one seed, then
    the best, by bytes put aside for validation, with the others; for each of --rows, and for each budget of
    --steps, --minutes and --flops that is given. The first model keeps its shape and the others get its
    number of parameters. Every finished run is a line of OUT/runs.jsonl, and the same command goes on where
    it stopped; gzip and xz stand beside the models.

    Examples:
      bakeoff compare
      bakeoff compare byte-spectral llm-med --data corpus/ --minutes 10 --seeds 5 --out runs/compared
      bakeoff compare first.model.attention_every=2 --steps 500 --lengths 512,2048
      bakeoff compare llm-med llm-med first.optim.lr=6e-4
      bakeoff compare --model llm-med --model 'byte-spectral attention_every=3' --lr 5e-4,1e-3,2e-3
                      --rows 1024,8192 --minutes 5 --flops 1e16 --out runs/plan --stop-after 25
    """
    from bakeoff.apps.cli.comparing import run

    run(**values)
