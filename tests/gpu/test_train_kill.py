"""Captured runs that are killed or run out of disk go on bit for bit. (Several ranks capture nothing.)"""

import io
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bakeoff.apps.train import resolve, train
from bakeoff.apps.train.checkpoint import latest, steps
from bakeoff.apps.train.config import Config, Data, Metrics, Optim, Select, Train, to_toml
from bakeoff.apps.train.metrics import read_metrics
from bakeoff.models.llm_med import Config as ModelConfig

QUIET = Console(file=io.StringIO())
LIMIT_S = 120


@pytest.fixture
def base(tmp_path: Path) -> Config:
    """A captured run of 60 steps with dropout that saves at every second step."""
    (tmp_path / "text.txt").write_text("".join(f"{n} lazy dogs and {n % 7} foxes\n" for n in range(3000)))
    return Config(
        model=ModelConfig(d_model=64, layers=2, heads=4, max_seq_len=64, dropout=0.1),
        data=Data(path=str(tmp_path / "text.txt")),
        optim=Optim(lr=3e-3),
        train=Train(
            steps=60, batch_size=8, log_every=1, eval_rows=8, checkpoint_every=2, device="cuda", capture="on",
            deterministic=True, leak_check=False, run_dir=str(tmp_path / "run"),
        ),
        select=Select(tune=False),
        metrics=Metrics(console=False),
    )  # fmt: skip


def curve(run_dir: Path) -> list[tuple[Any, ...]]:
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if row["event"] == "train"]
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in rows]


# A process cannot be forked once CUDA runs in it.
PROGRAM = """
    import sys
    from bakeoff.apps.train import Config, resolve, train
    train(resolve(Config(), sys.argv[1], sys.argv[2:]))
"""


@pytest.mark.parametrize("saves", [4, 21])  # eight steps are before and just after the capture of the fourth
def test_a_captured_run_that_is_killed_goes_on_bit_for_bit(base: Config, tmp_path: Path, saves: int) -> None:
    (tmp_path / "run.toml").write_text(to_toml(base))
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path / "run.toml")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + LIMIT_S
    run_dir = Path(base.train.run_dir)
    while not any(int(folder.name[-8:]) >= 2 * saves for folder in steps(run_dir)):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < limit
        time.sleep(0.0005)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    stood = latest(run_dir)
    assert stood is not None
    assert stood.step < 60
    assert train(base, console=QUIET).steps == 60
    whole = resolve(base, None, [f"train.run_dir={tmp_path / 'whole'}"])
    train(whole, console=QUIET)
    assert curve(run_dir) == curve(tmp_path / "whole")
    assert [step for step, *_ in curve(run_dir)] == list(range(1, 61))
    captures = [row for row in read_metrics(run_dir / "metrics.jsonl") if row["event"] == "capture"]
    assert captures
    assert all(row["captured"] for row in captures)
    ends = [latest(folder) for folder in (run_dir, tmp_path / "whole")]
    assert all(torch.equal(tensor, ends[1].weights[name]) for name, tensor in ends[0].weights.items())


@pytest.fixture
def room() -> Iterator[int]:
    """The limit to a file's size, which a test may lower."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield before[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_costs_a_captured_run_its_checkpoints_alone(
    base: Config, tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from bakeoff.apps.train import loop

    whole = resolve(base, None, [f"train.run_dir={tmp_path / 'whole'}"])
    train(whole, console=QUIET)
    save = loop.save

    def tight(context: Any, **rest: Any) -> None:
        full = 10 <= context.progress.step < 40
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000 if full else room, room))
        save(context, **rest)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    monkeypatch.setattr(loop, "save", tight)
    assert train(base, console=QUIET).steps == 60
    assert sum("can't save step" in text for text in caplog.messages) == 15
    assert curve(Path(base.train.run_dir)) == curve(tmp_path / "whole")
