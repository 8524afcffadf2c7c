"""What was measured, on docs/results.md, and its short form in the README, from the files in results/.

``python -m bakeoff.apps.bench.readme`` writes both and the README's picture, ``--check`` only compares.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from bakeoff.apps.bench import overview, results
from bakeoff.apps.bench.cards import FILES, cards, days, folded, note_on_sources, stamp
from bakeoff.apps.bench.results import File, cell_of
from bakeoff.apps.bench.step import MODES, OF_MEMORY
from bakeoff.apps.bench.suites import cells
from bakeoff.apps.tabular import markdown_table
from bakeoff.select.contests.contest import regimes_of

__all__ = ["render", "replaced"]

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
NONE = "No measurements are committed yet."

Cell = list[dict[str, Any]]
"""The rows of one contest."""


def render(folder: Path) -> str:
    """The text between the markers: for each card with results under `folder` a section per file, the newest
    card's in full, the others' folded."""
    parts = []
    for card in cards(folder):
        sections = [
            SECTIONS[path.name](file, path.relative_to(folder.parent).as_posix(), card.newest)
            for path, file in card.files.items()
        ]
        parts += sections if card.newest else [folded(f"Earlier: {stamp(card.env)}", sections)]
    return "\n\n".join(parts) or NONE


def replaced(readme: str, text: str) -> str:
    """The page `readme` with `text` between the markers. Raises ValueError where a marker is missing."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN} and {END}, in this order")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _ops(file: File, name: str, newest: bool) -> str:
    env = file.env
    contests = _contests(file.rows)
    limits = f"copy {env.copy_gbps / 1000:.2f} TB/s, matmul {env.matmul_tflops:.3g} TFLOP/s"
    headings = (
        "op",
        "direction",
        "regime",
        "cells",
        "choice / plain",
        "choice / best",
        "ours / best peer",
        "worst cell",
        "lost",
    )
    groups: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for (op, _, regime, direction), rows in contests.items():
        groups[op, direction, regime].append(rows)
    lines, lost = [], []
    for (op, direction, regime), members in sorted(groups.items()):
        line, losing = _group(op, direction, regime, members)
        lines.append(line)
        lost += losing
    start = (
        f"{stamp(env, days(file.rows)).replace(env.device, f'**{env.device}**', 1)}: {limits}. "
        f"`bakeoff bench` wrote [{name}](../{name}).\n"
        "Ratios of times, median and worst; below 1 is faster; plain is PyTorch op by op. Lost are cells "
        "where a peer is faster, which includes peers that were rejected for their error after being timed."
    )
    parts = [start, markdown_table(headings, lines)]
    if newest:
        if lost:
            parts.append(
                folded(f"The {len(lost)} cells in which a peer is faster than ours", ["\n".join(lost)])
            )
        parts += _unmeasured(contests)
        parts += _missing("cpu" if env.cuda == "none" else "cuda", set(contests))
    return "\n\n".join([*parts, *_doubts(file, name, newest)])


def _unmeasured(contests: dict[tuple[str, str, str, str], Cell]) -> list[str]:
    """A list of the cells without any time, with the reasons."""
    rows = [rows[0] for rows in contests.values() if all(row["us"] is None for row in rows)]
    lines = [f"- {_name(row)}: {row['reason']}" for row in rows]
    return ["Not measured:", "\n".join(lines)] if lines else []


def _missing(device: str, measured: set[tuple[str, str, str, str]]) -> list[str]:
    """A paragraph that counts, per op, the cells of its grid on `device` without rows."""
    texts = []
    for name in sorted({op for op, *_ in measured} & set(results.declared())):
        asked = {
            (name, cell.case.name, regime, cell.direction)
            for cell in cells(results.declared()[name], device)
            for regime in regimes_of(cell.case)
        }
        if asked - measured:
            texts.append(f"{name} {len(asked - measured)} of {len(asked)}")
    return [f"Cells not measured yet: {', '.join(texts)}."] if texts else []


def _doubts(file: File, name: str, newest: bool) -> list[str]:
    """A paragraph on rows that measured earlier sources, and one that counts the warnings."""
    rows = [row for row in file.rows if "op" in row]
    note = note_on_sources(rows, name, newest=newest)
    paragraphs = [note] if note else []
    return paragraphs + _warned(rows)


