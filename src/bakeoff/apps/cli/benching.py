"""bench: runs a suite and prints each result as it is measured."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from bakeoff.apps.bench import (
    contests,
    context,
    decode,
    launch,
    memory_text,
    nested,
    ranks,
    recall,
    regret,
    results,
    step,
    swap,
)
from bakeoff.apps.bench.memory_forms import FORMS
from bakeoff.apps.bench.regret import SelectionRow
from bakeoff.apps.bench.results import ResultsError
from bakeoff.apps.bench.suites import Cell, cells, chosen
from bakeoff.apps.cli.terminal import console, declared, print_plain, working
from bakeoff.apps.render import explained, selection_table, variants_table
from bakeoff.apps.tabular import named_values, terminal_table
from bakeoff.device import current_device
from bakeoff.parallel import launched, local_rank
from bakeoff.select import Op, Verdict, find_op
from bakeoff.select.declare.key import REGIMES

__all__ = ["run"]


_OWN: dict[str, tuple[str, tuple[str, ...]]] = {
    "step": ("measures whole steps", ("OP", "--regimes", "--jobs")),
    "decode": ("generates text", ("OP", "--budget", "--regimes", "--jobs")),
    "recall": ("trains models", ("OP", "--budget", "--regimes", "--jobs")),
    "text": ("trains models", ("OP", "--budget", "--regimes", "--jobs")),
    "nested": ("trains models", ("OP", "--budget", "--regimes", "--filter", "--jobs")),
    "swap": ("measures whole steps", ("OP", "--regimes", "--jobs")),
    "ranks": ("trains models", ("OP", "--regimes", "--jobs", "--resume")),
    "context": ("has its own lengths", ("OP", "--budget", "--regimes", "--jobs", "--resume")),
    "launch": ("has its own lengths", ("--filter", "--regimes")),
}
"""What suites do that is not about the ops' cases, and what therefore says nothing to them."""


def run(
    names: Sequence[str],
    suite: str,
    regimes: str | None,
    direction: str | None,
    device: str,
    out: Path | None,
    text: str,
    budget: float | None,
    resume: bool,
    jobs: int,
    thorough: bool,
    variants: bool,
    data: str | None,
    seeds: int,
    steps: int | None,
) -> None:
    """Run a suite and print where its results are."""
    device = str(current_device(device))
    if suite != "ops" and (thorough or variants):
        raise ResultsError("--thorough and --variants belong to --suite ops: leave them out")
    if suite != "ops" and direction is not None:
        raise ResultsError("--direction belongs to --suite ops: leave it out")
    if data is not None and suite != "text":
        raise ResultsError("--data belongs to --suite text: leave it out")
    if seeds != 3 and suite not in ("recall", "text"):
        raise ResultsError("--seeds belongs to --suite recall and text: leave it out")
    if steps is not None and suite not in ("recall", "text"):
        raise ResultsError("--steps belongs to --suite recall and text: leave it out")
    given = {"OP": names, "--filter": text, "--regimes": regimes, "--jobs": jobs > 1, "--resume": resume}
    _refuse(suite, {**given, "--budget": budget is not None})
    whole: dict[str, Callable[[], None]] = {
        "step": lambda: _run_step(device, out, text, 60.0 if budget is None else budget, resume),
        "swap": lambda: _run_swap(device, out, text, 60.0 if budget is None else budget, resume),
        "decode": lambda: _run_decode(device, out, text, resume),
        "recall": lambda: _run_memories(suite, device, out, text, resume, data, seeds, steps),
        "text": lambda: _run_memories(suite, device, out, text, resume, data, seeds, steps),
        "nested": lambda: _run_nested(device, out, resume),
        "ranks": lambda: _run_ranks(device, out, text, 30.0 if budget is None else budget),
        "context": lambda: _run_context(device, out, text),
    }
    if suite in whole:
        whole[suite]()
        return
    ops = [find_op(name) for name in names] or list(declared().values())
    if suite == "launch":
        _run_launch(ops, device, out, 1.0 if budget is None else budget, resume, jobs)
        return
    budget = 2.0 if budget is None else budget
    chosen_regimes = _regimes(regimes, device)
    if suite == "selection" and chosen_regimes:
        raise ResultsError("--regimes belongs to --suite ops: leave it out")
    count = sum(1 for op in ops for _ in cells(op, device, text, direction))
    if not count:
        if any(True for op in ops for _ in cells(op, device, text)):
            raise ResultsError("no case has a backward: leave --direction out")
        known = ", ".join(sorted({cell.case.name for op in ops for cell in cells(op, device)}))
        raise ResultsError(f"no case's name or shapes contain {text!r}; the cases are {known}")
    out = out or Path("results", results.slug(device), f"{suite}.json")
    printer = console()
    printer.print(
        f"{count} cells of {', '.join(op.name for op in ops)} on {device}, to {out}", highlight=False
    )
    with working(printer, "measuring the device's limits") as status:
        if suite == "ops":
            contests.run_ops(
                ops,
                device,
                out,
                regimes=chosen_regimes,
                direction=direction,
                text=text,
                budget_s=budget,
                resume=resume,
                jobs=jobs,
                thorough=thorough,
                variants=variants,
                hear=_cell_printer(printer, device, variants=variants),
                announce=status.update,
            )
        else:
            regret.run_selection(
                ops,
                device,
                out,
                text=text,
                budget_s=budget,
                resume=resume,
                jobs=jobs,
                hear=_row_printer(printer),
                announce=status.update,
            )
            _print_summary(out, printer)
    print_plain(printer, f"results: {out}")


