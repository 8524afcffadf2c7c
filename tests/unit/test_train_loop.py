"""The training loop: it learns, stops, resumes bit for bit, and survives what a disk or a user does to it."""

import contextlib
import errno
import functools
import io
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from bakeoff.apps.train import (
    ConfigError,
    DataError,
    TrainError,
    checkpoint,
    load_run,
    reporting,
    resolve,
    selection,
    setup,
    train,
)
from bakeoff.apps.train.checkpoint import CheckpointError, State, latest
from bakeoff.apps.train.config import Config, Metrics, Optim, Select, Train
from bakeoff.apps.train.config import Data as DataConfig
from bakeoff.apps.train.metrics import read_metrics
from bakeoff.apps.train.step import Stepper
from bakeoff.errors import PolicyError, Unsupported
from bakeoff.models.llm_med import Config as ModelConfig
from bakeoff.optim import nested
from tests.unit.forked import Forked

TEXT = "".join(f"line {n}: the quick brown fox jumps over {n % 7} lazy dogs\n" for n in range(400))
QUIET = Console(file=io.StringIO())


@pytest.fixture
def base(tmp_path: Path) -> Config:
    """A run of a second: 12 steps of a tiny model with dropout on a short text."""
    (tmp_path / "text.txt").write_text(TEXT)
    return Config(
        recipe="test",
        model=ModelConfig(d_model=32, layers=2, heads=2, max_seq_len=32, dropout=0.1),
        data=DataConfig(path=str(tmp_path / "text.txt")),
        optim=Optim(lr=3e-3, warmup=0.1),
        train=Train(
            steps=12,
            batch_size=8,
            accumulate=2,
            log_every=3,
            eval_rows=8,
            checkpoint_every=4,
            device="cpu",
            leak_check=False,
            run_dir=str(tmp_path / "run"),
        ),
        select=Select(tune=False),
        metrics=Metrics(console=False),
    )


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Raises a signal in the middle of a step."""

    def arrange(step: int, number: signal.Signals) -> None:
        made = 0

        class Interrupted(Stepper):
            def __call__(self, rows: torch.Tensor, lr: float) -> None:
                nonlocal made
                made += 1
                if made == step:
                    signal.raise_signal(number)
                super().__call__(rows, lr)

        monkeypatch.setattr(setup, "Stepper", Interrupted)

    return arrange


def rows(config: Config, event: str = "train") -> list[dict[str, Any]]:
    return [row for row in read_metrics(Path(config.train.run_dir, "metrics.jsonl")) if row["event"] == event]


def curve(config: Config) -> list[tuple[Any, ...]]:
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in rows(config)]


def test_it_learns_and_leaves_everything_behind(base: Config) -> None:
    config = resolve(
        base, None, ["train.steps=60", "train.eval_every=20", "optim.lr=1e-2", "model.dropout=0"]
    )
    result = train(config, console=QUIET)
    assert result.bits_per_byte_before == pytest.approx(8.0, abs=0.3)
    assert result.bits_per_byte_after < 4.0
    assert (result.steps, result.stopped, result.skipped) == (60, "steps", 0)
    assert result.tokens_per_s > 0
    assert resolve(Config(), result.run_dir / "config.toml") == config
    model, saved = load_run(result.run_dir)
    assert saved == config
    again = Stepper(model, config, torch.device("cpu"))
    assert result.checkpoint == result.run_dir / "checkpoints" / "step-00000060"

    (start,) = rows(config, "start")
    assert start["select/rms_norm"] == "eager"
    assert start["select/qkv_rotary"] == "eager"
    ops = {"rms_norm", "qkv_rotary", "attention", "swiglu", "linear_cross_entropy", "adamw_", "global_norm"}
    assert {e.op for e in result.selection} == ops
    held = [(row["step"], row["held_out_bits_per_byte"]) for row in rows(config, "eval")]
    assert [step for step, _ in held] == [0, 20, 40, 60]
    assert held[-1][1] == result.bits_per_byte_after
    assert [row["step"] for row in rows(config)] == list(range(3, 61, 3))
    for row in rows(config):
        assert row["bits_per_byte"] == pytest.approx(row["loss"] * 1.442695)
        assert row["tokens_per_s"] > 0
        assert row["peak_bytes"] > 0
        assert 0 <= row["data_wait_s"] < row["seconds"]
        assert row["share_of_peak"] > 0
    assert again.bits_per_byte(torch.randint(256, (2, 33), dtype=torch.uint8)) > 8  # noise stays noise


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_goes_on_bit_for_bit(
    number: signal.Signals, base: Config, stop_after: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = resolve(base, None, [f"train.run_dir={tmp_path / 'whole'}"])
    train(whole, console=QUIET)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    stop_after(5, number)
    out = io.StringIO()
    talking = resolve(base, None, ["metrics.console=true"])
    first = train(talking, console=Console(file=out, width=200))
    assert (first.steps, first.stopped) == (5, number.name)  # the step in hand was finished
    assert f"{number.name}: stopped after step 5, saved {first.checkpoint}" in out.getvalue()
    assert f"go on with train.run_dir={base.train.run_dir}" in out.getvalue()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert [(row["step"], row["steps"]) for row in rows(base)] == [(3, 3), (5, 2)]
    monkeypatch.undo()
    torch.manual_seed(999)  # whatever else the new process did
    second = train(base, console=QUIET)
    assert (second.steps, second.stopped) == (12, "steps")
    assert second.bits_per_byte_before == first.bits_per_byte_before
    assert curve(base) == curve(whole)
    ends = [latest(config.train.run_dir) for config in (base, whole)]
    for name, tensor in ends[0].weights.items():
        assert torch.equal(tensor, ends[1].weights[name]), name


def test_the_last_steps_have_a_row_however_few(base: Config, tmp_path: Path) -> None:
    base = resolve(base, None, ["train.steps=11"])
    single = resolve(base, None, ["train.log_every=1", f"train.run_dir={tmp_path / 'single'}"])
    for config in (base, single):
        train(config, console=QUIET)
    found = rows(base)
    assert [(row["step"], row["steps"]) for row in found] == [(3, 3), (6, 3), (9, 3), (11, 2)]
    for row in found:
        about = rows(single)[row["step"] - row["steps"] : row["step"]]
        for name in ("loss", "grad_norm"):
            mean = sum(one[name] for one in about) / row["steps"]
            assert row[name] == pytest.approx(mean, rel=1e-12)
        assert row["lr"] == about[-1]["lr"]
        assert row["tokens_per_s"] > 0
    train(base, console=QUIET)  # nothing is left to do, and nothing is said anew
    assert rows(base) == found
    train(resolve(base, None, ["train.steps=13"]), console=QUIET)
    assert [(row["step"], row["steps"]) for row in rows(base)] == [(3, 3), (6, 3), (9, 3), (12, 3), (13, 1)]


SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("leak check", signal.SIGINT),
        ("tuning", signal.SIGTERM),
        ("first measurement", signal.SIGINT),
        pytest.param("leak check", signal.SIGTERM, marks=pytest.mark.exhaustive),
        pytest.param("tuning", signal.SIGINT, marks=pytest.mark.exhaustive),
        pytest.param("first measurement", signal.SIGTERM, marks=pytest.mark.exhaustive),
    ],
)
def test_a_signal_before_the_first_step_ends_the_run_at_once(
    phase: str, number: signal.Signals, base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(number)
        raise AssertionError("the signal was not obeyed at once")

    place = {
        "leak check": (setup, "check_leaks"),
        "tuning": (selection, "tune_together"),
        "first measurement": (Stepper, "bits_per_byte"),
    }[phase]
    monkeypatch.setattr(*place, interrupted)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    settings = ["train.leak_check=true", "select.tune=true", "metrics.console=true"]
    if phase != "tuning":
        settings[1] = "select.tune=false"
    out = io.StringIO()
    result = train(resolve(base, None, settings), console=Console(file=out, width=200))
    assert (result.steps, result.stopped, result.checkpoint) == (0, number.name, None)
    assert f"{number.name}: stopped before the first step; nothing to save" in out.getvalue()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert latest(base.train.run_dir) is None
    monkeypatch.undo()
    whole = resolve(base, None, [f"train.run_dir={tmp_path / 'whole'}"])
    for config in (base, whole):
        assert train(config, console=QUIET).stopped == "steps"
    assert curve(base) == curve(whole)
    assert [row["event"] for row in read_metrics(Path(base.train.run_dir, "metrics.jsonl"))] == [
        row["event"] for row in read_metrics(tmp_path / "whole" / "metrics.jsonl")
    ]


def test_a_signal_while_a_run_takes_up_another_leaves_that_as_it_was(
    base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = resolve(base, None, [f"train.run_dir={tmp_path / 'whole'}"])
    train(whole, console=QUIET)
    first = train(resolve(base, None, ["train.steps=5"]), console=QUIET)

    def interrupted(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(setup, "check_leaks", interrupted)
    out = io.StringIO()
    talking = resolve(base, None, ["train.leak_check=true", "metrics.console=true", "train.steps=6"])
    second = train(talking, console=Console(file=out, width=200))
    assert (second.steps, second.stopped, second.checkpoint) == (5, "SIGTERM", None)
    assert second.bits_per_byte_before == first.bits_per_byte_before
    assert f"stopped before the first step; {first.checkpoint} is still the last checkpoint" in out.getvalue()
    assert latest(base.train.run_dir).step == 5


@SIGNALS
def test_a_signal_during_the_last_measurement_lets_it_end(
    number: signal.Signals, base: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Stepper.bits_per_byte
    measured = 0

    def interrupted(stepper: Stepper, sample: torch.Tensor) -> float:
        nonlocal measured
        measured += 1
        if measured == 2:
            signal.raise_signal(number)
        return measure(stepper, sample)

    monkeypatch.setattr(Stepper, "bits_per_byte", interrupted)
    out = io.StringIO()
    result = train(resolve(base, None, ["metrics.console=true"]), console=Console(file=out, width=200))
    assert measured == 2
    assert (result.steps, result.stopped) == (12, "steps")
    assert f"{number.name}: the run was over at step 12, saved {result.checkpoint}" in out.getvalue()
    (end,) = rows(base, "end")
    assert end["held_out_bits_per_byte"] == result.bits_per_byte_after


def killed_after(steps: int) -> None:
    """Lets this process die without a word once it has made so many steps."""

    class Killed(Stepper):
        made = 0

        def __call__(self, rows: torch.Tensor, lr: float) -> None:
            super().__call__(rows, lr)
            self.made += 1
            if self.made == steps:
                os.kill(os.getpid(), signal.SIGKILL)

    setup.Stepper = Killed  # type: ignore[misc]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Computes as a fork must, which doesn't have the threads of this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_killed_run_repeats_what_it_lost(base: Config, tmp_path: Path) -> None:
    whole = resolve(base, None, [f"train.run_dir={tmp_path / 'whole'}"])
    train(whole, console=QUIET)

    def act() -> None:
        killed_after(10)
        train(base, console=QUIET)

    with Forked(act) as process:
        assert process.end() == -signal.SIGKILL
    assert [row["step"] for row in rows(base)] == [3, 6, 9]
    found = latest(base.train.run_dir)
    assert found is not None
    assert found.step == 8  # two steps are lost, not more
    train(base, console=QUIET)
    assert curve(base) == curve(whole)


def test_a_finished_run_is_left_as_it_is(base: Config) -> None:
    first = train(base, console=QUIET)
    again = train(base, console=QUIET)
    assert (again.steps, again.stopped, again.tokens_per_s) == (12, "steps", 0.0)
    assert again.bits_per_byte_after == first.bits_per_byte_after
    longer = train(resolve(base, None, ["train.steps=15"]), console=QUIET)
    assert longer.steps == 15


def test_time_limit_and_its_schedule(base: Config) -> None:
    ticks = iter(range(10**6))
    config = resolve(
        base, None, ["train.steps=0", "train.max_seconds=200", "train.log_every=1", "optim.warmup=0"]
    )
    result = train(config, console=QUIET, clock=lambda: float(next(ticks)))
    assert result.stopped == "time"
    assert 5 < result.steps < 200
    rates = [row["lr"] for row in rows(config)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.9 * config.optim.lr
    assert rates[-1] < 0.2 * config.optim.lr
    before = result.steps
    again = train(config, console=QUIET, clock=lambda: float(next(ticks)))
    assert (again.steps, again.stopped) == (before, "time")  # the time of earlier parts counts


def test_a_checkpoint_that_fails_is_a_warning_until_the_end(
    base: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved = checkpoint.save
    attempts: list[float] = []

    def full(run_dir: Path, config: Config, state: State, **rest: Any) -> Path:
        attempts.append(state.numbers["step"])
        if state.numbers["step"] == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return saved(run_dir, config, state, **rest)

    monkeypatch.setattr(checkpoint, "save", full)
    with caplog.at_level(logging.WARNING, logger="bakeoff"):
        result = train(base, console=QUIET)
    assert attempts == [4, 8, 12]
    assert result.steps == 12
    assert "can't save step 4" in caplog.text
    assert "No space left on device" in caplog.text

    def never(*args: object, **kwargs: object) -> Path:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(checkpoint, "save", never)
    with pytest.raises(TrainError, match=r"can't save step 15 .*Read-only file system.*Free space"):
        train(resolve(base, None, ["train.steps=15"]), console=QUIET)


def test_a_full_disk_for_metrics_warns_once(
    base: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Path(base.train.run_dir).mkdir()
    Path(base.train.run_dir, "metrics.jsonl").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING, logger="bakeoff"):
        result = train(base, console=QUIET)
    assert result.steps == 12
    assert sum("No space left" in message for message in caplog.messages) == 1


def test_a_run_folder_that_can_not_be_written_is_refused_first(base: Config, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"can't write to the run folder .*set train.run_dir"):
        train(resolve(base, None, [f"train.run_dir={tmp_path / 'file' / 'run'}"]), console=QUIET)


@pytest.mark.parametrize("muon", ["false", "true"])
def test_a_stopped_deep_nested_run_goes_on_bit_for_bit(
    muon: str, base: Config, stop_after: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = functools.partial(nested.NestedController, wait=0, margin=0.0)
    monkeypatch.setattr(nested, "NestedController", quick)
    base = resolve(base, None, ["optim.name=deep-nested", f"optim.muon={muon}"])
    whole = resolve(base, None, [f"train.run_dir={tmp_path / 'whole'}"])
    train(whole, console=QUIET)
    stop_after(5, signal.SIGTERM)
    assert train(base, console=QUIET).steps == 5
    monkeypatch.undo()
    monkeypatch.setattr(nested, "NestedController", quick)
    torch.manual_seed(999)
    assert train(base, console=QUIET).steps == 12
    assert curve(base) == curve(whole)
    ends = [latest(config.train.run_dir) for config in (base, whole)]
    for name, tensor in ends[0].weights.items():
        assert torch.equal(tensor, ends[1].weights[name]), name
    moments = [load_file(next((end.folder / "moments").glob("*.safetensors"))) for end in ends]
    assert all(torch.equal(tensor, moments[1][name]) for name, tensor in moments[0].items())
    assert not torch.equal(moments[0]["optimizer/controller.multipliers"], torch.ones(3))
    with pytest.raises(ConfigError, match="muon=true belongs to name"):
        resolve(base, None, ["optim.name=adamw", "optim.muon=true"])


def test_a_stopped_run_with_muon_goes_on_bit_for_bit(
    base: Config, stop_after: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = resolve(base, None, ["optim.name=muon", "optim.muon_lr=0.01"])
    whole = resolve(base, None, [f"train.run_dir={tmp_path / 'whole'}"])
    train(whole, console=QUIET)
    stop_after(5, signal.SIGTERM)
    assert train(base, console=QUIET).steps == 5
    monkeypatch.undo()
    torch.manual_seed(999)
    assert train(base, console=QUIET).steps == 12
    assert curve(base) == curve(whole)
    ends = [latest(config.train.run_dir) for config in (base, whole)]
    moments = [load_file(next((end.folder / "moments").glob("*.safetensors"))) for end in ends]
    assert all(torch.equal(tensor, moments[1][name]) for name, tensor in moments[0].items())
    assert {"blocks.0.mlp.down.weight/momentum", "embed.weight/exp_avg"} <= set(moments[0])


def test_resuming_refuses_what_does_not_fit(
    base: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(resolve(base, None, ["train.steps=4"]), console=QUIET)
    with pytest.raises(ConfigError, match="already holds a run: give another"):
        train(resolve(base, None, ["train.resume=never"]), console=QUIET)
    with pytest.raises(CheckpointError, match=r"holds another model \(model.d_model=64, was 32\)"):
        train(resolve(base, None, ["model.d_model=64"]), console=QUIET)
    with pytest.raises(CheckpointError, match=r"another model \(model.kind='byte-spectral', was 'llm-med'\)"):
        train(resolve(base, None, ["model.kind=byte-spectral"]), console=QUIET)
    with pytest.raises(CheckpointError, match="holds no checkpoint: give a run's folder"):
        train(resolve(base, None, [f"train.resume={tmp_path / 'none'}"]), console=QUIET)
    elsewhere = resolve(base, None, [f"train.resume={base.train.run_dir}", f"train.run_dir={tmp_path / 'b'}"])
    with caplog.at_level(logging.WARNING, logger="bakeoff"):
        result = train(resolve(elsewhere, None, ["optim.lr=1e-4", "train.steps=6"]), console=QUIET)
    assert result.steps == 6
    assert "optim.lr=0.0001, was 0.003" in caplog.text
    assert latest(base.train.run_dir).step == 4  # the run it came from is untouched
    over = train(
        resolve(elsewhere, None, ["train.steps=4", f"train.run_dir={tmp_path / 'c'}"]), console=QUIET
    )
    assert latest(tmp_path / "c").folder == over.checkpoint  # whole by itself, with no step of its own


def test_resuming_a_run_that_follows_time_for_another_time_is_warned_of(
    base: Config, caplog: pytest.LogCaptureFixture
) -> None:
    timed = resolve(base, None, ["train.steps=0", "train.max_seconds=0.2"])
    with caplog.at_level(logging.WARNING, logger="bakeoff"):
        train(timed, console=QUIET)
        train(timed, console=QUIET)
        assert "changed settings" not in caplog.text
        train(resolve(timed, None, ["train.max_seconds=0.3"]), console=QUIET)
        assert "losses will differ: train.max_seconds=0.3, was 0.2" in caplog.text
        caplog.clear()
        train(resolve(base, None, ["train.steps=1", "train.max_seconds=9"]), console=QUIET)
    assert "max_seconds" not in caplog.text  # with a number of steps, time only ends a run


def test_going_on_from_an_earlier_checkpoint_sets_the_later_ones_aside(
    base: Config, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = Path(base.train.run_dir)
    train(resolve(base, None, ["train.keep=2"]), console=QUIET)
    assert [folder.name for folder in checkpoint.steps(run_dir)] == ["step-00000008", "step-00000012"]
    back = f"train.resume={run_dir / 'checkpoints' / 'step-00000008'}"
    with caplog.at_level(logging.WARNING, logger="bakeoff"):
        result = train(
            resolve(base, None, [back, "train.steps=10", "train.keep=1", "optim.lr=1e-4"]), console=QUIET
        )
    assert "the checkpoints behind it are now" in caplog.text
    assert "aside-1-step-00000012" in caplog.text
    assert result.checkpoint == checkpoint.steps(run_dir)[-1] == run_dir / "checkpoints" / "step-00000010"
    assert load_run(run_dir)[1].optim.lr == 1e-4
    assert load_run(run_dir / "checkpoints" / "aside-1-step-00000012")[1].optim.lr == 3e-3


def test_a_torn_newest_checkpoint_does_not_push_out_what_comes_after_it(base: Config) -> None:
    run_dir = Path(base.train.run_dir)
    train(base, console=QUIET)
    (checkpoint.steps(run_dir)[-1] / "model.safetensors").write_bytes(b"torn")
    train(resolve(base, None, ["train.steps=10", "train.keep=1"]), console=QUIET)
    assert latest(run_dir).step == 10


def test_runs_that_begin_at_once_have_folders_of_their_own(
    base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "now")
    fresh = resolve(base, None, ["train.run_dir=", "train.steps=1"])
    folders = [train(fresh, console=QUIET).run_dir for _ in range(3)]
    assert [str(folder) for folder in folders] == ["runs/test-now", "runs/test-now-2", "runs/test-now-3"]


def test_going_on_with_other_candidates_is_said(base: Config, caplog: pytest.LogCaptureFixture) -> None:
    train(resolve(base, None, ["train.steps=4"]), console=QUIET)
    with caplog.at_level(logging.WARNING, logger="bakeoff"):
        train(resolve(base, None, ["train.steps=5"]), console=QUIET)
        assert "other candidates" not in caplog.text
        train(resolve(base, None, ["train.steps=6", "select.adamw_=loop"]), console=QUIET)
    assert "select/adamw_=loop, was fused" in caplog.text


def test_out_of_memory_names_the_fix(base: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def starve(self: Stepper, rows: torch.Tensor, lr: float) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Stepper, "__call__", starve)
    with pytest.raises(TrainError, match=r"train.batch_size=8.*set train.accumulate=4 .*Tried to allocate"):
        train(base, console=QUIET)


def test_a_model_beyond_memory_names_the_fix(base: Config) -> None:
    beyond_addresses = 4 * 10**12  # where memory may be overcommitted, too
    with pytest.raises(TrainError, match=r"while the model was built: make model.d_model .*can't allocate"):
        train(resolve(base, None, [f"model.d_model={beyond_addresses}"]), console=QUIET)


def test_other_errors_keep_their_own_words(base: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Stepper, rows: torch.Tensor, lr: float) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(Stepper, "__call__", fail)
    with pytest.raises(RuntimeError, match=r"^something else$"):
        train(base, console=QUIET)


def test_a_gradient_that_stays_not_finite_ends_the_run(base: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "_HOPELESS", 6)
    make = setup.build

    def poisoned(config: ModelConfig) -> torch.nn.Module:
        model = make(config)
        model.embed.weight.register_hook(lambda grad: grad * float("nan"))
        return model

    monkeypatch.setattr(setup, "build", poisoned)
    with pytest.raises(TrainError, match=r"not been finite for 6 steps, at step 6: lower optim.lr"):
        train(base, console=QUIET)
    (first, second) = rows(base)
    assert (first["skipped"], first["loss"]) == (3, None)
    assert second["skipped"] == 6


def test_selection_is_what_the_configuration_says(base: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="runs on CUDA"):
        train(resolve(base, None, ["select.rms_norm=triton"]), console=QUIET)
    with pytest.raises(Unsupported, match="has no candidate 'tritno'"):
        train(resolve(base, None, ["select.rms_norm=tritno"]), console=QUIET)
    with pytest.raises(PolicyError, match="there is no policy 'tabel'"):
        train(resolve(base, None, ["select.policy=tabel"]), console=QUIET)
    budgets: list[float] = []

    def fake(step: Any, budget_s: float, *, announce: Any) -> Any:
        budgets.append(budget_s)
        step()
        return SimpleNamespace(unsettled={})

    monkeypatch.setattr(selection, "tune_together", fake)
    short = resolve(
        base, None, ["train.steps=1", "select.tune=true", "select.budget_s=7", "train.resume=auto"]
    )
    train(short, console=QUIET)
    assert budgets == [7.0]
    for steps, policy in enumerate(("off", "heuristic"), start=2):
        settings = [f"select.policy={policy}", f"train.steps={steps}"]
        result = train(resolve(short, None, settings), console=QUIET)
        model_ops = {e.op: e.choice for e in result.selection if e.op in ("rms_norm", "qkv_rotary")}
        assert model_ops == {"rms_norm": "eager", "qkv_rotary": "eager"}
    assert budgets == [7.0]


def test_tuning_changes_no_loss(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(step: Any, budget_s: float, *, announce: Any) -> Any:
        torch.randn(3)  # contests draw inputs
        step()
        return SimpleNamespace(unsettled={})

    monkeypatch.setattr(selection, "tune_together", fake)
    train(base, console=QUIET)
    tuned = resolve(base, None, ["select.tune=true", f"train.run_dir={tmp_path / 'tuned'}"])
    train(tuned, console=QUIET)
    assert curve(tuned) == curve(base)


class Syncs(TorchDispatchMode):
    """Counts reads of a tensor's value by the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_step_never_reads_a_value_on_the_host(base: Config) -> None:
    stepper = Stepper(setup.build(base.model), base, torch.device("cpu"))
    batch = torch.randint(256, (8, 33), dtype=torch.uint8)
    with Syncs() as syncs:
        for _ in range(3):
            stepper(batch, 1e-3)
        assert syncs.count == 0
        stepper.window.sum().item()
        assert syncs.count == 1


