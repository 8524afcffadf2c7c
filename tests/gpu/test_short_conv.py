"""short_conv's Triton candidate on a CUDA device: the grid, torch.compile, graphs, decoding."""

from typing import Any

import pytest
import torch

from bakeoff.kernels.counter import launches
from bakeoff.ops.short_conv import OP, short_conv
from bakeoff.ops.short_conv.reference import short_conv as reference
from bakeoff.ops.short_conv.triton import short_conv as candidate
from bakeoff.select import Case
from bakeoff.select.contests.verify import verify, yardsticks

TRITON = OP.candidate("triton")


@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: case.name)
def test_the_grid_passes_the_contest_verification(case: Case) -> None:
    assert TRITON.reasons(case) == []
    _, deterministic = verify(OP, TRITON, yardsticks(OP, case))
    assert deterministic


def arguments(*shape: int, W: int = 4, packed: bool = False, grad: bool = True) -> list[Any]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)

    B, T, C = shape
    cu_seqlens = torch.tensor([0, T // 3, T // 3, T], device="cuda", dtype=torch.int32) if packed else None
    return [random(*shape), random(C, W), random(C), "silu", random(3 if packed else B, W - 1, C), cu_seqlens]


def step(fn: Any, args: list[Any], dys: list[torch.Tensor]) -> list[torch.Tensor]:
    outputs = fn(*args)
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, wanted, dys)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tiling", range(3))
def test_tilings(tiling: int, packed: bool) -> None:
    args = arguments(1, 777, 512, packed=packed)
    case = OP.case(args)
    forward, backward = (axis[-1 - tiling] for axis in candidate.variants(case).values())
    text = " ".join(
        f"{axis}({','.join(f'{k}={v}' for k, v in t._asdict().items())})"
        for axis, t in (("forward", forward), ("backward", backward))
    )
    dys = [torch.randn_like(out) for out in candidate(*args)]
    got = step(candidate.bind(text), args, dys)
    for mine, other in zip(got, step(candidate, args, dys), strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("packed", [False, True])
def test_graph_capture(packed: bool) -> None:
    args = arguments(1, 777, 512, packed=packed)
    dys = [torch.randn_like(out) for out in candidate(*args)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(candidate, args, dys)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(candidate, args, dys)
    with torch.no_grad():
        for tensor in (args[0], args[4], *dys):
            tensor.normal_()
    graph.replay()
    for mine, want in zip(captured, step(candidate, args, dys), strict=True):
        assert torch.equal(mine, want)


@pytest.mark.parametrize("packed", [False, True])
def test_torch_compile_whole_with_any_length(packed: bool) -> None:
    torch._dynamo.reset()

    def model(x: Any, weight: Any, bias: Any, activation: Any, state: Any, cu_seqlens: Any) -> Any:
        return short_conv(
            x, weight, bias, activation=activation, state=state, cu_seqlens=cu_seqlens, impl="triton"
        )

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for T in (16, 33, 100):
        args = arguments(1, T, 256, packed=packed)
        dys = [torch.randn_like(out) for out in candidate(*args)]
        for mine, want in zip(step(compiled, args, dys), step(model, args, dys), strict=True):
            assert torch.equal(mine, want)


def test_opcheck() -> None:
    torch.library.opcheck(candidate.traced.forward, (*arguments(1, 33, 64, packed=True), True, ""))


def test_decoding_is_one_launch_a_step_and_equals_the_whole() -> None:
    args = arguments(3, 40, 512, grad=False)
    whole, end = candidate(*args)
    state, found = args[4], []
    for t in range(40):
        before = launches()
        y, state = candidate(args[0][:, t : t + 1], *args[1:4], state, None)
        assert launches() == before + 1
        found.append(y)
    assert torch.equal(torch.cat(found, 1), whole)
    assert torch.equal(state, end)


def test_nothing_waits_for_the_device() -> None:
    for packed in (False, True):
        args = arguments(1, 777, 512, packed=packed)
        dys = [torch.randn_like(out) for out in candidate(*args)]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(candidate, args, dys)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_more_than_two_to_the_31_elements() -> None:
    args = arguments(2, (1 << 20) + 5, 1032, grad=False)
    y, end = candidate(*args)
    tail = reference(args[0][1:, -40:].double(), *(a.double() for a in args[1:3]), "silu")[0]
    error = (y[1:, -30:].double() - tail[:, 10:]).norm() / tail[:, 10:].norm()
    assert error.item() < 4e-3
    assert torch.equal(end, args[0][:, -3:])
