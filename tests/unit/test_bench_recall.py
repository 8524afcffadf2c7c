"""Suites "recall" and "text": rows, models, what they write; the memories that ours are measured against."""

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from bakeoff.apps.bench import memory_page, tables
from bakeoff.apps.bench.autograd_memory import by_autograd
from bakeoff.apps.bench.gated_delta import GatedDelta, delta_rule, with_gated_delta
from bakeoff.apps.bench.memory_forms import FORMS, built, state_numbers
from bakeoff.apps.bench.recall import Task, accuracy, draw
from bakeoff.apps.cli import main
from bakeoff.models.titan_mac import Config, TitanMAC
from bakeoff.nn import NeuralMemory


def test_a_row_asks_each_key_once_and_only_answers_count() -> None:
    task = Task(pairs=4, noise=10, rows=5)
    ids, targets = draw(task, torch.Generator().manual_seed(0))
    assert ids.shape == targets.shape == (5, 22)
    for row, wanted in zip(ids, targets, strict=True):
        told = dict(zip(row[0:8:2].tolist(), row[1:8:2].tolist(), strict=True))
        assert len(told) == 4
        assert max(told) < 64 <= min(told.values())
        assert max(told.values()) < 128 <= int(row[8:18].min())
        asked = (wanted >= 0).nonzero()[:, 0]
        assert asked.tolist() == [18, 19, 20, 21]
        assert {int(row[t]): int(wanted[t]) for t in asked} == told


def test_other_noise_and_other_seeds_give_other_rows() -> None:
    task = Task(pairs=4, noise=10, rows=5)
    first, _ = draw(task, torch.Generator().manual_seed(0))
    assert not torch.equal(draw(task, torch.Generator().manual_seed(1))[0], first)
    assert draw(task, torch.Generator().manual_seed(0), noise=30)[0].shape == (5, 42)


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


def bench(suite: str, out: Path, *more: str) -> list[dict[str, str]]:
    words = ["bench", "--suite", suite, "--device", "cpu", "--out", str(out), "--seeds", "1", *more]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert f"results: {out}" in done.output
    return tables.read(out)


def test_the_command_writes_a_row_a_model_and_takes_them_up(tmp_path: Path) -> None:
    out, twenty = tmp_path / "recall.csv", ("--steps", "20")
    (row,) = bench("recall", out, "--filter", "constant", *twenty)
    assert (row["form"], row["seed"], row["steps"]) == ("lmm, constant rates", "0", "20")
    assert (row["mode"], row["memory_scan"]) == ("eager", "eager")
    assert 0.0 <= float(row["right_far"]) <= 1.0
    steps, shares = zip(*(point.split(":") for point in row["curve"].split()), strict=True)
    assert [int(step) for step in steps] == list(range(2, 21, 2))
    assert all(0.0 <= float(share) <= 1.0 for share in shares)
    assert bench("recall", out, "--filter", "constant", "--resume", *twenty) == [row]
    (row,) = bench("recall", out, "--filter", "constant", "--resume", "--steps", "10")
    assert row["steps"] == "10"  # shorter runs are others
    both = bench("recall", out, "--filter", "mac, no memory", *twenty)
    assert [(other["form"], other["memory_scan"], other["state"]) for other in both[1:]] == [
        ("mac, no memory", "-", "0")
    ]


