"""What orders of tokens were worth, on a page, from committed results.

`python -m bakeoff.apps.bench.orders_page docs/token-order.md` writes it; `--check` only compares.

The tables go between the lines ``<!-- orders: FILE -->`` and ``<!-- end -->``.
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from bakeoff.apps.bench.marked import page_command
from bakeoff.apps.bench.tables import read
from bakeoff.apps.tabular import markdown_table

__all__ = ["block", "main"]

_STEPS = "Milliseconds of a training step of all seeds; what others take longer than `row` is the permuting:"


def block(name: str, root: Path) -> str:
    """The results in root/name, in Markdown."""
    rows = read(root / name)
    used = rows[-1]
    orders = list(dict.fromkeys(row["order"] for row in rows))
    cells: dict[tuple[str, int], dict[str, dict[str, str]]] = {}
    for row in rows:
        cells.setdefault((row["task"], int(row["segment"])), {})[row["order"]] = row
    order = sorted(cells)
    what = (
        f"**{used['gpu']}**, torch {used['torch']}, {used['date']}; {used['side']} x {used['side']} cells, "
        f"{used['layers']} layers of width {used['width']}, {used['steps']} steps of {used['batch']} images, "
        f"{used['seeds']} seeds ([{name}](../{name}))."
    )
    return (
        "\n\n".join(
            [
                what,
                "Cells that are right, held-out images, mean of the seeds ± standard deviation:",
                _table(cells, order, orders, lambda row: _spread([*map(float, row["right"].split())])),
                "Attention kept, by the report, for comparison:",
                _table(cells, order, orders, lambda row: f"{float(row['kept']):.1%}"),
                _STEPS,
                _table(cells, order, orders, lambda row: f"{float(row['step_ms']):.2f}"),
            ]
        )
        + "\n"
    )


def _table(
    cells: dict[tuple[str, int], dict[str, dict[str, str]]],
    places: Sequence[tuple[str, int]],
    orders: Sequence[str],
    shown: Callable[[dict[str, str]], str],
) -> str:
    lines = [
        [task, f"{segment:,}", *(shown(cells[task, segment][name]) if name in cells[task, segment] else "-"
                                 for name in orders)]
        for task, segment in places
    ]  # fmt: skip
    return markdown_table(["task", "tokens of a segment", *orders], lines)


def _spread(shares: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(shares):.1%}" if len(shares) > 1 else ""
    return f"{statistics.fmean(shares):.1%}{spread}"


main = page_command("bakeoff.apps.bench.orders_page", {"orders": block})

if __name__ == "__main__":
    main()
