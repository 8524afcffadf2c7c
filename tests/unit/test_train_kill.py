"""Runs that are killed, run out of disk, or are asked to end lose only the steps since the last save."""

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bakeoff.apps.train import checkpoint
from bakeoff.apps.train.checkpoint import State, latest, steps
from bakeoff.apps.train.config import Config, Data, Metrics, Optim, Select, Train, to_toml
from bakeoff.apps.train.metrics import read_metrics
from bakeoff.apps.train.signals import Stopped, StopSignals
from bakeoff.models.llm_med import Config as ModelConfig
from bakeoff.models.llm_med import LLMMed

KILLS = 25
LIMIT_S = 240  # for what takes seconds on a machine with nothing else to do

# Forks one process an attempt, which trains until it is killed, a moment after it has saved some steps or has
# begun to save, or is done. The parent has made a step, so that an attempt starts at once.
PROGRAM = """
    import glob, os, random, signal, sys, time
    import torch
    torch.set_num_threads(1)
    from bakeoff.apps.train import Config, resolve, train

    file, whole, killed, kills = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])

    def saving(folder):
        checkpoints = os.path.join(folder, "checkpoints")
        return os.path.isdir(checkpoints) and any(n.startswith(".partial") for n in os.listdir(checkpoints))

    def newest(folder):
        return max((int(path[-8:]) for path in glob.glob(folder + "/checkpoints/step-*")), default=0)

    def attempt(folder, saves=None, patience=0.0):
        before = newest(folder)
        child = os.fork()
        if child == 0:
            try:
                train(resolve(Config(), file, [f"train.run_dir={folder}"]))
                os._exit(0)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(3)
        if saves is not None:  # wait for so many, if 0 for one to begin, or for the end
            ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while not (newest(folder) >= before + saves if saves else saving(folder)):
                if os.waitid(os.P_PID, child, ended) is not None:
                    break
                time.sleep(0.0002)
            time.sleep(patience)
            os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    train(resolve(Config(), file, [f"train.run_dir={whole}-warm", "train.steps=1"]))
    assert attempt(whole) == 0
    draw = random.Random(0)
    ends, torn = [], 0
    for number in range(kills):
        if saving(killed):
            torn += 1
            for left in glob.glob(killed + "/checkpoints/.partial-*"):
                os.rename(left, f"{killed}/left-{number}")
        saves = draw.randint(1, 4) if number % 2 else 0
        ends.append(attempt(killed, saves, draw.uniform(0.0, 0.004)))
        if ends[-1] == 0:
            break
        assert ends[-1] == -signal.SIGKILL, ends
    while ends[-1] != 0:
        ends.append(attempt(killed))
    print(sum(end != 0 for end in ends), torn)
"""


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """A run of 60 steps with dropout that saves at every step."""
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
    return file


