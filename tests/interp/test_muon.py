"""muon_ in Triton under the interpreter, against the definition in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bakeoff.kernels.variants import text
from bakeoff.ops.muon import triton
from bakeoff.ops.muon.kernels import Tiling, tilings
from bakeoff.ops.muon.op import OP, muon_case
from bakeoff.ops.muon.reference import muon
from bakeoff.ops.muon.settings import Settings

BLOCK = 16
SMALL = Tiling(16, 4, 16, 32, 4, 16, 1)
"""Several tiles on every axis of small matrices."""
HOW = Settings(0.5, 0.9, weight_decay=0.1, steps=2)
CANARY = -77.0


def fenced(tensor: Tensor, shift: int = 0) -> Tensor:
    """A copy between guard bands; `shift` elements past 16 bytes of alignment."""
    band = 64
    raw = torch.full((tensor.numel() + 2 * band + shift,), CANARY, dtype=tensor.dtype)
    inside = raw[band + shift : band + shift + tensor.numel()].view(tensor.shape)
    return inside.copy_(tensor)


def fences_stand(tensor: Tensor) -> bool:
    raw = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    start = tensor.storage_offset()
    return bool((torch.cat([raw[:start], raw[start + tensor.numel() :]]) == CANARY).all())


def drawn(shape: tuple[int, int], count: int = 2, dtype: torch.dtype = torch.float32, shift: int = 0) -> Any:
    kinds = (dtype, dtype, torch.float32)
    return [[fenced(torch.randn(shape).to(kind), shift) for _ in range(count)] for kind in kinds]


def step(lists: Any, how: Settings = HOW, tiling: Tiling = SMALL) -> None:
    triton._take_step(*lists, None, *how, tiling=tiling, block=BLOCK)


def exact(lists: Any, how: Settings = HOW) -> Any:
    return muon(*[[t.double() for t in column] for column in lists], None, *how)


def close(lists: Any, want: Any) -> None:
    """To a few roundings of float32 and one of the stored dtype."""
    for column, exactly in ((lists[0], want[0]), (lists[2], want[1])):
        for mine, w in zip(column, exactly, strict=True):
            unit = torch.finfo(mine.dtype).eps / 2 + 16 * torch.finfo(torch.float32).eps
            assert (mine.double() - w).abs().max() <= unit * w.abs().max().clamp(min=1.0)


@pytest.mark.parametrize(
    ("shape", "shift"),
    [((32, 48), 0), ((48, 32), 0), ((17, 70), 1), ((70, 17), 0), ((33, 33), 3), ((1, 20), 0)],
)
def test_step(shape: tuple[int, int], shift: int) -> None:
    """Whole tiles and ragged ones, wide and tall, aligned and not."""
    lists = drawn(shape, shift=shift)
    want, grads = exact(lists), [g.clone() for g in lists[1]]
    step(lists)
    close(lists, want)
    assert all(map(torch.equal, grads, lists[1]))
    assert all(fences_stand(t) for column in lists for t in column)


@pytest.mark.parametrize(
    "how",
    [
        HOW._replace(nesterov=False, scale="spectral", steps=1),
        HOW._replace(maximize=True, momentum_decay=0.0),
        HOW._replace(
            lr=torch.tensor(0.25, dtype=torch.float64),
            **{n: torch.tensor(v) for n, v in
               {"lr_mult": 3.0, "clip_coef": 0.5, "grad_scale": 4.0, "found_inf": 0.0}.items()},
        ),
    ],
    ids=["plain, spectral", "maximize", "scalars"],
)  # fmt: skip
def test_settings(how: Settings) -> None:
    lists = drawn((20, 9))
    want = exact(lists, how)
    step(lists, how)
    close(lists, want)


def test_narrow_parameters_and_five_steps() -> None:
    lists, how = drawn((20, 33), count=1, dtype=torch.float16), HOW._replace(steps=5)
    want = exact(lists, how)
    step(lists, how)
    close(lists, want)


def test_a_skipped_step_changes_no_bit() -> None:
    lists = drawn((20, 33))
    lists[1][0][3, 4] = math.nan
    before = [[t.clone() for t in column] for column in lists]
    step(lists, HOW._replace(found_inf=torch.tensor(1.0), clip_coef=torch.tensor(math.nan), steps=1))
    assert all(map(torch.equal, before[0], lists[0]))
    assert all(map(torch.equal, before[2], lists[2]))


def test_a_matrix_with_nan_or_zero_leaves_the_others_alone() -> None:
    lists = drawn((20, 33), count=3)
    lists[1][0][3, 4], lists[1][1][:], lists[2][1][:] = math.nan, 0.0, 0.0
    want = exact(lists)
    step(lists)
    assert lists[0][0].isnan().all()
    close([column[1:] for column in lists], [column and column[1:] for column in want])


def test_symmetric_products_are_mirrored_and_scaled() -> None:
    """Every tile of the other half, beside the whole product. Tiles on the diagonal are one product, which
    NumPy rounds as it likes."""
    x, add = torch.randn(2, 80, 48), torch.randn(2, 80, 80)
    add = add + add.mT
    out, scales = torch.full((2, 80, 80), math.nan), torch.tensor([0.5, 3.0])
    triton._symmetric(
        (15, 2), x=x, add=add, out=out, scales=scales, MT=5, KT=3, alpha=2.0, beta=-3.0, TILE=16, DEPTH=16,
        num_warps=4, num_stages=1,
    )  # fmt: skip
    want = (2.0 * x @ x.mT - 3.0 * add) * scales[:, None, None]
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-4)
    tiles = out.unflatten(1, (5, 16)).unflatten(3, (5, 16))
    for i in range(5):
        for j in range(i):
            assert torch.equal(tiles[:, i, :, j], tiles[:, j, :, i].mT)


def test_supports_and_variants() -> None:
    candidate = OP.candidate("triton")
    case = muon_case(12, 2304, 768)
    listed = candidate.implementation.variants(case)["forward"]
    assert len(set(listed)) == len(listed) >= 6
    assert candidate.implementation.bind(text({"forward": listed[2]})).tiling == listed[2]
    assert tilings(64, False)[0].tile == 64
    assert max(t.stages * (t.rows + t.columns) * t.depth * 2 for t in listed) <= 227 << 10
    strided = muon_case(2, 8, 8, "cpu")
    for bad, reason in (
        (muon_case(2, 8, 8, "cpu", summed=True), "keeps no directions"),
        (muon_case(2, 8, 8, "cpu", torch.float64), "float32"),
        (strided.replace(params=strided.params.__replace__(contiguous=False)), "contiguous"),
    ):
        assert reason in str(candidate.supports(bad))
