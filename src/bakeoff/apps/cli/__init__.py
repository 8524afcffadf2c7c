"""The ``bakeoff`` command. Only click is imported here; each command imports its body when it runs.

Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted. ``bakeoff train`` takes a signal as the
wish to save and end, and then is done: 0.
"""

import errno
import inspect
import logging
import math
import os
import re
from pathlib import Path
from typing import Any

import click

from bakeoff import __version__

__all__ = ["main"]

# Before torch starts its threads: waiting by spinning makes them many times slower on a machine that is busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

DEVICE = click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs instead of text.")
CONFIG = click.option("--config", type=click.Path(path_type=Path), help="A TOML file laid over the recipe.")
DATA = click.option("--data", help="File or folder to train on, as bytes (data.path).")
FILE = click.Path(path_type=Path)


class Finite(click.FloatRange):
    """A number in a range, which neither nan nor inf is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Explained(click.Command):
    """A command whose help keeps the lines of its examples."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.help:  # \b tells click not to fill the paragraph that follows
            self.help = re.sub(r"\n(Examples|Start here):", "\n\b\n\\1:", inspect.cleandoc(self.help))


class Commands(Explained, click.Group):
    """A group whose expected errors are one line that names the fix, and that survives Ctrl-C politely."""

    command_class = Explained
    group_class = type

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo("\nInterrupted. Tables, checkpoints and results written so far are whole.", err=True)
            ctx.exit(130)
        except Exception as error:
            if ctx.find_root().params.get("debug") or not _expected(error):
                raise
            text = " ".join(str(error).split()) or type(error).__name__
            raise click.ClickException(text) from error


