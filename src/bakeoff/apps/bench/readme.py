"""The README's table of results.

``python -m bakeoff.apps.bench.readme`` writes it, ``--check`` only compares.

Nothing in it is typed by hand: it says what the files in results/ say.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from bakeoff.apps.bench import results
from bakeoff.apps.bench.results import File, cell_of
from bakeoff.apps.bench.step import MODES
from bakeoff.apps.bench.suites import cells
from bakeoff.select.contests.contest import regimes_of

__all__ = ["render", "replaced"]

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
NONE = "No measurements are committed yet."

Cell = list[dict[str, Any]]
"""The rows of one contest."""


def render(folder: Path) -> str:
    """The text between the markers: a section per machine with results under `folder`."""
    sections = []
    for machine in sorted(path for path in folder.glob("*") if path.is_dir()):
        for file, section in SECTIONS.items():
            if (machine / file).exists():
                sections.append(section(results.read(machine / file), f"{folder.name}/{machine.name}/{file}"))
    return "\n\n".join(sections) or NONE


def replaced(readme: str, text: str) -> str:
    """`readme` with `text` between the markers. Raises ValueError where a marker is missing."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README needs the lines {BEGIN} and {END}, in this order")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _machine(file: File, name: str) -> str:
    env = file.env
    found = _cells(file.rows)
    limits = f"copy {env.copy_gbps / 1000:.2f} TB/s, matmul {env.matmul_tflops:.3g} TFLOP/s"
    versions = f"torch {env.torch}, triton {env.triton}"
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
    lines = [
        f"**{env.device}**, {versions}, {env.date[:10]}: {limits}. `bakeoff bench` wrote [{name}]({name}).",
        (
            "Ratios of times, median and worst; below 1 is faster; plain is PyTorch op by op. Lost are cells "
            "where a peer is faster; peers that were timed but are out for their error count, too."
        ),
        "",
        *_header(*headings),
    ]
    groups: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for (op, _, regime, direction), rows in found.items():
        groups[op, direction, regime].append(rows)
    lost: list[str] = []
    for (op, direction, regime), members in sorted(groups.items()):
        line, losing = _group(op, direction, regime, members)
        lines.append(line)
        lost += losing
    unmeasured = [rows[0] for rows in found.values() if all(row["us"] is None for row in rows)]
    if lost:
        lines += [
            "",
            f"<details><summary>The {len(lost)} cells in which a peer is faster than ours</summary>",
            "",
            *lost,
            "",
            "</details>",
        ]
    if unmeasured:
        lines += ["", "Not measured:", "", *(f"- {_name(row)}: {row['reason']}" for row in unmeasured)]
    return "\n".join([*lines, *_missing("cpu" if env.cuda == "none" else "cuda", set(found)), *_doubts(file)])


def _missing(device: str, measured: set[tuple[str, str, str, str]]) -> list[str]:
    """A paragraph that counts, per op, the cells of its grid on `device` that nobody has measured."""
    texts = []
    for name in sorted({op for op, *_ in measured} & set(results.declared())):
        asked = {
            (name, cell.case.name, regime, cell.direction)
            for cell in cells(results.declared()[name], device)
            for regime in regimes_of(cell.case)
        }
        if asked - measured:
            texts.append(f"{name} {len(asked - measured)} of {len(asked)}")
    return ["", f"Cells not measured yet: {', '.join(texts)}."] if texts else []


def _doubts(file: File) -> list[str]:
    """A paragraph that names what has changed since it was measured, and one that counts the warnings."""
    rows = [row for row in file.rows if "op" in row]
    stale: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        stale[f"{row['op']} {row['candidate']}"].append(not results.current(row))
    texts = [f"{name} ({sum(old)} of {len(old)} rows)" for name, old in sorted(stale.items()) if any(old)]
    lines = ["", f"Stale, measured with another source: {', '.join(texts)}."] if texts else []
    warned = sum(1 for row in rows if row.get("warning"))
    if warned:
        why = "other processes were on the GPU, or its speed drifted"
        lines += ["", f"{warned} of {len(rows)} rows carry a `warning` in the file: {why}."]
    return lines


def _group(op: str, direction: str, regime: str, members: Sequence[Cell]) -> tuple[str, list[str]]:
    """A line of the table, and the cells in which a peer beats the fastest of our kernels."""
    against_eager, regrets = [], []
    ratios: list[tuple[float, str, dict[str, Any], dict[str, Any]]] = []
    for rows in members:
        timed = {row["candidate"]: row for row in rows if row["us"]}
        chosen = next((row for row in timed.values() if row["chosen"]), None)
        incumbent = timed.get(rows[0]["candidate"])
        if chosen and incumbent:
            against_eager.append(chosen["us"] / incumbent["us"])
            regrets.append(chosen["us"] / min(row["us"] for row in timed.values() if row["verified"]))
        ours = [row for row in timed.values() if results.ours(row)]
        peers = [row for row in timed.values() if not results.ours(row)]
        if ours and peers:
            mine, best = (min(rows, key=lambda row: row["us"]) for rows in (ours, peers))
            ratios.append((mine["us"] / best["us"], rows[0]["case"], mine, best))
    texts = [f"{statistics.median(r):.2f}, {max(r):.2f}" if r else "-" for r in (against_eager, regrets)]
    way = "forward + backward" if direction == "both" else direction
    start = f"| {op} | {way} | {regime} | {len(members)} | {' | '.join(texts)}"
    if not ratios:
        return f"{start} | - | - | - |", []
    ratios.sort(key=lambda found: found[0], reverse=True)
    losing = [
        f"- {_name(mine)}: {mine['us']:.1f} us, {best['candidate']}{_mark(best)} {best['us']:.1f} us "
        f"({ratio:.2f})"
        for ratio, _, mine, best in ratios
        if ratio > 1
    ]
    worst, case, mine, best = ratios[0]
    median = statistics.median(ratio for ratio, *_ in ratios)
    cell = f"{case}: {mine['us']:.1f} us, {best['candidate']}{_mark(best)} {best['us']:.1f} us"
    return f"{start} | {median:.2f}, {worst:.2f} | {cell} | {len(losing)} of {len(ratios)} |", losing


