"""What a kernel op keeps for its backward and how gradients lie; what plans replay. PyTorch's calls stand in
for kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bakeoff.kernels.op import KernelOp, kernel_op
from bakeoff.kernels.plan import Plan, Planned

pytest.importorskip("triton")


def strided(t: Tensor) -> Tensor:
    return torch.empty_like(t)


def gated(seen: list[bool]) -> KernelOp:
    """out = (2 x) gate; y = 2 x is kept for the gate's gradient; whether it was is noted."""

    def results(x: Tensor, gate: Tensor | None) -> Tensor:
        del gate
        return strided(x)

    def keeps(x: Tensor, gate: Tensor | None) -> tuple[Tensor]:
        del gate
        return (strided(x),)

    def forward(plan: Plan, x: Tensor, gate: Tensor | None, out: Tensor, y: Tensor | None) -> None:
        seen.append(y is not None)
        double = plan.derive(torch.add, x, x)
        if y is not None:
            plan.run(Tensor.copy_, y, double)
        plan.run(Tensor.copy_, out, double if gate is None else plan.derive(torch.mul, double, gate))

    def backward(
        plan: Plan,
        x: Tensor,
        gate: Tensor | None,
        y: Tensor | None,
        dout: Tensor,
        dx: Tensor | None,
        dgate: Tensor | None,
    ) -> None:
        del x  # saved for its layout
        if dx is not None:
            gradient = dout if gate is None else plan.derive(torch.mul, dout, gate)
            plan.run(torch.add, gradient, gradient, out=dx)
        if dgate is not None:
            plan.run(torch.mul, dout, y, out=dgate)

    return kernel_op(
        f"test_gated_{len(_names)}",
        results=results,
        names=("out",),
        forward=forward,
        backward=backward,
        keeps=keeps,
        kept=("y",),
        kept_for=("gate",),
        gradients=dict.fromkeys(("x", "gate"), strided),
        like={"gate": "x"},
    )


_names: list[str] = []


@pytest.fixture
def op() -> tuple[KernelOp, list[bool]]:
    seen: list[bool] = []
    made = gated(seen)
    _names.append(made.declared.name)
    return made, seen


WANTED = [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("wanted", WANTED)
def test_what_is_kept_for_an_argument_is_made_where_its_gradient_is_wanted(
    op: tuple[KernelOp, list[bool]], wanted: tuple[bool, bool], compiled: bool
) -> None:
    call, seen = op
    x, gate = torch.randn(3, 4), torch.randn(4, 3).t()
    for t, want in zip((x, gate), wanted, strict=True):
        t.requires_grad_(want)
    run: Any = torch.compile(call.__call__, backend="aot_eager") if compiled else call
    for _ in range(3):  # the third call is replayed
        out = run(x, gate)
        torch.testing.assert_close(out, 2 * x * gate)
        leaves = [t for t in (x, gate) if t.requires_grad]
        if leaves:
            grads = torch.autograd.grad(out.sum(), leaves)
            exact = torch.autograd.grad((2 * x * gate).sum(), leaves)
            for mine, right in zip(grads, exact, strict=True):
                torch.testing.assert_close(mine, right)
                assert mine.stride() == x.stride()  # the gate's, too
    assert set(seen) == {wanted[1]}
    torch._dynamo.reset()


def test_nothing_is_kept_without_the_argument(op: tuple[KernelOp, list[bool]]) -> None:
    call, seen = op
    x = torch.randn(3, 4, requires_grad=True)
    (dx,) = torch.autograd.grad(call(x, None).sum(), x)
    torch.testing.assert_close(dx, torch.full((3, 4), 2.0))
    assert seen == [False]


def test_what_is_named_must_have_a_gradient() -> None:
    def results(x: Tensor) -> Tensor:
        return strided(x)

    def forward(plan: Plan, x: Tensor, y: Tensor) -> None: ...

    with pytest.raises(TypeError, match=r"kept_for and like name \['gate', 'x'\], which have no gradients"):
        kernel_op("test_wrong", results=results, forward=forward, like={"gate": "x"})


def scaled() -> KernelOp:
    """y = the sum of x^2; its gradient for dy = 1 is kept, and dx written over it."""

    def results(x: Tensor) -> Tensor:
        return x.new_empty(())

    def keeps(x: Tensor) -> tuple[Tensor]:
        return (torch.empty_like(x),)

    def forward(plan: Plan, x: Tensor, y: Tensor, slope: Tensor | None) -> None:
        plan.run(torch.sum, plan.derive(torch.mul, x, x), (), out=y)
        if slope is not None:
            plan.run(torch.mul, x, 2, out=slope)

    def backward(plan: Plan, x: Tensor, slope: Tensor, dy: Tensor, dx: Tensor | None) -> None:
        del x
        plan.run(torch.mul, slope, dy, out=dx)

    _names.append(f"test_scaled_{len(_names)}")
    return kernel_op(
        _names[-1], results=results, forward=forward, backward=backward, keeps=keeps, kept=("slope",),
        reuses={"x": "slope"},
    )  # fmt: skip


def test_a_gradient_is_written_over_what_was_kept_where_the_graph_goes() -> None:
    call = scaled()
    x, dy = torch.randn(5, requires_grad=True), torch.tensor(3.0)
    for stays in [True, False, True, True, False, False, True] * 2:  # in turn, also where plans are replayed
        y = call(x)
        assert y.grad_fn is not None
        kept = y.grad_fn.saved_tensors[1]
        place = kept.data_ptr()
        del kept
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=stays)
        torch.testing.assert_close(dx, 6 * x.detach())
        assert (dx.data_ptr() == place) is not stays
        if stays:
            (again,) = torch.autograd.grad(y, x, 2 * dy)
            torch.testing.assert_close(again, 12 * x.detach())
            torch.testing.assert_close(dx, 6 * x.detach())
            assert again.data_ptr() == place


