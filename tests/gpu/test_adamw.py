"""adamw_ and AdamW on a CUDA device: parity with torch, no host sync, graphs, huge and tiny tensors."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bakeoff
from bakeoff.kernels.counter import launches
from bakeoff.ops.adamw import adamw_, global_norm, tables
from bakeoff.ops.adamw.group import join
from bakeoff.ops.adamw.op import NORM, OP, norm_case, update_case
from bakeoff.ops.adamw.update import guard
from bakeoff.optim import AdamW
from bakeoff.select import TensorList
from bakeoff.select.contests.poison import Poison
from bakeoff.select.contests.verify import verify, yardsticks
from bakeoff.select.declare.variants import at, variants_of

SHAPES = [(37, 129), (7,), (), (4096,), (3, 5, 2), (0, 4), (1025,), (64, 1024)]
HALF, FULL = torch.bfloat16, torch.float32


def parameters(dtype: torch.dtype = FULL, shapes: list[Any] = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in shapes]


def twins(params: list[nn.Parameter], dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().to(dtype, copy=True)) for p in params]


def gradients(params: list[nn.Parameter], *others: list[nn.Parameter], scale: float = 1.0) -> None:
    for i, p in enumerate(params):
        p.grad = torch.randn_like(p) * scale
        for other in others:
            other[i].grad = p.grad.to(other[i].dtype, copy=True)


def distance(got: list[nn.Parameter], exact: list[nn.Parameter]) -> float:
    pairs = zip(got, exact, strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs if a.numel())


@pytest.fixture
def no_sync() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Run something under torch's sync debug mode, in which waiting for the device is an error."""

    def run(step: Callable[[], Any]) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    yield run
    torch.cuda.set_sync_debug_mode("default")


def forms() -> list[Any]:
    small = {
        "fp32": update_case(5, 50_000, "cuda", FULL),
        "fp16": update_case(5, 50_000, "cuda", torch.float16),
        "bf16": update_case(5, 50_000, "cuda", HALF),
        "clip + skip": update_case(5, 50_000, "cuda", FULL, scaled=True, guarded=True),
        "fp32 master": update_case(5, 50_000, "cuda", HALF, None, FULL, FULL),
        "remainder": update_case(5, 50_000, "cuda", HALF, None, FULL, torch.int16, True, True),
        "124M": update_case(148, 124_000_000, "cuda", FULL),
        "10,000": update_case(10_000, 640_000, "cuda", FULL, scaled=True),
        "sums": update_case(5, 50_000, "cuda", FULL, scaled=True, guarded=True, summed=True),
        "sums, remainder": update_case(5, 50_000, "cuda", HALF, None, FULL, torch.int16, summed=True),
    }
    return [pytest.param(case, id=name) for name, case in small.items()]


@pytest.mark.parametrize("case", forms())
def test_passes_the_contest_verification(case: Any) -> None:
    """Poisoned memory, fences, hostile inputs, bitwise repetition, against the float64 reference."""
    _, deterministic = verify(OP, OP.candidate("triton"), yardsticks(OP, OP.bucket(case)))
    assert deterministic


@pytest.mark.parametrize("state", [FULL, HALF], ids=str)
def test_every_variant_passes_the_contest_verification(state: torch.dtype) -> None:
    case = OP.bucket(update_case(5, 50_000, "cuda", HALF, None, state))
    candidate = OP.candidate("triton")
    stick = next(yardsticks(OP, case))
    texts = variants_of(candidate, case)["forward"]
    assert len(texts) >= 6
    for text in texts:
        verify(OP, at(candidate, text), [stick])


@pytest.mark.parametrize("dtype", [FULL, HALF, torch.float16], ids=str)
def test_norm_passes_the_contest_verification(dtype: torch.dtype) -> None:
    _, deterministic = verify(
        NORM, NORM.candidate("triton"), yardsticks(NORM, norm_case(7, 70_000, "cuda", dtype))
    )
    assert deterministic


def test_the_norm_of_two_dtypes() -> None:
    grads = [TensorList.of([torch.randn(5_000, device="cuda").to(dtype)]) for dtype in (FULL, HALF)]
    want = torch.cat([g[0].double() for g in grads]).norm().item()
    assert guard(grads, impl="triton").norm.item() == pytest.approx(want, rel=1e-5)


