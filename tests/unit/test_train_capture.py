"""What the trainer does about whole-step capture; the graph is a stand-in, the gpu lane has the real one."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from bakeoff.apps.train import ConfigError, TrainError, device, resolve, setup, step, train
from bakeoff.apps.train.config import Config, Data, Optim, Parallel, Select, Train
from bakeoff.apps.train.metrics import read_metrics
from bakeoff.graphs import NotCapturable
from bakeoff.models import llm_med, longnet
from bakeoff.models.llm_med import Config as ModelConfig
from bakeoff.select.choose.policy import current


@pytest.fixture
def base(tmp_path: Path) -> Config:
    (tmp_path / "text.txt").write_text("some words to be read, again and again. " * 60)
    return Config(
        model=ModelConfig(d_model=16, layers=1, heads=2, max_seq_len=16, dropout=0.1),
        data=Data(path=str(tmp_path / "text.txt")),
        train=Train(
            steps=6, batch_size=4, log_every=1, eval_rows=4, checkpoint_every=0, device="cpu",
            leak_check=False, run_dir=str(tmp_path / "run"),
        ),
        select=Select(tune=False),
    )  # fmt: skip


class StandIn:
    """A step that "captures" at its fourth call, unless `refusal` comes first."""

    bytes = 4096

    def __init__(self, made: Callable[[Tensor], None], refusal: Exception | None, at: int) -> None:
        self.step, self.refusal, self.at, self.calls = made, refusal, at, 0
        self.regimes: list[str] = []

    @property
    def captured(self) -> bool:
        return self.calls > 3

    def __call__(self, rows: Tensor) -> None:
        self.calls += 1
        self.regimes.append(current().regime)
        if self.refusal is not None and self.calls == self.at:
            if getattr(self.refusal, "ran", False):
                self.step(rows)
            raise self.refusal
        self.step(rows)

    def reset(self) -> None:
        """There is no graph."""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[StandIn]]:
    def arrange(refusal: Exception | None = None, at: int = 0) -> list[StandIn]:
        made: list[StandIn] = []

        def capture(function: Callable[[Tensor], None], warmup: int) -> StandIn:
            assert warmup == 3
            made.append(StandIn(function, refusal, at))
            return made[-1]

        monkeypatch.setattr(step, "capture_step", capture)
        monkeypatch.setattr(device, "why_no_graph", lambda *_: "")
        return made

    return arrange


def run(config: Config) -> tuple[list[dict[str, Any]], str]:
    out = io.StringIO()
    train(config, console=Console(file=out, width=200))
    return read_metrics(Path(config.train.run_dir, "metrics.jsonl")), out.getvalue()


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in rows if row["event"] == "train"]


def test_a_captured_run_says_so_and_what_it_holds(base: Config, stand_in: Any, tmp_path: Path) -> None:
    plain, _ = run(resolve(base, None, [f"train.run_dir={tmp_path / 'plain'}"]))
    made = stand_in()
    rows, said = run(base)
    assert "steps are replayed from one CUDA graph, which holds 4,096 bytes" in said
    assert made[0].calls == 6
    assert set(made[0].regimes) == {"graph"}
    assert losses(rows) == losses(plain)
    (event,) = [row for row in rows if row["event"] == "capture"]
    assert (event["step"], event["captured"], event["reason"]) == (4, True, "")
    assert [row["graph_bytes"] for row in rows if row["event"] == "train"] == [4096] * 6


@pytest.mark.parametrize("ran", [True, False])
def test_a_step_that_can_not_be_captured_goes_on_without_and_says_why(
    ran: bool, base: Config, stand_in: Any, tmp_path: Path
) -> None:
    plain, _ = run(resolve(base, None, [f"train.run_dir={tmp_path / 'plain'}"]))
    made = stand_in(NotCapturable("the step waits for the device", ran=ran), at=3)
    rows, said = run(base)
    assert made[0].calls == 3
    assert losses(rows) == losses(plain)  # no step is lost, none made twice
    assert "steps are not captured: the step waits for the device" in said
    (event,) = [row for row in rows if row["event"] == "capture"]
    assert (event["step"], event["captured"], event["reason"]) == (3, False, "the step waits for the device")
    assert [row["graph_bytes"] for row in rows if row["event"] == "train"][-1] == 0


def test_after_that_the_host_s_time_counts(
    base: Config, stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(NotCapturable("no", ran=True), at=3)
    regimes = []

    class Noted(setup.Stepper):
        def _backward(self, part: Tensor) -> Tensor:
            regimes.append(current().regime)
            return super()._backward(part)

    monkeypatch.setattr(setup, "Stepper", Noted)
    run(base)
    assert regimes[0] == "graph"
    assert regimes[-3:] == ["eager"] * 3


def test_capture_on_means_or_else(base: Config, stand_in: Any) -> None:
    with pytest.raises(ConfigError, match=r"train.capture='on' can't be had, only a CUDA device has graphs"):
        train(resolve(base, None, ["train.capture=on"]))
    stand_in(NotCapturable("the step waits for the device", ran=True), at=3)
    with pytest.raises(TrainError, match=r"can't be captured: the step waits for the device\. Set"):
        run(resolve(base, None, ["train.capture=on"]))


def test_which_ways_of_sharing_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, shared = torch.device("cuda"), Config(parallel=Parallel(cp=2))
    assert [device.why_no_graph(Config(), cuda, mode) for mode in ("none", "ddp", "fsdp")] == ["", "", ""]
    assert "parts of rows" in device.why_no_graph(shared, cuda, "ddp")
    muon = Config(optim=Optim(name="muon", share=True))
    assert "Muon's matrices" in device.why_no_graph(muon, cuda, "ddp")
    for optim in (Optim(name="muon"), Optim(name="deep-nested", muon=True)):
        assert "Muon's matrices" in device.why_no_graph(Config(optim=optim), cuda, "fsdp")
        assert device.why_no_graph(Config(optim=optim), cuda, "ddp") == ""
    assert device.why_no_graph(muon, cuda) == ""
    assert device.why_no_graph(Config(train=Train(capture="off")), cuda) == "train.capture is off"
    monkeypatch.setattr(device, "KEEPS_PINNED", False)
    assert "from 2.11 on" in device.why_no_graph(Config(), cuda, "fsdp")
    assert device.why_no_graph(Config(), cuda, "ddp") == ""
    forced = Config(train=Train(capture="on"))
    with pytest.raises(ConfigError, match=r"train.capture='on' can't be had, shards of torch 2"):
        device.why_no_graph(forced, cuda, "fsdp")


def test_without_cuda_nothing_is_captured_and_nothing_said(base: Config) -> None:
    rows, said = run(resolve(base, None, ["train.capture=auto"]))
    assert "captur" not in said
    assert all(row["event"] != "capture" for row in rows)


def test_rows_are_shared_where_model_ranks_and_lengths_allow_it() -> None:
    def config(model: Any, cp: int, **changes: Any) -> Config:
        return Config(model=model, train=Train(batch_size=8, **changes), parallel=Parallel(cp=cp))

    model = longnet.Config.sizes("tiny")
    assert device.spread_mode(config(model, 2), 2) == "ddp"
    assert device.spread_mode(config(model, 4), 8) == "ddp"
    with pytest.raises(ConfigError, match=r"cp=2 ranks share a row, and 1 were launched"):
        device.spread_mode(config(model, 2), 1)
    with pytest.raises(ConfigError, match=r"cp=2 is for longnet"):
        device.spread_mode(config(llm_med.Config.sizes("tiny"), 2), 2)
    with pytest.raises(ConfigError, match=r"can't share rows of 255 bytes in equal parts"):
        device.spread_mode(config(model, 2, seq_len=255), 2)
    with pytest.raises(ConfigError, match=r"by 4 groups of 2 ranks of train.accumulate=4 parts"):
        device.spread_mode(config(model, 2, accumulate=4), 8)
