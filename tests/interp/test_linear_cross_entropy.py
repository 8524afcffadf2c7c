"""linear_cross_entropy's kernels under the interpreter against the float64 reference."""

from typing import Any

import pytest
import torch

from bakeoff.ops.linear_cross_entropy.method import Terms
from bakeoff.ops.linear_cross_entropy.op import OP
from bakeoff.ops.linear_cross_entropy.plain import eager
from bakeoff.ops.linear_cross_entropy.reference import linear_cross_entropy as reference
from bakeoff.ops.linear_cross_entropy.triton import (
    Tiling,
    begin,
    chunk,
    finish,
    own_to_rows,
    part,
    rows,
    slopes,
)
from bakeoff.ops.linear_cross_entropy.triton import linear_cross_entropy as kernels
from bakeoff.select.contests.poison import Poison
from bakeoff.select.contests.verify import verify, yardsticks

PIECES = kernels.bind("forward(rows=4,wide=0,block=64,warps=1)")
"""Two chunks of 6 rows, and rows of more than 64 classes in several tiles."""
SHORT = kernels.bind("forward(rows=6,wide=0,block=256,warps=1,each=4)")
"""Two programs for 6 rows."""
BLOCKS = kernels.bind("forward(rows=6,wide=0,block=64,warps=1,each=1,classes=128)")
"""Of 150 classes two blocks, of which the one before the last is kept, in tiles of 64."""
HEAD = kernels.bind("forward(rows=2,wide=0,block=64,warps=1,each=1,classes=64,head=3)")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of what is masked out behind the classes


def arguments(
    N: int = 6, D: int = 7, V: int = 13, *, bias: bool = True, dtype: torch.dtype = torch.float32,
    smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
) -> list[Any]:  # fmt: skip
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype).requires_grad_()

    target = torch.randint(V, (N,))
    target[1:2] = -100
    options = [random(V) if bias else None, -100, smoothing, z_loss, softcap, reduction]
    return [random(N, D), random(V, D), target, *options]


def results(fn: Any, args: list[Any], dloss: torch.Tensor) -> list[torch.Tensor]:
    loss = fn(*args)
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, wanted, dloss)]


def wide(a: Any) -> Any:
    if not isinstance(a, torch.Tensor) or not a.is_floating_point():
        return a
    return a.detach().double().requires_grad_(a.requires_grad)


