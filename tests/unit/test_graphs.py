"""Whole-step capture as far as it goes without CUDA: the refusal, and how two steps are compared."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer

from bakeoff.errors import BakeoffError
from bakeoff.graphs import KEEPS_PINNED, NotCapturable, capture_step, forbid_sync
from bakeoff.graphs.capture import CapturedStep
from bakeoff.graphs.watch import Watched, compare, watching
from bakeoff.optim import AdamW


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("without_cuda")
def test_without_cuda_the_caller_hears_why_and_runs_uncaptured() -> None:
    with pytest.raises(NotCapturable, match="needs CUDA") as caught:
        capture_step(lambda x: x)
    assert isinstance(caught.value, BakeoffError)
    assert not caught.value.ran
    with pytest.raises(ValueError, match="warmup=2 must be at least 3"):
        capture_step(lambda x: x, warmup=2)


@pytest.mark.usefixtures("without_cuda")
def test_forbid_sync_does_nothing_without_cuda() -> None:
    with forbid_sync():
        assert torch.ones(2).sum().item() == 2.0


def watched(step_rate: float, rows: int = 4, extra: bool = False) -> Watched:
    """What the profiler tells of one small training step."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=step_rate)
    seen = Watched()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, record_shapes=True, acc_events=True) as profiler:
        y: Tensor = model(torch.ones(rows, 3))
        if extra:
            y = y.tanh()
        y.sum().backward()
        optimizer.step()
    seen.read(profiler.profiler.kineto_results.experimental_event_tree())
    return seen


@pytest.mark.parametrize(
    ("around", "refused"), [("aten::to", True), ("aten::split_with_sizes_copy", not KEEPS_PINNED)]
)
def test_copies_from_host_memory_are_refused_but_for_those_that_a_capture_keeps(
    around: str, refused: bool
) -> None:
    def event(name: str, children: list[Any], *devices: str) -> Any:
        inputs = [SimpleNamespace(device=torch.device(d), dtype="float", sizes=[1]) for d in devices]
        tag, fields = SimpleNamespace(name="TorchOp"), SimpleNamespace(inputs=inputs)
        return SimpleNamespace(name=name, tag=tag, children=children, extra_fields=fields, start_time_ns=0)

    seen = Watched()
    seen.read([event(around, [event("aten::_to_copy", [event("aten::copy_", [], "cuda", "cpu")])])])
    assert [name for name, _ in seen.ops] == [around, "aten::_to_copy", "aten::copy_"]
    assert bool(seen.host_copy) is refused


def test_equal_steps_compare_equal_and_are_seen_backward_and_all() -> None:
    one, two = watched(0.1), watched(0.1)
    compare(one.ops, two.ops)
    names = [name for name, _ in one.ops]
    assert names.index("aten::linear") < names.index("aten::sum") < names.index("aten::mm")
    assert one.on_device == set()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"step_rate": 0.05}, r"an argument changes from -0\.1 to -0\.05 between two steps"),
        ({"step_rate": 0.1, "rows": 5}, r"an argument changes from .*4.* to .*5"),
        ({"step_rate": 0.1, "extra": True}, r"where the next runs aten::tanh"),
    ],
)
def test_a_step_that_differs_is_named(other: dict[str, float], says: str) -> None:
    with pytest.raises(NotCapturable, match=says) as caught:
        compare(watched(0.1).ops, watched(**other).ops)  # type: ignore[arg-type]
    assert caught.value.op.startswith("aten::")


@pytest.mark.parametrize(
    ("did", "says"),
    [
        (
            {"waits": ["loop.py:3: x.item()"], "on_device": {"aten::item"}},
            r"waits .*\[aten::item at loop.py:3",
        ),
        ({"host_copy": "aten::copy_"}, r"copies from host memory.*\[aten::copy_\]"),
        ({"cpu_random": True}, "random numbers on the CPU"),
        (
            {"optimizers": [torch.optim.Adam([nn.Parameter(torch.ones(1))])]},
            r"Adam\(\.\.\., capturable=True\)",
        ),
    ],
)
def test_what_a_graph_can_not_do_is_refused(did: dict[str, Any], says: str) -> None:
    seen = Watched()
    seen.refuse()
    for name, value in did.items():
        setattr(seen, name, value)
    with pytest.raises(NotCapturable, match=says):
        seen.refuse()


def test_an_optimizer_s_numbers_are_known_and_its_tensors_are_not() -> None:
    seen = Watched()
    parameter = nn.Parameter(torch.ones(1))
    seen.optimizers = [torch.optim.SGD([parameter], lr=torch.tensor(0.1), momentum=0.9)]
    numbers = {name: value for _, _, name, value in seen.numbers()}
    assert numbers["momentum"] == 0.9
    assert "lr" not in numbers


def test_a_rate_that_replays_read_may_change_and_betas_may_not() -> None:
    """As a scheduler around the captured step changes them, after the step that was watched."""
    stepper = AdamW([nn.Parameter(torch.ones(3))], lr=1e-3)
    (group,) = stepper.param_groups
    seen = Watched()
    seen.optimizers = [stepper]
    captured: Any = CapturedStep.__new__(CapturedStep)  # the constructor asks for CUDA
    captured._numbers = seen.numbers()
    group["lr"] = 5e-4
    captured._refuse_new_numbers()
    group["betas"] = (0.8, 0.999)
    with pytest.raises(NotCapturable, match=r"betas changed from \(0\.9, 0\.999\) to .*leave it, make"):
        captured._refuse_new_numbers()


@pytest.mark.parametrize("assign", ["setitem", "update", "merge"])
def test_every_assignment_of_a_rate_reaches_its_mirror(assign: str) -> None:
    (group,) = AdamW([nn.Parameter(torch.ones(3))], lr=1e-3).param_groups
    mirror = group.rates[torch.device("cpu")] = torch.zeros(())  # type: ignore[attr-defined]
    for value in (0.5, torch.tensor([0.25])):
        if assign == "update":
            group.update(lr=value)
        elif assign == "merge":
            group |= {"lr": value}
        else:
            group["lr"] = value
        assert mirror.item() == float(value)


def test_a_step_that_does_more_than_the_one_before_is_named() -> None:
    ops = [("aten::mul", ["f[2]"]), ("aten::add", ["f[2]"])]
    for one, other in ((ops, ops[:1]), (ops[:1], ops)):
        with pytest.raises(NotCapturable, match=r"one step runs \d operations, the next \d"):
            compare(one, other)


def test_watching_leaves_no_hook_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bakeoff.graphs.watch.sync_mode", contextlib.nullcontext)  # it needs CUDA
    before = list(optimizer._global_optimizer_pre_hooks)
    with watching():
        pass
    assert list(optimizer._global_optimizer_pre_hooks) == before
