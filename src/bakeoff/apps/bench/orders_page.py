"""What orders of tokens were worth, on a page, from committed results.

`python -m bakeoff.apps.bench.orders_page docs/token-order.md` writes it; `--check` only compares.

A page has the lines ``<!-- orders: FILE -->`` and ``<!-- end -->``; the tables are written between them.
"""

import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from bakeoff.apps.bench.orders import read
from bakeoff.apps.tabular import markdown_table

__all__ = ["block", "filled"]

_MARKED = re.compile(r"(<!-- orders: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

_STEPS = "Milliseconds of a training step of all seeds; what others take longer than `row` is the permuting:"


def filled(text: str, root: Path) -> str:
    """`text` with every marked part written anew, from files below `root`."""
    return _MARKED.sub(lambda match: match[1] + block(match[2], root) + match[3], text)


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
