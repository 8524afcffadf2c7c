"""Every op's own candidates in plain PyTorch pass all that a contest's verification asks of them."""

import pytest

import bakeoff.ops  # noqa: F401  registers them
from bakeoff.apps.bench.suites import shrunk
from bakeoff.select import Case, registry
from bakeoff.select.contests.examine import examine
from bakeoff.select.contests.verify import verify, yardsticks


def cells() -> list[tuple[str, str, Case]]:
    """Each with the smallest case that it takes, fewer rows of it."""
    found = []
    for op in (op for op in registry.values() if op.home.startswith("bakeoff.ops.")):
        plain = [c for c in op.candidates if c.launches is None and not c.compiles and c is not op.incumbent]
        own = [c for c in plain if not c.third_party and not c.baseline]
        cases = [shrunk(op, Case(case.args, "cpu", case.name), 1 << 12) for case in op.cases() if own]
        cases.sort(key=lambda case: sum(meta.numel for meta in case.tensors.values()))
        for candidate in own:
            case = next((case for case in cases if not candidate.reasons(case)), None)
            if case is not None:
                found.append((op.name, candidate.name, case))
    return found


CELLS = cells()


@pytest.mark.parametrize(("op_name", "name", "case"), CELLS, ids=[f"{op}-{name}" for op, name, _ in CELLS])
def test_candidates_in_plain_pytorch_are_taken_for_honest(op_name: str, name: str, case: Case) -> None:
    op = registry[op_name]
    candidate = op.candidate(name)
    for i, stick in enumerate(yardsticks(op, op.bucket(case), case)):
        verify(op, candidate, [stick])
        if i == 0:
            examine(op, candidate, stick)


def test_there_are_some() -> None:
    found = {(op, name) for op, name, _ in CELLS}
    assert {("memory_scan", "chunked"), ("pole_scan", "scan"), ("memory_update", "manual")} <= found
