"""What neural memories were worth, on a page, from committed results.

`python -m bakeoff.apps.bench.memory_page docs/titan-mac.md` writes it and draws its curves; `--check` only
compares. The tables go between ``<!-- recall: FILE -->`` (or text) and ``<!-- end -->``.
"""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from bakeoff.apps.bench.marked import page_command
from bakeoff.apps.bench.tables import read
from bakeoff.apps.tabular import markdown_table

__all__ = ["curves", "main", "picture", "recall", "text"]

Rows = list[dict[str, str]]


def recall(name: str, root: Path) -> str:
    """Suite "recall": right answers of every form."""
    rows = read(root / name)
    used = rows[-1]
    what = (
        f"{used['pairs']} pairs of {used['alphabet']} keys and values, {used['noise']} bytes of noise, "
        f"windows of {used['window']}, chunks of {used['chunk']}, {used['steps']} steps of {used['rows']} "
        f"rows at a rate of {used['lr']}"
    )
    lines = [
        [form, _size(own, "params"), _size(own, "state"), _spread(own, "right_near", 100, "{:.1f} %"),
         _spread(own, "right_far", 100, "{:.1f} %")]
        for form, own in _by_form(rows).items()
    ]  # fmt: skip
    heads = [
        "model", "parameters", "state of a layer", f"right behind {used['noise']}",
        f"right behind {3 * int(used['noise'])}",
    ]  # fmt: skip
    return _page(name, rows, what, heads, lines)


def text(name: str, root: Path) -> str:
    """Suite "text": held-out bits per byte of every form, at equal steps and at equal time."""
    rows = read(root / name)
    used, forms = rows[-1], _by_form(rows)
    what = (
        f"{used['data']}, {used['steps']} steps of {used['rows']} rows of {used['seq']} bytes at a constant "
        f"rate of {used['lr']}, windows of {used['window']}, chunks of {used['chunk']}, "
        f"{int(used['scored']):,} held-out bytes"
    )
    # The time in which every model makes all its steps at most.
    limit = min(float(row["step_ms"]) * int(row["steps"]) for row in rows)
    lines = [
        [form, _size(own, "params"), _size(own, "state"), _spread(own, "bits_per_byte", 1, "{:.4f}"),
         _times(own, limit), _one(own, "step_ms", "{:.2f}")]
        for form, own in forms.items()
    ]  # fmt: skip
    heads = [
        "model", "parameters", "state of a layer", "bits a byte, equal steps",
        f"equal time ({limit / 1000:.1f} s)", "ms a step",
    ]  # fmt: skip
    return _page(name, rows, what, heads, lines)


def _page(name: str, rows: Rows, what: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    used, seeds = rows[-1], len({row["seed"] for row in rows})
    scans = ", ".join(sorted({row["memory_scan"] for row in rows} - {"-"}))
    return (
        f"**{used['gpu']}**, torch {used['torch']}, {used['date']}; {what}; {seeds} seeds, mean ± standard "
        f"deviation; memory_scan: {scans} ([{name}](../{name})).\n\n{markdown_table(list(heads), lines)}\n\n"
        f"![Curves]({_picture(name)})\n"
    )


def _by_form(rows: Rows) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for row in rows:
        found.setdefault(row["form"], []).append(row)
    return found


def _size(rows: Rows, column: str) -> str:
    return f"{int(rows[0][column]):,}"


def _one(rows: Rows, column: str, form: str) -> str:
    return form.format(statistics.median(float(row[column]) for row in rows))


def _spread(rows: Rows, column: str, scale: float, form: str) -> str:
    return _around([scale * float(row[column]) for row in rows], form)


def _around(values: Sequence[float], form: str) -> str:
    spread = f" ± {form.format(statistics.stdev(values))}" if len(values) > 1 else ""
    return form.format(statistics.fmean(values)) + spread


def _times(rows: Rows, limit: float) -> str:
    """What the curves say at `limit` milliseconds; "-" before their first point."""
    pairs = [(_curve(row), limit / float(row["step_ms"])) for row in rows]
    if any(step < curve[0][0] for curve, step in pairs):
        return "-"
    return _around([_at(curve, step) for curve, step in pairs], "{:.4f}")


def _curve(row: dict[str, str]) -> list[tuple[float, float]]:
    points = (point.split(":") for point in row["curve"].split())
    return [(float(step), float(value)) for step, value in points]


def _at(curve: Sequence[tuple[float, float]], step: float) -> float:
    """The curve's value at `step`, on the line between its points."""
    for (x, y), (x2, y2) in itertools.pairwise(curve):
        if step <= x2:
            return y + (y2 - y) * (step - x) / (x2 - x)
    return curve[-1][1]


def _picture(name: str) -> str:
    return "images/" + name.removeprefix("results/").removesuffix(".csv").replace("/", "-") + ".svg"


_COLOURS = ("#b4442c", "#2c6fb4", "#3a923a", "#8c564b", "#7f52a8", "#c98a1b", "#444444", "#1b9e9e")


def curves(rows: Rows, width: int = 460, height: int = 240) -> str:
    """An SVG of the first seed's curves."""
    own = {row["form"]: _curve(row) for row in reversed(rows)}
    own = dict(reversed(own.items()))
    points = [point for curve in own.values() for point in curve]
    right, (low, high) = max(x for x, _ in points), (min(y for _, y in points), max(y for _, y in points))
    low, high = (low, high) if high > low else (low, low + 1.0)
    box = f"0 0 {width + 200} {height + 34}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="sans-serif" font-size="11">',
        f'<path d="M40 0V{height}H{width}" fill="none" stroke="#888"/>',
        f'<text x="36" y="10" text-anchor="end">{high:.2f}</text>',
        f'<text x="36" y="{height}" text-anchor="end">{low:.2f}</text>',
        f'<text x="{width}" y="{height + 14}" text-anchor="end">{right:.0f} steps</text>',
    ]
    for number, (form, curve) in enumerate(own.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        dashed = ' stroke-dasharray="4 3"' * (number // len(_COLOURS))
        line = " ".join(
            f"{40 + x / right * (width - 40):.1f},{(high - y) / (high - low) * height:.1f}" for x, y in curve
        )
        y = 12 + 16 * number
        parts += [
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"{dashed}/>',
            f'<path d="M{width + 8} {y - 4}h18" stroke="{colour}" stroke-width="2"{dashed}/>',
            f'<text x="{width + 32}" y="{y}">{form}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def picture(name: str, root: Path) -> tuple[str, str]:
    """Where the curves of root/name stand beside a page, and an SVG of them."""
    return _picture(name), curves(read(root / name))


main = page_command(
    "bakeoff.apps.bench.memory_page",
    {"recall": recall, "text": text},
    {"recall": picture, "text": picture},
)

if __name__ == "__main__":
    main()
