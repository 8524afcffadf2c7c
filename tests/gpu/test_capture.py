"""A CUDA graph captured without telling the selector: the graph regime decides, kernels may begin there."""

from dataclasses import replace

import torch

from bakeoff.kernels.counter import launches
from bakeoff.select import call, find_op, using


def test_an_unannounced_capture_runs_the_graph_regime_s_candidate() -> None:
    op = replace(
        find_op("rms_norm"), heuristic=lambda case, regime: "triton" if regime == "graph" else "eager"
    )
    x, weight = torch.randn(48, 1237, device="cuda"), torch.randn(1237, device="cuda")
    args = (x, weight, 1e-6, None, 0.0)
    with using("heuristic"):
        for _ in range(3):
            expected = call(op, *args)
        before = launches()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # nothing has compiled this kernel before
            y = call(op, *args)
        assert launches() == before + 1
        graph.replay()
        torch.testing.assert_close(y, expected)
        call(op, *args)
        assert launches() == before + 1, "outside of capture the eager regime's candidate still runs"


def test_an_unannounced_capture_leaves_torch_compile_to_those_who_warmed_it_up() -> None:
    op = replace(
        find_op("rms_norm"), heuristic=lambda case, regime: "compiled" if regime == "graph" else "eager"
    )
    args = (torch.randn(48, 1239, device="cuda"), torch.randn(1239, device="cuda"), 1e-6, None, 0.0)
    with using("heuristic"):
        expected = call(op, *args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call(op, *args)
        graph.replay()
        torch.testing.assert_close(y, expected)
