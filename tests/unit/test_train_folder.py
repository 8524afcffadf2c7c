"""The folder of a run: one process at a time, the same data throughout, checkpoints one can go back to."""

import io
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bakeoff.apps.train import (
    DataError,
    TrainError,
    checkpoint,
    data,
    load_run,
    reporting,
    resolve,
    selection,
    setup,
    train,
)
from bakeoff.apps.train.checkpoint import CheckpointError, latest
from bakeoff.apps.train.config import Config, ConfigError, Data, Metrics, Optim, Select, Train
from bakeoff.apps.train.data import ByteCorpus
from bakeoff.apps.train.lock import FolderGone, FolderInUse, RunLock
from bakeoff.apps.train.metrics import read_metrics
from bakeoff.models.llm_med import Config as ModelConfig
from bakeoff.select import TuneReport

QUIET = Console(file=io.StringIO())


@pytest.fixture
def base(tmp_path: Path) -> Config:
    """A run of 8 short steps with dropout, saved every second."""
    (tmp_path / "text.txt").write_text("".join(f"{n} lazy dogs and {n % 7} foxes\n" for n in range(200)))
    return Config(
        recipe="test",
        model=ModelConfig(d_model=16, layers=1, heads=2, max_seq_len=16, dropout=0.1),
        data=Data(path=str(tmp_path / "text.txt")),
        optim=Optim(lr=3e-3),
        train=Train(
            steps=8, batch_size=4, log_every=1, eval_rows=4, checkpoint_every=2, device="cpu",
            leak_check=False, run_dir=str(tmp_path / "run"),
        ),
        select=Select(tune=False),
        metrics=Metrics(console=False),
    )  # fmt: skip


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """What was warned of."""

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    said: list[str] = []
    handler = Said(logging.WARNING)
    log = logging.getLogger("bakeoff")
    log.addHandler(handler)
    yield said
    log.removeHandler(handler)


def changed(config: Config, *settings: str) -> Config:
    return resolve(config, None, settings)


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    """Does `act` at the beginning of a step, counted over this process."""
    made = 0

    class Acting(setup.Stepper):
        def __call__(self, rows: torch.Tensor, lr: float) -> None:
            nonlocal made
            made += 1
            if made == step:
                act()
            super().__call__(rows, lr)

    monkeypatch.setattr(setup, "Stepper", Acting)


def names(config: Config) -> list[str]:
    return [folder.name for folder in checkpoint.steps(Path(config.train.run_dir))]


# The lock ---------------------------------------------------------------------------------------------------


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[int]:
    """Another process that holds the lock of run/ until it is killed."""
    (tmp_path / "run").mkdir()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        RunLock().take(tmp_path / "run")
        os.write(writer, b"!")
        signal.pause()
    assert os.read(reader, 1) == b"!"
    yield child
    try:
        os.kill(child, signal.SIGKILL)
    except ProcessLookupError:
        return
    os.waitpid(child, 0)


def test_a_second_process_is_refused_and_the_first_is_named(base: Config, holder: int) -> None:
    said = rf"run is in use by process {holder} on {os.uname().nodename}, since 20\d\d-.* train.run_dir"
    with pytest.raises(FolderInUse, match=said):
        train(base, console=QUIET)
    assert [file.name for file in Path(base.train.run_dir).iterdir()] == ["lock"]


def test_what_a_killed_process_left_locked_is_taken_over(
    base: Config, holder: int, warned: list[str]
) -> None:
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    assert train(base, console=QUIET).steps == 8
    assert f"was left locked by process {holder} on" in "".join(warned)
    assert not Path(base.train.run_dir, "lock").exists()
    warned.clear()
    train(changed(base, "train.steps=9"), console=QUIET)
    assert "locked" not in "".join(warned)


