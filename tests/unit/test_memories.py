"""The cases of `bakeoff.apps.bench.memories`; its times need a GPU."""

from bakeoff.apps.bench import large_chunk, memories
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


def test_the_rate_of_known_flops():
    case = next(case for case in OP.cases() if case.name == "4x2048 512-512 chunk 2048")
    flops = OP.cost(case.without_grad()).flops
    assert flops == large_chunk.products(4, 2048, 512, 512)  # nine products each
    assert memories.rate(flops, 100.0, 773.1) == {"tflops": "387", "share": "0.500"}
    assert memories.rate(0, 100.0, 773.1) == {"tflops": "", "share": ""}
    flat = next(case for case in OP.cases() if case.name.endswith("orthogonal")).without_grad()
    assert OP.cost(flat).flops - flops == 4 * 2 * 5 * 3 * 2 * 512**3