def test_a_step_captured_by_the_users_own_code_is_the_one_that_ran_before() -> None:
    with bakeoff.using("heuristic"):
        params = parameters(shapes=[(64, 32), (64,)])
        stepper = AdamW(params, max_grad_norm=1.0)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                gradients(params)
                stepper.step()
        torch.cuda.current_stream().wait_stream(side)
        before = params[0].detach().clone()
        graph = torch.cuda.CUDAGraph()
        launched = launches()
        with torch.cuda.graph(graph):
            stepper.step()
        assert launches() - launched == 6  # four, and where the tensors of two tables lie is fetched
        graph.replay()
    assert not torch.equal(before, params[0])


@pytest.mark.parametrize("dtype", [FULL, HALF, torch.float16], ids=str)
@pytest.mark.parametrize("impl", ["loop", "foreach", "fused", "compiled", "triton"])
@pytest.mark.parametrize("maximize", [False, True])
def test_as_exact_as_torch(dtype: torch.dtype, impl: str, maximize: bool) -> None:
    how: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "maximize": maximize}
    mine = parameters(dtype)
    peers, exact = twins(mine, dtype), twins(mine, torch.float64)
    steppers = (
        AdamW(mine, impl=impl, **how),
        torch.optim.AdamW(peers, foreach=False, **how),
        torch.optim.AdamW(exact, foreach=False, **how),
    )
    for _ in range(4):
        gradients(mine, peers, exact)
        for stepper in steppers:
            stepper.step()
    unit = torch.finfo(dtype).eps * 4  # parameters reach 4
    assert distance(mine, exact) <= 2 * distance(peers, exact) + unit


@pytest.mark.parametrize("count", [1, 10_000])
def test_two_launches_whatever_the_number_of_tensors(count: int) -> None:
    params = parameters(shapes=[(64,)] * count)
    stepper = AdamW(params, impl="triton")
    gradients(params)
    stepper.step()
    before = launches()
    stepper.step()
    assert launches() - before == 2


def test_clipping_and_skipping_take_two_launches_more() -> None:
    params = parameters()
    stepper = AdamW(params, max_grad_norm=1.0, skip_nonfinite=True, impl="triton")
    gradients(params)
    stepper.step()
    before = launches()
    stepper.step()
    assert launches() - before == 4


@pytest.mark.parametrize("impl", [None, "loop", "fused", "triton"])
def test_a_step_never_waits(impl: str | None, no_sync: Callable[[Callable[[], Any]], None]) -> None:
    params = parameters()
    stepper = AdamW(params, lr=1e-3, max_grad_norm=1.0, skip_nonfinite=True, impl=impl)
    schedule = torch.optim.lr_scheduler.LambdaLR(stepper, lambda step: 1 / (1 + step))

    def steps() -> None:
        for _ in range(3):
            gradients(params)
            stepper.step()
            schedule.step()

    steps()
    no_sync(steps)


def test_skips_on_the_device() -> None:
    params = parameters()
    stepper = AdamW(params, max_grad_norm=1.0, skip_nonfinite=True, impl="triton")
    gradients(params)
    stepper.step()
    before = [p.clone() for p in params] + [t.clone() for s in stepper.state.values() for t in s.values()]
    gradients(params)
    params[3].grad[17] = float("nan")  # type: ignore[index]
    stepper.step()
    after = [*params, *(t for s in stepper.state.values() for t in s.values())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert stepper.skipped is not None
    assert stepper.skipped.item() == 1


@pytest.mark.parametrize("impl", ["loop", "fused", "triton"])
def test_captured_steps_are_the_eager_ones_and_hear_of_a_new_rate(impl: str) -> None:
    def build() -> tuple[list[nn.Parameter], AdamW, Tensor]:
        torch.manual_seed(1)
        params = parameters(shapes=[(64, 32), (64,)])
        return (
            params,
            AdamW(params, lr=1e-2, max_grad_norm=1.0, impl=impl),
            torch.randn(16, 32, device="cuda"),
        )

    def step(params: list[nn.Parameter], stepper: AdamW, x: Tensor) -> None:
        nn.functional.linear(x, params[0], params[1]).square().mean().backward()
        stepper.step()
        stepper.zero_grad(set_to_none=True)

    captured, eager = build(), build()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(*captured)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*captured)
    step(*eager)
    for rate in (1e-2, 3e-3, 7e-4, 0.0):
        captured[1].param_groups[0]["lr"] = rate
        eager[1].param_groups[0]["lr"] = rate
        graph.replay()
        step(*eager)
        assert all(torch.equal(a, b) for a, b in zip(captured[0], eager[0], strict=True)), rate


