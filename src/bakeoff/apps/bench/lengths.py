"""Time and memory of dilated attention and of dense attention as rows grow from 4K to 1M tokens.

`python -m bakeoff.apps.bench.lengths --out results/h200/dilated-lengths.csv`

Every form gets the same q, k and v. "dense" is causal attention over the whole row by PyTorch's cuDNN or
FlashAttention kernels. "equal FLOPs" is FlashAttention and cuDNN on rows so short that a token costs what it
costs in dilated attention: what a dense kernel would take for as much work, not for the same function.

Calls are replayed from a CUDA graph unless one takes so long that the host's time can't matter. Memory is
the most that was allocated during a call, less what was before.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bakeoff import hardware
from bakeoff.apps.bench import results
from bakeoff.apps.bench.tables import read, write
from bakeoff.device import named_device
from bakeoff.ops.dilated_attention import OP, dilated_attention
from bakeoff.timing import seconds_per_call

__all__ = ["Form", "forms", "measured"]

SEGMENTS, RATES = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)
_KEYS = ("form", "direction", "tokens", "heads", "head_dim")
_FOUND = ("ms", "extra_gib", "tflops", "reason")
_GRAPH_S = 0.02  # a call as long as this is not captured
_LONG_S = 2.0  # and one that will take this long is made once
_DENSE = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class Form(NamedTuple):
    """One way to attend; `flops` of a forward pass over the whole row."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    flops: int
    quadratic: bool = False


