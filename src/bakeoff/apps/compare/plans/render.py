"""A plan's outcomes as tables, for a terminal and for documents."""

from collections.abc import Sequence

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from bakeoff.apps.compare.plans.record import Record
from bakeoff.apps.compare.plans.summary import Outcome, spread
from bakeoff.apps.tabular import markdown_table, terminal_table

__all__ = ["markdown", "table"]


def table(record: Record) -> Group:
    """A table a setting, and its verdict."""
    parts: list[Table | Text] = []
    for outcome in _outcomes(record):
        heads, rows = _cells(record, outcome)
        columns = [(head, "name" if head == "model" else "right") for head in heads]
        parts += [
            terminal_table(columns, rows, title=str(outcome.setting)),
            Text(outcome.verdict, style="bold"),
            Text(),
        ]
    return Group(*parts, Text(_scored(record)))


def markdown(record: Record, where: str) -> str:
    """The same for a document; `where` is a link to the record."""
    env = record.env
    about = (
        f"**{env.device}**, torch {env.torch}, {env.date[:10]}; {record.data} of {record.data_bytes:,} bytes "
        f"({where}). {_scored(record)}"
    )
    parts = [about]
    for outcome in _outcomes(record):
        heads, rows = _cells(record, outcome)
        parts += [f"**{outcome.setting}**", markdown_table(heads, rows), f"{outcome.verdict}."]
    return "\n\n".join(parts) + "\n"


def _outcomes(record: Record) -> list[Outcome]:
    return [msgspec.convert(row, Outcome) for row in record.rows]


def _scored(record: Record) -> str:
    where = "whole files, chosen by a hash of their path" if record.held_bytes else "the end of the data"
    sizes = sorted({row.bytes for row in record.packed})
    if not sizes:
        return ""
    most = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    return (
        f"Bits per byte are of {most} held-out bytes of {where}; learning rates were chosen by as many "
        "others, with the first seed. Means over seeds ± standard deviation."
    )


def _cells(record: Record, outcome: Outcome) -> tuple[Sequence[str], list[list[str]]]:
    setting, text = outcome.setting, outcome.setting.task == "text"
    scores = ["validation", "held-out bits/byte"] if text else ["validation", "wrong", "wrong, farther"]
    heads = ["model", "parameters", "lr", "seeds", "steps", "s", "FLOPs", "bytes/s", *scores]
    rows = []
    for line in outcome.lines:
        rate = "-" if line.rate is None else f"{line.rate:g}" + (" (end)" if line.edge else "")
        cells = [line.model, f"{line.parameters:,}" if line.parameters else "-", rate, str(line.seeds)]
        if line.seeds:
            cells += [
                f"{line.steps:,.0f}",
                f"{line.seconds:.1f}",
                f"{line.flops:.3g}",
                f"{line.bytes_per_s:,.0f}",
            ]
        else:
            cells += ["-"] * 4
        cells += ["-" if line.validation is None else f"{line.validation:.4f}", spread(line)]
        cells += [] if text else ["-" if line.farther is None else f"{line.farther:.4f}"]
        rows.append(cells)
    if text:
        rows += [
            [row.name, *["-"] * (len(heads) - 2), f"{row.bits_per_byte:.4f}"]
            for row in record.packed
            if row.length == setting.length
        ]
    return heads, rows
