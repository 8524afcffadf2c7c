"""Neural memories beside each other: memory_scan's candidates and what is published, in one run.

`python -m bakeoff.apps.bench.memories --out results/h200/memory-scan.csv`

Four kinds of case. The op's own: the candidates of memory_scan, each first verified on 160 tokens of the
case. "layer": `bakeoff.nn.NeuralMemory` beside titans-pytorch's NeuralMemory with equal width, heads, hidden
units and chunk; both have projections and gates of their own. "large": LaCT's arithmetic in plain PyTorch, of
the size of memory_scan's cases of one chunk of 2048 tokens; `--only 4x2048` times these alone, each other's
candidates beside it. "linear": other recurrences over as many tokens
and heads, which know a matrix where memory_scan has an MLP: fla's gated delta rule and its TTT-linear.
Packages that aren't installed are left out, with a line that says so. Where the FLOPs that an answer and its
gradients take at least are known, rows tell the rate that this makes and its share of a large product's.
"""

import csv
import importlib
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch

from bakeoff import hardware
from bakeoff.apps.bench import results
from bakeoff.apps.bench.large_chunk import large_chunk, products
from bakeoff.device import named_device
from bakeoff.nn import NeuralMemory
from bakeoff.ops.memory_scan import OP
from bakeoff.select import Case
from bakeoff.select.contests.draw import inputs
from bakeoff.select.contests.verify import Rejected, verify, yardsticks
from bakeoff.select.declare.case import TensorMeta

__all__ = ["TIMED", "main", "shortened"]

_TOKENS = ("q", "k", "v", "lr", "decay", "forget")
_RUNS = 21
TIMED = ("12x1024 64-256 chunk 64", "12x1024 64-256 chunk 16", "64x1024 64-64 chunk 64",
        "2x1024 384-1536 chunk 64 fp32", "4x2048 512-512 chunk 2048",
        "4x2048 512-512 chunk 2048 orthogonal")  # fmt: skip
_LAYERS = [(2, 1024, 384, 1, 4, 64), (2, 1024, 384, 1, 4, 16), (4, 512, 512, 8, 2, 64)]
"""Rows, tokens, width, heads, hidden units over inputs, chunk."""

Call = Callable[[], Any]
Timed = tuple[str, str, str, str, dict[str, Call], dict[str, int]]
"""Kind and case, dtype, candidate, whether it is verified, what to time, and the FLOPs that are known."""


def shortened(case: Case) -> Case:
    """At most 4 groups and 160 tokens: the definition goes one token after the other."""
    args = dict(case.args)
    for name, meta in case.tensors.items():
        shape = (min(meta.shape[0], 4), *meta.shape[1:])
        if name in _TOKENS:
            shape = (shape[0], min(meta.shape[1], 160), *meta.shape[2:])
        args[name] = TensorMeta.dense(shape, meta.dtype, grad=meta.requires_grad)
    return Case(args, case.device, case.name)


def measured(call: Call) -> tuple[str, float, float]:
    """The regime, "graph" where it can be captured and else "eager", the median microseconds and the peak of
    memory that a call allocates, in MiB."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    regime, run = "graph", call
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        run = graph.replay
    except (RuntimeError, NotImplementedError):
        torch.cuda.synchronize()
        regime = "eager"
    times = []
    for _ in range(_RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return regime, statistics.median(times), peak


def both_ways(function: Callable[..., Any], args: list[Any], learned: list[torch.Tensor]) -> dict[str, Call]:
    """The forward alone without gradients, and forward and backward of all that is learned."""

    def made() -> list[torch.Tensor]:
        outs = function(*args)
        return [x for x in (outs if isinstance(outs, tuple) else (outs,)) if isinstance(x, torch.Tensor)]

    def forward() -> None:
        with torch.no_grad():
            made()

    with torch.no_grad():
        arriving = [torch.randn_like(x) for x in made()]

    def both() -> None:
        torch.autograd.grad(made(), learned, arriving, allow_unused=True)

    return {"forward": forward, "both": both}


def of_op(device: torch.device, only: str) -> Iterator[Timed]:
    """The op's candidates."""
    for listed in OP.cases():
        if listed.name not in TIMED or only not in listed.name:
            continue
        case = Case(listed.args, str(device), listed.name)
        flops = {"forward": OP.cost(case.without_grad()).flops, "both": OP.cost(case).flops}
        sticks = list(yardsticks(OP, shortened(case)))
        for name in ("triton", "large", "chunked", "compiled", "eager"):
            if name == "compiled" and listed.chunk < listed.q.shape[1]:
                continue  # a graph of all chunks takes minutes to compile
            candidate = OP.candidate(name)
            if candidate.supports is not None and candidate.supports(case):
                continue
            try:
                verify(OP, candidate, sticks)
                verdict = "yes"
            except Rejected as error:
                verdict = f"no: {error}"
            args = inputs(OP, case, 0)
            learned = [x for x in args if isinstance(x, torch.Tensor)]
            dtype = str(args[0].dtype).removeprefix("torch.")
            calls = both_ways(candidate.implementation, args, learned)
            yield case.name, dtype, name, verdict, calls, flops