def test_bad_devices_and_data_are_refused_first(base: Config, tmp_path: Path) -> None:
    for name in ("gpu0", "mps", f"cuda:{torch.cuda.device_count()}"):
        with pytest.raises(ConfigError, match=r"train.device=.*use auto"):
            train(resolve(base, None, [f"train.device={name}"]), console=QUIET)
    with pytest.raises(DataError, match="none: No such file"):
        train(resolve(base, None, [f"data.path={tmp_path / 'none'}"]), console=QUIET)
    assert not Path(base.train.run_dir).exists()


def test_a_run_folder_is_named_after_recipe_and_time(
    base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = resolve(base, None, ["train.run_dir=", "train.steps=1"])
    results = [train(config, console=QUIET) for _ in range(2)]
    assert len({result.run_dir for result in results}) == 2
    assert all(str(result.run_dir).startswith("runs/test-") for result in results)


class Full(io.StringIO):
    """A file on a disk that is full for a while."""

    full = True

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_console_that_fails_is_left_alone_for_one_run(
    base: Config, caplog: pytest.LogCaptureFixture
) -> None:
    file = Full()
    console = Console(file=file)
    train(resolve(base, None, ["metrics.console=true"]), console=console)
    assert sum("can't print (No space left" in line for line in caplog.messages) == 1
    file.full = False
    console.print("after")
    assert file.getvalue() == "after\n"
    file.close()
    train(resolve(base, None, ["metrics.console=true", "train.steps=13"]), console=console)
    assert sum("can't print (I/O operation on closed file" in line for line in caplog.messages) == 1


def test_a_console_goes_on_following_standard_output(base: Config) -> None:
    console = Console()
    with contextlib.redirect_stdout(io.StringIO()) as during:
        train(resolve(base, None, ["metrics.console=true"]), console=console)
    with contextlib.redirect_stdout(io.StringIO()) as after:
        console.print("after")
    assert "text.txt, 21,090 bytes" in during.getvalue()
    assert after.getvalue() == "after\n"
