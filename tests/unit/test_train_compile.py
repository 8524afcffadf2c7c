"""train.compile, and the suite that measures whole steps."""

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from bakeoff.apps.bench import step as suite
from bakeoff.apps.cli import main
from bakeoff.apps.train import resolve, train
from bakeoff.apps.train.config import Config, Data, Metrics, Select, Train
from bakeoff.apps.train.metrics import read_metrics
from bakeoff.models.llm_med import Config as ModelConfig
from tests.unit.compiler import needs_compiler


@pytest.fixture
def base(tmp_path: Path) -> Config:
    (tmp_path / "text.txt").write_text("some words to be read, again and again. " * 60)
    return Config(
        model=ModelConfig(d_model=16, layers=1, heads=2, max_seq_len=16),
        data=Data(path=str(tmp_path / "text.txt")),
        train=Train(
            steps=4, batch_size=4, log_every=1, eval_rows=4, checkpoint_every=0, device="cpu",
            run_dir=str(tmp_path / "plain"),
        ),
        select=Select(tune=False),
        metrics=Metrics(console=False),
    )  # fmt: skip


def losses(config: Config) -> tuple[list[float], dict[str, Any]]:
    run_dir = train(config, console=Console(file=io.StringIO())).run_dir
    rows = read_metrics(run_dir / "metrics.jsonl")
    start = next(row for row in rows if row["event"] == "start")
    return [row["loss"] for row in rows if row["event"] == "train"], start


@needs_compiler
def test_a_compiled_run_trains_alike_and_opens_like_any_other(base: Config, tmp_path: Path) -> None:
    plain, _ = losses(base)
    compiled = resolve(base, None, ["train.compile=true", f"train.run_dir={tmp_path / 'compiled'}"])
    found, start = losses(compiled)
    assert found == pytest.approx(plain, rel=1e-5)
    assert {"select/rms_norm", "select/qkv_rotary", "select/adamw_"} <= set(start)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # something was compiled
    on, _ = losses(resolve(compiled, None, ["train.compile=false", "train.steps=5"]))
    assert len(on) == 5


MODES = (suite.PLAIN, "eager", "compiled")


@needs_compiler
def test_the_step_suite_writes_a_row_a_mode(
    base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "_sized", lambda device: [("LLMMed small", base, MODES, 1)])
    heard: list[suite.StepRow] = []
    suite.run_step("cpu", tmp_path / "step.json", hear=heard.append, budget_s=0.0)
    rows = suite.results.read(tmp_path / "step.json").rows
    assert rows == [msgspec.to_builtins(row) for row in heard]
    assert [row["mode"] for row in rows] == ["reduce-overhead", "eager", "compiled"]
    assert rows.pop(0)["loss"] == pytest.approx(rows[0]["loss"], rel=1e-5)
    for row in rows:
        assert row["step_us_p20"] <= row["step_us"] <= row["step_us_p80"]
        assert row["tokens_per_s"] == pytest.approx(4 * 16 / row["step_us"] * 1e6)
        assert (row["batch"], row["seq"], row["precision"]) == (4, 16, "float32")
        assert set(row["choices"]) >= {"select/rms_norm", "select/adamw_"}
    assert rows[0]["steps"] == rows[1]["steps"]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-5)


@needs_compiler
def test_the_bench_command_writes_steps_and_takes_them_up(
    base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "results" / "step.json"
    modes = ["eager"]
    monkeypatch.setattr(suite, "_sized", lambda device: [("LLMMed small", base, tuple(modes), 1)])

    def bench(*more: str) -> list[dict[str, Any]]:
        words = ["bench", "--suite", "step", "--device", "cpu", "--out", str(out), "--budget", "1e-9", *more]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output
        assert f"results: {out}" in done.output
        said = [line.split()[2] for line in done.output.splitlines() if "bytes/s" in line]
        assert said == [mode for mode in modes if mode not in kept]
        return suite.results.read(out).rows

    kept: list[str] = []
    (eager,) = bench()
    fields = {"model", "mode", "batch", "seq", "params", "step_us", "tokens_per_s", "launches", "syncs",
              "peak_bytes", "loss"}  # fmt: skip
    assert fields <= set(eager)
    modes, kept = ["eager", "compiled"], ["eager"]
    assert bench("--resume")[0] == eager
    monkeypatch.setattr(suite, "source_hash", lambda: "another")
    modes, kept = ["eager"], []
    rows = bench("--resume")
    assert [row["mode"] for row in rows] == ["compiled", "eager"]
    assert rows[1]["source_hash"] == "another"
