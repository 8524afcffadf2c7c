"""swiglu's Triton candidate under the interpreter against the float64 reference; laws of the op."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bakeoff.kernels.triton import TritonKernel
from bakeoff.ops.swiglu import kernels
from bakeoff.ops.swiglu.op import OP
from bakeoff.ops.swiglu.plain import eager
from bakeoff.ops.swiglu.reference import swiglu as reference
from bakeoff.ops.swiglu.triton import swiglu
from bakeoff.select.contests.poison import Poison
from bakeoff.select.contests.verify import verify, yardsticks

Pair = tuple[torch.Tensor, torch.Tensor | None]
IMPLEMENTATIONS = pytest.mark.parametrize(
    "fn", [swiglu, eager, reference], ids=["triton", "eager", "reference"]
)
FORMS = ("packed", "separate", "halves")


tiled = swiglu
"""The candidate with the tiling that a test asks for."""


def candidate(gate: torch.Tensor, up: torch.Tensor | None) -> Any:
    """The op as the test launches it."""
    return tiled(gate, up)


def threads_of(count: int) -> Any:
    """The op in programs of so many threads: of few, so that there are several programs."""
    return swiglu.bind(f"forward(threads={count},accesses=1) backward(threads={count},accesses=1)")


@pytest.fixture(params=[128, 2], ids=["block", "tiny blocks"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.tiled", threads_of(request.param))


def tensors(shape: tuple[int, ...], form: str = "separate", dtype: torch.dtype = torch.float32) -> Pair:
    """Leaves gate and up for a y of `shape`."""
    both = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)
    if form == "packed":
        return both.requires_grad_(), None
    gate, up = (half.detach() for half in both.chunk(2, -1))
    if form == "separate":
        gate, up = gate.contiguous(), up.contiguous()
    return gate.requires_grad_(), up.requires_grad_()


def results(fn: Callable[..., Any], gate: Any, up: Any, dy: torch.Tensor) -> list[torch.Tensor]:
    """y, then the gradient of each argument that wants one."""
    y = fn(gate, up)
    wanted = [t for t in (gate, up) if t is not None and t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, wanted, dy)]


def wide(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.detach().double().requires_grad_(t.requires_grad)


def compare(gate: torch.Tensor, up: torch.Tensor | None, dy: torch.Tensor) -> list[torch.Tensor]:
    """Candidate against float64: the error's norm is at most twice eager's plus one store's rounding, what is
    new is contiguous, nothing outside is written, the arguments stay as they were."""
    given = [t for t in (gate, up, dy) if t is not None]
    before = [t.detach().clone() for t in given]
    with Poison() as poison:
        got = results(candidate, gate, up, dy)
    assert not poison.broken()
    assert all(torch.equal(a, b) for a, b in zip(before, given, strict=True))
    exact = results(reference, wide(gate), wide(up), dy.double())
    plain = results(eager, gate, up, dy)
    for mine, want, other in zip(got, exact, plain, strict=True):
        assert (mine.dtype, mine.shape) == (gate.dtype, want.shape)
        assert mine.is_contiguous()
        size = want.norm().clamp(min=1e-30)
        error, allowed = (((t.double() - want).norm() / size).item() for t in (mine, other))
        assert error <= 2 * allowed + torch.finfo(mine.dtype).eps / 16 + 2.4e-7
    return got


SHAPES = [(1,), (7,), (3, 1), (5, 33), (2, 3, 64), (1, 40), (9, 127), (4, 2, 3, 8)]


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_reference(shape: tuple[int, ...], form: str, dtype: torch.dtype) -> None:
    compare(*tensors(shape, form, dtype), torch.randn(shape).to(dtype))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_passes_the_contest_verification(form: str, dtype: torch.dtype) -> None:
    """On ordinary and hostile inputs: large means and scales, tiny values, zeros, one hot element."""
    gate, up = tensors((35, 77), form, dtype)
    case = OP.case((gate, up))
    _, deterministic = verify(OP, OP.candidate("triton"), yardsticks(OP, case))
    assert deterministic


def test_blocks_are_several_and_cross_rows() -> None:
    tiling = kernels.Tiling(2, 1)
    grid, numbers = kernels.launch(5, 33, 4, {"gate": 66, "up": 66}, packed=True, tiling=tiling)
    assert 33 % numbers["BLOCK"]
    assert 1 < grid[0] == math.ceil(5 * 33 / numbers["BLOCK"])
    assert not numbers["FLAT"]


@pytest.mark.parametrize(
    ("rows", "features", "strides", "packed", "flat", "align"),
    [
        (5, 48, (48, 48), False, True, 16),
        (5, 48, (96, 96), False, False, 16),
        (5, 48, (48, 52), False, False, 4),
        (5, 48, (0, 48), False, False, 16),
        (5, 48, (96, 96), True, False, 16),
        (5, 50, (100, 100), True, False, 2),
        (5, 77, (77, 77), False, True, 1),
        (8, 77, (77, 77), False, True, 8),
        (1, 48, (7, 9), False, True, 16),
        (1, 48, (96, 96), True, True, 16),
    ],
)
def test_what_is_promised_about_addresses(
    rows: int, features: int, strides: tuple[int, ...], packed: bool, flat: bool, align: int
) -> None:
    named = dict(zip(("gate", "up"), strides, strict=True))
    _, numbers = kernels.launch(rows, features, 2, named, packed=packed)
    assert (numbers["FLAT"], numbers["ALIGN"]) == (flat, align)
    assert numbers["units"] * align == rows * features
    assert flat or [numbers[f"{name}_units"] * align for name in named] == list(strides)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("form", ["separate", "halves"])
def test_one_gradient_alone(form: str, which: int) -> None:
    pair = [t.detach() for t in tensors((5, 24), form) if t is not None]
    pair[which].requires_grad_()
    assert len(compare(pair[0], pair[1], torch.randn(5, 24))) == 2


def apart(t: torch.Tensor) -> torch.Tensor:
    padded = torch.full((*t.shape[:-1], t.shape[-1] + 5), float("nan"), dtype=t.dtype)
    padded[..., : t.shape[-1]] = t
    return padded[..., : t.shape[-1]]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows apart": apart,
    "every other": lambda t: torch.stack([t, torch.full_like(t, math.nan)], -1).flatten(-2)[..., ::2],
    "transposed leading": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "transposed last": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "expanded rows": lambda t: t[:1, :1].expand_as(t),
    "expanded everywhere": lambda t: t.new_tensor(0.7).expand_as(t),
}


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["packed", "separate"])
def test_layouts(layout: str, form: str) -> None:
    turn = LAYOUTS[layout]
    gate, up = (None if t is None else t.detach() for t in tensors((3, 4, 10), form))
    dy = torch.randn(3, 4, 10)
    compare(turn(gate).requires_grad_(), up, dy)
    compare(gate.clone().requires_grad_(), up, turn(dy))
    if up is not None:
        compare(gate, turn(up).requires_grad_(), dy)
        compare(turn(gate).requires_grad_(), turn(up).requires_grad_(), turn(dy))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(0, 24), (3, 0), (0,), (2, 0, 5)])
def test_empty_tensors(shape: tuple[int, ...], form: str) -> None:
    gate, up = tensors(shape, form)
    for fn in (candidate, eager):
        y, *gradients = results(fn, gate, up, torch.randn(shape))
        assert y.shape == shape
        assert [g.shape for g in gradients] == [t.shape for t in (gate, up) if t is not None]


def test_each_float32_element_is_exact() -> None:
    """By itself, not beside larger ones: where the gate is far below zero, y is tiny and still right, and for
    large gates what dgate has beyond dy * up is no difference of two numbers near 1."""
    gate = torch.cat([torch.linspace(-75, 40, 1271), torch.logspace(-30, 1, 100)]).requires_grad_()
    up = torch.randn_like(gate).requires_grad_()
    dy = torch.randn_like(gate.detach())
    got = results(candidate, gate, up, dy)
    exact = results(reference, wide(gate), wide(up), dy.double())
    turns = (gate.detach() + 1.2784645).abs() < 0.3  # there dgate's own sum cancels
    for index, (mine, want) in enumerate(zip(got, exact, strict=True)):
        error = (mine.double() - want).abs() / want.abs()
        assert error[~turns if index == 1 else slice(None)].max() < 4e-7


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_ends_of_the_range(dtype: torch.dtype) -> None:
    """Gates at which exp overflows or vanishes give what plain PyTorch gives, not NaN."""
    most = torch.finfo(dtype).max
    values = [0.0, -0.0, 87.0, 88.5, 89.0, 103.9, 104.1, 150.0, 1e4, most, math.inf]
    gate = torch.tensor([sign * v for v in values for sign in (1, -1)] + [math.nan], dtype=dtype)
    gate.requires_grad_()
    up = torch.ones_like(gate).requires_grad_()
    dy = torch.ones_like(gate.detach())
    for mine, plain in zip(results(candidate, gate, up, dy), results(eager, gate, up, dy), strict=True):
        torch.testing.assert_close(mine, plain, rtol=2e-3, atol=1e-36, equal_nan=True)


@settings(max_examples=settings.default.max_examples * 2 // 5)
@given(
    shape=st.lists(st.integers(0, 4), max_size=2),
    features=st.integers(1, 70),
    form=st.sampled_from(FORMS),
    pad=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    threads=st.sampled_from([1, 4, 128]),
)
def test_any_shape_and_stride(
    shape: list[int], features: int, form: str, pad: int, dtype: torch.dtype, threads: int
) -> None:
    gate, up = tensors((*shape, features), form, dtype)
    if pad:
        width = gate.shape[-1]
        padded = torch.cat([gate.detach(), gate.new_zeros((*shape, pad))], -1)
        gate = padded[..., :width].requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.tiled", threads_of(threads))
        compare(gate, up, torch.randn(*shape, features).to(dtype))


# The op's laws, of every implementation that runs here.


@IMPLEMENTATIONS
def test_equals_another_formulation(fn: Callable[..., Any]) -> None:
    gate, up = (t.detach() for t in tensors((6, 50)) if t is not None)
    other = gate / 2 * (1 + torch.tanh(gate / 2)) * up
    torch.testing.assert_close(fn(gate, up), other, rtol=2e-6, atol=2e-6)


@IMPLEMENTATIONS
def test_linear_in_up_and_odd_up_to_the_product(fn: Callable[..., Any]) -> None:
    gate, up = (t.detach() for t in tensors((6, 50)) if t is not None)
    other = torch.randn(6, 50)
    torch.testing.assert_close(fn(gate, 4 * up + other), 4 * fn(gate, up) + fn(gate, other))
    torch.testing.assert_close(fn(gate, up) - fn(-gate, up), gate * up, rtol=2e-6, atol=2e-6)


@IMPLEMENTATIONS
@pytest.mark.parametrize("shape", [(6, 50), (2, 3, 7)])
def test_one_tensor_is_the_same_as_two(fn: Callable[..., Any], shape: tuple[int, ...]) -> None:
    """Its gradient is the two gradients side by side; the kernels give the same bits."""
    same = functools.partial(torch.testing.assert_close, rtol=0 if fn is swiglu else 3e-7, atol=0)
    both, _ = tensors(shape, "packed")
    gate, up = (half.detach().clone().requires_grad_() for half in both.chunk(2, -1))
    dy = torch.randn(shape)
    y, dboth = results(fn, both, None, dy)
    two = results(fn, gate, up, dy)
    same(y, two[0])
    same(dboth, torch.cat(two[1:], -1))


@IMPLEMENTATIONS
def test_elements_are_independent(fn: Callable[..., Any]) -> None:
    gate, up = (t.detach() for t in tensors((7, 33)) if t is not None)
    rows, columns = torch.randperm(7), torch.randperm(33)
    shuffled = fn(gate[rows][:, columns], up[rows][:, columns])
    torch.testing.assert_close(fn(gate, up)[rows][:, columns], shuffled, rtol=3e-7, atol=0)


def test_reference_gradients() -> None:
    gate, up = (t.detach().double().requires_grad_() for t in tensors((3, 5)) if t is not None)
    assert torch.autograd.gradcheck(reference, (gate, up))
    assert torch.autograd.gradgradcheck(reference, (gate, up))
    assert torch.autograd.gradcheck(reference, (torch.randn(3, 6).double().requires_grad_(),))


# What surrounds the kernels.


@pytest.mark.parametrize("form", FORMS)
def test_one_launch_each_way_and_nothing_kept_but_the_inputs(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    launch = TritonKernel.__call__

    def noted(kernel: TritonKernel, *args: Any, **named: Any) -> Any:
        launched.append(kernel.function.__name__)
        return launch(kernel, *args, **named)

    monkeypatch.setattr(TritonKernel, "__call__", noted)
    gate, up = tensors((5, 24), form)
    given = [t for t in (gate, up) if t is not None]
    with Poison() as poison:
        y = candidate(gate, up)
        kept = [t for t in y.grad_fn.saved_tensors if t is not None]
        assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in given]
        torch.autograd.grad(y, given, torch.randn(5, 24))
    assert launched == ["_forward", "_backward"]
    assert len(poison.buffers) == 1 + len(given)  # y and the gradients: one of 2F where gate holds both


def test_no_grad_records_nothing() -> None:
    gate, up = tensors((4, 24))
    with torch.no_grad():
        plain = candidate(gate, up)
    assert plain.grad_fn is None
    assert torch.equal(plain, candidate(gate, up).detach())


@pytest.mark.parametrize("form", FORMS)
def test_double_backward_raises(form: str) -> None:
    gate, up = tensors((3, 16), form)
    dy = torch.randn(3, 16)
    (dgate,) = torch.autograd.grad(candidate(gate, up), gate, dy, create_graph=True)
    torch.testing.assert_close(dgate, results(candidate, gate, up, dy)[1])
    with pytest.raises(RuntimeError, match="can't be differentiated twice; pass impl='eager'"):
        dgate.square().sum().backward()


@pytest.mark.parametrize("form", FORMS)
def test_registered_ops(form: str) -> None:
    """What torch.compile sees: schema, fake shapes and autograd agree with the kernels."""
    gate, up = tensors((5, 24), form)
    torch.library.opcheck(swiglu.traced.forward, (gate, up, True, ""))
    given = (gate.detach(), None if up is None else up.detach())
    for wanted in ([True, True], [True, False], [False, True]):
        if up is not None or wanted == [True, False]:
            torch.library.opcheck(swiglu.traced.backward, (torch.randn(5, 24), *given, *given, wanted, ""))


@pytest.mark.parametrize("form", FORMS)
def test_torch_compile_whole_with_any_length(form: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda gate, up: candidate(gate, up) * 2, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (3, 5, 8):
        gate, up = tensors((rows, 2, 24), form)
        dy = torch.randn(rows, 2, 24)
        want = results(lambda gate, up: candidate(gate, up) * 2, gate, up, dy)
        for mine, plain in zip(results(compiled, gate, up, dy), want, strict=True):
            assert torch.equal(mine, plain)


@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: case.name)
def test_launches_of_the_grid(case: Any) -> None:
    """Every element of the benchmark grid belongs to one program, and no program is empty."""
    rows, width = case.gate.shape
    packed = case.up is None
    features = width // (1 + packed)
    strides = dict.fromkeys(("gate", "up"), case.gate.stride[0])
    assert kernels.tilings(case)[0] == kernels.Tiling(128, 1)  # the default comes first
    for tiling in kernels.tilings(case):
        grid, numbers = kernels.launch(rows, features, 2, strides, packed=packed, tiling=tiling)
        block = numbers["BLOCK"]
        assert 0 <= grid[0] * block - rows * features < block
        assert block & (block - 1) == 0