def _expected(error: Exception) -> bool:
    from bakeoff.errors import BakeoffError

    if isinstance(error, OSError):
        return error.errno != errno.EPIPE  # the reader of our output has gone: click ends quietly
    return (
        isinstance(error, BakeoffError | ValueError | MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
    )


class _LateHandler(logging.Handler):
    """Logs to stderr through rich, imported with the first message."""

    def emit(self, record: logging.LogRecord) -> None:
        from rich.console import Console
        from rich.logging import RichHandler

        from bakeoff.apps.outlet import Outlet

        console = Console(stderr=True)
        console.file = Outlet(console.file)  # type: ignore[assignment]
        late = RichHandler(console=console, show_time=False, show_path=False)
        logging.getLogger("bakeoff").handlers = [late]
        late.emit(record)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("-v", "--verbose", count=True, help="Log more: -v what is chosen and why, -vv everything.")
@click.option("-q", "--quiet", is_flag=True, help="Log errors only.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(__version__)
def main(verbose: int, quiet: bool, debug: bool) -> None:
    """The fastest correct implementation of every op of a PyTorch model, on this machine, at your shapes.

    Start here:
      bakeoff doctor              what this machine is and can do
      bakeoff demo                the whole way in some minutes, on real text
      bakeoff tune llm-med        hold the contests that a model's step needs
      bakeoff explain             what was decided, and why
    """
    log = logging.getLogger("bakeoff")
    log.handlers = [_LateHandler()]
    log.setLevel(logging.ERROR if quiet else (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])


@main.command("demo")
@click.option(
    "--seconds", type=Finite(1), help="Training time of each. [default: 45 on the CPU, up to 60 on a GPU]"
)
@DATA
@click.option("--out", type=FILE, help="Folder of the runs. [default: runs/demo-DATE-TIME]")
@click.option("--quick", is_flag=True, help="A few seconds of everything, to see that it works.")
@DEVICE
def demo_command(seconds: float | None, data: str | None, out: Path | None, quick: bool, device: str) -> None:
    """Look at the machine, tune, train two models on real text, and compare them.

    Some minutes in all. Trains LLM-Med and byte-spectral, of equal parameters and for equal time: tiny ones
    on the CPU, small ones on a GPU. Without --data the text is the Python standard library's sources on this
    machine.

    Examples:
      bakeoff demo
      bakeoff demo --data book.txt --seconds 300 --out runs/book
    """
    from bakeoff.apps.cli.demo import run

    run(seconds, data, out, quick, device)


@main.command()
@click.argument("words", metavar="[RECIPE] [KEY=VALUE]...", nargs=-1)
@CONFIG
@DATA
@click.option("--out", type=FILE, help="Folder of the run (train.run_dir). [default: runs/RECIPE-DATE-TIME]")
@click.option("--resume", help="auto: go on with --out; never; or a run to start from (train.resume).")
@click.option("--print-config", is_flag=True, help="Print the resolved configuration as TOML and stop.")
def train(
    words: tuple[str, ...],
    config: Path | None,
    data: str | None,
    out: Path | None,
    resume: str | None,
    print_config: bool,
) -> None:
    """Train a recipe on bytes.

    RECIPE is llm-med-tiny (the default; a minute on 4 CPU cores), llm-med, llm-med-base, byte-spectral-tiny
    or byte-spectral.
    The recipe's settings, then the --config file's, then KEY=VALUE arguments hold. Ctrl-C finishes the step,
    saves and measures; the same command with --out goes on from there.

    Examples:
      bakeoff train llm-med-tiny
      bakeoff train llm-med --data corpus/ --out runs/a train.steps=5000 optim.lr=6e-4
      bakeoff train llm-med select.rms_norm=eager model.kv_heads=2
      bakeoff train llm-med --print-config > mine.toml
    """
    from bakeoff.apps.cli import training

    chosen = training.configured(words, config, data=data, out=out, resume=resume)
    if print_config:
        training.print_config(chosen)
    else:
        training.run(chosen)


@main.command()
@click.argument("words", metavar="[RECIPE] [KEY=VALUE]...", nargs=-1)
@CONFIG
@DATA
@click.option("--budget", type=Finite(0, min_open=True), default=60.0, show_default=True,
              help="Seconds for all contests.")  # fmt: skip
@click.option("--peers", is_flag=True, help="Let installed third-party candidates compete; takes longer.")
@click.option("--force", is_flag=True, help="Measure again what the table knows already.")
def tune(
    words: tuple[str, ...], config: Path | None, data: str | None, budget: float, peers: bool, force: bool
) -> None:
    """Hold the contests of one real step of a recipe.

    Prints the selection: every candidate's time, share of the machine's limit, error, and why it runs or
    doesn't. The verdicts go to this machine's table; every later run at these shapes uses them. Calls that
    the budget leaves unsettled keep the op's heuristic and are listed.

    Examples:
      bakeoff tune llm-med
      bakeoff tune llm-med train.batch_size=64 --budget 120 --force
      bakeoff tune llm-med --peers --budget 600
    """
    from bakeoff.apps.cli import training

    training.tune_recipe(training.configured(words, config, data=data), budget, peers=peers, force=force)


@main.command()
@click.argument("ops", metavar="[OP]...", nargs=-1)
@click.option("--suite", type=click.Choice(["ops", "selection", "step"]), default="ops", show_default=True,
              help="ops: all candidates and peers. selection: regret, overhead, time to tune. "
                   "step: a whole training step, eager, captured, compiled, and both.")  # fmt: skip
@click.option(
    "--regimes", help="Comma-separated: eager,graph,compiled. [default: all the device has but compiled]"
)
@DEVICE
@click.option("--out", type=FILE, help="Results file. [default: results/GPU/SUITE.json]")
@click.option("--filter", "text", default="", help="Only cases whose name or shapes contain this text.")
@click.option("--budget", type=Finite(0, min_open=True),
              help="Seconds measured per contest; verification comes on top. [default: 2; in --suite step "
                   "60, for all contests of a mode]")  # fmt: skip
@click.option("--resume", is_flag=True, help="Leave out what the results file holds with today's sources.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True,
              help="Contests whose candidates compile side by side, in a process each, before they are "
                   "measured one by one: many cores are done much sooner. Each takes memory.")  # fmt: skip
def bench(
    ops: tuple[str, ...],
    suite: str,
    regimes: str | None,
    device: str,
    out: Path | None,
    text: str,
    budget: float | None,
    resume: bool,
    jobs: int,
) -> None:
    """Measure ops over their grids, with installed peers, or whole training steps.

    All ops without OP; every candidate is verified, and measured in one run with the others.
    Every case is measured forward alone and with its backward, in each regime, and is written to the results
    file at once, so a run may be stopped and taken up with --resume. On the CPU the grid's rows are cut
    short. Rows of other cases in the file stay.

    Examples:
      bakeoff bench
      bakeoff bench rms_norm --filter 8192x4096 --budget 5
      bakeoff bench --suite selection --out results/h100/selection.json
      bakeoff bench --suite step --resume
      bakeoff bench --jobs 8
    """
    from bakeoff.apps.cli import benching

    benching.run(ops, suite, regimes, device, out, text, budget, resume, jobs)


@main.command("compare")
@click.argument("words", metavar="[FIRST] [SECOND] [KEY=VALUE]...", nargs=-1)
@DATA
@click.option("--minutes", type=Finite(0, min_open=True),
              help="Wall time of every run. [default: 1 on the CPU, 3 on a GPU]")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), help="Steps of every run, instead of --minutes.")
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True,
              help="Runs of each model; a winner needs 2 or more (3 are advised).")  # fmt: skip
