"""A comparison as tables for a terminal."""

import statistics
from collections.abc import Iterable, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bakeoff.apps.compare.document import SIDES, Document, scored
from bakeoff.apps.tabular import terminal_table

__all__ = ["table"]


def table(document: Document) -> Group:
    """Quality, speed, and the conclusions from both."""
    parts: list[Table | Text] = []
    if document.runs:
        parts += [_quality(document), Text(scored(document)), Text()]
    if document.speed:
        parts += [_speed(document), *_reasons(document), Text()]
    if document.verdict is not None:
        names = f"first: {document.first.name}, second: {document.second.name}"
        parts.append(Text(f"{document.verdict.text}. {names}", style="bold"))
    if document.speed and {row.length for row in document.speed} >= set(document.lengths):
        parts.append(Text(_crossing(document)))
    return Group(*parts)


def _crossing(document: Document) -> str:
    first, second = document.first.name, document.second.name
    start, longest = document.crossover, max(document.lengths)
    if start is None:
        return f"{first} does not train faster than {second} at {longest} bytes a row, the longest measured"
    span = f"from {start} to {longest}" if start < longest else f"at {longest}"
    return f"{first} trains faster than {second} {span} bytes a row, the longest measured"


def _quality(document: Document) -> Table:
    heads = ("model", "parameters", "seeds", "training s", "steps", "bytes/s", "bits/byte", "peak MiB")
    rows = []
    for side in SIDES:
        model, runs = document.model(side), [run for run in document.runs if run.side == side]
        rows.append(
            (
                model.name,
                f"{model.parameters:,}",
                str(len(runs)),
                _spread((run.seconds for run in runs), ".1f"),
                _spread((run.steps for run in runs), ",.0f"),
                _spread((run.tokens_per_s for run in runs), ",.0f"),
                _spread((run.bits_per_byte for run in runs), ".4f"),
                _mib(max((run.peak_bytes or 0 for run in runs), default=0)),
            )
        )
    return _grid("Quality: means over seeds +- standard deviation", heads, rows)


def _speed(document: Document) -> Table:
    heads = ("length", "rows", "mode", "model", "ms/step", "bytes/s", "ratio", "inference ms", "peak MiB")
    rows = []
    rivals = {(row.side, row.length, row.mode): row for row in document.speed}
    for row in document.speed:
        other = rivals.get(("second", row.length, row.mode)) if row.side == "first" else None
        ratio = (
            row.tokens_per_s / other.tokens_per_s if other and row.tokens_per_s and other.tokens_per_s else 0
        )
        rows.append(
            (
                str(row.length),
                str(row.rows),
                row.mode,
                document.model(row.side).name,
                _timed(row.step_ms, row.step_ms_p20, row.step_ms_p80),
                f"{row.tokens_per_s:,.0f}" if row.tokens_per_s else "-",
                f"{ratio:.2f}" if ratio else "",
                _timed(row.infer_ms, row.infer_ms_p20, row.infer_ms_p80),
                _mib(row.peak_bytes or 0),
            )
        )
    return _grid("Speed by context length: medians (20th to 80th percentile)", heads, rows)


def _reasons(document: Document) -> list[Text]:
    """Why some rows have no times."""
    return [
        Text(f"{document.model(row.side).name}, {row.length}, {row.mode}: {row.reason}", style="yellow")
        for row in document.speed
        if row.reason
    ]


def _grid(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without its last column where that is all "-"."""
    shown = len(heads) if any(row[-1] != "-" for row in rows) else len(heads) - 1
    forms = {"model": "name", "mode": "left"}
    columns = [(head, forms.get(head, "right")) for head in heads[:shown]]
    return terminal_table(columns, [row[:shown] for row in rows], title=title)


def _spread(values: Iterable[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    spread = f" +- {statistics.stdev(known):{form}}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):{form}}{spread}"


def _timed(ms: float | None, p20: float | None, p80: float | None) -> str:
    return "-" if ms is None else f"{ms:.2f} ({p20:.2f} to {p80:.2f})"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f}" if count else "-"
