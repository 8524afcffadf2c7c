"""Suite "context": dilated attention over ranks that hold a part of the sequence each.

`torchrun --nproc-per-node 2 -m bakeoff bench --suite context`. Beside it stand the op on one device, as long
as a rank's part, PyTorch's ring attention, and ours with one branch. FLOPs are those of the pairs that count;
a rate is a device's own, by the slowest rank.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from bakeoff import ops
from bakeoff.apps.bench import results
from bakeoff.apps.bench.suites import chosen
from bakeoff.apps.bench.together import Together, together
from bakeoff.ops.dilated_attention import OP
from bakeoff.parallel import context_plan, dilated_attention
from bakeoff.select import Case, TensorMeta

__all__ = ["ContextRow", "run_context"]

_WHOLE = 0
"""In place of a segment's length: all tokens."""
_LONG = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)
ALONE, TORCH = "alone", "torch ring"


class ContextRow(msgspec.Struct, kw_only=True):
    """A method at one setting. `tokens` are a rank's, times the slowest rank's, bytes the busiest one's, and
    `difference` is the largest distance of an output or gradient from what one device makes in float32 of the
    same values, relative to its norm, with fewer tokens."""

    setting: str
    method: str
    ranks: int
    tokens: int
    heads: int
    head_dim: int
    segments: str
    rates: str
    causal: bool
    precision: str
    forward_us: float | None = None
    both_us: float | None = None
    forward_tflops: float | None = None
    both_tflops: float | None = None
    peak_bytes: int | None = None
    received_bytes: int | None = None
    """By the busiest rank, forward and backward."""
    difference: float | None = None
    reason: str = ""
    """Why the method was not measured."""
    date: str = ""


