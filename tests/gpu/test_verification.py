"""Every op's own candidates pass all that a contest's verification asks of them."""

import re

import pytest
import torch

import bakeoff.ops  # noqa: F401  registers them
from bakeoff.apps.bench.suites import shrunk
from bakeoff.select import Candidate, Case, Op, registry
from bakeoff.select.contests.examine import examine
from bakeoff.select.contests.judge import Inaccurate
from bakeoff.select.contests.verify import Rejected, verify, yardsticks
from tests.unit import zoo

ELEMENTS = 1 << 20
_IN_FLOAT32 = "in float32, where scores of tens make weights that are 4e-6 off, and another kernel's less"
_FROM_LSE = (
    "the backward takes weights from lse, which float32 rounds: 9e-6 off where scores pass 100, more than "
    "was allowed on an H100, though not on an H200"
)
APART = {
    ("adamw_", "fused"): (
        "124M fp32",
        "new (exp_avg_sq|params|sums) is wrong",
        "its 1 - beta2 is 1 - float32(0.999), 1.29e-5 less than 0.001, and with it what a gradient rules",
    ),
    ("attention", "math"): ("", "output is wrong: rms error", _IN_FLOAT32),
    ("attention", "flex"): ("", "output is wrong: rms error", _IN_FLOAT32),
    ("dilated_attention", "efficient"): (
        "fp32",
        "gradient of q is wrong: gain error",
        "PyTorch's kernel makes the whole gradient 6.5e-7 too small or large in float32",
    ),
    ("dilated_attention", "fused"): ("", "gradient of v is wrong: max error", _FROM_LSE),
    ("dilated_attention", "cuda"): ("", "gradient of v is wrong: max error", _FROM_LSE),
    ("byte_spectral", "triton"): (
        "",
        "gradient of window is wrong: rms error",
        "a term sums all features of a position, 17 times what eager adds at once, and terms of 3e4 cancel",
    ),
}
"""Honest candidates that are less exact than eager all the same: a case at which one is always rejected, if
any, for what, and why. At other cases it may be, for the same."""
LONG = {
    (
        "memory_scan",
        "compiled",
    ): "torch.compile unrolls the loop over chunks and takes minutes",
}
OWN = {name: op for name, op in registry.items() if op.home.startswith("bakeoff.ops.")}


def cells() -> list[object]:
    found: list[object] = []
    for op in OWN.values():
        for i, case in enumerate(op.cases()):
            small = shrunk(op, Case(case.args, "cuda:0", case.name), ELEMENTS)
            for candidate in op.candidates:
                ours = not candidate.third_party and not candidate.baseline
                if (op.name, candidate.name) in LONG:
                    continue
                if ours and candidate is not op.incumbent and (i == 0 or candidate.name != "compiled"):
                    label = f"{op.name}-{case.name}-{candidate.name}".replace(" ", "_")
                    often = i == 0 or (candidate.launches is not None and "10,000" not in case.name)
                    marks = () if often else pytest.mark.exhaustive
                    found.append(pytest.param(op.name, small, candidate.name, id=label, marks=marks))
    return found


def rejected(op: Op, candidate: Candidate, case: Case) -> str:
    """Why its results are refused, or nothing."""
    try:
        verify(op, candidate, yardsticks(op, op.bucket(case), case))
    except Inaccurate as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("op_name", "case", "name"), cells())
def test_verification_takes_no_honest_candidate_for_a_bad_one(op_name: str, case: Case, name: str) -> None:
    """What torch.compile makes is tried at one case an op: each takes it half a minute. PyTorch's own kernels
    are tried at one, too, unless all are asked for, and so are lists of 10,000 tensors."""
    op = OWN[op_name]
    candidate = op.candidate(name)
    if candidate.reasons(case):
        return
    if (op_name, name) in APART:
        always, rejection, _ = APART[op_name, name]
        found = rejected(op, candidate, case)
        assert re.match(rejection, found) if found else case.name != always, found
        return
    for i, stick in enumerate(yardsticks(op, op.bucket(case), case)):
        verify(op, candidate, [stick])
        if i == 0:
            examine(op, candidate, stick)


def test_every_op_is_here() -> None:
    assert {"rms_norm", "adamw_", "dilated_attention", "norm_linear"} <= {*OWN}


def _on_a_side_stream(waits: bool, joins: bool) -> Candidate:
    side = torch.cuda.Stream()

    def call(x: torch.Tensor, w: torch.Tensor, flag: object = None) -> torch.Tensor:
        current = torch.cuda.current_stream()
        y = torch.empty_like(x)
        if waits:
            side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(20):
                torch.mul(torch.tanh(x), w, out=y)
        y.record_stream(side)
        if joins:
            current.wait_stream(side)
        return y

    return Candidate("side", call)


@pytest.mark.parametrize(("waits", "joins"), [(True, True), (False, False), (True, False), (False, True)])
def test_work_left_on_a_side_stream_is_seen(waits: bool, joins: bool) -> None:
    case = Case(zoo.case(2048, 2048, grad=False).args, "cuda:0")
    op = zoo.op(_on_a_side_stream(waits, joins))
    if waits and joins:
        verify(op, op.by_name["side"], yardsticks(op, case))
    else:
        with pytest.raises(Rejected):
            verify(op, op.by_name["side"], yardsticks(op, case))
