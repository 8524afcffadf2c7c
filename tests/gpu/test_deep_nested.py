"""DeepNestedOptimizer on a CUDA device: no waiting, captured steps, resumed runs, the trainer's step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bakeoff
from bakeoff.apps.train import recipe, resolve
from bakeoff.apps.train.step import Stepper
from bakeoff.graphs import capture_step, forbid_sync
from bakeoff.models import build
from bakeoff.optim import DeepNestedOptimizer, NestedController, nested_groups

QUICK = {"wait": 0, "margin": 0.0}


class Toy:
    """A small model, its optimizer with every rule in use, and a step of both."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Embedding(32, 16), nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 32)
        ).cuda()
        groups = nested_groups(self.net, 0.1)
        groups[0]["muon"], groups[1]["period"] = True, 3
        self.optimizer = DeepNestedOptimizer(
            groups, 1e-2, controller=QUICK, max_grad_norm=1.0, skip_nonfinite=True
        )

    def step(self, ids: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(ids), (ids + 1) % 32)
        loss.backward()
        self.optimizer.loss = loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def state(self) -> list[Tensor]:
        return [*self.net.parameters(), *self.optimizer.buffers().values()]


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 32, (64,), generator=generator).cuda() for _ in range(count)]


def test_captured_steps_equal_others_bit_for_bit_and_never_wait() -> None:
    plain, captured = Toy(), Toy()
    rows = batches(15)
    with bakeoff.using("heuristic"):
        for ids in rows:
            plain.step(ids)
        step = capture_step(captured.step)
        for number, ids in enumerate(rows):
            if number < 5:
                step(ids)
            else:
                with forbid_sync():
                    step(ids)
    assert captured.optimizer.controller is not None
    assert not torch.equal(captured.optimizer.controller.multipliers.cpu(), torch.ones(3))
    assert all(torch.equal(a, b) for a, b in zip(plain.state(), captured.state(), strict=True))


def test_steps_never_wait_for_the_device() -> None:
    toy = Toy()
    rows = batches(8)
    with bakeoff.using("heuristic"):
        for ids in rows[:3]:
            toy.step(ids)
        with forbid_sync():
            for ids in rows[3:]:
                toy.step(ids)


def test_the_controller_learns_alike_on_both_devices() -> None:
    here, there = NestedController(3, wait=0), NestedController(3, "cuda", wait=0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        sums, loss = torch.rand(3, 4, generator=generator) + 0.1, torch.rand((), generator=generator) + 1.0
        here.advance(sums, loss)
        there.advance(sums.cuda(), loss.cuda())
    assert torch.allclose(here.multipliers, there.multipliers.cpu(), rtol=1e-3)


@pytest.mark.parametrize("muon", ["false", "true"])
def test_the_trainers_step_is_captured(muon: str) -> None:
    given = ["optim.name=deep-nested", f"optim.muon={muon}", "train.batch_size=4", "train.seq_len=64"]
    config: Any = resolve(recipe("llm-med-tiny"), None, given)
    torch.manual_seed(0)
    with bakeoff.using("heuristic", regime="graph"):
        stepper = Stepper(build(config.model).cuda().train(), config, torch.device("cuda"))
        stepper.capture()
        rows = torch.randint(0, 256, (4, 65), dtype=torch.uint8).cuda()
        losses = []
        for _ in range(12):
            stepper(rows, 1e-3)
            losses.append(stepper.read(1)["loss"])
    assert stepper.captured is not None, stepper.uncaptured
    assert losses[-1] < losses[0]