class Setting(NamedTuple):
    """What is attended to."""

    name: str
    tokens: int
    segments: tuple[int, ...]
    rates: tuple[int, ...]
    causal: bool
    methods: tuple[str, ...]
    heads: int = 16
    head_dim: int = 128

    def branches(self, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Segments and rates of a sequence of `tokens`."""
        return tuple(min(s, tokens) if s != _WHOLE else tokens for s in self.segments), self.rates


Hear = Callable[[ContextRow], None]


def settings(ranks: int, cuda: bool) -> list[Setting]:
    """Segments within parts, a million tokens, segments over parts, and dense attention."""
    methods, causal = ("exchange", "ring", "ulysses"), ("exchange", "ring", "balanced", "ulysses")
    if not cuda:
        small = (8, 32), (1, 2)
        return [
            Setting("local", 64, *small, True, (ALONE, "auto"), 2, 8),
            Setting("over parts", 64, (16, _WHOLE), (1, 2), True, (ALONE, *causal), 2, 8),
            Setting("dense", 32, (_WHOLE,), (1,), True, causal, 2, 8),
        ]
    part, dense = (1 << 20) // ranks, (ALONE, "ring", "balanced", "ulysses", TORCH)
    return [
        Setting("local", 131072, *_LONG, False, (ALONE, "auto")),
        Setting("local causal", 131072, *_LONG, True, (ALONE, "auto")),
        Setting("a million tokens, causal", part, *_LONG, True, (ALONE, "auto")),
        Setting("over parts", 65536, (2048, 16384, _WHOLE), (1, 4, 16), False, (ALONE, *methods)),
        Setting("over parts causal", 65536, (2048, 16384, _WHOLE), (1, 4, 16), True, (ALONE, *causal)),
        Setting("dense causal", 8192, (_WHOLE,), (1,), True, dense),
        Setting("dense causal, long", 32768, (_WHOLE,), (1,), True, dense),
    ]


def run_context(
    device: str,
    out: Path | None,
    *,
    text: str = "",
    hear: Hear = lambda row: None,
    announce: Callable[[str], None] = lambda stage: None,
) -> Path:
    """Measure every method that has `text` in its setting and name; `hear` is told on rank 0. Returns where
    the results are.

    Raises:
        ResultsError: the file can't be read or written, or belongs to another machine or other versions.
    """
    with together(device, out, "context.json") as ranks:
        ranks.held()
        known = settings(ranks.world.size, ranks.device.type == "cuda")
        results.require_chosen(
            text, (f"{setting.name} {method}" for setting in known for method in setting.methods)
        )
        for setting in known:
            for method in (m for m in setting.methods if chosen(text, f"{setting.name} {m}")):
                announce(f"{setting.name}, {method}")
                row = _row(setting, method, ranks)
                try:
                    _measure(row, setting, method, ranks)
                except (RuntimeError, ValueError, ImportError) as error:
                    row.reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                row.date = results.now()
                ranks.keep(msgspec.to_builtins(row), ("setting", "method", "ranks", "tokens"))
                if ranks.world.first:
                    hear(row)
        return ranks.out


def _row(setting: Setting, method: str, ranks: Together) -> ContextRow:
    half = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    return ContextRow(
        setting=setting.name,
        method=method,
        ranks=1 if method == ALONE else ranks.world.size,
        tokens=setting.tokens,
        heads=setting.heads,
        head_dim=setting.head_dim,
        segments=",".join(str(s) if s != _WHOLE else "all" for s in setting.segments),
        rates=",".join(map(str, setting.rates)),
        causal=setting.causal,
        precision=str(half).removeprefix("torch."),
    )


def _measure(row: ContextRow, setting: Setting, method: str, ranks: Together) -> None:
    size = ranks.world.size if method != ALONE else 1
    total = setting.tokens * size
    dtype = getattr(torch, row.precision)
    segments, rates = setting.branches(total)
    if method not in (ALONE, TORCH):
        plan = context_plan(
            total, size, setting.heads, setting.head_dim, segments, rates, causal=setting.causal,
            method=method, itemsize=dtype.itemsize,
        )  # fmt: skip
        if not plan.local:
            moved = plan.volumes[plan.method]
            row.received_bytes = moved.forward + moved.backward
        row.difference = _difference(setting, method, ranks, dtype)
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    with _called(setting, method, ranks, dtype) as (forward, both):
        row.peak_bytes = ranks.peak_bytes(both)
        row.forward_us, row.both_us = ranks.microseconds(forward), ranks.microseconds(both)
    text = {"segments": ",".join(map(str, segments)), "rates": ",".join(map(str, rates))}

    def tflops(us: float, grad: bool) -> float:
        meta = TensorMeta.dense((1, total, setting.heads, setting.head_dim), dtype, grad=grad)
        given = {**OP.cases()[0].args, "q": meta, "k": meta, "v": meta, **text, "causal": setting.causal}
        return OP.cost(Case(given, str(ranks.device))).flops / size / us / 1e6

    row.forward_tflops, row.both_tflops = tflops(row.forward_us, False), tflops(row.both_us, True)


@contextlib.contextmanager
def _called(
    setting: Setting, method: str, ranks: Together, dtype: torch.dtype
) -> Iterator[tuple[Callable[[], Any], Callable[[], Any]]]:
    """(forward, forward and backward) of this rank's part."""
    generator = torch.Generator(ranks.device).manual_seed(ranks.world.rank)
    shape = (1, setting.tokens, setting.heads, setting.head_dim)
    q, k, v, dy = (
        torch.randn(shape, device=ranks.device, dtype=dtype, generator=generator) for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with contextlib.ExitStack() as stack:
        if method == TORCH:
            attend, leaves, dy = _torch_ring(setting, ranks, leaves, dy, stack)
        else:
            attend = _attending(setting, method, ranks)

        def forward() -> None:
            with torch.no_grad():
                attend(*leaves)

        def both() -> None:
            torch.autograd.grad(attend(*leaves), leaves, dy)

        yield forward, both


def _attending(setting: Setting, method: str, ranks: Together) -> Callable[..., Tensor]:
    """The op on one device, or over all ranks."""

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = ops.dilated_attention(q, k, v, *setting.branches(q.shape[1]), causal=setting.causal)
        return y if isinstance(y, Tensor) else y[0]

    def parallel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        branches = setting.branches(q.shape[1] * ranks.world.size)
        y = dilated_attention(q, k, v, *branches, causal=setting.causal, method=method, mesh=_group())
        return y if isinstance(y, Tensor) else y[0]

    return alone if method == ALONE else parallel


def _group() -> Any:
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ValueError("needs several ranks: torchrun --nproc-per-node 2 -m bakeoff bench --suite context")
    return dist.group.WORLD


def _torch_ring(
    setting: Setting, ranks: Together, leaves: list[Tensor], dy: Tensor, stack: contextlib.ExitStack
) -> tuple[Callable[..., Tensor], list[Tensor], Tensor]:
    """PyTorch's own context parallelism of scaled_dot_product_attention, whose buffers hold the whole
    sequence until it cuts them, heads before tokens."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _group()
    mesh = init_device_mesh(ranks.device.type, (ranks.world.size,))
    whole = [x.detach().transpose(1, 2).repeat(1, 1, ranks.world.size, 1) for x in (*leaves, dy)]
    stack.enter_context(sdpa_kernel([SDPBackend.FLASH_ATTENTION]))
    stack.enter_context(context_parallel(mesh, buffers=whole, buffer_seq_dims=[2] * 4))
    parts = [x.detach().requires_grad_() for x in whole[:3]]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=setting.causal)

    return attend, parts, whole[3]


def _difference(setting: Setting, method: str, ranks: Together, dtype: torch.dtype) -> float:
    """From one device's result in float32, with a sixteenth of the tokens."""
    size, tokens = ranks.world.size, max(64, setting.tokens // 16)
    shorter = max(1, setting.tokens // tokens)
    segments = tuple(s if s == _WHOLE else s // shorter for s in setting.segments)
    few = setting._replace(tokens=tokens, segments=segments, head_dim=min(setting.head_dim, 64))
    generator = torch.Generator(ranks.device).manual_seed(7)  # equal on all ranks
    shape = (1, tokens * size, few.heads, few.head_dim)
    drawn = [torch.randn(shape, device=ranks.device, generator=generator) for _ in range(4)]
    q, k, v, dy = (x.to(dtype).float() for x in drawn)
    whole = [x.requires_grad_() for x in (q, k, v)]
    y = _attending(few, ALONE, ranks)(*whole)
    wanted = [y.detach(), *torch.autograd.grad(y, whole, dy)]
    del y
    mine = slice(ranks.world.rank * tokens, (ranks.world.rank + 1) * tokens)
    parts = [x.detach()[:, mine].to(dtype, copy=True).requires_grad_() for x in whole]
    y = _attending(few, method, ranks)(*parts)
    found = [y.detach(), *torch.autograd.grad(y, parts, dy[:, mine].to(dtype, copy=True))]
    apart = [
        float((one - two[:, mine]).norm() / two[:, mine].norm())
        for one, two in zip(found, wanted, strict=True)
    ]
    return max(ranks.world.gather(math.nan if any(map(math.isnan, apart)) else max(apart)))
