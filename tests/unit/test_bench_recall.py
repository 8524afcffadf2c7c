"""Suite "recall": its rows, what it writes; the memory by autograd that steps are measured against."""

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from bakeoff.apps.bench import results
from bakeoff.apps.bench.autograd_memory import by_autograd
from bakeoff.apps.bench.recall import FORMS, Task, accuracy, draw
from bakeoff.apps.cli import main
from bakeoff.models.titan_mac import Config, TitanMAC
from bakeoff.nn import NeuralMemory


def test_a_row_asks_each_key_once_and_only_answers_count() -> None:
    task = Task(pairs=4, noise=10, rows=5)
    ids, targets = draw(task, torch.Generator().manual_seed(0))
    assert ids.shape == targets.shape == (5, task.length - 1)
    for row, wanted in zip(ids, targets, strict=True):
        told = dict(zip(row[0:8:2].tolist(), row[1:8:2].tolist(), strict=True))
        assert len(told) == 4
        assert max(told) < 64 <= min(told.values())
        assert max(told.values()) < 128 <= int(row[8:18].min())
        asked = (wanted >= 0).nonzero()[:, 0]
        assert asked.tolist() == [18, 20, 22, 24]
        assert {int(row[t]): int(wanted[t]) for t in asked} == told
        assert all(int(row[t + 1]) == int(wanted[t]) for t in asked[:-1])


def test_other_noise_and_other_seeds_give_other_rows() -> None:
    task = Task(pairs=4, noise=10, rows=5)
    first, _ = draw(task, torch.Generator().manual_seed(0))
    assert not torch.equal(draw(task, torch.Generator().manual_seed(1))[0], first)
    assert draw(task, torch.Generator().manual_seed(0), noise=30)[0].shape == (5, 45)


def test_accuracy_is_the_share_of_right_answers() -> None:
    task = Task(pairs=4, noise=10, rows=16)
    model = TitanMAC(Config.sizes("tiny", layers=1))
    assert accuracy(model, task, 10) < 0.2

    class Told(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.any = torch.nn.Parameter(torch.zeros(()))

        def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, None]:
            answers = torch.zeros(*ids.shape, 256)
            for row in range(len(ids)):
                told = dict(zip(ids[row, 0:8:2].tolist(), ids[row, 1:8:2].tolist(), strict=True))
                for t, key in enumerate(ids[row].tolist()):
                    answers[row, t, told.get(key, 0)] = 1.0
            return answers, None

    assert accuracy(Told(), task, 10) == 1.0


def test_the_command_writes_a_row_a_form_and_takes_them_up(tmp_path: Path) -> None:
    out = tmp_path / "recall.json"

    def bench(*more: str) -> list[dict[str, Any]]:
        words = ["bench", "--suite", "recall", "--device", "cpu", "--out", str(out), *more]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output
        assert f"results: {out}" in done.output
        return results.read(out).rows

    (row,) = bench("--filter", "lmm")
    assert (row["form"], row["model"], row["steps"], row["mode"]) == ("lmm", "TitanMAC lmm", 20, "eager")
    assert set(row["accuracy"]) == {"192", "448", "960"}
    assert [step for step, _ in row["curve"]] == list(range(2, 21, 2))
    assert bench("--filter", "lmm", "--resume") == [row]
    forms = [other["form"] for other in bench("--filter", "without")]
    assert forms == ["lmm", "mac without memory"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rms_norm"], "leave OP, --budget, --regimes and --jobs out"),
        (["--filter", "mal"], "no form's name contains 'mal'; the forms are mac, mac without memory"),
    ],
)
def test_what_does_not_belong_is_refused(words: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["bench", "--suite", "recall", "--device", "cpu", *words])
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())


def test_every_form_is_a_model() -> None:
    for changes in FORMS.values():
        Config.sizes("tiny", **changes)


@pytest.mark.parametrize("read", ["after", "before", "chunk"])
def test_the_memory_by_autograd_is_the_same_memory(read: Any) -> None:
    torch.manual_seed(0)
    memory = NeuralMemory(16, heads=2, chunk=4, read=read, max_lr=2.0).double()
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    found = []
    for module in (memory, by_autograd(memory)):
        y, state = module(x)
        gradients = torch.autograd.grad(y.square().sin().sum(), list(memory.parameters()))
        found.append((y, state.tensors(), gradients))
    torch.testing.assert_close(*found)
    with pytest.raises(ValueError, match="begins at the start of a chunk"):
        memory(x, state)