def _warned(rows: list[dict[str, Any]]) -> list[str]:
    """A paragraph that counts the warnings."""
    warned = sum(1 for row in rows if row.get("warning"))
    why = "other processes were on the GPU, or its speed drifted"
    return [f"{warned} of {len(rows)} rows carry a `warning` in the file: {why}."] if warned else []


def _group(op: str, direction: str, regime: str, members: Sequence[Cell]) -> tuple[list[str], list[str]]:
    """A row of the table, and a list of the cells in which a peer beats the fastest of our kernels."""
    against_eager, regrets = [], []
    ratios: list[tuple[float, str, dict[str, Any], dict[str, Any]]] = []
    for rows in members:
        timed = {row["candidate"]: row for row in rows if row["us"]}
        chosen = next((row for row in timed.values() if row["chosen"]), None)
        incumbent = timed.get(rows[0]["candidate"])
        if chosen and incumbent:
            against_eager.append(chosen["us"] / incumbent["us"])
            regrets.append(chosen["us"] / min(row["us"] for row in timed.values() if row["verified"]))
        if any(results.candidate_of(row) is None for row in timed.values()):
            continue  # nothing says any more whose kernel that was
        ours = [row for row in timed.values() if results.ours(row)]
        peers = [row for row in timed.values() if not results.ours(row)]
        if ours and peers:
            mine, best = (min(rows, key=lambda row: row["us"]) for rows in (ours, peers))
            ratios.append((mine["us"] / best["us"], rows[0]["case"], mine, best))
    texts = [f"{statistics.median(r):.2f}, {max(r):.2f}" if r else "-" for r in (against_eager, regrets)]
    way = "forward + backward" if direction == "both" else direction
    start = [op, way, regime, str(len(members)), *texts]
    if not ratios:
        return [*start, "-", "-", "-"], []
    ratios.sort(key=lambda entry: entry[0], reverse=True)
    losing = [
        f"- {_name(mine)}: {mine['us']:.1f} us, {best['candidate']}{_mark(best)} {best['us']:.1f} us "
        f"({ratio:.2f})"
        for ratio, _, mine, best in ratios
        if ratio > 1
    ]
    worst, case, mine, best = ratios[0]
    median = statistics.median(ratio for ratio, *_ in ratios)
    cell = f"{case}: {mine['us']:.1f} us, {best['candidate']}{_mark(best)} {best['us']:.1f} us"
    return [*start, f"{median:.2f}, {worst:.2f}", cell, f"{len(losing)} of {len(ratios)}"], losing


def _selection(file: File, name: str, newest: bool) -> str:
    summary = file.summary
    command = "bakeoff bench --suite selection"
    lines = []
    for regime in ("eager", "graph", "compiled"):
        if regime in summary:
            part = summary[regime]
            lines.append(
                f"- {regime}: over {part['cells']} cells the choice takes {part['geomean_regret']:.3f} "
                f"times as long as the best candidate (geometric mean), {part['worst_regret']:.2f} at worst "
                f"({part['worst_cell']}), and {part['worst_against_eager']:.2f} times as long as eager at "
                f"worst ({part['worst_against_eager_cell']})."
            )
    if "overhead_us" in summary:
        texts = [f"{op} {us:.2f} us" for op, us in summary["overhead_us"].items()]
        lines.append(f"- Choosing adds to a call it has seen before: {', '.join(texts)}.")
    if "tune_s" in summary:
        lines.append(
            f"- The small LLM-Med is tuned from nothing in {summary['tune_s']:.1f} s. "
            f"With its table there, a start spends {summary['cached_start_s']:.2f} s on selection "
            f"and {summary['load_s']:.1f} s on loading the winners' compiled code."
        )
    start = f"Selection on {stamp(file.env)} (`{command}` wrote [{name}](../{name})):"
    return "\n\n".join([start, "\n".join(lines), *_doubts(file, name, newest)])


