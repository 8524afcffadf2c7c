"""dilated_attention's CUDA C++, built for the GPUs it is meant for, which Triton can't compile for."""

import re

import pytest
import torch

from bakeoff.kernels.cuda import options
from bakeoff.ops.dilated_attention.cuda.launch import SOURCE, macros, shared_bytes
from nvrtc import build

LEAST_SHARED = 48 << 10  # that every GPU gives a block
KERNELS = {False: {"attend"}, True: {"query_slopes", "key_slopes"}}
FIRST = [("sm_60", 64), ("sm_60", 256), ("sm_90", 64)]
OTHERS = [(target, D) for target in ("sm_60", "sm_61", "sm_70", "sm_90") for D in (16, 48, 64, 96, 128, 256)]


@pytest.mark.kernel(of=lambda **parameters: tuple(parameters.items()))
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("target", "D"),
    [*FIRST, *[pytest.param(*given, marks=pytest.mark.exhaustive) for given in OTHERS if given not in FIRST]],
)
def test_stays_in_registers_and_in_48_kib(target: str, D: int, backward: bool) -> None:
    given = macros(D, torch.float16, causal=True, backward=backward)
    built = build(SOURCE, [*options(given)], target)
    assert set(built) == KERNELS[backward]
    assert shared_bytes(D, backward=backward) <= LEAST_SHARED
    for kernel in built.values():
        assert kernel.spills <= 32  # of the stack, which divisions ask for on the oldest
        assert kernel.registers * given["THREADS"] <= 64 << 10
        assert re.search(rf"\.target {target}\b", kernel.assembly)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_bfloat16_from_ampere_on(backward: bool) -> None:
    """Before, there is no instruction that rounds to it."""
    given = [*options(macros(16, torch.bfloat16, causal=False, backward=backward))]
    assert set(build(SOURCE, given, "sm_80")) == KERNELS[backward]
    with pytest.raises((RuntimeError, AssertionError)):
        build(SOURCE, given, "sm_60")
