"""Lists of tensors as arguments, and ops that write in place: keys, calls, contests, what contests reject."""

import ctypes
import dataclasses
import re
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import bakeoff
from bakeoff.apps.bench.notation import read_case, split_key, write_case
from bakeoff.errors import Unsupported
from bakeoff.select import Candidate, Case, Cost, ListMeta, Op, TensorList, call, explain
from bakeoff.select.choose import hot
from bakeoff.select.contests.contest import contest
from bakeoff.select.contests.draw import inputs
from bakeoff.select.contests.exact import exact_results
from bakeoff.select.contests.lists import drawn_list, fenced_list, rows_of, same_memory, shapes
from bakeoff.select.contests.measure import work
from bakeoff.select.contests.wire import decode_dtype, encode_dtype
from bakeoff.select.declare.arguments import FLOATING, Arguments, Number, Tensors
from bakeoff.select.declare.key import key, round_list


# ---------------------------------------------------------------------- the op: x -= rate * g, in place
def reference(xs: list[Tensor], gs: list[Tensor], rate: float = 0.5) -> tuple[list[Tensor]]:
    return ([x - rate * g for x, g in zip(xs, gs, strict=True)],)


def eager(xs: list[Tensor], gs: list[Tensor], rate: float) -> None:
    for x, g in zip(xs, gs, strict=True):
        x.sub_(g, alpha=rate)


def foreach(xs: list[Tensor], gs: list[Tensor], rate: float) -> None:
    torch._foreach_sub_(xs, torch._foreach_mul(gs, rate))


def forgets_one(xs: list[Tensor], gs: list[Tensor], rate: float) -> None:
    foreach(xs[:-1], gs[:-1], rate)


def forgets_the_last_element_of_a_vector(xs: list[Tensor], gs: list[Tensor], rate: float) -> None:
    kept = xs[0].flatten()[-1].clone()
    foreach(xs, gs, rate)
    xs[0].view(-1)[-1] = kept


def writes_behind(xs: list[Tensor], gs: list[Tensor], rate: float) -> None:
    foreach(xs, gs, rate)
    ctypes.memset(xs[2].data_ptr() + xs[2].nbytes, 0, 4)


def writes_before(xs: list[Tensor], gs: list[Tensor], rate: float) -> None:
    foreach(xs, gs, rate)
    ctypes.memset(xs[0].data_ptr() - 4, 0, 4)


def writes_what_it_only_reads(xs: list[Tensor], gs: list[Tensor], rate: float) -> None:
    torch._foreach_mul_(gs, rate)
    torch._foreach_sub_(xs, gs)


def replaces(xs: list[Tensor], gs: list[Tensor], rate: float) -> None:
    foreach(xs, gs, rate)
    xs[1] = xs[1].double()


def swaps_memory(xs: list[Tensor], gs: list[Tensor], rate: float) -> None:
    foreach(xs, gs, rate)
    xs[1].data = xs[1].data.clone()


def casts(xs: list[Tensor], gs: list[Tensor], rate: float) -> None:
    foreach(xs, gs, rate)
    xs[1].data = xs[1].data.double()


def returns_instead(xs: list[Tensor], gs: list[Tensor], rate: float) -> Any:
    return reference(xs, gs, rate)


def does_nothing(xs: list[Tensor], gs: list[Tensor], rate: float) -> None: ...


_seen: dict[Any, Tensor] = {}


def remembers_by_address(xs: list[Tensor], gs: list[Tensor], rate: float) -> None:
    kept = [_seen.setdefault((g.data_ptr(), g.shape, g.dtype), g.clone()) for g in gs]
    foreach(xs, kept, rate)


def races(xs: list[Tensor], gs: list[Tensor], rate: float) -> None:
    foreach(xs, gs, rate)
    if len(_seen) % 2:
        xs[0].view(-1)[0] = torch.nextafter(xs[0].view(-1)[0], torch.tensor(9.0))
    _seen[-len(_seen) - 1] = xs[0]


