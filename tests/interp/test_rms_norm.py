"""rms_norm's Triton candidate under the interpreter against the float64 reference; laws of the op."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from bakeoff.errors import Unsupported
from bakeoff.ops.rms_norm import kernels
from bakeoff.ops.rms_norm import rms_norm as public
from bakeoff.ops.rms_norm.autograd import _backward_op, _forward_op, rms_norm
from bakeoff.ops.rms_norm.op import OP
from bakeoff.ops.rms_norm.plain import eager
from bakeoff.ops.rms_norm.reference import rms_norm as reference
from bakeoff.select import Case, TensorMeta

Tiling = kernels.Tiling
GUARD = 64


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Cut every call with one small tiling, so that there is more than one tile on each axis."""

    def cut(block: int, rows: int = 1, programs: int = 2, *, stages: int = 1, hold: bool = True) -> None:
        tiling = Tiling(block, rows, stages, 4, programs, hold)
        monkeypatch.setattr(kernels, "forward_tiling", lambda *_: tiling)
        monkeypatch.setattr(kernels, "backward_tiling", lambda *_: tiling)
        monkeypatch.setattr(kernels, "sum_tiling", lambda _: (2, 8, 4))

    return cut


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
@pytest.mark.parametrize("block", [128, 32], ids=["whole rows", "long rows"])
def test_more_than_one_tile_on_each_axis(form: str, block: int, tiled: Callable[..., None]) -> None:
    tiled(block, rows=2 if block == 128 else 1)
    compare(*arguments((11, 100), **FORMS[form]))


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("hold", [True, False])
def test_tilings_agree(stages: int, hold: bool, tiled: Callable[..., None]) -> None:
    args, dys = arguments((7, 48), offset=1.0)
    tiled(64, 4, 1, stages=stages, hold=hold)
    one = compare(args, dys)
    tiled(64, 1, 3, stages=stages, hold=hold)
    for a, b in zip(one, compare(args, dys), strict=True):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("size", [65537])
def test_rows_beyond_the_registers(size: int) -> None:
    assert kernels.forward_tiling(2, size, 4, 4).block < size
    assert kernels.backward_tiling(2, size, 4, True, 4).block < size
    compare(*arguments((2, size)))


@pytest.mark.parametrize("which", ["x", "weight", "residual"])
@pytest.mark.parametrize("block", [64, 16])
def test_one_gradient_alone(which: str, block: int, tiled: Callable[..., None]) -> None:
    tiled(block)
    args, dys = arguments((5, 40), residual=torch.float32, grad=False)
    args[{"x": 0, "weight": 1, "residual": 3}[which]].requires_grad_()
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
@pytest.mark.parametrize("block", [64, 16], ids=["whole rows", "long rows"])
def test_layouts(layout: str, block: int, tiled: Callable[..., None]) -> None:
    tiled(block, rows=2 if block == 64 else 1)
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


