"""Plans: what a planner says is done, recorded on the second call of a kind, and replayed from then on."""

import ctypes
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bakeoff.kernels.counter import launches
from bakeoff.kernels.plan import Plan, Planned

pytest.importorskip("triton")


class Compiled(NamedTuple):
    kernel: "Adder"

    def replay(self, grid: str, arguments: str, prefix: str) -> tuple[str, dict[str, Any]]:
        return f"{prefix}run({arguments})", {f"{prefix}run": self.kernel.run}


class Adder:
    """A kernel for the CPU: out = a + b + number, over float32 elements at addresses."""

    runtime = ("a", "b", "out", "count", "number")

    def __init__(self) -> None:
        self.recordable = True

    def run(self, a: int, b: int | None, out: int, count: int, number: float) -> None:
        kind = ctypes.c_float * count
        left, into = kind.from_address(a), kind.from_address(out)
        right = [0.0] * count if b is None else kind.from_address(b)
        for i in range(count):
            into[i] = left[i] + right[i] + number

    def __call__(self, grid: tuple[int, ...], /, **named: Any) -> Compiled | None:
        del grid
        values = [named[name] for name in self.runtime]
        self.run(*[v.data_ptr() if isinstance(v, Tensor) else v for v in values])
        aligned = all(v.data_ptr() % 16 == 0 for v in values if isinstance(v, Tensor))
        return Compiled(self) if aligned and self.recordable else None


class Planner:
    """a + b + number into y, where b may be absent; counts how often it is asked."""

    def __init__(self) -> None:
        self.kernel = Adder()
        self.asked = 0

    def planned(self) -> Planned:
        def plan_sum(plan: Plan, a: Tensor, b: Tensor | None, number: float, y: Tensor) -> None:
            self.asked += 1
            a = plan.contiguous(a)
            plan.launch(self.kernel, (1,), a=a, b=b, out=y, count=y.numel(), number=number)

        return Planned(plan_sum, {"a": "Tensor", "b": "Tensor?", "number": "", "unused": "", "y": "new"})


def called(planned: Planned, a: Tensor, b: Tensor | None = None, number: float = 0.0) -> Tensor:
    y = torch.full(a.shape, float("nan"))
    planned.run(a, b, number, "unused", y)
    return y


def test_the_third_call_of_a_kind_needs_no_planner() -> None:
    planner = Planner()
    planned = planner.planned()
    for turn in range(5):
        a, b = torch.randn(4, 8), torch.randn(4, 8)
        before = launches()
        torch.testing.assert_close(called(planned, a, b, 2.0), a + b + 2.0)
        assert planner.asked == min(turn + 1, 2)
        assert launches() == before + (turn >= 2)  # the toy counts only what the plan replays


@pytest.mark.parametrize("change", ["shape", "strides", "absent", "number", "dtype"])
def test_another_kind_is_planned_anew(change: str) -> None:
    planner = Planner()
    planned = planner.planned()
    a, b = torch.randn(4, 8), torch.randn(4, 8)
    for _ in range(3):
        called(planned, a, b, 2.0)
    other = {
        "shape": (torch.randn(2, 8), torch.randn(2, 8), 2.0),
        "strides": (torch.randn(8, 4).t(), b, 2.0),
        "absent": (a, None, 2.0),
        "number": (a, b, 3.0),
        "dtype": (a, b.double().float(), 2.0),  # the same kind
    }[change]
    got = called(planned, *other)
    want = other[0] + (0 if other[1] is None else other[1]) + other[2]
    torch.testing.assert_close(got, want)
    assert planner.asked == (2 if change == "dtype" else 3)


def test_copies_are_replayed() -> None:
    planner = Planner()
    planned = planner.planned()
    for _ in range(4):
        a = torch.randn(8, 4).t()
        torch.testing.assert_close(called(planned, a, None, 1.0), a + 1)
    assert planner.asked == 2


def test_a_misaligned_call_is_planned_each_time_and_disturbs_no_other() -> None:
    planner = Planner()
    planned = planner.planned()
    aligned, base = torch.randn(8), torch.randn(9)
    for _ in range(3):
        called(planned, aligned)
    torch.testing.assert_close(called(planned, base[1:]), base[1:])
    assert planner.asked == 3
    torch.testing.assert_close(called(planned, aligned), aligned)
    assert planner.asked == 3