def _refuse(suite: str, given: dict[str, object]) -> None:
    """Raises for an option that is given and that this suite doesn't have."""
    does, without = _OWN.get(suite, ("", ()))
    if any(given[option] for option in without):
        raise ResultsError(f"--suite {suite} {does}: leave {', '.join(without[:-1])} and {without[-1]} out")


def _run_step(device: str, out: Path | None, text: str, budget: float, resume: bool) -> None:
    out = out or Path("results", results.slug(device), "step.json")
    printer = console()
    printer.print(f"training steps on {device}, to {out}", highlight=False)

    def hear(row: step.StepRow) -> None:
        figures = f"{row.step_us:10.1f} us  {row.tokens_per_s:12,.0f} bytes/s  loss {row.loss:.4f}"
        if row.launches is not None:
            peak, held = (row.peak_bytes or 0) / 2**20, row.graph_bytes / 2**20
            figures += f"  {row.launches} launches, {row.kernels} kernels, {row.syncs} syncs"
            figures += f", peak {peak:.0f} MiB, graph {held:.0f} MiB"
        print_plain(printer, f"{row.model:14}{row.mode:18}{figures}")
        if row.reason:
            printer.print(Text(f"  not captured: {row.reason}", style="yellow"))

    with working(printer, "measuring the device's limits") as status:
        step.run_step(
            device, out, budget_s=budget, resume=resume, text=text, hear=hear, announce=status.update
        )
    print_plain(printer, f"results: {out}")


def _run_swap(device: str, out: Path | None, text: str, budget: float, resume: bool) -> None:
    out = out or Path("results", results.slug(device), "swap.json")
    printer = console()
    printer.print(f"a Llama's training step on {device}, to {out}", highlight=False)

    def hear(row: swap.SwapRow) -> None:
        figures = row.reason
        if row.step_us is not None:
            figures = f"{row.step_us / 1e3:10.2f} ms  {row.tokens_per_s:10,.0f} tokens/s  loss {row.loss:.4f}"
            figures += f"  gradients off by {row.gradients:.2g}  peak {(row.peak_bytes or 0) / 2**20:.0f} MiB"
        print_plain(printer, f"{row.mode:14}{figures}")

    with working(printer, "measuring the device's limits") as status:
        given: dict[str, Any] = {"resume": resume, "hear": hear, "announce": status.update}
        swap.run_swap(device, out, text=text, budget_s=budget, **given)
    print_plain(printer, f"results: {out}")