def compare(args: list[Any], fn: Any = PIECES) -> None:
    """Candidate against float64: at most twice eager's error and a rounding of the store."""
    dloss = torch.randn(args[2].shape if args[-1] == "none" else ())
    before = [a.detach().clone() for a in args if isinstance(a, torch.Tensor)]
    with Poison() as poison:
        got = results(fn, args, dloss)
    assert not poison.broken()
    after = [a for a in args if isinstance(a, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    exact = results(reference, [wide(a) for a in args], dloss.double())
    plain = results(eager, args, dloss)
    for mine, want, other in zip(got, exact, plain, strict=True):
        assert mine.shape == want.shape
        assert mine.dtype == other.dtype
        size = want.norm().clamp(min=1e-30)
        error, allowed = (((t.double() - want).norm() / size).item() for t in (mine, other))
        assert error <= 2 * allowed + torch.finfo(mine.dtype).eps / 2 + 2.4e-7


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("V", [13, 150])
def test_matches_the_reference(V: int, reduction: str) -> None:
    compare(arguments(V=V, smoothing=0.1, z_loss=1e-2, softcap=3.0, reduction=reduction))
    compare(arguments(V=V, reduction=reduction, bias=False))


@pytest.mark.parametrize("fn", [SHORT, BLOCKS, HEAD], ids=["short", "blocks", "head"])
@pytest.mark.parametrize("V", [13, 150])
def test_several_rows_a_program_and_blocks_of_classes(V: int, fn: Any) -> None:
    compare(arguments(V=V, smoothing=0.1, z_loss=1e-2, softcap=3.0), fn)
    compare(arguments(V=V, bias=False, reduction="sum"), fn)


def test_blocks_of_classes_that_are_kept_and_that_are_not() -> None:
    fn = kernels.bind("forward(rows=6,wide=0,block=64,warps=1,each=1,classes=64)")
    for D in (3, 20):
        compare(arguments(12, D, 333, smoothing=0.1), fn)


@pytest.mark.parametrize(
    ("V", "block", "each"),
    [(13, 64, 4), (64, 64, 2), (65, 128, 2), (128, 64, 1), (129, 64, 1), (333, 128, 1), (50, 512, 1)],
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_rows_of_a_wider_buffer(V: int, block: int, each: int, smoothing: float) -> None:
    """NaN behind the classes and in the other rows; rows no multiple of those of a program, one ignored, one
    with a target that is no class. In one piece and in two."""
    N, padded = 5, -(-V // 64) * 64
    buffer = torch.full((N + 2, padded + 64), torch.nan)
    logits = buffer[1 : N + 1, :V]
    logits.copy_(3 * torch.randn(N, V))
    logits[2] = torch.inf
    values = logits.double().clone().requires_grad_()
    target = torch.randint(V, (N,))
    target[2], target[4] = -100, V
    terms, scale = Terms(-100, smoothing, 1e-2, 2.0), torch.rand(N)
    want = reference(
        values[[0, 1, 3]], torch.eye(V).double(), target[[0, 1, 3]], None, -100, smoothing, 1e-2, 2.0, "none"
    )
    (exact,) = torch.autograd.grad(want, values, scale[[0, 1, 3]].double())
    tiling = Tiling(N, 0, block, 1, each)
    apart = buffer.clone()
    losses = torch.full((N,), torch.nan)
    rows(logits, target, losses, scale, terms, True, tiling)
    torch.testing.assert_close(losses[[0, 1, 3]].double(), want, rtol=1e-5, atol=1e-5)
    assert losses[2] == 0
    assert losses[4].isnan()
    torch.testing.assert_close(logits[:4].double(), exact[:4], rtol=1e-5, atol=1e-6)
    assert logits[4].isnan().all()
    assert not buffer[1 : N + 1, V:padded].any()
    assert buffer[1:-1, padded:].isnan().all()
    assert buffer[[0, -1]].isnan().all()

    state = torch.zeros(5, N)
    state[0], state[2] = -torch.inf, torch.nan
    pieces = [slice(0, V)] if V <= 64 else [slice(64, V), slice(0, 64)]
    for classes in pieces:
        held = apart[1 : N + 1, classes]
        part(held, target, classes.start, state, classes is pieces[0], terms, tiling)
    most, total, at = state[:3]
    lse = most + total.log()
    for classes in reversed(pieces):
        held, weights, factors = apart[1 : N + 1, classes], (1 + 2e-2 * lse) / total, scale + 0 * at
        slopes(held, target, classes.start, most, weights, factors, V, terms, tiling)
    torch.testing.assert_close(apart[1:5, :V].double(), exact[:4], rtol=1e-5, atol=1e-6)
    assert apart[5, :V].isnan().all()
    assert not apart[1 : N + 1, V:padded].any()
    assert apart[1:-1, padded:].isnan().all()


@pytest.mark.parametrize(("N", "D", "V"), [(5, 7, 13), (70, 64, 64), (20, 130, 200), (3, 65, 400)])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_that_are_made_and_used_up_by_one_kernel(N: int, D: int, V: int, bias: bool) -> None:
    """Rows no multiple of a program's, features none of a step, NaN behind the classes; losses each and
    together; then x's gradient, times a factor."""
    x, weight, shift = torch.randn(N, D).half(), torch.randn(V, D).half(), torch.randn(V)
    x /= D**0.5
    target = torch.randint(V, (N,))
    target[1] = -100
    values = x.double() @ weight.double().T + bias * shift
    scale, terms = torch.rand(N), Terms(-100, 0.1, 1e-2, 3.0)
    values.requires_grad_()
    want = reference(values, torch.eye(V).double(), target, None, -100, 0.1, 1e-2, 3.0, "none")
    (exact,) = torch.autograd.grad(want, values, scale.double())
    tiling = Tiling(N, 0, max(64, 1 << (V - 1).bit_length()), 4, tile=16)
    logits, losses = (
        torch.full((N, -(-V // 64) * 64), torch.nan).half()[:, :V],
        torch.full((N,), torch.nan),
    )
    chunk(x, weight, shift if bias else None, logits, target, losses, scale, terms, True, tiling)
    torch.testing.assert_close(losses.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), exact, rtol=2**-10, atol=1e-5)
    sums = torch.full((-(-N // 16),), torch.nan)
    chunk(x, weight, shift if bias else None, logits, target, sums, scale, terms, False, tiling)
    torch.testing.assert_close(sums.sum().double(), want.sum(), rtol=1e-5, atol=1e-5)
    for factor in (None, torch.tensor(0.3)):
        out = torch.full((D, N), torch.nan).half().T
        own_to_rows(logits, weight, out, factor)
        product = logits.double() @ weight.double() * (1 if factor is None else 0.3)
        torch.testing.assert_close(out.double(), product, rtol=2**-10, atol=1e-4)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_few_classes_in_16_bits(reduction: str) -> None:
    """As by default, in chunks of whole programs and of parts of one, and with logits that PyTorch makes."""
    for variant in ("rows=6,wide=0,tile=64", "rows=64,wide=1,tile=64", "rows=70,wide=1,each=4"):
        fn = kernels.bind(f"forward({variant},block=64,warps=4)")
        compare(arguments(80, 20, 50, dtype=torch.float16, smoothing=0.1, reduction=reduction), fn)
        compare(arguments(80, 20, 50, dtype=torch.float16, bias=False, reduction=reduction), fn)


@pytest.mark.parametrize(("N", "dtype"), [(0, torch.int64), (6, torch.int32), (9000, torch.int64)])
def test_losses_are_added_up(N: int, dtype: torch.dtype) -> None:
    """None, some, and more than a program reads at a time; nothing behind the last one counts."""
    losses, target = torch.rand(N), torch.randint(5, (N,), dtype=dtype)
    losses[target == 3] = 0.0
    loss, factor, numbers = torch.empty(()), torch.empty(()), torch.empty(2)
    count = max(int((target != 3).sum()), 1)
    for reduction, want in (("sum", 1), ("mean", count)):
        begin(target, Terms(3, 0.0, 0.0, 0.0), reduction, 0.5, numbers, factor)
        finish(losses, numbers, loss)
        torch.testing.assert_close(loss, losses.sum() / want)
        assert numbers.tolist() == [0.5, want]
        assert factor.item() == pytest.approx(2 / want)


def test_float16_keeps_gradients_that_a_mean_would_make_denormal() -> None:
    """Divided by the number of targets late, as a loss scaler multiplies dloss."""
    args = arguments(V=150, D=33, dtype=torch.float16)
    compare(args)
    args[0] = (args[0].detach() * 1e-3).requires_grad_()
    exact = results(reference, [wide(a) for a in args], torch.tensor(1024.0).double())
    for mine, want in zip(results(PIECES, args, torch.tensor(1024.0)), exact, strict=True):
        assert ((mine.double() - want).norm() / want.norm()).item() < 1e-3


def test_one_gradient_alone() -> None:
    for wanted in (0, 1, 3):
        args = arguments()
        for i in (0, 1, 3):
            args[i].requires_grad_(i == wanted)
        compare(args)


LAYOUTS = {
    "apart": lambda t: torch.cat([t, torch.full_like(t, torch.nan)], -1)[..., : t.shape[-1]],
    "turned": lambda t: t.mT.contiguous().mT,
    "expanded": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    args = arguments()
    for i in (0, 1):
        args[i] = LAYOUTS[layout](args[i].detach()).requires_grad_()
    args[2] = args[2].int()
    compare(args)


@pytest.mark.parametrize(("N", "V"), [(0, 5), (1, 1), (3, 1), (1, 65)])
def test_smallest(N: int, V: int) -> None:
    compare(arguments(N, V=V))


def test_no_target_that_counts_gives_zeros() -> None:
    args = arguments(V=70)
    args[2].fill_(-100)
    args[0].data[0, 0] = torch.inf  # what is ignored may be anything
    for tensor in results(PIECES, args, torch.tensor(3.0)):
        assert not tensor[~tensor.isnan()].any()
    args[0].data[0, 0] = 0
    assert not any(tensor.any() for tensor in results(PIECES, args, torch.tensor(3.0)))


def test_masked_classes_get_nothing() -> None:
    """A bias of -inf, also for all of a block."""
    args = arguments(V=150)
    args[2] %= 20
    args[3].data[20:] = -torch.inf
    loss, dx, dweight, dbias = results(PIECES, args, torch.tensor(1.0))
    few = [args[0], args[1].detach()[:20].requires_grad_(), args[2] % 20, args[3].detach()[:20]]
    want = results(reference, [*few[:3], few[3].requires_grad_(), *args[4:]], torch.tensor(1.0))
    for mine, other in zip((loss, dx, dweight[:20], dbias[:20]), want, strict=True):
        torch.testing.assert_close(mine, other)
    assert not dweight[20:].any()


def test_passes_the_contest_verification() -> None:
    """On ordinary and hostile inputs: large means and scales, tiny values, zeros, one hot element."""
    for options in ({"smoothing": 0.1, "z_loss": 1e-3}, {"softcap": 5.0, "reduction": "none"}):
        case = OP.case(arguments(10, 12, 20, **options))  # type: ignore[arg-type]
        _, deterministic = verify(OP, OP.candidate("triton"), yardsticks(OP, case))
        assert deterministic


def test_opcheck() -> None:
    args = [*arguments(3), True, True, True]
    args[7] = 2.0
    torch.library.opcheck(kernels.op.traced.forward, (*args, True, ""))
