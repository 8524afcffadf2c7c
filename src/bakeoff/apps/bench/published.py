"""Benchmarks under the names that other projects' integrations of such kernels use; each holds a contest."""

import math
import operator
from typing import Any

import torch
from rich.console import Console

from bakeoff import hardware
from bakeoff.apps.bench.exact import exact
from bakeoff.apps.tabular import terminal_table
from bakeoff.device import named_device
from bakeoff.select import Case, TensorMeta, Verdict, find_op
from bakeoff.select.contests.contest import regimes_of
from bakeoff.select.contests.worker import Worker

__all__ = ["benchmark_rms_norm", "benchmark_rotary", "manual_kernel_benchmark"]


def benchmark_rms_norm(
    batch_size: int = 16,
    seq_len: int = 256,
    d_model: int = 384,
    *,
    dtype: torch.dtype | None = None,
    device: str = "auto",
    regime: str = "eager",
    budget_s: float = 2.0,
) -> dict[str, Any]:
    """A contest of rms_norm, forward and backward, at exactly [batch_size, seq_len, d_model].

    Args:
        batch_size, seq_len, d_model: the shape of x; the weight is [d_model].
        dtype: of x and weight; by default bfloat16 on CUDA and float32 on the CPU.
        device: "auto" is CUDA where there is one.
        regime: "eager" (host time counts) or, on CUDA, "graph" (device time).
        budget_s: seconds spent measuring; verification comes on top.

    Returns:
        ``pytorch_time`` and ``triton_time``: milliseconds of a verified call with its backward (`triton_time`
        is None where Triton can't run or was rejected). ``speedup``: pytorch_time / triton_time; where Triton
        has no time, pytorch_time over that of the choice. ``use_triton``, ``choice``, ``why``: the decision.
        ``times`` (ms), ``errors`` (relative RMS against the float64 reference) and ``rejected`` (reasons) by
        candidate.
        ``share``: by candidate, the part of the machine's limit reached. ``key``, ``device``, ``warning``.

    Raises:
        ValueError: a size that is no positive whole number, an unknown device or regime.
        bakeoff.errors.ContestError: no contest could be held (out of memory, say).

    Example:
        >>> from bakeoff.bench import benchmark_rms_norm
        >>> result = benchmark_rms_norm(2, 8, 16, device="cpu", budget_s=0.1)  # doctest: +SKIP
        >>> result["choice"] in result["times"]  # doctest: +SKIP
        True
    """
    B, T, D = _sizes(batch_size=batch_size, seq_len=seq_len, d_model=d_model)
    device, dtype = _device_and_dtype(device, dtype)
    x = TensorMeta.dense((B, T, D), dtype, grad=True)
    weight = TensorMeta.dense((D,), dtype, grad=True)
    arguments = {"x": x, "weight": weight, "eps": 1e-6, "residual": None, "offset": 0.0}
    return _result(_contest("rms_norm", arguments, device, regime, budget_s), device)


