"""Time and memory over lengths, on a page, from committed results.

`python -m bakeoff.apps.bench.lengths_page docs/longnet.md` writes the table between the lines
``<!-- lengths: FILE -->`` and ``<!-- end -->``, and draws its pictures into the folder images/ beside the
page; `--check` only compares the text. Pictures need ``pip install -e '.[report]'``.
"""

import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bakeoff.apps.bench.tables import read
from bakeoff.apps.tabular import markdown_table

__all__ = ["block", "filled"]

_MARKED = re.compile(r"(<!-- lengths: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_NAMES = {
    "cudnn": "dilated, cuDNN branches",
    "flash_attn_4": "dilated, FlashAttention-4 branches",
    "fused": "dilated, one Triton kernel",
    "hopper": "dilated, one Hopper kernel",
    "hopper_flash_attn_4": "dilated, Hopper kernel, FlashAttention-4 backward",
    "equal FLOPs, cudnn": "cuDNN, equal FLOPs",
    "equal FLOPs, flash": "FlashAttention-2, equal FLOPs",
    "dense, cudnn": "dense, cuDNN",
}
_PICTURES = {
    "time": ("ms", "milliseconds"),
    "memory": ("extra_gib", "GiB allocated beside the inputs"),
}


def filled(text: str, root: Path) -> str:
    """`text` with every marked part written anew, from files below `root`."""
    return _MARKED.sub(lambda match: match[1] + block(match[2], root) + match[3], text)


def block(name: str, root: Path) -> str:
    """The results in root/name, in Markdown."""
    rows = read(root / name)
    used = rows[-1]
    what = (
        f"**{used['gpu']}**, torch {used['torch']}, triton {used['triton']}, {used['date']}; bfloat16, "
        f"causal, {used['heads']} heads of {used['head_dim']} ([{name}](../{name}))."
    )
    pictures = [
        f"![{title} against length]({_picture(name, kind)})" for kind, (_, title) in _PICTURES.items()
    ]
    titles = {
        "forward": "Milliseconds of a forward pass, TFLOP/s in brackets:",
        "both": "Of forward and backward:",
    }
    parts = [what]
    for direction, title in titles.items():
        own = [row for row in rows if row["direction"] == direction]
        parts += [title, _table(own, lambda row: f"{_short(row['ms'])} ({float(row['tflops']):.0f})")]
    both = [row for row in rows if row["direction"] == "both"]
    memory = "GiB that forward and backward allocate beside the inputs, gradients among them:"
    return "\n\n".join([*parts, memory, _table(both, lambda row: _short(row["extra_gib"])), *pictures]) + "\n"


def _table(rows: Sequence[dict[str, str]], shown: Any) -> str:
    forms = [form for form in _NAMES if any(row["form"] == form for row in rows)]
    found = {(int(row["tokens"]), row["form"]): row for row in rows}
    lines = []
    for tokens in sorted({length for length, _ in found}):
        cells = [found.get((tokens, form)) for form in forms]
        lines.append([f"{tokens:,}", *(shown(row) if row and row["ms"] else "-" for row in cells)])
    return markdown_table(["tokens", *(_NAMES[form] for form in forms)], lines)


def _short(number: str) -> str:
    value = float(number)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _picture(name: str, kind: str) -> str:
    return f"images/{Path(name).parent.name}-{Path(name).stem}-{kind}.svg"


def _chart(rows: Sequence[dict[str, str]], column: str, title: str) -> Any:
    """A form a line, forward and backward, both axes logarithmic."""
    alt: Any = importlib.import_module("altair")
    values: list[dict[str, Any]] = [
        {"form": _NAMES[row["form"]], "tokens": int(row["tokens"]), "value": float(row[column])}
        for row in rows
        if row["direction"] == "both" and row["ms"] and row["form"] in _NAMES
    ]
    lengths = sorted({value["tokens"] for value in values})
    x = alt.X("tokens:Q", title="tokens", scale=alt.Scale(type="log", base=2),
              axis=alt.Axis(values=lengths, format="~s"))  # fmt: skip
    y = alt.Y("value:Q", title=f"{title}, forward and backward", scale=alt.Scale(type="log"))
    chart = alt.Chart(alt.Data(values=values)).mark_line(point=True)
    return chart.encode(x=x, y=y, color=alt.Color("form:N", title=None, sort=[*_NAMES.values()]))


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 when the text is out of date.")
@click.argument("page", type=click.Path(path_type=Path, exists=True))
def main(check: bool, page: Path) -> None:
    """Write the results into PAGE, and draw their pictures."""
    root = page.resolve().parent.parent
    old = page.read_text("utf-8")
    new = filled(old, root)
    if check:
        why = f"{page} is out of date: run python -m bakeoff.apps.bench.lengths_page {page}"
        sys.exit(why if new != old else 0)
    (page.parent / "images").mkdir(exist_ok=True)
    for _, name, _ in _MARKED.findall(new):
        for kind, (column, title) in _PICTURES.items():
            chart = _chart(read(root / name), column, title)
            chart.properties(width=420, height=260).save(page.parent / _picture(name, kind))
    page.write_text(new, "utf-8")


if __name__ == "__main__":
    main()
