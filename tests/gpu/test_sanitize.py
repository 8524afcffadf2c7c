"""No kernel reads or writes beyond a tensor, and none has a race in shared memory."""

import pytest

from tests.gpu.sanitize import examine, own_ops, sanitizer

pytestmark = [
    pytest.mark.skipif(sanitizer() is None, reason="needs compute-sanitizer, which CUDA's toolkit brings"),
    pytest.mark.timeout(1000),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("op", own_ops())
def test_clean(op: str, tool: str) -> None:
    report = examine(tool, op, 900.0)
    assert report.problem == ""
    assert report.launches > 0
    assert all(report.calls.values())
