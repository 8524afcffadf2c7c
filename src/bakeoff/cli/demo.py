"""demo: the whole way on this machine, from looking at it to text of a model that was just trained."""

import time
from pathlib import Path

import click
import msgspec
from rich.console import Console

from bakeoff.cli import doctor
from bakeoff.cli.generating import continuation
from bakeoff.cli.terminal import console, device_named, working
from bakeoff.cli.training import configured, print_result, print_unsettled, rehearsed
from bakeoff.select import policy
from bakeoff.train import Config, Result, load_run, train
from bakeoff.train.data import ByteCorpus, split

__all__ = ["demo_config", "run"]

CPU_SECONDS, GPU_SECONDS, QUICK_SECONDS = 60.0, 120.0, 6.0
TUNE_SECONDS = 30.0
GPU_PASSES = 5
"""Over the data: in its time a GPU makes many more, and overfits some MB of text."""
PROMPT = "def "
SAMPLE_BYTES = 400


def run(seconds: float | None, data: str | None, out: Path | None, quick: bool, device: str) -> None:
    """Doctor, tune, train, sample; every part says what it found and where it left it."""
    start = time.monotonic()
    device = device_named(device)
    config = demo_config(device, seconds, data, out, quick)
    printer = console()
    _heading(printer, "1. The machine")
    doctor.show(doctor.examine(device), printer)
    _heading(
        printer, f"2. The contests of one step of {config.recipe}, within {config.select.budget_s:.0f} s"
    )
    with working(printer, "preparing one step") as status:
        report, _ = rehearsed(config, config.select.budget_s, announce=status.update)
    text = f"{report.measured} contests held in {report.seconds:.0f} s; the next table says what they decided"
    printer.print(text, highlight=False)
    print_unsettled(report, printer)
    steps = f"{config.train.steps} steps, at most " if config.train.steps else ""
    limit = f"for {steps}{config.train.max_seconds:.0f} s"
    _heading(printer, f"3. Training {config.recipe} on {config.data.path} {limit}")
    result = train(config, console=printer)
    _heading(printer, "4. What came of it")
    print_result(result, printer)
    _sample(result, device, printer)
    _places(result, device, printer)
    printer.print(f"all of it took {time.monotonic() - start:.0f} s", highlight=False)


def demo_config(
    device: str, seconds: float | None, data: str | None, out: Path | None, quick: bool
) -> Config:
    """LLM-Med tiny on the CPU, small on a GPU, for a time, on a GPU also for some passes over the data; tuned
    before, not again at its start."""
    cuda = device.startswith("cuda")
    length = seconds or (QUICK_SECONDS if quick else GPU_SECONDS if cuda else CPU_SECONDS)
    words = [
        "llm-med" if cuda and not quick else "llm-med-tiny",
        "train.steps=0",
        f"train.max_seconds={length}",
        f"train.device={device}",
        "select.tune=false",
        f"select.budget_s={QUICK_SECONDS if quick else TUNE_SECONDS}",
    ]
    if quick:
        words.append("train.eval_rows=8")
    config = configured(words, None, data=data, out=out)
    if not cuda or quick or seconds:
        return config
    corpus = ByteCorpus.open(config.data.path)
    training, _ = split(corpus, config.data.holdout, config.seq_len)
    steps = max(1, GPU_PASSES * len(training) // (config.train.batch_size * config.seq_len))
    return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, steps=steps))


def _sample(result: Result, device: str, out: Console) -> None:
    if result.checkpoint is None:
        return
    model, _ = load_run(result.run_dir)
    model.to(device)
    out.print(f"a sample after {PROMPT!r}:", highlight=False)
    text = "".join(continuation(model, PROMPT, SAMPLE_BYTES, temperature=0.7, seed=0))
    for line in f"{PROMPT}{text}".splitlines():
        click.echo(f"  | {line}")


def _places(result: Result, device: str, out: Console) -> None:
    places = {
        "run": result.run_dir,
        "metrics": result.run_dir / "metrics.jsonl",
        "checkpoint": result.checkpoint,
        "table": policy.store.path(device),
        "go on": f"bakeoff generate {result.run_dir} --prompt 'class '",
    }
    for name, place in places.items():
        if place is not None:
            out.print(f"{name:<11}{place}", highlight=False, markup=False, soft_wrap=True)


def _heading(out: Console, text: str) -> None:
    out.print(f"\n{text}", style="bold", highlight=False)
