"""Runs that are killed, run out of disk, or are asked to end lose only the steps since the last save."""

import errno
import io
import itertools
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bakeoff.apps.cli import main
from bakeoff.apps.train import checkpoint, resolve, setup, train
from bakeoff.apps.train.checkpoint import State, latest, steps
from bakeoff.apps.train.config import Config, Data, Metrics, Optim, Select, Train, to_toml
from bakeoff.apps.train.metrics import read_metrics
from bakeoff.apps.train.signals import Stopped, StopSignals
from bakeoff.models.llm_med import Config as ModelConfig
from bakeoff.models.llm_med import LLMMed
from tests.unit.forked import Forked

KILLS = 25
QUIET = Console(file=io.StringIO())


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Path]:
    """A run of 60 steps with dropout that saves at every step. Something has been trained before, so that a
    fork begins at once."""
    (tmp_path / "text.txt").write_text("".join(f"{n} lazy dogs and {n % 7} foxes\n" for n in range(500)))
    config = Config(
        model=ModelConfig(d_model=16, layers=1, heads=2, max_seq_len=16, dropout=0.1),
        data=Data(path=str(tmp_path / "text.txt")),
        optim=Optim(lr=3e-3, warmup=0.1),
        train=Train(
            steps=60, batch_size=4, log_every=1, eval_rows=4, checkpoint_every=1, keep=2, device="cpu",
            leak_check=False, run_dir=str(tmp_path / "run"),
        ),
        select=Select(tune=False),
        metrics=Metrics(console=False),
    )  # fmt: skip
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config))
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the forks
    train(resolve(config, None, [f"train.run_dir={tmp_path / 'warm'}", "train.steps=1"]), console=QUIET)
    yield file
    torch.set_num_threads(before)


def newest(run_dir: Path) -> int:
    return max((int(folder.name[-8:]) for folder in steps(run_dir)), default=0)


def saving(run_dir: Path) -> list[Path]:
    return [path for path in run_dir.glob("checkpoints/.partial-step-*") if path.name[-1].isdigit()]


def test_a_run_killed_many_times_repeats_the_whole_run_bit_for_bit(settings: Path, tmp_path: Path) -> None:
    """Each process trains until it is killed, a moment after it has saved some steps or has begun to save."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def attempt(run_dir: Path) -> None:
        train(resolve(Config(), settings, [f"train.run_dir={run_dir}"]), console=QUIET)

    attempt(whole)
    draw = random.Random(0)
    torn = 0
    out = tmp_path / "out"
    for number in range(KILLS):
        for left in saving(killed):
            torn += 1
            left.rename(killed / f"left-{number}-{left.name}")
        before, saves = newest(killed), draw.randint(1, 4) if number % 2 else 0
        with Forked(lambda: attempt(killed), out) as process:
            while not process.ended():
                if newest(killed) >= before + saves if saves else saving(killed):
                    break
                time.sleep(0.0002)
            time.sleep(draw.uniform(0.0, 0.004))
            status = process.end(signal.SIGKILL)
        assert status in (0, -signal.SIGKILL), process.said()
        if status == 0:
            break
    kills = number if status == 0 else KILLS
    if status:
        with Forked(lambda: attempt(killed), out) as process:
            assert process.end() == 0, process.said()
    assert kills >= 10
    assert torn >= 3, "hardly a kill came in the middle of a save"
    assert "Traceback" not in out.read_text()
    curves = []
    for run in (whole, killed):
        rows = [row for row in read_metrics(run / "metrics.jsonl") if row["event"] == "train"]
        curves.append([(row["step"], row["loss"], row["grad_norm"]) for row in rows])
    assert curves[0] == curves[1]
    assert [step for step, *_ in curves[1]] == list(range(1, 61))
    ends = [latest(run) for run in (whole, killed)]
    assert all(torch.equal(tensor, ends[1].weights[name]) for name, tensor in ends[0].weights.items())


@pytest.fixture
def room() -> Iterator[list[int]]:
    """A disk that is full after room[0] bytes of a file, by the system's own limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield []
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("part", ["model.safetensors", "moments"])
def test_a_disk_that_fills_up_while_saving_leaves_what_was_there(
    share: float, part: str, tmp_path: Path, room: list[int]
) -> None:
    model = LLMMed(ModelConfig(d_model=16, layers=1, heads=2, max_seq_len=8))
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    large = sum(tensor.nbytes for tensor in weights.values())
    # The part that is to fail is the largest file; the other is small.
    few = {"norm.weight": weights["norm.weight"]}
    held, kept = (weights, few) if part == "model.safetensors" else (few, weights)

    def save(step: int) -> None:
        moments = {f"{name}/exp_avg": tensor for name, tensor in kept.items()}
        checkpoint.save(tmp_path, Config(), State({"step": step}, held, {}, moments), keep=5)

    save(1)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(4096, int(share * large)), hard))
    with pytest.raises(OSError, match="File too large") as caught:
        save(2)
    assert caught.value.errno == errno.EFBIG
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    save(3)
    assert [folder.name for folder in steps(tmp_path)] == ["step-00000001", "step-00000003"]


