"""Each deliberately wrong candidate meets a contest and is rejected for the right reason; right ones pass."""

import math
import re
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bakeoff.errors import ContestError
from bakeoff.select import Candidate, Case, Op, TensorMeta
from bakeoff.select.choose.hot import transformed
from bakeoff.select.contests.contest import contest
from bakeoff.select.contests.draw import cotangent, inputs
from bakeoff.select.contests.exact import exact_results
from bakeoff.select.contests.examine import examine
from bakeoff.select.contests.judge import Sizes, errors_of
from bakeoff.select.contests.poison import Poison, fenced, unchanged
from bakeoff.select.contests.verdict import Trial, Verdict
from bakeoff.select.contests.verify import Rejected, verify, yardsticks
from tests.unit import zoo


def held(op: Op, case: Case) -> Verdict:
    (verdict,) = contest(op, case, budget_s=0.01)
    return verdict


def trial(verdict: Verdict, name: str) -> Trial:
    return next(t for t in verdict.trials if t.candidate == name)


@pytest.mark.parametrize("name", zoo.WRONG)
def test_a_wrong_candidate_is_rejected_with_its_reason(name: str) -> None:
    candidate, reason = zoo.WRONG[name]
    verdict = held(zoo.op(candidate, zoo.GOOD), zoo.case(48, 192))
    rejected = trial(verdict, name)
    assert rejected.rejected is not None
    assert re.search(reason, rejected.rejected), rejected.rejected
    assert verdict.winner != name
    assert rejected.timing is None
    assert trial(verdict, "good").rejected is None, "a bad neighbour must not harm a good candidate"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_small_factor_is_seen_in_every_dtype_and_a_right_candidate_passes(dtype: torch.dtype) -> None:
    op = zoo.op(zoo.GOOD, zoo.WRONG["small_factor"][0])
    for grad in (True, False):
        verdict = held(op, zoo.case(64, 96, dtype, grad=grad))
        assert trial(verdict, "good").rejected is None
        assert "output is wrong" in (trial(verdict, "small_factor").rejected or "")


@pytest.mark.parametrize("grad", [1.003, 0.997])
def test_a_small_factor_in_one_bf16_gradient_is_seen(grad: float) -> None:
    bad = Candidate("bad", zoo.product(None, lambda dy, dx, dw: (dx * grad, dw)))
    assert "gradient of x is wrong: gain" in str(
        trial(held(zoo.op(bad), zoo.case(64, 96, torch.bfloat16)), "bad").rejected
    )


def test_copies_without_memory_of_their_own_kind_pass() -> None:
    """Sparse ones, and those of shapes alone, can't stand between fences."""

    def sparse(x: torch.Tensor, w: torch.Tensor, flag: object = None) -> torch.Tensor:
        one = torch.eye(w.shape[0]).to_sparse().to(x.dtype).clone()
        shape = torch.ones(w.shape, device="meta").clone().shape
        return torch.tanh(x) * (one @ w[:, None])[:, 0].view(shape)

    verdict = held(zoo.op(Candidate("sparse", sparse)), zoo.case(grad=False))
    assert trial(verdict, "sparse").rejected is None


