"""The declaration of linear_cross_entropy: its candidates, checks, buckets, cost and cases."""

from pathlib import Path
from typing import Any

import torch

from bakeoff.ops.linear_cross_entropy import peers, plain
from bakeoff.ops.linear_cross_entropy.reference import linear_cross_entropy as reference
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.abilities import kernel_candidate, needs_native
from bakeoff.select.declare.arguments import INTEGER, Arguments, Choice, Number, Tensor
from bakeoff.select.declare.compiled import compiler_missing
from bakeoff.select.declare.key import round_rows, with_layout

__all__ = ["OP"]

_LARGE = 256_000_000  # bytes of all logits, of which plain PyTorch holds six times as much in 16 bits
_TIMED = 12_000_000  # bytes of all logits, below which the kernels were not timed


def relations(case: Case) -> None:
    """Raises TypeError or ValueError for arguments that don't go together."""
    x, target = case.x, case.target
    if target.shape != x.shape[:-1]:
        raise ValueError(
            f"linear_cross_entropy: target has shape {target.shape}, expected {x.shape[:-1]}, one class for "
            f"each row of x, which has shape {x.shape}"
        )
    if type(case.ignore_index) is not int:
        raise TypeError(
            f"linear_cross_entropy: ignore_index is {case.said('ignore_index')}, expected a whole number; "
            f"-1 where nothing is to be ignored"
        )
    bits = 8 * target.dtype.itemsize
    if not -(2 ** (bits - 1)) <= case.ignore_index < 2 ** (bits - 1):
        raise ValueError(
            f"linear_cross_entropy: ignore_index is {case.ignore_index}, which a target of {bits} bits can't "
            f"be; -1 where nothing is to be ignored"
        )
    if case.label_smoothing > 1:
        raise ValueError(f"linear_cross_entropy: label_smoothing must be 0 to 1, got {case.label_smoothing}")
    if case.softcap is not None and not case.softcap > 0:
        raise ValueError(
            f"linear_cross_entropy: softcap must be above 0, or None for no cap, got {case.softcap}"
        )


check = Arguments(
    "linear_cross_entropy",
    {
        "x": Tensor("... N D+", hint="a row is x[None], its target target[None]"),
        "weight": Tensor("V+ D", dtype_of="x", hint="one row for each class, as in torch.nn.Linear"),
        "target": Tensor("... N", INTEGER, hint="one class for each row of x"),
        "bias": Tensor("V", optional=True, dtype_of="x"),
        "ignore_index": Number(),
        "label_smoothing": Number(least=0.0),
        "z_loss": Number(least=0.0),
        "softcap": Number(optional=True),
        "reduction": Choice(("mean", "sum", "none")),
    },
    relations,
)


def bucket(case: Case) -> Case:
    """Rows as one dimension, their number rounded up, tensors in their layout class's plainest form."""
    N = round_rows(case.target.numel)
    found: dict[str, Any] = {
        "x": with_layout(case.x, (N, case.x.shape[-1])),
        "weight": with_layout(case.weight, case.weight.shape, 2),
        "target": TensorMeta.dense((N,), case.target.dtype),
    }
    if case.bias is not None:
        found["bias"] = TensorMeta.dense(case.bias.shape, case.bias.dtype, grad=case.bias.requires_grad)
    return case.replace(**found)


def cost(case: Case) -> Cost:
    """Every argument once, with gradients once more, and these written. FLOPs: a product for the loss, one
    for x's gradient and one for the weight's."""
    N, (V, D) = case.target.numel, case.weight.shape
    read = sum(meta.nbytes for meta in case.tensors.values())
    product = 2 * N * V * D
    if not case.needs_grad:
        return Cost(read, product)
    gradients = sum(meta.nbytes for meta in case.tensors.values() if meta.requires_grad)
    return Cost(2 * read + gradients, product * (1 + case.x.requires_grad + case.weight.requires_grad))


def draw_among(name: str, case: Case, generator: torch.Generator) -> torch.Tensor | None:
    """Classes, every eighth of which is ignored."""
    meta, device = case.args[name], generator.device
    if name == "target":
        assert isinstance(meta, TensorMeta)
        V = case.weight.shape[0]
        drawn = torch.randint(V, meta.shape, generator=generator, device=device, dtype=meta.dtype)
        drawn.view(-1)[::8] = case.ignore_index
        return drawn
    return None