def _steps(file: File, name: str, newest: bool) -> str:
    headings = ("step", "mode", "us a step", "bytes/s", "launches", "syncs", "peak MiB", "loss", "on")
    lines = []
    order = [*OF_MEMORY[:1], *MODES]
    for row in sorted(file.rows, key=lambda row: (row["model"], order.index(row["mode"]))):
        mode = row["mode"] + (" (not captured)" if row.get("reason") else "")
        times = [f"{row['step_us']:,.0f}", f"{row['tokens_per_s']:,.0f}"]
        counts = [_count(row["launches"]), _count(row["syncs"])]
        peak = row["peak_bytes"]
        last = ["-" if peak is None else f"{peak / 2**20:,.0f}", f"{row['loss']:.4f}", row["date"][:10]]
        lines.append([_size(row), mode, *times, *counts, *last])
    command = "bakeoff bench --suite step"
    start = f"Whole training steps on {stamp(file.env)} (`{command}` wrote [{name}](../{name})):"
    parts = [start, markdown_table(headings, lines)]
    if any(row.get("device_us") for row in file.rows):
        parts += ["Where the device's time goes in those that were profiled, in us a step:", _profiles(file)]
    return "\n\n".join(parts)


_KINDS = {
    "matrix products": ("nvjet", "gemm", "cublas", "cutlass"),
    "attention": ("cudnn", "flash", "fmha"),
    "norms": ("norm",),
    "gated MLP": ("silu", "swiglu"),
    "rotation": ("rotary", "rotate", "slice_stack", "slice_split_with_sizes"),
    "optimizer": ("adamw", "multi_tensor_apply", "global_norm", "FusedAdam"),
    "loss and embedding": (
        "softmax",
        "nll_loss",
        "embedding",
        "gather",
        "radix_sort",
        "segment",
        "grad_weight",
        "_begin",  # from here on linear_cross_entropy's
        "product_and_rows",
        "to_rows",
        "_finish",
        "_multiply",
    ),
    "copies, casts and fills": ("cat", "Cat", "copy", "memset", "Memset", "Memcpy", "Fill"),
}
"""What kernels are for, by words in their names; of several that fit the first counts. Where one kernel makes
the head's logits and uses them up, that product counts as loss."""


def _profiles(file: File) -> str:
    kinds = [*_KINDS, "everything else"]
    lines = []
    for row in file.rows:
        spent = dict.fromkeys(kinds, 0.0)
        for kernel, us in row.get("device_us", {}).items():
            kind = next(
                (kind for kind, words in _KINDS.items() if any(w in kernel for w in words)), kinds[-1]
            )
            spent[kind] += us
        if row.get("device_us"):
            figures = [f"{us:,.0f}" for us in (*spent.values(), sum(spent.values()))]
            lines.append([_size(row), row["mode"], *figures])
    return markdown_table(("step", "mode", *kinds, "together"), lines)


def _decode(file: File, name: str, newest: bool) -> str:
    headings = ("model", "rows", "mode", "us a byte", "bytes/s", "launches", "kernels", "syncs", "s before")
    lines = []
    for row in file.rows:
        size = f"{row['model']}, {row['params'] / 1e6:.1f}M, {row['precision']}"
        counts = [_count(row[what]) for what in ("launches", "kernels", "syncs")]
        times = [f"{row['step_us']:,.0f}", f"{row['tokens_per_s']:,.0f}"]
        lines.append([size, str(row["batch"]), row["mode"], *times, *counts, f"{row['begin_s']:.2f}"])
    start = (
        f"Text on {stamp(file.env)} (`bakeoff bench --suite decode` wrote [{name}](../{name})), sampled "
        'behind prompts of 64 bytes; "s before" are the prompt, the first bytes and the capture:'
    )
    return "\n\n".join([start, markdown_table(headings, lines), *_warned(file.rows)])


def _swap(file: File, name: str, newest: bool) -> str:
    headings = ("step", "mode", "ms a step", "tokens/s", "peak MiB", "loss", "measured at")
    lines, reasons = [], []
    for row in file.rows:
        if row["step_us"] is None:
            reasons.append(f"{row['mode']}: {row['reason']}.")
            continue
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.0f}"
        figures = [f"{row['step_us'] / 1e3:,.1f}", f"{row['tokens_per_s']:,.0f}", peak, f"{row['loss']:.4f}"]
        lines.append([_size(row), row["mode"], *figures, row["date"][:16].replace("T", " ")])
    start = (
        f"A Hugging Face Llama's training step, {stamp(file.env)} (`bakeoff bench --suite swap` wrote "
        f"[{name}](../{name})); compare rows measured at one time, since machines differ:"
    )
    return "\n\n".join([start, markdown_table(headings, lines), *reasons])


