"""byte_spectral's CUDA C++, built for old GPUs, which Triton can't compile for, and for new ones."""

import re

import pytest
import torch

from bakeoff.kernels.cuda import options
from bakeoff.ops.byte_spectral.cuda.launch import SOURCE, THREADS, macros, shared_bytes
from nvrtc import build

LEAST_SHARED = 48 << 10  # that every GPU gives a block
SHAPES = [  # C, W, K, D, features
    (1, 64, 32, 256, "magnitude"), (1, 64, 64, 0, "complex"), (4, 32, 16, 256, "log"),
    (3, 45, 21, 77, "magnitude"),
]  # fmt: skip
FIRST = [("sm_60", 0), ("sm_90", 0), ("sm_90", 1)]
OTHERS = [(target, n) for target in ("sm_60", "sm_70", "sm_90") for n in range(len(SHAPES))]


@pytest.mark.kernel(of=lambda **parameters: tuple(parameters.items()))
@pytest.mark.parametrize(
    ("target", "shape"),
    [*FIRST, *[pytest.param(*given, marks=pytest.mark.exhaustive) for given in OTHERS if given not in FIRST]],
)
def test_stays_in_registers_and_in_48_kib(target: str, shape: int) -> None:
    C, W, K, D, features = SHAPES[shape]
    built = build(SOURCE, [*options(macros(C, W, K, D, features, torch.float16))], target)
    assert set(built) == {"spectrum", "slopes"}
    assert shared_bytes(C, W, K, features) <= LEAST_SHARED
    for kernel in built.values():
        assert kernel.spills <= 32  # of the stack, which divisions ask for on the oldest
        assert kernel.registers * THREADS <= 64 << 10
        assert re.search(rf"\.target {target}\b", kernel.assembly)


def test_bfloat16_from_ampere_on() -> None:
    """Before, there is no instruction that rounds to it."""
    given = [*options(macros(1, 16, 9, 16, "magnitude", torch.bfloat16))]
    assert set(build(SOURCE, given, "sm_80")) == {"spectrum", "slopes"}
    with pytest.raises((RuntimeError, AssertionError)):
        build(SOURCE, given, "sm_60")
