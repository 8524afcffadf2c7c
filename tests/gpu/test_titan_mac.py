"""TitanMAC on a GPU: steps never wait, a replayed step is the eager one, what it writes."""

from typing import Any

import pytest
import torch
from torch import Tensor

import bakeoff
from bakeoff.apps.bench.memory_forms import Learner
from bakeoff.apps.bench.recall import Task, accuracy, draw
from bakeoff.apps.train.config import Config as RunConfig
from bakeoff.apps.train.config import Optim, Train
from bakeoff.apps.train.step import Stepper
from bakeoff.graphs import forbid_sync
from bakeoff.models.titan_mac import Cache, Config, TitanMAC
from bakeoff.nn import NeuralMemory
from bakeoff.select import using

CUDA = torch.device("cuda", 0)
SMALL: dict[str, Any] = {
    "d_model": 128, "layers": 2, "heads": 2, "segment": 64, "persistent": 4, "chunk": 32, "max_seq_len": 128,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "mac": {},
    "mag": {"variant": "mag"},
    "segments": {"gate": "segment"},
    "lmm": {"variant": "lmm"},
    "last layer": {"learns": "last"},
}
EVERY = pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=[] if name in ("mac", "mag") else pytest.mark.exhaustive)
        for name, changes in FORMS.items()
    ],
)
STEPS = 5


def batches(count: int = STEPS) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(256, (4, 129), dtype=torch.uint8, generator=draw).to(CUDA) for _ in range(count)]


def stepper(changes: dict[str, Any], precision: str = "bf16") -> Stepper:
    torch.manual_seed(0)
    config = RunConfig(
        model=Config(**{**SMALL, **changes}),
        optim=Optim(lr=1e-3),
        train=Train(batch_size=4, precision=precision, device="cuda"),  # type: ignore[arg-type]
    )
    assert isinstance(config.model, Config)
    return Stepper(TitanMAC(config.model).to(CUDA).train(), config, CUDA)


@EVERY
def test_a_step_never_waits_for_the_device(changes: dict[str, Any]) -> None:
    made = stepper(changes)
    for number, rows in enumerate(batches()):
        if number < 3:
            made(rows, 1e-3)
            continue
        with forbid_sync():
            made(rows, 1e-3)
    assert made.read(STEPS)["skipped"] == 0


@EVERY
def test_replayed_steps_go_where_eager_ones_do(changes: dict[str, Any]) -> None:
    """To a thousandth of the way: attention's backward adds up in any order."""
    ends = []
    for capture in (False, True):
        with using(regime="graph"):
            made = stepper(changes, "float32")
            start = torch.cat([p.detach().flatten() for p in made.model.parameters()])
            if capture:
                made.capture()
            for rows in batches():
                made(rows, 1e-3)
        assert made.uncaptured == ""
        assert (made.captured is not None and made.captured.captured) == capture
        ends.append(torch.cat([p.detach().flatten() for p in made.model.parameters()]))
    assert (ends[0] - ends[1]).norm() < 1e-3 * (ends[0] - start).norm()


@EVERY
def test_decoding_equals_the_whole_pass(changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = TitanMAC(Config(**{**SMALL, **changes})).to(CUDA).double()
    ids = torch.randint(256, (2, 150), device=CUDA)
    with torch.no_grad():
        whole, _ = model(ids)
        cache = Cache(model.config)
        pieces = [model.decode(piece, cache) for piece in ids.split([70, 1, 1, 50, 28], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-6, atol=1e-6)


def test_it_writes_text_and_leaks_nothing() -> None:
    torch.manual_seed(0)
    model = TitanMAC(Config(**SMALL)).to(CUDA)
    text = model.generate(torch.randint(256, (2, 5), device=CUDA), 70, temperature=0.0)
    assert text.shape == (2, 75)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        bakeoff.assert_causal(model, length=128, samples=2, check_decode=False)


@pytest.mark.parametrize("read", ["after", "before", pytest.param("chunk", marks=pytest.mark.exhaustive)])
def test_the_memory_in_bf16_is_near_that_in_float64(read: Any) -> None:
    torch.manual_seed(0)
    memory = NeuralMemory(256, heads=4, chunk=64, read=read).to(CUDA)
    x = torch.randn(2, 300, 256, device=CUDA)
    with torch.no_grad():
        exact, _ = memory.double()(x.double())
        memory.float()
        plain, _ = memory(x)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            cast, _ = memory(x)
    torch.testing.assert_close(plain.double(), exact, rtol=0, atol=2e-2)
    assert (cast.double() - exact).square().mean().sqrt() < 0.05 * exact.square().mean().sqrt()


def test_memory_recalls_what_attention_no_longer_sees() -> None:
    """Pairs behind more noise than all windows: with memory nearly all answers come, without it a guess.
    After how many steps they come is a matter of rounding."""
    right = dict[str, float]()
    for form in ("mac", "mac, no memory"):
        base = Config(**{**SMALL, "segment": 32, "chunk": 16})
        task, generator = Task(pairs=8, noise=72, rows=32), torch.Generator().manual_seed(0)
        learner = Learner(form, base, CUDA, 0)
        with using("heuristic", regime="graph"):
            for step in range(1, 601):
                learner(*draw(task, generator), 3e-3 * min(1.0, step / 50))
                if step % 50 == 0:
                    with learner.apart(), learner.precision():
                        right[form] = accuracy(learner.model, task, task.noise)
                    if right[form] > 0.9:
                        break
    assert right["mac"] > 0.9
    assert right["mac, no memory"] < 0.1