def _ranks(file: File, name: str, newest: bool) -> str:
    headings = ("step", "GPUs", "mode", "us a step", "bytes/s", "largest difference from one GPU")
    lines = []
    for row in file.rows:
        apart = row.get("largest_difference_from_one_gpu")
        figures = [f"{row['step_us']:,.0f}", f"{row['tokens_per_s']:,.0f}"]
        figures.append("-" if apart is None else f"{apart:.1e}")
        lines.append([_size(row), str(row["ranks"]), row["mode"], *figures])
    start = f"Training on several GPUs, {stamp(file.env)} ([{name}](../{name})):"
    return f"{start}\n\n{markdown_table(headings, lines)}"


def _context(file: File, name: str, newest: bool) -> str:
    headings = (
        "setting", "tokens a GPU", "method", "GPUs", "us forward", "TFLOP/s a GPU", "us both",
        "TFLOP/s a GPU", "peak MiB", "received MB", "off by",
    )  # fmt: skip
    lines, reasons = [], []
    for row in file.rows:
        place = [row["setting"], f"{row['tokens']:,}", row["method"], str(row["ranks"])]
        if row["both_us"] is None:
            reasons.append(f"{row['setting']}, {row['method']}: {row['reason']}.")
            continue
        figures = []
        for what in ("forward", "both"):
            figures += [f"{row[f'{what}_us']:,.0f}", f"{row[f'{what}_tflops']:,.0f}"]
        peak, moved, apart = row["peak_bytes"], row["received_bytes"], row["difference"]
        figures.append("-" if peak is None else f"{peak / 2**20:,.0f}")
        figures.append("-" if moved is None else f"{moved / 1e6:,.1f}")
        figures.append("-" if apart is None else f"{apart:.1e}")
        lines.append([*place, *figures])
    start = (
        f"Dilated attention over several GPUs, {stamp(file.env)} (`torchrun ... -m bakeoff bench --suite "
        f'context` wrote [{name}](../{name})); "alone" is one GPU with as many tokens as each has beside it, '
        '"off by" the '
        "largest relative distance from one GPU's results in float32:"
    )
    return "\n\n".join([start, markdown_table(headings, lines), *reasons])


def _size(row: dict[str, Any]) -> str:
    size = f"{row['model']}, {row['params'] / 1e6:.1f}M, {row['batch']} x {row['seq']}"
    return f"{size}, {row['precision']}"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _contests(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str, str, str], Cell]:
    contests: dict[tuple[str, str, str, str], Cell] = defaultdict(list)
    for row in rows:
        if "op" in row:  # runs of whole models have none
            contests[cell_of(row)].append(row)
    return contests


def _mark(row: dict[str, Any]) -> str:
    return "" if row["verified"] else " (inaccurate)"


def _name(row: dict[str, Any]) -> str:
    return f"{row['op']} {row['case']}, {row['direction']}, {row['regime']}"


SECTIONS: dict[str, Callable[[File, str, bool], str]] = dict(
    zip(FILES, (_ops, _selection, _steps, _decode, _swap, _ranks, _context), strict=True)
)
"""The section on each file of a card, from the file, its path, and whether the card is the newest."""


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 where a file is out of date.")
@click.option("--readme", type=click.Path(path_type=Path), default=Path("README.md"), show_default=True)
@click.option(
    "--results",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("results"),
    show_default=True,
)
def main(check: bool, readme: Path, folder: Path) -> None:
    """Write what was measured into the README and, beside it, docs/results.md and docs/images/results.svg."""
    docs = readme.parent / "docs"
    wanted = {
        readme: replaced(_text(readme), overview.table(folder)),
        docs / "results.md": replaced(_text(docs / "results.md"), render(folder)),
        docs / "images" / "results.svg": overview.picture(folder),
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
    if check and stale:
        names = ", ".join(map(str, stale))
        click.echo(f"out of date: {names}. Run python -m bakeoff.apps.bench.readme", err=True)
        sys.exit(1)
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(wanted[path], "utf-8")


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise click.ClickException(
            f"{path} can't be read ({error.strerror}): run this in the repository, or give another --readme"
        ) from None


if __name__ == "__main__":
    main()
