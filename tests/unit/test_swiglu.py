"""swiglu's checks and declaration, plain PyTorch's results, and the manners of its peers' adapters."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from bakeoff import Unsupported
from bakeoff.ops import swiglu
from bakeoff.ops.swiglu import OP, peers
from bakeoff.ops.swiglu.plain import eager
from bakeoff.ops.swiglu.reference import swiglu as reference
from bakeoff.select import Case, TensorMeta
from tests.unit.compiler import needs_compiler

BF16 = torch.bfloat16
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "odd": ({"gate": torch.ones(2, 5)}, ValueError, r"gate has shape \(2, 5\); without up .* must be even"),
    "scalar": (
        {"gate": torch.ones(())},
        ValueError,
        r"gate has shape \(\), expected .*gate\[None\]",
    ),
    "shape": (
        {"up": torch.ones(1, 4)},
        ValueError,
        r"up has shape \(1, 4\), expected gate's, \(2, 4\); expand",
    ),
    "dtype": ({"up": torch.ones(2, 4).half()}, TypeError, "up is torch.float16 and gate torch.float32: cast"),
    "integers": (
        {"gate": torch.ones(2, 4).int()},
        TypeError,
        "gate is torch.int32; convert it to a floating",
    ),
    "8 bits": (
        {"gate": torch.ones(2, 4).to(torch.float8_e4m3fn)},
        TypeError,
        "floating point dtype of at least 16",
    ),
    "integer up": ({"up": torch.ones(2, 4).long()}, TypeError, "up is torch.int64; convert it"),
    "no tensor": ({"gate": 1.0}, TypeError, "gate must be a tensor, got 1.0"),
    "no tensor up": ({"up": 2.0}, TypeError, "up must be a tensor, got 2.0"),
    "device": ({"up": torch.ones(2, 4, device="meta")}, ValueError, "must be on one device"),
    "candidate": ({"impl": "cuda"}, Unsupported, "no candidate 'cuda'; it has eager, compiled, triton"),
    "CPU": ({"impl": "triton"}, Unsupported, "runs on CUDA, not on cpu"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_fix(name: str) -> None:
    args, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        swiglu(**{"gate": torch.ones(2, 4), **args})


# Of y: one rounding at the end, of float32 results after a few inside; eager rounds silu(gate), too.
DTYPES = {torch.float64: 4.0, torch.float32: 4.0, torch.float16: 0.51, BF16: 0.51}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [True, False])
def test_the_definition_rounds_once_in_every_dtype(packed: bool, dtype: torch.dtype) -> None:
    both = torch.randn(3, 4, 10, dtype=torch.float64).to(dtype)
    gate, up = both.chunk(2, -1)
    exact = reference(gate.double(), up.double())
    args = (both, None) if packed else (gate, up)
    unit = torch.finfo(dtype).eps
    for fn, roundings in ((reference, DTYPES[dtype]), (eager, DTYPES[dtype] + 1)):
        y = fn(*args)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), exact, rtol=roundings * unit, atol=torch.finfo(dtype).tiny)


LAYOUTS: dict[str, Callable[[int], torch.Tensor]] = {
    "transposed": lambda rows: torch.randn(8, rows).t(),
    "strided": lambda rows: torch.randn(rows, 16)[:, ::2],
    "turned rows": lambda rows: torch.randn(rows, 2, 8).transpose(0, 1),
    "expanded": lambda rows: torch.randn(rows, 1).expand(rows, 8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [True, False])
def test_results_are_contiguous_whatever_the_inputs_are(layout: str, packed: bool) -> None:
    torch.compiler.reset()
    compiled = torch.compile(swiglu, fullgraph=True, backend="aot_eager")
    for rows in (6, 12, 24):  # from the second on, one graph serves every number of rows
        gate = LAYOUTS[layout](rows)
        up = None if packed else LAYOUTS[layout](rows)
        y = swiglu(gate, up)
        assert y.is_contiguous()
        found = compiled(gate, up)
        assert found.is_contiguous()
        torch.testing.assert_close(found, y)


@needs_compiler
def test_torch_compile_with_sizes_that_are_symbols() -> None:
    """dynamic=True makes a symbol of every size from the start."""
    torch.compiler.reset()
    compiled = torch.compile(swiglu, dynamic=True, fullgraph=True)
    for rows in (3, 5, 8):
        both = torch.randn(rows, 64)
        torch.testing.assert_close(compiled(both), swiglu(both))
        torch.testing.assert_close(compiled(both, both), swiglu(both, both))


def test_second_derivatives_of_plain_pytorch() -> None:
    both = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(swiglu, (both,))


def test_cost_counts_every_tensor_once() -> None:
    cases = {case.name: case for case in OP.cases()}
    half = 8192 * 4096 * 2
    for name in ("8192x4096 bf16 packed", "8192x4096 bf16"):
        assert OP.cost(cases[name].without_grad()).bytes == 3 * half
        assert OP.cost(cases[name]).bytes == (3 + 5) * half
    gate, up = cases["8192x4096 bf16"].gate, cases["8192x4096 bf16"].up
    still = TensorMeta.dense(gate.shape, BF16)
    assert OP.cost(Case({"gate": gate, "up": still}, "cuda")).bytes == (3 + 4) * half
    assert OP.cost(Case({"gate": still, "up": up}, "cuda")).bytes == (3 + 3) * half


def test_bucket_rounds_rows_and_keeps_layout() -> None:
    halves = TensorMeta((3, 300, 64), BF16, (300 * 128, 128, 1), True)
    found = OP.bucket(Case({"gate": halves, "up": halves}, "cuda"))
    assert found.gate == found.up == TensorMeta((1024, 64), BF16, (128, 1), True)
    packed = OP.bucket(Case({"gate": TensorMeta.dense((3, 300, 64), BF16), "up": None}, "cuda"))
    assert packed.gate == TensorMeta.dense((1024, 64), BF16)
    assert packed.up is None


@pytest.mark.parametrize(
    ("peer", "gate", "device", "reason"),
    [
        ("liger", TensorMeta.dense((4, 2 * 65540), BF16), "cuda", "up to 65536 elements, not 65540"),
        ("liger", TensorMeta.dense((4, 8), BF16), "cpu", "runs on CUDA, not on cpu"),
        ("fla", TensorMeta.dense((4, 8), torch.float64), "cuda", "not torch.float64"),
        ("fla", TensorMeta.dense((0, 8), BF16), "cuda", "empty"),
    ],
)
def test_peers_say_why_not(peer: str, gate: TensorMeta, device: str, reason: str) -> None:
    assert reason in (OP.candidate(peer).supports(Case({"gate": gate, "up": None}, device)) or "")


class _Overwriting(torch.autograd.Function):
    """As Liger-Kernel's: the gradients are written where the inputs were, or their contiguous copies."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        s = gate.sigmoid()
        dgate, dup = dy * up * s * (1 + gate * (1 - s)), dy * gate * s
        return gate.copy_(dgate), up.copy_(dup)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("packed", [True, False])
def test_liger_never_writes_over_what_it_is_given(
    packed: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halves of a single row are contiguous, too."""
    module = ModuleType("liger_kernel.ops.swiglu")
    vars(module)["LigerSiLUMulFunction"] = _Overwriting
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.swiglu", module)
    gate = torch.randn(rows, 8, requires_grad=True)
    up = None if packed else torch.randn(rows, 8, requires_grad=True)
    given = [t for t in (gate, up) if t is not None]
    before = [t.detach().clone() for t in given]
    found, wanted = (torch.autograd.grad(fn(gate, up).sum(), given) for fn in (peers.liger, eager))
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other)
    assert all(torch.equal(t, old) for t, old in zip(given, before, strict=True))
