"""The selection table: what runs, how fast, how exact, and why. One look for every command."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bakeoff.select import Explanation, Verdict
from bakeoff.select.choose.explain import Row, rows_of

__all__ = ["explained", "milliseconds", "selection_table"]

_HEADINGS = (("candidate", 10), ("ms", 9), ("of limit", 8), ("error", 8), ("chosen", 6))
_OVER = "over 100 %: the limit is that of a copy through memory; data in a cache, or mostly read, can beat it"


def explained(verdict: Verdict, device: str, source: str = "measured now") -> Explanation:
    """A verdict as an explanation whose choice is the winner."""
    rows = rows_of(verdict, device, verdict.winner)
    return Explanation(verdict.op, verdict.key, verdict.winner, verdict.why, source, rows, verdict.warning)


def selection_table(explanations: Iterable[Explanation]) -> Group:
    """A section per key, a line per candidate: ms, share of the machine's limit, error, chosen, why."""
    parts: list[RenderableType] = []
    cached = False
    for explanation in explanations:
        cached |= any((row.share or 0) > 1 for row in explanation.rows)
        parts.append(Text(explanation.key, style="bold cyan"))
        parts.append(_section(explanation))
        if explanation.warning:
            parts.append(Text(f"  little trust: {explanation.warning}", style="yellow"))
        parts.append(Text(f"  from: {explanation.source}", style="dim"))
    if cached:
        parts.append(Text(_OVER, style="dim"))
    return Group(*parts)


def milliseconds(us: float | None) -> str:
    """Microseconds as milliseconds: four decimals below one, else two."""
    if us is None:
        return "-"
    ms = us / 1000
    return f"{ms:.4f}" if ms < 1 else f"{ms:.2f}"


def _section(explanation: Explanation) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name, width in _HEADINGS:
        table.add_column(
            name, min_width=width, no_wrap=True, justify="left" if name == "candidate" else "right"
        )
    table.add_column("why", overflow="fold")
    rows = explanation.rows or (Row(explanation.choice, None, None, None, True, explanation.why),)
    for row in rows:
        table.add_row(
            f"  {row.candidate}",
            milliseconds(row.us),
            "-" if row.share is None else f"{row.share:.0%}",
            "-" if row.error is None else f"{row.error:.1e}",
            "yes" if row.chosen else "",
            Text(explanation.why if row.chosen and row.us is None else row.why),
            style="green" if row.chosen else "dim" if row.us is None else "",
        )
    return table