def test_text_is_scored_by_bytes_held_out(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} lazy dogs and {n % 7} foxes\n" for n in range(400)))
    words = ("--filter", "mag, no memory", "--data", str(text), "--steps", "24")
    (row,) = bench("text", tmp_path / "text.csv", *words)
    assert (row["form"], row["data"], row["scored"]) == ("mag, no memory", "text.txt", "256")
    assert row["steps"] == row["curve"].split()[-1].split(":")[0] == "24"
    first, last = (float(row["curve"].split()[at].split(":")[1]) for at in (0, -1))
    assert float(row["bits_per_byte"]) == last < first < 8.1
    assert float(row["step_ms"]) > 0.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recall", "rms_norm"], "leave OP, --budget, --regimes and --jobs out"),
        (["recall", "--filter", "mal"], "no form's name contains 'mal'; the forms are mac, mac, no memory"),
        (["recall", "--data", "."], "--data belongs to --suite text"),
        (["ops", "--seeds", "2"], "--seeds belongs to --suite recall and text"),
        (["nested", "--steps", "2"], "--steps belongs to --suite recall and text"),
    ],
)
def test_what_does_not_belong_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out.json")]
    done = CliRunner().invoke(main, ["bench", "--device", "cpu", "--suite", *words, *out])
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_a_model_of_which_every_parameter_learns(form: str) -> None:
    base = Config(d_model=16, layers=1, heads=2, segment=8, persistent=2, chunk=4, max_seq_len=24)
    model = built(base, form, torch.device("cpu"), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    ids = torch.randint(256, (2, 13))
    model(ids, ids)[1].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert (state_numbers(model) == 0) == ("no memory" in form)


def test_gated_delta_has_as_much_state_as_memory_and_momentum() -> None:
    base = Config(d_model=128, layers=1, heads=2, variant="lmm")
    own, other = (state_numbers(model) for model in (TitanMAC(base), with_gated_delta(TitanMAC(base))))
    assert other == 2 * 128 * 256
    assert own == pytest.approx(other, rel=0.02)


def test_the_delta_rule_in_chunks_is_the_rule_token_by_token() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 37, 3, 5, dtype=torch.float64)
    v, gates = torch.randn(2, 37, 3, 7, dtype=torch.float64), torch.randn(2, 2, 37, 3, dtype=torch.float64)
    k = k / k.norm(dim=-1, keepdim=True)
    k[:, 20:30] = k[:, 20:21]  # one key again and again
    keep, rate = gates.sigmoid()
    state, expected = torch.zeros(2, 3, 5, 7, dtype=torch.float64), []
    for t in range(37):
        state = keep[:, t, :, None, None] * state
        error = v[:, t] - (state.mT @ k[:, t, :, :, None])[..., 0]
        state = state + rate[:, t, :, None, None] * k[:, t, :, :, None] * error[:, :, None]
        expected.append((state.mT @ q[:, t, :, :, None])[..., 0])
    torch.testing.assert_close(delta_rule(q, k, v, keep.log(), rate), torch.stack(expected, dim=1))


def test_gated_delta_sees_no_later_token() -> None:
    torch.manual_seed(0)
    layer = GatedDelta(16, 2, 16, 32).double()
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    other = x.clone()
    other[:, 5:] += 1.0
    first, second = layer(x)[0], layer(other)[0]
    assert torch.equal(first[:, :5], second[:, :5])
    assert not torch.allclose(first[:, 5], second[:, 5])


def test_a_page_shows_equal_steps_and_equal_time(tmp_path: Path) -> None:
    """Two seeds of a quick model; one whose step takes twice as long, one that makes few in the time."""
    common = dict.fromkeys(
        ["gpu", "torch", "date", "data", "window", "chunk", "params", "state", "lr", "memory_scan", "mode"],
        "1",
    ) | {"seq": "512", "rows": "4", "steps": "40", "scored": "2048"}
    runs = [
        ("quick", "0", "1.0", "20:5.0 40:4.0"),
        ("quick", "1", "1.0", "20:5.2 40:4.2"),
        ("slow", "0", "2.0", "10:6.0 30:3.0 40:2.0"),
        ("slowest", "0", "9.0", "20:5.0 40:1.0"),
    ]
    rows = [
        common | {"form": form, "seed": seed, "step_ms": ms, "curve": curve, "bits_per_byte": curve[-3:]}
        for form, seed, ms, curve in runs
    ]
    tables.write(tmp_path / "results" / "x" / "text.csv", rows)
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("# A\n\n<!-- text: results/x/text.csv -->\n<!-- end -->\n")
    assert CliRunner().invoke(memory_page.main, ["--check", str(page)]).exit_code == 1
    assert CliRunner().invoke(memory_page.main, [str(page)]).exit_code == 0
    text = page.read_text()
    assert "| quick | 1 | 1 | 4.1000 ± 0.1414 | 4.1000 ± 0.1414 | 1.00 |" in text
    assert "| slow | 1 | 1 | 2.0000 | 4.5000 | 2.00 |" in text  # half way from 6 to 3
    assert "| slowest | 1 | 1 | 1.0000 | - | 9.00 |" in text
    drawn = (page.parent / "images" / "x-text.svg").read_text()
    assert drawn.count("<polyline") == 3
    assert CliRunner().invoke(memory_page.main, ["--check", str(page)]).exit_code == 0


def test_the_committed_page_shows_the_committed_results() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "titan-mac.md"
    done = CliRunner().invoke(memory_page.main, ["--check", str(page)])
    assert done.exit_code == 0, done.output


def test_recall_shows_no_times() -> None:
    """All forms of a seed train side by side, so a step's time there says nothing."""
    root = Path(__file__).resolve().parents[2]
    assert "ms a step" not in memory_page.recall("results/cpu/recall.csv", root)


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
