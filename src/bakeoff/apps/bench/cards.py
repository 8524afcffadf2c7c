"""Committed results by card (a GPU or CPU model), and which of their rows measured earlier sources.

The card that was measured last is shown first and in full, and where its rows are stale (their candidate's
source has changed since), its documents name the candidates. Files of the other cards stay as they were
written: their tables are folded, each with one sentence that counts the rows measured with earlier sources.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bakeoff.apps.bench import results
from bakeoff.apps.bench.results import Env, File

__all__ = ["FILES", "Card", "cards", "days", "folded", "note_on_sources", "stamp"]

FILES = ("ops.json", "selection.json", "step.json", "decode.json", "swap.json", "train.json", "context.json")
"""What a card's folder may hold, in the order in which it is shown."""


class Card(msgspec.Struct, frozen=True):
    """One card's files, by path, in the order of their folders and of `FILES`."""

    files: dict[Path, File]
    newest: bool

    @property
    def env(self) -> Env:
        """That of the file measured last."""
        return max((file.env for file in self.files.values()), key=lambda env: env.date)


def cards(folder: Path) -> list[Card]:
    """The cards with results in folders of `folder`, the one measured last first; GPUs before CPUs."""
    by_device: dict[str, dict[Path, File]] = defaultdict(dict)
    for name in sorted(path.name for path in folder.glob("*") if path.is_dir()):
        for path in (folder / name / file for file in FILES):
            if path.exists():
                file = results.read(path)
                by_device[file.env.device][path] = file
    found = [Card(files, newest=False) for files in by_device.values()]
    found.sort(key=lambda card: (card.env.cuda != "none", card.env.date), reverse=True)
    return [msgspec.structs.replace(card, newest=number == 0) for number, card in enumerate(found)]


def stamp(env: Env, days: Iterable[str] = ()) -> str:
    """The card, the versions and the day of a measurement, or the first and last of its `days`."""
    span = sorted({*days}) or [env.date[:10]]
    when = span[0] if span[0] == span[-1] else f"{span[0]} to {span[-1]}"
    return f"{env.device}, torch {env.torch}, triton {env.triton}, {when}"


def days(rows: Iterable[dict[str, Any]]) -> set[str]:
    """The days on which rows of ops were measured."""
    return {row["date"][:10] for row in rows if row.get("date")}


def note_on_sources(rows: Iterable[dict[str, Any]], where: str, *, newest: bool) -> str:
    """A sentence on the rows that measured earlier sources than today's: on the newest card it names their
    candidates, on another it counts them. Empty where there are none; `where` names the rows' file."""
    by_op: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if "op" in row:
            by_op[row["op"]][row["candidate"]].append(not results.current(row))
    if not newest:
        flags = [stale for held in by_op.values() for listed in held.values() for stale in listed]
        counts = f"{sum(flags)} of {len(flags)} rows in {where}"
        return f"{counts} were measured with earlier sources." if any(flags) else ""
    texts = []
    for op, held in sorted(by_op.items()):
        stale = [f"{name} {sum(old)} of {len(old)}" for name, old in sorted(held.items()) if any(old)]
        if stale:
            texts.append(f"{op} ({', '.join(stale)})")
    return f"Stale rows, measured with earlier sources: {', '.join(texts)}." if texts else ""


def folded(summary: str, parts: Sequence[str]) -> str:
    """Markdown `parts` behind a line that opens them."""
    return "\n\n".join([f"<details><summary>{summary}</summary>", *parts, "</details>"])
