"""The CUDA C++ candidate of dilated_attention, emulated, against the float64 reference."""

import pytest
import torch

from bakeoff.ops.dilated_attention.cuda.launch import cuda
from tests.interp import emulated
from tests.interp.test_dilated_attention import compare, drawn

CASES = [
    # T, H, kv heads, D, segments, rates, causal, phase
    (70, 2, 2, 16, "16,32,64", "1,2,4", False, "mod"),
    (70, 2, 1, 20, "20,50", "1,3", True, "block"),
    (37, 1, 1, 70, "12,37", "2,4", True, "1;3"),
    (19, 1, 1, 130, "8,16", "1,2", False, "mod"),
    (1, 1, 1, 8, "4", "1", True, "mod"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_every_gradient(case, monkeypatch):
    T, H, kv, D, segments, rates, causal, phase = case
    emulated.emulate(monkeypatch, shared=48 << 10)
    inputs = drawn(T, H, kv, D)
    args = (segments, rates, causal, phase, "exact", None, None, True)
    compare(cuda, inputs, args)


def test_documents_packed_and_strided_heads(monkeypatch):
    emulated.emulate(monkeypatch, shared=48 << 10)
    q, k, v = (
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in drawn(60, 2, 2, 8)
    )
    cu = torch.tensor([0, 7, 7, 33, 55], dtype=torch.int32)
    compare(cuda, [q, k, v], ("8,24", "1,2", True, "mod", "exact", cu, 0.3, True))
