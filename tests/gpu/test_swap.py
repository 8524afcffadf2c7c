"""Swapped models on a GPU: verified in bfloat16, kernels launched, compiled, no host synchronisation."""

import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch

import bakeoff
from bakeoff.graphs.sync import sync_mode
from bakeoff.kernels.counter import launches

pytest.importorskip("transformers")

from tests.unit.swapped import FAMILIES, WINDOWED, gradients, made, tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_right(family: str) -> None:
    model, ids = made(family).to("cuda", torch.bfloat16), tokens(2, 64).cuda()
    wanted = {"attention": family not in WINDOWED}
    with bakeoff.swap(model, quiet=True, **wanted) as report, bakeoff.using("heuristic", regime="graph"):
        before = launches()
        report.verify(input_ids=ids, labels=ids)
        assert launches() > before


def test_compiled() -> None:
    model, ids = made("llama").to("cuda", torch.bfloat16), tokens(2, 64).cuda()
    report = bakeoff.swap(model, quiet=True)
    loss, _ = gradients(model, input_ids=ids, labels=ids)
    compiled, _ = gradients(torch.compile(model), input_ids=ids, labels=ids)
    torch.testing.assert_close(compiled, loss, rtol=2e-2, atol=2e-2)
    assert report.traced()["mlp"] == 2


def waits(step: Callable[[], object]) -> Counter[tuple[str, int]]:
    """The lines at which a step makes the host wait for the GPU, and how often."""
    with warnings.catch_warnings(record=True) as warned, sync_mode("warn"):
        warnings.simplefilter("always")
        step()
    return Counter((w.filename, w.lineno) for w in warned if "synchronizing CUDA" in str(w.message))


def test_the_host_does_not_wait() -> None:
    """But where the library's own code does: some of its versions look at positions for packed sequences."""
    model, ids = made("llama").to("cuda", torch.bfloat16), tokens(2, 64).cuda()

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    assert waits(lambda: ids.sum().item())
    step()
    own = waits(step)
    bakeoff.swap(model, quiet=True)
    step()
    assert not waits(step) - own


def test_memory_of_the_loss() -> None:
    """No logits of all tokens are held: 2 x 2048 tokens of 32,000 words are 500 MiB in float32."""
    settings = {"vocab_size": 32000, "max_position_embeddings": 2048}
    peaks = []
    for swap in (False, True):
        model, ids = made("llama", **settings).to("cuda", torch.bfloat16), tokens(2, 2048).cuda()
        if swap:
            bakeoff.swap(model, quiet=True, loss="require")
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        model(input_ids=ids, labels=ids).loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - held)
        del model
    assert peaks[1] < peaks[0] / 2
