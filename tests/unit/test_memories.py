"""The cases of `bakeoff.apps.bench.memories`; its times need a GPU."""

from bakeoff.apps.bench import memories
from bakeoff.ops.memory_scan import OP


def test_shortened_cases_keep_all_but_groups_and_tokens():
    for case in OP.cases():
        short = memories.shortened(case)
        assert short.q.shape[0] <= 4
        assert short.q.shape[1] <= 160
        assert short.memory_w1.shape[1:] == case.memory_w1.shape[1:]
        assert (short.chunk, short.read, short.needs_grad) == (case.chunk, case.read, case.needs_grad)
        OP.check(short)


def test_the_timed_cases_are_in_the_ops_grid():
    assert set(memories.TIMED) <= {case.name for case in OP.cases()}