def test_a_run_holds_its_lock_to_its_end_and_whoever_resumes_meets_it(
    base: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(changed(base, "train.steps=2"), console=QUIET)
    refused: list[str] = []

    def second() -> None:
        with pytest.raises(FolderInUse) as caught:
            train(base, console=QUIET)
        refused.append(str(caught.value))

    at_step(monkeypatch, 3, second)
    assert train(base, console=QUIET).steps == 8
    assert f"process {os.getpid()}" in refused[0]


def test_a_folder_that_is_deleted_under_a_run_is_named(base: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    for log_every in (1, 1000):
        config = changed(base, f"train.log_every={log_every}")
        with monkeypatch.context() as patch:
            at_step(patch, 3, lambda: shutil.rmtree(base.train.run_dir))
            with pytest.raises(FolderGone, match=f"{base.train.run_dir} was deleted or moved"):
                train(config, console=QUIET)
        assert not Path(base.train.run_dir).exists()


# Data that change -------------------------------------------------------------------------------------------


def test_a_file_that_shrinks_under_a_run_is_an_error(base: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files are mapped into memory, this ends the process."""
    at_step(monkeypatch, 3, lambda: os.truncate(base.data.path, 40))
    with pytest.raises(DataError, match=r"text.txt shrank from \d+ to 40 bytes .*restore it and resume"):
        train(base, console=QUIET)
    assert latest(base.train.run_dir) is not None


def other_bytes(path: str) -> None:
    """As many, written a second later, in one go."""
    time_ns = Path(path).stat().st_mtime_ns + 10**9
    beside = Path(f"{path}.new")
    beside.write_bytes(Path(path).read_bytes().swapcase())
    os.utime(beside, ns=(time_ns, time_ns))
    beside.rename(path)


def test_data_that_change_under_a_run_are_an_error_unless_they_may(
    base: Config, monkeypatch: pytest.MonkeyPatch, warned: list[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(data, "WATCH_S", 0.0)
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda: other_bytes(base.data.path))
        with pytest.raises(DataError, match=r"text.txt changed during the run: .* data.may_change=true"):
            train(base, console=QUIET)
    other_bytes(base.data.path)  # as it was
    at_step(monkeypatch, 3, lambda: other_bytes(base.data.path))
    again = tmp_path / "again"
    lenient = changed(base, "data.may_change=true", f"train.run_dir={again}")
    assert train(lenient, console=QUIET).steps == 8
    assert [text.partition("text.txt ")[2] for text in warned] == [
        "changed during the run, so losses can't be repeated"
    ]
    assert latest(str(again)).progress().data_digest == ByteCorpus.open(base.data.path).digest()


def test_a_file_that_is_touched_or_grows_is_read_as_it_was(
    base: Config, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    def grow() -> None:
        with Path(base.data.path).open("ab") as file:
            file.write(b"more")

    monkeypatch.setattr(data, "WATCH_S", 0.0)
    at_step(monkeypatch, 3, grow)
    assert train(base, console=QUIET).steps == 8
    assert warned == []


def test_data_that_changed_between_runs_are_an_error_unless_they_may(
    base: Config, tmp_path: Path, warned: list[str]
) -> None:
    train(changed(base, "train.steps=2"), console=QUIET)
    os.utime(base.data.path, (1, 1))  # which is no change
    train(changed(base, "train.steps=3"), console=QUIET)
    other_bytes(base.data.path)
    before = {path: path.read_bytes() for path in Path(base.train.run_dir).rglob("*") if path.is_file()}
    for more in ((), (f"train.resume={base.train.run_dir}/checkpoints/step-00000002",)):
        with pytest.raises(
            DataError, match=r"is not what .*step-0000000\d was trained on: .*may_change=true"
        ):
            train(changed(base, *more), console=QUIET)
    assert {path: path.read_bytes() for path in before} == before
    assert not any("the data changed" in text or "bytes" in text for text in warned)
    train(changed(base, "data.may_change=true", "train.steps=4"), console=QUIET)
    assert "the data changed since" in "".join(warned)
    (tmp_path / "other.txt").write_bytes(b"quite another text" * 99)
    warned.clear()
    train(changed(base, f"data.path={tmp_path / 'other.txt'}"), console=QUIET)  # said so
    assert "data.path=" in "".join(warned)


def test_of_large_data_a_digest_reads_little_and_times_of_files_are_compared(
    base: Config, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    monkeypatch.setattr(data, "DIGEST_PIECE", 8)
    monkeypatch.setattr(data, "DIGEST_PIECES", 4)
    corpus = ByteCorpus.open(base.data.path)
    read: list[int] = []
    whole = corpus.read
    monkeypatch.setattr(corpus, "read", lambda start, length: read.append(length) or whole(start, length))
    corpus.digest()
    assert corpus.sampled
    assert sum(read) == 32
    train(changed(base, "train.steps=2"), console=QUIET)
    os.utime(base.data.path, (1, 1))
    train(base, console=QUIET)
    assert "the bytes compared are equal" in "".join(warned)


# Steps that are skipped -------------------------------------------------------------------------------------


def diverging(monkeypatch: pytest.MonkeyPatch, first: int, last: int = 10**6) -> None:
    """From step `first` to `last` of this process gradients are not finite."""
    made = 0

    class Diverging(setup.Stepper):
        def __call__(self, rows: torch.Tensor, lr: float) -> None:
            nonlocal made
            made += 1
            super().__call__(rows, lr)

        def _backward(self, part: torch.Tensor) -> torch.Tensor:
            return super()._backward(part) * (float("nan") if first <= made <= last else 1.0)

    monkeypatch.setattr(setup, "Stepper", Diverging)


def test_a_run_that_diverges_keeps_what_it_can_go_back_to(
    base: Config, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    monkeypatch.setattr(reporting, "_HOPELESS", 6)
    diverging(monkeypatch, first=8)
    long = changed(base, "train.steps=40", "train.keep=2")
    with pytest.raises(TrainError, match=r"not been finite for 6 steps.*train.resume=(\S+)") as caught:
        train(long, console=QUIET)
    assert names(base) == ["step-00000004", "step-00000006"]
    assert "step 8 is not saved: no finite gradient for 1 steps" in "".join(warned)
    monkeypatch.undo()
    back = str(caught.value).rpartition(" ")[2]  # as the message says
    assert train(changed(long, back, "optim.lr=1e-4", "train.steps=9"), console=QUIET).steps == 9


@pytest.mark.parametrize("end", ["steps", "SIGTERM"])
def test_the_last_of_skipped_steps_is_put_aside(
    end: str, base: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverging(monkeypatch, first=7)
    if end == "SIGTERM":
        count = iter(range(10**6))
        read = setup.Stepper.skipped_in_a_row.fget

        def counted(stepper: setup.Stepper) -> int:
            if next(count) == 3:  # saving step 8
                signal.raise_signal(signal.SIGTERM)
            return int(read(stepper))

        monkeypatch.setattr(setup.Stepper, "skipped_in_a_row", property(counted))
    result = train(changed(base, f"train.steps={9 if end == 'steps' else 99}"), console=QUIET)
    assert result.stopped == end
    assert names(base) == ["step-00000004", "step-00000006"]
    assert result.checkpoint.name == "step-00000006"
    (aside,) = Path(base.train.run_dir, "checkpoints").glob("aside-*")
    assert aside.name == "aside-1-step-00000009"
    assert load_run(aside)[1].recipe == "test"


def test_where_nothing_else_was_saved_the_last_checkpoint_is_the_newest(
    base: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverging(monkeypatch, first=8, last=8)
    result = train(changed(base, "train.checkpoint_every=0"), console=QUIET)
    assert names(base) == ["step-00000008"] == [result.checkpoint.name]


def test_after_a_skipped_step_checkpoints_come_again(base: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    diverging(monkeypatch, first=4, last=4)
    result = train(base, console=QUIET)
    assert names(base) == ["step-00000006", "step-00000008"]
    assert result.skipped == 1


# What a resumed run is --------------------------------------------------------------------------------------


def train_steps(config: Config) -> list[int]:
    """Of the file itself, line by line."""
    text = Path(config.train.run_dir, "metrics.jsonl").read_bytes()
    return [row["step"] for row in map(json.loads, text.splitlines()) if row["event"] == "train"]


def killed(config: Config, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """A run that ends at `step` as a killed one does: nothing more is written."""

    def die() -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        at_step(patch, step, die)
        with pytest.raises(SystemExit):
            train(config, console=QUIET)


def test_a_resumed_runs_files_have_each_step_once(base: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = changed(base, "metrics.tensorboard=true", "train.checkpoint_every=3", "train.eval_every=3")
    folder = Path(base.train.run_dir)
    for step in (6, 3):  # at step 6 of the run, then at step 5: two steps, then one, after a checkpoint
        killed(config, monkeypatch, step)
        with (folder / "metrics.jsonl").open("ab") as file:
            file.write(b'{"event":"train","st')
        newest = max((folder / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        newest.write_bytes(newest.read_bytes()[:-7])
    train(config, console=QUIET)
    assert train_steps(base) == list(range(1, 9))
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    rows = read_metrics(folder / "metrics.jsonl")
    for tag, event in (("loss", "train"), ("held_out_bits_per_byte", "eval")):
        points = [(row["step"], row[tag]) for row in rows if row["event"] == event]
        assert [(point.step, pytest.approx(point.value)) for point in events.Scalars(tag)] == points
    assert [row["step"] for row in rows if row["event"] == "eval"] == [0, 3, 6, 8]


def test_a_run_that_begins_anew_in_its_folder_leaves_no_old_rows(
    base: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed(base, "train.checkpoint_every=0")
    killed(config, monkeypatch, 5)
    assert train_steps(base) == [1, 2, 3, 4]
    train(config, console=QUIET)
    assert train_steps(base) == list(range(1, 9))


def test_a_finished_run_says_so_and_does_nothing(base: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(base, console=QUIET)
    before = {path: path.read_bytes() for path in Path(base.train.run_dir).rglob("*") if path.is_file()}
    monkeypatch.delattr(setup, "Stepper")  # no model is even built
    out = io.StringIO()
    other = changed(base, "metrics.console=true", "optim.lr=1e-4", "train.keep=5")
    again = train(other, console=Console(file=out, width=200))
    assert f"{base.train.run_dir} is finished: all its 8 steps are over. To train on, raise" in out.getvalue()
    assert (again.steps, again.stopped, again.checkpoint) == (8, "steps", None)
    assert again.bits_per_byte_after == first.bits_per_byte_after
    assert {path: path.read_bytes() for path in before} == before


def test_a_run_that_was_killed_while_it_was_measured_measures_again(base: Config) -> None:
    train(base, console=QUIET)
    metrics = Path(base.train.run_dir, "metrics.jsonl")
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:-1]))  # without its end
    again = train(base, console=QUIET)
    assert again.steps == 8
    events = [row["event"] for row in read_metrics(metrics)]
    assert (events.count("eval"), events.count("end")) == (2, 1)


def test_dropout_may_change_on_resume(base: Config, warned: list[str]) -> None:
    train(changed(base, "train.steps=4"), console=QUIET)
    train(changed(base, "model.dropout=0"), console=QUIET)
    assert "losses will differ: model.dropout=0.0, was 0.1" in "".join(warned)
    assert load_run(base.train.run_dir)[1].model.dropout == 0


def test_the_best_checkpoint_is_kept_on_wish(base: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = iter([8.0, 4.0, 2.0, 3.0, 2.5, 2.2, 1.9])
    monkeypatch.setattr(setup.Stepper, "bits_per_byte", lambda *_: next(bits))
    best = ["train.keep_best=true", "train.eval_every=2", "train.keep=1"]
    run_dir = Path(base.train.run_dir)
    train(changed(base, *best), console=QUIET)
    assert (latest(run_dir / "best").step, names(base)) == (4, ["step-00000008"])
    assert latest(run_dir / "best").run_dir == run_dir
    train(changed(base, *best, "train.steps=9"), console=QUIET)
    assert latest(run_dir / "best").step == 4  # a resumed run knows how good it was
    train(changed(base, *best, "train.steps=10"), console=QUIET)
    assert latest(run_dir / "best").step == 10
    assert load_run(run_dir / "best")[1].train.keep_best
    with pytest.raises(ConfigError, match=r"keep_best=true needs measurements .*set eval_every"):
        changed(base, "train.keep_best=true")


BEST = ["train.keep_best=true", "train.eval_every=2", "train.checkpoint_every=0"]


def measuring(monkeypatch: pytest.MonkeyPatch, *bits: float) -> None:
    """The held-out bits per byte of the measurements to come."""
    left = iter(bits)
    monkeypatch.setattr(setup.Stepper, "bits_per_byte", lambda *_: next(left))


def test_what_the_last_measurement_found_stays_the_best(
    base: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = Path(base.train.run_dir, "best")
    measuring(monkeypatch, 8.0, 4.0, 3.0, 2.0, 1.0)
    train(changed(base, *BEST), console=QUIET)
    measuring(monkeypatch, 1.5, 1.2)
    train(changed(base, *BEST, "train.steps=12"), console=QUIET)
    assert latest(best).step == 8


def test_a_best_that_could_not_be_written_does_not_count(
    base: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    best, room = Path(base.train.run_dir, "best"), iter([True, False, True, True])
    save = checkpoint.save

    def limited(*args: Any, **how: Any) -> Path:
        if how["place"] == "best" and not next(room):
            raise OSError(28, "No space left on device")
        return save(*args, **how)

    monkeypatch.setattr(checkpoint, "save", limited)
    measuring(monkeypatch, 8.0, 4.0, 2.0, 3.0, 5.0)
    train(changed(base, *BEST), console=QUIET)
    assert latest(best).step == 6


def test_a_best_of_other_rows_is_not_compared_with(base: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    best = Path(base.train.run_dir, "best")
    measuring(monkeypatch, 8.0, 4.0, 3.0, 2.0, 1.0)
    train(changed(base, *BEST), console=QUIET)
    measuring(monkeypatch, 6.0, 7.0)
    train(changed(base, *BEST, "train.eval_rows=2", "train.steps=12"), console=QUIET)
    assert latest(best).step == 10


def test_other_held_out_bytes_are_named_on_resume(base: Config, tmp_path: Path, warned: list[str]) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(12):
        (texts / f"{number}.txt").write_text(f"{number} lazy dogs and foxes\n" * 20)
    base = changed(base, f"data.path={texts}")
    base = changed(base, "train.checkpoint_every=0")
    train(changed(base, "train.steps=2"), console=QUIET)
    whole = ["train.steps=3", "data.whole_files=true", "data.holdout=0.3", "data.validation=0.2"]
    train(changed(base, *whole), console=QUIET)
    said = "".join(warned)
    for change in ("data.validation=0.2, was 0.0", "data.whole_files=True, was False"):
        assert change in said


def test_another_optimizer_is_refused_before_anything_is_written(base: Config) -> None:
    train(changed(base, "train.steps=2"), console=QUIET)
    kept = {file: file.read_bytes() for file in Path(base.train.run_dir).iterdir() if file.is_file()}
    with pytest.raises(CheckpointError, match=r"holds another optimizer \(optim.name='muon', was 'adamw'\)"):
        train(changed(base, "optim.name=muon"), console=QUIET)
    assert {file: file.read_bytes() for file in Path(base.train.run_dir).iterdir() if file.is_file()} == kept


def test_a_disk_without_room_leaves_the_configuration_and_the_table(
    base: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(changed(base, "train.steps=2"), console=QUIET)
    kept = {name: Path(base.train.run_dir, name) for name in ("config.toml", "selection.json")}
    before = {name: path.read_bytes() for name, path in kept.items()}

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"can't write to the run folder .*No space left"):
        train(base, console=QUIET)
    assert {name: path.read_bytes() for name, path in kept.items()} == before


def test_what_a_killed_process_was_replacing_comes_back(base: Config) -> None:
    run_dir = Path(base.train.run_dir)
    train(changed(base, *BEST, "train.steps=4", "train.checkpoint_every=2"), console=QUIET)
    parts = run_dir / "checkpoints"
    (run_dir / "best").rename(parts / ".partial-best-before")
    (parts / "step-00000004").rename(parts / ".partial-step-00000004-before")
    (parts / ".partial-step-00000003").mkdir()
    assert train(changed(base, "train.steps=4"), console=QUIET).steps == 4
    assert latest(run_dir / "best") is not None
    assert names(base) == ["step-00000002", "step-00000004"]
    assert not list(parts.glob(".partial*"))


def test_a_resumed_run_decides_by_its_own_table_and_does_not_tune(
    base: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned: list[float] = []

    def fake(step: Any, budget_s: float, *, announce: Any) -> TuneReport:
        step()
        tuned.append(budget_s)
        return TuneReport((), 0, {"a call": "the budget of 30 s was spent"}, 0.0)

    monkeypatch.setattr(selection, "tune_together", fake)
    config = changed(base, "select.tune=true", "metrics.console=true")
    outs = [io.StringIO() for _ in range(3)]
    train(changed(config, "train.steps=4"), console=Console(file=outs[0], width=200))
    assert tuned == [30.0]
    assert "0 of 9 calls measured, 9 use the default; `bakeoff explain " in outs[0].getvalue()
    result = train(changed(config, "train.steps=6"), console=Console(file=outs[1], width=200))
    assert tuned == [30.0]
    assert "by its own table; nothing is tuned" in outs[1].getvalue()
    assert {each.op: each.choice for each in result.selection}["rms_norm"] == "eager"
    assert selection.policy.store.agreed is None
    train(changed(config, "train.batch_size=2"), console=Console(file=outs[2], width=200))
    assert tuned == [30.0, 30.0]
    assert "other calls than the run's table knows" in outs[2].getvalue()
