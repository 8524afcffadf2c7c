"""layer_norm's Triton candidate under the interpreter against the float64 reference; laws of the op."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from bakeoff.errors import Unsupported
from bakeoff.kernels import row_tilings as tilings
from bakeoff.kernels import rows, variants
from bakeoff.ops.layer_norm import layer_norm as public
from bakeoff.ops.layer_norm.op import OP
from bakeoff.ops.layer_norm.plain import eager
from bakeoff.ops.layer_norm.reference import layer_norm as reference
from bakeoff.ops.layer_norm.triton import add_normalize, normalize
from bakeoff.ops.layer_norm.triton import layer_norm as candidate
from bakeoff.select import Case, TensorMeta
from bakeoff.select.contests.poison import Poison
from bakeoff.select.contests.verify import verify, yardsticks

FORWARD, BACKWARD = tilings.ForwardTiling, tilings.BackwardTiling

launched = candidate
"""The candidate with the tiling that a test asks for."""


def layer_norm(*args: Any) -> Any:
    """The op as the test launches it."""
    return launched(*args)


class Cut(NamedTuple):
    """Small tiles, so that there is more than one on each axis."""

    block: int
    rows: int = 1
    programs: int = 1
    stages: int = 1
    hold: int = 1
    passes: int = 1

    def bind(self) -> Any:
        block, count, programs, stages, hold, passes = self
        forward = FORWARD(block, count, 4, programs, stages, passes)
        backward = BACKWARD(block, count, 4, max(1, programs), stages, hold, 0, passes)
        return candidate.bind(variants.text({"forward": forward, "backward": backward}))


@pytest.mark.parametrize(
    "cut", [Cut(32), Cut(16, rows=2, programs=2), Cut(16, passes=3)], ids=lambda cut: f"passes {cut.passes}"
)
@pytest.mark.parametrize("features", [24, 49])
def test_equal_numbers_have_their_own_mean(features: int, cut: Cut) -> None:
    """No 1 / sqrt(eps) may stand before what a mean is rounded by."""
    x = torch.tensor([[0.37109375], [-1.6171875], [3.0]]).expand(3, features).requires_grad_()
    y = cut.bind()(x, None, None, 1e-5, None)
    assert not y.any()
    (dx,) = torch.autograd.grad(y, x, torch.full_like(y, 0.62109375))
    assert not dx.any()


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Cut every call by one tiling."""

    def cut(*numbers: int, **named: int) -> None:
        monkeypatch.setattr(f"{__name__}.launched", Cut(*numbers, **named).bind())
        monkeypatch.setattr(rows, "sum_tiling", lambda _: (2, 8, 4))

    return cut


WAYS = {
    "whole rows": Cut(128, 2),
    "pieces": Cut(16, 2, hold=0),
    "pieces, a tile a program": Cut(16, 1, programs=0),
    "long rows": Cut(32, passes=2),
}
"""For rows of at most 128."""
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def draw(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def results(
    fn: Callable[..., Any], args: list[Any], dys: list[torch.Tensor] | None
) -> list[torch.Tensor | None]:
    """Outputs, then the gradient of every tensor argument that wants one (as given in `args`)."""
    out = fn(*args)
    outputs = list(out) if isinstance(out, tuple) else [out]
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    if not wanted:
        return outputs
    assert dys is not None
    roots = [(o, dy.to(o.dtype)) for o, dy in zip(outputs, dys, strict=True) if o.requires_grad]
    gradients = torch.autograd.grad([o for o, _ in roots], wanted, [dy for _, dy in roots])
    return [o.detach() for o in outputs] + list(gradients)


def wide(args: list[Any]) -> list[Any]:
    return [
        a.detach().double().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a
        for a in args
    ]


def compare(args: list[Any], dys: list[torch.Tensor] | None = None) -> list[torch.Tensor | None]:
    """Candidate against float64: the error's norm is at most twice eager's, plus one rounding of a store."""
    got = results(layer_norm, args, dys)
    exact = results(reference, wide(args), None if dys is None else [dy.double() for dy in dys])
    plain = results(eager, args, dys)
    assert len(got) == len(exact)
    for mine, want, other in zip(got, exact, plain, strict=True):
        assert mine is not None
        assert want is not None
        assert other is not None
        assert mine.dtype == other.dtype
        assert mine.shape == want.shape
        assert bool(torch.isfinite(mine).all())
        size = want.norm().clamp(min=1e-30)
        error = ((mine.double() - want).norm() / size).item()
        allowed = ((other.double() - want).norm() / size).item()
        assert error <= 2 * allowed + torch.finfo(mine.dtype).eps / 16 + 4e-7
    return got


def arguments(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    weight: torch.dtype | None = torch.float32,
    bias: torch.dtype | None = torch.float32,
    residual: torch.dtype | None = None,
    eps: float = 1e-5,
    grad: bool = True,
) -> tuple[list[Any], list[torch.Tensor]]:
    """The op's arguments and one gradient per output."""
    x = draw(shape, dtype).requires_grad_(grad)
    w, b = (None if kind is None else draw(shape[-1:], kind).requires_grad_(grad) for kind in (weight, bias))
    r = None if residual is None else draw(shape, residual).requires_grad_(grad)
    dys = [draw(shape, dtype)]
    if residual is not None:
        dys.append(draw(shape, torch.promote_types(dtype, residual)))
    return [x, w, b, eps, r], dys


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no affine": {"weight": None, "bias": None},
    "no bias": {"bias": None},
    "no weight": {"weight": None},
    "fp32 weight": {"dtype": torch.float16},
    "fp16": {"dtype": torch.float16, "weight": torch.float16, "bias": torch.float16},
    "residual": {"residual": torch.float32},
    "wider residual": {"dtype": torch.float16, "weight": torch.float16, "residual": torch.float32},
    "narrower residual": {"residual": torch.float16, "bias": torch.float16},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(1,), (3, 1), (5, 33), (2, 3, 64), (9, 127)])
