"""dilated_attention by the flash-attn packages, with stand-ins for these: what they are given, and get."""

import sys
import types
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from bakeoff.attention_backends import rows
from bakeoff.attention_backends.rows import BACKENDS
from bakeoff.ops.dilated_attention import OP, branches, op, plain
from bakeoff.ops.dilated_attention.reference import dilated_attention as reference
from bakeoff.ops.dilated_attention.reference import pattern_of

# Functions with the packages' signatures, over [N, L, H, D], computed by matrix products.


def turned(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, ...]:
    out, lse = BACKENDS["math"].forward(*turned(q, k, v), causal, scale)
    return out.transpose(1, 2).contiguous(), lse


def forward_2(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float, causal: bool, *rest: Any) -> Any:
    assert (dropout, *rest) == (
        0.0,
        -1,
        -1,
        0.0,
        None,
        False,
    )  # windows, softcap, slopes, no probabilities
    return *forward(q, k, v, scale, causal), None, None


def backward_2(*args: Any) -> None:
    *tensors, dq, dk, dv, dropout, scale, causal, left, right, softcap, slopes, deterministic = args
    assert (dropout, left, right, softcap, slopes, deterministic) == (0.0, -1, -1, 0.0, None, False)
    write(tensors, (dq, dk, dv), scale, causal)


def forward_3(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool) -> Any:
    return *forward(q, k, v, softmax_scale, causal), None, None


def backward_3(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cu_q: None, cu_k: None, used_q: None,
    used_k: None, max_q: None, max_k: None, dq: Any, dk: Any, dv: Any, scale: float, causal: bool,
) -> None:  # fmt: skip
    assert {cu_q, cu_k, used_q, used_k, max_q, max_k} == {None}
    write([dout, q, k, v, out, lse], (dq, dk, dv), scale, causal)


def forward_4(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, return_lse: bool
) -> Any:
    assert return_lse
    return forward(q, k, v, softmax_scale, causal)


def backward_4(
    q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, softmax_scale: float, causal: bool
) -> Any:
    slopes = tuple(torch.empty(x.shape) for x in (q, k, v))
    write([dout, q, k, v, out, lse], slopes, softmax_scale, causal)
    return slopes


def write(tensors: Any, into: Any, scale: float, causal: bool) -> None:
    *dense, lse = tensors
    for to, x in zip(into, BACKENDS["math"].backward(*turned(*dense), lse, causal, scale), strict=True):
        assert to.is_contiguous()
        to.copy_(x.transpose(1, 2))


