"""Suite "step": a whole training step of the small and the base LLM-Med, in plain PyTorch under
torch.compile(mode="reduce-overhead"), then issued op by op, captured, compiled, and both; of the TitanMAC of
size "seed", by autograd in plain PyTorch, op by op, and captured.

Every mode starts from the same weights and takes the same steps on the same bytes, so that their losses say
whether they train alike.
"""

import functools
import hashlib
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

import bakeoff
from bakeoff.apps.bench import results
from bakeoff.apps.bench.autograd_memory import by_autograd
from bakeoff.apps.bench.results import File, open_file
from bakeoff.apps.bench.suites import chosen
from bakeoff.apps.train import Config, recipe, resolve
from bakeoff.apps.train.data import Batches, ByteCorpus, split
from bakeoff.apps.train.selection import choices, select_candidates
from bakeoff.apps.train.step import Stepper, uses_bf16
from bakeoff.device import synchronize
from bakeoff.graphs.sync import WAITED, sync_mode
from bakeoff.models import build
from bakeoff.select import tune, using
from bakeoff.timing import seconds_per_call

__all__ = ["MODES", "OF_MEMORY", "PLAIN", "StepRow", "counted", "run_step", "source_hash"]

PLAIN = "reduce-overhead"
"""What one line gives a user of PyTorch alone."""
MODES = (PLAIN, "eager", "captured", "compiled", "compiled+captured")
OF_MEMORY = ("autograd", "eager", "captured")
"""Modes of a model with neural memories."""
_BLOCKS, _BATCHES, _WARM = 7, 8, 6
_KERNELS, _NAME = 48, 120  # how many kernels a profile names, and letters of a name
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


class StepRow(msgspec.Struct, kw_only=True):
    """A mode's step. `step_us` is the median over blocks of steps (wall time until the device has finished a
    block). Per step, `launches` counts the host's calls to the driver, `kernels` what the device runs, and
    `syncs` how often the host waits. `loss` is the mean over all steps, in nats."""

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
    device_us: dict[str, float] = {}
    """Where a step's time on the device goes: the kernels that take most of it, by name."""
    reason: str = ""
    """Why the mode is not what it says, where it could not be captured."""
    source_hash: str = ""
    """Hash of all sources of the package, most of which a step runs."""
    date: str = ""


Hear = Callable[[StepRow], None]


def run_step(
    device: str,
    out: Path,
    *,
    budget_s: float = 60.0,
    resume: bool = False,
    text: str = "",
    hear: Hear = lambda row: None,
    announce: Callable[[str], None] = lambda stage: None,
) -> File:
    """Measure a training step in every mode that `device` has, and write each to `out` at once.

    A mode's row in `out` is replaced; with `resume` it is kept where it has today's sources. `budget_s` is
    for all contests of the step's ops, before each mode. Only what has `text` in its model and mode, or one
    of several: "LLMMed base captured|TitanMAC".

    Raises:
        ResultsError: `out` can't be read or written, or belongs to another machine or other versions.
    """
    sized = list(_sized(device))
    results.require_chosen(text, (f"{name} {mode}" for name, _, modes, _ in sized for mode in modes))
    env = results.environment(device)
    file = open_file(out, env)
    for name, config, modes, steps in sized:
        for mode in (mode for mode in modes if chosen(text, f"{name} {mode}")):
            held = [row for row in file.rows if _same(row, name, config, mode)]
            if resume and any(row.get("source_hash") == source_hash() for row in held):
                continue
            announce(f"{name}, {mode}: holding contests, then measuring")
            row = measured(config, torch.device(device), mode, steps, budget_s, name)
            file = results.changed(out, env, functools.partial(_put, config=config, row=row))
            hear(row)
    return file


def _put(file: File, config: Config, row: StepRow) -> None:
    others = [other for other in file.rows if not _same(other, row.model, config, row.mode)]
    file.rows = [*others, msgspec.to_builtins(row)]


def _same(row: dict[str, Any], name: str, config: Config, mode: str) -> bool:
    """Whether a stored row measures this mode of this model's step."""
    measured = (row.get("model"), row.get("mode"), row.get("batch"), row.get("seq"))
    return measured == (name, mode, config.train.batch_size, config.seq_len)


