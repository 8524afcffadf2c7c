"""A marker for tests that compile with torch.compile on the CPU."""

import pytest

from bakeoff.select.declare.compiled import compiler_missing
from tests.unit import zoo

_missing = compiler_missing(zoo.case())
needs_compiler = pytest.mark.skipif(_missing is not None, reason=str(_missing))