def test_uploads_are_pinned_in_a_contest_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contest's hostile memory isn't pinned; what is kept for later captures must be."""
    monkeypatch.setattr(tables, "_reserves", {})
    with Poison():
        global_norm([torch.ones(12_345, device="cuda")], impl="triton")
    (reserve,) = tables._reserves.values()
    assert reserve.pinned.is_pinned()


def test_one_call_prepares_a_graph_of_64(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a contest captures, of the longest lists, whose tables are no multiple of 16 bytes."""
    monkeypatch.setattr(tables, "_reserves", {})
    tensors = [torch.ones(64, device="cuda") for _ in range(9_999)]
    global_norm(tensors, impl="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norms = [global_norm(tensors, impl="triton") for _ in range(64)]
    graph.replay()
    assert all(norm.item() == pytest.approx((9_999 * 64) ** 0.5, rel=1e-5) for norm in norms)


def test_capture_without_a_step_before_names_the_fix() -> None:
    params = parameters(shapes=[(64, 32)])
    stepper = AdamW(params, impl="triton")
    gradients(params)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="one step outside"), torch.cuda.graph(graph):
        stepper.step()


def test_a_rate_in_cpu_memory_is_followed_and_kept_out_of_graphs() -> None:
    mine, rate = parameters(), torch.tensor(1e-2)
    peers = twins(mine, FULL)
    steppers = AdamW(mine, lr=rate, impl="triton"), torch.optim.AdamW(peers, lr=1e-2)
    for value in (1e-2, 1e-3):
        rate.fill_(value)
        steppers[1].param_groups[0]["lr"] = value
        gradients(mine, peers)
        for stepper in steppers:
            stepper.step()
    assert distance(mine, peers) < 1e-5
    with (
        pytest.raises(RuntimeError, match="can't reach a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        steppers[0].step()


def test_a_captured_list_never_seen_before_names_the_fix() -> None:
    graph = torch.cuda.CUDAGraph()
    grads = [torch.ones(n, device="cuda") for n in (31, 41, 59)]
    with pytest.raises(RuntimeError, match="outside capture"), torch.cuda.graph(graph):
        global_norm(grads, impl="triton")


def test_another_stream_waits_for_the_table() -> None:
    """The chunk map was uploaded by one stream, behind a long queue; the next stream uses it at once."""
    grads = [torch.full((10_007,), 2.0, device="cuda"), torch.full((123,), 2.0, device="cuda")]
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    global_norm(grads, impl="triton")
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        norm = global_norm(grads, impl="triton")
    other.synchronize()
    assert norm.item() == pytest.approx(2 * 10_130**0.5)


def test_a_graph_keeps_its_table() -> None:
    """Captured on the stream of the eager step before it, then other tensors through the same table."""
    stream = torch.cuda.Stream()
    grads = [[torch.full((64, 33), float(i), device="cuda")] for i in range(6)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        global_norm(grads[0], impl="triton")
        with torch.cuda.graph(graph, stream=stream):
            norm = global_norm(grads[0], impl="triton")
        for other in grads[1:]:
            global_norm(other, impl="triton")
            stream.synchronize()
        grads[0][0].fill_(7.0)
        graph.replay()
    torch.cuda.synchronize()
    assert norm.item() == pytest.approx(7 * (64 * 33) ** 0.5)


def test_a_changed_address_costs_one_launch_and_no_operation() -> None:
    """Whoever compares two steps, operation by operation, sees no difference."""
    params = parameters()
    stepper = AdamW(params, max_grad_norm=1.0, impl="triton")
    kept, seen = [], []
    for _ in range(6):
        gradients(params)
        kept.append([p.grad for p in params])
        torch.cuda.synchronize()
        before = launches()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watched:
            stepper.step()
        torch.cuda.synchronize()
        names = [event.name for event in watched.events() if event.name.startswith("aten::")]
        seen.append((launches() - before, names))
    assert all(count == 6 for count, _ in seen[1:])
    assert seen[3] == seen[4] == seen[5]


def test_a_checkpoint_says_that_steps_can_be_captured() -> None:
    assert AdamW(parameters()).state_dict()["param_groups"][0]["capturable"] is True


def test_grad_scaler_agrees_with_torchs_fused() -> None:
    mine = parameters()
    peers = twins(mine, FULL)
    pairs = [
        (AdamW(mine, impl="triton"), torch.amp.GradScaler("cuda", init_scale=128.0)),
        (torch.optim.AdamW(peers, fused=True), torch.amp.GradScaler("cuda", init_scale=128.0)),
    ]
    for i in range(6):
        for _, scaler in pairs:
            scaler.scale(torch.zeros((), device="cuda"))
        gradients(mine, scale=128.0)
        if i == 2:
            mine[0].grad[0, 0] = float("inf")  # type: ignore[index]
        for p, q in zip(mine, peers, strict=True):
            q.grad = p.grad.clone()
        for stepper, scaler in pairs:
            scaler.step(stepper)
            scaler.update()
    assert pairs[0][1].get_scale() == pairs[1][1].get_scale() == 64.0
    assert distance(mine, peers) < 1e-5
    assert stepper_steps(pairs[0][0]) == stepper_steps(pairs[1][0])


def stepper_steps(stepper: torch.optim.Optimizer) -> list[float]:
    return [s["step"].item() for s in stepper.state.values()]


def test_remainders_are_the_bits_of_a_float32_master() -> None:
    weights = parameters(HALF, [(1000, 33), (5,)])
    pairs = [(twins(weights, HALF), kind) for kind in ("float32", "remainder")]
    steppers = [AdamW(params, lr=1e-3, master_weights=kind, impl="triton") for params, kind in pairs]
    for _ in range(5):
        gradients(pairs[0][0], pairs[1][0])
        for stepper in steppers:
            stepper.step()
    for p, q in zip(pairs[0][0], pairs[1][0], strict=True):
        assert torch.equal(steppers[0].state[p]["master"], join(q, steppers[1].state[q]["remainder"]))


def test_more_than_two_to_the_31_elements() -> None:
    n = 2**31 + 4099
    p, g = (torch.full((n,), value, dtype=HALF, device="cuda") for value in (1.0, 0.5))
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    step = torch.zeros((), device="cuda")
    how: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}
    adamw_([p], [g], [m], [v], lr=0.5, step=step, impl="triton", **how)
    for tensor, value in ((p, 0.5), (m, 0.05), (v, 0.0025)):
        expected = torch.tensor(value, dtype=HALF).item()
        assert tensor.min().item() == tensor.max().item() == expected
    assert global_norm([g], impl="triton").item() == pytest.approx(0.5 * n**0.5, rel=1e-5)


def test_a_changed_address_is_seen() -> None:
    """Gradients in other memory each time, and parameters moved between steps."""
    mine = parameters()
    peers = twins(mine, FULL)
    steppers = AdamW(mine, impl="triton"), torch.optim.AdamW(peers, fused=True)
    kept = []
    for i in range(4):
        gradients(mine, peers)
        kept.append([p.grad for p in mine])
        if i == 2:
            for p in mine:
                p.data = p.data.clone()
        for stepper in steppers:
            stepper.step()
    assert distance(mine, peers) < 1e-5


def test_runs_are_bitwise_equal() -> None:
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        params = parameters(shapes=[(513, 1027), (77,)])
        stepper = AdamW(params, max_grad_norm=0.1, impl="triton")
        for _ in range(3):
            gradients(params)
            stepper.step()
        results.append([p.detach().clone() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_warning_from_a_compiled_step_function() -> None:
    """A step called from compiled code falls back to eager around the optimizer, without complaint."""
    params = parameters(shapes=[(16, 16)])
    stepper = AdamW(params, impl="triton")
    gradients(params)
    torch.compile(torch.sin)(torch.ones(1, device="cuda"))  # PyTorch's own warnings, at its first use
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(stepper.step)()
    assert stepper.state[params[0]]["step"].item() == 1
