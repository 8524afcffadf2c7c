"""Kernel ops: one declaration is differentiable, traceable, checked by opcheck, and says what it can't do."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bakeoff.kernels import variants
from bakeoff.kernels.op import KernelOp, kernel_op
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.variants import Tilings

pytest.importorskip("triton")


class Pieces(NamedTuple):
    pieces: int


def results(x: Tensor, w: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    del w, scale
    return torch.empty_like(x), torch.empty_like(x)


def forward(
    plan: Plan, x: Tensor, w: Tensor | None, scale: float, y: Tensor, s: Tensor, roots: Tensor | None,
    tiling: Pieces | None,
) -> None:  # fmt: skip
    """y = scale x^2 w, s = x + 1; `roots` is |x|, for the backward."""
    seen.append(tiling)
    plan.run(scaled_square, x, w, scale, y)
    plan.run(torch.add, x, 1, out=s)
    if roots is not None:
        plan.run(torch.abs, x, out=roots)


def backward(
    plan: Plan, dy: Tensor, ds: Tensor, x: Tensor, w: Tensor | None, roots: Tensor, scale: float,
    dx: Tensor | None, dw: Tensor | None,
) -> None:  # fmt: skip
    plan.run(fill_gradients, dy, ds, x, w, roots, scale, dx, dw)


def scaled_square(x: Tensor, w: Tensor | None, scale: float, y: Tensor) -> None:
    y.copy_(scale * x.square() * (1 if w is None else w))


def fill_gradients(dy: Any, ds: Any, x: Any, w: Any, roots: Any, scale: float, dx: Any, dw: Any) -> None:
    if dx is not None:
        dx.copy_(2 * x.sign() * roots * scale * dy * (1 if w is None else w) + ds)
    if dw is not None:
        dw.copy_((x.square() * scale * dy).sum(0))


seen: list[Any] = []
op = kernel_op(
    "test_op.triton",
    results=results,
    forward=forward,
    backward=backward,
    names=("y", "s"),
    keeps=lambda x, w, scale: (torch.empty_like(x),),
    kept=("roots",),
    depends={"s": ("x",)},
    tilings={"forward": Tilings(Pieces, lambda case: [Pieces(1), Pieces(2)])},
)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch.compiler.reset()


def plain(x: Tensor, w: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    y = scale * x.square()
    return (y if w is None else y * w), x + 1


def tensors(wants: Sequence[bool] = (True, True)) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8, requires_grad=wants[0]), torch.randn(8, requires_grad=wants[1])


@pytest.mark.parametrize("wants", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_that_are_wanted(wants: tuple[bool, bool], compiled: bool) -> None:
    call = torch.compile(op, fullgraph=True, backend="aot_eager") if compiled else op
    x, w = tensors(wants)
    asked = [t for t in (x, w) if t.requires_grad]
    got, want = call(x, w, 3.0), plain(x, w, 3.0)
    dys = torch.randn(4, 8), torch.randn(4, 8)
    assert got[1].requires_grad == wants[0]
    gradients = [
        torch.autograd.grad(
            [y for y in ys if y.requires_grad],
            asked,
            [dy for y, dy in zip(ys, dys, strict=True) if y.requires_grad],
        )
        for ys in (got, want)
    ]
    for mine, other in zip((*got, *gradients[0]), (*want, *gradients[1]), strict=True):
        torch.testing.assert_close(mine, other)


def test_an_absent_tensor_and_a_result_without_gradient() -> None:
    x, _ = tensors()
    y, s = op(x, None, 2.0)
    (dx,) = torch.autograd.grad(s.sum(), x, retain_graph=True)  # zeros arrive for y
    torch.testing.assert_close(dx, torch.ones_like(x))
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, 4 * x)


def test_nothing_is_kept_where_no_gradient_is_wanted() -> None:
    x, w = tensors()
    with torch.no_grad():
        y, s = op(x, w, 2.0)
    assert y.grad_fn is None
    torch.testing.assert_close((y, s), plain(x.detach(), w.detach(), 2.0))
    assert not op(x.detach(), w.detach(), 2.0)[0].requires_grad


def test_only_what_backward_asks_for_is_saved() -> None:
    x, w = tensors()
    y, _ = op(x, w, 2.0)
    saved = [t for t in y.grad_fn.saved_tensors if t is not None]
    assert [t.data_ptr() for t in saved[:2]] == [x.data_ptr(), w.data_ptr()]
    assert len(saved) == 3  # and the roots


def test_opcheck() -> None:
    x, w = tensors()
    torch.library.opcheck(op.traced.forward, (x, w, 2.0, True, ""))
    torch.library.opcheck(op.traced.forward, (x, None, 2.0, True, "forward(pieces=2)"))
    torch.library.opcheck(op.traced.forward, (x.detach(), w.detach(), 2.0, False, ""))
    x, w = x.detach(), w.detach()
    for wanted in ([True, True], [True, False], [False, True]):
        arriving = (torch.randn(4, 8), torch.randn(4, 8))
        torch.library.opcheck(op.traced.backward, (*arriving, x, w, x.abs(), 2.0, x, w, wanted, ""))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_second_derivative_is_refused_clearly(compiled: bool) -> None:
    call = torch.compile(op, fullgraph=True, backend="aot_eager") if compiled else op
    x, w = tensors()
    y, _ = call(x, w, 2.0)
    with pytest.raises(RuntimeError, match=r"twice|double backward"):
        torch.autograd.grad(y.sum(), x, create_graph=True)[0].sum().backward()


def test_variants() -> None:
    x, w = tensors((False, False))
    assert op.variants(None) == {"forward": [Pieces(1), Pieces(2)]}
    bound = op.bind("forward(pieces=2)")
    assert bound is op.bind("forward(pieces=2)")
    assert op.bind("") is op
    seen.clear()
    op(x, w, 1.0)
    bound(x, w, 1.0)
    torch.compile(bound, fullgraph=True, backend="aot_eager")(x, w, 1.0)
    assert seen == [None, Pieces(2), Pieces(2)]
    for wrong in (
        "forward(parts=2)",
        "backward(pieces=2)",
        "forward(pieces=2",
        "rm -rf",
        "forward(pieces=2.5)",
    ):
        with pytest.raises(ValueError, match="no variant"):
            op.bind(wrong)


def test_text_of_a_variant() -> None:
    kinds = {"forward": Pieces, "backward": Pieces}
    variant = {"backward": Pieces(3), "forward": Pieces(-1)}
    assert variants.text(variant) == "forward(pieces=-1) backward(pieces=3)"
    assert variants.parse(variants.text(variant), kinds) == variant
    assert variants.parse("", kinds) == {}


def test_a_type_that_torch_library_can_not_pass_is_refused() -> None:
    def wrong(x: Tensor, sizes: dict[str, int]) -> Tensor:
        raise NotImplementedError

    with pytest.raises(TypeError, match="test_wrong: argument sizes is declared as"):
        kernel_op("test_wrong", results=wrong, forward=lambda plan, x, y: None)


def shares_its_gradient() -> KernelOp:
    def made(x: Tensor, r: Tensor) -> Tensor:
        return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, r.dtype))

    def add(plan: Plan, x: Tensor, r: Tensor, y: Tensor) -> None:
        plan.run(torch.add, x, r, out=y)

    def back(plan: Plan, dy: Tensor, dx: Tensor | None, dr: Tensor | None) -> None:
        for into in (dx, dr):
            if into is not None:
                plan.run(Tensor.copy_, into, dy)

    return kernel_op("test_add", results=made, forward=add, backward=back, shares={"r": "x"})


added = shares_its_gradient()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wants", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_that_is_another_s(dtype: torch.dtype, wants: tuple[bool, bool], compiled: bool) -> None:
    call = torch.compile(added, fullgraph=True, backend="aot_eager") if compiled else added
    x, r = torch.randn(3, 4, requires_grad=wants[0]), torch.randn(3, 4, dtype=dtype, requires_grad=wants[1])
    y = call(x, r)
    dy = torch.randn_like(y)
    asked = [t for t in (x, r) if t.requires_grad]
    got = torch.autograd.grad(y, asked, dy)
    assert [g.dtype for g in got] == [t.dtype for t in asked]
    for g in got:
        torch.testing.assert_close(g, dy.to(g.dtype))
    if not compiled and len(got) == 2:
        assert (got[0].data_ptr() == got[1].data_ptr()) == (dtype == torch.float32)


def gives_a_view() -> KernelOp:
    """Of x [N, M]: y = w x^2 of the first n columns, r = |x| kept for the backward, and the others as they
    are."""

    def made(x: Tensor, w: Tensor | None, n: int) -> Tensor:
        return x.new_empty(x.shape[0], n)

    def square(
        plan: Plan, x: Tensor, w: Tensor | None, n: int, y: Tensor, sizes: Tensor | None
    ) -> None:  # fmt: skip
        first = plan.narrow(x, 1, 0, n)
        plan.run(scaled_square, first, w, 1.0, y)
        if sizes is not None:
            plan.run(torch.abs, first, out=sizes)

    def back(
        plan: Plan, dy: Tensor | None, drest: Tensor | None, x: Tensor, w: Tensor | None, sizes: Tensor,
        n: int, dx: Tensor | None, dw: Tensor | None,
    ) -> None:  # fmt: skip
        plan.run(fill, dy, drest, x, w, sizes, n, dx, dw)

    def fill(dy: Any, drest: Any, x: Any, w: Any, sizes: Any, n: int, dx: Any, dw: Any) -> None:
        if dx is not None:
            scale = 1 if w is None else w
            dx[:, :n] = 0 if dy is None else 2 * x[:, :n].sign() * sizes * scale * dy
            dx[:, n:] = 0 if drest is None else drest
        if dw is not None:
            dw.copy_((sizes.square() * dy).sum(0))

    return kernel_op(
        "test_view",
        results=made,
        forward=square,
        backward=back,
        keeps=lambda x, w, n: (x.new_empty(x.shape[0], n),),
        kept=("sizes",),
        depends={"y": ("x", "w"), "rest": ("x",)},
        views={"rest": lambda x, n: x.narrow(1, n, x.shape[1] - n)},
        materialize=False,
    )


viewing = gives_a_view()


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("wants", [(True, True), (True, False), (False, True), (False, False)])
def test_a_result_that_is_a_view(wants: tuple[bool, bool], backend: str | None) -> None:
    """In the argument's memory, and what arrives for it reaches the same backward; also of it alone."""
    call = torch.compile(viewing, fullgraph=True, backend=backend) if backend else viewing
    x, w = torch.randn(3, 5, requires_grad=wants[0]), torch.randn(2, requires_grad=wants[1])
    asked = [t for t in (x, w) if t.requires_grad]
    for _ in range(3):  # planned, recorded, replayed
        y, rest = call(x, w, 2)
        torch.testing.assert_close((y, rest), (w * x[:, :2].square(), x[:, 2:]))
        assert rest.data_ptr() == x[:, 2:].data_ptr()
        assert (y.requires_grad, rest.requires_grad) == (any(wants), wants[0])
        for loss in ((0, 1), (0,), (1,)):
            mine, plain = call(x, w, 2), (w * x[:, :2].square(), x[:, 2:])
            sums = [sum(ys[i].pow(3).sum() for i in loss) for ys in (mine, plain)]
            if not all(isinstance(s, Tensor) and s.requires_grad for s in sums):
                continue
            got, want = (torch.autograd.grad(s, asked, materialize_grads=True) for s in sums)
            torch.testing.assert_close(got, want)
    with torch.no_grad():
        assert call(x, None, 2)[1].data_ptr() == x[:, 2:].data_ptr()


