"""The comparison of orders: its images, that its models can't see across segments, and its page."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bakeoff.apps.bench import orders, orders_page, tables
from bakeoff.apps.bench.orders import ORDERS, Models, Settings, images
from bakeoff.token_order import token_order

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SMALL = Settings(side=8, width=16, heads=2, layers=1, batch=2, seeds=2, steps=3, test_batches=1)


@pytest.mark.parametrize("task", ["nearest", "row"])
def test_labels_are_the_colours_of_the_nearest_points(task: str) -> None:
    settings = Settings(side=16, batch=3, seeds=1)
    cells, labels = images(task, settings, 5, CPU)
    side = settings.side
    for image, found in zip(cells[0], labels[0], strict=True):
        points = [(p // side, p % side, int(image[p]) - 1) for p in range(side**2) if image[p]]
        for cell, label in enumerate(found.tolist()):
            y, x = cell // side, cell % side
            away = [
                ((y - a) ** 2 + (x - b) ** 2, colour)
                for a, b, colour in points
                if task == "nearest" or a == y
            ]
            colours = {colour for far, colour in away if far == min(away)[0]}
            assert label == (colours.pop() if len(colours) == 1 else -100)


def test_all_seeds_and_steps_see_other_images_and_all_orders_the_same() -> None:
    one, two = (images("nearest", SMALL, seed, CPU)[0] for seed in (1, 2))
    assert not torch.equal(one, two)
    assert not torch.equal(one[0], one[1])
    assert torch.equal(one, images("nearest", SMALL, 1, CPU)[0])


@pytest.mark.parametrize("name", ["row", "hilbert"])
def test_a_segment_is_all_a_token_sees(name: str) -> None:
    """By which scores a changed colour changes."""
    order = None if name == "row" else token_order(name, (8, 8))
    torch.manual_seed(1)
    models = Models(SMALL, order, 16, CPU)
    seen: list[torch.Tensor] = []
    cells = torch.zeros(2, 2, 64, dtype=torch.int64)
    base = models(cells).view(2, 2, 64, -1)
    for cell in range(64):
        changed = cells.clone()
        changed[0, 0, cell] = 3
        moved = (models(changed).view(2, 2, 64, -1) != base).any(-1)
        assert not moved[1].any(), "seeds are independent"
        assert not moved[0, 1].any(), "images are independent"
        seen.append(moved[0, 0])
    place = torch.arange(64) if order is None else order.inverse.long()
    assert torch.equal(torch.stack(seen), place[:, None] // 16 == place // 16)


def test_models_of_all_orders_start_alike() -> None:
    one, two = (Models(SMALL, order, 16, CPU) for order in (None, token_order("morton", (8, 8))))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    whole = [Models(SMALL, order, 64, CPU) for order in (None, token_order("hilbert", (8, 8)))]
    cells = images("nearest", SMALL, 0, CPU)[0]
    torch.testing.assert_close(whole[0](cells), whole[1](cells))


def test_the_comparison_runs_and_its_page_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "_TIMED", 1)
    monkeypatch.setattr(orders, "plan", lambda settings: [("nearest", 16)])
    out = tmp_path / "results" / "found.csv"
    words = ["--out", str(out), "--device", "cpu", "--steps", "2", "--seeds", "2", "--side", "8"]
    done = CliRunner().invoke(orders.main, words)
    assert done.exit_code == 0, done.output
    rows = tables.read(out)
    assert [row["order"] for row in rows] == list(ORDERS)
    for row in rows:
        assert all(0 <= float(share) <= 1 for share in row["right"].split())
        assert float(row["step_ms"]) > 0
    assert len(rows[0]["right"].split()) == 2
    again = CliRunner().invoke(orders.main, [*words, "--resume"])
    assert (again.exit_code, again.output) == (0, ""), "nothing is trained twice"
    other = CliRunner().invoke(orders.main, [*words[:-1], "16", "--resume"])
    assert other.exit_code == 1
    assert "give another --out" in other.output
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text("before\n<!-- orders: results/found.csv -->\nold\n<!-- end -->\nafter\n")
    assert CliRunner().invoke(orders_page.main, ["--check", str(page)]).exit_code == 1
    assert CliRunner().invoke(orders_page.main, [str(page)]).exit_code == 0
    text = page.read_text()
    assert "old" not in text
    assert "| task | tokens of a segment | row | tile | morton | hilbert | random |" in text
    assert f"{float(rows[3]['kept']):.1%}" in text
    assert CliRunner().invoke(orders_page.main, ["--check", str(page)]).exit_code == 0


def test_the_page_is_up_to_date() -> None:
    done = CliRunner().invoke(orders_page.main, ["--check", str(ROOT / "docs" / "token-order.md")])
    assert done.exit_code == 0, done.output
