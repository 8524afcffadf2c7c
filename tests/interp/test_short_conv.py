"""short_conv's Triton candidate under the interpreter against the float64 reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bakeoff.kernels.counter import launches
from bakeoff.ops.short_conv import tilings
from bakeoff.ops.short_conv.op import OP
from bakeoff.ops.short_conv.plain import eager
from bakeoff.ops.short_conv.reference import short_conv as reference
from bakeoff.ops.short_conv.triton import short_conv
from bakeoff.select.contests.poison import Poison
from bakeoff.select.contests.verify import verify, yardsticks

SMALL = (
    "forward(ahead=2,loops=2,channels=4,bytes=16,warps=1) "
    "backward(ahead=2,loops=3,channels=4,bytes=16,warps=1)"
)
"""Several tiles along time and along channels, several walkers, several turns of each."""


def arguments(
    B: int, T: int, C: int, W: int, *, bias: bool = True, silu: bool = True, state: bool = True,
    boundaries: list[int] | None = None, dtype: torch.dtype = torch.float32,
) -> list[Any]:  # fmt: skip
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype).requires_grad_()

    items = B if boundaries is None else len(boundaries) - 1
    return [
        random(B, T, C),
        random(C, W),
        random(C) if bias else None,
        "silu" if silu else None,
        random(items, W - 1, C) if state else None,
        None if boundaries is None else torch.tensor(boundaries, dtype=torch.int32),
    ]


def results(fn: Any, args: list[Any], cotangents: list[Any]) -> list[torch.Tensor]:
    """y and the state, then the gradients."""
    outputs = fn(*args)
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    used = [i for i, out in enumerate(outputs) if cotangents[i] is not None and out.requires_grad]
    gradients = torch.autograd.grad(
        [outputs[i] for i in used], wanted, [cotangents[i] for i in used], allow_unused=True
    )
    filled = [torch.zeros_like(a) if g is None else g for g, a in zip(gradients, wanted, strict=True)]
    return [*outputs, *filled]


def wide(a: Any) -> Any:
    if not isinstance(a, torch.Tensor) or not a.is_floating_point():
        return a
    return a.detach().double().requires_grad_(a.requires_grad)


def compare(args: list[Any], tiling: str = "", without: int = -1) -> None:
    """Candidate against float64: at most twice eager's error and a rounding of the store. `without`: an
    output that no gradient arrives for."""
    outputs = eager(*args)
    dys = [torch.randn_like(out) if i != without else None for i, out in enumerate(outputs)]
    before = [a.detach().clone() for a in args if isinstance(a, torch.Tensor)]
    with Poison() as poison:
        got = results(short_conv.bind(tiling), args, dys)
    assert not poison.broken()
    after = [a for a in args if isinstance(a, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    exact = results(reference, [wide(a) for a in args], [None if d is None else d.double() for d in dys])
    plain = results(eager, args, dys)
    for mine, want, other in zip(got, exact, plain, strict=True):
        assert mine.shape == want.shape
        size = want.norm().clamp(min=1e-30)
        error, allowed = (((t.double() - want).norm() / size).item() for t in (mine, other))
        assert error <= 2 * allowed + torch.finfo(mine.dtype).eps / 16 + 2.4e-7


PACKED = [0, 3, 3, 4, 20, 33]


@pytest.mark.parametrize("tiling", ["", SMALL], ids=["default", "small"])
@pytest.mark.parametrize("W", [1, 2, 4, 8])
@pytest.mark.parametrize("boundaries", [None, PACKED], ids=["rows", "packed"])
def test_matches_the_reference(W: int, boundaries: list[int] | None, tiling: str) -> None:
    compare(arguments(1 if boundaries else 2, 33, 6, W, boundaries=boundaries), tiling)


@pytest.mark.parametrize("boundaries", [None, PACKED], ids=["rows", "packed"])
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("state", [True, False])
def test_options(state: bool, silu: bool, boundaries: list[int] | None) -> None:
    args = arguments(1, 33, 6, 3, bias=silu != state, silu=silu, state=state, boundaries=boundaries)
    compare(args, SMALL)


@pytest.mark.parametrize("boundaries", [None, [0, 1, 1, 2]], ids=["rows", "packed"])
@pytest.mark.parametrize("T", [0, 1, 2, 3])
def test_sequences_shorter_than_the_filter(T: int, boundaries: list[int] | None) -> None:
    items = boundaries and [min(b, T) for b in boundaries]
    compare(arguments(1 if items else 3, T, 5, 4, boundaries=items))


@pytest.mark.parametrize("shape", [(0, 5, 4), (2, 5, 0), (2, 0, 4)])
def test_empty(shape: tuple[int, int, int]) -> None:
    compare(arguments(*shape, 4))


@pytest.mark.parametrize("without", [0, 1])
def test_a_gradient_for_one_output_alone(without: int) -> None:
    compare(arguments(2, 9, 5, 4), SMALL, without)
    compare(arguments(1, 33, 5, 4, boundaries=PACKED), SMALL, without)


@pytest.mark.parametrize("wanted", range(4))
def test_one_gradient_alone(wanted: int) -> None:
    args = arguments(2, 9, 5, 4)
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(i == wanted)
    compare(args, SMALL)


def test_float16() -> None:
    compare(arguments(2, 21, 6, 4, dtype=torch.float16), SMALL)
    args = arguments(2, 21, 6, 4, dtype=torch.float16)
    args[1:3] = [t.detach().float().requires_grad_() for t in args[1:3]]
    compare(args, SMALL)


def spaced(t: torch.Tensor) -> torch.Tensor:
    wider = torch.full((*t.shape[:-1], t.shape[-1] + 3), torch.nan)
    wider[..., : t.shape[-1]] = t
    return wider[..., : t.shape[-1]]


LAYOUTS = {
    "apart": spaced,
    "channel-major": lambda t: t.mT.contiguous().mT,
    "turned": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda t: t[:1, :1].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    args = arguments(2, 9, 5, 4)
    args[0] = LAYOUTS[layout](args[0].detach()).requires_grad_()
    args[4] = LAYOUTS[layout](args[4].detach()).requires_grad_()
    compare(args, SMALL)
    args = arguments(2, 9, 5, 4)
    y, end = short_conv(*args)
    dys = [LAYOUTS[layout](torch.randn_like(out)) for out in (y, end)]
    leaves = [a for a in args if isinstance(a, torch.Tensor)]
    want = torch.autograd.grad([y, end], leaves, [dy.contiguous() for dy in dys], retain_graph=True)
    got = torch.autograd.grad([y, end], leaves, dys)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("name", ["with state", "packed, with state"])
def test_passes_the_contest_verification(name: str) -> None:
    """On ordinary and hostile inputs: large means and scales, tiny values, zeros, one hot element."""
    args = arguments(1, 37, 8, 4, boundaries=PACKED if "packed" in name else None)
    _, deterministic = verify(OP, OP.candidate("triton"), yardsticks(OP, OP.case(args)))
    assert deterministic


@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    C=st.integers(1, 9),
    W=st.integers(1, 8),
    flags=st.tuples(*3 * [st.booleans()]),
    walk=st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.sampled_from([2, 8])),
)
def test_any_packing(
    lengths: list[int], C: int, W: int, flags: tuple[bool, ...], walk: tuple[int, int, int]
) -> None:
    boundaries = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    bias, silu, state = flags
    numbers = "ahead={},loops={},channels={},bytes=8,warps=1".format(*walk)
    compare(
        arguments(1, sum(lengths), C, W, bias=bias, silu=silu, state=state, boundaries=boundaries),
        f"forward({numbers}) backward({numbers})",
    )


def test_pieces_equal_the_whole_bit_for_bit() -> None:
    args = arguments(2, 23, 5, 4)
    y, end = short_conv(*args)
    state, found = args[4], []
    for piece in args[0].split([1, 1, 2, 6, 13], dim=1):
        part, state = short_conv(piece, *args[1:4], state, None)
        found.append(part)
    assert torch.equal(torch.cat(found, 1), y)
    assert torch.equal(state, end)


def test_a_decoding_step_is_one_launch() -> None:
    args = arguments(2, 1, 5, 4)
    before = launches()
    short_conv(*[a.detach() if isinstance(a, torch.Tensor) else a for a in args])
    assert launches() == before + 1


@pytest.mark.filterwarnings("ignore:invalid value")
def test_no_input_reaches_back_in_time_nor_into_another_sequence() -> None:
    args = arguments(1, 33, 5, 4, state=False, boundaries=PACKED)
    was, _ = short_conv(*args)
    args[0] = args[0].detach().clone()
    args[0][:, 18:20] = torch.inf
    now, _ = short_conv(*args)
    assert torch.equal(was[:, :18], now[:, :18])
    assert torch.equal(was[:, 20:], now[:, 20:])
    assert not now[:, 18:20].isfinite().any()


def test_opcheck() -> None:
    args = arguments(1, 9, 5, 4, boundaries=[0, 2, 9])
    torch.library.opcheck(short_conv.traced.forward, (*args, True, ""))


@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: case.name)
def test_launches_of_the_grid(case: Any) -> None:
    """Every position belongs to one walker, and no program is without work."""
    B, T, C = case.x.shape
    strides = {"x_b": T * C, "x_t": C}
    items = B if case.cu_seqlens is None else case.cu_seqlens.shape[0] - 1
    for tiling in (None, *tilings.forward_tilings(case)):
        (grid,), n = tilings.forward_launch((B, T, C), 4, 2, items, strides, 132, tiling)
        tile = n["ROWS"] * n["AHEAD"] * n["LOOPS"]
        blocks = -(-C // n["BLOCK"])
        assert grid == (B * -(-T // tile) + items) * blocks
    for tiling in (None, *tilings.backward_tilings(case)):
        (grid,), programs, n = tilings.backward_launch((B, T, C), 4, 2, strides, 132, tiling)
        tiles = B * -(-T // (n["ROWS"] * n["AHEAD"] * n["LOOPS"]))
        assert (programs - 1) * n["share"] < tiles <= programs * n["share"]
        assert grid == programs * -(-C // n["BLOCK"])
