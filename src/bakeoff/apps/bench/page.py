"""Tables of an op's measurements on a page, from committed results.

`python -m bakeoff.apps.bench.page PAGE...` writes them; `--check` only compares.

A page has the lines ``<!-- op: NAME -->`` and ``<!-- end -->``; the tables are written between them. A case
is stale where the source of a candidate has changed since it was measured. Between ``<!-- launch: NAME -->``
and ``<!-- end -->`` the op's host and device times at each length are written, from the suite "launch".
"""

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import click

from bakeoff.apps.bench import results
from bakeoff.apps.bench.cards import cards, days, folded, note_on_sources, stamp
from bakeoff.apps.tabular import markdown_table

__all__ = ["launches", "render", "rewritten"]

_MARKED = re.compile(r"(<!-- (op|launch): (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_DIRECTIONS = {"forward": "Forward", "both": "Forward and backward"}


def rewritten(page: str, folder: Path) -> str:
    """`page` with every op's tables as `folder`'s results have them today.

    Raises:
        ResultsError: an op that is neither declared nor measured.
    """
    return _MARKED.sub(lambda match: f"{match[1]}{_part(match[2], match[3], folder)}\n{match[4]}", page)


def render(op: str, folder: Path) -> str:
    """A table for each card, direction and regime in which `op` was measured, cases in their order: the
    newest card's in full, the others' folded."""
    parts = []
    for card in cards(folder):
        for path, file in card.files.items():
            timed = [row for row in file.rows if row.get("op") == op and row["us"] is not None]
            if path.name != "ops.json" or not timed:
                continue
            name, when = path.relative_to(folder.parent).as_posix(), stamp(file.env, days(timed))
            stale = _stale_lines(timed) if card.newest else set()
            tables = _tables(op, timed, f"{when} ([{name}](../{name}))", stale)
            note = note_on_sources(timed, name, newest=card.newest)
            tables += [note] if note else []
            parts += tables if card.newest else [folded(f"Earlier: {when}", tables)]
    return "\n\n".join(parts)


def launches(op: str, folder: Path) -> str:
    """A table of `op` for each direction, from the newest results of suite "launch": at each length the
    microseconds until a call returns and, behind a stroke, those that the device works."""
    files = {path: results.read(path) for path in folder.glob("*/launch.json")}
    held = {path: [row for row in file.rows if row["op"] == op and row["us"]] for path, file in files.items()}
    path = max((path for path in held if held[path]), key=lambda path: files[path].env.date, default=None)
    if path is None:
        return ""
    name, when = path.relative_to(folder.parent).as_posix(), stamp(files[path].env, days(held[path]))
    parts = []
    for direction, title in _DIRECTIONS.items():
        rows = [row for row in held[path] if row["direction"] == direction]
        if not rows:
            continue
        times = {(row["length"], row["candidate"], row["measure"]): _us(row["us"]) for row in rows}
        names = list(dict.fromkeys(row["candidate"] for row in rows))
        table = markdown_table(
            ["length", *names],
            [
                [f"{length:,}", *(_host_and_device(times, length, name) for name in names)]
                for length in sorted({row["length"] for row in rows})
            ],
        )
        parts.append(f"{title}, host / device, in us; {when} ([{name}](../{name})).\n\n{table}")
    note = note_on_sources(held[path], name, newest=True)
    return "\n\n".join([*parts, note] if note else parts)


def _host_and_device(times: dict[tuple[int, str, str], str], length: int, candidate: str) -> str:
    found = [times.get((length, candidate, measure)) for measure in ("host", "device")]
    return " / ".join(time or "-" for time in found) if any(found) else "-"


def _part(kind: str, op: str, folder: Path) -> str:
    text, ops = {"op": render, "launch": launches}[kind](op, folder), results.declared()
    if not text and op not in ops:
        raise results.ResultsError(f"there is no op {op!r}; the ops are {', '.join(sorted(ops))}")
    return text


def _tables(op: str, rows: list[dict[str, Any]], source: str, stale: set[tuple[str, ...]]) -> list[str]:
    """A captioned table for each direction and regime of one file's `rows`; `stale` lines are marked."""
    declared = results.declared()
    order = {case.name: number for number, case in enumerate(declared[op].cases() if op in declared else [])}
    groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=lambda row: order.get(row["case"], len(order))):
        mark = " (stale)" if (row["direction"], row["regime"], row["case"]) in stale else ""
        groups[row["direction"], row["regime"]][row["case"] + mark].append(row)
    return [
        f"{_DIRECTIONS[direction]}, {regime}, in us; {source}.\n\n{_table(cases)}"
        for (direction, regime), cases in sorted(groups.items(), reverse=True)
    ]


def _stale_lines(rows: list[dict[str, Any]]) -> set[tuple[str, ...]]:
    """(direction, regime, case) of the lines with stale rows; none where all have some, which the note below
    the tables says."""
    lines = {(row["direction"], row["regime"], row["case"]): False for row in rows}
    for row in rows:
        lines[row["direction"], row["regime"], row["case"]] |= not results.current(row)
    return set() if all(lines.values()) else {line for line, stale in lines.items() if stale}


def _table(cases: dict[str, list[dict[str, Any]]]) -> str:
    names = list(dict.fromkeys(row["candidate"] for rows in cases.values() for row in rows))
    lines = []
    for case, rows in cases.items():
        by_name = {row["candidate"]: row for row in rows}
        chosen = next((row for row in rows if row["chosen"]), None)
        share = f"{chosen['share']:.0%}" if chosen and chosen["share"] is not None else "-"
        errors = [chosen["error"], chosen["eager_error"]] if chosen else [None]
        shown = "-" if None in errors else ", ".join(f"{error:.1e}" for error in errors)
        times = [_cell(by_name.get(name)) for name in names]
        lines.append([case, *times, share, shown])
    return markdown_table(["case", *names, "share of the limit", "error, eager's"], lines)


def _cell(row: dict[str, Any] | None) -> str:
    """A time: bold if chosen, struck out if its error or another fault put it out."""
    if row is None:
        return "-"
    text = _us(row["us"])
    return f"**{text}**" if row["chosen"] else text if row["verified"] else f"~~{text}~~"


def _us(time: float) -> str:
    return f"{time:,.0f}" if time >= 100 else f"{time:.1f}"


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