def _run_decode(device: str, out: Path | None, text: str, resume: bool) -> None:
    out = out or Path("results", results.slug(device), "decode.json")
    printer = console()
    printer.print(f"text on {device}, to {out}", highlight=False)

    def hear(row: decode.DecodeRow) -> None:
        counts = "" if row.launches is None else f", {row.launches} launches, {row.kernels} kernels"
        print_plain(
            printer,
            f"{row.model:30} {row.batch:3} rows {row.precision:8} {row.mode:22} {row.step_us:10.1f} us "
            f"{row.tokens_per_s:10,.0f} bytes/s{counts}, {row.begin_s:.2f} s before",
        )

    with working(printer, "measuring the device's limits") as status:
        decode.run_decode(device, out, text=text, resume=resume, hear=hear, announce=status.update)
    print_plain(printer, f"results: {out}")


def _run_memories(
    suite: str,
    device: str,
    out: Path | None,
    text: str,
    resume: bool,
    data: str | None,
    seeds: int,
    steps: int | None,
) -> None:
    forms = [form for form in FORMS if chosen(text, form)]
    if not forms:
        raise ResultsError(f"no form's name contains {text!r}; the forms are {', '.join(FORMS)}")
    out = out or Path("results", results.slug(device), f"{suite}.csv")
    printer = console()
    printer.print(f"{len(forms)} models, {seeds} seeds on {device}, to {out}", highlight=False)

    def hear(row: dict[str, str]) -> None:
        right = [f"{float(row[name]):.1%} right" for name in ("right_near", "right_far") if name in row]
        score = f"{row['bits_per_byte']} bits/byte" if suite == "text" else ", ".join(right)
        print_plain(printer, f"{row['form']:24} seed {row['seed']}  {row['step_ms']} ms a step  {score}")

    with working(printer, "building the models") as status:
        given: dict[str, Any] = {"forms": forms, "seeds": range(seeds), "resume": resume, "hear": hear}
        given["announce"] = status.update
        if suite == "recall":
            recall.run_recall(device, out, steps=steps, **given)
        else:
            plan = memory_text.plan_for(device, data or "stdlib")
            plan = plan if steps is None else msgspec.structs.replace(plan, steps=steps)
            memory_text.run_text(device, out, plan, **given)
    print_plain(printer, f"results: {out}")


def _run_launch(
    ops: Sequence[Op], device: str, out: Path | None, budget: float, resume: bool, jobs: int
) -> None:
    out = out or Path("results", results.slug(device), "launch.json")
    printer = console()
    printer.print(f"launching on {device}, to {out}", highlight=False)

    def hear(cell: Cell, rows: list[launch.LaunchRow]) -> None:
        title = Text(f"{cell.op.name} {cell.case.name}, {cell.direction}", style="bold")
        found = {(row.candidate, row.measure): row for row in rows}
        columns = [("candidate", "name"), ("host us", "right"), ("device us", "right"), ("why", "left")]
        lines = []
        for name in cell.op.by_name:
            measured = [found.get((name, measure)) for measure in ("host", "device")]
            times = [f"{row.us:.1f}" if row and row.us else "-" for row in measured]
            lines.append([name, *times, measured[0].reason if measured[0] else ""])
        printer.print(title)
        printer.print(terminal_table(columns, lines))

    with working(printer, "measuring the device's limits") as status:
        launch.run_launch(
            ops, device, out, budget_s=budget, resume=resume, jobs=jobs, hear=hear, announce=status.update
        )
    print_plain(printer, f"results: {out}")


def _run_ranks(device: str, out: Path | None, text: str, budget: float) -> None:
    printer = console()

    def hear(row: ranks.RanksRow) -> None:
        apart = row.largest_difference_from_one_gpu
        figures = f"{row.step_us:10.1f} us a step  {row.tokens_per_s:12,.0f} bytes/s"
        figures += "" if apart is None else f"  losses within {apart:.1e} of one GPU's"
        print_plain(printer, f"{row.model:14}{row.mode:8}{row.batch:4} rows  {figures}")

    with working(printer, f"training over {launched()} ranks") as status:
        given: dict[str, Any] = {"hear": hear, "announce": status.update}
        file = ranks.run_ranks(device, out, text=text, budget_s=budget, **given)
    if local_rank() == 0:
        print_plain(printer, f"results: {file}")


