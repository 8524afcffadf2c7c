"""Training on a GPU: steps never wait, replays are the eager steps, runs resume bit for bit."""

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from bakeoff.apps.train import TrainError, resolve, setup, train
from bakeoff.apps.train.checkpoint import latest
from bakeoff.apps.train.config import Config, Data, Metrics, Optim, Select, Train
from bakeoff.apps.train.metrics import read_metrics
from bakeoff.apps.train.saving import optimizer_state
from bakeoff.apps.train.step import Stepper
from bakeoff.causal import CausalityError
from bakeoff.graphs import forbid_sync
from bakeoff.models.llm_med import Config as ModelConfig
from bakeoff.models.llm_med import LLMMed
from bakeoff.select import using

# Read by cuBLAS when it starts; deterministic mode asks for it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

CUDA = torch.device("cuda", 0)
MODEL = ModelConfig(d_model=64, layers=2, heads=4, max_seq_len=64, dropout=0.1)
STEPS = 8


@pytest.fixture
def base(tmp_path: Path) -> Config:
    (tmp_path / "text.txt").write_text("".join(f"{n} lazy dogs and {n % 7} foxes\n" for n in range(3000)))
    return Config(
        model=MODEL,
        data=Data(path=str(tmp_path / "text.txt")),
        optim=Optim(lr=3e-3, warmup=0.0, min_lr=1.0),
        train=Train(
            steps=STEPS, batch_size=8, accumulate=2, log_every=1, eval_rows=8, checkpoint_every=0,
            device="cuda", capture="auto", deterministic=True, run_dir=str(tmp_path / "run"),
        ),
        select=Select(tune=False),
        metrics=Metrics(console=False),
    )  # fmt: skip


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def batches(count: int = STEPS) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(256, (8, 65), dtype=torch.uint8, generator=draw).pin_memory() for _ in range(count)]


def stepper(config: Config) -> Stepper:
    torch.manual_seed(0)
    return Stepper(LLMMed(config.model).to(CUDA).train(), config, CUDA)


def state(of: Stepper) -> list[Tensor]:
    held = [p.detach().clone() for p in of.model.parameters()]
    moments = [value.clone() for value in optimizer_state(of).values()]
    return [*held, *moments, of.window.clone(), torch.cuda.get_rng_state()]


def stepped(config: Config, *, capture: bool) -> tuple[Stepper, list[Tensor]]:
    """(the stepper, its state) after STEPS steps with a rate of each step's own."""
    with using(regime="graph"):
        made = stepper(config)
        if capture:
            made.capture()
        for number, rows in enumerate(batches()):
            made(rows.to(CUDA, non_blocking=True), 1e-3 / (1 + number))
    return made, state(made)


@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_steps_never_wait_for_the_device(base: Config, precision: str) -> None:
    made = stepper(resolve(base, None, [f"train.precision={precision}"]))
    for number, rows in enumerate(batches(10)):
        if number < 4:
            made(rows.to(CUDA, non_blocking=True), 1e-3)
            continue
        with forbid_sync():
            made(rows.to(CUDA, non_blocking=True), 1e-3)
    assert made.read(10)["skipped"] == 0


def test_a_wait_would_be_found(base: Config) -> None:
    made = stepper(base)
    made.model.embed.weight.register_hook(lambda grad: grad * grad.sum().item())
    (rows,) = batches(1)
    with forbid_sync(), pytest.raises(RuntimeError, match="synchronizing"):
        made(rows.to(CUDA, non_blocking=True), 1e-3)


RUNGS = ["model.qk_norm=true", "model.conv=4", "model.ngrams=3", "model.ngram_bits=10"]


@pytest.mark.parametrize("precision", ["bf16", "float32"])
@pytest.mark.parametrize("rungs", [[], RUNGS], ids=["plain", "every rung"])
def test_replays_are_the_eager_steps_bit_for_bit(
    base: Config, precision: str, rungs: list[str], deterministic: None
) -> None:
    config = resolve(base, None, [f"train.precision={precision}", *rungs])
    eager, expected = stepped(config, capture=False)
    captured, found = stepped(config, capture=True)
    assert captured.uncaptured == ""
    assert captured.captured is not None
    assert captured.captured.captured
    assert captured.graph_bytes > 0
    assert len(expected) == len(found)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert eager.read(STEPS) == captured.read(STEPS)


def test_captured_steps_never_wait_either(base: Config) -> None:
    made = stepper(base)
    made.capture()
    for number, rows in enumerate(batches(10)):
        if number < 5:
            made(rows.to(CUDA), 1e-3)
            continue
        with forbid_sync():
            made(rows.to(CUDA, non_blocking=True), 1e-3)
    assert made.captured is not None
    assert made.captured.captured


