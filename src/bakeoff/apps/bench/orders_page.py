"""What orders of tokens were worth, on a page, from committed results.

`python -m bakeoff.apps.bench.orders_page docs/token-order.md` writes it; `--check` only compares.

A page has the lines ``<!-- orders: FILE -->`` and ``<!-- end -->``; the tables are written between them.
"""

import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bakeoff.apps.bench import results
from bakeoff.apps.bench.cards import stamp
from bakeoff.apps.tabular import markdown_table

__all__ = ["block", "filled"]

_MARKED = re.compile(r"(<!-- orders: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

_STEPS = "Milliseconds of a training step of all seeds; what others take longer than `row` is the permuting:"


def filled(text: str, root: Path) -> str:
    """`text` with every marked part written anew, from results files below `root`."""
    return _MARKED.sub(lambda match: match[1] + block(match[2], root) + match[3], text)


def block(name: str, root: Path) -> str:
    """The results in root/name, in Markdown."""
    file = results.read(root / name)
    rows, used = file.rows, file.summary
    orders = list(dict.fromkeys(row["order"] for row in rows))
    cells: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["task"], row["segment"]), {})[row["order"]] = row
    order = sorted(cells)
    side = used["side"]
    what = (
        f"**{stamp(file.env)}**; {side} x {side} cells, {used['layers']} layers of width {used['width']}, "
        f"{used['steps']} steps of {used['batch']} images, {used['seeds']} seeds ([{name}](../{name}))."
    )
    return (
        "\n\n".join(
            [
                what,
                "Cells that are right, held-out images, mean of the seeds ± standard deviation:",
                _table(cells, order, orders, lambda row: _spread(row["right"])),
                "Attention kept, by the report, for comparison:",
                _table(cells, order, orders, lambda row: f"{row['kept']:.1%}"),
                _STEPS,
                _table(cells, order, orders, lambda row: f"{row['step_ms']:.2f}"),
            ]
        )
        + "\n"
    )


def _table(
    cells: dict[tuple[str, int], dict[str, dict[str, Any]]],
    places: Sequence[tuple[str, int]],
    orders: Sequence[str],
    shown: Any,
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


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 when the page is out of date.")
@click.argument("page", type=click.Path(path_type=Path, exists=True))
def main(check: bool, page: Path) -> None:
    """Write the results into PAGE."""
    old = page.read_text("utf-8")
    new = filled(old, page.resolve().parent.parent)
    if check:
        sys.exit(
            f"{page} is out of date: run python -m bakeoff.apps.bench.orders_page {page}" if new != old else 0
        )
    page.write_text(new, "utf-8")


if __name__ == "__main__":
    main()
