"""Suite "launch": at each length the host's time to issue a call and the device's time to run it.

Where the first is the larger one a caller waits for Python, and what a kernel saves is not seen until calls
are captured in a CUDA graph. Candidates aren't verified here; suite "ops" does that.
"""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from bakeoff import hardware
from bakeoff.apps.bench import results
from bakeoff.apps.bench.results import File, Row, keep, open_file
from bakeoff.apps.bench.suites import Cell
from bakeoff.device import synchronize
from bakeoff.errors import ContestError
from bakeoff.select import Case, Op, TensorMeta, find_op
from bakeoff.select.contests.contest import regimes_of, timers_for
from bakeoff.select.contests.measure import Timing, input_sets, interleave, release, work
from bakeoff.select.contests.worker import compilers
from bakeoff.select.declare.arguments import Arguments, Tensor
from bakeoff.timing import Clock, seconds_per_call

__all__ = ["LENGTHS", "LaunchRow", "at_length", "host_timing", "run_launch"]

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
_BURST = 8  # calls issued one after another, few enough that the device's queue is never full
_SLOW = 20  # times its budget may seven bursts take before a candidate gets three single calls
_SHARE = 0.3  # of a cell's budget, for the host's times


class LaunchRow(Row, kw_only=True):
    """A row of this suite: one candidate at one `length`. `measure` is "host", the time until a call returns
    while the device's queue has room, or "device", the time it runs."""

    measure: str
    length: int


Hear = Callable[[Cell, list[LaunchRow]], None]
"""Called for every case and direction with its rows."""


def at_length(op: Op, length: int, device: str) -> Case | None:
    """The first case of the op's grid that can have one row of `length` positions; None where there is none.

    Positions are what the op's rules call T, rows what they call B. Where a case has as many keys, S, as
    positions, so has the one of `length`.
    """
    if not isinstance(op.check, Arguments):
        return None
    words = [rule.shape.split() for rule in op.check.rules.values() if isinstance(rule, Tensor)]
    if not any("T" in own for own in words):
        return None
    for case in op.cases():
        held = {
            word: size
            for name, meta in case.tensors.items()
            for word, size in zip(_words(op.check, name), meta.shape, strict=False)
        }
        sizes = {"T": length, "B": 1} | ({"S": length} if held.get("S") == held.get("T") else {})
        metas = {name: _resized(_words(op.check, name), meta, sizes) for name, meta in case.tensors.items()}
        changed = Case(case.replace(**metas).args, device, f"T={length}")
        try:
            op.check(changed)
        except (TypeError, ValueError):
            continue
        return changed
    return None


def _words(rules: Arguments, name: str) -> list[str]:
    """What an argument's dimensions are called."""
    rule = rules.rules.get(name)
    if isinstance(rule, Tensor) and rule.shape.startswith("as "):
        rule = rules.rules.get(rule.shape.removeprefix("as "))
    return rule.shape.split() if isinstance(rule, Tensor) else []


def _resized(words: Sequence[str], meta: TensorMeta, sizes: Mapping[str, int]) -> TensorMeta:
    if not {"T", "S"} & set(words) or len(words) != len(meta.shape):
        return meta
    shape = tuple(sizes.get(word, size) for word, size in zip(words, meta.shape, strict=True))
    return TensorMeta.dense(shape, meta.dtype, grad=meta.requires_grad)


def run_launch(
    ops: Sequence[Op],
    device: str,
    out: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    budget_s: float = 1.0,
    resume: bool = False,
    jobs: int = 1,
    hear: Hear = lambda cell, rows: None,
    announce: Callable[[str], None] = lambda stage: None,
) -> File:
    """Measure every candidate of those ops that have positions, at each of `lengths`, forward alone and with
    its backward, and write each case to `out` at once. With more than one of `jobs`, an op's cells are first
    called in so many processes, which leave what they compile on disk; nothing runs beside what is timed.

    Raises:
        ResultsError: the file can't be read or written, or belongs to another machine or other versions; or
            no op has positions.
    """
    cases = {op.name: [at_length(op, length, device) for length in lengths] for op in ops}
    if not any(case for own in cases.values() for case in own):
        names = ", ".join(cases)
        raise results.ResultsError(f"--suite launch is for ops with positions, and {names} has none")
    env = results.environment(device)
    file = open_file(out, env)
    for op in ops:
        pairs = zip(cases[op.name], lengths, strict=True)
        wanted = [(cell, length) for case, length in pairs for cell in _directions(op, case)]
        wanted = [(cell, length) for cell, length in wanted if not (resume and _held(file, cell))]
        if jobs > 1 and wanted:
            _compile([cell for cell, _ in wanted], jobs, announce)
        for cell, length in wanted:
            announce(f"{op.name} {cell.case.name}, {cell.direction}")
            rows = measured(cell, length, budget_s)
            file = results.changed(out, env, lambda held, rows=rows: keep(held, rows))  # type: ignore[misc]
            hear(cell, rows)
    return file


