"""The one writer of tables: `terminal_table` for a terminal, `markdown_table` for documents."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

__all__ = ["Column", "markdown_table", "named_values", "terminal_table"]

_GAP = 2  # between columns
_LEAST_TEXT = 16  # columns of a terminal in which text can still be read

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
    """A table without borders. Where the terminal is too narrow for it, a block of lines for each row.

    Args:
        columns: heading and form of each column.
        rows: the cells; strings are shown as they are.
        title: a line above.
        styles: a rich style for each of the first rows; "" for none.
        widths: least width of the first columns, so that several tables below each other line up.
    """
    lines = [*rows]
    table = _FittingTable(
        columns,
        lines,
        title=title,
        title_justify="left",
        box=None,
        header_style="bold",
        pad_edge=False,
        padding=(0, _GAP, 0, 0),
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


class _FittingTable(Table):
    """A table that is shown row by row, a line a cell, where its numbers and names would be broken."""

    def __init__(
        self, columns: Sequence[Column], lines: Sequence[Sequence[RenderableType]], **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.forms, self.lines = columns, lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._least_width() <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield Text(str(self.title), style="italic")
        headings = [heading for heading, _ in self.forms]
        for row, style in itertools.zip_longest(self.lines, [row.style for row in self.rows], fillvalue=""):
            first, *rest = map(_plain, row)
            yield Text.assemble(str(first), style=f"bold {style or ''}")
            block = Table(box=None, show_header=False, pad_edge=False, padding=(0, _GAP, 0, 0))
            block.add_column(no_wrap=True)
            block.add_column(overflow="fold")
            for heading, cell in zip(headings[1:], rest, strict=True):
                if str(cell) not in ("", "-"):
                    block.add_row(heading, cell)
            yield Padding(block, (0, 0, 0, 2))

    def _least_width(self) -> int:
        """The columns that it needs: numbers and names whole, other text in a few words a line."""
        total = -_GAP
        for number, (heading, form) in enumerate(self.forms):
            widest = max([len(heading), *(len(str(_plain(row[number]))) for row in self.lines)])
            least = max(widest, self.columns[number].min_width or 0)
            total += (least if form != "left" else min(least, _LEAST_TEXT)) + _GAP
        return total


def named_values(rows: Iterable[Sequence[RenderableType]]) -> Table:
    """Names in bold and what belongs to each, without headings."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, _GAP, 0, 0))
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
