"""Comparisons in a document: ``python -m bakeoff.apps.compare.page docs/byte-spectral.md`` fills it in.

Between ``<!-- comparison: FOLDER -->`` and ``<!-- end -->`` it writes the results in FOLDER/compare.json,
between ``<!-- plan: FOLDER -->`` and ``<!-- end -->`` those in FOLDER/plan.json, and between ``<!-- tried:
FILE -->`` and ``<!-- end -->`` what was tried. Pictures of comparisons and plans go into the folder images/
beside the document; they need ``pip install -e '.[report]'``. ``--check`` only compares the text.
"""

import importlib.util
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import click

from bakeoff.apps.bench import marked
from bakeoff.apps.compare import tried
from bakeoff.apps.compare.document import SIDES, Document, read, scored
from bakeoff.apps.compare.equal import CompareError
from bakeoff.apps.compare.plans.curves import drawn
from bakeoff.apps.compare.plans.record import read_record
from bakeoff.apps.compare.plans.render import markdown
from bakeoff.apps.tabular import markdown_table

__all__ = ["block", "filled"]

_PLANS = re.compile(r"<!-- plan: (\S+) -->")
_MARKED = re.compile(r"(<!-- comparison: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_WIDTH, _HEIGHT = 420, 240


def filled(text: str, root: Path) -> str:
    """`text` with every marked part written anew, from folders below `root`."""
    text = _MARKED.sub(lambda match: match[1] + block(match[2], root) + match[3], text)
    return marked.filled(text, root, {"plan": _plan, "tried": tried.table})


def _plan(folder: str, root: Path) -> str:
    record = read_record(root / folder)
    if record is None:
        raise CompareError(f"{root / folder} holds no plan.json")
    text = markdown(record, f"[{folder}/plan.json](../{folder}/plan.json)")
    return f"{text}\n![Bits per byte against time, means over seeds]({_picture(folder, 'curves')})\n"


def block(folder: str, root: Path) -> str:
    """The results of the comparison in root/folder, in Markdown."""
    document = read(root / folder)
    env, settings = document.env, document.first.config
    train, data = settings["train"], Path(settings["data"]["path"]).name
    limit = f"{train['steps']} steps" if train["steps"] else f"{train['max_seconds']:.0f} s of training"
    rows = train["seq_len"] or document.second.config["model"]["max_seq_len"]
    size = f" of {document.data_bytes:,} bytes" if document.data_bytes else ""
    what = f"{data}{size}, rows of {rows} bytes, {limit} a run"
    where = f"[{folder}/compare.json](../{folder}/compare.json)"
    parts = [
        f"**{env.device}**, torch {env.torch}, {env.date[:10]}; {what} ({where}).",
        _quality(document),
        _verdict(document),
        *([said] if (said := scored(document)) else []),
        f"![Bits per byte against time]({_picture(folder, 'curves')})",
    ]
    if missing := [str(n) for n in document.lengths if n not in {row.length for row in document.speed}]:
        parts.append(f"Unfinished: speed at {', '.join(missing)} bytes was not measured.")
    if document.speed:
        parts += [_speed(document), f"![Speed against context length]({_picture(folder, 'speed')})"]
    return "\n\n".join(parts) + "\n"


def _picture(folder: str, kind: str) -> str:
    return f"images/{folder.removeprefix('results/').replace('/', '-')}-{kind}.svg"


def _quality(document: Document) -> str:
    heads = ("model", "parameters", "runs", "training s", "steps", "bytes/s", "held-out bits/byte")
    lines = []
    for side in SIDES:
        model, runs = document.model(side), [run for run in document.runs if run.side == side]
        if not runs:
            continue
        bits = [run.bits_per_byte for run in runs if run.bits_per_byte is not None]
        spread = f" ± {statistics.stdev(bits):.4f}" if len(bits) > 1 else ""
        lines.append(
            (
                model.name,
                f"{model.parameters:,}",
                str(len(runs)),
                f"{statistics.fmean(run.seconds for run in runs):.0f}",
                f"{statistics.fmean(run.steps for run in runs):,.0f}",
                f"{statistics.fmean(run.tokens_per_s for run in runs):,.0f}",
                f"{statistics.fmean(bits):.4f}{spread}" if bits else "not finite",
            )
        )
    return markdown_table(heads, lines)


def _verdict(document: Document) -> str:
    if document.verdict is None:
        return "No verdict: runs are missing."
    apart, noise = document.verdict.difference, document.verdict.half_width
    if not document.scored_bytes and apart is not None and noise is not None:  # of before enough were scored
        names = f"{document.first.name} less {document.second.name}"
        return (
            f"{names}: {apart:+.4f} ± {noise:.4f} bits/byte, of a few held-out rows of the end of the data. "
            "No winner is named until the comparison is run again with a tuned baseline."
        )
    return f"Here {document.verdict.text}, where first is {document.first.name}."


def _speed(document: Document) -> str:
    heads = ("context", "rows", "mode",
             *(f"{document.model(side).name} ms/step" for side in SIDES), "times as fast",
             *(f"{document.model(side).name} inference ms" for side in SIDES),
             *(f"{document.model(side).name} peak MiB" for side in SIDES))  # fmt: skip
    lines = []
    rows = {(row.length, row.mode, row.side): row for row in document.speed}
    for length, mode in dict.fromkeys((row.length, row.mode) for row in document.speed):
        one, two = (rows.get((length, mode, side)) for side in SIDES)
        steps = [_ms(row.step_ms if row else None) for row in (one, two)]
        infer = [_ms(row.infer_ms if row else None) for row in (one, two)]
        known = one and two and one.step_ms and two.step_ms
        ratio = f"{two.step_ms / one.step_ms:.2f}" if known else "-"  # type: ignore[operator, union-attr]
        peaks = [f"{row.peak_bytes / 2**20:,.0f}" if row and row.peak_bytes else "-" for row in (one, two)]
        count = next(row.rows for row in (one, two) if row)
        lines.append((str(length), str(count), mode, *steps, ratio, *infer, *peaks))
    return markdown_table(heads, lines)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _curves(document: Document) -> Any:
    """Bits per byte of the training rows against the time trained, a line for every run."""
    alt: Any = importlib.import_module("altair")
    rows: list[dict[str, Any]] = [
        {"model": document.model(run.side).name, "run": f"{run.side} {run.seed}", "s": s, "bits": bits}
        for run in document.runs
        for s, _, bits in run.curve
        if bits is not None
    ]
    last = [row["bits"] for row in rows if row["s"] > 0.5 * max(row["s"] for row in rows)]
    scale = alt.Scale(domain=[min(last) - 0.1, max(last) + 0.8])
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(clip=True, strokeWidth=1.5, opacity=0.8)
        .encode(
            x=alt.X("s:Q", title="seconds of training"),
            y=alt.Y("bits:Q", title="bits per byte, training rows", scale=scale),
            color=alt.Color("model:N", title=None),
            detail="run:N",
        )
    )