@pytest.mark.parametrize("block", [64, 16], ids=["whole rows", "long rows"])
def test_writes_every_element_and_nothing_else(
    block: int, tiled: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every buffer the launches allocate starts as NaN between two guard bands."""
    tiled(block, rows=2 if block == 64 else 1)
    buffers: list[tuple[torch.Tensor, int]] = []

    def guarded(shape: Any, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        count = int(torch.tensor(shape).prod())
        whole = torch.full((count + 2 * GUARD,), float("nan"), dtype=dtype, device=device)
        whole[:GUARD] = whole[GUARD + count :] = 7
        buffers.append((whole, count))
        return whole[GUARD : GUARD + count].view(shape)

    def like(t: torch.Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        return guarded(t.shape, dtype=dtype or t.dtype, device=t.device)

    args, dys = arguments((5, 40), torch.float16, residual=torch.float32)
    expected = results(rms_norm, args, dys)
    monkeypatch.setattr(torch, "empty", guarded)
    monkeypatch.setattr(torch, "empty_like", like)
    got = results(rms_norm, args, dys)
    monkeypatch.undo()
    assert len(buffers) == (6 if block == 64 else 7)  # y, s, dx, dresidual, dw, partials (and row sums)
    for whole, count in buffers:
        assert bool((whole[:GUARD] == 7).all())
        assert bool((whole[GUARD + count :] == 7).all())
        assert bool(torch.isfinite(whole).all())
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@settings(max_examples=25)
@given(
    rows=st.integers(0, 9),
    features=st.integers(2, 70),
    pad=st.integers(0, 3),
    residual=st.booleans(),
    offset=st.sampled_from([0.0, 1.0, -0.5]),
    tile=st.tuples(st.sampled_from([16, 32, 128]), st.sampled_from([1, 2, 4]), st.integers(1, 3)),
)
def test_any_shape_and_stride(
    rows: int, features: int, pad: int, residual: bool, offset: float, tile: tuple[int, int, int]
) -> None:
    block, height, programs = tile
    tiling = Tiling(block, height, 1, 4, programs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "forward_tiling", lambda *_: tiling)
        patch.setattr(kernels, "backward_tiling", lambda *_: tiling)
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


@pytest.mark.parametrize("residual", [None, torch.float32])
def test_registered_ops(residual: torch.dtype | None) -> None:
    """What torch.compile sees: schema, fake shapes and autograd agree with the kernels."""
    args, dys = arguments((5, 24), residual=residual)
    torch.library.opcheck(_forward_op, args)
    torch.library.opcheck(_forward_op, [args[0], None, *args[2:]])
    s = draw((5, 24))
    same = (torch.float32, torch.float32)
    torch.library.opcheck(_backward_op, (dys[0], None, s, draw((24,)), 1e-6, 0.0, *same, True, True))
    torch.library.opcheck(
        _backward_op, (dys[0], s, s, None, 1e-6, 0.0, torch.float32, torch.float16, True, False)
    )


def test_repeats_bit_for_bit() -> None:
    args, dys = arguments((9, 70), residual=torch.float32)
    for a, b in zip(results(rms_norm, args, dys), results(rms_norm, args, dys), strict=True):
        assert torch.equal(a, b)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: case.name)
def test_tilings_of_the_grid(case: Any) -> None:
    """The real tilings cover every row and column of the benchmark grid, within a launch's limits."""
    N, D = case.x.shape
    size = case.x.dtype.itemsize
    for tiling in (
        kernels.forward_tiling(N, D, size, 132),
        kernels.backward_tiling(N, D, size, True, 132),
        kernels.backward_tiling(N, D, size, False, 132),
    ):
        assert tiling.block & (tiling.block - 1) == 0
        assert tiling.block >= D or tiling.rows == 1
        assert tiling.warps in (1, 2, 4, 8, 16, 32)
        assert tiling.programs >= 1


FLOAT8 = torch.float8_e4m3fn
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "weight": ({"weight": torch.ones(3)}, ValueError, r"weight has shape \(3,\), expected \(4,\) = x.shape"),
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
    "scalar": ({"x": torch.ones(())}, ValueError, "needs a last dimension"),
    "no features": ({"x": torch.ones(2, 0)}, ValueError, "needs a last dimension of at least 1"),
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


@pytest.mark.parametrize("block", [64, 16], ids=["whole rows", "long rows"])
def test_a_strided_weight(block: int, tiled: Callable[..., None]) -> None:
    """A column of a matrix of weights, say."""
    tiled(block)
    args, dys = arguments((5, 36))
    args[1] = torch.randn(36, 3)[:, 1].requires_grad_()
    compare(args, dys)


@pytest.mark.parametrize("block", [64, 16], ids=["whole rows", "long rows"])
def test_y_is_the_norm_of_s_as_it_is_returned(block: int, tiled: Callable[..., None]) -> None:
    """Of the rounded sum, which the backward differentiates at, not of the exact one."""
    tiled(block)
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