@click.option("--lengths", default="256,1024,4096", show_default=True,
              help="Bytes a row at which speed is measured.")  # fmt: skip
@click.option("--size", type=click.Choice(["tiny", "small"]),
              help="tiny takes each recipe's -tiny form, where it has one. [default: tiny on the CPU, small "
                   "on a GPU]")  # fmt: skip
@DEVICE
@click.option("--out", type=FILE, help="Folder of the comparison. [default: runs/compare-DATE-TIME]")
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with --out: what it holds is not done again; more seeds or lengths are added.",
)
def compare_command(
    words: tuple[str, ...],
    data: str | None,
    minutes: float | None,
    steps: int | None,
    seeds: int,
    lengths: str,
    size: str | None,
    device: str,
    out: Path | None,
    resume: bool,
) -> None:
    """Train two recipes alike and say which is better.

    FIRST and SECOND are recipes, byte-spectral and llm-med by default. SECOND keeps its shape; FIRST gets the
    d_ff that makes their parameters equal. Both train on the same bytes in the same order, for equal time or
    equal steps, over several seeds in turns; then training and inference are timed at each of --lengths.
    Settings are SECOND's recipe's. KEY=VALUE goes to both, first.KEY=VALUE and second.KEY=VALUE to one.

    A winner is named only where held-out bits per byte differ by more than seed noise. Everything is in
    OUT/compare.json at once, so Ctrl-C loses only the part in hand; --resume goes on from there.

    Examples:
      bakeoff compare
      bakeoff compare byte-spectral llm-med --data corpus/ --minutes 10 --seeds 5 --out runs/compared
      bakeoff compare first.model.attention_every=2 --steps 500 --lengths 512,2048
      bakeoff compare llm-med llm-med first.optim.lr=6e-4
    """
    from bakeoff.apps.cli import comparing

    comparing.run(
        words,
        data=data,
        minutes=minutes,
        steps=steps,
        seeds=seeds,
        lengths=lengths,
        size=size,
        device=device,
        out=out,
        resume=resume,
    )


@main.command()
@click.argument("words", metavar="[OP ARGUMENT=SHAPE...]", nargs=-1)
@DEVICE
@click.option(
    "--grad", is_flag=True, help="The gradient of every floating tensor is wanted (as a ' behind each)."
)
@click.option(
    "--regime", type=click.Choice(["eager", "graph", "compiled"]), default="eager", show_default=True
)
@click.option("--policy", help="Decide under this policy instead of BAKEOFF_POLICY's or the table's.")
@click.option("--tune", "hold", is_flag=True, help="Hold the contest now if no table has it.")
@JSON
def explain(
    words: tuple[str, ...],
    device: str,
    grad: bool,
    regime: str,
    policy: str | None,
    hold: bool,
    as_json: bool,
) -> None:
    """What a call would run, and why.

    Without OP: all verdicts of this machine's table.
    A tensor is written as dtype[shape], with a ' behind it where its gradient is wanted and :strided or
    :other for its layout; flags as they are in Python. A whole key, as tables print it, works too. Mind your
    shell: quote.

    Examples:
      bakeoff explain
      bakeoff explain rms_norm 'x=bf16[8192,4096]' 'weight=bf16[4096]' --grad
      bakeoff explain rms_norm "x=bf16[8192,4096]'" 'weight=bf16[4096]' --regime graph
    """
    from bakeoff.apps.cli import explaining

    explaining.run(words, device, grad, regime, policy, hold, as_json)


