"""Whole-step capture: replays are the eager steps, and what can't be captured is named."""

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx

import bakeoff
from bakeoff.graphs import KEEPS_PINNED, NotCapturable, capture_step, forbid_sync
from bakeoff.models.llm_med import Config, LLMMed
from bakeoff.optim import AdamW

# Read by cuBLAS when it starts; deterministic mode asks for it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

STEPS = 8


class Toy:
    """A small training set-up with dropout; every instance starts from the same weights and random state."""

    def __init__(self, dropout: float = 0.1, **optimizer: Any) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(
            nn.Linear(32, 64), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(64), nn.Linear(64, 8)
        ).cuda()
        settings = {"lr": torch.tensor(1e-2, device="cuda"), "capturable": True, **optimizer}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **settings)
        self.seen = torch.zeros((), device="cuda")

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.seen += 1
        return loss

    def state(self) -> list[Tensor]:
        held = [p.detach().clone() for p in self.model.parameters()]
        moments = [v.clone() for state in self.optimizer.state.values() for v in state.values()]
        return [*held, *moments, self.seen.clone(), torch.cuda.get_rng_state()]


def batches(count: int = STEPS, rows: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Pinned host tensors, as a loader gives them."""
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, 32, generator=draw).pin_memory(),
            torch.randint(8, (rows,), generator=draw).pin_memory(),
        )
        for _ in range(count)
    ]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def run(toy: Toy, step: Callable[[Tensor, Tensor], Tensor], count: int = STEPS) -> list[Tensor]:
    """Losses of `count` steps with a rate that changes every step."""
    losses = []
    for number, (x, y) in enumerate(batches(count)):
        if isinstance(toy.optimizer.param_groups[0]["lr"], Tensor):
            toy.optimizer.param_groups[0]["lr"].fill_(1e-2 / (1 + number))
        losses.append(step(x.cuda(), y.cuda()).detach())
    return losses


@pytest.mark.parametrize("kernel", [{"fused": True}, {"foreach": True}])
def test_replays_are_the_eager_steps_bit_for_bit(kernel: dict[str, bool]) -> None:
    torch.use_deterministic_algorithms(True)
    eager, captured = Toy(**kernel), Toy(**kernel)
    torch.manual_seed(7)
    expected = run(eager, eager.step)
    torch.manual_seed(7)
    step = capture_step(captured.step)
    found = run(captured, step)
    assert step.captured
    assert step.calls == STEPS
    assert same(expected, found)
    assert same(eager.state(), captured.state())
    assert len({loss.item() for loss in found}) == STEPS  # every call's result is its own


def test_dropout_takes_part_in_that_comparison() -> None:
    """Another seed breaks the equality above."""
    eager, other = Toy(), Toy()
    torch.manual_seed(7)
    expected = run(eager, eager.step)
    torch.manual_seed(8)
    assert not same(expected, run(other, other.step))


def test_a_language_model_under_autocast() -> None:
    torch.use_deterministic_algorithms(True)
    rows = torch.randint(256, (STEPS, 4, 65), generator=torch.Generator().manual_seed(0)).cuda()

    def losses(make: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]) -> list[Tensor]:
        torch.manual_seed(0)
        model = LLMMed(Config.sizes("tiny", dropout=0.1)).cuda().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)

        def step(ids: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(ids[:, :-1], ids[:, 1:])[1]
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        made = make(step)
        return [made(ids).detach() for ids in rows]

    with bakeoff.using(regime="graph"):  # both take the same candidates
        assert same(losses(lambda step: step), losses(capture_step))


def test_accumulation_inside_one_graph_and_per_micro_batch() -> None:
    torch.use_deterministic_algorithms(True)

    def backward(toy: Toy, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(toy.model(x), y) / 2
        loss.backward()
        return loss.detach()

    def whole(toy: Toy) -> Callable[[Tensor, Tensor], Tensor]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            total = torch.zeros((), device="cuda")
            for part in zip(x.chunk(2), y.chunk(2), strict=True):
                total += backward(toy, *part)
            toy.optimizer.step()
            toy.optimizer.zero_grad(set_to_none=False)
            return total

        return step

    def pieces(toy: Toy) -> Callable[[Tensor, Tensor], Tensor]:
        part_step = capture_step(lambda x, y: backward(toy, x, y))

        def step(x: Tensor, y: Tensor) -> Tensor:
            total = torch.zeros((), device="cuda")
            for part in zip(x.chunk(2), y.chunk(2), strict=True):
                total += part_step(*part)
            toy.optimizer.step()
            toy.optimizer.zero_grad(set_to_none=False)
            return total

        return step

    def trained(make: Callable[[Toy], Callable[[Tensor, Tensor], Tensor]]) -> list[Tensor]:
        toy = Toy()
        torch.manual_seed(7)
        return [*run(toy, make(toy)), *toy.state()]

    expected = trained(whole)
    assert same(expected, trained(lambda toy: capture_step(whole(toy))))
    assert same(expected, trained(pieces))


def test_a_compiled_model_stays_compiled() -> None:
    torch.use_deterministic_algorithms(True)

    def trained(captured: bool) -> tuple[list[Tensor], int]:
        torch._dynamo.reset()
        toy = Toy(dropout=0.0)
        ran = 0

        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
            compiled = compile_fx(graph, inputs)

            def call(*args: Any) -> Any:
                nonlocal ran
                ran += 1
                return compiled(*args)

            return call

        toy.model = torch.compile(toy.model, backend=backend)
        losses = run(toy, capture_step(toy.step) if captured else toy.step)
        before = ran
        toy.model(batches(1)[0][0].cuda())
        assert ran == before + 1
        return [*losses, *toy.state()[:-1]], ran

    expected, every_call = trained(captured=False)
    found, python_calls = trained(captured=True)
    assert same(expected, found)
    assert python_calls < every_call  # replays don't come back to Python


def waits(toy: Toy, x: Tensor, y: Tensor) -> Tensor:
    loss = toy.step(x, y)
    return loss if loss.item() > 0 else -loss


def chooses(toy: Toy, x: Tensor, y: Tensor) -> Tensor:
    return toy.step(x[y < 8], y)


def copies(toy: Toy, x: Tensor, y: Tensor) -> Tensor:
    noise = torch.ones(32).pin_memory()
    return toy.step(x * noise.to("cuda", non_blocking=True), y)


def draws(toy: Toy, x: Tensor, y: Tensor) -> Tensor:
    return toy.step(x, y) if torch.rand(()) >= 0 else toy.seen


def alternates(toy: Toy, x: Tensor, y: Tensor) -> Tensor:
    toy.turn = 1 - getattr(toy, "turn", 0)  # type: ignore[attr-defined]
    return toy.step(x.clone() if toy.turn else x.neg(), y)  # type: ignore[attr-defined]


def schedules(toy: Toy, x: Tensor, y: Tensor) -> Tensor:
    toy.turn = 1 + getattr(toy, "turn", 0)  # type: ignore[attr-defined]
    toy.optimizer.param_groups[0]["lr"].fill_(1e-2 / toy.turn)  # type: ignore[attr-defined]
    return toy.step(x, y)


UNFIT = [
    (waits, {}, "waits for the device", "aten::item"),
    (chooses, {}, "waits for the device", "aten::nonzero"),
    (copies, {}, "copies from host memory", "aten::copy_"),
    (draws, {}, "random numbers on the CPU", ""),
    (alternates, {}, "where the next runs", "aten::"),
    (schedules, {}, "would be frozen", "aten::fill_"),
    (Toy.step, {"capturable": False, "lr": 1e-2}, "is not capturable", ""),
]


@pytest.mark.parametrize(("step", "optimizer", "reason", "op"), UNFIT)
def test_what_a_graph_cannot_hold_is_named_and_the_step_is_made(
    step: Callable[[Toy, Tensor, Tensor], Tensor], optimizer: dict[str, Any], reason: str, op: str
) -> None:
    torch.use_deterministic_algorithms(step is not chooses)
    eager, captured = Toy(**optimizer), Toy(**optimizer)
    torch.manual_seed(7)
    expected = [step(eager, x.cuda(), y.cuda()).detach() for x, y in batches()]
    torch.manual_seed(7)
    made: Callable[[Tensor, Tensor], Tensor] = capture_step(lambda x, y: step(captured, x, y))
    found, refused = [], []
    for x, y in batches():
        try:
            found.append(made(x.cuda(), y.cuda()).detach())
        except NotCapturable as why:
            refused.append(why)
            found.append(why.result)
            made = lambda x, y: step(captured, x, y)  # noqa: E731
    assert len(refused) == 1
    assert refused[0].ran
    assert reason in str(refused[0])
    assert refused[0].op.startswith(op)
    if "waits" in reason:
        assert "test_graphs.py" in refused[0].where
    if step is not chooses:
        assert same(expected, found)
        assert same(eager.state(), captured.state())


def test_a_scheduler_around_the_step_needs_a_tensor_rate() -> None:
    toy = Toy(lr=1e-2)
    step = capture_step(toy.step)
    data = batches()
    step(*data[0])
    step(*data[1])
    toy.optimizer.param_groups[0]["lr"] = 5e-3
    with pytest.raises(NotCapturable, match=r"AdamW's lr changed from 0\.01 to 0\.005"):
        step(*data[2])
    toy = Toy(lr=1e-2)
    step = capture_step(toy.step)
    run(toy, step, 6)
    toy.optimizer.param_groups[0]["lr"] = 1e-3
    with pytest.raises(NotCapturable, match=r"AdamW's lr changed from 0\.01 to 0\.001"):
        step(*batches()[0])
    step.reset()
    run(toy, step, 6)
    assert step.captured


def test_our_optimizer_takes_a_number_and_a_scheduler_around_the_step() -> None:
    """Replays read its learning rate from the device, so a scheduler may change the number between them."""

    def trained(captured: bool) -> tuple[list[Tensor], list[Tensor]]:
        toy = Toy(dropout=0.0)
        toy.optimizer = AdamW(toy.model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(toy.optimizer, 1, gamma=0.5)
        step = capture_step(toy.step) if captured else toy.step
        losses = []
        for x, y in batches():
            losses.append(step(x.cuda(), y.cuda()).detach().clone())
            schedule.step()
        assert not captured or step.captured
        assert toy.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5**STEPS)
        return losses, toy.state()

    torch.use_deterministic_algorithms(True)
    with bakeoff.using(adamw_="triton", global_norm="triton"):
        (expected, ended), (found, reached) = trained(False), trained(True)
    assert same(expected, found)
    assert same(ended, reached)


def test_autocast_belongs_inside() -> None:
    toy = Toy()
    step = capture_step(toy.step)
    with torch.autocast("cuda", dtype=torch.bfloat16), pytest.raises(NotCapturable, match="enter it inside"):
        run(toy, step)


def test_a_failed_capture_leaves_a_working_device() -> None:
    toy = Toy()
    calls = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        loss = nn.functional.cross_entropy(toy.model(x), y)
        if calls == 4:  # the call that captures
            loss.item()
        return loss

    captured = capture_step(step)
    run(toy, captured, 3)
    random_state = torch.cuda.get_rng_state()
    weights = [p.detach().clone() for p in toy.model.parameters()]
    x, y = (tensor.cuda() for tensor in batches()[0])
    with pytest.raises(NotCapturable, match="the capture failed") as caught:
        captured(x, y)
    assert not caught.value.ran
    assert "loss.item()" in caught.value.where
    assert torch.equal(torch.cuda.get_rng_state(), random_state)
    assert same(weights, [p.detach() for p in toy.model.parameters()])
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    first = toy.model(x)  # dropout draws again
    torch.cuda.set_rng_state(random_state)
    assert torch.equal(first, toy.model(x))
    toy.model.zero_grad(set_to_none=True)
    again = capture_step(toy.step)
    run(toy, again)
    assert again.captured


def test_odd_batches_and_changed_constants_are_refused() -> None:
    toy = Toy()
    step = capture_step(lambda x, y, scale: toy.step(x * scale, y))
    (x, y), *_ = batches()
    step(x, y, 1.0)
    with pytest.raises(ValueError, match="call the plain step for an odd batch"):
        step(x[:7], y[:7], 1.0)
    with pytest.raises(ValueError, match=r"1\.0 became 2\.0"):
        step(x, y, 2.0)
    with pytest.raises(TypeError, match="not ndarray"):
        step(x.numpy(), y, 1.0)
    with pytest.raises(ValueError, match="requires_grad"):
        step(x.clone().requires_grad_(), y, 1.0)
    with pytest.raises(ValueError, match="warmup=1"):
        capture_step(toy.step, warmup=1)


def test_memory_is_reported_shared_and_given_back() -> None:
    def work(x: Tensor) -> Tensor:
        return (x @ x).relu().sum()

    x = torch.randn(2048, 2048, device="cuda")  # 16 MiB; two such results live inside
    torch.cuda.synchronize()
    one = capture_step(work)
    for _ in range(4):
        one(x)
    assert 3 * x.nbytes <= one.bytes <= 6 * x.nbytes
    two = capture_step(work, pool=one.pool)
    for _ in range(4):
        two(x)
    assert two.bytes < one.bytes
    pool, held = one.pool, torch.cuda.memory_allocated()

    def segments() -> int:
        torch.cuda.empty_cache()
        return sum(tuple(s["segment_pool_id"]) == pool for s in torch.cuda.memory_snapshot())

    assert segments() > 0
    two.reset()
    assert segments() > 0  # the other graph still replays in there
    one.reset()
    assert segments() == 0
    assert one.bytes == 0
    assert held - torch.cuda.memory_allocated() >= 2 * x.nbytes  # the input buffers


def test_captured_training_never_waits() -> None:
    toy = Toy()
    step = capture_step(toy.step)
    held = batches()
    with forbid_sync():
        for x, y in held:
            step(x, y)
        with forbid_sync(), pytest.raises(RuntimeError, match="synchronizing"):
            toy.seen.item()
        with pytest.raises(RuntimeError, match="synchronizing"):
            toy.seen.item()
    assert toy.seen.item() == STEPS


def test_loading_threads_go_on_during_capture() -> None:
    stop = threading.Event()
    loaded = 0
    failures: list[Exception] = []

    def load() -> None:
        nonlocal loaded
        stream = torch.cuda.Stream()
        while not stop.is_set():
            try:
                with torch.cuda.stream(stream):
                    torch.randn(1 << 16).pin_memory().to("cuda", non_blocking=True)
                    torch.empty(3 << 20, device="cuda")
                loaded += 1
            except Exception as error:  # noqa: BLE001
                failures.append(error)
                return

    thread = threading.Thread(target=load)
    thread.start()
    try:
        toy = Toy(dropout=0.0)
        torch.use_deterministic_algorithms(True)
        step = capture_step(toy.step)
        found = run(toy, step)
    finally:
        stop.set()
        thread.join()
    eager = Toy(dropout=0.0)
    assert not failures
    assert loaded > 0
    assert same(found, run(eager, eager.step))


def test_generators_of_the_step_advance() -> None:
    draw = torch.Generator("cuda").manual_seed(3)
    step = capture_step(lambda x: x * torch.rand(4, device="cuda", generator=draw), generators=[draw])
    found = torch.stack([step(torch.ones(4)) for _ in range(6)])
    again = torch.Generator("cuda").manual_seed(3)
    expected = torch.stack([torch.rand(4, device="cuda", generator=again) for _ in range(6)])
    assert torch.equal(found, expected)


@pytest.mark.skipif(not KEEPS_PINNED, reason="PyTorch keeps no pinned memory for graphs")
def test_lists_of_addresses_that_a_capture_copied_stay() -> None:
    """Shards are joined and parted by ops that copy such lists from pinned memory, which must stay as it was:
    here some is taken, written and given back again and again."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        joined = x.new_empty(2, 10 + 35)
        torch._chunk_cat([x, y], 0, 2, out=joined)
        parts = x.new_empty(2, 10), x.new_empty(2, 35)
        torch.split_with_sizes_copy(joined, [10, 35], dim=1, out=parts)
        return joined, *parts

    captured = capture_step(step)
    draw = torch.Generator("cuda").manual_seed(1)
    for _ in range(STEPS):
        x, y = (torch.randn(n, 5, device="cuda", generator=draw) for n in (4, 14))
        for size in (64, 128, 256, 512, 1024, 4096) * 20:
            torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(255)
        assert same(list(step(x, y)), list(captured(x, y)))
    assert captured.captured