def test_matches_the_reference(form: str, shape: tuple[int, ...]) -> None:
    if shape[-1] == 1:  # n is 0, and so are all gradients but the bias's, to rounding noise
        args, dys = arguments(shape, **FORMS[form], eps=1.0)
        got = results(layer_norm, args, dys)
        want = results(reference, wide(args), [dy.double() for dy in dys])
        for mine, exact in zip(got, want, strict=True):
            torch.testing.assert_close(mine.double(), exact, rtol=2e-3, atol=1e-6)  # type: ignore[union-attr]
        return
    compare(*arguments(shape, **FORMS[form]))


@pytest.mark.parametrize("form", FORMS)
@ways
def test_more_than_one_tile_on_each_axis(form: str, way: Cut, tiled: Callable[..., None]) -> None:
    tiled(*way)
    compare(*arguments((11, 100), **FORMS[form]))


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("hold", [True, False])
def test_tilings_agree(stages: int, hold: bool, tiled: Callable[..., None]) -> None:
    args, dys = arguments((7, 48))
    tiled(64, 4, 1, stages=stages, hold=hold)
    one = compare(args, dys)
    for other in (Cut(64, 1, 3), Cut(8, 2)):
        tiled(*other._replace(stages=stages, hold=hold))
        for a, b in zip(one, compare(args, dys), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("size", [16387, pytest.param(65537, marks=pytest.mark.exhaustive)])
def test_rows_beyond_the_registers(size: int) -> None:
    assert tilings.forward_tiling(2, size, 4, 4, 4).passes == 2
    assert tilings.backward_tiling(2, size, 4, 2, 4).passes == 2
    compare(*arguments((2, size)))


def test_a_row_and_two_sums_beyond_the_registers() -> None:
    """Where one sum over rows, as rms_norm's, would still fit."""
    assert [tilings.backward_tiling(2, 16384, 2, sums, 4).passes for sums in (0, 1, 2)] == [1, 1, 2]


@pytest.mark.parametrize("way", [Cut(256, 2), Cut(64, 1), Cut(64, passes=2)], ids=str)
def test_a_large_mean_costs_no_digits(way: Cut, tiled: Callable[..., None]) -> None:
    """float32 rows around 10,000: the mean's own rounding, 5e-4, must not be seen, in any result."""
    tiled(*way)
    args, dys = arguments((6, 200))
    args[0] = (args[0].detach() + 1e4).requires_grad_()
    got = results(layer_norm, args, dys)
    want = results(reference, wide(args), [dy.double() for dy in dys])
    for mine, exact in zip(got, want, strict=True):
        assert ((mine.double() - exact).norm() / exact.norm()).item() < 1e-6  # type: ignore[union-attr]


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (4,), (1, 2), (0, 2)], ids=str)
@ways
def test_some_gradients_alone(which: tuple[int, ...], way: Cut, tiled: Callable[..., None]) -> None:
    tiled(*way)
    args, dys = arguments((5, 40), residual=torch.float32, grad=False)
    for place in which:
        args[place].requires_grad_()
    compare(args, dys)


