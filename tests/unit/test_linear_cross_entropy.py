"""linear_cross_entropy's checks and declaration, plain PyTorch's results, and chunks on the CPU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bakeoff import Unsupported
from bakeoff.ops import linear_cross_entropy
from bakeoff.ops.linear_cross_entropy import chunked as chunked_module
from bakeoff.ops.linear_cross_entropy import chunks, products
from bakeoff.ops.linear_cross_entropy.chunked import chunked, default, tilings
from bakeoff.ops.linear_cross_entropy.chunks import (
    classes_at_once,
    default_rows,
    even_share,
    sums_are_wide,
)
from bakeoff.ops.linear_cross_entropy.classes import default_classes, kept_blocks
from bakeoff.ops.linear_cross_entropy.op import OP
from bakeoff.ops.linear_cross_entropy.plain import eager
from bakeoff.ops.linear_cross_entropy.reference import linear_cross_entropy as reference
from bakeoff.select import Case, TensorMeta
from bakeoff.select.contests.verify import verify, yardsticks
from bakeoff.select.declare.variants import at

PIECES = "forward(rows=4,wide=0)"
SUMS = "forward(rows=4,wide=1)"
BLOCKS = "forward(rows=4,wide=0,classes=64)"
HEAD = "forward(rows=4,wide=0,classes=64,head=5)"
CLASSES = torch.tensor([0, 4, 2, 1, 1, 3])

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "row": ({"x": torch.ones(4)}, ValueError, r"x has shape \(4,\), expected .*x\[None\]"),
    "weight": ({"weight": torch.ones(4, 5)}, ValueError, r"\[V, D\] with D = 4 as of x, V >= 1; .*Linear"),
    "no classes": ({"weight": torch.ones(0, 4)}, ValueError, "V >= 1"),
    "weight dtype": ({"weight": torch.ones(5, 4).half()}, TypeError, "weight is torch.float16 and x"),
    "bias": ({"bias": torch.ones(4)}, ValueError, r"expected \[V\] with V = 5 as of weight"),
    "target": ({"target": torch.tensor([0])}, ValueError, r"target has shape \(1,\), expected"),
    "more targets": (
        {"x": torch.ones(2, 6, 4)}, ValueError, r"expected \(2, 6\), one class for each row of x",
    ),
    "target dtype": ({"target": CLASSES.double()}, TypeError, "target is torch.float64; expected int32 or"),
    "ignore_index": ({"ignore_index": 1.5}, TypeError, "ignore_index is 1.5, expected a whole number"),
    "no target": (
        {"target": CLASSES.int(), "ignore_index": 2**31}, ValueError, "2147483648, which a target of 32 bits",
    ),
    "label_smoothing": ({"label_smoothing": 1.1}, ValueError, "label_smoothing must be 0 to 1, got 1.1"),
    "z_loss": ({"z_loss": -1.0}, ValueError, "z_loss must be >= 0"),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap must be above 0, or None"),
    "reduction": ({"reduction": "max"}, ValueError, "reduction is 'max', expected one of mean, sum, none"),
    "class": ({"target": CLASSES + 2}, IndexError, "."),
    "class in chunks": (
        {"target": CLASSES + 2, "impl": "chunked"}, IndexError, "target holds 6, expected classes 0 to 4",
    ),
    "candidate": ({"impl": "cuda"}, Unsupported, "it has eager, compiled, auto-chunker, chunked, triton"),
    "CPU": ({"impl": "triton"}, Unsupported, "runs on CUDA, not on cpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_fix(name: str) -> None:
    args, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        linear_cross_entropy(**{"x": torch.ones(6, 4), "weight": torch.ones(5, 4), "target": CLASSES, **args})


def arguments(
    N: int = 10, D: int = 7, V: int = 13, *, dtype: torch.dtype = torch.float32, bias: bool = True,
    smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
) -> list[Any]:  # fmt: skip
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype).requires_grad_()

    target = torch.randint(V, (N,))
    target[1::8] = -100
    options = [random(V) if bias else None, -100, smoothing, z_loss, softcap, reduction]
    return [random(N, D), random(V, D), target, *options]


def step(fn: Any, args: list[Any], dloss: torch.Tensor | None = None) -> list[torch.Tensor]:
    loss = fn(*args)
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    return [loss, *torch.autograd.grad(loss, wanted, torch.ones_like(loss) if dloss is None else dloss)]


def wide(a: Any) -> Any:
    if not isinstance(a, torch.Tensor) or not a.is_floating_point():
        return a
    return a.detach().double().requires_grad_(a.requires_grad)


# The definition, and plain PyTorch ------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_equals_torch_s_cross_entropy(smoothing: float, reduction: str) -> None:
    args = arguments(smoothing=smoothing, reduction=reduction)
    args[2][2] = 5
    args[4] = 5  # ignored, too, and a class of its own
    want = F.cross_entropy(
        F.linear(args[0], args[1], args[3]), args[2].where(args[2] >= 0, 5), ignore_index=5,
        label_smoothing=smoothing, reduction=reduction,
    )  # fmt: skip
    args[2] = args[2].where(args[2] >= 0, 5)
    for fn in (reference, eager, chunked):
        torch.testing.assert_close(fn(*args), want)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_of_the_definition(reduction: str) -> None:
    args = arguments(
        5, 3, 4, dtype=torch.float64, smoothing=0.1, z_loss=0.01, softcap=2.0, reduction=reduction
    )
    assert torch.autograd.gradcheck(reference, args)


def test_one_more_on_all_logits_changes_the_z_loss_alone() -> None:
    x, weight, target = torch.randn(6, 4), torch.randn(5, 4), CLASSES
    lse = torch.logsumexp(x @ weight.t(), -1)
    for impl in ("eager", "chunked"):
        losses = [
            linear_cross_entropy(x, weight, target, bias=bias, z_loss=0.5, reduction="none", impl=impl)
            for bias in (torch.zeros(5), torch.ones(5))
        ]
        torch.testing.assert_close(losses[1] - losses[0], 0.5 * ((lse + 1) ** 2 - lse**2))


def test_a_cap_in_float64() -> None:
    args = arguments(dtype=torch.float64, softcap=5.0, reduction="none")
    for mine, other in zip(step(chunked, args), step(reference, args), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


def test_a_cap_bounds_the_loss() -> None:
    x, weight = 1e4 * torch.randn(6, 4), torch.randn(5, 4)
    loss = linear_cross_entropy(x, weight, CLASSES, softcap=2.0, reduction="none")
    assert (loss <= 4 + torch.tensor(5.0).log()).all()
    assert not torch.isfinite(linear_cross_entropy(x * 1e38, weight, CLASSES)).all()


# Chunks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_classes_beyond_a_multiple_of_eight_are_multiplied_apart(dtype: torch.dtype) -> None:
    assert products.pieces(13) == [slice(0, 13)]
    assert products.pieces(1000) == [slice(0, 1000)]
    assert products.pieces(1003) == [slice(0, 1000), slice(1000, 1003)]
    args = arguments(10, 7, 1003, dtype=dtype)
    args[2][:4] = torch.tensor([1002, 1001, 1000, 999])
    want = [t.to(dtype) for t in step(reference, [wide(a) for a in args])[1:]]
    got = step(chunked.bind(PIECES), args)[1:]
    rtol, atol = (2e-2, 1e-3) if dtype == torch.bfloat16 else (1e-5, 1e-6)
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("reduction", "dtype"),
    [
        ("mean", torch.float32),
        ("mean", torch.float16),
        ("none", torch.bfloat16),
        *[
            pytest.param(reduction, dtype, marks=pytest.mark.exhaustive)
            for reduction, dtype in (
                ("mean", torch.float64), ("mean", torch.bfloat16), ("none", torch.float64),
                ("none", torch.float32), ("none", torch.float16),
            )
        ],
    ],
    ids=str,
)  # fmt: skip
def test_chunks_pass_the_contest_verification(reduction: str, dtype: torch.dtype) -> None:
    """On ordinary and hostile inputs, in chunks of four rows and in one."""
    options = {"smoothing": 0.1, "z_loss": 1e-3} if reduction == "mean" else {"softcap": 5.0}
    if dtype == torch.float64:  # 1 - tanh^2 has lost its digits in the definition, too
        options.pop("softcap", None)
    case = OP.case(arguments(24, 16, 40, dtype=dtype, reduction=reduction, **options))  # type: ignore[arg-type]
    for text in ("", SUMS):
        _, deterministic = verify(OP, at(OP.candidate("chunked"), text), yardsticks(OP, case))
        assert deterministic


@pytest.mark.parametrize(
    "variant",
    [
        "forward(rows=32,wide=0)",
        "forward(rows=32,wide=0,classes=64)",
        "forward(rows=32,wide=0,classes=64,head=64)",
    ],
    ids=["chunks", "blocks", "head"],
)
def test_chunks_and_blocks_of_classes_pass_the_contest_verification(variant: str) -> None:
    """Where rows of all chunks want the same of a class."""
    case = OP.case(arguments(256, 64, 320, dtype=torch.bfloat16))
    _, deterministic = verify(OP, at(OP.candidate("chunked"), variant), yardsticks(OP, case))
    assert deterministic


@pytest.mark.parametrize(
    ("variant", "least", "most"),
    [("forward(rows=32,wide=0)", 1e-2, 2e-2), ("forward(rows=32,wide=0,classes=64)", 0.0, 2e-3)],
    ids=["chunks", "blocks"],
)
def test_blocks_of_classes_lose_no_small_part_of_the_weight_s_gradient(
    variant: str, least: float, most: float
) -> None:
    """A large row sets the size of a sum of which each further chunk adds less than half a unit."""
    x = torch.full((256, 8), 24.0).bfloat16().requires_grad_()
    x.data[0] = 8192
    weight = torch.zeros(64, 8).bfloat16().requires_grad_()
    target = torch.ones(256, dtype=torch.long)
    target[0] = 0
    loss = chunked.bind(variant)(x, weight, target, None, -100, 0.0, 0.0, None, "sum")
    (dweight,) = torch.autograd.grad(loss, weight)
    exact = -8192 * 63 / 64 + 255 * 24 / 64
    assert least <= abs(dweight[0, 0].item() / exact - 1) <= most


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("N", "D", "V"), [(10, 7, 13), (10, 7, 150), (40, 7, 333), (10, 31, 1003)])
def test_blocks_of_classes(N: int, D: int, V: int, reduction: str) -> None:
    """One, several, with logits that are kept and that aren't, and a last one that is odd."""
    options: list[dict[str, Any]] = [
        {"bias": False}, {"smoothing": 0.1, "z_loss": 1e-2}, {"softcap": 3.0, "smoothing": 0.1},
    ]  # fmt: skip
    for option in options:
        args = arguments(N, D, V, reduction=reduction, **option)
        args[1].data *= 0.3
        want = step(reference, args)
        for variant in (BLOCKS, HEAD):
            torch.testing.assert_close(step(chunked.bind(variant), args), want, rtol=1e-4, atol=1e-5)


