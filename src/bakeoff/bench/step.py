"""Suite `step`: a whole training step of the small LLM-Med, issued op by op, captured, compiled, and both.

Every mode starts from the same weights and takes the same steps on the same bytes, so that their losses say
whether they train alike. ``python -m bakeoff.bench.step [cuda|cpu] [FILE]`` writes one row a mode.
"""

import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from bakeoff.bench import results
from bakeoff.models.llm_med import LLMMed
from bakeoff.select import tune, using
from bakeoff.train import Config, recipe, resolve
from bakeoff.train.data import Batches, ByteCorpus, split
from bakeoff.train.selection import choices, settle
from bakeoff.train.step import Stepper, uses_bf16

__all__ = ["MODES", "StepRow", "run_step"]

MODES = ("eager", "captured", "compiled", "compiled+captured")
_BLOCKS, _BATCHES, _WARM = 7, 8, 6
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


class StepRow(msgspec.Struct, kw_only=True):
    """A mode's step. `step_us` is the median over blocks of steps (wall time, device waited for at the end of
    a block); `launches` and `kernels` are what the host asks for and what the device runs in a step; `syncs`
    how often the host waits in it; `loss` the mean over all steps made, in nats."""

    model: str
    mode: str
    batch: int
    seq: int
    params: int
    precision: str
    step_us: float
    step_us_p20: float
    step_us_p80: float
    tokens_per_s: float
    launches: int | None
    kernels: int | None
    syncs: int | None
    peak_bytes: int | None
    graph_bytes: int
    loss: float
    steps: int
    choices: dict[str, str]
    reason: str = ""
    """Why the mode is not what it says, where it could not be captured."""
    date: str = ""


def run_step(
    device: str, out: Path, hear: Callable[[StepRow], None] = lambda row: None, budget_s: float = 60.0
) -> None:
    """Measures every mode that `device` has and writes them to `out`, after each."""
    config, modes, steps = _sized(device)
    file = results.File(results.environment(device), [])
    for mode in modes:
        row = measured(config, torch.device(device), mode, steps, budget_s)
        file.rows.append(msgspec.to_builtins(row))
        results.write(out, file)
        hear(row)


def _sized(device: str) -> tuple[Config, tuple[str, ...], int]:
    """(the configuration, the modes, steps a block): the published 48 rows of 512 bytes on a GPU."""
    if device.startswith("cuda"):
        given = ["train.batch_size=48", "train.seq_len=512"]
        return resolve(recipe("llm-med"), None, given), MODES, 20
    given = ["train.batch_size=2", "train.seq_len=64"]
    return resolve(recipe("llm-med"), None, given), ("eager", "compiled"), 1


def measured(config: Config, device: torch.device, mode: str, steps: int, budget_s: float = 60.0) -> StepRow:
    """One mode's row: `steps` a block."""
    captured, compiled = "captured" in mode, "compiled" in mode
    config = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, compile=compiled))
    torch.compiler.reset()
    _reset_peak(device)
    with using(regime="graph" if captured else "eager"):
        torch.manual_seed(0)
        model = LLMMed(config.model).to(device).train()
        stepper = Stepper(model, config, device)
        batches = _batches(config, device)
        rate = config.optim.lr
        tune(lambda: stepper.rehearse(batches[0].to(device)), budget_s)
        selected = _selected(lambda: stepper.rehearse(batches[0].to(device)), config)
        if captured:
            stepper.capture()
        made = 0

        def step() -> None:
            nonlocal made
            stepper(batches[made % _BATCHES].to(device, non_blocking=True), rate)
            made += 1

        for _ in range(_WARM):
            step()
        times = sorted(_block(step, steps, device) for _ in range(_BLOCKS))
        launches, kernels = _launches(step, device)
        syncs = _syncs(step, device)
        median = statistics.median(times)
        tokens = config.train.batch_size * config.seq_len
        return StepRow(
            model="LLMMed small",
            mode=mode,
            batch=config.train.batch_size,
            seq=config.seq_len,
            params=sum(p.numel() for p in model.parameters()),
            precision="bf16" if uses_bf16(config, device) else "float32",
            step_us=1e6 * median,
            step_us_p20=1e6 * times[len(times) // 5],
            step_us_p80=1e6 * times[-1 - len(times) // 5],
            tokens_per_s=tokens / median,
            launches=launches,
            kernels=kernels,
            syncs=syncs,
            peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            graph_bytes=stepper.graph_bytes,
            loss=stepper.read(made)["loss"],
            steps=made,
            choices=selected,
            reason=stepper.uncaptured,
            date=results.now(),
        )


def _selected(step: Callable[[], object], config: Config) -> dict[str, str]:
    """The candidates that `step` runs, by op."""
    known = msgspec.structs.replace(config.select, tune=False)
    with tempfile.TemporaryDirectory() as folder:
        return choices(settle(step, known, Path(folder), lambda text: None, compiled=config.train.compile))


def _batches(config: Config, device: torch.device) -> list[Tensor]:
    corpus = ByteCorpus.open(config.data.path)
    training, _ = split(corpus, config.data.holdout, config.seq_len)
    source = Batches(corpus, training, seq_len=config.seq_len, batch_size=config.train.batch_size, seed=0)
    found = [source.batch(number) for number in range(_BATCHES)]
    return [rows.pin_memory() for rows in found] if device.type == "cuda" else found


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _block(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Seconds a step."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    return (time.perf_counter() - start) / steps


def _launches(step: Callable[[], None], device: torch.device) -> tuple[int | None, int | None]:
    """(what the host asks the driver for, what the device runs) in a step, by the profiler."""
    if device.type != "cuda":
        return None, None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        step()
        _wait(device)
    events = list(profiler.events())
    asked = sum(event.name.startswith(_LAUNCHES) for event in events)
    ran = sum(str(event.device_type).endswith("CUDA") for event in events)
    return asked, ran


def _syncs(step: Callable[[], None], device: torch.device) -> int | None:
    """How often the host waits for the device in a step."""
    if device.type != "cuda":
        return None
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("called a synchronizing CUDA operation" in str(warning.message) for warning in said)


def _lines(row: StepRow) -> Iterator[str]:
    yield f"{row.mode:18} {row.step_us:10.1f} us  {row.tokens_per_s:12,.0f} bytes/s  loss {row.loss:.4f}"
    if row.launches is not None:
        peak = (row.peak_bytes or 0) / 2**20
        held = row.graph_bytes / 2**20
        yield (
            f"{'':18} {row.launches} launches, {row.kernels} kernels, {row.syncs} syncs, "
            f"peak {peak:.0f} MiB, graph {held:.0f} MiB {row.reason}"
        )


def main(words: list[str]) -> None:
    """Measure on the device given, or the one there is."""
    device = words[0] if words else "cuda" if torch.cuda.is_available() else "cpu"
    out = Path(words[1]) if len(words) > 1 else Path("results", results.slug(device), "step.json")

    def hear(row: StepRow) -> None:
        for text in _lines(row):
            sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    run_step(device, out, hear)


if __name__ == "__main__":
    main(sys.argv[1:])
