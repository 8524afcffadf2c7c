"""Tables for terminals and documents."""

import io

from rich.console import Console, RenderableType

from bakeoff.apps.tabular import markdown_table, named_values, terminal_table


def printed(table: RenderableType, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_columns_line_up() -> None:
    columns = (("op", "name"), ("us", "right"), ("why", "left"))
    table = terminal_table(columns, [("rotary", "1.5", "won"), ("x", "10.25", "[b]lost[/b]")], title="Times")
    assert printed(table, 80) == [
        "Times",
        "op         us  why",
        "rotary    1.5  won",
        "x       10.25  [b]lost[/b]",
    ]


def test_least_widths_line_several_tables_up() -> None:
    columns = (("op", "name"), ("us", "right"))
    assert printed(terminal_table(columns, [("x", "1")], widths=(8, 6)), 80) == [
        "op            us",
        "x              1",
    ]


def test_names_stay_whole_where_text_wraps() -> None:
    columns = (("name", "name"), ("why", "left"))
    lines = printed(terminal_table(columns, [("a_long_name", "some long reason that wraps")]), 30)
    assert lines[1].startswith("a_long_name  some long")
    assert len(lines) == 3


def test_where_numbers_would_be_broken_each_row_is_a_block_of_lines() -> None:
    columns = (("model", "left"), ("steps", "right"), ("bytes/s", "right"), ("why", "left"))
    table = terminal_table(
        columns, [("a", "1,000", "123,456", "fast"), ("b", "-", "9", "slow")], title="Runs"
    )
    assert len(printed(table, 27)) == 4
    assert printed(table, 26) == [
        "Runs",
        "a",
        "  steps    1,000",
        "  bytes/s  123,456",
        "  why      fast",
        "b",
        "  bytes/s  9",
        "  why      slow",
    ]


def test_an_empty_table_has_its_headings() -> None:
    assert printed(terminal_table((("op", "name"),), []), 20) == ["op"]


def test_named_values_have_no_headings() -> None:
    assert printed(named_values([("device", "cpu"), ("policy", "table")]), 40) == [
        "device  cpu",
        "policy  table",
    ]


def test_markdown() -> None:
    assert markdown_table(["a", "b"], [["1", "2"], ["3", "4"]]) == (
        "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |"
    )
    assert markdown_table(["a"], []) == "| a |\n|---|"
