"""The one writer of tables: `terminal_table` for a terminal, `markdown_table` for documents."""

import itertools
from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["Column", "markdown_table", "named_values", "terminal_table"]

Column = tuple[str, str]
"""A heading and its column's form: "left" or "right" (long text wraps), or "name" (never cut or wrapped)."""


def terminal_table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[RenderableType]],
    *,
    title: str | None = None,
    styles: Iterable[str] = (),
    widths: Sequence[int] = (),
) -> Table:
    """A table without borders.

    Args:
        columns: heading and form of each column.
        rows: the cells; strings are shown as they are.
        title: a line above.
        styles: a rich style for each of the first rows; "" for none.
        widths: least width of the first columns, so that several tables below each other line up.
    """
    lines = [*rows]
    table = Table(
        title=title, title_justify="left", box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0)
    )
    for number, (heading, form) in enumerate(columns):
        names = [len(str(row[number])) for row in lines] if form == "name" else []
        table.add_column(
            heading,
            justify="right" if form == "right" else "left",
            no_wrap=form == "name",
            overflow="fold",
            min_width=max([*widths[number : number + 1], *names], default=None),
        )
    for row, style in itertools.zip_longest(lines, styles, fillvalue=""):
        table.add_row(*map(_plain, row), style=str(style))
    return table


def named_values(rows: Iterable[Sequence[RenderableType]]) -> Table:
    """Names in bold and what belongs to each, without headings."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for number, row in enumerate(rows):
        for column, _ in enumerate(row) if number == 0 else ():
            table.add_column(style="bold" if column == 0 else "", overflow="fold")
        table.add_row(*map(_plain, row))
    return table


def _plain(cell: RenderableType) -> RenderableType:
    return Text(cell) if isinstance(cell, str) else cell  # rich reads brackets in a string as markup


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, without a newline at its end.

    >>> print(markdown_table(("op", "us"), [("rotary", "1.5")]))
    | op | us |
    |---|---|
    | rotary | 1.5 |
    """
    lines = [headings, *rows]
    text = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([text[0], f"|{'---|' * len(headings)}", *text[1:]])