def cases() -> list[Case]:
    """Heads of language models from bytes to large vocabularies, then every other form once."""
    fp16, fp32 = torch.float16, torch.float32
    return [
        _case(8192, 4096, 131072),
        _case(8192, 2048, 32000),
        _case(4096, 768, 50257),
        _case(24576, 384, 256),
        _case(8192, 2048, 32000, bias=True, name="bias"),
        _case(4096, 2048, 32000, softcap=30.0, z_loss=1e-4, name="cap z"),
        _case(4096, 1024, 32000, label_smoothing=0.1, name="smooth"),
        _case(4096, 2048, 32000, frozen=True, name="frozen weight"),
        _case(4096, 1024, 32000, grad=False, name="loss alone"),
        _case(2048, 1024, 32000, reduction="none", name="none"),
        _case(4096, 1024, 32000, dtype=fp16),
        _case(2048, 512, 4096, dtype=fp32),
        _case(1001, 333, 777, bias=True, reduction="sum", name="odd"),
    ]


def _case(
    N: int,
    D: int,
    V: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    grad: bool = True,
    frozen: bool = False,
    name: str = "",
) -> Case:
    args: dict[str, Any] = {
        "x": TensorMeta.dense((N, D), dtype, grad=grad),
        "weight": TensorMeta.dense((V, D), dtype, grad=grad and not frozen),
        "target": TensorMeta.dense((N,), torch.int64),
        "bias": TensorMeta.dense((V,), dtype, grad=grad) if bias else None,
        "ignore_index": -100,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "softcap": softcap,
        "reduction": reduction,
    }
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    return Case(args, "cuda", f"{N}x{D}->{V} {short} {name}".strip())


def triton_supports(case: Case) -> str | None:
    """Why the kernels can't take `case`, or None."""
    return needs_native(case, besides=("target",))


def auto_chunker_supports(case: Case) -> str | None:
    """Why torch.compile's chunker can't take `case`, or None."""
    if not (Path(torch.__file__).parent / "_inductor" / "fx_passes" / "auto_chunker").exists():
        return f"torch.compile of torch {torch.__version__} has no chunker"
    N, (V, D) = case.target.numel, case.weight.shape
    if not (case.x.requires_grad and case.weight.requires_grad and case.reduction != "none"):
        return "torch.compile's chunker is for losses of one number with gradients of x and weight"
    logits = N * V
    if logits <= max(1 << 20, (N + V) * D):
        return "torch.compile's chunker wants a million logits, and more than x and weight have elements"
    return compiler_missing(case)


def heuristic(case: Case, regime: str) -> str:
    """Triton's kernels from the smallest size on at which they were timed; chunks of rows elsewhere where all
    logits together would take much memory. torch.compile makes good code of fewer logits by itself."""
    logits = case.target.numel * case.weight.shape[0] * case.x.dtype.itemsize
    least = _LARGE if regime == "compiled" else _TIMED
    if logits >= least and case.device.startswith("cuda") and triton_supports(case) is None:
        return "triton"
    return "chunked" if logits >= _LARGE else "eager"


def _chunked() -> Implementation:
    from bakeoff.ops.linear_cross_entropy.chunked import chunked

    return chunked


def _triton() -> Implementation:
    from bakeoff.ops.linear_cross_entropy.triton import linear_cross_entropy

    return linear_cross_entropy


OP = Op(
    name="linear_cross_entropy",
    reference=reference,
    candidates=(
        Candidate("eager", plain.eager),
        Candidate("compiled", plain.compiled, supports=compiler_missing),
        Candidate("auto-chunker", plain.auto_chunked, supports=auto_chunker_supports, all_compiled=True),
        Candidate("chunked", load=_chunked),
        kernel_candidate("triton", _triton, triton_supports),
        Candidate("torch", peers.torch_chunked, supports=peers.torch_chunked_supports, traceable=False),
        Candidate(
            "liger",
            peers.liger,
            supports=peers.liger_supports,
            requires=("liger_kernel", "triton"),
            traceable=False,
            capturable=False,
        ),
        Candidate(
            "quack",
            peers.quack,
            supports=peers.quack_supports,
            requires=("quack",),
            traceable=False,
            min_capability=(9, 0),
        ),
        Candidate(
            "cut-cross-entropy",
            peers.cut_cross_entropy,
            supports=peers.cut_cross_entropy_supports,
            requires=("cut_cross_entropy", "triton"),
            traceable=False,
            deterministic=False,
        ),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=heuristic,
    features={"x": 1, "weight": 2, "bias": 1, "target": 0},
    batched=frozenset(),
    averages=True,
    draw_among=draw_among,
)

register(OP)