def test_a_part_of_a_tensor_is_replayed_and_its_address_checked() -> None:
    kernel, asked = Adder(), []

    def plan_sum(plan: Plan, a: Tensor, y: Tensor) -> None:
        asked.append(a)
        plan.launch(
            kernel, (1,), a=plan.narrow(a, 0, 4, 4), b=plan.narrow(a, 0, 8, 4), out=y, count=4, number=0.0
        )

    planned = Planned(plan_sum, {"a": "Tensor", "y": "new"})
    for shift in (0, 0, 0, 0, 1, 0):
        a, y = torch.randn(13)[shift : shift + 12], torch.empty(4)
        planned.run(a, y)
        torch.testing.assert_close(y, a[4:8] + a[8:])
    assert len(asked) == 3  # twice, and where the address is not aligned

    def late(plan: Plan, a: Tensor, y: Tensor) -> None:
        plan.launch(kernel, (1,), a=a, b=None, out=y, count=4, number=0.0)
        plan.narrow(a, 0, 4, 4)

    planned, a = Planned(late, {"a": "Tensor", "y": "new"}), torch.randn(12)
    planned.run(a, torch.empty(4))
    with pytest.raises(RuntimeError, match="must narrow before it launches"):
        planned.run(a, torch.empty(4))


def test_what_can_not_be_recorded_is_planned_each_time() -> None:
    planner = Planner()
    planner.kernel.recordable = False
    planned = planner.planned()
    for turn in range(4):
        a = torch.randn(4)
        torch.testing.assert_close(called(planned, a), a)
        assert planner.asked == turn + 1


def test_workspace_and_functions_of_pytorch_are_replayed_in_order() -> None:
    kernel = Adder()
    asked = []

    def plan_it(plan: Plan, a: Tensor, y: Tensor) -> None:
        asked.append(1)
        partial, shift = plan.empty((2, 4), torch.float32), plan.constant(torch.full((4,), 5.0))
        plan.run(Tensor.zero_, partial)
        plan.launch(kernel, (1,), a=a, b=shift, out=partial, count=4, number=1.0)
        total = plan.derive(torch.sum, partial, dim=0)
        plan.launch(kernel, (1,), a=total, b=None, out=y, count=4, number=0.5)

    planned = Planned(plan_it, {"a": "Tensor", "y": "new"})
    for _ in range(4):
        a, y = torch.randn(4), torch.empty(4)
        planned.run(a, y)
        torch.testing.assert_close(y, a + 6.5)
    assert len(asked) == 2


def test_a_tensor_from_elsewhere_is_refused() -> None:
    kernel = Adder()

    def plan_it(plan: Plan, a: Tensor, y: Tensor) -> None:
        plan.launch(kernel, (1,), a=a * 2, b=None, out=y, count=4, number=0.0)

    planned = Planned(plan_it, {"a": "Tensor", "y": "new"})
    planned.run(torch.randn(4), torch.empty(4))
    with pytest.raises(RuntimeError, match="a is a tensor that this plan doesn't know: make it by plan"):
        planned.run(torch.randn(4), torch.empty(4))


def test_a_conjugate_is_no_plain_complex_tensor() -> None:
    kernel = Adder()

    def plan_it(plan: Plan, z: Tensor, y: Tensor) -> None:
        plan.launch(kernel, (1,), a=plan.reals(z), b=None, out=y, count=y.numel(), number=0.0)

    planned = Planned(plan_it, {"z": "Tensor", "y": "new"})
    for conjugated in (False, False, False, True, False, True):
        z = torch.randn(4, dtype=torch.complex64)
        z = z.conj() if conjugated else z
        y = torch.empty(4, 2)
        planned.run(z, y)
        torch.testing.assert_close(y, torch.view_as_real(z.resolve_conj()))


def test_a_planner_that_asks_for_an_unknown_value_is_refused() -> None:
    def plan_it(plan: Plan, gate: Tensor) -> None: ...

    with pytest.raises(TypeError, match="asks for \\['gate'\\], not in"):
        Planned(plan_it, {"x": "Tensor"})


def test_plans_do_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bakeoff.kernels.plan._MOST_PLANS", 8)
    planner = Planner()
    planned = planner.planned()
    for size in range(1, 50):
        for _ in range(2):
            called(planned, torch.randn(size))
        assert len(planned._plans) <= 8
