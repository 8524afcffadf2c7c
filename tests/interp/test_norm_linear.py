"""norm_linear's kernels under the interpreter against the float64 reference."""

from typing import Any

import pytest
import torch

from bakeoff.ops.norm_linear.op import OP
from bakeoff.ops.norm_linear.plain import eager
from bakeoff.ops.norm_linear.reference import norm_linear as reference
from bakeoff.ops.norm_linear.triton import separate
from bakeoff.select.contests.poison import Poison
from bakeoff.select.contests.verify import verify, yardsticks


def arguments(
    *shape: int, M: int = 21, kind: str = "layer", bias: bool = True, gamma: bool = True, beta: bool = True,
    dtype: torch.dtype = torch.float32,
) -> list[Any]:  # fmt: skip
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype).requires_grad_()

    K = shape[-1]
    options = [random(K) if wanted else None for wanted in (gamma, beta)]
    return [random(*shape), random(M, K), random(M) if bias else None, *options, 1e-5, kind]


def results(fn: Any, args: list[Any], dy: torch.Tensor) -> list[torch.Tensor]:
    y = fn(*args)
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, wanted, dy)]


def wide(a: Any) -> Any:
    return a.detach().double().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a


def compare(args: list[Any], dy: torch.Tensor | None = None) -> None:
    """Candidate against float64: at most twice eager's error and a rounding of the store."""
    if dy is None:
        dy = torch.randn(*args[0].shape[:-1], args[1].shape[0]).to(args[0].dtype)
    before = [a.detach().clone() for a in args if isinstance(a, torch.Tensor)]
    with Poison() as poison:
        got = results(separate, args, dy)
    assert not poison.broken()
    after = [a for a in args if isinstance(a, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    exact = results(reference, [wide(a) for a in args], dy.double())
    plain = results(eager, args, dy)
    for mine, want, other in zip(got, exact, plain, strict=True):
        assert mine.shape == want.shape
        size = want.norm().clamp(min=1e-30)
        error, allowed = (((t.double() - want).norm() / size).item() for t in (mine, other))
        assert error <= 2 * allowed + torch.finfo(mine.dtype).eps / 16 + 2.4e-7


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 11, 37), (1, 16), (50, 48)], ids=str)
def test_matches_the_reference(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> None:
    compare(arguments(*shape, kind=kind, dtype=dtype))


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("without", ["bias", "gamma", "beta"])
def test_without(without: str, kind: str) -> None:
    compare(arguments(9, 37, kind=kind, **{without: False}))  # type: ignore[arg-type]


def test_one_gradient_alone() -> None:
    for wanted in range(5):
        args = arguments(9, 20)
        for i in range(5):
            args[i].requires_grad_(i == wanted)
        compare(args)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_large_mean_costs_no_accuracy_that_plain_pytorch_keeps(kind: str) -> None:
    args = arguments(9, 100, kind=kind)
    args[0] = (args[0].detach() + 300).requires_grad_()
    compare(args)


LAYOUTS = {
    "apart": lambda t: torch.cat([t, torch.full_like(t, torch.nan)], -1)[..., : t.shape[-1]],
    "turned": lambda t: t.mT.contiguous().mT,
    "expanded": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    args = arguments(9, 20)
    args[0] = LAYOUTS[layout](args[0].detach()).requires_grad_()
    compare(args, LAYOUTS[layout](torch.randn(9, 21)))
    args[1] = LAYOUTS[layout](args[1].detach()).requires_grad_()
    compare(args)


@pytest.mark.parametrize(("shape", "M"), [((0, 5), 3), ((2, 0, 5), 3), ((4, 5), 0)])
def test_empty(shape: tuple[int, ...], M: int) -> None:
    compare(arguments(*shape, M=M))


@pytest.mark.filterwarnings("ignore:overflow")
def test_passes_the_contest_verification() -> None:
    """On ordinary and hostile inputs: large means and scales, tiny values, zeros, one hot element."""
    for kind in ("layer", "rms"):
        _, deterministic = verify(
            OP, OP.candidate("separate"), yardsticks(OP, OP.case(arguments(35, 40, kind=kind)))
        )
        assert deterministic


def test_scale_and_shift_of_x_change_nothing() -> None:
    args = arguments(9, 40)
    args[5] = 0.0
    y = separate(*args)
    args[0] = args[0].detach() * 4 + 2
    torch.testing.assert_close(separate(*args), y, rtol=2e-5, atol=2e-5)


def test_opcheck() -> None:
    args = arguments(5, 20)
    torch.library.opcheck(separate.traced.forward, (*args, True, ""))
