"""Results that are tables: CSV files, one row a run, all values as text."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["put", "read", "write"]

Row = Mapping[str, str]


def read(path: Path) -> list[dict[str, str]]:
    """The rows of `path`."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Sequence[Row]) -> None:
    """`rows`, all with the names of the first, as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def put(path: Path, row: Row, key: Sequence[str]) -> None:
    """`row` into the file at `path`, in the place of one that is equal in all of `key`."""
    rows = read(path) if path.exists() else []
    others = [other for other in rows if any(other.get(name) != row[name] for name in key)]
    write(path, [*others, row])
