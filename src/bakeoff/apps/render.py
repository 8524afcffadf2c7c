"""The selection table, the same in every command: what runs, how fast, how exact, and why."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bakeoff.apps.tabular import terminal_table
from bakeoff.select import Explanation, Verdict
from bakeoff.select.choose.explain import Row, rows_of

__all__ = ["explained", "milliseconds", "selection_table", "variants_table"]

_COLUMNS = (
    ("candidate", "name"), ("ms", "right"), ("of limit", "right"), ("error", "right"), ("chosen", "right"),
    ("why", "left"),
)  # fmt: skip
_WIDTHS = (10, 9, 8, 8, 6)
_OVER = (
    "over 100 %: the limit is the speed of copying through memory, which a call whose data are in a cache, "
    "or that reads more than it writes, can exceed"
)


def explained(verdict: Verdict, device: str, source: str = "measured now") -> Explanation:
    """A verdict as an explanation whose choice is the winner."""
    rows = rows_of(verdict, device, verdict.winner)
    return Explanation(
        verdict.op,
        verdict.key,
        verdict.winner,
        verdict.why,
        source,
        rows,
        verdict.warning,
        variant=verdict.variant(verdict.winner),
    )


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


def variants_table(verdict: Verdict) -> Table:
    """A line per launch configuration that was tried, each candidate's fastest first."""
    columns = (("candidate", "name"), ("variant", "left"), ("ms", "right"), ("why not", "left"))
    rows: list[tuple[str, ...]] = []
    for trial in verdict.trials:
        times = {text: us for text, us in trial.variants.items() if not isinstance(us, str)}
        failures = {text: why for text, why in trial.variants.items() if isinstance(why, str)}
        rows += [
            (f"  {trial.candidate}", text or "default", milliseconds(us), "")
            for text, us in sorted(times.items(), key=lambda item: item[1])
        ]
        rows += [(f"  {trial.candidate}", text, "-", why) for text, why in failures.items()]
    return terminal_table(columns, rows)


def _section(explanation: Explanation) -> Table:
    rows = explanation.rows or (Row(explanation.choice, None, None, None, True, explanation.why),)
    cells = [
        (
            f"  {row.candidate}",
            milliseconds(row.us),
            "-" if row.share is None else f"{row.share:.0%}",
            "-" if row.error is None else f"{row.error:.1e}",
            "yes" if row.chosen else "",
            Text(explanation.why if row.chosen and row.us is None else row.why),
        )
        for row in rows
    ]
    styles = ["green" if row.chosen else "dim" if row.us is None else "" for row in rows]
    return terminal_table(_COLUMNS, cells, styles=styles, widths=_WIDTHS)
