"""The Triton candidate of rotary_append_, interpreted, against the definition in float64."""

import pytest
import torch

from bakeoff.ops.rotary import rotary_tables
from bakeoff.ops.rotary_append import OP
from bakeoff.ops.rotary_append.reference import reference
from bakeoff.ops.rotary_append.triton import rotary_append
from bakeoff.select.contests.poison import Poison
from bakeoff.select.contests.verify import verify, yardsticks
from tests.cut import cut

BOUND = {torch.float32: 3e-7, torch.float16: 6e-4}
SHAPES = [  # B, T, H, K, D, R, S
    (1, 1, 8, 8, 48, 48, 20),
    (3, 1, 6, 2, 9, 8, 5),
    (2, 5, 3, 1, 10, 6, 7),
    (2, 3, 70, 35, 34, 34, 3),
    (1, 2, 1, 1, 2, 2, 4),
]


def made(B, T, H, K, D, R, S, dtype, at):
    q, k, v = torch.randn(B, T, H + 2 * K, D).to(dtype).split((H, K, K), 2)
    caches = [torch.randn(B, K, S, D).to(dtype) for _ in "kv"]
    return [q, k, v, *caches, *rotary_tables(torch.arange(3, 3 + T), R), torch.tensor([at])]


def assert_equals(args, got):
    exact = reference(*(x.double() if x.is_floating_point() else x for x in args))
    for mine, want in zip(got, exact, strict=True):
        bound = BOUND[mine.dtype] * max(1.0, want.abs().max().item())
        torch.testing.assert_close(mine.double(), want, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_definition(shape, dtype):
    T, S = shape[1], shape[-1]
    for at in {0, S - T}:
        args = made(*shape, dtype, at)
        given = [x.clone() if i in (3, 4) else x for i, x in enumerate(args)]
        with Poison() as poison:
            y = rotary_append(*given)
        assert not poison.broken()
        assert_equals(args, (given[3], given[4], y))


def test_a_token_without_room_is_not_stored():
    for at in (-1, 4, 1 << 40):
        args = made(2, 2, 4, 2, 8, 8, 5, torch.float32, at)
        k_cache, v_cache = args[3].clone(), args[4].clone()
        y = rotary_append(*args)
        assert_equals([*args[:3], k_cache, v_cache, *args[5:]], (args[3], args[4], y))


def test_layouts():
    """Caches in any order whose last dimension is dense, features with gaps, tables with other strides."""
    args = made(2, 2, 4, 2, 8, 8, 5, torch.float32, 1)
    args[0] = torch.randn(2, 4, 2, 16).transpose(1, 2)[..., ::2]
    args[1] = torch.randn(1, 1, 2, 8).expand(2, 2, 2, 8)
    args[3] = torch.randn(5, 2, 2, 9).permute(1, 2, 0, 3)[..., 1:]
    args[5] = torch.randn(2, 8)[:, ::2]
    before = [x.clone() for x in args]
    y = rotary_append(*args)
    assert_equals(before, (args[3], args[4], y))


def test_nothing_to_do():
    args = made(0, 1, 4, 2, 8, 8, 5, torch.float32, 1)
    assert rotary_append(*args).shape == (0, 1, 4, 8)


@pytest.mark.parametrize("name", ["llm-med small", "8 tokens", "partial"])
def test_passes_the_contest_verification(name):
    (case,) = [case for case in OP.cases() if case.name == name]
    case = cut(OP, case, 24, "cpu")
    _, deterministic = verify(OP, OP.candidate("triton"), yardsticks(OP, OP.bucket(case), case))
    assert deterministic
