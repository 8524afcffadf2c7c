"""PyTorch's own kernel in a DSL as a candidate of rms_norm; a stand-in for the kernel, which needs a GPU."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from bakeoff.ops.rms_norm import native as module
from bakeoff.ops.rms_norm.native import REQUIRES, native, native_supports
from bakeoff.ops.rms_norm.reference import rms_norm as reference
from bakeoff.select import Case, TensorMeta, registry


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """The gradients that the stand-in was asked for."""
    calls: list[list[bool]] = []

    def forward(s: Any, shape: list[int], weight: Any, eps: float) -> Any:
        scaling = torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
        return s * scaling * (1.0 if weight is None else weight), scaling

    def backward(dy: Any, s: Any, shape: list[int], scaling: Any, weight: Any, mask: list[bool]) -> Any:
        calls.append(mask)
        normed, through = s * scaling, dy if weight is None else dy * weight
        ds = scaling * (through - normed * (through * normed).mean(-1, keepdim=True))
        return ds if mask[0] else None, (dy * normed).sum(0) if mask[1] else None

    fake = ModuleType("torch._native.ops.norm.rmsnorm_impl")
    fake._fused_rms_norm_impl, fake._fused_rms_norm_backward_impl = forward, backward  # type: ignore[attr-defined]
    norm = ModuleType("torch._native.ops.norm")
    norm.rmsnorm_impl = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, norm.__name__, norm)
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    return calls


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_rms_norm(residual: bool, weighted: bool, asked: list[list[bool]]) -> None:
    torch.manual_seed(0)
    x, other = (torch.randn(5, 8, requires_grad=True) for _ in range(2))
    weight = torch.randn(8, requires_grad=True) if weighted else None
    found, wanted = (f(x, weight, 1e-6, other if residual else None, 0.0) for f in (native, reference))
    leaves = [t for t in (x, weight, other if residual else None) if t is not None]
    slopes = []
    for each in (found, wanted):
        results = each if isinstance(each, tuple) else (each,)
        slopes.append(torch.autograd.grad([(r * r).sum() for r in results], leaves))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(slopes[0], slopes[1])
    assert asked == [[True, weighted]]


def test_it_says_what_it_can_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.hardware, "generation", lambda number: 9)
    monkeypatch.setattr(module, "missing", lambda package: None)

    def why(x: TensorMeta, offset: float = 0.0, device: str = "cuda:0", **more: Any) -> str | None:
        weight = TensorMeta.dense(x.shape[-1:], more.get("weight", x.dtype))
        args = {"x": x, "weight": weight, "eps": 1e-6, "residual": None, "offset": offset}
        return native_supports(Case(args, device))

    dense, bf16 = TensorMeta.dense, torch.bfloat16
    assert why(dense((4, 8), bf16)) is None
    assert "NVIDIA" in str(why(dense((4, 8), bf16), device="cpu"))
    assert "one dtype" in str(why(dense((4, 8), bf16), weight=torch.float32))
    assert "one dtype" in str(why(dense((4, 8), torch.float64)))
    assert "offset" in str(why(dense((4, 8), bf16), 1.0))
    assert "whole 4 bytes" in str(why(dense((4, 7), bf16)))
    assert why(dense((4, 7), torch.float32)) is None
    assert "empty" in str(why(dense((0, 8), bf16)))
    monkeypatch.setattr(module, "missing", lambda package: f"{package} is not installed")
    assert "needs PyTorch 2.13" in str(why(dense((4, 8), bf16)))
    monkeypatch.setattr(module, "missing", lambda package: None)
    monkeypatch.setattr(module.hardware, "generation", lambda number: 8)
    assert "9.x and 10.x" in str(why(dense((4, 8), bf16)))


def test_it_competes_where_it_is_installed() -> None:
    candidate = registry["rms_norm"].candidate("native")
    assert candidate.requires == REQUIRES
    assert candidate.third_party, "whose kernel it is, and what it takes to compile it"
