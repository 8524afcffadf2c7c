"""pole_scan on plain PyTorch: any length under torch.compile, nothing to do, no data, refusals."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bakeoff.ops import pole_scan

PLAIN = pytest.mark.parametrize("impl", ["eager", "scan"])


def drawn(B: int, T: int, C: int = 3, K: int = 2) -> list[Tensor]:
    """u, log_radius, theta, coef and state in double precision, with gradients."""
    generator = torch.Generator().manual_seed(0)
    real = {"generator": generator, "dtype": torch.float64}
    args = [
        torch.randn(B, T, C, **real),
        -torch.rand(C, K, **real),
        3 * torch.rand(C, K, **real),
        torch.complex(torch.randn(C, K, **real), torch.randn(C, K, **real)),
        torch.complex(torch.randn(B, C, K, **real), torch.randn(B, C, K, **real)),
    ]
    return [arg.requires_grad_() for arg in args]


def by_step(
    u: Tensor, log_radius: Tensor, theta: Tensor, coef: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence of the docstring."""
    pole = torch.polar(log_radius.exp(), theta)
    ys = []
    for t in range(u.shape[1]):
        state = pole * state + u[:, t, :, None]
        ys.append((coef * state).real.sum(-1))
    return torch.stack(ys, 1), state


@PLAIN
@pytest.mark.parametrize("T", [1, 2, 2047, 2048, 2049])
def test_lengths_at_which_the_powers_are_split_otherwise(impl: str, T: int) -> None:
    args = drawn(1, T, 1, 1)
    got, exact = pole_scan(*args[:4], state=args[4], impl=impl), by_step(*args)
    cotangents = [torch.randn_like(out) for out in exact]
    torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-9)
    pairs = zip(
        torch.autograd.grad(got, args, cotangents), torch.autograd.grad(exact, args, cotangents), strict=True
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-8)


@PLAIN
def test_torch_compile_leaves_the_length_open(impl: str) -> None:
    """One graph for the first length and one per range of lengths, not one per length: after eight
    torch.compile gives up."""
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    @torch.compile(backend=count, fullgraph=True)
    def call(u: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return pole_scan(u, *rest[:3], state=rest[3], impl=impl)

    torch._dynamo.reset()
    for T in (4, 9, 33, 50, 63, 65, 90, 100, 110, 127):
        args = [arg.detach() for arg in drawn(2, T)]
        torch.testing.assert_close(call(*args), by_step(*args), rtol=1e-9, atol=1e-9)
    assert len(graphs) <= 4


def test_scan_leaves_the_past_alone_bit_for_bit_and_eager_but_for_rounding() -> None:
    """What the docstring says of them."""
    u, *rest = [
        arg.detach().to(torch.complex64 if arg.is_complex() else torch.float32) for arg in drawn(2, 150)
    ]
    later = u.clone()
    later[:, 70:] = 100 * torch.randn(2, 80, 3)
    for impl, bound in (("scan", 0.0), ("eager", 1e-6)):
        before, after = (pole_scan(x, *rest[:3], impl=impl)[0] for x in (u, later))
        assert float((before - after)[:, :70].abs().max()) <= bound * float(after.abs().max())


@pytest.mark.parametrize(("impl", "first"), [("scan", 64), ("eager", 0)])
def test_how_far_back_a_nan_reaches(impl: str, first: int) -> None:
    """What the docstring says of it."""
    u, *rest = [arg.detach() for arg in drawn(2, 150)]
    u[0, 100, 1] = math.nan
    lost = pole_scan(u, *rest[:3], impl=impl)[0].isnan()
    assert lost[0, first:, 1].all()
    assert lost.sum() == 150 - first


@PLAIN
@pytest.mark.parametrize(("B", "T", "C"), [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_nothing_to_do_gives_every_argument_a_gradient_of_zeros(impl: str, B: int, T: int, C: int) -> None:
    args = drawn(B, T, C)
    y, end = pole_scan(*args[:4], state=args[4], impl=impl)
    assert y.shape == (B, T, C)
    assert torch.equal(end, args[4])
    for gradient in torch.autograd.grad(y.sum() + 0 * end.abs().sum(), args):
        assert not gradient.any()
    narrow = pole_scan(
        args[0].float(), args[1].float(), args[2].float(), args[3].to(torch.complex64), impl=impl
    )
    assert (narrow[0].dtype, narrow[1].dtype) == (torch.float32, torch.complex64)
    wide = pole_scan(args[0], args[1].float(), args[2].float(), args[3].to(torch.complex64), impl=impl)
    assert (wide[0].dtype, wide[1].dtype) == (torch.float64, torch.complex128)


@PLAIN
def test_tensors_without_data(impl: str) -> None:
    args = [arg.detach().to("meta") for arg in drawn(2, 70)]
    y, end = pole_scan(*args[:4], state=args[4], impl=impl)
    assert (y.shape, end.shape, y.device.type) == ((2, 70, 3), (2, 3, 2), "meta")


def test_refusals() -> None:
    args = [arg.detach() for arg in drawn(2, 4)]
    with pytest.raises(TypeError, match=r"state must be a tensor, got .*the second of the two results"):
        pole_scan(*args[:4], state=pole_scan(*args[:4]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"u is torch.float8_e4m3fn; convert it to .* at least 16 bits"):
        pole_scan(args[0].to(torch.float8_e4m3fn), *args[1:4])
