"""muon_ and Muon on a CUDA device: the contest's verification, singular values, no host sync, graphs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bakeoff
from bakeoff.apps.train import recipe, resolve
from bakeoff.apps.train.step import Stepper
from bakeoff.graphs import forbid_sync
from bakeoff.kernels.counter import launches
from bakeoff.models import build
from bakeoff.ops.muon import muon_
from bakeoff.ops.muon.op import OP, muon_case
from bakeoff.ops.muon.settings import size_of
from bakeoff.optim import Muon, muon_groups
from bakeoff.select.contests.verify import verify, yardsticks
from bakeoff.select.declare.variants import at, variants_of

HALF = torch.bfloat16
FORMS = {
    "wide": muon_case(8, 128, 384),
    "tall": muon_case(8, 384, 128),
    "square": muon_case(5, 256, 256),
    "odd": muon_case(5, 77, 1000),
    "odd, tall": muon_case(5, 1000, 77),
    "small": muon_case(9, 24, 40),
    "a row": muon_case(3, 1, 300),
    "bf16": muon_case(5, 128, 384, dtype=HALF),
    "fp16": muon_case(5, 384, 100, dtype=torch.float16),
    "bf16 gradients": muon_case(5, 128, 384, grad=HALF),
    "skip": muon_case(5, 128, 384, guarded=True),
    "plain, spectral": muon_case(5, 384, 128, nesterov=False, scale="spectral"),
    "124M out": muon_case(12, 768, 768),
}


@pytest.mark.parametrize("case", FORMS.values(), ids=FORMS)
def test_passes_the_contest_verification(case: Any) -> None:
    """Poisoned memory, fences, hostile inputs, bitwise repetition, against the float64 reference."""
    _, deterministic = verify(OP, OP.candidate("triton"), yardsticks(OP, OP.bucket(case)))
    assert deterministic


@pytest.mark.parametrize("name", ["compiled", "torch"])
def test_others_pass_it_too(name: str) -> None:
    verify(OP, OP.candidate(name), yardsticks(OP, OP.bucket(FORMS["wide"])))


@pytest.mark.parametrize("case", [FORMS["wide"], FORMS["small"]], ids=["wide", "small"])
def test_every_variant_passes_the_contest_verification(case: Any) -> None:
    candidate, stick = OP.candidate("triton"), next(yardsticks(OP, OP.bucket(case)))
    texts = variants_of(candidate, case)["forward"]
    assert len(texts) >= 6
    for text in texts:
        verify(OP, at(candidate, text), [stick])


def lists(shapes: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    made = [[torch.randn(s, device="cuda").to(dtype) for s in shapes] for _ in range(2)]
    return [*made, [torch.zeros(s, device="cuda") for s in shapes]]


@pytest.mark.parametrize("impl", ["eager", "compiled", "triton"])
@pytest.mark.parametrize("shape", [(256, 1024), (1024, 256), (77, 1000)], ids=str)
def test_singular_values_end_near_one(shape: tuple[int, int], impl: str) -> None:
    params, grads, momentum = lists([shape] * 3)
    for p in params:
        p.zero_()
    muon_(params, grads, momentum, lr=1.0, impl=impl)
    for p, g in zip(params, grads, strict=True):
        x = -p.double() / size_of(shape, "match_rms")
        values = torch.linalg.svdvals(x)
        assert values.min() > 0.66
        assert values.max() < 1.24
        u, _, v = torch.linalg.svd(g.double(), full_matrices=False)
        assert torch.cosine_similarity(x.flatten(), (u @ v).flatten(), dim=0) > 0.97


def test_any_mix_of_shapes_and_layouts() -> None:
    shapes = [(64, 96), (96, 64), (64, 96), (0, 4), (33, 65)]
    one = lists(shapes)
    other = [[t.clone() for t in column] for column in one]
    one[0][0] = one[0][0].t().contiguous().t()
    base = torch.empty(64 * 96 + 1, device="cuda")[1:].view(64, 96)
    one[1][2] = base.copy_(one[1][2])  # not aligned to 16 bytes
    muon_(*one, lr=0.1, impl="triton")
    muon_(*other, lr=0.1, impl="eager")
    for a, b in zip(one[0], other[0], strict=True):
        if a.numel():
            assert (a - b).norm() < 0.05 * 0.1 * 0.2 * max(a.shape) ** 0.5 * min(a.shape) ** 0.5


def test_launches() -> None:
    """For each shape three, and three an iteration, whatever the number of matrices."""
    group = lists([(64, 96)] * 7 + [(96, 64)] * 2)
    muon_(*group, lr=0.1, impl="triton")
    before = launches()
    muon_(*group, lr=0.1, impl="triton")
    assert launches() - before == 2 * (3 + 3 * 5)


def test_a_skipped_step_changes_nothing() -> None:
    group = lists([(64, 96), (77, 100)])
    group[1][0][3, 4] = float("nan")
    before = [t.clone() for column in (group[0], group[2]) for t in column]
    muon_(*group, lr=0.1, found_inf=torch.ones((), device="cuda"), impl="triton")
    assert all(map(torch.equal, before, [*group[0], *group[2]]))


class Toy:
    """A small model under Muon, stepped with clipping and skipping."""

    def __init__(self, impl: str | None) -> None:
        torch.manual_seed(0)
        inner = (nn.Linear(128, 384), nn.GELU(), nn.Linear(384, 128))
        self.model = nn.Sequential(nn.Embedding(64, 128), *inner, nn.Linear(128, 64)).cuda()
        groups = muon_groups(self.model)
        self.optimizer = Muon(groups, 0.02, max_grad_norm=1.0, skip_nonfinite=True, muon_impl=impl)

    def step(self, ids: Tensor) -> None:
        nn.functional.cross_entropy(self.model(ids), (ids + 1) % 64).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[Tensor]:
        states = self.optimizer.state
        return [*self.model.parameters(), *(t for p in self.model.parameters() for t in states[p].values())]


@pytest.mark.parametrize("impl", ["eager", "compiled", "triton"])
def test_captured_steps_are_the_eager_ones_and_hear_of_a_new_rate(impl: str) -> None:
    captured, eager = Toy(impl), Toy(impl)
    ids = torch.arange(64, device="cuda")
    with bakeoff.using("heuristic"):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                captured.step(ids)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.step(ids)
        for _ in range(2):
            eager.step(ids)
        for rate in (0.02, 3e-3, 0.0):
            for toy in (captured, eager):
                for group in toy.optimizer.param_groups:
                    group["lr"] = rate
            graph.replay()
            eager.step(ids)
            assert all(map(torch.equal, captured.state(), eager.state())), rate


@pytest.mark.parametrize("impl", [None, "eager", "triton"])
def test_a_step_never_waits(impl: str | None) -> None:
    toy, ids = Toy(impl), torch.arange(64, device="cuda")
    with bakeoff.using("heuristic"):
        for _ in range(3):
            toy.step(ids)
        with forbid_sync():
            for _ in range(3):
                toy.step(ids)


def test_it_learns_as_on_the_cpu() -> None:
    toy, ids = Toy("triton"), torch.arange(64, device="cuda")
    for _ in range(60):
        toy.step(ids)
    assert nn.functional.cross_entropy(toy.model(ids), (ids + 1) % 64).item() < 0.2


def test_the_trainers_step_is_captured() -> None:
    given = ["optim.name=muon", "train.batch_size=4", "train.seq_len=64"]
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
