"""Metrics: rows that survive a kill, a full disk and a resume; sinks on request."""

import errno
import io
import json
import logging
import math
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from rich.console import Console

from bakeoff import hardware
from bakeoff.apps.train import setup, train
from bakeoff.apps.train.config import Config, Data, Metrics, Select, Train
from bakeoff.apps.train.metrics import (
    JsonLines,
    MetricsError,
    MetricsLog,
    Resumed,
    line,
    read_metrics,
    take_back,
)
from bakeoff.models.llm_med import Config as ModelConfig
from bakeoff.models.llm_med import LLMMed

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


ROWS = (
    {"event": "start", "step": 0},
    {"event": "train", "step": 3, "loss": 1.0},
    {"event": "eval", "step": 4, "held_out_bits_per_byte": 2.0},
    {"event": "train", "step": 4, "loss": 2.0},  # after the checkpoint: of the steps since the last row
    {"event": "end", "step": 4},
    {"event": "train", "step": 6, "loss": 3.0},
)


@pytest.mark.parametrize(
    ("resumed", "steps"),
    [
        (Resumed(4, 3), [("start", 0), ("train", 3), ("eval", 4)]),
        (Resumed(4, 3, measures_again=True), [("start", 0), ("train", 3)]),
        (Resumed(9, 9), [("start", 0), ("train", 3), ("eval", 4), ("train", 4), ("train", 6)]),
        (None, []),
    ],
)
def test_a_resume_takes_back_what_comes_again(
    resumed: Resumed | None, steps: list[tuple[str, int]], tmp_path: Path
) -> None:
    """In the file itself, torn lines too, so that any program reads each step once."""
    path = tmp_path / "m.jsonl"
    sink = JsonLines(path)
    for row in ROWS:
        sink.write(row, 0.0)
    with path.open("ab") as file:
        file.write(b'{"event":"tra')
    kept = take_back(path, resumed)
    lines = [json.loads(text) for text in path.read_bytes().splitlines()]
    assert [(row["event"], row["step"]) for row in lines] == steps
    assert kept == lines
    assert [each.name for each in tmp_path.iterdir()] == ["m.jsonl"]


def test_rows_that_can_not_be_taken_back_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    JsonLines(tmp_path / "m.jsonl").write({"event": "train", "step": 1}, 0.0)
    monkeypatch.setattr(os, "fsync", refuse)
    take_back(tmp_path / "m.jsonl", None)
    assert "No space left" in caplog.text
    assert len(read_metrics(tmp_path / "m.jsonl")) == 1


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


def test_a_pipe_gets_lines_and_a_terminal_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
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


