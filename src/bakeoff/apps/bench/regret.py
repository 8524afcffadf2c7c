"""Suite "selection", the costs of choosing: regret, overhead of a call, time to tune and to start.

Regret is the time of the choice over that of the best candidate. The choice is made as for any call, at the
bucket's representative; then every candidate is measured anew at the exact shape.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from bakeoff import hardware
from bakeoff.apps.bench import results, starts
from bakeoff.apps.bench.contests import known
from bakeoff.apps.bench.results import Env, File, Row, keep, open_file
from bakeoff.apps.bench.suites import Cell, cells, shrunk
from bakeoff.errors import ContestError
from bakeoff.select import Case, Op, call, find_op, using
from bakeoff.select.contests.contest import regimes_of, timers_for
from bakeoff.select.contests.draw import inputs
from bakeoff.select.contests.measure import Timing, input_sets, interleave, work
from bakeoff.select.contests.side_by_side import Wanted, Workers
from bakeoff.select.declare.key import key
from bakeoff.select.declare.variants import bound
from bakeoff.timing import Clock, seconds_per_call

__all__ = ["SelectionRow", "overhead_us", "regret_rows", "run_selection", "summary"]

OWN = "triton"
TINY = 2**14  # elements of a call that the device finishes sooner than the host issues it


class SelectionRow(Row, kw_only=True):
    """A row of this suite. `measure` says what `us` is: "time" of a call at the exact shape; "host", the
    host's time of a call too small for the device's to matter; "overhead", what selection adds to a call."""

    measure: str = "time"
    regret: float | None = None
    """Time over that of the fastest verified candidate of the cell; the chosen row's is the selector's."""
    against_eager: float | None = None
    """Time over plain PyTorch's."""


Hear = Callable[[list[SelectionRow], str], None]
"""Called for every cell with its rows, and the reason where they have no times."""


def run_selection(
    ops: Sequence[Op],
    device: str,
    out: Path,
    *,
    text: str = "",
    budget_s: float = 2.0,
    resume: bool = False,
    jobs: int = 1,
    tuning: bool = True,
    hear: Hear = lambda rows, reason: None,
    announce: Callable[[str], None] = lambda stage: None,
) -> File:
    """Measure the regret of every cell, the hot path's overhead, host times and (with `tuning`) how long it
    takes to tune the small LLM-Med from nothing and to start with its table; write each to `out` at once.

    The decision on a case that is its bucket's representative is read from ops.json beside `out`, where suite
    "ops" has left it; for the others contests are held, `jobs` at a time. With `resume`, what `out` holds
    already is left out.

    Raises:
        ResultsError: a file can't be read or written, or belongs to another machine or other versions.
    """
    env = results.environment(device)
    file = open_file(out, env)
    contests = open_file(out.with_name("ops.json"), env)

    with Workers(jobs, announce) as workers:
        for op in ops:
            open_ = [
                cell
                for cell in cells(op, device, text)
                if not (resume and known(file, cell, regimes_of(cell.case)))
            ]
            while open_:
                together, open_ = open_[: workers.jobs], open_[workers.jobs :]
                for cell, decided in zip(
                    together, _decided(together, contests, workers, budget_s), strict=True
                ):
                    announce(f"{op.name} {cell.case.name}, {cell.direction}")
                    rows, reason = _measured(cell, decided, budget_s)
                    file = _stored(out, env, rows)
                    hear(rows, reason)
            if resume and _knows_host(file, op, device):
                continue
            announce(f"{op.name}: host time and overhead of a call")
            rows = [*host_rows(op, device, budget_s), *overhead_rows(op, device)]
            file = _stored(out, env, rows)
            hear(rows, "")
    if tuning and not (resume and any("tune_s" in row for row in file.rows)):
        announce("LLM-Med small: tune from nothing, then start with the table")
        file = _stored(out, env, (), starts.measured(device))
    return file


def _knows_host(file: File, op: Op, device: str) -> bool:
    """Whether `file` holds the host's times of this op with today's sources."""
    case = f"host: {_tiny(op, device).case.name}"
    held = [row for row in file.rows if (row.get("op"), row.get("case")) == (op.name, case)]
    return {row["candidate"] for row in held} == set(op.by_name) and all(map(results.current, held))