BAD: dict[str, tuple[Callable[..., Any], str]] = {
    "forgets_one": (forgets_one, "new xs is wrong"),
    "forgets_an_element": (forgets_the_last_element_of_a_vector, "new xs is wrong: max error"),
    "writes_behind": (writes_behind, "writes outside of xs"),
    "writes_before": (writes_before, "writes outside of xs"),
    "writes_gs": (writes_what_it_only_reads, "modifies its input gs"),
    "replaces": (replaces, "replaces tensors in the list xs"),
    "swaps_memory": (swaps_memory, r"gives xs\[1\] other memory"),
    "casts": (casts, r"gives xs\[1\] other memory or another dtype"),
    "returns_instead": (returns_instead, "returns 1 tensors, not 0"),
    "does_nothing": (does_nothing, "new xs is wrong"),
    # Addresses recur as the allocator likes; where none does so soon, what it remembers is still there.
    "remembers_by_address": (
        remembers_by_address,
        "does it remember by address|new xs is wrong|keeps .* bytes of a call after all its results are gone",
    ),
    "races": (races, "differs from run to run"),
}


def op(*candidates: Candidate, **changes: Any) -> Op:
    settings: dict[str, Any] = {
        "check": Arguments("decay_", {"xs": Tensors(), "gs": Tensors(FLOATING, like="xs"), "rate": Number()}),
        "bucket": lambda case: case.replace(xs=round_list(case.xs), gs=round_list(case.gs)),
        "cost": lambda case: Cost(3 * case.xs.nbytes, 2 * case.xs.numel),
        "cases": lambda: [case()],
        "heuristic": lambda case, regime: "foreach" if "foreach" in {c.name for c in candidates} else "eager",
        "features": {},
        "batched": frozenset({"xs", "gs"}),
        "settings": frozenset({"rate"}),
        "mutates": ("xs",),
    }
    first = Candidate("eager", eager, has_backward=False)
    return Op("decay_", reference, (first, *candidates), home="nowhere:OP", **{**settings, **changes})


GOOD = Candidate("foreach", foreach, has_backward=False)


def case(count: int = 5, numel: int = 3001, dtype: torch.dtype = torch.float32) -> Case:
    listed = ListMeta(count, numel, dtype)
    return Case({"xs": listed, "gs": listed, "rate": 0.5}, "cpu")


def tensors(*sizes: int) -> list[Tensor]:
    return [torch.ones(size) for size in sizes]


# --------------------------------------------------------------------------------------------- contests
@pytest.mark.parametrize("name", BAD)
def test_a_bad_candidate_is_rejected_with_its_reason(name: str) -> None:
    _seen.clear()
    bad, reason = BAD[name]
    (verdict,) = contest(op(GOOD, Candidate("bad", bad, has_backward=False)), case(), budget_s=0.02)
    trials = {trial.candidate: trial for trial in verdict.trials}
    assert re.search(reason, trials["bad"].rejected or ""), trials["bad"].rejected
    assert trials["eager"].rejected is None
    assert trials["foreach"].rejected is None, "a bad neighbour must not harm a good candidate"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_good_candidates_pass_in_every_dtype_and_layout(dtype: torch.dtype) -> None:
    called = case(7, 5000, dtype)
    called = called.replace(
        **{name: msgspec.structs.replace(meta, contiguous=False) for name, meta in called.lists.items()}
    )
    (verdict,) = contest(op(GOOD), called, budget_s=0.02)
    assert all(trial.rejected is None for trial in verdict.trials)