def test_what_another_thread_lets_go_of_in_a_moment_is_not_kept() -> None:
    """As autograd's thread on a GPU does, which lets go of a call's memory after its results are there."""

    def held_for_a_moment(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
        threading.Thread(target=lambda held: time.sleep(0.1), args=(torch.empty_like(y),)).start()

    op = zoo.op(Candidate("threaded", zoo.product(held_for_a_moment)))
    examine(op, op.by_name["threaded"], next(iter(yardsticks(op, zoo.case()))))


def test_a_rejection_names_norm_index_draw_and_seed() -> None:
    bad = Candidate(
        "bad", zoo.product(lambda x, w, y: y.index_put((torch.tensor(5), torch.tensor(7)), y[5, 7] + 1))
    )
    reason = trial(held(zoo.op(bad), zoo.case()), "bad").rejected
    assert re.fullmatch(
        r"output is wrong: max error \S+ at \[5, 7\], eager's is \S+, allowed \S+ \(normal inputs, seed 0\)",
        str(reason),
    )


def test_a_kernel_that_forgets_its_ragged_tail_is_seen_at_the_shape_that_is_called() -> None:
    bad = zoo.WRONG["ragged_rows"][0]
    case = zoo.case(1001, 8)
    assert zoo.bucket(case).x.shape == (1024, 8), "a multiple of every tile: the tail is empty there"
    assert "x [1001, 8]" in str(trial(held(zoo.op(bad), case), "ragged_rows").rejected)


def test_an_honest_race_passes_and_is_skipped_under_deterministic_algorithms() -> None:
    op = zoo.op(zoo.HONEST_RACE)
    passed = trial(held(op, zoo.case()), "honest_race")
    assert passed.rejected is None
    assert not passed.deterministic
    torch.use_deterministic_algorithms(True)
    assert "use_deterministic_algorithms is on" in str(trial(held(op, zoo.case()), "honest_race").rejected)


def test_a_candidate_whose_counter_advances_passes() -> None:
    assert trial(held(zoo.op(zoo.LAUNCHES), zoo.case()), "launches").rejected is None


def test_right_while_verified_and_wrong_when_timed() -> None:
    reason = trial(held(zoo.op(zoo.turning_wrong(after=18)), zoo.case()), "turning").rejected
    assert str(reason).startswith("after turning had been timed: output is wrong")


def test_compilers_meet_a_candidate_in_plain_memory() -> None:
    """What they try out and throw away would be kept as long as memory is poisoned."""
    modes: list[int] = []
    looks = zoo.product(lambda *_: modes.append(torch._C._len_torch_dispatch_stack()))
    verdict = held(zoo.op(Candidate("looks", looks)), zoo.case())
    assert trial(verdict, "looks").rejected is None
    assert modes[:2] == [0, 1]


def test_an_output_may_share_an_inputs_memory_only_where_plain_pytorch_does() -> None:
    case = Case({"x": TensorMeta.dense((16, 8), torch.float32, grad=True)}, "cpu")
    assert "returns memory of an input" in str(trial(held(zoo.COPY, case), "alias").rejected)
    assert trial(held(zoo.COPY, case), "right").rejected is None
    assert trial(held(zoo.DENSE, case), "alias").rejected is None


@pytest.mark.parametrize("grad", [True, False])
def test_an_output_that_is_a_view_like_plain_pytorch_s_passes_under_no_grad_and_inference_mode(
    grad: bool,
) -> None:
    case = Case({"x": TensorMeta.dense((16, 8), torch.float32, grad=grad)}, "cpu")
    assert trial(held(zoo.HALVES, case), "views").rejected is None
    assert trial(held(zoo.HALVES, case), "copies").rejected is None


def test_writing_into_the_gaps_of_a_strided_input_is_seen() -> None:
    def into_gap(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
        if x.stride(0) > x.shape[1]:
            x.detach().as_strided((1,), (1,), x.storage_offset() + x.shape[1]).fill_(5.0)

    x = TensorMeta((32, 48), torch.float32, (96, 1), True)
    op = zoo.op(Candidate("gap", zoo.product(into_gap)), zoo.GOOD)
    verdict = held(op, zoo.case().replace(x=x))
    assert "modifies its input x" in str(trial(verdict, "gap").rejected)
    assert trial(verdict, "good").rejected is None


def test_reading_past_an_input_is_seen() -> None:
    def past_the_end(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
        if w.untyped_storage().nbytes() > w.nbytes:  # in a contest, it is between fences
            y += 0 * w.as_strided((1,), (1,), w.storage_offset() + w.numel())

    reason = trial(held(zoo.op(Candidate("reads", zoo.product(past_the_end))), zoo.case()), "reads").rejected
    assert "output is nan" in str(reason)


@pytest.mark.parametrize(
    "x",
    [
        TensorMeta((32, 48), torch.float32, (96, 1), True),
        TensorMeta((32, 48), torch.float32, (1, 32), True),
        TensorMeta((32, 48), torch.float32, (0, 1), True),
        TensorMeta((32, 48), torch.float32, (16, 1), True),
        TensorMeta.dense((4, 8, 48), torch.float32, grad=True),
        TensorMeta.dense((48,), torch.float32, grad=True),
        TensorMeta.dense((0, 48), torch.float32, grad=True),
        TensorMeta.dense((1, 48), torch.float32, grad=True),
    ],
    ids=["strided", "transposed", "expanded", "overlapping", "3d", "1d", "empty", "one row"],
)
def test_every_layout_can_be_contested(x: TensorMeta) -> None:
    verdict = held(zoo.op(zoo.GOOD), zoo.case().replace(x=x))
    assert trial(verdict, "good").rejected is None


def test_no_features_and_no_gradient() -> None:
    assert trial(held(zoo.op(zoo.GOOD), zoo.case(4, 0)), "good").rejected is None
    assert trial(held(zoo.op(zoo.GOOD), zoo.case(4, 16, grad=False)), "good").rejected is None


def test_a_gradient_for_one_argument_only() -> None:
    case = zoo.case().replace(w=TensorMeta.dense((48,), torch.float32))
    verdict = held(zoo.op(zoo.GOOD, zoo.WRONG["wrong_dw"][0], zoo.WRONG["wrong_dx"][0]), case)
    assert trial(verdict, "good").rejected is None
    assert trial(verdict, "wrong_dw").rejected is None, "nobody asks for that gradient here"
    assert "gradient of x" in str(trial(verdict, "wrong_dx").rejected)


@pytest.mark.parametrize(
    ("op", "wrong", "reason"),
    [(zoo.MEAN, "wrong", "output is wrong"), (zoo.GATHER, "wrong", "output is wrong")],
    ids=["0-d output", "integer input"],
)
def test_other_forms_of_ops(op: Op, wrong: str, reason: str) -> None:
    args = {"x": TensorMeta.dense((8, 16), torch.float32, grad=True)}
    if op is zoo.GATHER:
        args["ids"] = TensorMeta.dense((5,), torch.int64)
    verdict = held(op, Case(args, "cpu"))
    assert trial(verdict, "right").rejected is None
    assert reason in str(trial(verdict, wrong).rejected)


@pytest.mark.parametrize("grad", [True, False])
def test_integer_outputs_are_compared_exactly(grad: bool) -> None:
    case = Case({"x": TensorMeta.dense((8, 16), torch.float32, grad=grad)}, "cpu")
    verdict = held(zoo.ORDER, case)
    assert trial(verdict, "right").rejected is None
    assert "output 0 is wrong" in str(trial(verdict, "off_by_one").rejected)
    assert "returns torch.int32" in str(trial(verdict, "int32").rejected)


def test_where_eager_overflows_the_rest_is_still_judged() -> None:
    """One element beyond float16's range must not blind the comparison of all others."""

    def square(x: torch.Tensor, w: torch.Tensor, flag: object = None) -> torch.Tensor:
        return x * x * w

    def wrong_at_one(x: torch.Tensor, w: torch.Tensor, flag: object = None) -> torch.Tensor:
        return (x * x * w).index_fill(1, torch.tensor([5]), 0.25)

    op = zoo.op(
        Candidate("right", lambda x, w, flag: x.square() * w),
        Candidate("wrong", lambda *a: torch.where(torch.isinf(square(*a)), square(*a), wrong_at_one(*a))),
        reference=square,
        incumbent=Candidate("eager", square),
    )
    stick = list(yardsticks(op, zoo.case(16, 48, torch.float16, grad=False)))[1]
    assert stick.where.startswith("adversarial")
    assert bool(stick.exact["output"].isnan().any()), "eager overflows here, so this test tests something"
    verify(op, op.by_name["right"], [stick])
    with pytest.raises(Exception, match="output is wrong"):
        verify(op, op.by_name["wrong"], [stick])


def test_values_on_the_edge_of_the_range_may_go_over_it() -> None:
    """65520 is the least that float16 rounds to infinity: how a sum beside it ends is chance."""

    def filled(value: float) -> Callable[..., torch.Tensor]:
        return lambda x, w, flag=None: torch.where(x > 0, value, x.double()).to(x.dtype)

    op = zoo.op(
        Candidate("over", filled(65521.0)),
        reference=filled(65519.0),
        incumbent=Candidate("eager", filled(65519.0)),
    )
    sticks = list(yardsticks(op, zoo.case(16, 48, torch.float16, grad=False)))
    verify(op, op.by_name["over"], sticks)
    op = zoo.op(
        Candidate("over", filled(math.inf)),
        reference=filled(64000.0),
        incumbent=Candidate("eager", filled(64000.0)),
    )
    with pytest.raises(Rejected, match="output is inf"):
        verify(op, op.by_name["over"], list(yardsticks(op, zoo.case(16, 48, torch.float16, grad=False))))


def test_evenness_counts_the_elements_that_errors_average_over() -> None:
    assert Sizes.of(torch.full((10, 10), -3.0)).evenness == pytest.approx(100)
    assert Sizes.of(torch.tensor([1e30, 1.0, math.nan, 2.0])).evenness == pytest.approx(1)
    torch.manual_seed(0)
    assert Sizes.of(torch.randn(30000)).evenness == pytest.approx(10000, rel=0.05)
    for nothing in (torch.zeros(5), torch.zeros(0, 3), torch.full((2,), math.nan)):
        assert Sizes.of(nothing).evenness == 1.0


def test_a_reference_that_is_nan_on_zero_rows_asks_nothing_there() -> None:
    def unit(x: torch.Tensor, w: torch.Tensor, flag: object = None) -> torch.Tensor:
        return x / x.norm(dim=-1, keepdim=True) * w

    op = zoo.op(
        Candidate(
            "right", lambda x, w, flag: x / x.norm(dim=-1, keepdim=True).masked_fill(~x.any(-1, True), 1) * w
        ),
        Candidate("wrong", lambda x, w, flag: torch.nan_to_num(unit(x, w)) * 1.01),
        reference=unit,
        incumbent=Candidate("eager", unit),
    )
    verdict = held(op, zoo.case(16, 48, grad=False))
    assert trial(verdict, "right").rejected is None
    assert "output is wrong" in str(trial(verdict, "wrong").rejected)


def test_an_incumbent_that_fails_ends_the_contest() -> None:
    with pytest.raises(ContestError, match="the incumbent 'eager' itself fails: writes outside"):
        held(zoo.op(incumbent=Candidate("eager", zoo.product(zoo._past(0)))), zoo.case())


def test_an_op_whose_eager_lacks_a_gradient_says_so() -> None:
    with pytest.raises(ContestError, match=r"eager gives .* but the reference gives"):
        held(zoo.op(incumbent=Candidate("eager", lambda *a: zoo.eager(*a).detach())), zoo.case())


def test_the_reference_in_pieces_equals_the_reference_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    op, case = zoo.op(), zoo.case(30, 16)
    args = inputs(op, case, 0)
    dy = cotangent(args[0].detach(), args, 1)
    whole = exact_results(op, args, [dy], ["x", "w"])
    monkeypatch.setattr("bakeoff.select.contests.exact._PIECE", 7 * 16)
    pieces = exact_results(op, args, [dy], ["x", "w"])
    assert whole.keys() == pieces.keys() == {"output", "gradient of x", "gradient of w"}
    for name, tensor in whole.items():
        assert tensor.dtype == torch.float64
        torch.testing.assert_close(pieces[name], tensor, rtol=1e-14, atol=1e-14)


def test_draws_hold_every_trouble_and_repeat() -> None:
    op, case = zoo.op(), zoo.case(16, 64)
    first, again = inputs(op, case, 3, "adversarial")[0], inputs(op, case, 3, "adversarial")[0]
    assert torch.equal(first, again)
    rows = first.detach()
    assert rows[0].mean() > 20
    assert rows[1].std() > 300
    assert rows[2].abs().max() < 1e-2
    assert not rows[3].any()
    assert rows[4, 32] > 2000
    assert not torch.equal(first, inputs(op, case, 4, "adversarial")[0])


def test_the_gradients_given_are_dense_expanded_and_transposed() -> None:
    strides = [s.cotangents[0].stride() for s in yardsticks(zoo.op(), zoo.case(32, 48))]
    assert strides == [(48, 1), (0, 1), (432, 1, 9), (0, 0)]


def test_a_gradient_lies_as_an_argument_or_else_as_its_output_does_and_then_otherwise() -> None:
    output, other = torch.empty(2, 3, 4), torch.empty(5)
    rows, columns = (12, 4, 1), (12, 1, 3)
    for args, stride, turned in (
        ([other], rows, columns),
        ([other, torch.empty(2, 4, 3).mT], columns, rows),
        ([torch.empty(2, 3, 1).expand(2, 3, 4)], rows, columns),
        ([torch.empty(2, 8, 3).mT[..., ::2]], columns, rows),
    ):
        assert cotangent(output, args, 0).stride() == stride
        assert cotangent(output, args, 1, "adversarial").stride() == (0, 0, 1)
        assert cotangent(output, args, 2, "adversarial").stride() == turned
    assert cotangent(torch.empty(2, 4, 3).mT, [], 0).stride() == columns
    assert cotangent(torch.empty(2, 4, 3).mT, [output], 0).stride() == rows


def test_poison_fills_and_fences_what_is_new() -> None:
    with Poison() as poison:
        made = [torch.empty(3, 4), torch.empty_like(torch.ones(5)), torch.ones(2).new_empty(3)]
        filled = [torch.zeros(3), torch.full((2,), 7.0), torch.zeros_like(made[0])]
        whole = torch.empty(4, dtype=torch.int32)
        torch.empty(0)
    assert all(bool(t.isnan().all()) for t in made)
    assert filled[1].tolist() == [7.0, 7.0]
    assert not filled[0].any()
    assert whole.dtype == torch.int32
    assert not poison.broken()
    outside = filled[0].as_strided((1,), (1,), filled[0].storage_offset() + 3)
    outside.fill_(1.0)
    assert poison.broken()


def test_under_poison_code_goes_the_way_that_it_goes_without() -> None:
    """Code may take plain PyTorch where a dispatch mode looks on, but not where verification's does: what it
    judges is what runs later."""
    assert not transformed()
    with Poison():
        assert not transformed()
    with FlopCounterMode(display=False):
        assert transformed()


def test_poison_leaves_autograd_alone() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    with Poison():
        y = torch.tanh(x) * torch.zeros(5).add_(2.0)
        y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * (1 - torch.tanh(x.detach()) ** 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_fenced_copy_keeps_layout_and_values(dtype: torch.dtype) -> None:
    for original in (
        torch.ones(6, 4).to(dtype),
        torch.ones(6, 4).to(dtype).t(),
        torch.ones(6, 8).to(dtype)[1:, 2:4],
        torch.ones(1, 4).to(dtype).expand(6, 4),
        torch.ones(()).to(dtype),
        torch.ones(0, 4).to(dtype),
    ):
        copy = fenced(original)
        assert (copy.shape, copy.stride(), copy.dtype) == (original.shape, original.stride(), dtype)
        assert torch.equal(copy, original)
        assert unchanged(copy, original)
        if copy.numel():
            copy.reshape(-1)[:0]
            copy.as_strided((1,), (1,), copy.storage_offset()).zero_()
            assert not unchanged(copy, original)


def test_the_elements_of_a_column_are_judged_together() -> None:
    exact = torch.tensor([[1.0], [1e-5]])
    assert errors_of(exact + 1e-7, exact).max == pytest.approx(1.19e-7, rel=0.01)
    assert errors_of((exact + 1e-7).expand(2, 2), exact.expand(2, 2)).max == pytest.approx(1e-2, rel=0.1)


def test_errors_are_finite_for_huge_float64() -> None:
    op = zoo.op(
        zoo.Candidate("right", lambda x, w, flag: x * w),
        reference=lambda x, w, flag: x * w,
        incumbent=Candidate("eager", lambda x, w, flag: x * w),
        draw=lambda name, meta, generator: torch.full(meta.shape, 1e150, dtype=meta.dtype),
    )
    verdict = held(op, zoo.case(8, 8, torch.float64, grad=False))
    errors = trial(verdict, "right").errors
    assert errors is not None
    assert all(math.isfinite(e) for e in (errors.max, errors.rms, errors.gain))


def test_an_input_that_only_the_second_run_modifies_is_seen() -> None:
    """As an autotuner does that measures its configurations in place."""
    calls = 0

    def every_other_time(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls % 2 == 0:
            x.data[0, 0] += 1

    op, case = zoo.op(Candidate("tuning", zoo.product(every_other_time))), zoo.case(grad=False)
    with pytest.raises(Rejected, match="modifies its input x"):
        verify(op, op.by_name["tuning"], yardsticks(op, case))
