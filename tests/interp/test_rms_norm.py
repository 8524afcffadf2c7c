"""rms_norm's Triton candidate under the interpreter against the float64 reference; laws of the op."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from bakeoff.errors import Unsupported
from bakeoff.kernels import row_tilings as tilings
from bakeoff.kernels import rows as kernel_rows
from bakeoff.kernels import variants
from bakeoff.ops.rms_norm import rms_norm as public
from bakeoff.ops.rms_norm.op import OP
from bakeoff.ops.rms_norm.plain import eager
from bakeoff.ops.rms_norm.reference import rms_norm as reference
from bakeoff.ops.rms_norm.triton import add_normalize, normalize
from bakeoff.ops.rms_norm.triton import rms_norm as candidate
from bakeoff.select import Case, TensorMeta
from bakeoff.select.contests.poison import Poison
from bakeoff.select.contests.verify import verify, yardsticks

FORWARD, BACKWARD = tilings.ForwardTiling, tilings.BackwardTiling


launched = candidate
"""The candidate with the tiling that a test asks for."""


def rms_norm(*args: Any) -> Any:
    """The op as the test launches it."""
    return launched(*args)


def bound(forward: tilings.ForwardTiling, backward: tilings.BackwardTiling) -> Any:
    return candidate.bind(variants.text({"forward": forward, "backward": backward}))


class Cut(NamedTuple):
    """Small tiles, so that there is more than one on each axis."""

    block: int
    rows: int = 1
    programs: int = 1
    stages: int = 1
    hold: int = 1
    passes: int = 1

    def bind(self) -> Any:
        block, rows, programs, stages, hold, passes = self
        return bound(
            FORWARD(block, rows, 4, programs, stages, passes),
            BACKWARD(block, rows, 4, max(1, programs), stages, hold, 0, passes),
        )


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Cut every call by one tiling."""

    def cut(*numbers: int, **named: int) -> None:
        monkeypatch.setattr(f"{__name__}.launched", Cut(*numbers, **named).bind())
        monkeypatch.setattr(kernel_rows, "sum_tiling", lambda _: (2, 8, 4))

    return cut


WAYS = {
    "whole rows": Cut(128, 2),
    "pieces": Cut(16, 2),
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
    got = results(rms_norm, args, dys)
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
        error, allowed = (
            ((mine.double() - want).norm() / size).item(),
            ((other.double() - want).norm() / size).item(),
        )
        assert error <= 2 * allowed + torch.finfo(mine.dtype).eps / 16 + 4e-7
    return got


def arguments(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    weight: torch.dtype | None = torch.float32,
    residual: torch.dtype | None = None,
    offset: float = 0.0,
    eps: float = 1e-6,
    grad: bool = True,
) -> tuple[list[Any], list[torch.Tensor]]:
    """The op's arguments and one gradient per output."""
    x = draw(shape, dtype).requires_grad_(grad)
    w = None if weight is None else draw(shape[-1:], weight).requires_grad_(grad)
    r = None if residual is None else draw(shape, residual).requires_grad_(grad)
    dys = [draw(shape, dtype)]
    if residual is not None:
        dys.append(draw(shape, torch.promote_types(dtype, residual)))
    return [x, w, eps, r, offset], dys


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no weight": {"weight": None},
    "offset": {"offset": 1.0},
    "fp32 weight": {"dtype": torch.float16},
    "fp16": {"dtype": torch.float16, "weight": torch.float16},
    "residual": {"residual": torch.float32},
    "wider residual": {"dtype": torch.float16, "weight": torch.float16, "residual": torch.float32},
    "narrower residual": {"residual": torch.float16, "offset": 1.0},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(1,), (3, 1), (5, 33), (2, 3, 64), (9, 127)])
def test_matches_the_reference(form: str, shape: tuple[int, ...]) -> None:
    # One element normalises to its sign: with a small eps its gradient would cancel to rounding noise.
    compare(*arguments(shape, **FORMS[form], eps=1.0 if shape[-1] == 1 else 1e-6))