def test_a_gradient_that_reuses_memory_inside_torch_compile_and_where_a_leaf_takes_it() -> None:
    call = scaled()
    x = torch.randn(5, requires_grad=True)
    run: Any = torch.compile(call.__call__, backend="aot_eager")
    for fn in (run, call):
        for _ in range(3):
            fn(x).backward()
    torch.testing.assert_close(x.grad, 12 * x.detach())
    torch._dynamo.reset()


def test_reuses_names_what_the_backward_asks_for() -> None:
    def results(x: Tensor) -> Tensor:
        return strided(x)

    def forward(plan: Plan, x: Tensor, y: Tensor) -> None: ...

    with pytest.raises(TypeError, match=r"reuses names \['gate', 'x'\], which the backward doesn't ask for"):
        kernel_op("test_wrong_reuse", results=results, forward=forward, reuses={"x": "gate"})


def test_plans_allocate_after_launches_and_leave_out_casts_to_the_same_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)

    def planner(plan: Plan, x: Tensor, out: Tensor) -> None:
        calls.append(x.dtype)
        wide = plan.derive(Tensor.float, x)
        plan.run(torch.mul, wide, 2, out=out)
        rest = plan.zeros(out.shape, torch.float32)  # after what runs
        plan.run(torch.add, rest, out, out=rest)
        plan.run(torch.add, plan.contiguous(x), rest, out=out)

    planned = Planned(planner, {"x": "Tensor", "out": "new"})
    for dtype in (torch.float32, torch.float16):
        for _ in range(4):
            x, out = torch.randn(5).to(dtype), torch.empty(5)
            planned.run(x, out)
            torch.testing.assert_close(out, 3 * x.float())
    assert len(calls) == 4  # twice a dtype, then without the planner


def test_reals_come_before_launches() -> None:
    def planner(plan: Plan, z: Tensor, out: Tensor) -> None:
        plan.run(Tensor.zero_, out)
        plan.reals(z)

    planned = Planned(planner, {"z": "Tensor", "out": "new"})
    planned.run(torch.zeros(3, dtype=torch.complex64), torch.empty(3))
    with pytest.raises(RuntimeError, match="must take reals before it launches"):
        planned.run(torch.zeros(3, dtype=torch.complex64), torch.empty(3))