def command(settings: Path, *words: str) -> None:
    main(["train", "--config", str(settings), *words])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_command_with_a_checkpoint_and_its_own_status(
    number: signal.Signals, settings: Path, tmp_path: Path
) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    endless = ["train.steps=100000", "train.checkpoint_every=0"]
    with Forked(lambda: command(settings, *endless), tmp_path / "out") as process:
        process.wait_for(lambda: metrics.exists() and b'"train"' in metrics.read_bytes())
        assert process.end(number) == 128 + number, process.said()
    found = latest(tmp_path / "run")
    rows = read_metrics(metrics)
    assert found is not None
    assert found.step == rows[-1]["step"] > 0
    assert rows[-1]["stopped"] == number.name


def test_a_terminal_that_closes_may_say_so_twice_and_nohup_holds() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, _: heard.append(number))
    try:
        with StopSignals(at_once=True) as signals:
            with pytest.raises(Stopped):
                signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
            assert signals.caught == "SIGHUP"
        assert heard == []
        signal.raise_signal(signal.SIGHUP)
        assert heard == [signal.SIGHUP]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopSignals(at_once=True) as signals:
            signal.raise_signal(signal.SIGHUP)
        assert signals.caught == ""
    finally:
        signal.signal(signal.SIGHUP, before)


BRIEF = ("metrics.console=true", "train.checkpoint_every=0", "train.steps=6", "train.eval_rows=1")


@pytest.mark.parametrize(("place", "why"), [("a pipe", "Broken pipe"), ("a full disk", "No space left")])
def test_training_outlives_its_standard_output(
    place: str, why: str, settings: Path, tmp_path: Path, nowhere: int
) -> None:
    out = nowhere if place == "a pipe" else os.open("/dev/full", os.O_WRONLY)
    said = tmp_path / "said"

    def act() -> None:
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
        command(settings, *BRIEF)

    with Forked(act, out) as process:
        assert process.end() == 0, said.read_text()
    text = " ".join(said.read_text().split())
    assert text.count("can't print") == 1
    assert why in text
    assert newest(tmp_path / "run") == 6


def test_training_outlives_all_its_output(settings: Path, tmp_path: Path, nowhere: int) -> None:
    with Forked(lambda: command(settings, *BRIEF), nowhere) as process:
        assert process.end() == 0
    assert newest(tmp_path / "run") == 6


@pytest.fixture
def nowhere() -> Iterator[int]:
    """A pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def linger(place: str, sign: Path) -> None:
    """Lets a run wait at this place, and leave a file as a sign; at the end, until the signal was sent."""
    measure, seen = setup.Stepper.bits_per_byte, itertools.count()

    def wait(*_: object) -> None:
        sign.touch()
        limit = time.monotonic() + 60
        while time.monotonic() < limit and not (place == "end" and sign.with_name("sent").exists()):
            time.sleep(0.01)

    def measured(stepper: Any, rows: Any) -> float:
        if place == ("start" if next(seen) == 0 else "end"):
            wait()
        return float(measure(stepper, rows))

    setup.Stepper.bits_per_byte = measured  # type: ignore[method-assign]
    if place == "leak check":
        setup.check_leaks = wait  # type: ignore[assignment]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("place", "said", "steps_made"),
    [
        ("leak check", "stopped before the first step; nothing to save", 0),
        ("start", "stopped before the first step; nothing to save", 0),
        ("end", "the run was over at step 6, saved", 6),
    ],
)
def test_a_signal_outside_the_steps_is_obeyed_at_once_or_comes_too_late(
    place: str, said: str, steps_made: int, number: signal.Signals, settings: Path, tmp_path: Path
) -> None:
    sign = tmp_path / "sign"
    leak_check = ["train.leak_check=true"] if place == "leak check" else []

    def act() -> None:
        linger(place, sign)
        command(settings, *BRIEF, *leak_check)

    with Forked(act, tmp_path / "out") as process:
        process.wait_for(sign.exists)
        os.kill(process.pid, number)
        sign.with_name("sent").touch()
        status = process.end()
    assert status == (0 if place == "end" else 128 + number), process.said()
    assert "Traceback" not in process.said()
    assert f"{number.name}: {said}" in process.said()
    found = latest(tmp_path / "run")
    assert (found.step if found else 0) == steps_made
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert metrics.exists() == (place != "leak check")
    if metrics.exists():
        assert metrics.read_bytes().endswith(b"\n")
        assert (read_metrics(metrics)[-1]["event"] == "end") == (place == "end")
