"""The leak guard in the trainer: a model that sees its future is refused before its first step."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bakeoff.apps.train import leak, setup, train
from bakeoff.apps.train.config import Config, Data, Metrics, Select, Train
from bakeoff.apps.train.metrics import read_metrics
from bakeoff.causal import CausalityError
from bakeoff.errors import PolicyError
from bakeoff.models.llm_med import Config as ModelConfig
from bakeoff.models.llm_med import LLMMed
from bakeoff.select import using

QUIET = Console(file=io.StringIO())
MODEL = ModelConfig(d_model=16, layers=1, heads=2, max_seq_len=32, dropout=0.1)


def config(folder: Path, run: str = "run", **settings: Any) -> Config:
    (folder / "text.txt").write_text("some words to be read, again and again. " * 60)
    train_settings = Train(
        steps=3, batch_size=4, log_every=1, eval_rows=4, device="cpu", run_dir=str(folder / run), **settings
    )
    return Config(
        model=MODEL,
        data=Data(path=str(folder / "text.txt")),
        train=train_settings,
        select=Select(tune=False),
        metrics=Metrics(console=False),
    )


class Peeking(LLMMed):
    """Position t gets a little of the token at t + 3."""

    def _hidden(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        return super()._hidden(ids, cache) + 0.1 * self.embed(ids.roll(-3, 1).long())


def test_a_model_that_sees_the_future_is_refused_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "build", Peeking)
    with pytest.raises(CausalityError, match=r"output \d+ sees its future, at least 3 ahead"):
        train(config(tmp_path), console=QUIET)
    assert not Path(tmp_path, "run", "metrics.jsonl").exists()
    assert train(config(tmp_path, leak_check=False), console=QUIET).steps == 3


@pytest.mark.parametrize("byte", [b" ", b"a", b"d", b".", b"b"])
def test_a_gate_on_a_frequent_next_byte_is_found(byte: bytes, tmp_path: Path) -> None:
    class Gated(LLMMed):
        def _hidden(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
            after = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], dim=1)
            return super()._hidden(ids, cache) + (after == byte[0])[..., None]

    settings = config(tmp_path)
    text = (tmp_path / "text.txt").read_bytes()
    rows = torch.tensor(list(text[: 16 * 33]), dtype=torch.uint8).view(16, 33)
    with pytest.raises(CausalityError):
        leak.check_leaks(Gated(MODEL), rows, settings, torch.device("cpu"))


def test_the_check_changes_no_loss(tmp_path: Path) -> None:
    curves = []
    for name, check in (("with", True), ("without", False)):
        train(config(tmp_path, name, leak_check=check), console=QUIET)
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        curves.append([row["loss"] for row in rows if row["event"] == "train"])
    assert curves[0] == curves[1]
    assert len(curves[0]) == 3


def test_the_run_s_own_precision_is_tried_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(leak, "assert_causal", lambda *_, **__: seen.append(torch.is_autocast_enabled("cpu")))
    model, rows = LLMMed(MODEL), torch.zeros(2, 33, dtype=torch.uint8)
    leak.check_leaks(model, rows, config(tmp_path), torch.device("cpu"))
    assert seen == [False]
    leak.check_leaks(model, rows, config(tmp_path, precision="bf16"), torch.device("cpu"))
    assert seen == [False, False, True]


def test_a_strict_policy_is_for_training_s_shapes(tmp_path: Path) -> None:
    model, rows = LLMMed(MODEL), torch.randint(256, (2, 33), dtype=torch.uint8)
    with using("strict"):
        with pytest.raises(PolicyError):
            model(rows[:, :-1])
        leak.check_leaks(model, rows, config(tmp_path), torch.device("cpu"))