def _measured(
    cell: Cell, decided: list[Row] | ContestError, budget_s: float
) -> tuple[list[SelectionRow], str]:
    """The rows of a cell and an empty text; or rows without times, and the reason."""
    regimes = regimes_of(cell.case)
    try:
        if isinstance(decided, ContestError):
            raise decided
        rows = list[SelectionRow]()
        for regime in regimes:
            rows += regret_rows(cell, [row for row in decided if row.regime == regime], budget_s)
        return rows, ""
    except (ContestError, torch.cuda.OutOfMemoryError) as error:
        reason = str(error).splitlines()[0]
        failed = [results.failed_row(cell, regime, reason) for regime in regimes]
        return [SelectionRow(**msgspec.structs.asdict(row)) for row in failed], reason


def _decided(
    together: Sequence[Cell], contests: File, workers: Workers, budget_s: float
) -> list[list[Row] | ContestError]:
    """For each cell the result of the contest at its representative, a row per regime and candidate; or the
    error that prevented it."""
    outcomes: dict[int, list[Row] | ContestError] = {}
    open_: dict[int, Wanted] = {}
    for i, cell in enumerate(together):
        op, regimes = find_op(cell.op.name), regimes_of(cell.case)
        own = all(key(op, cell.case, regime) == key(cell.op, cell.case, regime) for regime in regimes)
        rows = known(contests, cell, regimes) if own else []
        if rows:
            outcomes[i] = rows
        else:
            open_[i] = Wanted(op, op.bucket(cell.case), regimes, budget_s)
    places = list(open_)
    for place, outcome in workers.hold(list(open_.values())):
        i = places[place]
        if isinstance(outcome, ContestError):
            outcomes[i] = outcome
        else:
            rows_of = results.rows_of_verdict
            outcomes[i] = [row for verdict in outcome for row in rows_of(together[i], verdict)]
    return [outcomes[i] for i in range(len(together))]


def regret_rows(cell: Cell, decided: Sequence[Row], budget_s: float) -> list[SelectionRow]:
    """Every candidate that the contest verified, measured at the exact case. The chosen one is the one a call
    would run: the winner, or the next best that supports this case."""
    device = cell.case.device
    ranking = sorted(
        (row for row in decided if row.us and row.verified), key=lambda row: (not row.chosen, row.us or 0.0)
    )
    able = [row.candidate for row in ranking if not cell.op.by_name[row.candidate].reasons(cell.case)]
    variants = {row.candidate: row.variant for row in ranking}
    timings, reasons = _timed(cell, decided[0].regime, variants, 3 * hardware.l2_bytes(device), budget_s)
    best = min(timing.us for timing in timings.values())
    eager = timings[cell.op.incumbent.name].us
    cost = cell.op.cost(cell.case)
    limit = hardware.limit_us(cost.bytes, cost.flops, device)
    rows = []
    for row in decided:
        timing = timings.get(row.candidate)
        changed = {
            **_times(timing, limit),
            "bytes": cost.bytes,
            "flops": cost.flops,
            "chosen": row.candidate == able[0],
            "reason": reasons.get(row.candidate, row.reason),
            "regret": timing.us / best if timing else None,
            "against_eager": timing.us / eager if timing else None,
        }
        rows.append(SelectionRow(**{**msgspec.structs.asdict(row), **changed}))
    return rows


def host_rows(op: Op, device: str, budget_s: float) -> list[SelectionRow]:
    """The host's time of a tiny call with its backward, per candidate; not verified."""
    cell = _tiny(op, device)
    timings, reasons = _timed(cell, "eager", dict.fromkeys(op.by_name, ""), 0, budget_s)
    cost = op.cost(cell.case)
    limit = hardware.limit_us(cost.bytes, cost.flops, device)
    rows = []
    for name in op.by_name:
        fields = {**_times(timings.get(name), limit), "reason": reasons.get(name, "")}
        rows.append(_row(cell, name, cost.bytes, cost.flops, measure="host", **fields))
    return rows


