"""A plan's runs, one after the other, each kept as soon as it is done."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from bakeoff.apps.bench import results
from bakeoff.apps.compare.equal import SCORED, CompareError, parameters
from bakeoff.apps.compare.plans.entries import flops_per_byte
from bakeoff.apps.compare.plans.plan import Plan, Planned, Setting
from bakeoff.apps.compare.plans.record import (
    Finished,
    ModelRow,
    Record,
    add_run,
    read_record,
    read_runs,
    write_record,
)
from bakeoff.apps.compare.plans.scoring import packed, validated
from bakeoff.apps.compare.plans.share import first_free
from bakeoff.apps.compare.plans.summary import outcomes, summarise
from bakeoff.apps.compare.plans.tasks import learnt
from bakeoff.apps.compare.quality import trained
from bakeoff.apps.compare.stage import hold_contests
from bakeoff.apps.train import Config, DataError
from bakeoff.apps.train.config import to_tree
from bakeoff.apps.train.data import open_parts
from bakeoff.apps.train.device import pick_device
from bakeoff.parallel import launched

__all__ = ["carry_out"]

Hear = Callable[[str], None]

_LOOK_S = 1.0
"""Seconds between looks at what other processes have made."""


def carry_out(
    plan: Plan,
    out: Path,
    *,
    stop_after: float | None = None,
    say: Hear = lambda line: None,
    announce: Hear = lambda stage: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Record:
    """Makes the runs of `plan` that `out` lacks, and sums them up.

    Each finished run is a line of ``out/runs.jsonl``; ``out/plan.json`` holds the machine, the models, what
    compressors make of the scored bytes, and the table with its verdicts, written after each run. A run is
    known by its settings and data: what a changed plan still has in common with an earlier one isn't made
    again. A run that was interrupted goes on from its checkpoint.

    Processes with the same plan and `out`, as one for each GPU, share the runs: each takes one that no other
    is making, and all return when none is missing.

    Args:
        plan: from `Plan.of`.
        out: a folder for this plan alone.
        stop_after: seconds; no run starts that would not end within them, as far as is known.
        say: hears a line about every part done; announce: hears what is being done.
        clock, sleep: seconds; tests pass fakes.

    Returns:
        The record as written.

    Raises:
        CompareError: `out` holds a plan of another machine or of other data.
        DataError: data that are missing or too short.
        KeyboardInterrupt: Ctrl-C; what was done is kept.
    """
    if launched() > 1:
        raise CompareError("a plan runs in one process: start it without torchrun")
    began = clock()
    device = pick_device(plan.entries[0].config.train.device)
    plan, record = _opened(plan, out, device)
    done = read_runs(out)
    _sum_up(plan, record, done, out)
    if record.packed and (least := min(row.bytes for row in record.packed)) < SCORED:
        say(f"only {least:,} bytes are held out, less than the {SCORED:,} that are advised: give more --data")
    held: set[tuple[str, int]] = set()
    longest: dict[tuple[str, Setting], float] = {}
    while missing := {run.key: run for run in plan.missing(done)}:
        with first_free(out, missing) as key:
            done = read_runs(out)
            if key in done:
                continue  # another process made it just now
            # Where others have all that is missing, what they find may decide what else is to be made.
            expected = _expected(missing[key], longest) if key is not None else 0.0
            if stop_after is not None and clock() - began + expected > stop_after:
                made = _made(plan, done)
                say(f"stopped, as asked, with {made} of {plan.size} runs made: the same command goes on")
                break
            if key is None:
                announce("waiting for the runs of other processes")
                sleep(_LOOK_S)
                continue
            run, started = missing[key], clock()
            number = _made(plan, done) + 1
            finished = _made_run(run, out, device, held, announce, number, plan.size)
            add_run(out, finished)
            shutil.rmtree(_folder(out, run) / "checkpoints", ignore_errors=True)
        longest[run.entry.name, run.setting] = clock() - started
        say(_line(finished))
        done = read_runs(out)
        _sum_up(plan, record, done, out)
    _sum_up(plan, record, done, out)
    return record


def _folder(out: Path, run: Planned) -> Path:
    """Where the trainer makes a run; its checkpoints are removed once what it found is kept."""
    return out / "runs" / run.key


def _made(plan: Plan, done: dict[str, Finished]) -> int:
    return sum(len(runs) for runs in outcomes(plan, done).values())


def _expected(run: Planned, longest: dict[tuple[str, Setting], float]) -> float:
    """Seconds that it will last, as far as is known."""
    budget = run.setting.budget
    least = 60 * budget.amount if budget.kind == "minutes" else 0.0
    return max(longest.get((run.entry.name, run.setting), 0.0), least)


def _opened(plan: Plan, out: Path, device: torch.device) -> tuple[Plan, Record]:
    """The plan with its data's digest, and a new record of it. Raises CompareError and DataError."""
    text = [setting.length for setting in plan.settings if setting.task == "text"]
    first = plan.entries[0]
    for length in text:
        try:
            open_parts(first.config.data, length, "give longer --data or shorter --rows")
        except DataError as error:
            raise CompareError(f"rows of {length} bytes: {error}") from None
    corpus = open_parts(first.config.data, 2)[0]
    plan = msgspec.structs.replace(plan, digest=corpus.digest())
    env = results.environment(str(device))
    before = read_record(out)
    if before is not None and (unlike := before.env.unlike(env)):
        raise CompareError(f"{out} was measured elsewhere ({unlike}): give another --out")
    if before is not None and before.data_digest != plan.digest:
        raise CompareError(
            f"{out} holds runs on other bytes of {corpus.name}: restore them, or give another --out"
        )
    if before is None and (out / "compare.json").exists():
        raise CompareError(f"{out} holds a comparison of two: give another --out")
    record = Record(
        env=env,
        models=[_row(plan, number) for number in range(len(plan.entries))],
        settings=[msgspec.to_builtins(setting) for setting in plan.settings],
        seeds=plan.seeds,
        data=Path(corpus.name).name,
        data_bytes=len(corpus),
        data_digest=plan.digest,
        held_bytes=corpus.held,
        packed=before.packed if before is not None else [],
    )
    known = {row.length for row in record.packed}
    for length in sorted(set(text) - known):
        record.packed += packed(first.at(length))
    return plan, record


