"""Tables of an op's measurements on a page, from committed results.

`python -m bakeoff.apps.bench.page PAGE...` writes them; `--check` only compares.

A page has the lines ``<!-- op: NAME -->`` and ``<!-- end -->``; what is between them is written. A stale case
was measured with another source than today's.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import click

from bakeoff.apps.bench import results

__all__ = ["render", "rewritten"]

_PART = re.compile(r"(<!-- op: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_WAYS = {"forward": "Forward", "both": "Forward and backward"}


def rewritten(page: str, folder: Path) -> str:
    """`page` with every op's tables as `folder`'s results have them today.

    Raises:
        ResultsError: an op that neither is there nor was measured.
    """
    return _PART.sub(lambda found: f"{found[1]}{_tables(found[2], folder)}\n{found[3]}", page)


def render(op: str, folder: Path) -> str:
    """A table for each machine, direction and regime in which `op` was measured, cases in their order."""
    tables = []
    cases_now = results.declared()[op].cases() if op in results.declared() else []
    order = {case.name: place for place, case in enumerate(cases_now)}
    for path in sorted(folder.glob("*/ops.json")):
        file = results.read(path)
        groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        timed = [row for row in file.rows if row.get("op") == op and row["us"] is not None]
        for row in sorted(timed, key=lambda row: order.get(row["case"], len(order))):
            groups[row["direction"], row["regime"]][row["case"]].append(row)
        place = f"{folder.name}/{path.parent.name}/{path.name}"
        for (direction, regime), cases in sorted(groups.items(), reverse=True):
            tables.append(
                f"{_WAYS[direction]}, {regime}, in us; {file.env.device}, torch {file.env.torch} "
                f"([{place}](../{place})).\n\n{_table(cases)}"
            )
    return "\n\n".join(tables)


def _tables(op: str, folder: Path) -> str:
    text, ops = render(op, folder), results.declared()
    if not text and op not in ops:
        raise results.ResultsError(f"there is no op {op!r}; the ops are {', '.join(sorted(ops))}")
    return text


def _table(cases: dict[str, list[dict[str, Any]]]) -> str:
    names = list(dict.fromkeys(row["candidate"] for rows in cases.values() for row in rows))
    lines = [
        f"| case | {' | '.join(names)} | share of the limit | error, eager's |",
        "|---" * (len(names) + 3) + "|",
    ]
    for case, rows in cases.items():
        by_name = {row["candidate"]: row for row in rows}
        chosen = next((row for row in rows if row["chosen"]), None)
        share = f"{chosen['share']:.0%}" if chosen and chosen["share"] is not None else "-"
        found = [chosen["error"], chosen["eager_error"]] if chosen else [None]
        errors = "-" if None in found else ", ".join(f"{error:.1e}" for error in found)
        times = " | ".join(_cell(by_name.get(name)) for name in names)
        stale = "" if all(map(results.current, rows)) else " (stale)"
        lines.append(f"| {case}{stale} | {times} | {share} | {errors} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None) -> str:
    """A time: bold if chosen, struck out if its error or another fault put it out."""
    if row is None:
        return "-"
    text = f"{row['us']:,.0f}" if row["us"] >= 100 else f"{row['us']:.1f}"
    return f"**{text}**" if row["chosen"] else text if row["verified"] else f"~~{text}~~"


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 when a page is out of date.")
@click.argument("pages", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--results", "folder", type=click.Path(path_type=Path), default=Path("results"), show_default=True
)
def main(check: bool, pages: tuple[Path, ...], folder: Path) -> None:
    """Write every op's tables into PAGES."""
    stale = False
    for page in pages:
        old = page.read_text("utf-8")
        try:
            new = rewritten(old, folder)
        except results.ResultsError as error:
            raise click.ClickException(f"{page}: {error}") from None
        if check and new != old:
            click.echo(f"{page} is out of date: run python -m bakeoff.apps.bench.page {page}", err=True)
            stale = True
        elif new != old:
            page.write_text(new, "utf-8")
    sys.exit(stale)


if __name__ == "__main__":
    main()
