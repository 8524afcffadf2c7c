"""Metrics: rows that survive a kill, a full disk and a resume; sinks on request."""

import errno
import importlib.util
import io
import logging
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from rich.console import Console

from bakeoff.models.llm_med import Config as ModelConfig
from bakeoff.train import train
from bakeoff.train.config import Config, Data, Metrics, Select, Train
from bakeoff.train.metrics import JsonLines, MetricsError, MetricsLog, line, read_metrics

TRAIN = {
    "event": "train", "step": 20, "loss": 2.0, "bits_per_byte": 2.885, "grad_norm": 0.5, "lr": 1e-3,
    "tokens_per_s": 12345.0, "skipped": 0,
}  # fmt: skip
HELD = {"event": "eval", "step": 20, "held_out_bits_per_byte": 3.25}


def test_rows_are_on_disk_at_once_and_valid_json(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "m.jsonl")
    sink.write({"event": "train", "step": 1, "loss": math.nan}, 0.0)
    sink.write({"event": "train", "step": 2, "loss": 1.5}, 0.0)
    lines = (tmp_path / "m.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(text) for text in lines] == [
        {"event": "train", "step": 1, "loss": None},
        {"event": "train", "step": 2, "loss": 1.5},
    ]


def test_a_line_torn_by_a_kill_harms_no_other(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"event":"train","step":1}\n{"event":"tra')
    JsonLines(path).write({"event": "train", "step": 2}, 0.0)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


def test_a_resume_takes_later_rows_back(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "m.jsonl")
    for row in (
        {"event": "start", "step": 0},
        {"event": "train", "step": 3, "loss": 1.0},
        {"event": "train", "step": 6, "loss": 2.0},
        {"event": "end", "step": 3},
        {"event": "resume", "step": 4},
        {"event": "train", "step": 6, "loss": 3.0},
    ):
        sink.write(row, 0.0)
    kept = [(row["event"], row["step"]) for row in read_metrics(tmp_path / "m.jsonl")]
    assert kept == [("start", 0), ("train", 3), ("resume", 4), ("train", 6)]
    assert read_metrics(tmp_path / "m.jsonl")[-1]["loss"] == 3.0


def test_a_run_that_begins_again_takes_everything_back(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "m.jsonl")
    for row in (
        {"event": "start", "step": 0},
        {"event": "train", "step": 1, "loss": 1.0},
        {"event": "start", "step": 0, "time": 2.0},  # killed before its first checkpoint
        {"event": "train", "step": 1, "loss": 2.0},
        {"event": "resume", "step": 1},
        {"event": "start", "step": 1},
        {"event": "train", "step": 2, "loss": 3.0},
    ):
        sink.write(row, 0.0)
    kept = [(row["event"], row["step"]) for row in read_metrics(tmp_path / "m.jsonl")]
    assert kept == [("start", 0), ("train", 1), ("resume", 1), ("start", 1), ("train", 2)]
    assert read_metrics(tmp_path / "m.jsonl")[1]["loss"] == 2.0


def test_a_full_disk_is_warned_of_once_and_rows_go_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = JsonLines(tmp_path / "m.jsonl")
    sink.write({"step": 1}, 0.0)
    real = Path.open

    class Full(io.RawIOBase):
        """Takes some bytes of a row before there is no room for the rest."""

        def __init__(self, path: Path) -> None:
            self.file = real(path, "ab", buffering=0)

        def write(self, data: Any) -> int:
            return self.file.write(data[:4])

        def close(self) -> None:
            self.file.close()

    with caplog.at_level(logging.WARNING, logger="bakeoff"):
        monkeypatch.setattr(Path, "open", lambda path, *a, **k: Full(path))
        sink.write({"step": 2}, 0.0)

        def refuse(*args: object, **kwargs: object) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(Path, "open", refuse)
        sink.write({"step": 3}, 0.0)
        monkeypatch.undo()
        sink.write({"step": 4}, 0.0)
    assert len(caplog.messages) == 1
    assert "the disk is full" in caplog.text
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == [1, 4]


def test_lines_for_people() -> None:
    assert line(TRAIN) == "step     20  2.885 bits/byte  |grad| 0.50  lr 1.00e-03  12,345 bytes/s"
    assert line({**TRAIN, "skipped": 2}).endswith("2 skipped")
    assert line(HELD) == "step     20  held-out 3.250 bits/byte"


def test_a_pipe_gets_lines_and_a_terminal_a_bar(tmp_path: Path) -> None:
    for terminal in (False, True):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=120)
        with MetricsLog(tmp_path, Config(), console) as metrics:
            metrics.write({"event": "start", "step": 0})
            metrics.write(TRAIN, 0.5)
            metrics.write(HELD, 0.5)
        text = out.getvalue()
        assert "held-out 3.250 bits/byte" in text
        assert ("50%" in text) == terminal
        assert ("\x1b[" in text) == terminal
        assert terminal or text.splitlines() == [line(TRAIN), line(HELD)]
    with MetricsLog(tmp_path, Config(metrics=Metrics(console=False)), Console(file=out)) as metrics:
        assert len(metrics.sinks) == 1


