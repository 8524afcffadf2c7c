"""The memo: what a call is recognised by, whose decision it gets, and what is recorded all the same."""

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bakeoff.errors import PolicyError
from bakeoff.select import Op, call
from bakeoff.select.choose import dispatch as dispatch_module
from bakeoff.select.choose import hot
from bakeoff.select.choose.policy import using
from bakeoff.select.choose.tune import recording
from bakeoff.select.declare.key import key
from tests.unit import zoo
from tests.unit.test_select_dispatch import CountingDispatch, who
from tests.unit.test_select_dispatch import _empty as _empty
from tests.unit.test_select_dispatch import op as op
from tests.unit.test_select_dispatch import slow_path as slow_path
from tests.unit.test_select_policy import learn


def test_a_known_call_never_enters_dispatch(op: Op, slow_path: CountingDispatch) -> None:
    x, w = torch.randn(4, 8), torch.randn(8)
    for _ in range(5):
        call(op, x, w, None)
    assert slow_path.count == 1


def test_whatever_selection_depends_on_is_in_the_fingerprint(op: Op, slow_path: CountingDispatch) -> None:
    x, w = torch.randn(4, 8), torch.randn(8)
    others = [
        (torch.randn(5, 8), w),
        (x.double(), w.double()),
        (torch.randn(8, 4).t(), w),
        (torch.randn(4, 16)[:, :8], w),
        (x.clone().requires_grad_(), w),
        (x, torch.nn.Parameter(w)),
    ]
    call(op, x, w, None)
    for count, (a, b) in enumerate(others, start=2):
        call(op, a, b, None)
        call(op, a, b, None)
        assert slow_path.count == count
    count = slow_path.count
    with torch.no_grad():
        call(op, x, others[-1][1], None)
    assert slow_path.count == count + 1
    torch.use_deterministic_algorithms(True)
    call(op, x, w, None)
    assert slow_path.count == count + 2
    for more, flag in enumerate(("flag", True, 1, 1.0), start=3):
        for _ in range(3):
            call(op, x, w, flag)
        assert slow_path.count == count + more


def test_kinds_of_calls_seen_twice_need_no_fingerprint(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first four kinds; further ones still go by their fingerprint, and none is taken for another."""
    asked = 0
    real = hot.fingerprint

    def fingerprint(*args: Any) -> Any:
        nonlocal asked
        asked += 1
        return real(*args)

    w = torch.randn(8)
    kinds = [(torch.randn(rows, 8), w, flag) for rows in (1, 2, 3) for flag in (None, "flag")]
    for args in kinds * 2:
        call(op, *args)
    monkeypatch.setattr(hot, "fingerprint", fingerprint)
    for args in kinds:
        assert who(call(op, *args), *args[:2]) == "eager"
    assert asked == len(kinds) - 4


def test_one_tensor_passed_twice_is_a_kind_of_its_own(op: Op) -> None:
    x = torch.randn(8)
    for _ in range(3):
        assert who(call(op, x, x, None), x, x) == "eager"
        assert who(call(op, x, x.clone(), None), x, x) == "eager"
    learn(op, "two", rows=1)
    for _ in range(3):
        assert who(call(op, x, x, None), x, x) == who(call(op, x, x.clone(), None), x, x)


def test_a_tensor_in_a_number_s_place_is_never_compared(op: Op) -> None:
    """On a GPU that would make the host wait."""
    x, w, one = torch.randn(4, 8), torch.randn(8), torch.ones(())
    for _ in range(3):
        call(op, x, w, 1.0)

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} ran")

    with Watched():
        assert [guard((x, w, one)) for guard in hot.current()[op]] == [None]
        assert hot.known(op, (x, w, one)) is None


def test_a_nested_tensor_under_vmap_does_not_end_the_process() -> None:
    script = """
        import torch
        from bakeoff.ops import rms_norm

        x = torch.randn(4, 8)
        for _ in range(3):
            rms_norm(x)
        nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
        try:
            torch.func.vmap(rms_norm)(nested)
        except RuntimeError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "batched nested tensors" in done.stdout


def test_too_few_arguments_are_the_same_error_before_and_after_a_call(op: Op) -> None:
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match="zip") as cold:
        call(op, x)
    for _ in range(3):
        call(op, x, x[0], None)
    with pytest.raises(ValueError, match="zip") as warm:
        call(op, x)
    assert str(warm.value) == str(cold.value)


def test_settings_have_memos_of_their_own(op: Op, slow_path: CountingDispatch) -> None:
    x, w = torch.randn(4, 8), torch.randn(8)
    for _ in range(3):
        assert who(call(op, x, w, None), x, w) == "eager"
        with using(zoo_counting="two"):
            assert who(call(op, x, w, None), x, w) == "two"
    assert slow_path.count == 2


def test_new_verdicts_replace_remembered_decisions(op: Op) -> None:
    x, w = torch.randn(4, 8), torch.randn(8)
    assert who(call(op, x, w, None), x, w) == "eager"
    learn(op, "two")
    assert who(call(op, x, w, None), x, w) == "two"


def test_the_memo_is_bounded(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_module, "_MOST_REMEMBERED", 4)
    w = torch.randn(8)
    for rows in range(20):
        call(op, torch.randn(rows, 8), w, None)
    assert len(hot.process_memo) <= 4


def test_every_call_is_recorded_also_those_remembered_before(op: Op) -> None:
    x, w = torch.randn(4, 8), torch.randn(8)
    call(op, x, w, None)
    with recording() as recorded:
        call(op, x, w, None)
        call(op, x, w, None)
        call(op, torch.randn(5, 8), w, None)
    assert list(recorded) == [(key(op, zoo.case(n, 8, grad=False), "eager"), "cpu") for n in (4, 5)]
    with recording() as again:
        call(op, x, w, None)
    assert len(again) == 1


def test_what_backward_recomputes_is_recorded_in_autograds_threads_too(op: Op) -> None:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    with recording() as recorded:
        checkpoint(lambda a, b: call(op, a, b, None), x, w, use_reentrant=True).sum().backward()
        keys = [name for name, _ in recorded]
    assert keys == [key(op, zoo.case(4, 8, grad=grad), "eager") for grad in (False, True)]
    with recording() as recorded:
        import threading

        thread = threading.Thread(target=lambda: call(op, x, w, None))
        thread.start()
        thread.join()
    assert len(recorded) == 1


def test_strict_does_not_stop_the_step_that_tune_records(op: Op) -> None:
    x, w = torch.randn(4, 8), torch.randn(8)
    with using("strict"):
        with recording() as recorded:
            call(op, x, w, None)
        assert len(recorded) == 1
        with pytest.raises(PolicyError, match="no verdict"):
            call(op, x, w, None)


def test_calls_with_and_without_an_optional_tensor_are_both_remembered(
    op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided: list[Any] = []
    decide = dispatch_module.decide
    monkeypatch.setattr(
        dispatch_module,
        "decide",
        lambda *args: decided.append(args) or decide(*args),  # type: ignore[func-returns-value]
    )
    x, w = torch.randn(4, 8), torch.randn(8)
    for _ in range(3):
        call(op, x, w, None)
        call(op, x, w, torch.ones(8))
        call(op, x, w, 2.0)
    assert len(decided) == 3