def test_an_argument_is_judged_by_what_it_stands_for() -> None:
    """Two halves of a number: which of them holds what is an implementation's affair."""

    def pair(high: list[Tensor], low: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        total = [h + 2 * part for h, part in zip(high, low, strict=True)]
        return total, total

    def doubled(high: list[Tensor], low: list[Tensor]) -> None:
        torch._foreach_add_(high, low)

    def otherwise(high: list[Tensor], low: list[Tensor]) -> None:
        torch._foreach_add_(high, low, alpha=3)
        torch._foreach_neg_(low)

    def wrong(high: list[Tensor], low: list[Tensor]) -> None:
        torch._foreach_add_(high, low, alpha=2)

    def total(args: Any) -> list[Tensor]:
        return [h + part for h, part in zip(args["high"], args["low"], strict=True)]

    listed = ListMeta(3, 300, torch.float32)
    split = Op(
        name="split_",
        reference=pair,
        candidates=tuple(Candidate(c.__name__, c, has_backward=False) for c in (doubled, otherwise, wrong)),
        check=lambda case: None,
        bucket=lambda case: case,
        cost=lambda case: Cost(1, 1),
        cases=list,
        heuristic=lambda case, regime: "doubled",
        features={},
        batched=frozenset({"high", "low"}),
        mutates=("high", "low"),
        stands_for={"high": total, "low": total},
    )
    (verdict,) = contest(split, Case({"high": listed, "low": listed}, "cpu"), budget_s=0.02)
    trials = {trial.candidate: trial.rejected for trial in verdict.trials}
    assert trials["doubled"] is None
    assert trials["otherwise"] is None
    assert "new high is wrong" in (trials["wrong"] or "")


def test_measuring_goes_on_from_what_the_last_call_has_left() -> None:
    made = op()
    args = inputs(made, case(), 0)
    first = [x.clone() for x in args[0]]
    (step,) = work(made, case(), eager, [(args, [])])
    step()
    step()
    for x, was, g in zip(args[0], first, args[1], strict=True):
        torch.testing.assert_close(x, was - g)


def test_the_reference_runs_in_pieces_of_some_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    made = op()
    args = inputs(made, case(9, 40_000), 0)
    whole = exact_results(made, args, [], [])
    lengths: list[int] = []

    def watched(xs: list[Tensor], gs: list[Tensor], rate: float) -> Any:
        lengths.append(len(xs))
        return reference(xs, gs, rate)

    monkeypatch.setattr("bakeoff.select.contests.exact._PIECE", 5000)
    pieces = exact_results(dataclasses.replace(made, reference=watched), args, [], [])
    assert len(lengths) > 2
    assert sum(lengths) == 9
    assert torch.equal(whole["new xs"], pieces["new xs"])


# ------------------------------------------------------------------------------------- drawing, memory
@pytest.mark.parametrize(
    ("count", "numel"), [(148, 124_000_000), (10_000, 640_000), (5, 500), (1, 7), (9, 9), (4, 0), (3, 2)]
)
def test_sizes_add_up(count: int, numel: int) -> None:
    found = shapes(count, numel)
    assert len(found) == count
    assert sum(torch.Size(shape).numel() for shape in found) == numel


def test_sizes_are_a_models() -> None:
    sizes = [torch.Size(shape).numel() for shape in shapes(148, 124_000_000)]
    assert max(sizes) > 124_000_000 // 5
    assert min(sizes) < 10_000
    assert any(size % 2 for size in sizes)
    assert any(len(shape) == 2 for shape in shapes(148, 124_000_000))


def test_adversarial_lists_give_tensors_different_troubles() -> None:
    xs = inputs(op(), case(16, 16_000), 1, "adversarial")[0]
    assert xs[3].abs().max() == 0
    assert xs[1].abs().max() > 1000
    assert xs[0].mean() > 20


def test_fences_stand_around_every_tensor_of_a_list() -> None:
    given = [torch.randn(3, 4).t(), torch.randn(7), torch.empty(0), torch.zeros(())]
    copies, memory = fenced_list(given)
    assert all(map(torch.equal, copies, given))
    assert copies[0].stride() == given[0].stride()
    assert len({t.untyped_storage().data_ptr() for t in copies if t.numel()}) == 3
    assert same_memory(memory, given)
    ctypes.memset(copies[1].data_ptr() + copies[1].nbytes, 0, 1)
    assert not same_memory(memory, given)


def test_rows_keep_tensors_apart() -> None:
    given = [torch.ones(5), torch.full((2,), 2.0), torch.zeros(0), torch.full((9,), 3.0)]
    rows = rows_of(given, ListMeta(4, 16, torch.float32))
    assert rows.shape == (2 + 1 + 3, 4)
    assert all(len(set(row.tolist()) - {0.0}) == 1 for row in rows)


# ------------------------------------------------------------------------------------------------ calls
def test_a_call_writes_in_place_and_is_remembered_whatever_its_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    made = op(GOOD, heuristic=lambda case, regime: asked.append(case) or "foreach")
    xs, gs = tensors(3, 4), tensors(3, 4)
    for rate in (0.5, 0.25, 0.125):
        assert call(made, xs, gs, rate) is None
    assert xs[1].tolist() == [0.125] * 4
    assert len(asked) == 1, "a learning rate that changes is no new kind of call"
    call(made, tensors(3, 5), tensors(3, 5), 0.5)
    assert len(asked) == 2


def test_calls_are_told_apart_by_everything_selection_may_ask() -> None:
    made = op(GOOD)

    def kind(xs: list[Tensor]) -> Any:
        return hot.fingerprint(made, [TensorList.of(xs), TensorList.of(xs), 0.5])

    plain = tensors(2, 6)
    assert kind(plain) == kind(tensors(2, 6)) == kind(tensors(3, 5))
    others = [
        tensors(4, 4),
        tensors(8),
        tensors(3, 6),
        [x.double() for x in plain],
        [torch.ones(2, 2), torch.ones(2, 2).t()[:, :1].expand(2, 2)],
        [x.to("meta") for x in plain],
        [torch.nn.Parameter(x) for x in plain],
    ]
    kinds = [kind(plain), *map(kind, others)]
    assert len(set(kinds)) == len(kinds)


def test_keys_notation_and_the_worker_know_lists() -> None:
    made = op(GOOD)
    text = key(made, case(148, 124_000_000), "eager")
    assert text == "decay_(xs=fp32[160 tensors, 134217728], gs=fp32[160 tensors, 134217728]) cpu eager"
    parts = split_key(text)
    assert parts is not None
    assert read_case(made, parts[1], "cpu").xs == ListMeta(160, 134_217_728, torch.float32)
    alike = ListMeta(12, 12 * 30, torch.bfloat16, shape=(5, 6))
    assert TensorList.of([torch.ones(5, 6).bfloat16()] * 12).meta == alike
    assert TensorList.of([torch.ones(5, 6), torch.ones(6, 5)]).meta.shape is None
    given = write_case(made, case().replace(xs=alike, gs=alike))
    assert given.startswith("xs=bf16[12 tensors of 5x6] gs=bf16[12 tensors of 5x6]")
    assert read_case(made, re.split(r" (?=\w+=)", given), "cpu").xs == alike
    assert [t.shape for t in drawn_list(torch.ones(360), alike)] == [(5, 6)] * 12
    strided = case().replace(xs=ListMeta(5, 3001, torch.float32, contiguous=False))
    assert "xs=fp32[5 tensors, 3001]:strided" in write_case(made, strided)
    sent = msgspec.json.decode(
        msgspec.json.encode(strided, enc_hook=encode_dtype), type=Case, dec_hook=decode_dtype
    )
    assert sent == strided
    assert explain(made, tensors(2, 3), tensors(2, 3)).choice == "foreach"


@pytest.mark.parametrize(
    ("xs", "error", "message"),
    [
        ([], ValueError, "decay_: xs is empty"),
        ([torch.ones(2), None], TypeError, r"decay_: xs\[1\] is NoneType, not a tensor"),
        (
            [torch.ones(2), torch.ones(2).double()],
            ValueError,
            r"xs\[1\] is torch.float64 .* one call for",
        ),
        ([torch.ones(2).to_sparse()] * 2, TypeError, "to_dense"),
        ([torch.ones(2), torch.view_as_real(torch.ones(2) * 1j)], ValueError, "elements together"),
        ([torch.imag(torch.ones(2, dtype=torch.complex64).conj())] * 2, TypeError, "resolve_neg"),
        ([torch.ones(2)], ValueError, "1 tensors in|2 tensors in gs, expected one for each of 1"),
        (torch.ones(2, 2), TypeError, "decay_: xs must be a list of tensors, got a tensor"),
        ([torch.ones(2).int()] * 2, TypeError, "xs are torch.int32"),
    ],
)
def test_errors_name_the_list(xs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(op(GOOD), xs, tensors(2, 2), 0.5)


def test_lists_carry_no_gradients() -> None:
    made = op(GOOD)
    xs = [torch.nn.Parameter(x) for x in tensors(2, 3)]
    with torch.no_grad():
        call(made, xs, tensors(2, 3), 0.5)
    with pytest.raises(Unsupported, match=r"xs require gradients.*torch.no_grad\(\)"):
        call(made, xs, tensors(2, 3), 0.5)


def test_transforms_and_subclasses_get_plain_pytorch() -> None:
    class Loud(Tensor):
        pass

    made = op(Candidate("foreach", does_nothing, has_backward=False))
    xs = [torch.ones(2).as_subclass(Loud)]
    call(made, xs, tensors(2), 0.5)
    assert xs[0].tolist() == [0.5, 0.5]
    call(made, tensors(2), tensors(2), 0.5)

    def halved(x: Tensor) -> Tensor:
        y = x.clone()
        call(made, [y], [torch.ones(())], 0.5)
        return y

    assert torch.func.vmap(halved)(torch.ones(3)).tolist() == [0.5] * 3


def test_tuning_notes_lists() -> None:
    made = op(GOOD)
    report = bakeoff.tune(lambda: call(made, tensors(2, 3), tensors(2, 3), 0.5), budget_s=0)
    assert list(report.unsettled) == ["decay_(xs=fp32[2 tensors, 5], gs=fp32[2 tensors, 5]) cpu eager"]


# --------------------------------------------------------------------------------------------- outlines
def test_an_outline_knows_its_tensors_and_their_kind_and_keeps_none_alive() -> None:
    given = tensors(3, 4)
    listed = TensorList.of(given)
    outline = listed.outline()
    same = outline.same(given)
    assert same is not None
    assert (same, same.meta, same.addresses) == (given, listed.meta, listed.addresses)
    assert outline.same(tensors(3, 4)) is None
    assert outline.same(given[:1]) is None
    fresh = [torch.zeros(3), torch.zeros(4)]
    alike = outline.alike(fresh)
    assert alike is not None
    assert alike.kind == listed.kind
    assert alike.addresses == [t.data_ptr() for t in fresh]
    for other in (
        tensors(3, 5),
        [t.double() for t in fresh],
        tensors(3),
        [torch.ones(3), torch.ones(8)[::2]],
    ):
        assert outline.alike(other) is None
    given[0].data = given[0].data.clone()
    assert outline.same(given) is None
    alive = weakref.ref(given[1])
    del given, listed, same
    assert alive() is None


def test_joined_lists_are_what_the_whole_would_be() -> None:
    parts = [TensorList.of(tensors(3, 4)), TensorList.of(tensors(5)), TensorList.of([torch.ones(4, 2).t()])]
    joined, whole = TensorList.joined(parts), TensorList.of([t for part in parts for t in part])
    assert (joined.meta, joined.kind, joined.sizes) == (whole.meta, whole.kind, whole.sizes)
    assert joined.addresses == whole.addresses
    assert TensorList.joined(parts[:1]) is parts[0]
