"""Draws comparisons: ``python scripts/draw.py results/cpu/enwik8`` writes docs/images/enwik8-*.svg.

Each folder holds a compare.json that ``bakeoff compare --out`` wrote. Needs ``pip install bakeoff[report]``.
"""

import sys
from pathlib import Path
from typing import Any

import altair as alt

from bakeoff.compare import Document, read

IMAGES = Path(__file__).parent.parent / "docs" / "images"
SIDES = ("first", "second")
WIDTH, HEIGHT = 420, 240


def curves(document: Document) -> Any:
    """Bits per byte of the training rows against the time trained, a line for every run."""
    rows = [
        {"model": document.model(run.side).name, "run": f"{run.side}-{run.seed}", "s": s, "bits": bits}
        for run in document.runs
        for s, _, bits in run.curve
        if bits is not None
    ]
    least = min(row["bits"] for row in rows)
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(clip=True, strokeWidth=1.5, opacity=0.8)
        .encode(
            x=alt.X("s:Q", title="seconds of training"),
            y=alt.Y(
                "bits:Q", title="bits per byte, training rows", scale=alt.Scale(domain=[least - 0.05, 4])
            ),
            color=alt.Color("model:N", title=None),
            detail="run:N",
        )
        .properties(width=WIDTH, height=HEIGHT)
    )


def speed(document: Document) -> Any:
    """Bytes a second in training against the context length."""
    rows = [
        {
            "model": document.model(row.side).name,
            "mode": row.mode,
            "length": row.length,
            "speed": row.tokens_per_s,
        }
        for row in document.speed
        if row.tokens_per_s
    ]
    lengths = sorted({row["length"] for row in rows})
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=True)
        .encode(
            x=alt.X(
                "length:Q",
                title="context length, bytes",
                scale=alt.Scale(type="log", base=2),
                axis=alt.Axis(values=lengths, format="d"),
            ),
            y=alt.Y("speed:Q", title="bytes a second in training", scale=alt.Scale(type="log")),
            color=alt.Color("model:N", title=None),
            strokeDash=alt.StrokeDash("mode:N", title=None),
        )
        .properties(width=WIDTH, height=HEIGHT)
    )


def main() -> None:
    """Draw every folder given."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for folder in map(Path, sys.argv[1:]):
        document = read(folder)
        for name, picture in (("curves", curves(document)), ("speed", speed(document))):
            path = IMAGES / f"{folder.name}-{name}.svg"
            picture.configure_view(stroke=None).save(path)
            print(path)


if __name__ == "__main__":
    main()