def test_tensorboard_holds_the_numbers_and_the_choices(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = Config(metrics=Metrics(tensorboard=True, console=False))
    with MetricsLog(tmp_path, config) as metrics:
        metrics.write({"event": "start", "step": 0, "select/rms_norm": "triton"})
        metrics.write(TRAIN, 0.5)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (point,) = events.Scalars("bits_per_byte")
    assert (point.step, point.value) == (20, pytest.approx(2.885))
    (text,) = events.Tensors("select/rms_norm/text_summary")
    assert text.tensor_proto.string_val == [b"triton"]


class FakeRun:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.logged, self.summary, self.finished = settings, [], {}, False

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_config_rows_and_the_choices_as_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[FakeRun] = []
    module = ModuleType("wandb")
    module.init = lambda **settings: runs.append(FakeRun(settings)) or runs[-1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    config = Config(metrics=Metrics(wandb=True, wandb_project="p", console=False))
    with MetricsLog(tmp_path, config) as metrics:
        metrics.write({"event": "start", "step": 0, "select/rms_norm": "triton", "parameters": 5})
        metrics.write(TRAIN, 0.5)
    (run,) = runs
    assert run.settings["project"] == "p"
    assert run.settings["name"] == tmp_path.name
    assert run.settings["config"]["model"]["d_model"] == 384
    assert run.summary["select/rms_norm"] == "triton"
    ((step, values),) = run.logged
    assert step == 20
    assert values["bits_per_byte"] == 2.885
    assert run.finished


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_names_its_extra(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    config = Config(metrics=Metrics(**{name: True}, console=False))
    with pytest.raises(MetricsError, match=rf"metrics.{name}=true needs .*pip install 'bakeoff\[{name}\]'"):
        MetricsLog(tmp_path, config)


EVERYTHING = (
    "loss", "bits_per_byte", "grad_norm", "lr", "tokens_per_s", "share_of_peak", "peak_bytes", "graph_bytes",
    "data_wait_s", "skipped", "seconds", "held_out_bits_per_byte",
)  # fmt: skip


def trained(folder: Path, **sinks: bool) -> Path:
    """A real run of three steps into these sinks."""
    (folder / "text.txt").write_text("some words to be read, again and again. " * 60)
    config = Config(
        model=ModelConfig(d_model=16, layers=1, heads=2, max_seq_len=16),
        data=Data(path=str(folder / "text.txt")),
        train=Train(
            steps=3, batch_size=4, log_every=1, eval_rows=4, device="cpu", leak_check=False,
            run_dir=str(folder / "run"),
        ),
        select=Select(tune=False),
        metrics=Metrics(console=False, **sinks),
    )  # fmt: skip
    return train(config, console=Console(file=io.StringIO())).run_dir


def test_a_run_s_every_number_reaches_the_file_and_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = trained(tmp_path, tensorboard=True)
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert set(EVERYTHING) <= {name for row in rows for name in row}
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert set(EVERYTHING) <= set(events.Tags()["scalars"])
    assert [point.step for point in events.Scalars("loss")] == [1, 2, 3]
    losses = [row["loss"] for row in rows if row["event"] == "train"]
    assert [point.value for point in events.Scalars("loss")] == pytest.approx(losses)
    (text,) = events.Tensors("select/rms_norm/text_summary")
    assert text.tensor_proto.string_val == [b"eager"]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb: pip install wandb")
def test_a_run_s_every_number_reaches_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_dir = trained(tmp_path, wandb=True)
    wandb.teardown()
    (file,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    written = file.read_bytes()  # records of names and JSON values, not compressed
    for name in (*EVERYTHING, "select/rms_norm", "d_model"):
        assert name.encode() in written, name
    rows = read_metrics(run_dir / "metrics.jsonl")
    for loss in [row["loss"] for row in rows if row["event"] == "train"]:
        assert repr(loss).encode() in written
    assert b'"eager"' in written