@pytest.mark.parametrize("form", FORMS)
@ways
def test_more_than_one_tile_on_each_axis(form: str, way: Cut, tiled: Callable[..., None]) -> None:
    tiled(*way)
    compare(*arguments((11, 100), **FORMS[form]))


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("hold", [True, False])
def test_tilings_agree(stages: int, hold: bool, tiled: Callable[..., None]) -> None:
    args, dys = arguments((7, 48), offset=1.0)
    tiled(64, 4, 1, stages=stages, hold=hold)
    one = compare(args, dys)
    for other in (Cut(64, 1, 3), Cut(8, 2)):
        tiled(*other._replace(stages=stages, hold=hold))
        for a, b in zip(one, compare(args, dys), strict=True):
            assert a is not None
            assert b is not None
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("size", [16387, pytest.param(65537, marks=pytest.mark.exhaustive)])
def test_rows_beyond_the_registers(size: int) -> None:
    assert tilings.forward_tiling(2, size, 4, 4, 4).passes == 2
    assert tilings.backward_tiling(2, size, 4, True, 4).passes == 2
    compare(*arguments((2, size)))


def test_rows_that_a_variant_is_too_short_for_take_two_passes(tiled: Callable[..., None]) -> None:
    """A tiling serves every row: what doesn't fit in registers is read twice."""
    tiled(2048)
    compare(*arguments((2, 16385)))


@pytest.mark.parametrize("which", ["x", "weight", "residual"])
@ways
def test_one_gradient_alone(which: str, way: Cut, tiled: Callable[..., None]) -> None:
    tiled(*way)
    args, dys = arguments((5, 40), residual=torch.float32, grad=False)
    args[{"x": 0, "weight": 1, "residual": 3}[which]].requires_grad_()
    compare(args, dys)


@pytest.mark.parametrize("which", [(0,), (3,), (0, 3), (1, 3)], ids=str)
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
    y, s, dx, dw, dr = compare_empty(args, dys)
    assert y.shape == s.shape == dx.shape == dr.shape == (0, 24)
    assert torch.equal(dw, torch.zeros(24))


def compare_empty(args: list[Any], dys: list[torch.Tensor]) -> list[Any]:
    return list(results(rms_norm, args, dys))


def test_zero_valued_rows_stay_finite() -> None:
    args, dys = arguments((4, 40), residual=torch.float32)
    with torch.no_grad():
        args[0][::2] = 0
        args[3][::2] = 0
    compare(args, dys)


@ways
def test_writes_every_element_and_nothing_else(way: Cut, tiled: Callable[..., None]) -> None:
    """Every tensor that a call allocates starts as NaN between two guard bands."""
    tiled(*way)
    args, dys = arguments((5, 40), torch.float16, residual=torch.float32)
    expected = results(rms_norm, args, dys)
    with Poison() as poison:
        got = results(rms_norm, args, dys)
    assert not poison.broken()
    # y, s, dx, dresidual, dw, partial gradients of the weight, and for long rows their sums
    assert len(poison.buffers) == (6 if way.passes == 1 else 7)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)  # type: ignore[arg-type]