def benchmark_rotary(
    batch_size: int = 16,
    seq_len: int = 256,
    n_heads: int = 8,
    head_dim: int = 48,
    *,
    n_kv_heads: int | None = None,
    dtype: torch.dtype | None = None,
    device: str = "auto",
    regime: str = "eager",
    budget_s: float = 2.0,
) -> dict[str, Any]:
    """A contest of rotary on q [batch_size, seq_len, n_heads, head_dim] and k (`n_kv_heads`, by default as
    many).

    The other arguments, the result and the errors are those of `benchmark_rms_norm`.
    """
    B, T, H, D = _sizes(batch_size=batch_size, seq_len=seq_len, n_heads=n_heads, head_dim=head_dim)
    (HK,) = _sizes(n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads)
    if D % 2:
        raise ValueError(f"head_dim={D} must be even: rotary turns pairs of dimensions")
    device, dtype = _device_and_dtype(device, dtype)
    table = TensorMeta.dense((T, D // 2), torch.float32)
    arguments = {
        "q": TensorMeta.dense((B, T, H, D), dtype, grad=True),
        "k": TensorMeta.dense((B, T, HK, D), dtype, grad=True),
        "cos": table,
        "sin": table,
        "interleaved": False,
        "position_ids": None,
        **dict.fromkeys(("q_weight", "k_weight", "eps", "offset")),
    }
    return _result(_contest("rotary", arguments, device, regime, budget_s), device)


def manual_kernel_benchmark(
    *, device: str = "auto", budget_s: float = 2.0, console: Console | None = None
) -> dict[str, dict[str, Any]]:
    """Both benchmarks at the size those projects publish (d_model 384, 8 heads, 16 rows of 256), printed, and
    returned by op.

    Args:
        device, budget_s: as in `benchmark_rms_norm`.
        console: where the table goes; standard output by default.
    """
    benchmarks = {
        "rms_norm": benchmark_rms_norm(device=device, budget_s=budget_s),
        "rotary": benchmark_rotary(device=device, budget_s=budget_s),
    }
    console = console or Console()
    columns = (("candidate", "name"), ("ms", "right"), ("of limit", "right"), ("error", "right"))
    for name, result in benchmarks.items():
        console.print(f"{name}: {result['choice']} ({result['why']})", highlight=False)
        rows = [
            (f"  {candidate}", f"{ms:.4f}", f"{result['share'][candidate]:.0%}",
             f"{result['errors'][candidate]:.1e}")
            for candidate, ms in sorted(result["times"].items(), key=lambda pair: pair[1])
        ]  # fmt: skip
        console.print(terminal_table(columns, rows))
        for candidate, reason in result["rejected"].items():
            console.print(f"  {candidate} is out: {reason}", highlight=False, markup=False, soft_wrap=True)
    return benchmarks


def _contest(op_name: str, arguments: dict[str, Any], device: str, regime: str, budget_s: float) -> Verdict:
    op = exact(find_op(op_name))
    case = Case({name: arguments[name] for name in op.params}, device)
    if regime not in regimes_of(case):
        raise ValueError(f"there is no regime {regime!r} on {device}; use {' or '.join(regimes_of(case))}")
    if not (isinstance(budget_s, int | float) and math.isfinite(budget_s) and budget_s > 0):
        raise ValueError(f"budget_s={budget_s!r} must be a positive number of seconds")
    op.check(case)
    with Worker() as worker:
        (verdict,) = worker.contest(op, case, (regime,), float(budget_s))
    return verdict


def _result(verdict: Verdict, device: str) -> dict[str, Any]:
    times = {name: timing.us / 1000 for name, timing in verdict.timings.items()}
    limit = hardware.limit_us(verdict.cost.bytes, verdict.cost.flops, device) / 1000
    compared = times.get("triton", times[verdict.winner])
    return {
        "pytorch_time": times["eager"],
        "triton_time": times.get("triton"),
        "speedup": times["eager"] / compared,
        "use_triton": verdict.winner == "triton",
        "choice": verdict.winner,
        "why": verdict.why,
        "times": times,
        "errors": {t.candidate: t.errors.rms for t in verdict.trials if t.errors},
        "rejected": {t.candidate: t.rejected for t in verdict.trials if t.rejected},
        "share": {name: limit / ms for name, ms in times.items()},
        "key": verdict.key,
        "device": device,
        "warning": verdict.warning,
    }


def _sizes(**given: Any) -> list[int]:
    sizes = []
    for name, value in given.items():
        try:
            size = operator.index(value)
        except TypeError:
            size = 0
        if size < 1 or isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be a positive whole number")
        sizes.append(size)
    return sizes


def _device_and_dtype(name: str, dtype: torch.dtype | None) -> tuple[str, torch.dtype]:
    device = named_device(name)
    if dtype is None:
        dtype = torch.bfloat16 if hardware.native_bf16(str(device)) else torch.float32
    return str(device), dtype
