"""The yardstick is fair: what rounds as well as eager passes on every draw, and what is biased does not."""

from typing import Any

import pytest
import torch

from bakeoff.ops.linear_cross_entropy.op import OP as LOSS
from bakeoff.ops.muon.op import OP as MUON
from bakeoff.ops.muon.op import muon_case
from bakeoff.ops.norm_linear.op import OP, _case
from bakeoff.select import Candidate, Case, TensorMeta
from bakeoff.select.contests.draw import nudged
from bakeoff.select.contests.examine import examine
from bakeoff.select.contests.judge import FURTHER, Inaccurate, judge
from bakeoff.select.contests.results import outputs_of, results
from bakeoff.select.contests.verify import verify
from bakeoff.select.contests.yardstick import Yardstick, _yardstick

HOSTILE, PLAIN = ("adversarial", "adversarial"), ("normal", "normal")


def drawn(seed: int, kinds: tuple[str, str], nudge: int = 0) -> Yardstick:
    """Of LayerNorm and a projection in bfloat16: adversarially one rounding decides a whole result."""
    made = _case(128, 64, 48)
    return _yardstick(OP, Case(made.args, "cpu"), seed, kinds, "here", nudge=nudge)


@pytest.mark.parametrize("kinds", [HOSTILE, PLAIN], ids=["adversarial", "normal"])
def test_a_perfect_candidate_is_never_rejected(kinds: tuple[str, str]) -> None:
    for seed in range(20):
        stick = drawn(seed, kinds)
        for name, exact in stick.exact.items():
            judge(name, exact.to(stick.dtypes[name]), stick)


def test_eager_with_other_last_bits_is_as_good_as_eager() -> None:
    """On 20 hostile draws the one error that eager makes says too little: the largest of several does not."""
    lucky = 0
    for seed in range(20):
        stick, other = drawn(seed, HOSTILE), drawn(seed, HOSTILE, nudge=99)
        for norm in ("max", "rms", "gain"):
            mine = getattr(other.eager["output"], norm)
            lucky += mine > stick.allowed("output", norm)
            while mine > stick.allowed("output", norm):
                assert stick.look_further(), f"seed {seed}: eager's own {norm} error is rejected"
    assert lucky, "one draw was always enough: this test shows nothing"


@pytest.mark.parametrize("factor", [1 + 2**-8, 1 - 2**-8])
def test_a_biased_candidate_is_rejected(factor: float) -> None:
    for seed in range(5):
        stick = drawn(seed, PLAIN)
        for name in ("output", "gradient of x", "gradient of weight"):
            with pytest.raises(Inaccurate, match=r"gain|rms"):
                judge(name, (stick.exact[name] * factor).to(stick.dtypes[name]), stick)
        assert stick.looked == FURTHER


def test_further_draws_are_the_draw_with_other_last_bits() -> None:
    one, other = drawn(3, HOSTILE), drawn(3, HOSTILE, nudge=1)
    for name in ("x", "weight", "gamma"):
        a, b = (stick.args[OP.params.index(name)].detach().double() for stick in (one, other))
        assert not torch.equal(a, b)
        assert bool(((a - b).abs() <= 2.5 * torch.finfo(torch.bfloat16).eps * a.abs() * 1.01).all())


def test_a_coarsely_nudged_draw_rounds_otherwise_in_16_bits() -> None:
    x, generator = torch.randn(1000), torch.Generator().manual_seed(0)
    fine, coarse = (nudged(x, generator, coarsely=coarsely) for coarsely in (False, True))
    assert (fine.bfloat16() != x.bfloat16()).float().mean() < 0.01
    assert (coarse.bfloat16() != x.bfloat16()).float().mean() > 0.7
    assert ((coarse - x).abs() <= 2.01 * torch.finfo(torch.bfloat16).eps * x.abs()).all()


def test_muon_s_further_draws_are_rounded_otherwise() -> None:
    """Its iterations are in bfloat16 on CUDA: the last bits of float32 would change nothing."""
    assert MUON.rounded <= set(MUON.params)
    case = muon_case(2, 8, 12, "cpu")
    one, other = (_yardstick(MUON, case, 2, ("normal", "normal"), "", nudge=n) for n in (0, 1))
    for name in ("params", "grads", "momentum"):
        a, b = (torch.stack(list(stick.args[MUON.params.index(name)])).bfloat16() for stick in (one, other))
        assert torch.equal(a, b) == (name == "params")


@pytest.mark.parametrize(
    ("times", "everywhere", "passes"), [(1.5, False, True), (1.5, True, False), (3.0, False, False)]
)
def test_one_unlucky_draw_is_no_rejection(times: float, everywhere: bool, passes: bool) -> None:
    """What is a little too far off on one draw passes, on other draws too, or by more, does not."""
    case = Case(_case(128, 64, 48, dtype=torch.float32).args, "cpu")
    stick = _yardstick(OP, case, 0, PLAIN, "here")
    while stick.look_further():
        pass
    too_large = 1 + times * stick.allowed("output", "gain")

    def call(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        wide = [a.double() if isinstance(a, torch.Tensor) else a for a in (x, weight, *rest)]
        y = outputs_of(OP.reference, wide)[0]
        here = torch.equal(x, stick.args[0])
        return (y * (too_large if everywhere or here else 1.0)).float()

    candidate = Candidate("scaled", call)
    if passes:
        assert verify(OP, candidate, [stick])[0].gain > stick.allowed("output", "gain")
        examine(OP, candidate, stick)
    else:
        with pytest.raises(Inaccurate, match=r"gain|rms"):
            verify(OP, candidate, [stick])


def test_further_draws_are_given_another_gradient() -> None:
    """What eager rounds of one number, as of a loss's gradient, is luck as well: every draw has another."""
    one, other = (drawn(3, HOSTILE, nudge=n).cotangents[0] for n in (0, 1))
    factor = (other / one).float()
    assert one.stride() == other.stride() == (0, 1)
    assert 0.49 <= factor.min() <= factor.max() <= 1.01
    assert factor.max() / factor.min() < 1 + 2**-6


def test_a_chunked_loss_is_as_good_as_eager() -> None:
    """Eager rounds the loss's gradient over the number of rows to 16 bits, where a chunked loss does not."""
    made = next(case for case in LOSS.cases() if case.name == "24576x384->256 bf16")
    x, target = (TensorMeta.dense((3072, *made.tensors[n].shape[1:]), made.tensors[n].dtype, grad=n == "x")
                 for n in ("x", "target"))  # fmt: skip
    case, rejected = Case({**made.args, "x": x, "target": target}, "cpu"), 0
    for seed in (11, 21):
        stick = _yardstick(LOSS, case, seed, HOSTILE, "here")
        outputs = outputs_of(LOSS.candidate("chunked").implementation, stick.args)
        for name, tensor in results(outputs, stick.args, stick.cotangents, stick.names).items():
            judge(name, tensor, stick)
        rejected += stick.looked > 0
    assert rejected, "one draw was always enough: this test shows nothing"