@main.command("doctor")
@DEVICE
@JSON
def doctor_command(device: str, as_json: bool) -> None:
    """The machine, its measured limits, known problems.

    Also versions, what is installed, and the table. Takes a few seconds, since the limits (copy bandwidth,
    matmul rate) are measured.
    """
    from bakeoff.apps.cli import doctor

    doctor.run(device, as_json)


@main.command("ops")
@DEVICE
@JSON
def list_ops(device: str, as_json: bool) -> None:
    """The ops and their candidates.

    What each can do, and why it can't be used here. Judged by the first case of the op's grid on this device;
    others may differ (see bakeoff explain).
    """
    from bakeoff.apps.cli import listing

    listing.run(device, as_json)


@main.command()
@click.argument("run", type=FILE)
@click.option("--prompt", default="def ", show_default=True, help="Text to go on from.")
@click.option("--max-new", type=click.IntRange(1), default=400, show_default=True, help="Bytes to write.")
@click.option("--temperature", type=Finite(0), default=0.8, show_default=True, help="0: the likeliest byte.")
@click.option("--top-k", type=click.IntRange(0), default=0, help="Only the k likeliest bytes; 0: all.")
@click.option(
    "--top-p",
    type=Finite(0, 1, min_open=True),
    default=1.0,
    help="Only the likeliest bytes that hold this probability.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)
@DEVICE
def generate(
    run: Path, prompt: str, max_new: int, temperature: float, top_k: int, top_p: float, seed: int, device: str
) -> None:
    """Text from a trained run.

    RUN is the folder that bakeoff train printed, or one of its checkpoints. Bytes are printed as they come.

    Examples:
      bakeoff generate runs/llm-med-tiny-20260101-120000 --prompt 'class ' --max-new 1000
      bakeoff generate runs/a --temperature 0
    """
    from bakeoff.apps.cli.generating import stream

    stream(run, prompt, max_new, device, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)


@main.group()
def table() -> None:
    """The verdicts on disk: show, move, compare.

    Examples:
      bakeoff table show
      bakeoff table export h100.json
      bakeoff table diff before.json after.json
    """


@table.command()
@DEVICE
def path(device: str) -> None:
    """Print where this machine's table is."""
    from bakeoff.apps.cli import tables

    tables.path(device)


@table.command()
@click.argument("file", type=FILE, required=False)
@DEVICE
def show(file: Path | None, device: str) -> None:
    """List the verdicts of this machine's table, or of FILE."""
    from bakeoff.apps.cli import tables

    tables.show(file, device)


@table.command("export")
@click.argument("file", type=FILE)
@DEVICE
def export_table(file: Path, device: str) -> None:
    """Copy this machine's table to FILE."""
    from bakeoff.apps.cli import tables

    tables.export(file, device)


@table.command("import")
@click.argument("file", type=FILE)
@click.option(
    "--replace",
    is_flag=True,
    help="Take FILE instead of this machine's table, also with other versions' times.",
)
@DEVICE
def import_table(file: Path, replace: bool, device: str) -> None:
    """Add FILE's verdicts to this machine's table.

    FILE must come from an equal machine. Its verdicts replace those of the same keys.
    """
    from bakeoff.apps.cli import tables

    tables.take(file, replace, device)


@table.command()
@click.argument("a", type=FILE)
@click.argument("b", type=FILE, required=False)
@DEVICE
def diff(a: Path, b: Path | None, device: str) -> None:
    """What differs between two tables.

    Decisions, and times of unchanged decisions. B is this machine's table by default.
    """
    from bakeoff.apps.cli import tables

    tables.diff(a, b, device)