@pytest.mark.parametrize("which", [(0,), (4,), (0, 4), (1, 4)], ids=str)
@pytest.mark.parametrize("residual", [torch.float16, torch.float32], ids=str)
def test_gradients_of_inputs_of_two_dtypes(residual: torch.dtype, which: tuple[int, ...]) -> None:
    args, dys = arguments((5, 40), torch.float16, residual=residual, grad=False)
    for place in which:
        args[place].requires_grad_()
    compare(args, dys)


def strided_rows(t: torch.Tensor) -> torch.Tensor:
    padded = torch.full((*t.shape[:-1], t.shape[-1] + 5), float("nan"), dtype=t.dtype)
    padded[..., : t.shape[-1]] = t
    return padded[..., : t.shape[-1]]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row-strided": strided_rows,
    "transposed leading": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "transposed last": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "expanded rows": lambda t: t[:1, :1].expand_as(t),
    "expanded everywhere": lambda t: t.new_tensor(0.7).expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@ways
def test_layouts(layout: str, way: Cut, tiled: Callable[..., None]) -> None:
    tiled(*way)
    turn = LAYOUTS[layout]
    args, dys = arguments((3, 4, 36), residual=torch.float32)
    if not layout.startswith("expanded"):
        args = [
            turn(a.detach()).requires_grad_() if isinstance(a, torch.Tensor) and a.dim() > 1 else a
            for a in args
        ]
    dys = [turn(dy) for dy in dys]
    before = [dy.clone() for dy in dys]
    compare(args, dys)
    assert all(torch.equal(a, b) for a, b in zip(before, dys, strict=True)), "wrote into dy"


def test_zero_rows() -> None:
    args, dys = arguments((0, 24), residual=torch.float32)
    y, s, dx, dw, db, dr = results(layer_norm, args, dys)
    assert y.shape == s.shape == dx.shape == dr.shape == (0, 24)  # type: ignore[union-attr]
    assert torch.equal(dw, torch.zeros(24))  # type: ignore[arg-type]
    assert torch.equal(db, torch.zeros(24))  # type: ignore[arg-type]


def test_constant_rows_stay_finite() -> None:
    args, dys = arguments((4, 40), residual=torch.float32)
    with torch.no_grad():
        args[0][::2] = 0.3
        args[4][::2] = 0
    got = results(layer_norm, args, dys)
    want = results(reference, wide(args), [dy.double() for dy in dys])
    for mine, exact in zip(got, want, strict=True):
        # 1 / sqrt(eps) = 316 times the rounding of 0.3
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-3)  # type: ignore[union-attr]


@ways
def test_writes_every_element_and_nothing_else(way: Cut, tiled: Callable[..., None]) -> None:
    """Every tensor that a call allocates starts as NaN between two guard bands."""
    tiled(*way)
    args, dys = arguments((5, 40), torch.float16, residual=torch.float32)
    expected = results(layer_norm, args, dys)
    with Poison() as poison:
        got = results(layer_norm, args, dys)
    assert not poison.broken()
    # y, s, stats, dx, dresidual, dw, db, partial sums of both, and for long rows their means
    assert len(poison.buffers) == (9 if way.passes == 1 else 10)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)  # type: ignore[arg-type]


