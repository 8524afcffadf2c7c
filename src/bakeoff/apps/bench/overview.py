"""The README's table of at most ten rows, and its picture: what the choice gains, op by op.

All else that was measured is on docs/results.md.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from bakeoff.apps.bench import results
from bakeoff.apps.bench.cards import cards, days, stamp
from bakeoff.apps.bench.results import Env, cell_of
from bakeoff.apps.tabular import markdown_table

__all__ = ["Line", "lines", "picture", "table"]

MOST = 10
_WAYS = [(way, regime) for regime in ("graph", "eager") for way in ("both", "forward")]


class Line(NamedTuple):
    """An op on a card, in one direction and regime."""

    op: str
    env: Env
    way: str
    regime: str
    cells: int
    against_plain: list[float]
    """The chosen candidate's time over plain PyTorch's, by cell."""
    against_peers: list[float]
    """Our fastest kernel's time over the fastest peer's, by cell."""
    current: bool
    """Whether all of these rows measured today's sources."""
    days: set[str]
    """On which they were measured."""


def lines(folder: Path) -> list[Line]:
    """Of each op the newest card that measured today's sources, else the newest that measured it at all,
    forward and backward in a graph where it did; of more than ten ops those with the most cells."""
    found: dict[str, Line] = {}
    for card in cards(folder):
        for path, file in card.files.items():
            if path.name != "ops.json" or file.env.cuda == "none":
                continue
            groups = _groups(file.rows)
            for op in {op for op, *_ in groups}:
                way, regime = next(pair for pair in _WAYS if (op, *pair) in groups)
                line = _line(op, file.env, way, regime, groups[op, way, regime])
                if op not in found or (line.current and not found[op].current):
                    found[op] = line
    most = sorted(found.values(), key=lambda line: (-line.cells, line.op))[:MOST]
    return sorted((line for line in most if line.against_plain), key=lambda line: line.op)


Contests = list[list[dict[str, Any]]]


def _groups(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str, str], Contests]:
    """Contests with a time, by op, direction and regime."""
    contests: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if "op" in row and row["regime"] in ("graph", "eager"):
            contests[cell_of(row)].append({"us": None, "source_hash": "", **row})
    groups: dict[tuple[str, str, str], Contests] = defaultdict(list)
    for (op, _, regime, way), members in contests.items():
        if any(row["us"] for row in members):
            groups[op, way, regime].append(members)
    return groups


def _line(op: str, env: Env, way: str, regime: str, contests: Contests) -> Line:
    plain, peers = [], []
    for rows in contests:
        chosen = next((row["us"] for row in rows if row["chosen"]), None)
        if chosen and rows[0]["us"]:  # the incumbent's
            plain.append(chosen / rows[0]["us"])
        timed = [row for row in rows if row["us"]]
        if any(results.candidate_of(row) is None for row in timed):
            continue  # nothing says any more whose kernel that was
        ours = [row["us"] for row in timed if results.ours(row)]
        others = [row["us"] for row in timed if not results.ours(row)]
        if ours and others:
            peers.append(min(ours) / min(others))
    held = [row for rows in contests for row in rows]
    current = all(results.current(row) for row in held)
    return Line(op, env, way, regime, len(contests), plain, peers, current, days(held))


def table(folder: Path) -> str:
    """The README's table, with what its columns mean."""
    shown = lines(folder)
    if not shown:
        return "No measurements are committed yet."
    rows = [
        [
            line.op if line.current else f"{line.op} *",
            line.env.device.split()[1] if " " in line.env.device else line.env.device,
            ("forward + backward" if line.way == "both" else "forward") + f", {line.regime}",
            str(line.cells),
            _spread(line.against_plain),
            _spread(line.against_peers),
            f"{sum(ratio > 1 for ratio in line.against_peers)} of {len(line.against_peers)}",
        ]
        for line in shown
    ]
    heads = ("op", "GPU", "what", "cells", "choice / plain", "ours / best peer", "lost")
    measured: dict[str, list[Line]] = defaultdict(list)
    for line in shown:
        measured[stamp(line.env)].append(line)
    cards_shown = [stamp(own[0].env, set().union(*(line.days for line in own))) for own in measured.values()]
    return (
        "![Time of what is chosen over plain PyTorch's](docs/images/results.svg)\n\n"
        f"{markdown_table(heads, rows)}\n\n"
        "Ratios of times, median and worst; below 1 is faster. Plain is PyTorch op by op; peers are "
        "torch.compile and other libraries' kernels; lost are cells in which one of them is faster than "
        f"ours (and chosen, if it is correct). {'; '.join(cards_shown)}. An asterisk: earlier "
        "sources were measured. [All results](docs/results.md), every lost cell among them."
    )


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f}, {max(ratios):.2f}" if ratios else "-"


def picture(folder: Path) -> str:
    """The table's medians as bars, an SVG."""
    shown, bar, left, width = lines(folder), 22, 130, 420
    height = bar * len(shown) + 34
    font = 'font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {font} width="{left + width + 60}" height="{height}">',
        f'<rect width="{left + width + 60}" height="{height}" fill="white"/>',
    ]
    for number, line in enumerate(shown):
        ratio, top = statistics.median(line.against_plain), bar * number + 6
        size = min(ratio, 1.0) * width
        parts += [
            f'<text x="{left - 8}" y="{top + 13}" text-anchor="end">{escape(line.op)}</text>',
            f'<rect x="{left}" y="{top}" width="{size:.1f}" height="{bar - 6}" fill="#4c78a8"/>',
            f'<text x="{left + size + 6:.1f}" y="{top + 13}">{ratio:.2f}</text>',
        ]
    parts += [
        f'<line x1="{left + width}" y1="0" x2="{left + width}" y2="{height - 26}" stroke="#888"/>',
        f'<text x="{left + width}" y="{height - 9}" text-anchor="end">time of the choice; line: plain</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
