"""compare --model: a plan of runs."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from bakeoff.apps.cli.comparing import at_size
from bakeoff.apps.cli.terminal import console, counted, print_plain, working
from bakeoff.apps.compare import CompareError
from bakeoff.apps.compare.plans import Budget, Plan, carry_out, entries
from bakeoff.apps.compare.plans.plan import TASKS
from bakeoff.apps.compare.plans.render import table
from bakeoff.device import current_device

__all__ = ["run"]

Number = TypeVar("Number", int, float)


def run(
    models: Sequence[str],
    overrides: Sequence[str],
    data: str | None,
    minutes: float | None,
    steps: int | None,
    seeds: int,
    size: str | None,
    device: str,
    out: Path | None,
    *,
    lr: str | None,
    rows: str | None,
    flops: float | None,
    tasks: str | None,
    task_steps: int,
    stop_after: float | None,
) -> None:
    """Carry out a plan, or go on with it, and print its table and where it is."""
    device = str(current_device(device))
    if not all(map(str.split, models)):
        raise CompareError("--model is empty: give it a recipe, such as llm-med")
    size = size or ("small" if device.startswith("cuda") else "tiny")
    named = [" ".join([at_size(name, size), *rest]) for name, *rest in map(str.split, models)]
    rates = _numbers(lr, float, "--lr", "5e-4,1e-3,2e-3")
    if not all(0.0 < rate < math.inf for rate in rates):
        raise CompareError(f"--lr {lr!r}: learning rates must be finite and above 0")
    found = entries(named, overrides, rates=rates, data=data, device=device)
    given = {"steps": steps, "minutes": minutes, "flops": flops}
    budgets = [Budget(kind, amount) for kind, amount in given.items() if amount is not None]  # type: ignore[arg-type]
    names = [name.strip() for name in tasks.split(",")] if tasks else []
    if unknown := [name for name in names if name not in TASKS]:
        raise CompareError(f"--tasks has {', '.join(unknown)}: the tasks are {', '.join(TASKS)}")
    lengths = _numbers(rows, int, "--rows", "1024,8192") or [found[0].config.seq_len]
    if min(lengths) < 2:
        raise CompareError(f"--rows has {min(lengths)}: a row needs at least 2 bytes")
    chosen = [name for name in TASKS if name in names]
    plan = Plan.of(found, budgets, lengths, tasks=chosen, task_steps=task_steps, seeds=seeds)
    out = out or Path("runs", f"plan-{time.strftime('%Y%m%d-%H%M%S')}")
    printer = console()
    print_plain(
        printer, f"{counted(plan.size, 'run')} of {counted(len(found), 'model')} on {device}, to {out}"
    )
    with working(printer, "measuring the device's limits") as status:
        record = carry_out(
            plan,
            out,
            stop_after=None if stop_after is None else 60 * stop_after,
            say=functools.partial(print_plain, printer),
            announce=status.update,
        )
    printer.print()
    printer.print(table(record))
    print_plain(printer, f"results: {out / 'plan.json'}, {out / 'runs.jsonl'}")


def _numbers(text: str | None, number: Callable[[str], Number], option: str, example: str) -> list[Number]:
    try:
        return [number(part) for part in text.split(",")] if text else []
    except ValueError:
        raise CompareError(f"{option} {text!r}: give numbers, such as {example}") from None