def _compile(cells: Sequence[Cell], jobs: int, announce: Callable[[str], None]) -> None:
    """Call every candidate of `cells` once, in processes side by side."""
    others = {process.pid for process in multiprocessing.active_children()}
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawning, initializer=_begin, initargs=(compilers(jobs),)) as pool:
        calls = [pool.submit(_call_all, cell.op.name, cell.case) for cell in cells]
        try:
            for done, call in enumerate(as_completed(calls), 1):
                with contextlib.suppress(BrokenExecutor):  # what killed it is met again, and told, by timing
                    call.result()
                announce(f"{cells[0].op.name}: compiled {done} of {len(cells)}")
        except BaseException:  # Ctrl-C: the pool would first finish every call that is left
            for process in multiprocessing.active_children():
                if process.pid not in others:
                    process.kill()
            raise


def _begin(environment: Mapping[str, str]) -> None:
    os.environ.update(environment)


def _call_all(name: str, case: Case) -> None:
    op = find_op(name)
    with contextlib.suppress(ContestError, torch.cuda.OutOfMemoryError):  # timing tells of them
        sets = input_sets(op, case, 0)
        for candidate in op.candidates:
            if not candidate.reasons(case):
                with contextlib.suppress(Exception):
                    work(op, case, candidate.implementation, sets)[0]()
    release(case)


def _directions(op: Op, case: Case | None) -> list[Cell]:
    if case is None:
        return []
    cells = [Cell(op, case.without_grad(), "forward")]
    return [*cells, Cell(op, case, "both")] if case.needs_grad else cells


def _held(file: File, cell: Cell) -> bool:
    """Whether `file` holds this cell with today's sources."""
    place = (cell.op.name, cell.case.name, cell.direction)
    rows = [row for row in file.rows if (row["op"], row["case"], row["direction"]) == place]
    return {row["candidate"] for row in rows} == set(cell.op.by_name) and all(map(results.current, rows))


def measured(cell: Cell, length: int, budget_s: float) -> list[LaunchRow]:
    """The rows of a case in one direction: the host's and, on CUDA, the device's time of every candidate."""
    device = cell.case.device
    rows = []
    try:
        sets = input_sets(cell.op, cell.case, 0)
        for candidate in cell.op.candidates:
            why = "; ".join(candidate.reasons(cell.case))
            host: Timing | None = None
            found: Timing | None = None
            if not why:
                try:
                    calls = work(cell.op, cell.case, candidate.implementation, sets)
                    host = host_timing(calls, device, _SHARE * budget_s / len(cell.op.candidates))
                    if "graph" in regimes_of(cell.case) and candidate.capturable:
                        graph = timers_for(cell.case)["graph"]
                        share = (1 - _SHARE) * budget_s / len(cell.op.candidates)
                        found = interleave({candidate.name: graph.sampler(calls)}, share)[candidate.name]
                except Exception as error:  # noqa: BLE001  whatever a candidate raises is its row's reason
                    why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            rows.append(_row(cell, length, candidate.name, "host", host, why))
            if device.startswith("cuda"):
                rows.append(_row(cell, length, candidate.name, "device", found, why))
    except (ContestError, torch.cuda.OutOfMemoryError) as error:
        why = str(error).splitlines()[0]
        rows = [_row(cell, length, name, "host", None, why) for name in cell.op.by_name]
    finally:
        release(cell.case)
    return rows


def host_timing(
    calls: Sequence[Callable[[], object]], device: str, budget_s: float, clock: Clock = time.perf_counter
) -> Timing:
    """The host's time of a call, in bursts that begin with the device idle. On the CPU, a call's time.

    Bursts are timed for `budget_s`, at least seven. Of calls so slow that seven bursts would take many times
    as long, three calls are.
    """
    for _ in range(3):  # compile, allocate, record
        for call in calls:
            call()
    synchronize(device)
    once = seconds_per_call(calls, 1, device, clock=clock, host_only=True)
    burst, least = (_BURST, 7) if once * _BURST * 7 <= _SLOW * budget_s else (1, 3)
    samples: list[float] = []
    end = clock() + budget_s
    while len(samples) < least or (clock() < end and len(samples) < 400):
        samples.append(seconds_per_call(calls, burst, device, clock=clock, host_only=True))
        synchronize(device)
    return Timing.of(samples)


def _row(cell: Cell, length: int, candidate: str, measure: str, timing: Timing | None, why: str) -> LaunchRow:
    cost = cell.op.cost(cell.case)
    dtype = next(iter(cell.case.data.values())).dtype
    share = None
    if timing is not None and measure == "device":
        share = hardware.limit_us(cost.bytes, cost.flops, cell.case.device) / timing.us
    return LaunchRow(
        op=cell.op.name,
        case=cell.case.name,
        dtype=str(dtype).removeprefix("torch."),
        regime="graph" if measure == "device" else "eager",
        direction=cell.direction,
        candidate=candidate,
        bytes=cost.bytes,
        flops=cost.flops,
        measure=measure,
        length=length,
        reason=why,
        source_hash=cell.op.by_name[candidate].source_hash,
        date=results.now(),
        commit=results.commit(),
        us=timing.us if timing else None,
        us_p20=timing.p20 if timing else None,
        us_p80=timing.p80 if timing else None,
        share=share,
    )
