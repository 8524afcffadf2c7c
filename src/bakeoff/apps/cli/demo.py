"""demo: every part in turn: examine the machine, tune, train two models, compare them, print their text."""

import logging
import shlex
import time
from pathlib import Path

import click
import msgspec
import torch
from rich.console import Console

from bakeoff.apps.bench import results
from bakeoff.apps.cli import doctor
from bakeoff.apps.cli.generating import continuation
from bakeoff.apps.cli.terminal import console, counted, working
from bakeoff.apps.cli.training import program, signal_status
from bakeoff.apps.cli.tuning import rehearsed
from bakeoff.apps.compare import Document, compared, match, model_of, pair, parameters, table
from bakeoff.apps.train import Config, ConfigError, Result, load_run, train
from bakeoff.apps.train.checkpoint import steps
from bakeoff.apps.train.data import DataError, open_parts
from bakeoff.device import current_device
from bakeoff.paths import expanded
from bakeoff.select.choose import policy

__all__ = ["demo_configs", "run"]

log = logging.getLogger("bakeoff")

CPU_SECONDS, GPU_SECONDS, QUICK_SECONDS = 45.0, 60.0, 4.0
TUNE_SECONDS = 30.0
GPU_PASSES = 5
"""About how often the data are seen: a GPU would make many more passes in its time, and overfit."""
GPU_BYTES_PER_S = 3.3e6
"""The training speed of the faster model on an H100 (results/h100/code); a slower GPU makes fewer passes."""
PROMPT = "def "
SAMPLE_BYTES = 300
_TRIES = 5  # samples, of which one that is a third letters will do: blanks are likely bytes of a program


def run(seconds: float | None, data: str | None, out: Path | None, quick: bool, device: str) -> None:
    """Doctor, tune, train both models, compare, sample; every part prints its result and where that is."""
    start = time.monotonic()
    device = str(current_device(device))
    out = out or Path("runs", f"demo-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        configs = demo_configs(device, seconds, data, out, quick)
    except DataError as error:
        raise DataError(str(error).replace("data.path", "--data")) from None
    _make_folders(out, configs)
    printer = console()
    _heading(printer, "1. The machine")
    doctor.show(doctor.examine(device), printer)
    for config in configs:
        limit = f"none begins after {config.select.budget_s:.0f} s"
        _heading(printer, f"2. The contests of one step of {config.recipe}: {limit}")
        with working(printer, "preparing one step") as status:
            report, _ = rehearsed(config, config.select.budget_s, announce=status.update)
        held = counted(report.measured, "contest")
        printer.print(f"{held} held in {report.seconds:.0f} s, preparation included", highlight=False)
        for key, reason in report.unsettled.items():
            log.info("no contest for %s: %s", key, reason)
    trained: list[Result] = []
    # A busy processor is to train as much as an idle one, in more time.
    clock, unit = (time.thread_time, "s of a processor") if device == "cpu" else (time.monotonic, "s")
    for config in configs:
        limit = f"for {config.train.max_seconds:.0f} {unit}"
        _heading(printer, f"3. Training {config.recipe} on {config.data.path} {limit}")
        result = train(config, console=printer, clock=clock)
        if result.signal:
            if result.checkpoint and result.stopped == result.signal:
                resume = f"--config {shlex.quote(str(result.run_dir / 'config.toml'))} --resume auto"
                text = f"to finish this run alone: {program()} train {resume}"
                printer.print(text, highlight=False, soft_wrap=True)
            raise click.exceptions.Exit(signal_status(result.signal))
        trained.append(result)
        before, after = result.bits_per_byte_before, result.bits_per_byte_after
        text = f"held-out bits per byte: {before:.3f} before, {after:.3f} after"
        printer.print(text, highlight=False)
    _heading(printer, "4. What came of it")
    _compare(configs, trained, device, printer)
    for config, result in zip(configs, trained, strict=True):
        _sample(config, result, device, printer)
    _places(out, configs, trained, device, printer)
    printer.print(f"all of it took {time.monotonic() - start:.0f} s", highlight=False)


def demo_configs(
    device: str, seconds: float | None, data: str | None, out: Path, quick: bool
) -> tuple[Config, Config]:
    """LLM-Med and byte-spectral with equal parameters, tiny on the CPU, small on a GPU, for equal time: on a
    GPU less of it where the data are few. They don't tune at their start, since the demo has before. Raises
    DataError for data that can't be trained on."""
    cuda = device.startswith("cuda")
    length = seconds or (QUICK_SECONDS if quick else GPU_SECONDS if cuda else CPU_SECONDS)
    size = "" if cuda and not quick else "-tiny"
    overrides = ["select.tune=false", f"select.budget_s={QUICK_SECONDS if quick else TUNE_SECONDS}"]
    if quick:
        overrides.append("train.eval_rows=8")
    spectral, med = pair(
        f"byte-spectral{size}",
        f"llm-med{size}",
        overrides,
        data=data,
        device=device,
        minutes=length / 60,
        scored=0,  # a demonstration: the rows of an ordinary run
    )
    _, training, _ = open_parts(med.data, med.seq_len, "give a longer --data")
    if cuda and not quick and not seconds:
        length = min(length, max(QUICK_SECONDS, GPU_PASSES * len(training) / GPU_BYTES_PER_S))

    def placed(config: Config) -> Config:
        settings = {"max_seconds": length, "run_dir": str(out / config.recipe), "resume": "never"}
        return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, **settings))

    return placed(med), placed(match(spectral, parameters(med.model)))


