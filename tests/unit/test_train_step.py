"""The optimizer step: schedule, decay groups, accumulation, clipping, steps that are skipped."""

import math

import pytest
import torch

from bakeoff.apps.train.config import Config, Optim, Train
from bakeoff.apps.train.step import Stepper, learning_rate, uses_bf16
from bakeoff.errors import PolicyError
from bakeoff.models.llm_med import Config as ModelConfig
from bakeoff.models.llm_med import LLMMed
from bakeoff.select.choose.policy import using

CPU = torch.device("cpu")
MODEL = ModelConfig(d_model=16, layers=1, heads=2, max_seq_len=8)


def stepper(**train: object) -> Stepper:
    torch.manual_seed(0)
    optim = train.pop("optim", Optim(clip=0.0))
    config = Config(model=MODEL, optim=optim, train=Train(batch_size=4, **train))
    return Stepper(LLMMed(MODEL), config, CPU)


def rows(seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (4, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_a_strict_policy_is_for_the_step_s_calls() -> None:
    """Held-out rows have other shapes, which nobody tunes."""
    ours = stepper()
    with using("strict"):
        with pytest.raises(PolicyError, match="policy is strict"):
            ours(rows(), 0.01)
        assert ours.bits_per_byte(rows()) > 0


def weights(of: Stepper) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in of.model.named_parameters()}


def test_learning_rate_climbs_and_decays() -> None:
    optim = Optim(lr=2.0, warmup=0.1, min_lr=0.25)
    assert learning_rate(optim, 0.0) == 0.0
    assert learning_rate(optim, 0.05) == pytest.approx(1.0)
    assert learning_rate(optim, 0.1) == pytest.approx(2.0)
    assert learning_rate(optim, 0.55) == pytest.approx(2.0 * (0.25 + 0.75 / 2))
    assert learning_rate(optim, 1.0) == pytest.approx(0.5)
    assert learning_rate(Optim(lr=2.0, warmup=0.0), 0.0) == 2.0


def test_a_step_is_adamw_with_decay_on_matrices_alone() -> None:
    ours = stepper(optim=Optim(lr=0.1, weight_decay=0.5, clip=1e9))
    before = weights(ours)
    ours(rows(), 0.01)
    torch.manual_seed(0)
    model = LLMMed(MODEL)
    model(rows()[:, :-1], rows()[:, 1:])[1].backward()
    for name, parameter in model.named_parameters():
        decay = 0.5 if parameter.ndim >= 2 else 0.0
        # The first step of Adam: both averages are the gradient's own, so the update is its sign.
        update = parameter.grad / (parameter.grad.abs() + 1e-8)
        expected = before[name] * (1 - 0.01 * decay) - 0.01 * update
        torch.testing.assert_close(weights(ours)[name], expected, rtol=1e-5, atol=1e-6)


def test_accumulation_gives_the_whole_batch_s_gradient() -> None:
    whole, parts = stepper(), stepper(accumulate=4)
    for step in range(3):
        whole(rows(step), 1e-2)
        parts(rows(step), 1e-2)
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], value, rtol=1e-4, atol=2e-5)
    one, four = whole.read(3), parts.read(3)
    assert four["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert four["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_clipping_bounds_the_gradient_that_adam_sees() -> None:
    free, clipped = stepper(), stepper(optim=Optim(clip=1e-3))
    free(rows(), 1e-2)
    clipped(rows(), 1e-2)
    norm = free.read(1)["grad_norm"]
    assert clipped.read(1)["grad_norm"] == pytest.approx(norm)  # what is reported is not clipped
    name = "embed.weight"
    seen = [s.optimizer.state[s.model.get_parameter(name)]["exp_avg"] for s in (free, clipped)]
    torch.testing.assert_close(seen[1], seen[0] * (1e-3 / norm), rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(poison: float) -> None:
    ours = stepper()
    ours(rows(0), 1e-2)
    before = weights(ours)
    state = {k: v.clone() for k, v in ours.optimizer.state[ours.parameters[0]].items()}
    hook = ours.model.embed.weight.register_hook(lambda grad: grad * poison)
    ours(rows(1), 1e-2)
    ours(rows(2), 1e-2)
    hook.remove()
    for name, value in weights(ours).items():
        assert torch.equal(value, before[name])
    for key, value in ours.optimizer.state[ours.parameters[0]].items():
        assert torch.equal(value, state[key]), key
    found = ours.read(3)
    assert (found["skipped"], found["skipped_in_a_row"]) == (2, 2)
    assert math.isfinite(found["loss"])
    ours(rows(3), 1e-2)
    found = ours.read(1)
    assert (found["skipped"], found["skipped_in_a_row"]) == (2, 0)
    assert any(not torch.equal(value, before[name]) for name, value in weights(ours).items())


def test_rehearsing_leaves_no_trace() -> None:
    ours = stepper()
    before = weights(ours)
    ours.rehearse(rows())
    assert all(p.grad is None for p in ours.model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in weights(ours).items())
    assert ours.window.eq(0).all()


def test_held_out_bits_count_every_row_once() -> None:
    ours = stepper()
    held = torch.randint(256, (7, 9), dtype=torch.uint8)
    logits, _ = ours.model(held[:, :-1])
    expected = -logits.log_softmax(-1).gather(-1, held[:, 1:, None].long()).mean() / math.log(2)
    assert ours.bits_per_byte(held) == pytest.approx(expected.item(), rel=1e-5)
    assert ours.model.training


def test_precision() -> None:
    assert not uses_bf16(Config(), CPU)
    assert uses_bf16(Config(train=Train(precision="bf16")), CPU)
    ours = stepper(precision="bf16")
    exact = stepper()
    ours(rows(), 1e-2)
    exact(rows(), 1e-2)
    loss = ours.read(1)["loss"]
    assert loss != exact.read(1)["loss"]
    assert loss == pytest.approx(math.log(256), rel=0.05)
    assert all(p.dtype == torch.float32 for p in ours.model.parameters())
