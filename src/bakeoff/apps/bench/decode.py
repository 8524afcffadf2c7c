"""Suite "decode": symbols a second of `generate`, issued one by one and as a CUDA graph, of every model.

Beside them those of Hugging Face transformers for a Llama of LLM-Med's shape, where they are installed.

Every mode goes on from the same prompts, by sampling with the same seed.
"""

import functools
import importlib
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from bakeoff.apps.bench import results
from bakeoff.apps.bench.results import File, open_file
from bakeoff.apps.bench.step import counted, source_hash
from bakeoff.apps.bench.suites import chosen
from bakeoff.device import synchronize
from bakeoff.models import build, byte_spectral, llm_med, longnet, titan_mac
from bakeoff.select import using

__all__ = ["DecodeRow", "run_decode"]

PROMPT, BLOCKS = 64, 3
"""Symbols of a prompt, and blocks of steps of which the median counts."""
_WARM = 16
_DYNAMIC, _STATIC = "dynamic cache", "static cache, compiled"
"""Modes of transformers."""


class DecodeRow(msgspec.Struct, kw_only=True):
    """A mode's speed.

    `step_us` is the median over blocks of steps, each one symbol of every row, wall time until the device has
    finished; `begin_s` what comes before the first block: the prompt, the first symbols, the capture. Text
    ends at `seq`. Per step, `launches` counts the host's calls to the driver, `kernels` what the device runs,
    and `syncs` how often the host waits.
    """

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
    begin_s: float
    launches: int | None
    kernels: int | None
    syncs: int | None
    peak_bytes: int | None
    source_hash: str = ""
    date: str = ""


Hear = Callable[[DecodeRow], None]


def run_decode(
    device: str,
    out: Path,
    *,
    text: str = "",
    resume: bool = False,
    hear: Hear = lambda row: None,
    announce: Callable[[str], None] = lambda stage: None,
) -> File:
    """Measure every model whose name contains `text`, and write each row to `out` at once.

    A row in `out` is replaced; with `resume` it is kept where it has today's sources.

    Raises:
        ResultsError: `out` can't be read or written, or belongs to another machine or other versions.
    """
    where = torch.device(device)
    plan = list(_plan(where))
    results.require_chosen(text, (name for name, *_ in plan))
    env = results.environment(device)
    file = open_file(out, env)
    for name, make, rows, mode, precision in plan:
        if not chosen(text, name):
            continue
        place = (name, mode, rows, precision)
        held = [row for row in file.rows if _place(row) == place]
        if resume and any(row.get("source_hash") == source_hash() for row in held):
            continue
        announce(f"{name}, {rows} rows, {precision}, {mode}")
        row = measured(name, make, rows, mode, precision, where)
        file = results.changed(out, env, functools.partial(_put, row=row))
        hear(row)
    return file


def _put(file: File, row: DecodeRow) -> None:
    kept = msgspec.to_builtins(row)
    file.rows = [*(other for other in file.rows if _place(other) != _place(kept)), kept]


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("model", "mode", "batch", "precision"))


Made = Callable[[], Any]
AnyConfig = llm_med.Config | byte_spectral.Config | titan_mac.Config | longnet.Config


def _plan(device: torch.device) -> Iterator[tuple[str, Made, int, str, str]]:
    """(model, how to make it, rows, mode, precision)."""
    if device.type != "cuda":
        tiny = functools.partial(build, llm_med.Config.sizes("tiny"))
        yield "LLMMed tiny", tiny, 1, "eager", "float32"
        return
    small, base = llm_med.Config.sizes("small"), llm_med.Config.sizes("base")
    spectral = byte_spectral.Config.sizes("small", filter="taps", taps=32, attention_every=6)
    models: dict[str, tuple[AnyConfig, tuple[int, ...]]] = {
        "LLMMed small": (small, (1, 16, 64)),
        "ByteSpectralLM small": (spectral, (1, 16, 64)),
        "LLMMed base": (base, (1, 16)),
        "TitanMAC byte": (titan_mac.Config.sizes("byte"), (1, 16)),
        "LongNetLM small": (longnet.Config.sizes("small"), (1, 16)),
    }
    for name, (config, batches) in models.items():
        made = functools.partial(build, config)
        for rows in batches:
            yield name, made, rows, "captured", "float32"
        yield name, made, 1, "eager", "float32"
        if "small" in name:
            yield name, made, 64, "captured", "bf16"
    if importlib.util.find_spec("transformers"):
        for rows, mode in ((1, _DYNAMIC), (16, _DYNAMIC), (1, _STATIC), (16, _STATIC)):
            yield "Llama (transformers)", functools.partial(_llama, small), rows, mode, "float32"


def measured(name: str, make: Made, rows: int, mode: str, precision: str, device: torch.device) -> DecodeRow:
    """One row of the table."""
    torch.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    model = make().to(device, torch.bfloat16 if precision == "bf16" else torch.float32).eval()
    prompt = torch.randint(256, (rows, PROMPT), device=device)
    count = 16 if mode == "eager" else 64
    total = _WARM + count * (BLOCKS + 1)
    begin = time.perf_counter()
    launches = kernels = syncs = None
    with using(regime="graph" if mode == "captured" else "eager"):
        if hasattr(model, "stream"):
            text = model.stream(prompt, total, seed=0, capture=mode == "captured")
            block, step = functools.partial(_drawn, text, count), functools.partial(_drawn, text, 1)
            _drawn(text, _WARM)
        else:
            block = functools.partial(_generated, model, prompt, count, mode)
            block()
            step = None
        synchronize(device)
        began = time.perf_counter() - begin
        times = []
        for _ in range(BLOCKS):
            start = time.perf_counter()
            block()
            synchronize(device)
            times.append((time.perf_counter() - start) / count)
        if step is not None:
            launches, kernels, syncs = counted(step, device)
    times.sort()
    median = statistics.median(times)
    return DecodeRow(
        model=name, mode=mode, batch=rows, seq=PROMPT + total,
        params=sum(p.numel() for p in model.parameters()), precision=precision,
        step_us=1e6 * median, step_us_p20=1e6 * times[0], step_us_p80=1e6 * times[-1],
        tokens_per_s=rows / median, begin_s=began, launches=launches, kernels=kernels, syncs=syncs,
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        source_hash=source_hash(), date=results.now(),
    )  # fmt: skip


def _drawn(text: Iterator[Tensor], count: int) -> None:
    for _ in itertools.islice(text, count):
        pass


def _llama(config: llm_med.Config) -> Any:
    """A Llama of the shape of `config`, by transformers."""
    transformers: Any = importlib.import_module("transformers")
    shape = transformers.LlamaConfig(
        vocab_size=config.vocab, hidden_size=config.d_model, num_hidden_layers=config.layers,
        num_attention_heads=config.heads, num_key_value_heads=config.n_kv_heads,
        intermediate_size=config.ff_dim, max_position_embeddings=config.max_seq_len,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(shape)


def _generated(model: Any, prompt: Tensor, count: int, mode: str) -> None:
    """`count` symbols by transformers' `generate`, its prompt included."""
    given: dict[str, Any] = {"cache_implementation": "static"} if mode == _STATIC else {}
    with torch.no_grad():
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, min_new_tokens=count,
            do_sample=True, top_k=0, **given,
        )  # fmt: skip
