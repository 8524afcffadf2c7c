"""The picture of a plan: bits per byte against the time trained, a line for every model and setting."""

import importlib
from collections.abc import Collection, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from bakeoff.apps.compare.plans.plan import Setting
from bakeoff.apps.compare.plans.record import Finished, Record, read_runs
from bakeoff.apps.compare.plans.summary import Outcome

__all__ = ["drawn", "points"]

_PARTS = 60
"""Points of a line, each a mean over its part of the time and all seeds: rows differ more than models do."""
_WIDTH, _HEIGHT = 420, 240


def points(outcomes: Iterable[Outcome], runs: Collection[Finished]) -> list[dict[str, Any]]:
    """Where the lines go, of each model at the learning rate that was chosen."""
    found = []
    for outcome in outcomes:
        setting = outcome.setting
        if setting.task != "text":
            continue
        for line in outcome.lines:
            chosen = (line.model, line.rate)
            mine = [run for run in runs if _is_of(run, setting) and (run.model, run.rate) == chosen]
            found += [
                {"setting": str(setting), "model": line.model, "s": seconds, "bits": bits}
                for seconds, bits in _means(mine)
            ]
    return found


def _is_of(run: Finished, setting: Setting) -> bool:
    return (run.task, run.length, run.budget, run.amount) == (
        setting.task, setting.length, setting.budget.kind, setting.budget.amount,
    )  # fmt: skip


def _means(runs: list[Finished]) -> list[tuple[float, float]]:
    """(seconds, bits per byte) of each part of the time, where every run has a point in it."""
    last = max((run.curve[-1][0] for run in runs if run.curve), default=0.0) or 1.0
    parts: list[list[tuple[int, float, float]]] = [[] for _ in range(_PARTS)]
    for number, run in enumerate(runs):
        for seconds, _, bits in run.curve:
            if bits is not None:
                parts[min(int(_PARTS * seconds / last), _PARTS - 1)].append((number, seconds, bits))
    whole = [part for part in parts if len({number for number, _, _ in part}) == len(runs) > 0]
    return [(fmean(s for _, s, _ in part), fmean(b for _, _, b in part)) for part in whole]


def drawn(record: Record, folder: Path) -> Any:
    """The chart. Needs altair."""
    alt: Any = importlib.import_module("altair")
    outcomes = [msgspec.convert(row, Outcome) for row in record.rows]
    rows = points(outcomes, read_runs(folder).values())
    last = [row["bits"] for row in rows if row["s"] > 0.5 * max(row["s"] for row in rows)]
    scale = alt.Scale(domain=[min(last) - 0.05, max(last) + 0.4])
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(clip=True, strokeWidth=1.5)
        .encode(
            x=alt.X("s:Q", title="seconds of training"),
            y=alt.Y("bits:Q", title="bits per byte, training rows", scale=scale),
            color=alt.Color(
                "model:N", title=None, legend=alt.Legend(labelLimit=400, orient="bottom", columns=1)
            ),
        )
        .properties(width=_WIDTH, height=_HEIGHT)
        .facet(facet=alt.Facet("setting:N", title=None), columns=2)
        .resolve_scale(x="independent")
    )