@pytest.mark.parametrize("version", [2, 3, 4])
def test_flash_attn_packages_are_given_what_they_take(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {2: "flash_attn.flash_attn_interface", 3: "flash_attn_interface", 4: "flash_attn.cute.interface"}
    module = types.ModuleType(places[version])
    if version == 4:
        vars(module).update(_flash_attn_fwd=forward_4, _flash_attn_bwd=backward_4)
    else:
        pair = (forward_2, backward_2) if version == 2 else (forward_3, backward_3)
        vars(module).update(_flash_attn_forward=pair[0], _flash_attn_backward=pair[1])
    for place in range(1, len(module.__name__.split("."))):
        parent = ".".join(module.__name__.split(".")[:place])
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    inputs = [torch.randn(2, 96, h, 8, requires_grad=True) for h in (4, 2, 2)]
    args = ((32, 96), (1, 3), True)
    want = reference(*inputs, *args)
    y = plain.branches(
        f"flash_attn_{version}", *inputs, "32,96", "1,3", True, "mod", "exact", None, None, False
    )
    torch.testing.assert_close(y, want)
    dy = torch.randn_like(y)
    for got, right in zip(*(torch.autograd.grad(out, inputs, dy) for out in (y, want)), strict=True):
        torch.testing.assert_close(got, right)


def test_packages_that_are_not_there_are_absent_with_the_reason() -> None:
    for name in ("flash_attn_2", "flash_attn_3", "flash_attn_4"):
        candidate = OP.candidate(name)
        assert candidate.absent is None or "is not installed" in candidate.absent
        assert candidate.third_party


@pytest.mark.parametrize("change", ["first element", "rows", "columns", "expanded"])
def test_a_branch_of_rate_1_is_copied_where_16_bytes_cannot_be_read(change: str) -> None:
    wide = torch.randn(2, 8, 4, 18).bfloat16()
    x = {
        "first element": torch.randn(2 * 8 * 4 * 16 + 1).bfloat16()[1:].view(2, 8, 4, 16),
        "rows": wide[..., :16],
        "columns": torch.randn(2, 8, 16, 4).bfloat16().mT,
        "expanded": torch.randn(2, 8, 1, 16).bfloat16().expand(2, 8, 4, 16),
    }[change]
    (got,) = branches._rows(pattern_of((8,), (1,), "mod", 4), x)
    assert got.data_ptr() % 16 == 0
    assert got.is_contiguous()
    assert torch.equal(got, x.transpose(1, 2))
    plain_rows = torch.randn(2, 8, 4, 16).bfloat16()
    assert branches._rows(pattern_of((8,), (1,), "mod", 4), plain_rows)[0].data_ptr() == plain_rows.data_ptr()


def test_cudnn_is_given_gradients_as_its_plans_expect_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch finds a plan by the strides of q, k and v; those of the others must follow from q's."""
    seen = []

    def kernel(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *_: Any, **__: Any) -> Any:
        seen.append((dout.stride(), out.stride()))
        assert torch.equal(dout, dy)
        return q, k, v

    fake = types.SimpleNamespace(_scaled_dot_product_cudnn_attention_backward=kernel)
    monkeypatch.setattr(rows, "aten", fake)
    q = torch.randn(2, 8, 4, 16).transpose(1, 2)
    dy, lse = torch.randn(q.shape), torch.zeros(2, 4, 8)
    gapped = torch.randn(2, 8, 4, 32)[..., :16].transpose(1, 2).copy_(dy)
    for dout in (dy, dy.mT.contiguous().mT, gapped):
        for out in (dy, gapped):
            BACKENDS["cudnn"].backward(dout, q, q, q, out, lse, True, 1.0)
    assert set(seen) == {(q.stride(), q.stride())}


def test_no_tokens_are_no_even_branches() -> None:
    assert not branches.even(pattern_of((8,), (1,), "mod", 4), 0)


def test_kernels_that_add_up_in_any_order_say_so() -> None:
    """FlashAttention's and cuDNN's gradient of q differs from run to run in its last bits, FlexAttention's
    gradients where heads are shared."""
    assert {c.name for c in OP.candidates if c.deterministic} == {"fused", "hopper", "cuda"}
    assert {c.name for c in OP.candidates if c.heeds_determinism} == {"eager", "flash"}


def test_what_runs_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fused_supports", "hopper_supports", "mixed_supports"):
        monkeypatch.setattr(op, name, lambda case: None)
    monkeypatch.setattr(op.hardware, "without_triton", lambda device: False)
    monkeypatch.setattr(op.branches, "supports", lambda case, name: None)
    cases = {case.name: case for case in OP.cases()}
    short, long = cases["1x8192x16x64"], cases["1x131072x16x128 causal"]
    chosen = [
        op.heuristic(case, regime) for case in (short, long) for regime in ("eager", "graph", "compiled")
    ]
    mixed = "hopper_cudnn"
    assert chosen == ["fused", mixed, "fused", mixed, mixed, "fused"]
    forward = short.replace(
        **{name: msgspec.structs.replace(short.args[name], requires_grad=False) for name in "qkv"}
    )
    assert [op.heuristic(forward, regime) for regime in ("eager", "graph", "compiled")] == [
        "hopper", "hopper", "fused",
    ]  # fmt: skip
    monkeypatch.setattr(op, "mixed_supports", lambda case: "no such GPU")
    assert [op.heuristic(long, regime) for regime in ("eager", "graph", "compiled")] == [
        "cudnn", "cudnn", "fused",
    ]  # fmt: skip
