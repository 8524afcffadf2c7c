"""The speed of training steps and of inference at several context lengths, both models in turns."""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence

import torch

from bakeoff.apps.compare.document import SIDES, Side, Speed
from bakeoff.apps.compare.lengths import sized
from bakeoff.apps.compare.stage import Stage, clear, selecting
from bakeoff.apps.train import Config
from bakeoff.device import synchronize
from bakeoff.timing import seconds_per_call

__all__ = ["measured"]

_BLOCKS = 7
_BLOCK_S = 0.1
"""A block of calls takes about this long, and holds at least one."""
_WARM = 6
"""Steps before timing; capturing takes place within the first four."""

_OUT_OF_MEMORY = ("can't allocate memory", "ALLOC_FAILED")
"""Part of the messages of the CPU's allocator and of CUDA's libraries."""

Announce = Callable[[str], None]


def measured(
    first: Config, second: Config, length: int, device: torch.device, announce: Announce
) -> list[Speed]:
    """The rows of both models at one length: eager, and on CUDA captured."""
    rows: list[Speed] = []
    captures = device.type == "cuda" and "off" not in (first.train.capture, second.train.capture)
    for mode in ("eager", "captured") if captures else ("eager",):
        announce(f"{length} bytes a row, {mode}: holding contests, then measuring")
        sides = {side: sized(config, length) for side, config in zip(SIDES, (first, second), strict=True)}
        together: list[Speed] = []
        with contextlib.suppress(_Full):  # an exception kept in a variable would keep tensors alive
            together = _timed(sides, mode, device, announce)
        rows += together or [
            row for side, config in sides.items() for row in _alone(side, config, mode, device, announce)
        ]
    return rows


def _alone(side: Side, config: Config, mode: str, device: torch.device, announce: Announce) -> list[Speed]:
    """The row of one model, also where it does not fit."""
    try:
        return _timed({side: config}, mode, device, announce)
    except _Full as full:
        rows, length = config.train.batch_size, config.seq_len
        return [Speed(side=side, length=length, rows=rows, mode=mode, reason=str(full))]


class _Full(Exception):
    """Out of memory, on the device or the host."""


@contextlib.contextmanager
def _memory() -> Iterator[None]:
    """Raises _Full for each of the errors that running out of memory causes."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        starved = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not starved and not any(sign in str(error) for sign in _OUT_OF_MEMORY):
            raise
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise _Full(f"out of memory: {first_line}") from None


def _timed(sides: dict[Side, Config], mode: str, device: torch.device, announce: Announce) -> list[Speed]:
    """The rows of these models, which are in memory at the same time."""
    compiled = any(config.train.compile for config in sides.values())
    with _memory():
        clear(device, compiled=compiled)
        stages: dict[Side, Stage] = {}
        peaks = {}
        for side, config in sides.items():
            stages[side], peaks[side] = _prepared(config, mode, device, announce)
        steps = _alternating([(stage, stage.step) for stage in stages.values()], mode, device)
        passes = [list[float]() for _ in stages]
        if mode == "eager":
            for stage in stages.values():
                stage.model.eval()
            passes = _alternating([(stage, stage.infer) for stage in stages.values()], mode, device)
        return [
            _row(side, stage, mode, step, infer, peaks[side])
            for (side, stage), step, infer in zip(stages.items(), steps, passes, strict=True)
        ]


def _prepared(
    config: Config, mode: str, device: torch.device, announce: Announce
) -> tuple[Stage, int | None]:
    """A model that has taken its first steps, and the device memory that it and they need."""
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if cuda else 0
    with selecting(config, _regime(mode)):
        stage = Stage(config, device)
        stage.contests(announce)
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        if mode == "captured":
            stage.stepper.capture()
        for _ in range(_WARM if cuda else 1):
            stage.step()
        synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before if cuda else None
    return stage, peak


def _regime(mode: str) -> str:
    return "graph" if mode == "captured" else "eager"


def _alternating(
    calls: Sequence[tuple[Stage, Callable[[], object]]], mode: str, device: torch.device
) -> list[list[float]]:
    """Milliseconds of each call, in blocks that take turns, sorted."""
    counts = []
    for stage, call in calls:
        with selecting(stage.config, _regime(mode)):
            seconds_per_call([call], 1, device)  # compiles what is new
            spent = seconds_per_call([call], 1, device)
        counts.append(max(1, round(_BLOCK_S / spent)))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(_BLOCKS):
        for (stage, call), count, taken in zip(calls, counts, times, strict=True):
            with selecting(stage.config, _regime(mode)):
                taken.append(1000 * seconds_per_call([call], count, device))
    return [sorted(taken) for taken in times]


def _row(
    side: Side, stage: Stage, mode: str, step: list[float], infer: list[float], peak: int | None
) -> Speed:
    rows, length = stage.config.train.batch_size, stage.config.seq_len
    ms, p20, p80 = _summary(step)
    infer_ms, infer_p20, infer_p80 = _summary(infer)
    return Speed(
        side=side,
        length=length,
        rows=rows,
        mode=mode,
        step_ms=ms,
        step_ms_p20=p20,
        step_ms_p80=p80,
        tokens_per_s=1000 * rows * length / ms if ms else None,
        infer_ms=infer_ms,
        infer_ms_p20=infer_p20,
        infer_ms_p80=infer_p80,
        peak_bytes=peak,
        reason=f"not captured: {stage.stepper.uncaptured}" if stage.stepper.uncaptured else "",
    )


def _summary(times: list[float]) -> tuple[float | None, float | None, float | None]:
    """Median, 20th and 80th percentile."""
    if not times:
        return None, None, None
    return statistics.median(times), times[len(times) // 5], times[-1 - len(times) // 5]