def _timed(
    cell: Cell, regime: str, variants: Mapping[str, str], beyond_bytes: int, budget_s: float
) -> tuple[dict[str, Timing], dict[str, str]]:
    """(times by candidate, reasons of those without one), measured in this process with the launch
    configuration that `variants` gives for each candidate."""
    sets = input_sets(cell.op, cell.case, beyond_bytes)
    timer = timers_for(cell.case)[regime]
    samplers, reasons = {}, {}
    for name, variant in variants.items():
        candidate = cell.op.by_name[name]
        unable = candidate.reasons(cell.case)
        if unable:
            reasons[name] = "; ".join(unable)
            continue
        try:
            samplers[name] = timer.sampler(work(cell.op, cell.case, bound(candidate, variant), sets))
        except Exception as error:  # noqa: BLE001  every failure becomes the row's reason
            reasons[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return interleave(samplers, budget_s), reasons


def overhead_rows(op: Op, device: str) -> list[SelectionRow]:
    """The time that selection adds to a call of a kind seen before, over calling the candidate itself."""
    cell = _tiny(op, device)
    case = cell.case.without_grad()
    args = inputs(op, case, 0)
    cost = op.cost(case)
    rows = []
    for name in (op.incumbent.name, OWN):
        if name not in op.by_name or op.by_name[name].reasons(case):
            continue
        with using(**{op.name: name}):
            call(op, *args)
            us = overhead_us(lambda: call(op, *args), lambda: op.by_name[name].implementation(*args), device)  # noqa: B023
        forward = Cell(cell.op, case, "forward")
        rows.append(_row(forward, name, cost.bytes, cost.flops, measure="overhead", us=us))
    return rows


def overhead_us(
    selected: Callable[[], Any],
    direct: Callable[[], Any],
    device: str,
    *,
    rounds: int = 200,
    calls: int = 50,
    clock: Clock = time.perf_counter,
) -> float:
    """Median over `rounds` of (time of `selected` - time of `direct`), microseconds a call, alternating the
    two.

    Only the host's time counts: the device's queue is empty before each round, and never full within one.
    """

    def taken(call: Callable[[], Any]) -> float:
        return 1e6 * seconds_per_call([call], calls, device, clock=clock, host_only=True)

    taken(selected), taken(direct)
    return statistics.median(taken(selected) - taken(direct) for _ in range(rounds))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per regime: cells, geometric mean and worst regret, and the worst time against eager, with their cells;
    per op the largest overhead; the tuning times."""
    result: dict[str, Any] = {}
    chosen = [row for row in rows if row.get("chosen") and row.get("regret")]
    for regime in sorted({row["regime"] for row in chosen}):
        mine = [row for row in chosen if row["regime"] == regime]
        worst = max(mine, key=lambda row: row["regret"])
        slowest = max(mine, key=lambda row: row["against_eager"])
        result[regime] = {
            "cells": len(mine),
            "geomean_regret": math.exp(statistics.fmean(math.log(row["regret"]) for row in mine)),
            "worst_regret": worst["regret"],
            "worst_cell": f"{worst['op']} {worst['case']} {worst['direction']}",
            "worst_against_eager": slowest["against_eager"],
            "worst_against_eager_cell": f"{slowest['op']} {slowest['case']} {slowest['direction']}",
        }
    overheads = [row for row in rows if row.get("measure") == "overhead"]
    if overheads:
        result["overhead_us"] = {
            op: max(row["us"] for row in overheads if row["op"] == op)
            for op in sorted({r["op"] for r in overheads})
        }
    tuned = [row for row in rows if "tune_s" in row]
    if tuned:
        result |= {name: tuned[-1][name] for name in ("tune_s", "cached_start_s", "load_s")}
    return result


def _stored(out: Path, env: Env, rows: Sequence[SelectionRow], tuned: dict[str, Any] | None = None) -> File:
    def change(file: File) -> None:
        keep(file, rows)
        if tuned is not None:
            file.rows = [*(row for row in file.rows if "tune_s" not in row), tuned]
        file.summary = summary(file.rows)

    return results.changed(out, env, change)


def _tiny(op: Op, device: str) -> Cell:
    """The first case of the grid, with gradients if the op has any, small enough that only the host's time
    counts."""
    grid = op.cases()
    case = next((case for case in grid if case.needs_grad), grid[0])
    small = shrunk(op, Case(case.args, device, ""), TINY)
    return Cell(op, Case(small.args, device, case.name), "both" if case.needs_grad else "forward")


def _times(timing: Timing | None, limit: float) -> dict[str, float | None]:
    if timing is None:
        return {"us": None, "us_p20": None, "us_p80": None, "share": None}
    return {"us": timing.us, "us_p20": timing.p20, "us_p80": timing.p80, "share": limit / timing.us}


def _row(cell: Cell, candidate: str, nbytes: int, flops: int, *, measure: str, **fields: Any) -> SelectionRow:
    dtype = next(iter(cell.case.data.values())).dtype
    return SelectionRow(
        op=cell.op.name,
        case=f"{measure}: {cell.case.name}",
        measure=measure,
        dtype=str(dtype).removeprefix("torch."),
        regime="eager",
        direction=cell.direction,
        candidate=candidate,
        bytes=nbytes,
        flops=flops,
        source_hash=cell.op.by_name[candidate].source_hash,
        date=results.now(),
        commit=results.commit(),
        **fields,
    )