def _speeds(document: Document) -> Any:
    """Bytes a second in training against the context length."""
    alt: Any = importlib.import_module("altair")
    rows = [
        {"model": f"{document.model(r.side).name}, {r.mode}", "length": r.length, "speed": r.tokens_per_s}
        for r in document.speed
        if r.tokens_per_s
    ]
    lengths = sorted({row.length for row in document.speed})
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
        )
    )


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 when the text is out of date.")
@click.argument("page", type=click.Path(path_type=Path, exists=True))
def main(check: bool, page: Path) -> None:
    """Write the comparisons' results into PAGE, and draw their pictures."""
    root = page.resolve().parent.parent
    old = page.read_text("utf-8")
    new = filled(old, root)
    if check:
        sys.exit(
            f"{page} is out of date: run python -m bakeoff.apps.compare.page {page}" if new != old else 0
        )
    folders, plans = [folder for _, folder, _ in _MARKED.findall(new)], _PLANS.findall(new)
    missing = [name for name in ("altair", "vl_convert") if importlib.util.find_spec(name) is None]
    if (folders or plans) and missing:
        raise click.ClickException(f"pictures need {' and '.join(missing)}: pip install -e '.[report]'")
    page.write_text(new, "utf-8")
    (page.parent / "images").mkdir(exist_ok=True)
    for folder in folders:
        document = read(root / folder)
        pictures = {"curves": _curves(document)} | ({"speed": _speeds(document)} if document.speed else {})
        for kind, picture in pictures.items():
            picture.properties(width=_WIDTH, height=_HEIGHT).save(page.parent / _picture(folder, kind))
    for folder in plans:
        record = read_record(root / folder)
        assert record is not None  # or its table could not be written
        drawn(record, root / folder).save(page.parent / _picture(folder, "curves"))


if __name__ == "__main__":
    main()
