"""The hopper candidate of dilated_attention: its forward emulated on the CPU, its backward interpreted."""

import warnings
from typing import Any

import pytest
import torch

from bakeoff import hardware
from bakeoff.attention_backends.rows import BACKENDS
from bakeoff.ops.dilated_attention import OP, branches, hopper
from bakeoff.ops.dilated_attention.mixed import hopper_cudnn, hopper_flash_attn_4
from bakeoff.ops.dilated_attention.op import hopper_supports
from bakeoff.ops.dilated_attention.reference import dilated_attention as reference
from tests.interp.gluon_emulated import Deadlock, EmulatedKernel

warnings.filterwarnings("ignore", message=".*of all tokens are selected by no head")


class Launches:
    """The emulated kernel, and what it was launched with."""

    def __init__(self) -> None:
        self.kernel = EmulatedKernel(hopper.kernels, "_attend")
        self.said: list[dict[str, Any]] = []

    def __call__(self, grid: tuple[int, ...], /, **named: Any) -> None:
        self.said.append(named)
        self.kernel(grid, **named)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    emulated = Launches()
    monkeypatch.setattr(hopper, "_attend", emulated)
    return emulated


def drawn(B: int, T: int, H: int, kv: int, D: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(T)
    shapes = [(B, T, H, D), (B, T, kv, D), (B, T, kv, D)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def compare(inputs: list[torch.Tensor], args: Any, variant: str = "", bound: float = 2**-9) -> None:
    y, lse = hopper.hopper.bind(variant)(*inputs, *args, "mod", "exact", None, None, True)
    want, level = reference(*[x.double() for x in inputs], *args, return_lse=True)
    assert torch.isfinite(y).all()
    error = bound if y.dtype == torch.float16 else 8 * bound
    assert (y.double() - want).norm() < error * want.norm()
    assert (lse.double() - level).abs().max() < 1e-3


CASES = [
    # B, T, H, kv heads, D, segments, rates, causal, workers, keys, stages, turns
    (1, 512, 2, 2, 64, "256,512", "1,2", False, 2, 128, 2, 1),
    (1, 512, 2, 2, 64, "256,512", "1,2", True, 2, 128, 2, 0),
    (2, 400, 4, 2, 40, "200,400", "1,4", True, 3, 64, 4, 1),
    (2, 400, 2, 1, 128, "100,200,400", "1,2,4", False, 3, 64, 4, 1),
    (1, 900, 2, 2, 16, "900", "1", True, 2, 64, 3, 1),
    (1, 900, 1, 1, 16, "900", "1", False, 3, 128, 2, 1),
    (3, 10, 2, 2, 8, "2,10", "1,5", True, 2, 128, 3, 1),
    (1, 1, 1, 1, 8, "1", "1", False, 2, 128, 2, 1),
    (3, 1, 2, 1, 8, "1", "1", True, 2, 128, 2, 1),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_reference(case: Any, dtype: torch.dtype, launches: Launches) -> None:
    B, T, H, kv, D, segments, rates, causal, workers, keys, stages, turns = case
    variant = f"forward(workers={workers},keys={keys},stages={stages},turns={turns},early=1)"
    compare(drawn(B, T, H, kv, D, dtype), (segments, rates, causal), variant)
    assert len(launches.said) == len(rates.split(","))
    assert {said["WORKERS"] for said in launches.said} == {workers}


@pytest.mark.parametrize(("kv", "backend"), [(1, "cudnn"), (2, "cudnn"), (2, "flash_attn_4")])
def test_backward_by_another_s_calls(
    kv: int, backend: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With matrix products in place of theirs, and no compiled code around them."""
    monkeypatch.setitem(BACKENDS, backend, BACKENDS["math"])
    mixed = {"cudnn": hopper_cudnn, "flash_attn_4": hopper_flash_attn_4}[backend]
    for name, plain in (("_collected", "_collect"), ("_added", "_add")):
        monkeypatch.setattr(branches, name, getattr(branches, plain))
    inputs = [x.requires_grad_() for x in drawn(2, 200, 2, kv, 16, torch.float16)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    args = ("100,200", "1,4", True)
    y, lse = mixed.bind("")(*inputs, *args, "mod", "exact", None, None, True)
    assert not lse.requires_grad
    want = reference(*wide, *args)
    dy = torch.randn_like(want).half()
    got, exact = torch.autograd.grad(y, inputs, dy), torch.autograd.grad(want, wide, dy.double())
    for mine, right in zip((y, *got), (want, *exact), strict=True):
        assert (mine.double() - right).norm() < 2**-8 * right.norm()
    assert len(launches.said) == 2


def test_inputs_that_lie_anyhow(launches: Launches) -> None:
    """Views with gaps are read where they lie; expanded, transposed and shifted ones are copied."""
    q, k, v = drawn(2, 64, 2, 2, 16, torch.float16)
    gaps = torch.stack([q, k, v], 3).unbind(3)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    shifted = [torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x) for x in (q, k, v)]
    for inputs, copied in ((gaps, False), (swapped, True), (shifted, True)):
        launches.said.clear()
        compare([*inputs], ("32,64", "1,2", True))
        assert all((said["q"].data_ptr() != inputs[0].data_ptr()) == copied for said in launches.said)
    compare([q, k[:, :, :1].expand(k.shape), v[:1].expand(v.shape)], ("32,64", "1,2", False))


def test_what_is_behind_the_end_is_not_read(launches: Launches) -> None:
    room = torch.full((3, 300, 2, 16), torch.nan, dtype=torch.float16)
    inputs = drawn(1, 200, 2, 2, 16, torch.float16)
    for x, wide in zip(inputs, room, strict=True):
        wide[50:250] = x[0]
    compare([wide[None, 50:250] for wide in room], ("100,200", "1,2", True))


def test_gradients(launches: Launches) -> None:
    """Forward and backward fit each other: of the log-sum-exp, too."""
    inputs = [x.requires_grad_() for x in drawn(1, 64, 2, 2, 16, torch.float16)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    args = ("32,64", "1,2", True, "mod", "exact", None, None, True)
    cotangents = drawn(1, 64, 2, 2, 16, torch.float64)[0], torch.ones(1, 2, 64, dtype=torch.float64)
    small = "backward(q_rows=16,q_keys=16,q_warps=4,q_stages=1,k_rows=16,k_keys=16,k_warps=4,k_stages=1)"
    y, lse = hopper.hopper.bind(small)(*inputs, *args)
    got = torch.autograd.grad([y, lse], inputs, [cotangents[0].to(y.dtype), cotangents[1].float()])
    want = torch.autograd.grad(reference(*wide, *args), wide, cotangents)
    for mine, right in zip(got, want, strict=True):
        assert (mine.double() - right).norm() < 2**-8 * right.norm()


ARRIVAL = "    mbarrier.arrive(k_free.index(at), count=1)\n"
WAIT = "    scores = warpgroup_mma_wait(1, (scores,))\n"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({ARRIVAL: "    pass\n"}, Deadlock),
        ({WAIT: ARRIVAL + WAIT, "    _together()\n" + ARRIVAL: ""}, AssertionError),
    ],
    ids=["never given back", "given back too early"],
)
def test_the_emulation_notices(
    changes: dict[str, str], error: type[Exception], launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would hang or race on a GPU."""
    monkeypatch.setattr("tests.interp.gluon_emulated.PATIENCE", 0.5)
    launches.kernel = EmulatedKernel(hopper.kernels, "_attend", changes)
    with pytest.raises(error):
        compare(drawn(1, 1024, 1, 1, 16, torch.float16), ("1024", "1", False))


TAKEN = {
    "1x8192x16x64", "1x8192x16x64 causal", "1x131072x16x128", "1x131072x16x128 causal",
    "4x2048x8x64 causal", "grouped queries", "lse", "detached", "blocks of heads",
}  # fmt: skip


def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """16-bit heads up to 128 wide in whole segments, on Hopper alone; every refusal says why."""
    assert all(hopper_supports(case) for case in OP.cases())
    monkeypatch.setattr(hardware, "index", lambda _: 0)
    monkeypatch.setattr(hardware, "capability", lambda _: (9, 0))
    reasons = {case.name: hopper_supports(case) for case in OP.cases()}
    assert {name for name, reason in reasons.items() if reason is None} == TAKEN
    assert "documents" in str(reasons["documents"])
    assert "float32" in str(reasons["fp32"])
    assert "segments" in str(reasons["odd"])
    assert "rate 1" in str(reasons["rows unselected"])
    monkeypatch.setattr(hardware, "capability", lambda _: (10, 0))
    assert all(hopper_supports(case) for case in OP.cases())
