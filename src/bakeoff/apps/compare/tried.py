"""What was tried and did not help, as a table whose figures are looked up in the results that hold them.

A row of the file names the results file (a table, or the runs.jsonl of a plan), the rows with the change and
without it as ``COLUMN=VALUE`` pairs joined by ``;``, and the column that both are judged by.
"""

import csv
import json
from pathlib import Path

from bakeoff.apps.bench.tables import read
from bakeoff.apps.compare.equal import CompareError
from bakeoff.apps.tabular import markdown_table

__all__ = ["figure", "table"]


def table(name: str, root: Path) -> str:
    """The table of root/name in Markdown."""
    rows = []
    for row in read(root / name):
        source = row["source"]
        tried, without = (figure(root / source, row[side], row["figure"]) for side in ("with", "without"))
        link = f"[{Path(source).parent.name}/{Path(source).name}](../{source})"
        rows.append((row["tried"], row["on"], f"{tried:.4f}", f"{without:.4f}", row["note"] or "-", link))
    heads = ("tried", "on", "bits/byte with it", "without", "note", "from")
    return markdown_table(heads, rows) + "\n"


def figure(source: Path, where: str, column: str) -> float:
    """`column` of the one row of `source` in which every ``COLUMN=VALUE`` of `where` holds. Raises
    CompareError where there are none or several."""
    wanted = dict(pair.split("=", 1) for pair in where.split(";"))
    try:
        found = [
            row for row in _rows(source) if all(row.get(key, "") == value for key, value in wanted.items())
        ]
    except (OSError, ValueError, csv.Error) as error:
        raise CompareError(f"{source} can't be read: {error}") from None
    if len(found) != 1:
        raise CompareError(f"{source} has {len(found)} rows with {where}: one is needed")
    return float(found[0][column])


def _rows(source: Path) -> list[dict[str, str]]:
    if source.suffix != ".jsonl":
        return read(source)
    lines = source.read_text("utf-8").splitlines()
    return [{key: str(value) for key, value in json.loads(line).items()} for line in lines]
