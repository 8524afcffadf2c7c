"""fp8_linear's quantisation in Triton under the interpreter: bit for bit that of the definition."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bakeoff.kernels.plan import Plan
from bakeoff.ops.fp8_linear import triton as room
from bakeoff.ops.fp8_linear.op import OP
from bakeoff.ops.fp8_linear.reference import E4M3, E5M2
from bakeoff.ops.fp8_linear.reference import fp8_linear as reference
from bakeoff.ops.fp8_linear.reference import quantize as definition
from bakeoff.select.contests.poison import Poison
from bakeoff.select.contests.verify import verify, yardsticks

KINDS = pytest.mark.parametrize("kind", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def quantize(x: torch.Tensor, kind: torch.dtype = E4M3, more: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return room.quantize(Plan({"x": x}), x, kind, more)


def check(x: torch.Tensor, kind: torch.dtype = E4M3, more: int = 0) -> None:
    """The bits of the definition, and zeros where rows and columns are padded."""
    q, scale = quantize(x, kind, more)
    K = x.shape[-1]
    rows = x.numel() // K
    want, want_scale = definition(x.reshape(-1, K), kind)
    assert q.shape == (rows + more, -(-K // 16) * 16)
    assert torch.equal(scale[:rows], want_scale)
    assert torch.equal(q[:rows, :K].contiguous().view(torch.uint8), want.view(torch.uint8))
    assert not bool(q[:rows, K:].float().any())
    assert not bool(q[rows:].float().any())


@KINDS
@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 5), (3, 33), (130, 64), (2, 3, 77), (4, 1000), (3, 2100), (2, 5120)]
)
def test_shapes(shape: tuple[int, ...], kind: torch.dtype) -> None:
    check(torch.randn(shape) * torch.logspace(-3, 3, shape[-1]), kind, more=shape[0] % 3)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_magnitude(kind: torch.dtype, dtype: torch.dtype) -> None:
    """Rows of other sizes, with elements down to the format's denormal numbers and to zero, and ties."""
    x = torch.randn(40, 96) * torch.logspace(0, -9, 96)
    x *= torch.logspace(-4, 4, 40)[:, None]
    x[3] = 0
    x[4] = torch.linspace(-448, 448, 96).round()
    x[5, ::2] = 0
    check(x.to(dtype), kind)


@KINDS
def test_denormal_rows(kind: torch.dtype) -> None:
    check(torch.randn(30, 48) * torch.logspace(-45, -36, 30)[:, None], kind)


def test_rows_beyond_the_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_ONE_PASS", 1024)
    for size in (4000, 4096, 9001):
        check(torch.randn(2, size) * torch.logspace(-3, 3, size))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "strided rows": lambda x: torch.cat([x, torch.full_like(x, math.nan)], 1)[:, : x.shape[1]],
    "transposed": lambda x: x.t().contiguous().t(),
    "one row, repeated": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    check(LAYOUTS[layout](torch.randn(6, 44)))


def test_writes_every_element_and_nothing_else() -> None:
    x = torch.randn(5, 40)
    with Poison() as poison:
        q, scale = quantize(x)
    assert not poison.broken()
    assert bool(torch.isfinite(q.float()).all())
    assert bool(torch.isfinite(scale).all())


@pytest.mark.filterwarnings("ignore:invalid value")  # of inf / inf
@pytest.mark.parametrize("longest", [16384, 16])
def test_a_row_s_scale_is_nan_where_the_row_holds_nan(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's conversion loses the elements' own NaN; the gpu lane has them."""
    monkeypatch.setattr(room, "_ONE_PASS", longest)
    x = torch.randn(4, 40)
    x[1, 7], x[2, 0], x[2, 39] = math.inf, math.nan, math.inf
    _, scale = quantize(x)
    assert torch.isinf(scale[:, 0]).tolist() == [False, True, False, False]
    assert torch.isnan(scale[:, 0]).tolist() == [False, False, True, False]


@pytest.mark.parametrize("grad", ["bf16", "e5m2"])
@pytest.mark.parametrize("bias", [False, True])
def test_matches_the_reference(grad: str, bias: bool) -> None:
    x, weight = torch.randn(2, 7, 33, requires_grad=True), torch.randn(21, 33, requires_grad=True)
    leaves = [x, weight, *([torch.randn(21, requires_grad=True)] if bias else [])]
    dy = torch.randn(2, 7, 21)

    def run(fn: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
        y = fn(*given, *([] if bias else [None]), grad)
        return [y, *torch.autograd.grad(y, given, dy.to(y.dtype))]

    got = run(room.fp8_linear, leaves)
    want = run(reference, [t.detach().double().requires_grad_() for t in leaves])
    for mine, exact in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("grad", ["bf16", "e5m2"])
def test_passes_the_contest_verification(grad: str) -> None:
    args = [
        torch.randn(35, 40, requires_grad=True),
        torch.randn(24, 40, requires_grad=True),
        torch.randn(24, requires_grad=True),
        grad,
    ]
    _, deterministic = verify(OP, OP.candidate("triton"), yardsticks(OP, OP.case(args)))
    assert deterministic


def test_registered_op() -> None:
    x, weight, bias = (torch.randn(s, requires_grad=True) for s in ((5, 24), (16, 24), (16,)))
    torch.library.opcheck(room.fp8_linear.traced.forward, (x, weight, bias, "e5m2", True, ""))
    x, weight, bias = (t.detach() for t in (x, weight, bias))
    given = (torch.randn(5, 16), x, weight, "bf16", x, weight, bias, [True, True, True], "")
    torch.library.opcheck(room.fp8_linear.traced.backward, given)


def test_no_rows() -> None:
    x, weight = torch.randn(0, 24, requires_grad=True), torch.randn(16, 24, requires_grad=True)
    y = room.fp8_linear(x, weight, None, "bf16")
    y.sum().backward()
    assert y.shape == (0, 16)
    assert torch.equal(weight.grad, torch.zeros(16, 24))  # type: ignore[arg-type]
