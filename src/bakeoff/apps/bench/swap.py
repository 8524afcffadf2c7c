"""Suite "swap": a Llama's training step, by its own code, compiled, patched by Liger, and swapped.

Every mode starts from the same weights and takes the same steps on the same tokens. Liger's patch changes
transformers itself, so its modes come last.
"""

import copy
import functools
import gc
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

import bakeoff
from bakeoff.apps.bench import results
from bakeoff.apps.bench.results import File, ResultsError, open_file
from bakeoff.apps.bench.step import source_hash
from bakeoff.apps.bench.suites import chosen
from bakeoff.select import tune
from bakeoff.timing import seconds_per_call

__all__ = ["MODES", "SwapRow", "run_swap"]

MODES = ("eager", "compile", "ours", "ours+compile", "liger", "liger+compile")
_BLOCKS, _WARM = 7, 3

_LARGE: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip
_SMALL: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


class SwapRow(msgspec.Struct, kw_only=True):
    """A mode's step: forward, backward and AdamW. `gradients` is the distance of all gradients of the first
    step from the model's own in float32, relative to these; `loss` is the first step's, in nats."""

    model: str
    mode: str
    batch: int
    seq: int
    params: int
    precision: str
    step_us: float | None = None
    step_us_p20: float | None = None
    step_us_p80: float | None = None
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    loss: float | None = None
    gradients: float | None = None
    reason: str = ""
    """Why the mode was not measured."""
    source_hash: str = ""
    date: str = ""


def run_swap(
    device: str,
    out: Path,
    *,
    text: str = "",
    budget_s: float = 60.0,
    resume: bool = False,
    hear: Callable[[SwapRow], None] = lambda row: None,
    announce: Callable[[str], None] = lambda stage: None,
) -> File:
    """Measure the step in every mode whose name contains `text` (or one of several, 'A|B'), and write each to
    `out` at once.

    Raises:
        ResultsError: transformers is missing; `out` can't be read or belongs to another machine.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise ResultsError(f"--suite swap needs transformers ({error}): pip install 'bakeoff[hf]'") from None
    on_gpu = device.startswith("cuda")
    name, settings = ("Llama 1B", _LARGE) if on_gpu else ("Llama tiny", _SMALL)
    batch, seq, steps = (4, 2048, 3) if on_gpu else (2, 16, 1)
    results.require_chosen(text, MODES)
    modes = [mode for mode in MODES if chosen(text, mode)]
    env = results.environment(device)
    file = open_file(out, env)
    torch.manual_seed(0)
    with torch.device(device):
        first = LlamaForCausalLM(LlamaConfig(**settings)).train()
        ids = torch.randint(settings["vocab_size"], (batch, seq))
    exact = {}
    if not resume or any(not _held(file, name, mode) for mode in modes):
        announce("gradients in float32")
        first(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        exact = {n: p.grad.cpu() for n, p in first.named_parameters() if p.grad is not None}
    first = first.to("cpu", torch.bfloat16 if on_gpu else torch.float32)
    first.zero_grad()
    for mode in modes:
        if resume and _held(file, name, mode):
            continue
        announce(f"{name}, {mode}")
        row = SwapRow(
            model=name, mode=mode, batch=batch, seq=seq, params=sum(p.numel() for p in first.parameters()),
            precision="bf16" if on_gpu else "float32", source_hash=source_hash(), date=results.now(),
        )  # fmt: skip
        try:
            _measure(row, copy.deepcopy(first).to(device), ids, exact, steps, budget_s)
        except Exception as error:  # noqa: BLE001  (a peer may fail in any way; that is its row)
            row.reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        file = results.changed(out, env, functools.partial(_put, row=row))
        hear(row)
        gc.collect()
    return file


def _held(file: File, model: str, mode: str) -> bool:
    return any(
        row.get("model") == model and row.get("mode") == mode and row.get("source_hash") == source_hash()
        for row in file.rows
    )


def _put(file: File, row: SwapRow) -> None:
    others = [held for held in file.rows if (held.get("model"), held.get("mode")) != (row.model, row.mode)]
    file.rows = [*others, msgspec.to_builtins(row)]


def _measure(
    row: SwapRow, model: Any, ids: Tensor, exact: dict[str, Tensor], steps: int, budget_s: float
) -> None:
    """Fills in the row's measurements."""
    device = ids.device
    torch.compiler.reset()
    fused = device.type == "cuda"
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused)
    if row.mode.startswith("liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
    if row.mode.startswith("ours"):
        optimizer = bakeoff.swap(model, optimizer=optimizer, quiet=True).optimizer
    run = torch.compile(model) if row.mode.endswith("compile") else model

    def gradients() -> Tensor:
        loss: Tensor = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def step() -> None:
        gradients()
        optimizer.step()
        optimizer.zero_grad()

    if row.mode == "ours":
        tune(lambda: (gradients(), model.zero_grad()), budget_s)
    row.loss = gradients().item()
    row.gradients = _distance(model, exact)
    model.zero_grad()
    for _ in range(_WARM):
        step()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    times = sorted(seconds_per_call([step], steps, device) for _ in range(_BLOCKS))
    median = statistics.median(times)
    row.step_us, row.tokens_per_s = 1e6 * median, ids.numel() / median
    row.step_us_p20, row.step_us_p80 = 1e6 * times[len(times) // 5], 1e6 * times[-1 - len(times) // 5]
    row.peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _distance(model: Any, exact: dict[str, Tensor]) -> float:
    """|g - g'| / |g'| over all gradients together."""
    off = whole = 0.0
    for name, p in model.named_parameters():
        want = exact[name].to(p.device)
        off += (p.grad.to(want.dtype) - want).square().sum().item()
        whole += want.square().sum().item()
    return float((off / whole) ** 0.5)