def _selection(file: File, name: str) -> str:
    env, summary = file.env, file.summary
    command = "bakeoff bench --suite selection"
    lines = [f"Selection on {env.device}, {env.date[:10]} (`{command}` wrote [{name}]({name})):", ""]
    for regime in ("eager", "graph", "compiled"):
        if regime in summary:
            found = summary[regime]
            lines.append(
                f"- {regime}: over {found['cells']} cells the choice takes {found['geomean_regret']:.3f} "
                f"times as long as the "
                f"best candidate (geometric mean), {found['worst_regret']:.2f} at worst "
                f"({found['worst_cell']}), and "
                f"{found['worst_against_eager']:.2f} times as long as eager at worst "
                f"({found['worst_against_eager_cell']})."
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
    return "\n".join([*lines, *_doubts(file)])


def _steps(file: File, name: str) -> str:
    env = file.env
    lines = [
        (
            f"Whole training steps on {env.device}, torch {env.torch} "
            f"(`bakeoff bench --suite step` wrote [{name}]({name})):"
        ),
        "",
        *_header("step", "mode", "us a step", "bytes/s", "launches", "syncs", "peak MiB", "loss", "on"),
    ]
    for row in sorted(file.rows, key=lambda row: MODES.index(row["mode"])):
        mode = row["mode"] + (" (not captured)" if row.get("reason") else "")
        times = [f"{row['step_us']:,.0f}", f"{row['tokens_per_s']:,.0f}"]
        counts = [_count(row["launches"]), _count(row["syncs"])]
        peak = row["peak_bytes"]
        last = ["-" if peak is None else f"{peak / 2**20:,.0f}", f"{row['loss']:.4f}", row["date"][:10]]
        lines.append(f"| {' | '.join([_size(row), mode, *times, *counts, *last])} |")
    return "\n".join(lines)


def _ranks(file: File, name: str) -> str:
    env = file.env
    lines = [
        f"Training on several {env.device}, torch {env.torch}, {env.date[:10]} ([{name}]({name})):",
        "",
        *_header("step", "GPUs", "mode", "us a step", "bytes/s", "largest difference from one GPU"),
    ]
    for row in file.rows:
        apart = row.get("largest_difference_from_one_gpu")
        figures = [f"{row['step_us']:,.0f}", f"{row['tokens_per_s']:,.0f}"]
        figures.append("-" if apart is None else f"{apart:.1e}")
        lines.append(f"| {' | '.join([_size(row), str(row['ranks']), row['mode'], *figures])} |")
    return "\n".join(lines)


def _size(row: dict[str, Any]) -> str:
    size = f"{row['model']}, {row['params'] / 1e6:.1f}M, {row['batch']} x {row['seq']}"
    return f"{size}, {row['precision']}"


def _header(*headings: str) -> list[str]:
    return [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _cells(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str, str, str], Cell]:
    found: dict[tuple[str, str, str, str], Cell] = defaultdict(list)
    for row in rows:
        if "op" in row:  # runs of whole models have none
            found[cell_of(row)].append(row)
    return found


def _mark(row: dict[str, Any]) -> str:
    return "" if row["verified"] else " (inaccurate)"


def _name(row: dict[str, Any]) -> str:
    return f"{row['op']} {row['case']}, {row['direction']}, {row['regime']}"


SECTIONS: dict[str, Callable[[File, str], str]] = {
    "ops.json": _machine,
    "selection.json": _selection,
    "step.json": _steps,
    "train.json": _ranks,
}
"""What is said of each file of a machine, in this order."""


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 when the README is out of date.")
@click.option("--readme", type=click.Path(path_type=Path), default=Path("README.md"), show_default=True)
@click.option(
    "--results",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("results"),
    show_default=True,
)
def main(check: bool, readme: Path, folder: Path) -> None:
    """Write the table of results between the README's markers."""
    try:
        old = readme.read_text("utf-8")
    except OSError as error:
        raise click.ClickException(
            f"{readme} can't be read ({error.strerror}): run this in the repository, or give another --readme"
        ) from None
    new = replaced(old, render(folder))
    if check and new != old:
        click.echo(f"{readme} is out of date: run python -m bakeoff.apps.bench.readme", err=True)
        sys.exit(1)
    if new != old:
        readme.write_text(new, "utf-8")


if __name__ == "__main__":
    main()
