"""bench --suite nested: the summary by hand, and a plan of few steps from beginning to end."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from bakeoff.apps.bench import nested, results
from bakeoff.apps.train import recipe, resolve


def row(optimizer: str, lr: float, bits: float, seed: int = 0, step_us: float = 100.0) -> nested.NestedRow:
    return nested.NestedRow(
        model="m", optimizer=optimizer, lr=lr, seed=seed, steps=1, batch=1, seq=1, bits_per_byte=bits,
        loss=0.0, losses=[], multipliers={}, step_us=step_us, skipped=0, captured=False,
    )  # fmt: skip


def test_the_summary_by_hand() -> None:
    fixed = {1e-3: 2.5, 2e-3: 2.0, 4e-3: 2.1, 0.1 * 2e-3: 3.0, 5.0 * 2e-3: 2.4}
    learned = {2e-3: 2.02, 0.1 * 2e-3: 2.25, 5.0 * 2e-3: 2.5}
    rows = [row("adamw", lr, bits + d, s) for lr, bits in fixed.items() for s, d in ((0, -0.01), (1, 0.01))]
    rows += [row("deep-nested", lr, bits, 0, 103.0) for lr, bits in learned.items()]
    summary = nested.summarised(rows, 2e-3)
    assert summary["best_lr"] == 2e-3
    assert summary["recovered"] == {"x0.1": pytest.approx(0.75), "x5": pytest.approx(-0.25)}
    assert summary["cost_at_best_lr"] == pytest.approx(0.01)
    assert summary["seed_spread"] == pytest.approx(2.01 / 1.99 - 1)
    assert summary["step_time"] == pytest.approx(0.03)


def test_a_plan_is_run_written_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nested, "_TIMED", 1)
    small = [
        "model.d_model=16", "model.layers=1", "model.heads=2", "train.seq_len=16", "train.batch_size=2",
        "train.steps=3", "train.max_seconds=0", "train.eval_rows=2",
    ]  # fmt: skip
    plan = nested.Plan(resolve(recipe("llm-med-tiny"), None, small), (1e-3, 2e-3), (0,))
    out, heard = tmp_path / "nested.json", []
    file = nested.run_nested("cpu", out, plan, hear=heard.append)
    assert [r.optimizer for r in heard] == ["adamw"] * 4 + ["deep-nested"] * 3
    assert set(file.summary) >= {"best_lr", "recovered", "cost_at_best_lr", "step_time"}
    assert len(results.read(out).rows) == 7
    by_key: dict[Any, float] = {(r.optimizer, r.lr): r.bits_per_byte for r in heard}
    best = file.summary["best_lr"]
    assert by_key["deep-nested", best] == by_key["adamw", best], (
        "multipliers are 1 before anything is learned"
    )
    assert all(set(r.multipliers) == {"core", "embed", "scales"} for r in heard[4:])
    again: list[nested.NestedRow] = []
    nested.run_nested("cpu", out, plan, resume=True, hear=again.append)
    assert again == []
    assert msgspec.convert(results.read(out).rows[0], nested.NestedRow) == heard[0]