def _run_context(device: str, out: Path | None, text: str) -> None:
    printer = console()

    def hear(row: context.ContextRow) -> None:
        figures = row.reason
        if row.both_us is not None:
            figures = f"{row.forward_us:12,.1f} us, {row.forward_tflops:6.1f} TFLOP/s forward"
            figures += f"  {row.both_us:12,.1f} us, {row.both_tflops:6.1f} TFLOP/s both"
            figures += "" if row.peak_bytes is None else f"  peak {row.peak_bytes / 2**20:,.0f} MiB"
            figures += "" if row.difference is None else f"  off by {row.difference:.1e}"
        print_plain(printer, f"{row.setting:26}{row.method:12}{figures}")

    with working(printer, f"dilated attention over {launched()} ranks") as status:
        file = context.run_context(device, out, text=text, hear=hear, announce=status.update)
    if local_rank() == 0:
        print_plain(printer, f"results: {file}")


def _run_nested(device: str, out: Path | None, resume: bool) -> None:
    out = out or Path("results", results.slug(device), "nested.json")
    printer = console()
    printer.print(f"training with and without learned multipliers on {device}, to {out}", highlight=False)

    def hear(row: nested.NestedRow) -> None:
        ends = ", ".join(f"{name} {part[-1]:.2f}" for name, part in row.multipliers.items())
        figures = f"{row.bits_per_byte:.4f} bits/byte  loss {row.loss:.4f}  {row.step_us:8.1f} us  {ends}"
        print_plain(printer, f"{row.optimizer:12}lr {row.lr:<8g} seed {row.seed}  {figures}")

    with working(printer, "measuring the device's limits") as status:
        nested.run_nested(
            device, out, nested.plan_for(device), resume=resume, hear=hear, announce=status.update
        )
    _print_summary(out, printer)
    print_plain(printer, f"results: {out}")


def _cell_printer(printer: Console, device: str, *, variants: bool) -> contests.Hear:
    def hear(cell: Cell, verdicts: list[Verdict], reason: str) -> None:
        printer.print(Text(f"{cell.op.name} {cell.case.name}, {cell.direction}", style="bold"))
        if reason:
            printer.print(Text(f"  not measured: {reason}", style="red"))
        printer.print(selection_table(explained(verdict, device, "this run") for verdict in verdicts))
        if variants and verdicts:
            printer.print(variants_table(verdicts[0]))  # one screening serves all regimes

    return hear


def _row_printer(printer: Console) -> regret.Hear:
    def hear(rows: list[SelectionRow], reason: str) -> None:
        if reason:
            printer.print(Text(f"not measured: {rows[0].op} {rows[0].case}: {reason}", style="red"))
        for row in rows:
            if row.us is not None and (row.chosen or row.measure != "time"):
                end = f"  regret {row.regret:.3f}, {row.against_eager:.2f} of eager" if row.regret else ""
                cell = f"{row.op} {row.case}, {row.direction}, {row.regime}"
                line = f"{cell}: {row.candidate} {row.us:.2f} us{end}"
                print_plain(printer, line)

    return hear


def _print_summary(out: Path, printer: Console) -> None:
    rows = [
        (name, part, f"{figure:.3f}" if isinstance(figure, float) else str(figure))
        for name, value in results.read(out).summary.items()
        for part, figure in (value.items() if isinstance(value, dict) else [("", value)])
    ]
    printer.print(named_values(rows))


def _regimes(text: str | None, device: str) -> tuple[str, ...] | None:
    if text is None:
        return None
    regimes = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [name for name in regimes if name not in REGIMES]
    if unknown or not regimes:
        raise ResultsError(f"--regimes {text!r}: the regimes are {', '.join(REGIMES)}")
    if "graph" in regimes and not device.startswith("cuda"):
        raise ResultsError("--regimes graph needs a CUDA device: use eager or compiled on the CPU")
    return regimes