@pytest.mark.parametrize(
    ("width", "said"),
    [
        (60, "step 200000  2.885 bits/byte"),
        (80, "step 200000  2.885 bits/byte  12,345 bytes/s"),
        (140, line({**TRAIN, "step": 200_000})),
    ],
)
def test_the_bar_is_one_line_however_narrow_the_terminal(
    width: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, color_system=None)
    with MetricsLog(tmp_path, Config(), console) as metrics:
        metrics.write({**TRAIN, "step": 200_000}, 0.5)
    (shown,) = {
        text.strip()
        for text in re.split(r"[\r\n]|\x1b\[[?0-9;]*[A-Za-z]", out.getvalue())
        if "200000" in text
    }
    assert shown.endswith(said)
    assert len(shown) <= width


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_ends_tensorboard_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    config = Config(metrics=Metrics(tensorboard=True, console=False))
    try:
        with caplog.at_level(logging.WARNING, logger="bakeoff"), MetricsLog(tmp_path, config) as metrics:
            metrics.write(TRAIN, 0.1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
            for _ in range(200):
                metrics.write(TRAIN, 0.5)
                time.sleep(0.005)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert sum("TensorBoard" in message for message in caplog.messages) == 1


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


def test_wandb_that_can_not_start_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("wandb")
    module.Error = type("Error", (Exception,), {})  # type: ignore[attr-defined]

    def refuse(**settings: object) -> None:
        raise module.Error("No API key configured")

    module.init = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    config = Config(metrics=Metrics(wandb=True, console=False))
    with pytest.raises(MetricsError, match=r"\(No API key configured\).*wandb login.*WANDB_MODE=offline"):
        MetricsLog(tmp_path, config)


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


def small(folder: Path, *, steps: int, log_every: int, eval_every: int = 0, **sinks: bool) -> Config:
    """A run of four rows of 16 bytes a step, into these sinks."""
    (folder / "text.txt").write_text("some words to be read, again and again. " * 60)
    return Config(
        model=ModelConfig(d_model=16, layers=1, heads=2, max_seq_len=16),
        data=Data(path=str(folder / "text.txt")),
        train=Train(
            steps=steps, batch_size=4, log_every=log_every, eval_every=eval_every, eval_rows=4, device="cpu",
            checkpoint_every=0, leak_check=False, run_dir=str(folder / "run"),
        ),
        select=Select(tune=False),
        metrics=Metrics(console=False, **sinks),
    )  # fmt: skip


def trained(folder: Path, **sinks: bool) -> Path:
    """A real run of three steps into these sinks."""
    config = small(folder, steps=3, log_every=1, **sinks)
    return train(config, console=Console(file=io.StringIO())).run_dir


def test_speeds_shares_and_waits_are_what_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 2 s, its data 0.5 s more; measuring takes 100 s, which are no training time,
    and before the first step no time of the run."""
    now = 0.0

    def after(seconds: float, kind: type, name: str) -> None:
        act = getattr(kind, name)

        def slow(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            now += seconds
            return act(*args, **kwargs)

        monkeypatch.setattr(kind, name, slow)

    after(2.0, setup.Stepper, "__call__")
    after(0.5, setup.Prefetcher, "get")
    after(100.0, setup.Stepper, "bits_per_byte")
    config = small(tmp_path, steps=6, log_every=2, eval_every=4)
    run_dir = train(config, console=Console(file=io.StringIO()), clock=lambda: now).run_dir
    rows = read_metrics(run_dir / "metrics.jsonl")
    lines = [row for row in rows if row["event"] == "train"]
    assert [row["tokens_per_s"] for row in lines] == [4 * 16 / 2.5] * 3
    assert [row["data_wait_s"] for row in lines] == [1.0] * 3
    assert [row["seconds"] for row in lines] == [5.0, 10.0, 115.0]
    flops = LLMMed(config.model).flops_per_token(16) * 4 * 16 / 2.5
    peak = hardware.matmul_tflops("cpu") * 1e12
    assert [row["share_of_peak"] for row in lines] == pytest.approx([flops / peak] * 3)
    (end,) = (row for row in rows if row["event"] == "end")
    assert end["tokens_per_s"] == 4 * 16 / 2.5


def test_a_run_s_every_number_reaches_the_file_and_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = trained(tmp_path, tensorboard=True)
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert set(EVERYTHING) <= {name for row in rows for name in row}
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert set(EVERYTHING) <= set(events.Tags()["scalars"])
    assert [point.step for point in events.Scalars("loss")] == [1, 2, 3]
    assert [point.step for point in events.Scalars("tokens_per_s")] == [1, 2, 3]
    assert [point.step for point in events.Scalars("held_out_bits_per_byte")] == [0, 3]
    losses = [row["loss"] for row in rows if row["event"] == "train"]
    assert [point.value for point in events.Scalars("loss")] == pytest.approx(losses)
    (text,) = events.Tensors("select/rms_norm/text_summary")
    assert text.tensor_proto.string_val == [b"eager"]


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A server that accepts nothing and stands for the whole network, and an empty home folder."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "XDG_", "NETRC"))]:
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb-own"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("WANDB_BASE_URL", address)
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.setenv(name, address)
        yield server


def wandb_records(path: Path) -> Iterator[Any]:
    """What a run's file holds, as W&B itself reads it to upload it."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    store.open_for_scan(str(path))
    while (data := store.scan_data()) is not None:
        record = Record()
        record.ParseFromString(data)
        yield record


def values(items: Iterable[Any]) -> dict[str, Any]:
    return {".".join([item.key, *item.nested_key]).strip("."): json.loads(item.value_json) for item in items}


def test_a_run_s_every_number_reaches_wandb_offline(tmp_path: Path, nobody: socket.socket) -> None:
    import wandb

    run_dir = trained(tmp_path, wandb=True)
    wandb.teardown()
    (file,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    history: dict[int, dict[str, Any]] = {}
    summary: dict[str, Any] = {}
    config: dict[str, Any] = {}
    for record in wandb_records(file):
        if record.WhichOneof("record_type") == "history":
            found = values(record.history.item)
            history[record.history.step.num] = {k: v for k, v in found.items() if not k.startswith("_")}
        summary |= values(record.summary.update)
        config |= values(record.run.config.update)
    rows: dict[int, dict[str, Any]] = {}
    for row in read_metrics(run_dir / "metrics.jsonl"):
        if row["event"] in ("train", "eval"):
            numbers = {k: v for k, v in row.items() if k not in ("event", "step")}
            rows.setdefault(row["step"], {}).update(numbers)
    assert history == rows
    assert set(EVERYTHING) <= {name for found in history.values() for name in found}
    assert summary["select/rms_norm"] == "eager"
    assert config["model"]["d_model"] == 16
    with pytest.raises(BlockingIOError):  # nobody called
        nobody.accept()
    assert list((tmp_path / "home").rglob("*")) == []
