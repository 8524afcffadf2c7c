"""Calls that a user's own CUDA graph captures: the graph regime decides, and no decision leaks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bakeoff.select import Candidate, Case, Op, find_op
from bakeoff.select.choose import dispatch as dispatch_module
from bakeoff.select.choose import hot, policy
from bakeoff.select.choose.dispatch import decide
from bakeoff.select.choose.policy import Settings, using
from bakeoff.select.declare.key import REGIMES, key
from tests.unit import test_select_policy as toys
from tests.unit import zoo
from tests.unit.verdicts import no_verdicts

CASE = msgspec.structs.replace(zoo.case(4, 8, grad=False), device="cuda:0")
CALL = ("the fingerprint of a call",)


class Capture:
    """Whether a graph is being captured, as CUDA would say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = False
        monkeypatch.setattr(hot, "capturing", lambda: self.on)
        monkeypatch.setattr(hot, "_stream_captures", lambda: self.on)
        monkeypatch.setattr(dispatch_module, "_loads_under_capture", lambda: True)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    return Capture(monkeypatch)


@pytest.fixture(autouse=True)
def _empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with no_verdicts(tmp_path, monkeypatch):
        monkeypatch.setattr(policy.store, "agreed", {})  # no table is read, which would ask for a GPU
        yield


def graph(x: Any, w: Any, flag: Any = None) -> Any:
    return zoo.eager(x, w)


def op_with(**declared: Any) -> Op:
    """Its heuristic takes "graph" in the graph regime, plain PyTorch in others."""
    return zoo.op(
        Candidate("graph", graph, **declared),
        name="zoo_captured",
        heuristic=lambda case, regime: "graph" if regime == "graph" else "eager",
    )


def decided(op: Op, capture: Capture, case: Case = CASE) -> Any:
    """The implementation for a call now, by way of its fingerprint."""
    return decide(op, case, hot.under_capture(CALL) if capture.on else CALL)


def test_the_regime_under_capture_is_graph_on_cuda_alone(capture: Capture) -> None:
    for capture.on in (False, True):
        found = {regime: Settings(regime=regime).on("cuda:0") for regime in REGIMES}
        assert found == {
            "eager": "graph" if capture.on else "eager",
            "graph": "graph",
            "compiled": "compiled",
        }
        assert [Settings(regime=regime).on("cpu") for regime in REGIMES] == ["eager", "eager", "compiled"]


def test_the_heuristic_is_asked_for_the_graph_regime(capture: Capture) -> None:
    op = op_with(launches=zoo.launches)
    assert decided(op, capture) is zoo.eager
    capture.on = True
    assert decided(op, capture) is graph
    capture.on = False
    assert decided(op, capture) is zoo.eager
    assert hot.current()[CALL] is zoo.eager, "one memo holds both"
    assert hot.current()[hot.under_capture(CALL)] is graph


def test_the_graph_verdict_decides(capture: Capture) -> None:
    op = zoo.op(toys.noting("one"), toys.noting("two"), name="zoo_captured")
    rows = {}
    for regime, winner in (("eager", "two"), ("graph", "eager")):
        name = key(op, CASE, regime)
        rows[name] = msgspec.structs.replace(toys.verdict(op, winner, regime=regime), key=name)
    policy.store.agreed = rows
    assert decided(op, capture) is op.by_name["two"].implementation
    capture.on = True
    assert decided(op, capture) is zoo.eager


def test_what_may_break_a_capture_gives_way_to_what_warming_up_has_run(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a counter of launches it may be torch.compile or tune itself; and old drivers load nothing."""
    for declared, loads in (({}, True), ({"launches": zoo.launches}, False)):
        op = op_with(**declared)
        monkeypatch.setattr(dispatch_module, "_loads_under_capture", lambda loads=loads: loads)
        policy.forget()
        capture.on = True
        assert decided(op, capture) is zoo.eager, "nothing was warmed up: plain PyTorch"
        policy.forget()
        policy.memo(policy.current())[CALL] = warm = object()
        assert decided(op, capture) is warm


def test_who_asks_for_the_regime_or_the_candidate_gets_it(capture: Capture) -> None:
    op = op_with()
    capture.on = True
    with using(regime="graph"):
        assert decided(op, capture) is graph
    with zoo.registered(op), using(zoo_captured="graph"):
        assert decided(op, capture) is graph


def test_fingerprints_tell_capture_on_a_gpu_and_never_ask_on_the_cpu(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode():
        x = torch.empty(4, 8, device="cuda")
    op = op_with()
    plain = hot.fingerprint(op, (x, None))
    capture.on = True
    captured = hot.fingerprint(op, (x, None))
    assert captured == hot.under_capture(plain) != plain
    assert hot.before_capture(captured) == plain
    assert hot.before_capture(plain) is None

    def asked() -> bool:
        raise AssertionError

    monkeypatch.setattr(hot, "capturing", asked)
    monkeypatch.setattr(hot, "_stream_captures", asked)
    on_cpu = (torch.ones(4, 8), torch.ones(8), None)
    assert hot.fingerprint(op, on_cpu)
    assert [guard(on_cpu) for guard in hot._guard(op, on_cpu, graph)] == [graph]


def test_guards_tell_capture_on_a_gpu(capture: Capture) -> None:
    with FakeTensorMode():
        args = (torch.empty(4, 8, device="cuda"), torch.empty(8, device="cuda"), None)
    (outside,) = hot._guard(zoo.op(), args, zoo.eager)
    capture.on = True
    (inside,) = hot._guard(zoo.op(), args, graph)
    assert (outside(args), inside(args)) == (None, graph)
    capture.on = False
    assert (outside(args), inside(args)) == (zoo.eager, None)


def test_calls_with_lists_are_told_apart_too(capture: Capture) -> None:
    norm = find_op("global_norm")
    for device, apart in (("cuda", True), ("cpu", False)):
        with FakeTensorMode():
            listed = norm.with_lists(([torch.empty(3, 1000, device=device)], None, False, None, None, None))
        capture.on = False
        outside = hot.fingerprint(norm, listed)
        capture.on = True
        inside = hot.fingerprint(norm, listed)
        assert (inside == hot.under_capture(outside)) is apart
        assert (inside == outside) is not apart
