"""rotary_append_ on a CUDA device: the op's grid, graph capture, no wait."""

import pytest
import torch

from bakeoff.ops.rotary_append import OP, rotary_append_
from bakeoff.ops.rotary_append.reference import reference
from bakeoff.select import using
from bakeoff.select.contests.draw import inputs
from bakeoff.select.contests.verify import verify, yardsticks

CASES = {case.name: case for case in OP.cases()}


@pytest.mark.parametrize("name", CASES)
def test_passes_the_contest_verification(name):
    case = CASES[name]
    _, deterministic = verify(OP, OP.candidate("triton"), yardsticks(OP, OP.bucket(case), case))
    assert deterministic


def test_a_graph_follows_the_place():
    args = inputs(OP, CASES["llm-med small, 64 rows"], 0)
    with using(regime="graph"):
        for _ in range(2):
            rotary_append_(*args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = rotary_append_(*args)
    for at in (0, 17, 335):
        args[-1].fill_(at)
        want = reference(*args)
        graph.replay()
        for mine, expected in zip((args[3], args[4], captured), want, strict=True):
            torch.testing.assert_close(mine, expected, rtol=2**-7, atol=2**-7)


def test_the_host_does_not_wait():
    args = inputs(OP, CASES["odd"], 0)
    rotary_append_(*args, impl="triton")
    try:
        torch.cuda.set_sync_debug_mode("error")
        rotary_append_(*args, impl="triton")
        rotary_append_(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