def test_a_replayed_step_that_is_not_finite_is_skipped_and_counted(base: Config) -> None:
    made = stepper(base)
    made.capture()
    for number, rows in enumerate(batches()):
        held = made.model.embed.weight.detach().clone()
        if number == 6:  # replays are on since step 4: only the data of a replay can change
            with torch.no_grad():
                made.model.embed.weight[0, 0] = float("nan")
            made(rows.to(CUDA), 1e-3)
            with torch.no_grad():
                made.model.embed.weight[0, 0] = held[0, 0]
            assert torch.equal(made.model.embed.weight, held)
        else:
            made(rows.to(CUDA), 1e-3)
            assert not torch.equal(made.model.embed.weight, held)
    found = made.read(STEPS)
    assert (found["skipped"], found["skipped_in_a_row"]) == (1, 0)


def test_bf16_computes_in_bf16_and_keeps_float32_weights(base: Config) -> None:
    losses = []
    for precision in ("bf16", "float32"):
        made, _ = stepped(
            resolve(base, None, [f"train.precision={precision}", "model.dropout=0"]), capture=False
        )
        assert all(p.dtype == torch.float32 for p in made.model.parameters())
        losses.append(made.read(STEPS)["loss"])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.parametrize("capture", [False, True])
def test_compiled_steps_train_alike(base: Config, capture: bool) -> None:
    plain, _ = stepped(resolve(base, None, ["model.dropout=0"]), capture=False)
    torch.compiler.reset()
    made, _ = stepped(resolve(base, None, ["model.dropout=0", "train.compile=true"]), capture=capture)
    assert (made.captured is not None and made.captured.captured) == capture, made.uncaptured
    assert made.read(STEPS)["loss"] == pytest.approx(plain.read(STEPS)["loss"], rel=5e-3)


def run(config: Config) -> tuple[list[dict[str, Any]], str]:
    out = io.StringIO()
    train(config, console=Console(file=out, width=200))
    return read_metrics(Path(config.train.run_dir, "metrics.jsonl")), out.getvalue()


def losses(rows: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in rows if row["event"] == "train"]


def test_a_run_is_captured_where_asked_and_learns_the_same(base: Config, tmp_path: Path) -> None:
    rows, _ = run(base)
    (event,) = [row for row in rows if row["event"] == "capture"]
    assert event["captured"], event["reason"]
    assert [row["graph_bytes"] > 0 for row in rows if row["event"] == "train"] == [False] * 3 + [True] * 5
    plain, said = run(
        resolve(
            base, None, ["train.capture=off", "metrics.console=true", f"train.run_dir={tmp_path / 'plain'}"]
        )
    )
    assert "steps are not captured: train.capture is off" in said
    assert all(row["graph_bytes"] == 0 for row in plain if row["event"] == "train")
    for one, other in zip(losses(rows), losses(plain), strict=True):  # other candidates may have been chosen
        assert one == pytest.approx(other, rel=2e-2)


def test_an_interrupted_captured_run_goes_on_bit_for_bit(base: Config, tmp_path: Path) -> None:
    whole, _ = run(resolve(base, None, [f"train.run_dir={tmp_path / 'whole'}"]))
    run(resolve(base, None, ["train.steps=5"]))
    torch.manual_seed(999)
    torch.cuda.manual_seed(999)
    parts, _ = run(base)
    assert losses(parts) == losses(whole)
    assert len(losses(whole)) == STEPS
    ends = [latest(tmp_path / name) for name in ("whole", "run")]
    assert all(torch.equal(tensor, ends[1].weights[name]) for name, tensor in ends[0].weights.items())


class Waiting(LLMMed):
    """Looks at a value in every pass."""

    def _hidden(self, ids: Tensor, cache: Any) -> Tensor:
        x = super()._hidden(ids, cache)
        return x if x.sum().item() != 0.125 else x * 2


def test_a_model_that_waits_is_trained_uncaptured_and_the_reason_said(
    base: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(setup, "build", Waiting)
    rows, said = run(resolve(base, None, ["metrics.console=true"]))
    assert "steps are not captured: the step waits for the device" in said
    assert "test_train.py" in said
    assert len(losses(rows)) == STEPS
    with pytest.raises(TrainError, match="can't be captured: the step waits"):
        run(resolve(base, None, ["train.capture=on", f"train.run_dir={tmp_path / 'other'}"]))


class Peeking(LLMMed):
    """Position t gets a little of the token at t + 3."""

    def _hidden(self, ids: Tensor, cache: Any) -> Tensor:
        return super()._hidden(ids, cache) + 0.1 * self.embed(ids.roll(-3, 1).long())


def test_a_leak_is_found_on_the_device(base: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "build", Peeking)
    with pytest.raises(CausalityError, match="sees its future, at least 3 ahead"):
        train(base, console=Console(file=io.StringIO()))


def test_a_checkpoint_made_on_the_gpu_opens_on_the_cpu(base: Config) -> None:
    run(resolve(base, None, ["train.steps=4"]))
    rows, _ = run(resolve(base, None, ["train.device=cpu", "train.precision=float32", "train.steps=6"]))
    assert [row["step"] for row in rows if row["event"] == "train"] == [1, 2, 3, 4, 5, 6]