@settings(max_examples=settings.default.max_examples // 8)
@given(
    count=st.integers(0, 9),
    features=st.integers(2, 70),
    pad=st.integers(0, 3),
    residual=st.booleans(),
    affine=st.tuples(st.booleans(), st.booleans()),
    tile=st.builds(
        Cut,
        block=st.sampled_from([16, 32, 128]),
        rows=st.sampled_from([1, 2, 4]),
        programs=st.integers(0, 2),
        hold=st.integers(0, 1),
        passes=st.integers(1, 2),
    ),
)
def test_any_shape_and_stride(
    count: int, features: int, pad: int, residual: bool, affine: tuple[bool, bool], tile: Cut
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.launched", tile.bind())
        weight, bias = (torch.float32 if there else None for there in affine)
        other = torch.float32 if residual else None
        args, dys = arguments((count, features), residual=other, weight=weight, bias=bias, eps=0.1)
        args[0] = torch.cat([args[0].detach(), draw((count, pad))], 1)[:, :features].requires_grad_()
        if count:
            compare(args, dys)
        else:
            assert results(layer_norm, args, dys)[0].shape == (0, features)  # type: ignore[union-attr]


def test_shift_and_scale_laws() -> None:
    x = draw((6, 50))
    plain = layer_norm(x, None, None, 0.0, None)
    for c in (1e-3, 17.0):
        torch.testing.assert_close(layer_norm(c * x, None, None, 0.0, None), plain)
        torch.testing.assert_close(layer_norm(x + c, None, None, 0.0, None), plain, rtol=2e-5, atol=2e-5)


def test_rows_are_independent() -> None:
    x, w, b = draw((7, 33)), draw((33,)), draw((33,))
    order = torch.randperm(7)
    whole = layer_norm(x, w, b, 1e-5, None)
    assert torch.equal(whole[order], layer_norm(x[order], w, b, 1e-5, None))


def test_against_another_formulation() -> None:
    """torch.var_mean, and rms_norm's formula of the centred row."""
    x, w, b = draw((6, 50)).double(), draw((50,)).double(), draw((50,)).double()
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    torch.testing.assert_close(reference(x, w, b, 0.5), (x - mean) / (variance + 0.5).sqrt() * w + b)
    other = F.rms_norm(x - mean, (50,), w, 0.5) + b
    found = layer_norm(x.float(), w.float(), b.float(), 0.5, None)
    torch.testing.assert_close(found, other.float(), rtol=2e-6, atol=2e-6)


def test_reference_gradients() -> None:
    x, w, b, r = (draw(s).double().requires_grad_() for s in ((3, 5), (5,), (5,), (3, 5)))
    assert torch.autograd.gradcheck(lambda x, w, b, r: reference(x, w, b, 1e-3, r), (x, w, b, r))


def test_only_the_sum_is_used() -> None:
    args, _ = arguments((4, 24), torch.float16, weight=torch.float16, residual=torch.float32)
    _, s = layer_norm(*args)
    ds = draw((4, 24))
    s.backward(ds)
    assert torch.equal(args[0].grad, ds.half())
    assert torch.equal(args[4].grad, ds)
    assert args[1].grad is None
    assert args[2].grad is None


def test_shared_gradient_is_not_shared_with_grad_fields() -> None:
    """x and residual get the same gradient; writing into one .grad must not change the other."""
    args, dys = arguments((4, 24), residual=torch.float32)
    torch.autograd.backward(list(layer_norm(*args)), dys)
    kept = args[4].grad.clone()
    args[0].grad.mul_(2)
    assert torch.equal(args[4].grad, kept)


def test_no_grad_records_and_keeps_nothing() -> None:
    args, _ = arguments((4, 24))
    with torch.no_grad(), Poison() as poison:
        plain = layer_norm(*args)
    assert plain.grad_fn is None
    assert len(poison.buffers) == 1  # y: no numbers for a backward
    assert torch.equal(plain, layer_norm(*args).detach())


@pytest.mark.parametrize("residual", [None, torch.float32])
def test_double_backward_raises(residual: torch.dtype | None) -> None:
    args, dys = arguments((3, 16), residual=residual)
    out = layer_norm(*args)
    outputs = [out] if residual is None else list(out)
    (dx,) = torch.autograd.grad(outputs, args[0], dys, create_graph=True)
    torch.testing.assert_close(dx, results(layer_norm, args, dys)[len(outputs)])
    with pytest.raises(RuntimeError, match="can't be differentiated twice; pass impl='eager'"):
        dx.square().sum().backward()


def test_registered_ops() -> None:
    """What torch.compile sees: schema, fake shapes and autograd agree with the kernels."""
    args, (dy,) = arguments((5, 24))
    x, weight, bias, eps, _ = args
    torch.library.opcheck(normalize.traced.forward, (x, weight, bias, eps, True, ""))
    given = [t.detach() for t in (x, weight, bias)]
    stats = normalize.traced.forward(*given, eps, True, "")[1]
    torch.library.opcheck(normalize.traced.forward, (given[0], None, None, eps, False, ""))
    for wants in ([True, True, True], [True, False, False], [False, False, True]):
        backward = (dy, given[0], given[1], stats, eps, *given, wants, "")
        torch.library.opcheck(normalize.traced.backward, backward)


@pytest.mark.parametrize("residual", [torch.float32, torch.float16])
def test_registered_ops_with_a_residual(residual: torch.dtype) -> None:
    args, (dy, ds) = arguments((5, 24), residual=residual)
    torch.library.opcheck(add_normalize.traced.forward, (*args, True, ""))
    x, weight, bias, eps, other = (t.detach() if isinstance(t, torch.Tensor) else t for t in args)
    torch.library.opcheck(add_normalize.traced.forward, (x, None, bias, eps, other, False, ""))
    _, s, stats = add_normalize.traced.forward(x, weight, bias, eps, other, True, "")
    for arrives, wants in (
        ((dy, ds), [True, True, True, True]),
        ((dy, None), [True, False, False, False]),
        ((None, ds), [True, False, False, True]),
        ((dy, ds), [False, False, True, True]),
    ):
        backward = (*arrives, weight, s, stats, eps, x, weight, bias, other, wants, "")
        torch.library.opcheck(add_normalize.traced.backward, backward)


@pytest.mark.parametrize("residual", [None, torch.float16])
def test_torch_compile_whole_with_any_length(residual: torch.dtype | None) -> None:
    torch.compiler.reset()
    compiled = torch.compile(layer_norm, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (3, 5):
        args, dys = arguments((count, 2, 24), residual=residual)
        for mine, plain in zip(results(compiled, args, dys), results(layer_norm, args, dys), strict=True):
            assert torch.equal(mine, plain)  # type: ignore[arg-type]


def test_repeats_bit_for_bit() -> None:
    args, dys = arguments((9, 70), residual=torch.float32)
    for a, b in zip(results(layer_norm, args, dys), results(layer_norm, args, dys), strict=True):
        assert torch.equal(a, b)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: case.name)
def test_tilings_of_the_grid(case: Any) -> None:
    """Every tiling of the benchmark grid covers all rows and columns, within a launch's limits, and there are
    not so many that trying them takes long."""
    N, D = case.x.shape
    sums = sum(meta is not None for meta in (case.weight, case.bias))
    for axis, listed in candidate.variants(case).items():
        assert 2 <= len(listed) <= 24  # rows beyond the registers have two
        assert len(set(listed)) == len(listed)
        for tiling in listed:
            if axis == "forward":
                strides = dict.fromkeys(("x", "residual"), D)
                passes, grid, _ = tilings.forward_launch(N, D, {"x": 2}, strides, 132, tiling)
            else:
                strides = dict.fromkeys(("dy", "ds", "s"), D)
                sizes = {"dy": 2, "s": 2}
                passes, grid, _ = tilings.backward_launch(N, D, sizes, strides, sums, 132, tiling)
            assert passes == tiling.passes or D > 16384
            assert 1 <= grid[0] <= N
            assert axis == "forward" or not sums or grid[0] <= 64 * 132  # partial sums over rows


def variants_of(shape: tuple[int, int], **form: Any) -> list[Any]:
    """Texts of the variants of either direction, the other at its default; every sixth in `make test`."""
    args, _ = arguments(shape, **form)
    listed = candidate.variants(OP.case(args))
    texts = [variants.text({axis: tiling}) for axis in listed for tiling in listed[axis]]
    return [pytest.param(x, marks=[pytest.mark.exhaustive] if i % 6 else []) for i, x in enumerate(texts)]


@pytest.mark.parametrize("text", variants_of((1, 384)))
def test_variants_of_a_short_row(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.launched", candidate.bind(text))
    compare(*arguments((19, 384), torch.float16, residual=torch.float32))


@pytest.mark.parametrize("text", variants_of((1, 1536)))
def test_variants_of_a_row_that_is_no_power_of_two(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.launched", candidate.bind(text))
    compare(*arguments((3, 1536), torch.float16, residual=torch.float16))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("form", ["fp16", "wider residual", "no bias"])
def test_passes_the_contest_verification(form: str) -> None:
    args, _ = arguments((35, 77), **FORMS[form])
    _, deterministic = verify(OP, OP.candidate("triton"), yardsticks(OP, OP.case(args)))
    assert deterministic


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@ways
def test_rows_with_nan_or_infinity_are_nan_and_others_are_not(way: Cut, tiled: Callable[..., None]) -> None:
    tiled(*way)
    args, _ = arguments((6, 40))
    with torch.no_grad():
        args[0][1, 3] = float("nan")
        args[0][4, 39] = float("inf")
    y = layer_norm(*args)
    bad = torch.isnan(y).all(1)
    assert bad.tolist() == [False, True, False, False, True, False]
    assert bool(torch.isfinite(y[~bad]).all())


@ways
def test_strided_weight_and_bias(way: Cut, tiled: Callable[..., None]) -> None:
    """Columns of a matrix, say."""
    tiled(*way)
    args, dys = arguments((5, 36))
    for place in (1, 2):
        args[place] = torch.randn(36, 3)[:, place].requires_grad_()
    compare(args, dys)


@ways
def test_y_is_the_norm_of_s_as_it_is_returned(way: Cut, tiled: Callable[..., None]) -> None:
    """Of the rounded sum, which the backward differentiates at, not of the exact one."""
    tiled(*way)
    x, residual = draw((6, 40), torch.float16), draw((6, 40), torch.float16)
    y, s = layer_norm(x, None, None, 1e-5, residual)
    assert torch.equal(s, x + residual)
    assert torch.equal(y, layer_norm(s, None, None, 1e-5, None))


FLOAT8 = torch.float8_e4m3fn
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "weight": ({"weight": torch.ones(3)}, ValueError, r"weight has shape \(3,\), expected \[D\] with D = 4"),
    "bias": ({"bias": torch.ones(1, 4)}, ValueError, r"bias has shape \(1, 4\), expected \[D\] with D = 4"),
    "residual": ({"residual": torch.ones(4)}, ValueError, r"residual has shape \(4,\), expected x's"),
    "eps": ({"eps": -1.0}, ValueError, "eps must be >= 0, got -1.0"),
    "NaN eps": ({"eps": float("nan")}, ValueError, "eps must be a finite number"),
    "integers": ({"x": torch.ones(2, 4, dtype=torch.int64)}, TypeError, "x is torch.int64; convert it"),
    "8 bits": ({"x": torch.ones(2, 4).to(FLOAT8)}, TypeError, "x is torch.float8_e4m3fn; .* at least 16"),
    "scalar": ({"x": torch.ones(())}, ValueError, r"x has shape \(\), expected \[\.\.\., D\]"),
    "no features": ({"x": torch.ones(2, 0)}, ValueError, r"x has shape \(2, 0\), .*with D >= 1"),
    "candidate": ({"impl": "cuda"}, Unsupported, "no candidate 'cuda'; it has eager, compiled, triton"),
    "peer": ({"impl": "liger"}, Unsupported, "liger"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_fix(name: str) -> None:
    args, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        public(**{"x": torch.ones(2, 4), **args})


def test_eager_keeps_every_bit_of_wider_parameters() -> None:
    """The yardstick itself: a float32 weight must not be rounded to x's dtype first."""
    x, w, b = draw((8, 64), torch.bfloat16), draw((64,)), draw((64,))
    exact = reference(x.double(), w.double(), b.double())
    got = eager(x, w, b, 1e-5, None)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, exact.to(torch.bfloat16))


def test_cost_counts_every_tensor_once() -> None:
    case = next(c for c in OP.cases() if c.name == "8192x4096 bf16 residual")
    size, row = 8192 * 4096 * 2, 4096 * 2
    assert OP.cost(case.without_grad()).bytes == 4 * size + 2 * row
    assert OP.cost(case).bytes == 4 * size + 2 * row + 4 * size + 3 * row


def test_bucket_rounds_rows_and_keeps_layout() -> None:
    x = TensorMeta((3, 300, 64), torch.float32, (300 * 96, 96, 1))
    case = Case({"x": x, "weight": None, "bias": None, "eps": 1e-5, "residual": None}, "cuda")
    assert OP.bucket(case).x == TensorMeta((1024, 64), torch.float32, (128, 1))


@pytest.mark.parametrize(
    ("peer", "form", "reason"),
    [
        ("liger", {"residual": torch.float32, "dtype": torch.float16}, "in the dtype of the sum"),
        ("liger", {"weight": None}, "needs a weight"),
        ("fla", {"residual": torch.float16}, "keeps the sum in the residual's dtype"),
        ("quack", {"dtype": torch.float16, "weight": torch.float16}, "takes a float32 weight"),
        ("quack", {"weight": None}, "needs a weight"),
    ],
)
def test_peers_say_why_not(peer: str, form: dict[str, Any], reason: str) -> None:
    args, _ = arguments((4, 8), **form)
    case = OP.case(args)
    assert reason in (OP.candidate(peer).supports(Case(case.args, "cuda")) or "")