def test_masked_classes_get_nothing_in_blocks() -> None:
    args = arguments(V=150)
    args[3].data[100:] = -torch.inf
    args[2] %= 100
    args[2][1] = -100
    few = [args[0].detach().clone(), args[1].detach()[:100], args[2], args[3].detach()[:100], *args[4:]]
    for i in (0, 1, 3):
        few[i].requires_grad_()
    got, want = step(chunked.bind(BLOCKS), args), step(reference, few)
    assert not got[2][100:].any()
    assert not got[3][100:].any()
    got[2:] = [t[:100] for t in got[2:]]
    torch.testing.assert_close(got, want)


def test_kept_blocks_are_read_before_gradients_are_written_over_them() -> None:
    drawn = torch.Generator().manual_seed(0)
    some = 0
    assert default_classes(0, 5, 2, 100) == 64
    for _ in range(300):
        N, D, V = (int(torch.randint(1, most, (), generator=drawn)) for most in (300, 60, 2000))
        width = default_classes(N, V, 2, int(torch.randint(1, 2 * N * V, (), generator=drawn)))
        kept, blocks = kept_blocks(N, V, D, width), -(-V // width)
        assert width % 64 == 0
        assert 0 <= kept < blocks
        end = V * D // 64 * 64
        begins = [end - (kept - i) * N * width for i in range(kept)]
        assert all(begin >= 0 for begin in begins)
        for i in range(kept):  # writing block i's gradient, logits of blocks from i on are still wanted
            assert min(i * width + width, V) * D <= begins[i]
        some += kept
    assert some > 100


@pytest.mark.parametrize("bound", ["", PIECES])
def test_gradients_are_those_of_any_dloss(bound: str) -> None:
    args = arguments(softcap=3.0)
    for dloss in (1.0, -0.3, 0.0):
        got = step(chunked.bind(bound), args, torch.tensor(dloss))
        want = step(reference, args, torch.tensor(dloss))
        for mine, other in zip(got, want, strict=True):
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("wanted", [(0,), (1,), (3,), (0, 3), (1, 3)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("variant", [PIECES, BLOCKS, HEAD], ids=["chunks", "blocks", "head"])
def test_only_what_is_wanted(variant: str, reduction: str, wanted: tuple[int, ...]) -> None:
    args = arguments(V=150, reduction=reduction)
    for i in (0, 1, 3):
        args[i].requires_grad_(i in wanted)
    for mine, other in zip(step(chunked.bind(variant), args), step(reference, args), strict=True):
        torch.testing.assert_close(mine, other)


class Made(TorchDispatchMode):
    """The largest tensor that anything returned, and how many matrix products there were."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        self.products += "mm" in func.name()
        return made


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_logits_are_never_there(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(64, 8, 96, smoothing=0.1, softcap=3.0, reduction=reduction)
    with Made() as plain:
        step(eager, args)
    assert plain.largest >= 64 * 96 * 4
    monkeypatch.setattr(chunks, "MOST_SUMS", 1 << 30)
    monkeypatch.setattr(chunked_module, "_BUDGET", 8 * 96 * 4)
    for _ in range(3):
        with Made() as made:
            step(chunked, args)
        assert made.largest <= 8 * 128 * 4  # eight rows, padded
    with Made() as made, torch.no_grad():
        chunked(*args)
    assert made.largest <= 8 * 128 * 4


def test_half_of_the_logits_are_made_twice() -> None:
    args = arguments(64, 32, 1024, bias=False)
    with Made() as made:
        step(chunked.bind(BLOCKS), args)
    assert kept_blocks(64, 1024, 32, 64) == 7
    assert made.products == 16 + 8 + 16 + 16  # logits, some again, x's gradient, the weight's
    assert made.largest == 1024 * 32 * 4
    with Made() as made:
        step(chunked.bind("forward(rows=16,wide=0,classes=64,head=32)"), args)
    assert kept_blocks(32, 1024, 32, 64) == 15
    assert made.products == 3 * 16 + 3 * 2


def test_products_that_nobody_wants_are_not_made() -> None:
    fn = chunked.bind("forward(rows=16,wide=0)")

    def products(*wanted: int, backward: bool = True) -> int:
        args = arguments(16)
        for i in (0, 1, 3):
            args[i].requires_grad_(i in wanted)
        with Made() as made:
            step(fn, args) if backward else fn(*args)
        return made.products

    assert products(0, 1, 3) == products(0, 1) == 3
    assert products(0) == products(1) == 2
    assert products(backward=False) == 1
    with torch.no_grad():
        assert products(0, 1, 3, backward=False) == 1


def test_a_graph_that_is_kept_gives_the_same_twice_and_one_that_is_not_the_memory() -> None:
    args = arguments(bias=False)
    loss = chunked(*args)
    kept = {t.data_ptr() for t in loss.grad_fn.saved_tensors if t is not None}
    first = torch.autograd.grad(loss, args[:2], torch.tensor(0.5), retain_graph=True)
    second = torch.autograd.grad(loss, args[:2], torch.tensor(2.0))
    for one, two in zip(first, second, strict=True):
        assert torch.equal(4 * one, two)
        assert one.data_ptr() not in kept
        assert two.data_ptr() in kept
    for _ in range(3):  # what was written out for either way goes its way
        loss = chunked(*args)
        again = torch.autograd.grad(loss, args[:2], torch.tensor(0.5), retain_graph=True)
        more = torch.autograd.grad(loss, args[:2], torch.tensor(0.5))
        for one, two, want in zip(again, more, first, strict=True):
            assert torch.equal(one, want)
            assert torch.equal(two, want)


@pytest.mark.parametrize(
    ("dtype", "V", "device", "regime", "chosen"),
    [
        (torch.bfloat16, 31_000, "cpu", "eager", "eager"),
        (torch.bfloat16, 32_000, "cpu", "eager", "chunked"),
        (torch.float32, 15_000, "cpu", "eager", "eager"),
        (torch.float32, 16_000, "cpu", "eager", "chunked"),
        (torch.bfloat16, 1_000, "cuda", "graph", "eager"),
        (torch.bfloat16, 1_500, "cuda", "graph", "triton"),
        (torch.bfloat16, 31_000, "cuda", "compiled", "eager"),
        (torch.bfloat16, 32_000, "cuda", "compiled", "triton"),
        (torch.float64, 7_000, "cuda", "eager", "eager"),
        (torch.float64, 8_000, "cuda", "eager", "chunked"),
    ],
)
def test_guesses(dtype: torch.dtype, V: int, device: str, regime: str, chosen: str) -> None:
    """Kernels on a GPU where they were timed, chunks from 256 MB of logits on, else plain PyTorch."""
    args = {
        **OP.cases()[0].args,
        "x": TensorMeta.dense((2, 2048, 64), dtype, grad=True),
        "weight": TensorMeta.dense((V, 64), dtype, grad=True),
        "target": TensorMeta.dense((2, 2048), torch.int64),
    }
    assert OP.heuristic(Case(args, device), regime) == chosen


def test_a_second_derivative_is_refused() -> None:
    args = arguments()
    (dx,) = torch.autograd.grad(chunked(*args), args[0], create_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy's kernels can't be differentiated twice"):
        dx.sum().backward()


def test_a_tied_weight_gets_both_gradients() -> None:
    table = torch.randn(13, 7, requires_grad=True)
    ids, target = torch.randint(13, (2, 5)), torch.randint(13, (2, 5))
    grads = []
    for impl in ("eager", "chunked"):
        loss = linear_cross_entropy(F.embedding(ids, table).tanh(), table, target, impl=impl)
        grads.append(torch.autograd.grad(loss, table)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("weight", ["turned", "apart", "expanded"])
def test_a_weight_that_is_not_contiguous(weight: str) -> None:
    args = arguments()
    values = torch.randn(13, 7)
    args[1] = {
        "turned": values.t().contiguous().t(),
        "apart": torch.cat([values, torch.full((13, 7), torch.nan)], 1)[:, :7],
        "expanded": values[:1].expand(13, 7),
    }[weight].requires_grad_()
    for mine, other in zip(step(chunked.bind(PIECES), args), step(reference, args), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("impl", ["eager", "chunked"])
@pytest.mark.parametrize("shape", [(6,), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("V", [1, 5])
def test_no_target_that_counts_gives_zeros(V: int, shape: tuple[int, ...], impl: str) -> None:
    x, weight = torch.randn(*shape, 4, requires_grad=True), torch.randn(V, 4, requires_grad=True)
    target = torch.full(shape, -100)
    for reduction in ("mean", "sum", "none"):
        loss = linear_cross_entropy(x, weight, target, reduction=reduction, z_loss=0.1, impl=impl)
        assert loss.shape == (shape if reduction == "none" else ())
        assert not loss.any()
        for grad in torch.autograd.grad(loss.sum(), [x, weight]):
            assert not grad.any()


def test_one_class_costs_nothing() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    for impl in ("eager", "chunked"):
        loss = linear_cross_entropy(x, torch.randn(1, 4), torch.zeros(3, dtype=torch.long), impl=impl)
        assert loss == 0
        assert not torch.autograd.grad(loss, x)[0].any()


@pytest.mark.parametrize("impl", ["eager", "chunked"])
def test_autocast_multiplies_in_its_dtype(impl: str) -> None:
    args = arguments(64, 32, 48)
    low = [a.detach().bfloat16() if i in (0, 1, 3) else a for i, a in enumerate(args)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(args[0], args[1], args[2], bias=args[3], impl=impl)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, linear_cross_entropy(low[0], low[1], low[2], bias=low[3], impl=impl))
    assert all(t.dtype == torch.float32 for t in torch.autograd.grad(loss, [args[0], args[1], args[3]]))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_torch_compile_whole(reduction: str) -> None:
    torch.compiler.reset()

    def model(x: Any, weight: Any, target: Any, bias: Any) -> Any:
        return linear_cross_entropy(x, weight, target, bias=bias, reduction=reduction, impl="chunked")

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for N in (10, 17):
        args = arguments(N, reduction=reduction)[:4]
        for mine, other in zip(step(compiled, args), step(model, args), strict=True):
            assert torch.equal(mine, other)
        args[1].requires_grad_(False)
        for mine, other in zip(step(compiled, args), step(model, args), strict=True):
            assert torch.equal(mine, other)


def test_the_plan_of_the_largest_case() -> None:
    """8192x4096 and 131072 classes: outputs of 1.14 GB, and logits that leave the whole below 1.5 GB."""
    rows = default_rows(8192, 131072, 2, 1 << 28)
    assert rows == 1024
    assert not sums_are_wide(8192, 131072, 4096, rows, torch.bfloat16)
    classes = classes_at_once(8192, 131072, 4096, rows, torch.bfloat16, 1 << 27)
    assert classes == 8192
    assert kept_blocks(8192, 131072, 4096, classes) == 7  # and one in the buffer: half of 16
    assert (131072 + 8192) * 4096 * 2 + 8192 * classes * 2 + 8192 * 4096 * 4 < 1.5e9
    assert classes_at_once(8192, 131072, 4096, rows, torch.float16, 1 << 27) == 0
    assert classes_at_once(8192, 32000, 2048, 4096, torch.bfloat16, 1 << 27) == 0
    assert default_rows(32768, 131072, 2, 1 << 28) == 4096  # eight chunks still
    assert sums_are_wide(65536, 131072, 4096, 4096, torch.bfloat16)
    assert sums_are_wide(8192, 32000, 2048, 1024, torch.bfloat16)
    assert not sums_are_wide(8192, 32000, 2048, 4096, torch.bfloat16)
    rows = default_rows(8192, 128256, 2, 1 << 28)
    assert rows == 2048  # four chunks, which needn't be in blocks
    assert classes_at_once(8192, 128256, 2048, rows, torch.bfloat16, 1 << 27) == 0
    assert default_rows(7, 10, 2, 1 << 28) == 7
    assert default_rows(100, 1 << 40, 2, 1 << 28) == 1
    assert default(0, 5, 3, torch.float32).rows >= 1


def test_label_smoothing_in_16_bits_makes_no_gradient_smaller() -> None:
    """Where the best class is sure, 0.9 at every target would be rounded by one and the same 570th."""
    torch.manual_seed(0)
    weight = torch.randn(1024, 256).bfloat16().requires_grad_()
    best, target = torch.randint(1024, (2, 512))
    x = weight.detach()[best].requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    (mine,) = torch.autograd.grad(
        linear_cross_entropy(x, weight, target, label_smoothing=0.1, impl="chunked"), x
    )
    (exact,) = torch.autograd.grad(reference(*wide, target, label_smoothing=0.1), wide[0])
    gain = ((mine.double() - exact) * exact).sum() / exact.square().sum()
    assert gain.abs() < 4e-4


@pytest.mark.parametrize("smoothing", [0.01, 0.05, 0.1, 0.2, 0.3, 0.7])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_share_rounds_neither_class(dtype: torch.dtype, smoothing: float) -> None:
    share = even_share(smoothing, dtype)
    assert 0.5 <= share <= 1
    exact = share * torch.tensor([1.0, 1.0 - smoothing], dtype=torch.float64)
    assert ((exact.to(dtype).double() - exact) / exact).abs().max() < torch.finfo(dtype).eps / 50


def test_nothing_is_shared_where_nothing_is_rounded_alike() -> None:
    assert even_share(0.0, torch.bfloat16) == even_share(1.0, torch.bfloat16) == 1.0
    assert even_share(0.1, torch.float32) == 1.0


def test_tilings_begin_with_the_default() -> None:
    for case in OP.cases():
        V, D = case.weight.shape
        found = tilings(case)
        assert found[0] == default(case.target.numel, V, D, case.x.dtype)
        assert len(set(found)) == len(found)


def test_the_kernels_take_the_grid_and_peers_say_why_not() -> None:
    supports = OP.candidate("triton").supports
    assert [case.name for case in OP.cases() if supports(case) is not None] == []
    for name in ("torch", "liger", "quack", "cut-cross-entropy"):
        reasons = [OP.candidate(name).supports(case) for case in OP.cases()]
        assert None in reasons


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch < 2.13")
def test_torch_s_own_agrees() -> None:
    for reduction in ("mean", "sum", "none"):
        args = arguments(reduction=reduction)
        got = step(OP.candidate("torch").implementation, args)
        for mine, other in zip(got, step(reference, args), strict=True):
            torch.testing.assert_close(mine, other)


@pytest.mark.exhaustive
def test_torch_compile_s_chunker_agrees() -> None:
    args = arguments(1024, 16, 2048, bias=False)
    candidate = OP.candidate("auto-chunker")
    if candidate.supports(OP.case(args)) is not None:
        pytest.skip("no chunker here")
    for mine, other in zip(step(candidate.implementation, args), step(eager, args), strict=True):
        torch.testing.assert_close(mine, other)


def test_no_rows_in_blocks_of_classes() -> None:
    for reduction in ("mean", "none"):
        for tensor in step(chunked.bind(BLOCKS), arguments(0, V=150, reduction=reduction)):
            assert not tensor.any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_forward_mode_keeps_the_dtype(reduction: str) -> None:
    x, weight, target = torch.randn(4, 8), torch.randn(10, 8), torch.randint(10, (4,))
    options: Any = {"z_loss": 0.1, "softcap": 2.0, "label_smoothing": 0.1, "reduction": reduction}
    y, slope = torch.func.jvp(lambda x: linear_cross_entropy(x, weight, target, **options), (x,), (x,))
    assert (y.dtype, slope.dtype) == (torch.float32, torch.float32)
