"""The suites that ranks run together: rank 0 keeps one file, with what all of them measured."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from bakeoff.apps.bench import context
from bakeoff.apps.bench import ranks as training
from tests.unit.test_results import ContextRow, RanksRow

Ranks = Callable[..., None]


def attended(rank: int, out: Path) -> None:
    told: list[context.ContextRow] = []
    assert context.run_context("cpu", out, text="over parts|torch ring", hear=told.append) == out
    assert bool(told) == (rank == 0)


def test_context_is_compared_with_one_device(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, attended, tmp_path / "context.json")
    rows = [msgspec.convert(row, ContextRow) for row in json.loads((tmp_path / "context.json").read_text())["rows"]]
    assert [row.method for row in rows] == ["alone", "exchange", "ring", "balanced", "ulysses"]
    for row in rows:
        assert row.reason == ""
        assert row.forward_us is not None
        assert row.both_us is not None
        assert row.forward_us > 0
        assert row.both_us > 0
        assert row.ranks == (1 if row.method == "alone" else 2)
        if row.method == "alone":
            continue
        assert row.received_bytes
        assert row.difference is not None
        assert row.difference < 1e-6


def spread(rank: int, out: Path) -> None:
    training._STEPS = 20
    training.run_ranks("cpu", out, text="ddp", budget_s=0.1)


def test_training_over_ranks_is_compared_with_one(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "train.json"
    monkeypatch.setattr(training, "_STEPS", 20)
    training.run_ranks("cpu", file, budget_s=0.1)
    ranks(2, spread, file)
    rows = [msgspec.convert(row, RanksRow) for row in json.loads(file.read_text())["rows"]]
    assert [(row.mode, row.ranks) for row in rows] == [("alone", 1), ("ddp", 2), ("ddp", 2)]
    assert rows[0].largest_difference_from_one_gpu is None
    assert rows[1].largest_difference_from_one_gpu is not None
    assert rows[1].largest_difference_from_one_gpu < 1e-4
    assert rows[2].largest_difference_from_one_gpu is None, "no one trained with as many rows"