def of_layers(device: torch.device, only: str) -> Iterator[Timed]:
    """The same for whole layers."""
    theirs = _package("titans_pytorch")
    for rows, T, width, heads, wide, chunk in _LAYERS:
        held = "1 head" if heads == 1 else f"{heads} heads"
        name = f"layer {rows}x{T}x{width}, {held}, {wide} times wide, chunk {chunk}"
        for dtype in (torch.float32, torch.bfloat16) if only in name else ():
            layers: dict[str, torch.nn.Module] = {
                "bakeoff": NeuralMemory(width, heads, expansion=wide, chunk=chunk)
            }
            if theirs is not None:
                layers["titans-pytorch"] = theirs.NeuralMemory(
                    dim=width, chunk_size=chunk, heads=heads, dim_head=width // heads,
                    default_model_kwargs={"depth": 2, "expansion_factor": float(wide)},
                )  # fmt: skip
            for called, layer in layers.items():
                layer.to(device)
                x = torch.randn(rows, T, width, device=device, requires_grad=True)

                def run(
                    x: torch.Tensor, layer: torch.nn.Module = layer, dtype: torch.dtype = dtype
                ) -> torch.Tensor:
                    with torch.autocast("cuda", dtype, enabled=dtype == torch.bfloat16, cache_enabled=False):
                        return layer(x)[0]  # type: ignore[no-any-return]

                text = str(dtype).removeprefix("torch.")
                yield name, text, called, "", both_ways(run, [x], [x, *layer.parameters()]), {}


def of_large(device: torch.device, only: str) -> Iterator[Timed]:
    """The same for LaCT's arithmetic, at the size of memory_scan's case of one large chunk."""
    G, T, D = 4, 2048, 512
    name = f"large {G}x{T}x{D}, gated"
    for orthogonal in (False, True) if only in name else ():
        tokens = [torch.randn(G, T, D, device=device, dtype=torch.bfloat16) for _ in range(3)]
        matrices = [torch.randn(G, D, D, device=device) / D**0.5 for _ in range(3)]
        args = [*tokens, *matrices, 0.01 * torch.rand(3, G, T, 1, device=device)]
        learned = [x.requires_grad_() for x in args]
        compiled = torch.compile(large_chunk, dynamic=False)
        for called, function in (("plain PyTorch", large_chunk), ("torch.compile", compiled)):
            what = f"LaCT's arithmetic{', orthogonal' * orthogonal}, {called}"
            flops = products(G, T, D, D, orthogonal)
            calls = both_ways(function, [*args, orthogonal], learned)
            yield name, "bfloat16", what, "", calls, {"forward": flops, "both": 3 * flops}


def of_matrices(device: torch.device, only: str) -> Iterator[Timed]:
    """The same for recurrences whose memory is a matrix."""
    delta, ttt = _package("fla.ops.gated_delta_rule"), _package("fla.ops.ttt")

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_()

    if only not in "linear":
        return
    T, H, D = 1024, 12, 64
    q, v = drawn(1, T, H, D), drawn(1, T, H, D)
    k = torch.nn.functional.normalize(drawn(1, T, H, D).detach(), dim=-1).requires_grad_()
    if delta is not None:
        g = -torch.rand(1, T, H, device=device)
        gates = [g.requires_grad_(), torch.rand(1, T, H, device=device, dtype=v.dtype).requires_grad_()]
        calls = both_ways(delta.chunk_gated_delta_rule, [q, k, v, *gates], [q, k, v, *gates])
        yield f"linear {H}x{T}x{D}", "bfloat16", "fla gated delta rule", "", calls, {}
    if ttt is not None:
        rest = [drawn(H, D), drawn(H, D), torch.full_like(v[..., :1], 0.05).detach().requires_grad_()]
        calls = both_ways(ttt.fused_chunk_ttt_linear, [q, k, v, *rest], [q, k, v, *rest])
        yield f"linear {H}x{T}x{D}, chunk 16", "bfloat16", "fla ttt_linear", "", calls, {}


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        click.echo(f"{name} is left out: {error}")
        return None


def rate(flops: int, us: float, limit: float) -> dict[str, str]:
    """TFLOP/s, and their share of `limit`; empty for no FLOPs."""
    tflops = flops / us / 1e6
    return (
        {"tflops": f"{tflops:.0f}", "share": f"{tflops / limit:.3f}"}
        if flops
        else {"tflops": "", "share": ""}
    )


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Results file to write.")
@click.option("--device", default="auto", help="cuda or cuda:N.")
@click.option("--only", default="", help="Only cases with this in their name.")
def main(out: Path, device: str, only: str) -> None:
    """Time everything, and write OUT."""
    place = named_device(device)
    facts = hardware.facts(str(place))
    limit = hardware.matmul_tflops(str(place))
    common = {"gpu": facts.device, "torch": facts.torch, "triton": facts.triton, "date": results.now()[:10]}
    rows: list[dict[str, str]] = []
    for part in (of_layers, of_matrices, of_large, of_op):
        for case, dtype, candidate, verdict, calls, flops in part(place, only):
            for direction, call in calls.items():
                regime, us, peak = measured(call)
                row = common | {"op": "memory_scan", "case": case, "dtype": dtype, "regime": regime}
                row |= {"direction": direction, "candidate": candidate, "us": f"{us:.0f}"}
                row |= {"peak_mib": f"{peak:.0f}", "verified": verdict} | rate(
                    flops.get(direction, 0), us, limit
                )
                click.echo(
                    f"{case:50} {dtype:9} {candidate:22} {direction:8} {us:9.0f} us {peak:7.0f} MiB "
                    f"{row['tflops']:>5} TFLOP/s {row['share']:>5} {verdict}"
                )
                rows.append(row)
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