def forms(q: Tensor, names: tuple[str, ...]) -> Iterator[Form]:
    """The candidates of the op called in `names`, and what they are held against."""
    T, H, D = q.shape[1:]
    args = (q, q, q, ",".join(map(str, SEGMENTS)), ",".join(map(str, RATES)), True, "mod", "exact")
    case = OP.case((*args, None, None, False))
    dilated = int(OP.cost(case.without_grad()).flops)
    for name in names:
        if not OP.candidate(name).reasons(case):
            yield Form(name, partial(_dilated, name=name), dilated)
    # Dense rows of L keys cost a token of a causal row L / 2 pairs, those of the branches w / r^2 / 2.
    L = sum(min(w, T) // r**2 for w, r in zip(SEGMENTS, RATES, strict=True))
    even = T // L * L
    for name, backend in _DENSE.items():
        yield Form(f"equal FLOPs, {name}", partial(_short, L=L, backend=backend), 2 * D * H * even * (L + 1))
    dense = partial(_dense, backend=SDPBackend.CUDNN_ATTENTION)  # the faster one
    yield Form("dense, cudnn", dense, 2 * D * H * T * (T + 1), True)


def _dilated(q: Tensor, k: Tensor, v: Tensor, name: str) -> Tensor:
    found = dilated_attention(q, k, v, SEGMENTS, RATES, causal=True, impl=name)
    assert isinstance(found, Tensor)
    return found


def _short(q: Tensor, k: Tensor, v: Tensor, L: int, backend: SDPBackend) -> Tensor:
    even = q.shape[1] // L * L
    q, k, v = (x[:, :even].unflatten(1, (-1, L)).flatten(0, 1) for x in (q, k, v))
    return _dense(q, k, v, backend)


def _dense(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        y = scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
    return y.transpose(1, 2)


def measured(
    call: Callable[[], Any], device: torch.device, budget_s: float, expected_s: float = 0.0
) -> tuple[float, int]:
    """Seconds of a call and the bytes that it needs on top of what there is."""
    if expected_s < _LONG_S:
        call()  # compiles, and fills the caches of kernels and cuDNN's plans
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    first = seconds_per_call([call], 1, device)
    peak = torch.cuda.max_memory_allocated(device) - held
    if first > _GRAPH_S:
        count = max(0, min(5, int(budget_s / first) - 1))
        times = [first, *(seconds_per_call([call], 1, device) for _ in range(count))]
        return statistics.median(times), peak
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    count = max(1, min(100, int(budget_s / 7 / first)))
    return statistics.median([seconds_per_call([graph.replay], count, device) for _ in range(7)]), peak


def row(
    form: Form, inputs: list[Tensor], dy: Tensor, direction: str, budget_s: float, expected_s: float
) -> tuple[dict[str, str], float]:
    """The row of a form in one direction, and the seconds it takes."""
    device, flops = dy.device, form.flops * (7 / 2 if direction == "both" else 1)

    def forward() -> Tensor:
        with torch.no_grad():
            return form.run(*inputs)

    def both() -> Any:
        y = form.run(*inputs)
        return torch.autograd.grad(y, inputs, dy.reshape(-1)[: y.numel()].view(y.shape))

    try:
        seconds, peak = measured(forward if direction == "forward" else both, device, budget_s, expected_s)
    except (RuntimeError, ValueError) as error:  # out of memory among them
        torch.cuda.empty_cache()
        return {"reason": str(error).splitlines()[0][:160]}, math.inf
    return {
        "ms": f"{1e3 * seconds:.4f}",
        "extra_gib": f"{peak / 2**30:.4f}",
        "tflops": f"{flops / seconds / 1e12:.1f}",
    }, seconds


def run(
    lengths: Sequence[int], names: tuple[str, ...], device: torch.device, heads: int, head_dim: int,
    budget_s: float, limit_s: float,
) -> Iterator[dict[str, str]]:  # fmt: skip
    """The rows of all forms, both directions, at lengths that double."""
    last: dict[tuple[str, str], float] = {}
    for T in lengths:
        torch.manual_seed(0)
        made = (torch.randn(1, T, heads, head_dim, device=device, dtype=torch.bfloat16) for _ in range(4))
        dy, *inputs = (x.requires_grad_(place > 0) for place, x in enumerate(made))
        for form in forms(inputs[0], names):
            for direction in ("forward", "both"):
                expected = 4 * last.get((form.name, direction), 0.0) if form.quadratic else 0.0
                if expected > limit_s:
                    found, seconds = {"reason": f"would take about {expected:.0f} s"}, expected
                else:
                    found, seconds = row(form, inputs, dy, direction, budget_s, expected)
                last[form.name, direction] = seconds
                keys = zip(_KEYS, map(str, (form.name, direction, T, heads, head_dim)), strict=True)
                yield dict(keys) | dict.fromkeys(_FOUND, "") | found
        del dy, inputs, form
        if device.type == "cuda":
            torch.cuda.empty_cache()


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Results file to write.")
@click.option("--device", default="auto", help="cuda or cuda:N.")
@click.option("--lengths", default=",".join(str(1 << n) for n in range(12, 21)), show_default=True)
@click.option("--heads", type=click.IntRange(1), default=16, show_default=True)
@click.option("--head-dim", type=click.IntRange(8), default=128, show_default=True)
@click.option("--candidates", default="cudnn,fused", show_default=True, help="Of dilated_attention.")
@click.option("--budget", default=0.15, show_default=True, help="Seconds measured per row of the file.")
@click.option("--limit", default=10.0, show_default=True, help="Seconds that a dense call may take.")
def main(
    out: Path, device: str, lengths: str, heads: int, head_dim: int, candidates: str, budget: float,
    limit: float,
) -> None:  # fmt: skip
    """Measure every form at every length, and write OUT after each."""
    where = named_device(device)
    if where.type != "cuda":
        raise click.ClickException("lengths are measured on a GPU; pass --device cuda where there is one")
    facts = hardware.facts(str(where))
    common = {"gpu": facts.device, "torch": facts.torch, "triton": facts.triton, "date": results.now()[:10]}
    rows = read(out) if out.exists() else []
    sizes, names = [int(T) for T in lengths.split(",")], tuple(candidates.split(","))
    for found in run(sizes, names, where, heads, head_dim, budget, limit):
        rows = [old for old in rows if any(old[name] != found[name] for name in _KEYS)]
        rows.append(common | found)
        write(out, rows)
        click.echo("  ".join(value for value in found.values() if value))


if __name__ == "__main__":
    main()