@functools.cache
def source_hash() -> str:
    """Of all sources of the package, most of which a step runs."""
    folder = Path(bakeoff.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _sized(device: str) -> list[tuple[str, Config, tuple[str, ...], int]]:
    """(model, configuration, modes, steps a block); on a GPU the small models have 48 and 4 rows of 512
    bytes, as in published results."""
    if device.startswith("cuda"):
        sizes = [
            ("LLMMed small", "llm-med-published", 48, 512, MODES, 20),
            ("LLMMed base", "llm-med-base", 32, 1024, MODES, 5),
            ("TitanMAC seed", "titan-mac", 4, 512, OF_MEMORY, 5),
        ]
        return [
            (
                name,
                resolve(recipe(base), None, [f"train.batch_size={rows}", f"train.seq_len={seq}"]),
                modes,
                steps,
            )
            for name, base, rows, seq, modes, steps in sizes
        ]
    small = resolve(recipe("llm-med-published"), None, ["train.batch_size=2", "train.seq_len=64"])
    return [("LLMMed small", small, (PLAIN, "eager", "compiled"), 1)]


def measured(
    config: Config,
    device: torch.device,
    mode: str,
    steps: int,
    budget_s: float = 60.0,
    name: str = "LLMMed small",
) -> StepRow:
    """One mode's row: `steps` a block. In the modes "autograd" and "reduce-overhead" every op is plain
    PyTorch, the loss that of all logits at once; in the former memories learn by autograd."""
    captured, compiled = "captured" in mode, "compiled" in mode
    config = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, compile=compiled))
    torch.compiler.reset()
    _reset_peak(device)
    plain = mode in ("autograd", PLAIN)
    with using("off") if plain else using(regime="graph" if captured else "eager"):
        torch.manual_seed(0)
        model = build(config.model).to(device).train()
        if mode == "autograd":
            by_autograd(model)
        stepper = _Plain(model, config, device) if mode == PLAIN else Stepper(model, config, device)
        batches = _batches(config, device)
        rate = config.optim.lr
        if not plain:
            tune(lambda: stepper.rehearse(batches[0].to(device)), budget_s)
        selected: dict[str, str] = {}
        if mode != PLAIN:
            selected = _selected(lambda: stepper.rehearse(batches[0].to(device)), config)
        if captured:
            stepper.capture()
        count = 0

        def step() -> None:
            nonlocal count
            stepper(batches[count % _BATCHES].to(device, non_blocking=True), rate)
            count += 1

        for _ in range(_WARM):
            step()
        times = sorted(seconds_per_call([step], steps, device) for _ in range(_BLOCKS))
        launches, kernels, syncs = counted(step, device)
        median = statistics.median(times)
        tokens = config.train.batch_size * config.seq_len
        return StepRow(
            model=name,
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
            loss=stepper.read(count)["loss"],
            steps=count,
            choices=selected,
            device_us=_device_us(step, device),
            reason=stepper.uncaptured,
            source_hash=source_hash(),
            date=results.now(),
        )


class _Plain(Stepper):
    """The step that a user of PyTorch alone writes: torch.compile(mode="reduce-overhead") around the model,
    gradients clipped, fused AdamW."""

    def __init__(self, model: Any, config: Config, device: torch.device) -> None:
        super().__init__(model, config, device)
        compiled: Any = torch.compile(model, mode="reduce-overhead" if device.type == "cuda" else None)
        self.module = compiled
        groups = [
            {key: group[key] for key in ("params", "weight_decay")} for group in self.optimizer.param_groups
        ]
        optim = config.optim
        self.plain = torch.optim.AdamW(
            groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True
        )

    def __call__(self, rows: Tensor, lr: float) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        loss = self._backward(rows)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.optim.clip)
        for group in self.plain.param_groups:
            group["lr"] = lr
        self.plain.step()
        self.plain.zero_grad(set_to_none=True)
        self._count(loss, norm, torch.zeros_like(loss, dtype=torch.bool))


def _selected(step: Callable[[], object], config: Config) -> dict[str, str]:
    """The candidates that `step` runs, by op."""
    known = msgspec.structs.replace(config.select, tune=False)
    with tempfile.TemporaryDirectory() as folder:
        return choices(
            select_candidates(step, known, Path(folder), lambda text: None, compiled=config.train.compile)
        )


def _batches(config: Config, device: torch.device) -> list[Tensor]:
    corpus = ByteCorpus.open(config.data.path)
    training, _ = split(corpus, config.data.holdout, config.seq_len)
    source = Batches(corpus, training, seq_len=config.seq_len, batch_size=config.train.batch_size, seed=0)
    batches = [source.batch(number) for number in range(_BATCHES)]
    return [rows.pin_memory() for rows in batches] if device.type == "cuda" else batches


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def counted(step: Callable[[], object], device: torch.device) -> tuple[int | None, int | None, int | None]:
    """Of a step: the host's calls to the driver, what the device runs, both by the profiler, and how often
    the host waits for the device."""
    if device.type != "cuda":
        return None, None, None
    events = _profiled(step, device)
    asked = sum(event.name.startswith(_LAUNCHES) for event in events)
    ran = sum(str(event.device_type).endswith("CUDA") for event in events)
    with warnings.catch_warnings(record=True) as said:
        warnings.filterwarnings("always", WAITED)
        with sync_mode("warn"):
            step()
    return asked, ran, sum(WAITED in str(warning.message) for warning in said)


def _profiled(step: Callable[[], object], device: torch.device) -> list[Any]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        step()
        synchronize(device)
    return list(profiler.events())


def _device_us(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Microseconds of a step by kernel, the largest first; those that don't fit count as "others"."""
    if device.type != "cuda":
        return {}
    spent: dict[str, float] = {}
    for event in _profiled(step, device):
        if str(event.device_type).endswith("CUDA") and not event.name.startswith("Optimizer."):  # a caption
            name = event.name[:_NAME]
            spent[name] = spent.get(name, 0.0) + event.device_time
    ranked = sorted(spent.items(), key=lambda item: -item[1])
    shown = {name: round(us, 1) for name, us in ranked[:_KERNELS]}
    return shown | {"others": round(sum(us for _, us in ranked[_KERNELS:]), 1)}
