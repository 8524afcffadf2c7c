"""A rank that dies, hangs or fails ends the job within seconds, and the others say which one it was."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bakeoff.errors import BakeoffError
from bakeoff.models.llm_med import Config as ModelConfig
from bakeoff.models.longnet import Config as LongNetConfig
from bakeoff.apps.train import resolve, setup, train
from bakeoff.apps.train.config import Config, Data, Metrics, Parallel, Select, Train, to_toml
from bakeoff.apps.train.metrics import read_metrics
from tests.unit.forked import Forked, Started

DEAD_AFTER_S = 3
SOON_S = 60  # a few seconds on a busy machine; the time limit of collectives is 10 minutes
LIMIT_S = 120


def doomed(settings: Path, port: int, rank: int, world: int, who: int, what: str, when: int) -> None:
    """Trains as one rank; at the step `when`, `what` befalls rank `who`: an error, or a signal."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in {**place, "MASTER_PORT": port}.items()})

    class Doomed(setup.Stepper):
        made = 0

        def __call__(self, *given: Any) -> None:
            self.made += 1
            if self.made == when and rank == who:
                print("now", flush=True)
                if what == "raises":
                    raise ValueError("rank of bad luck")
                os.kill(os.getpid(), getattr(signal, what))
            super().__call__(*given)

    setup.Stepper = Doomed  # type: ignore[misc]
    try:
        train(resolve(Config(), settings))
    except BakeoffError as error:
        sys.exit(f"{type(error).__name__}: {error}")


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("a text that is read again and again, by several ranks. " * 100)
    config = Config(
        model=ModelConfig(d_model=16, layers=1, heads=2, max_seq_len=16),
        data=Data(path=str(tmp_path / "text.txt")),
        train=Train(
            steps=10_000, batch_size=12, log_every=1000, eval_rows=3, checkpoint_every=0, device="cpu",
            leak_check=False, run_dir=str(tmp_path / "run"),
        ),
        parallel=Parallel(dead_after_s=DEAD_AFTER_S),
        select=Select(tune=False),
        metrics=Metrics(console=False),
    )  # fmt: skip
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config))
    return file


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@pytest.fixture
def in_parts(settings: Path) -> Path:
    """The same of a model whose rows two ranks share."""
    model = LongNetConfig(d_model=16, layers=1, heads=2, max_seq_len=16, segments=(4, 16), rates=(1, 2))
    parallel = Parallel(dead_after_s=DEAD_AFTER_S, cp=2)
    settings.write_text(
        to_toml(msgspec.structs.replace(resolve(Config(), settings), model=model, parallel=parallel))
    )
    return settings


def ended(
    settings: Path, world: int, who: int, what: str, when: int = 5, *, cuda: bool = False
) -> tuple[list[str], float]:
    """What the surviving ranks said once `what` befell rank `who` at the step `when`, and how long after that
    the last one ended. With `cuda` they are new processes, as forks can't use it."""
    port = free_port()
    with contextlib.ExitStack() as all_ranks:
        ranks = list[Forked]()
        for rank in range(world):
            given, out = (port, rank, world, who, what, when), settings.parent / f"said by {rank}"
            call = f"from {__name__} import doomed, Path; doomed(Path({str(settings)!r}), *{given})"
            begun = Started(call, out) if cuda else Forked(partial(doomed, settings, *given), out)
            ranks.append(all_ranks.enter_context(begun))
        ranks[who].wait_for(lambda: "now" in ranks[who].said().splitlines())
        since = time.monotonic()
        others = [ranks[rank] for rank in range(world) if rank != who]
        for other in others:
            assert other.end() == 1, other.said()
        return [other.said() for other in others], time.monotonic() - since


@pytest.mark.parametrize(("world", "who"), [pytest.param(3, 1, marks=pytest.mark.exhaustive), (2, 0)])
def test_a_killed_rank_is_named_within_seconds(settings: Path, world: int, who: int) -> None:
    said, seconds = ended(settings, world, who, "SIGKILL")
    assert seconds < SOON_S
    for text in said:
        assert f"rank {who}" in text.splitlines()[-1]
        assert "is dead: no sign of life for 3 s" in text or "can't be reached" in text
        assert "it goes on from its last checkpoint" in text


def test_a_killed_rank_is_named_by_the_one_that_shares_its_rows(in_parts: Path) -> None:
    (text,), seconds = ended(in_parts, 2, 1, "SIGKILL")
    assert seconds < SOON_S
    assert "rank 1 is dead: no sign of life for 3 s" in text.splitlines()[-1]
    assert "it goes on from its last checkpoint" in text


def test_a_rank_that_hangs_is_named_within_seconds(settings: Path) -> None:
    """Its connections stay open, so no collective breaks by itself."""
    (text,), seconds = ended(settings, 2, 1, "SIGSTOP")
    assert seconds < SOON_S
    assert "rank 1 is dead: no sign of life for 3 s, last" in text
    assert "it goes on from its last checkpoint" in text


def test_a_rank_that_fails_is_quoted(settings: Path) -> None:
    (text,), seconds = ended(settings, 2, 1, "raises")
    assert seconds < SOON_S
    assert "rank 1 failed with ValueError: rank of bad luck" in text


@pytest.fixture
def _place_for_its_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torchrun's, which it leaves there."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


# Finds a port of its own, at an address that needs no name service.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
            "--nproc-per-node", "2"]  # fmt: skip


@pytest.mark.usefixtures("_place_for_its_logs")
def test_torchrun_from_the_command_line(settings: Path, tmp_path: Path) -> None:
    command = [*TORCHRUN, "-m", "bakeoff", "train", "--config", str(settings), "train.steps=4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    events = [row["event"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert events.count("start") == events.count("end") == 1


TWICE = """
    import torch
    from bakeoff.parallel import joined
    for number in range(3):
        with joined(torch.device("cpu")) as world:
            assert world.decide(lambda: number) == number
            assert world.gather(world.rank) == [0, 1]
"""


@pytest.mark.usefixtures("_place_for_its_logs")
def test_a_process_may_join_again_and_again(tmp_path: Path) -> None:
    """Two runs in one process; a group that is taken down and set up again meets its own old addresses."""
    program = tmp_path / "twice.py"
    program.write_text(textwrap.dedent(TWICE))
    done = subprocess.run([*TORCHRUN, str(program)], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