def test_a_run_killed_many_times_repeats_the_whole_run_bit_for_bit(settings: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(PROGRAM),
        str(settings),
        str(whole),
        str(killed),
        str(KILLS),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    kills, torn = map(int, done.stdout.split())
    assert kills >= 10
    assert torn >= 3, "hardly a kill came in the middle of a save"
    assert "Traceback" not in done.stderr
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


@contextlib.contextmanager
def started(command: list[str], sign: Callable[[], bool]) -> Iterator[subprocess.Popen[str]]:
    """The command once `sign` is seen, which is not left running."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        limit = time.monotonic() + LIMIT_S
        while not (seen := sign()) and time.monotonic() < limit and process.poll() is None:
            time.sleep(0.05)
        assert seen, f"ended with status {process.poll()} (None: still runs) before the sign was seen"
        yield process
    finally:
        process.kill()
        process.communicate()


# The command, which hears SIGHUP even if these tests run under nohup.
HEARING = """
    import signal
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    from bakeoff.apps.cli import main
    main()
"""


EXHAUSTIVE = pytest.mark.exhaustive  # each signal is sent in one place at least, each place hears one


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=EXHAUSTIVE), signal.SIGINT, signal.SIGHUP]
)
def test_a_signal_ends_the_command_with_a_checkpoint_and_status_0(
    number: signal.Signals, settings: Path, tmp_path: Path
) -> None:
    overrides = ["train.steps=100000", "train.checkpoint_every=0"]
    command = [sys.executable, "-c", textwrap.dedent(HEARING), "train", "--config", str(settings), *overrides]
    metrics = tmp_path / "run" / "metrics.jsonl"
    with started(command, lambda: metrics.exists() and b'"train"' in metrics.read_bytes()) as process:
        process.send_signal(number)
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
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


@pytest.mark.parametrize("place", ["a pipe", "a full disk"])
def test_training_outlives_its_standard_output(place: str, settings: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bakeoff", "train", "--config", str(settings)]
    command += ["metrics.console=true", "train.checkpoint_every=0"]
    out = subprocess.PIPE if place == "a pipe" else os.open("/dev/full", os.O_WRONLY)
    process = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True)
    if process.stdout:
        process.stdout.close()
    else:
        os.close(out)
    assert process.stderr is not None
    said = " ".join(process.stderr.read().split())
    assert process.wait(timeout=LIMIT_S) == 0, said
    assert said.count("can't print") == 1
    assert ("Broken pipe" if place == "a pipe" else "No space left") in said
    found = latest(tmp_path / "run")
    assert found is not None
    assert found.step == 60


def test_training_outlives_all_its_output(settings: Path, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "bakeoff", "train", "--config", str(settings)]
    command += ["metrics.console=true", "train.checkpoint_every=0"]
    done = subprocess.run(command, stdout=writer, stderr=writer, timeout=LIMIT_S)
    os.close(writer)
    assert done.returncode == 0
    assert steps(tmp_path / "run")[-1].name == "step-00000060"


# The command, which lingers where `place` says and leaves a file there as a sign; at the end, until the
# signal has been sent.
LINGERING = """
    import sys, time
    from pathlib import Path
    from bakeoff.apps.cli import main
    from bakeoff.apps.train import setup

    place, sign = sys.argv.pop(1), Path(sys.argv.pop(1))
    measure, seen = setup.Stepper.bits_per_byte, []

    def linger(*args):
        sign.touch()
        limit = time.monotonic() + 60
        while time.monotonic() < limit and not (place == "end" and sign.with_name("sent").exists()):
            time.sleep(0.05)

    def measured(stepper, rows):
        seen.append(rows)
        if place == ("start", "end")[len(seen) > 1]:
            linger()
        return measure(stepper, rows)

    setup.Stepper.bits_per_byte = measured
    if place == "leak check":
        setup.check_leaks = linger
    main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=EXHAUSTIVE)])
@pytest.mark.parametrize(
    ("place", "said", "steps_made"),
    [
        ("leak check", "stopped before the first step; nothing to save", 0),
        ("start", "stopped before the first step; nothing to save", 0),
        ("end", "the run was over at step 60, saved", 60),
    ],
)
def test_a_signal_outside_the_steps_ends_the_command_with_status_0(
    place: str, said: str, steps_made: int, number: signal.Signals, settings: Path, tmp_path: Path
) -> None:
    sign = tmp_path / "sign"
    command = [sys.executable, "-c", textwrap.dedent(LINGERING), place, str(sign), "train"]
    command += ["--config", str(settings), "metrics.console=true", "train.checkpoint_every=0"]
    if place == "leak check":
        command.append("train.leak_check=true")
    with started(command, sign.exists) as process:
        process.send_signal(number)
        sign.with_name("sent").touch()
        out, error = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, error
    assert "Traceback" not in error
    assert f"{number.name}: {said}" in out
    found = latest(tmp_path / "run")
    assert (found.step if found else 0) == steps_made
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert metrics.exists() == (place != "leak check")
    if metrics.exists():
        assert metrics.read_bytes().endswith(b"\n")
        assert (read_metrics(metrics)[-1]["event"] == "end") == (place == "end")