def _row(plan: Plan, number: int) -> ModelRow:
    entry = plan.entries[number]
    count = parameters(entry.config.model)
    return ModelRow(entry.name, count, list(entry.rates), to_tree(entry.config))


def _made_run(
    run: Planned,
    out: Path,
    device: torch.device,
    held: set[tuple[str, int]],
    announce: Hear,
    number: int,
    size: int,
) -> Finished:
    """Trains and scores one run."""
    what = f"run {number} of {size}: {run.entry.name}, lr {run.rate:g}, seed {run.seed}, {run.setting}"
    announce(what)
    config, setting = run.config, run.setting
    finished = Finished(
        key=run.key, model=run.entry.name, task=setting.task, budget=setting.budget.kind,
        amount=setting.budget.amount, length=setting.length, rows=config.train.batch_size, rate=run.rate,
        seed=run.seed, parameters=parameters(config.model), flops_per_byte=flops_per_byte(config), steps=0,
        seconds=0.0, flops=0.0, bytes_per_s=0.0, validation=None, score=None, torch=str(torch.__version__),
        device=str(device), commit=results.commit(), date=results.now(),
    )  # fmt: skip
    if setting.task == "text":
        if (run.entry.name, setting.length) not in held:
            hold_contests(config, device, announce)
            held.add((run.entry.name, setting.length))
            announce(what)
        finished = _trained(run, finished, _folder(out, run), device)
    else:
        found = learnt(run, device, lambda step: announce(f"{what}, step {step}"))
        steps = config.train.steps
        finished = msgspec.structs.replace(
            finished, steps=steps, seconds=found.seconds, validation=found.validation, score=found.score,
            farther=found.farther, reason=found.reason, curve=found.curve,
        )  # fmt: skip
    many = finished.steps * finished.rows * setting.length
    speed = finished.bytes_per_s or (many / finished.seconds if finished.seconds else 0.0)
    return msgspec.structs.replace(finished, flops=float(many * finished.flops_per_byte), bytes_per_s=speed)


def _trained(run: Planned, finished: Finished, folder: Path, device: torch.device) -> Finished:
    """A run of the trainer."""
    config: Config = run.config
    part = trained(config, "first", run.seed, folder, device, resume=True)
    validation = validated(config, folder, device)
    _, _, held_out = open_parts(config.data, config.seq_len)
    fit = min(config.train.eval_rows, len(held_out) // (config.seq_len + 1))
    return msgspec.structs.replace(
        finished, steps=part.steps, seconds=part.seconds, bytes_per_s=part.tokens_per_s,
        validation=validation, score=part.bits_per_byte, scored_bytes=fit * config.seq_len,
        peak_bytes=part.peak_bytes, stopped=part.stopped, curve=part.curve,
    )  # fmt: skip


def _sum_up(plan: Plan, record: Record, done: dict[str, Finished], out: Path) -> None:
    found = summarise(plan, done)
    record.rows = [msgspec.to_builtins(outcome) for outcome in found]
    record.verdicts = {str(outcome.setting): outcome.verdict for outcome in found}
    write_record(out, record)


def _line(run: Finished) -> str:
    unit = "bits/byte" if run.task == "text" else "wrong"
    shown = ["not finite" if x is None else f"{x:.4f}" for x in (run.validation, run.score)]
    return (
        f"{run.model}, {run.task}, lr {run.rate:g}, seed {run.seed}: {shown[1]} {unit} held out, "
        f"{shown[0]} to validate; {run.steps:,} steps in {run.seconds:.1f} s"
    )