@settings(max_examples=settings.default.max_examples // 4)
@given(
    rows=st.integers(0, 9),
    features=st.integers(2, 70),
    pad=st.integers(0, 3),
    residual=st.booleans(),
    offset=st.sampled_from([0.0, 1.0, -0.5]),
    tile=st.builds(
        Cut,
        block=st.sampled_from([16, 32, 128]),
        rows=st.sampled_from([1, 2, 4]),
        programs=st.integers(0, 2),
        passes=st.integers(1, 2),
    ),
)
def test_any_shape_and_stride(
    rows: int, features: int, pad: int, residual: bool, offset: float, tile: Cut
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.launched", tile.bind())
        args, dys = arguments((rows, features), residual=torch.float32 if residual else None, offset=offset)
        args[0] = torch.cat([args[0].detach(), draw((rows, pad))], 1)[:, :features].requires_grad_()
        if rows:
            compare(args, dys)
        else:
            assert results(rms_norm, args, dys)[0].shape == (0, features)  # type: ignore[union-attr]


def test_scale_law() -> None:
    x = draw((6, 50))
    for c in (1e-3, 17.0):
        torch.testing.assert_close(rms_norm(c * x, None, 0.0, None, 0.0), rms_norm(x, None, 0.0, None, 0.0))


@pytest.mark.parametrize("rows", [7, 700])
def test_without_eps_rows_that_do_not_exist_add_nothing(rows: int) -> None:
    """Those of a tile behind the last row, whose squares are 0."""
    x, weight = draw((rows, 64)).requires_grad_(), draw((64,)).requires_grad_()
    args, dys = [x, weight, 0.0, None, 0.0], [draw((rows, 64))]
    for got, want in zip(results(rms_norm, args, dys), results(reference, args, dys), strict=True):
        assert got is not None
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_rows_are_independent() -> None:
    x, w = draw((7, 33)), draw((33,))
    order = torch.randperm(7)
    assert torch.equal(rms_norm(x, w, 1e-6, None, 0.0)[order], rms_norm(x[order], w, 1e-6, None, 0.0))


def test_against_another_formulation() -> None:
    """A row of unit length times sqrt(D)."""
    x, w = draw((6, 50)).double(), draw((50,)).double()
    other = F.normalize(x, dim=-1, eps=0.0) * 50**0.5 * (1 + w)
    torch.testing.assert_close(reference(x, w, 0.0, None, 1.0), other)
    torch.testing.assert_close(
        rms_norm(x.float(), w.float(), 0.0, None, 1.0), other.float(), rtol=2e-6, atol=2e-6
    )


def test_reference_gradients() -> None:
    x, w, r = (draw(s).double().requires_grad_() for s in ((3, 5), (5,), (3, 5)))
    assert torch.autograd.gradcheck(lambda x, w, r: reference(x, w, 1e-3, r, 1.0), (x, w, r))


def test_only_the_sum_is_used() -> None:
    args, _ = arguments((4, 24), torch.float16, weight=torch.float16, residual=torch.float32)
    _, s = rms_norm(*args)
    ds = draw((4, 24))
    s.backward(ds)
    assert torch.equal(args[0].grad, ds.half())
    assert torch.equal(args[3].grad, ds)
    assert args[1].grad is None


def test_shared_gradient_is_not_shared_with_grad_fields() -> None:
    """x and residual get the same gradient; writing into one .grad must not change the other."""
    args, dys = arguments((4, 24), residual=torch.float32)
    torch.autograd.backward(list(rms_norm(*args)), dys)
    kept = args[3].grad.clone()
    args[0].grad.mul_(2)
    assert torch.equal(args[3].grad, kept)


def test_no_grad_records_nothing() -> None:
    args, _ = arguments((4, 24))
    with torch.no_grad():
        plain = rms_norm(*args)
    assert plain.grad_fn is None
    assert torch.equal(plain, rms_norm(*args).detach())


@pytest.mark.parametrize("residual", [None, torch.float32])
def test_double_backward_raises(residual: torch.dtype | None) -> None:
    args, dys = arguments((3, 16), residual=residual)
    out = rms_norm(*args)
    outputs = [out] if residual is None else list(out)
    (dx,) = torch.autograd.grad(outputs, args[0], dys, create_graph=True)
    torch.testing.assert_close(dx, results(rms_norm, args, dys)[len(outputs)])
    with pytest.raises(RuntimeError, match="can't be differentiated twice; pass impl='eager'"):
        dx.square().sum().backward()


def test_registered_ops() -> None:
    """What torch.compile sees: schema, fake shapes and autograd agree with the kernels."""
    args, (dy,) = arguments((5, 24))
    x, weight, eps, _, offset = args
    torch.library.opcheck(normalize.traced.forward, (x, weight, eps, offset, True, ""))
    torch.library.opcheck(normalize.traced.forward, (x, None, eps, offset, False, ""))
    x, weight = x.detach(), weight.detach()
    for wants in ([True, True], [True, False], [False, True]):
        given = (dy, x, weight, eps, offset, x, weight, wants, "")
        torch.library.opcheck(normalize.traced.backward, given)


@pytest.mark.parametrize("residual", [torch.float32, torch.float16])
def test_registered_ops_with_a_residual(residual: torch.dtype) -> None:
    args, (dy, ds) = arguments((5, 24), residual=residual)
    x, weight, eps, other, offset = args
    torch.library.opcheck(add_normalize.traced.forward, (*args, True, ""))
    torch.library.opcheck(add_normalize.traced.forward, (x, None, eps, other, offset, False, ""))
    x, weight, other = x.detach(), weight.detach(), other.detach()
    s = x + other
    for arrives, wants in (
        ((dy, ds), [True, True, True]),
        ((dy, None), [True, False, False]),
        ((None, ds), [True, False, True]),
        ((dy, ds), [False, False, True]),
    ):
        given = (*arrives, weight, s, eps, offset, x, weight, other, wants, "")
        torch.library.opcheck(add_normalize.traced.backward, given)


@pytest.mark.parametrize("residual", [None, torch.float32, torch.float16])
def test_torch_compile_whole_with_any_length(residual: torch.dtype | None) -> None:
    torch.compiler.reset()
    compiled = torch.compile(rms_norm, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5, 8):
        args, dys = arguments((rows, 2, 24), residual=residual)
        for mine, plain in zip(results(compiled, args, dys), results(rms_norm, args, dys), strict=True):
            assert torch.equal(mine, plain)  # type: ignore[arg-type]


def test_repeats_bit_for_bit() -> None:
    args, dys = arguments((9, 70), residual=torch.float32)
    for a, b in zip(results(rms_norm, args, dys), results(rms_norm, args, dys), strict=True):
        assert torch.equal(a, b)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: case.name)
def test_tilings_of_the_grid(case: Any) -> None:
    """Every tiling of the benchmark grid covers all rows and columns, within a launch's limits, and there are
    not so many that trying them takes long."""
    N, D = case.x.shape
    for axis, listed in candidate.variants(case).items():
        assert 4 <= len(listed) <= 24
        assert len(set(listed)) == len(listed)
        for tiling in listed:
            sizes = {"x": 2} if axis == "forward" else {"dy": 2, "s": 2}
            strides = dict.fromkeys(("x", "residual") if axis == "forward" else ("dy", "ds", "s"), D)
            if axis == "forward":
                passes, grid, numbers = tilings.forward_launch(N, D, sizes, strides, 132, tiling)
            else:
                passes, grid, numbers = tilings.backward_launch(N, D, sizes, strides, True, 132, tiling)
            assert passes == tiling.passes or D > 16384
            assert tiling.block & (tiling.block - 1) == tiling.rows & (tiling.rows - 1) == 0
            assert tiling.warps in (1, 2, 4, 8, 16, 32)
            assert 1 <= grid[0] <= N
            assert axis == "forward" or grid[0] <= 64 * 132  # partial gradients of the weight
            if passes == 1:
                assert tiling.rows * -(-D // tiling.block) * tiling.block <= 64 * 32 * tiling.warps
                assert numbers["ROWS"] == tiling.rows


@pytest.mark.parametrize(
    ("shape", "tiling"),
    [
        ((12288, 5120), FORWARD(1024, 1, 4)),  # 5 pieces, none cut short
        ((5120, 2880), FORWARD(1024, 1, 4)),
        ((3000, 7168), FORWARD(2048, 1, 8)),
        ((8192, 4096), FORWARD(4096, 1, 8)),
        ((4, 5120), FORWARD(8192, 1, 16)),
    ],
)
def test_rows_of_any_length_leave_few_threads_idle(
    shape: tuple[int, int], tiling: tilings.ForwardTiling
) -> None:
    assert tilings.forward_tiling(*shape, 2, 2, 132) == tiling


def variants_of(shape: tuple[int, int], **form: Any) -> list[Any]:
    """Texts of the variants of either direction, the other at its default; every fourth in `make test`."""
    args, _ = arguments(shape, **form)
    listed = candidate.variants(OP.case(args))
    texts = [variants.text({axis: tiling}) for axis in listed for tiling in listed[axis]]
    return [pytest.param(x, marks=[pytest.mark.exhaustive] if i % 4 else []) for i, x in enumerate(texts)]


@pytest.mark.parametrize("text", variants_of((1, 384)))
def test_variants_of_a_short_row(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.launched", candidate.bind(text))
    compare(*arguments((19, 384), torch.float16, residual=torch.float32, offset=1.0))


@pytest.mark.parametrize("text", variants_of((1, 1536)))
def test_variants_of_a_row_that_is_no_power_of_two(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.launched", candidate.bind(text))
    compare(*arguments((3, 1536), torch.float16, residual=torch.float16))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("residual", [None, torch.float32])
def test_passes_the_contest_verification(residual: torch.dtype | None) -> None:
    args, _ = arguments((35, 77), torch.float16, residual=residual)
    _, deterministic = verify(OP, OP.candidate("triton"), yardsticks(OP, OP.case(args)))
    assert deterministic


def test_a_variant_is_one_object() -> None:
    (forward, *_), (backward, *_) = candidate.variants(OP.case(arguments((3, 384))[0])).values()
    assert candidate.bind("") is candidate
    assert bound(forward, backward) is bound(forward, backward)


FLOAT8 = torch.float8_e4m3fn
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "weight": ({"weight": torch.ones(3)}, ValueError, r"weight has shape \(3,\), expected \[D\] with D = 4"),
    "residual": (
        {"residual": torch.ones(4)},
        ValueError,
        r"residual has shape \(4,\), expected x's",
    ),
    "eps": ({"eps": -1.0}, ValueError, "eps must be >= 0, got -1.0"),
    "NaN eps": ({"eps": float("nan")}, ValueError, "eps must be a finite number"),
    "huge eps": ({"eps": 10**400}, ValueError, "eps must be a finite number, got inf"),
    "eps of a tensor": ({"eps": torch.ones(2)}, ValueError, "eps must be a finite number, got a tensor"),
    "offset": ({"offset": 1.0}, ValueError, "offset=1.0 is added to a weight, and weight is None"),
    "integers": ({"x": torch.ones(2, 4, dtype=torch.int64)}, TypeError, "x is torch.int64; convert it"),
    "8 bits": (
        {"x": torch.ones(2, 4).to(FLOAT8)},
        TypeError,
        "x is torch.float8_e4m3fn; .* at least 16 bits",
    ),
    "8 bits of residual": (
        {"residual": torch.ones(2, 4).to(FLOAT8)},
        TypeError,
        "residual is torch.float8_e4m3fn; .* at least 16 bits",
    ),
    "scalar": ({"x": torch.ones(())}, ValueError, r"x has shape \(\), expected \[\.\.\., D\]"),
    "no features": (
        {"x": torch.ones(2, 0)},
        ValueError,
        r"x has shape \(2, 0\), .*with D >= 1",
    ),
    "candidate": ({"impl": "cuda"}, Unsupported, "no candidate 'cuda'; it has eager, compiled, triton"),
    "CPU": ({"impl": "triton"}, Unsupported, "runs on CUDA, not on cpu"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_fix(name: str) -> None:
    args, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        public(**{"x": torch.ones(2, 4), **args})


def test_a_weight_may_have_8_bits() -> None:
    x, weight = torch.randn(2, 4), torch.full((4,), 0.5)
    assert torch.equal(public(x, weight.to(FLOAT8)), public(x, weight))


def test_eager_keeps_every_bit_of_a_wider_weight() -> None:
    """The yardstick itself: a float32 weight must not be rounded to x's dtype first."""
    x, w = draw((8, 64), torch.bfloat16), draw((64,))
    exact = reference(x.double(), w.double(), 1e-6, None, 1.0)
    got = eager(x, w, 1e-6, None, 1.0)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, exact.to(torch.bfloat16))


def test_cost_counts_every_tensor_once() -> None:
    case = next(c for c in OP.cases() if c.name == "8192x4096 bf16 residual")
    size, row = 8192 * 4096 * 2, 4096 * 2
    assert OP.cost(case.without_grad()).bytes == 4 * size + row
    assert OP.cost(case).bytes == 4 * size + row + 4 * size + 2 * row


def test_bucket_rounds_rows_and_keeps_layout() -> None:
    x = TensorMeta((3, 300, 64), torch.float32, (300 * 96, 96, 1))
    case = Case({"x": x, "weight": None, "eps": 1e-6, "residual": None, "offset": 0.0}, "cuda")
    assert OP.bucket(case).x == TensorMeta((1024, 64), torch.float32, (128, 1))


@pytest.mark.parametrize(
    ("peer", "form", "reason"),
    [
        ("liger", {"residual": torch.float32, "dtype": torch.float16}, "loses the torch.float32 residual"),
        ("liger", {"residual": torch.float32, "weight": None}, "needs a weight"),
        ("fla", {"offset": 1.0}, "no weight offset"),
        ("quack", {"residual": torch.float16}, "keeps the sum in the residual's dtype"),
    ],
)
def test_peers_say_why_not(peer: str, form: dict[str, Any], reason: str) -> None:
    args, _ = arguments((4, 8), **form)
    case = OP.case(args)
    assert reason in (OP.candidate(peer).supports(Case(case.args, "cuda")) or "")


@ways
def test_a_strided_weight(way: Cut, tiled: Callable[..., None]) -> None:
    """A column of a matrix of weights, say."""
    tiled(*way)
    args, dys = arguments((5, 36))
    args[1] = torch.randn(36, 3)[:, 1].requires_grad_()
    compare(args, dys)


@ways
def test_y_is_the_norm_of_s_as_it_is_returned(way: Cut, tiled: Callable[..., None]) -> None:
    """Of the rounded sum, which the backward differentiates at, not of the exact one."""
    tiled(*way)
    x, residual = draw((6, 40), torch.float16), draw((6, 40), torch.float16)
    y, s = rms_norm(x, None, 1e-6, residual, 0.0)
    assert torch.equal(s, x + residual)
    assert torch.equal(y, rms_norm(s, None, 1e-6, None, 0.0))


def test_one_gradient_may_lie_in_rows_of_an_odd_stride(tiled: Callable[..., None]) -> None:
    tiled(64, rows=2)
    for odd in range(2):
        args, dys = arguments((5, 36), residual=torch.float32)
        dys[odd] = strided_rows(dys[odd])
        compare(args, dys)