def _make_folders(out: Path, configs: tuple[Config, Config]) -> None:
    """Create the folders of both runs. Raises ConfigError where that fails or they hold runs already."""
    try:
        for config in configs:
            folder = expanded(config.train.run_dir)
            if steps(folder):
                raise ConfigError(f"{folder} already holds a run: give another --out")
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"can't write to {out} ({error.strerror}): set --out to a folder that can be written"
        ) from None


def _compare(configs: tuple[Config, Config], trained: list[Result], device: str, out: Console) -> None:
    med, spectral = configs
    torch_device = torch.device(device)
    document = Document(
        env=results.environment(device),
        first=model_of(spectral, spectral.recipe),
        second=model_of(med, med.recipe),
        seeds=1,
        lengths=[],
        runs=[
            compared(trained[1], spectral, "first", torch_device),
            compared(trained[0], med, "second", torch_device),
        ],
    )
    out.print(table(document))
    text = "one run each can't tell a better model from a lucky seed: bakeoff compare trains several"
    out.print(text, highlight=False, soft_wrap=True)


def _sample(config: Config, result: Result, device: str, out: Console) -> None:
    model, _ = load_run(result.run_dir)
    model.to(device)
    out.print(f"\na sample of {config.recipe} after {PROMPT!r}:", highlight=False)
    best = ""
    for seed in range(_TRIES):
        text = "".join(continuation(model, PROMPT, SAMPLE_BYTES, temperature=0.7, seed=seed))
        best = max(best, text, key=_inked)
        if _inked(best) >= SAMPLE_BYTES // 3:
            break
    if _inked(best) < SAMPLE_BYTES // 10:
        out.print("hardly more than blanks: give more --seconds to train", highlight=False)
    for line in f"{PROMPT}{best}".rstrip().splitlines():
        click.echo(f"  | {line}")


def _inked(text: str) -> int:
    """How many letters of it are seen."""
    return len("".join(text.split()))


def _places(
    folder: Path, configs: tuple[Config, Config], trained: list[Result], device: str, out: Console
) -> None:
    places: dict[str, Path | str] = {"runs": folder}
    for config, result in zip(configs, trained, strict=True):
        places[config.recipe] = result.run_dir / "metrics.jsonl"
    places["table"] = policy.store.path(device)
    places["go on"] = f"{program()} generate {shlex.quote(str(trained[0].run_dir))} --prompt 'class '"
    places["compare"] = f"{program()} compare"
    width = max(map(len, places)) + 2
    out.print()
    for name, place in places.items():
        out.print(f"{name:<{width}}{place}", highlight=False, markup=False, soft_wrap=True)


def _heading(out: Console, text: str) -> None:
    out.print(f"\n{text}", style="bold", highlight=False)