def test_the_registered_op_of_one_with_a_view_returns_none() -> None:
    x, w = torch.randn(3, 5, requires_grad=True), torch.randn(2, requires_grad=True)
    torch.library.opcheck(viewing.traced.forward, (x, w, 2, True, ""))
    torch.library.opcheck(viewing.traced.forward, (x.detach(), None, 2, False, ""))
    (dx,) = torch.autograd.grad(viewing.traced.forward(x, w, 2, True, "")[0].sum(), x)
    torch.testing.assert_close(dx, torch.cat((2 * w * x[:, :2], torch.zeros(3, 3)), 1))


def test_a_second_derivative_through_a_view_is_refused_clearly() -> None:
    x, dy = torch.randn(3, 5, requires_grad=True), torch.ones(3, 3, requires_grad=True)
    for call in (viewing, lambda *args: viewing.traced(args, "", True)):
        (dx,) = torch.autograd.grad(call(x, None, 2)[1], x, dy, create_graph=True)
        with pytest.raises(RuntimeError, match="can't be differentiated twice"):
            torch.autograd.grad(dx.sum(), dy)


def test_zeros_for_a_view_are_refused() -> None:
    with pytest.raises(TypeError, match="materialize=False"):
        kernel_op(
            "test_zeros", results=results, forward=forward, names=("y", "s"), views={"v": lambda x: x}
        )  # fmt: skip


def test_an_op_whose_derivative_is_made_of_ops() -> None:
    def made(x: Tensor, factor: float) -> Tensor:
        return torch.empty_like(x)

    def scale(plan: Plan, x: Tensor, factor: float, y: Tensor) -> None:
        plan.run(torch.mul, x, factor, out=y)

    def derivative(dy: Tensor, factor: float, wanted: Sequence[str]) -> dict[str, Tensor]:
        assert list(wanted) == ["x"]
        return {"x": scaled(dy, factor)}

    scaled = kernel_op(
        "test_scale", results=made, forward=scale, derivative=derivative, gradients={"x": torch.empty_like}
    )
    x = torch.randn(5, requires_grad=True)
    for call in (scaled, torch.compile(scaled, fullgraph=True, backend="aot_eager")):
        y = call(x, 3.0)
        (dx,) = torch.autograd.grad(y, x, torch.ones(5))
        torch.testing.assert_close(dx, torch.full((5,), 3.0))
    dy = torch.ones(5, requires_grad=True)
    (dx,) = torch.autograd.grad(scaled(x, 3.0), x, dy, create_graph=True)
    (twice,) = torch.autograd.grad(dx.sum(), dy)
    torch.testing.assert_close(twice, torch.full((5,), 3.0))
