"""From a call to a candidate: metadata alone, one look-up when known, a constant under torch.compile."""

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from bakeoff import ops
from bakeoff.errors import PolicyError, Unsupported
from bakeoff.select import Candidate, Case, Op, call, find_op
from bakeoff.select.choose import call as call_module
from bakeoff.select.choose import dispatch as dispatch_module
from bakeoff.select.choose import hot, policy
from bakeoff.select.choose.policy import using
from bakeoff.select.choose.tune import recording
from bakeoff.select.declare.key import key
from tests.unit import zoo
from tests.unit.test_select_policy import learn, noting, ran
from tests.unit.verdicts import no_verdicts


@pytest.fixture(autouse=True)
def _empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.compiler.reset()
    ran.clear()
    with no_verdicts(tmp_path, monkeypatch):
        yield
    torch.compiler.reset()


def test_plain_pytorch_runs_where_more_than_autograd_looks() -> None:
    """Forward-mode derivatives, torch.func, torch.jit.trace and modes: kernels would lose what they carry."""
    op = zoo.op(noting("two"), incumbent=noting("eager"), name="zoo_transformed")
    x, w = torch.randn(4, 8), torch.randn(8)
    with zoo.registered(op):
        learn(op, "two", rows=4)
        for _ in range(3):  # by decision, by fingerprint, by guards
            call(op, x, w, None)
        assert ran == ["two"] * 3
        ran.clear()
        with torch.autograd.forward_ad.dual_level():
            call(op, torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), w, None)
        torch.func.vmap(lambda row: call(op, row, w, None))(x)
        torch.func.vmap(lambda row: row + call(op, x, w, None).sum())(x)  # and of what isn't mapped
        torch.func.grad(lambda x: call(op, x, w, None).sum())(x)
        torch.func.grad(lambda v: call(op, x, w, None).sum() * v.sum())(w)
        torch.func.jvp(lambda x: call(op, x, w, None), (x,), (x,))
        torch.jit.trace(lambda x: call(op, x, w, None), x, check_trace=False)
        with FlopCounterMode(display=False):
            call(op, x, w, None)
        make_fx(lambda x: call(op, x, w, None))(x)
        make_fx(lambda x, w: call(op, x, w, None), tracing_mode="fake")(x, w)
        assert set(ran) == {"eager"}
        assert len(ran) == 10
        ran.clear()
        call(op, x, w, None)
        assert ran == ["two"]


def test_selective_checkpointing_keeps_its_winners() -> None:
    op = zoo.op(noting("two"), incumbent=noting("eager"), name="zoo_selective")
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8)

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)

    with zoo.registered(op), using(zoo_selective="two"):
        for _ in range(2):
            out = checkpoint(lambda x: call(op, x, w, None), x, use_reentrant=False, context_fn=contexts)
            out.sum().backward()
    assert set(ran) == {"two"}


def test_memory_that_holds_the_negative_or_the_conjugate_is_resolved_first() -> None:
    """torch.compile and kernels take what lies in memory for the values."""

    def raw(x: torch.Tensor, w: Any, flag: Any = None) -> torch.Tensor:
        ran.append("raw")
        assert not x.is_neg()
        assert not x.is_conj()
        return torch.tanh(x) * w + 1

    op = zoo.op(Candidate("raw", raw), name="zoo_lazy")
    plain, w = torch.randn(4, 8, requires_grad=True), torch.randn(8)
    negative = torch.complex(torch.zeros(4, 8), plain).conj().imag
    same = torch._neg_view(plain)  # contiguous
    assert negative.is_neg()
    with zoo.registered(op):
        for impl, x in itertools.product((None, "raw"), (plain, negative, plain, same, negative)):
            with using(zoo_lazy="raw"):
                found = call(op, x, w, None, impl=impl)
            torch.testing.assert_close(found, one(plain if x is plain else -plain, w))
        (slope,) = torch.autograd.grad(call(op, same, w, None, impl="raw").sum(), plain)
        (expected,) = torch.autograd.grad(one(-plain, w).sum(), plain)
    torch.testing.assert_close(slope, expected)
    assert ran == ["raw"] * 11


def test_wrong_arguments_are_refused_under_transforms_too() -> None:
    x = torch.randn(2, 4, 8)
    with pytest.raises(ValueError, match="pass one"):
        torch.func.grad(lambda x: ops.rms_norm(x, None, offset=1.0).sum())(x)
    h = torch.randn(1, 2)
    with pytest.raises(ValueError, match="long_conv: h"):
        torch.func.vmap(lambda u: ops.long_conv(u[None], h))(x)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="swiglu"):
        ops.swiglu(torch.autograd.forward_ad.make_dual(x, x), torch.randn(1, 8))


def one(x: Any, w: Any, flag: Any = None) -> Any:
    return torch.tanh(x) * w + 1


def two(x: Any, w: Any, flag: Any = None) -> Any:
    return torch.tanh(x) * w + 2


@pytest.fixture
def op() -> Iterator[Op]:
    """Its three candidates differ by what they add, so that their results tell who ran."""
    made = zoo.op(
        Candidate("one", one),
        Candidate("two", two),
        Candidate("opaque", lambda *a: zoo.eager(*a) + 3, traceable=False),
        name="zoo_counting",
    )
    with zoo.registered(made):
        yield made


def who(result: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> str:
    added = round(float((result - torch.tanh(x) * w).mean()))
    return ("eager", "one", "two", "opaque")[added]


class CountingDispatch:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = call_module.dispatch

        def counting(*args: Any) -> Any:
            self.count += 1
            return original(*args)

        monkeypatch.setattr(call_module, "dispatch", counting)


@pytest.fixture
def slow_path(monkeypatch: pytest.MonkeyPatch) -> CountingDispatch:
    return CountingDispatch(monkeypatch)


# ------------------------------------------------------------------------------------ metadata alone
class NoData(TorchDispatchMode):
    """Any operation on a tensor is an error: selection may read metadata only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"selection runs {func}")


@pytest.mark.parametrize("chosen", ["table", "heuristic", "off", "strict"])
def test_selection_touches_no_data(chosen: str) -> None:
    op = zoo.op(incumbent=Candidate("eager", lambda x, w, flag: "ran"), name="zoo_meta")
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(8)
    with zoo.registered(op), using("table" if chosen == "strict" else chosen), NoData():
        assert call(op, x, w, None) == "ran"
        assert call(op, x, w, None) == "ran"


def test_selection_never_waits_for_the_device() -> None:
    for module in (dispatch_module, hot, policy):
        text = inspect.getsource(module)
        for word in (".item(", ".tolist(", "synchronize(", ".cpu(", ".numpy("):
            assert word not in text, f"{word} in {module.__name__}"


def test_meta_tensors_are_never_tuned(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_module, "settle", _must_not)
    with using("tune"):
        assert call(op, torch.empty(4, 8, device="meta"), torch.empty(8, device="meta"), None).shape == (4, 8)


def _must_not(*_: Any) -> None:
    raise AssertionError("a contest was held where none may be")


# ------------------------------------------------------------------------------------- bad arguments
def test_impl_runs_that_candidate_or_raises_every_reason(op: Op) -> None:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8)
    assert who(call(op, x, w, None, impl="two").detach(), x.detach(), w) == "two"
    with pytest.raises(
        Unsupported, match="zoo_counting has no candidate 'tow'; it has eager, one, two, opaque"
    ):
        call(op, x, w, None, impl="tow")
    with pytest.raises(Unsupported, match=r"has no candidate \['two'\]; it has eager"):
        call(op, x, w, None, impl=["two"])  # type: ignore[arg-type]
    picky = zoo.with_candidates(
        op, noting("picky", supports=lambda case: "odd", has_backward=False, requires=())
    )
    with pytest.raises(Unsupported, match=r"'picky' can't take this case: has no backward; odd"):
        call(picky, x, w, None, impl="picky")
    absent = zoo.with_candidates(op, zoo.WRONG["absent"][0])
    with pytest.raises(Unsupported, match="no_such_package is not installed"):
        call(absent, x, w, None, impl="absent")


@pytest.mark.parametrize("bad", [[1.0, 2.0], {"a": 1}, 3.0])
def test_an_argument_of_the_wrong_kind_is_named(op: Op, bad: object) -> None:
    with pytest.raises(TypeError, match="w must be a tensor, got"):
        call(op, torch.randn(4, 8), bad, None)


def test_mixed_devices_are_named_with_the_fix(op: Op) -> None:
    with pytest.raises(
        ValueError, match=r"must be on one device, got x on cpu, w on meta; move them with .to"
    ):
        call(op, torch.randn(4, 8), torch.empty(8, device="meta"), None)


def test_a_meta_tensor_is_never_taken_for_one_of_the_cpu(op: Op) -> None:
    """Both are device number -1."""
    x, w = torch.randn(4, 8), torch.randn(8)
    kinds = [(x, torch.randn(8), flag) for flag in (None, 1, 2, 3, 4, 5)]  # more than have compiled guards
    for args in kinds * 2:
        call(op, *args)
        with pytest.raises(ValueError, match="must be on one device, got x on cpu, w on meta"):
            call(op, x, w.to("meta"), args[2])


def _other_layouts() -> dict[str, tuple[torch.Tensor, str]]:
    x, parts = torch.randn(4, 8), [torch.randn(2, 8), torch.randn(3, 8)]
    nested = r"x is a nested tensor; ops take dense tensors: pass torch.nested.to_padded_tensor\(x, 0.0\)"
    return {
        "coo": (x.to_sparse(), r"x is of layout torch.sparse_coo; ops take dense .*: pass x.to_dense\(\)"),
        "csr": (x.to_sparse_csr(), r"x is of layout torch.sparse_csr; .*x.to_dense\(\)"),
        "mkldnn": (x.to_mkldnn(), r"x is of layout torch._mkldnn; .*x.to_dense\(\)"),
        "nested": (torch.nested.nested_tensor(parts), nested),
        "jagged": (torch.nested.nested_tensor(parts, layout=torch.jagged), nested),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["coo", "csr", "mkldnn", "nested", "jagged"])
def test_a_layout_without_strides_is_refused_by_name(op: Op, name: str) -> None:
    x, message = _other_layouts()[name]
    w = torch.randn(8)
    for _ in range(2):
        call(op, torch.randn(4, 8), w, None)
        call(op, torch.zeros(()).expand(4, 8), w, None)  # strides of 0, as a sparse tensor gives
        with pytest.raises(Unsupported, match=f"zoo_counting: {message}"):
            call(op, x, w, None)
        with pytest.raises(Unsupported, match=f"zoo_counting: {message}"):
            call(op, x, w, None, impl="one")


def test_a_wrapper_tensor_runs_on_plain_pytorch(op: Op) -> None:
    class Wrapped(torch.Tensor):
        pass

    x, w = torch.randn(4, 8).as_subclass(Wrapped), torch.randn(8)
    learn(op, "two")
    result = call(op, x, w, None)
    assert isinstance(result, Wrapped)
    assert who(result, x, w) == "eager"


def test_an_override_that_a_wrapper_tensor_passes_by_is_said(
    op: Op, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrapped(torch.Tensor):
        pass

    monkeypatch.setattr(dispatch_module, "_said", set())
    call(op, torch.randn(4, 8).as_subclass(Wrapped), torch.randn(8), None)
    caplog.clear()
    with using(**{op.name: "two"}):
        call(op, torch.randn(4, 8).as_subclass(Wrapped), torch.randn(8), None)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "bakeoff"]
    assert "Wrapped may redefine PyTorch's functions" in line


def test_a_parameter_of_a_class_of_its_own_is_a_parameter(op: Op) -> None:
    class Scale(torch.nn.Parameter):
        pass

    x, w = torch.randn(4, 8), torch.randn(8)
    with using(**{op.name: "two"}), torch.no_grad():
        assert who(call(op, x, Scale(w), None), x, w) == "two"


def test_a_winner_that_cannot_take_this_very_case_gives_way_to_the_next(op: Op) -> None:
    learn(op, "two")
    absent = zoo.with_candidates(
        op, Candidate("one", one), Candidate("two", two, supports=lambda case: "not today")
    )
    x, w = torch.randn(4, 8), torch.randn(8)
    with zoo.registered(absent):
        learn(absent, "two")
        assert who(call(absent, x, w, None), x, w) == "one"


def test_the_honestly_nondeterministic_are_passed_over_under_deterministic_algorithms(op: Op) -> None:
    free = zoo.with_candidates(op, Candidate("one", one), Candidate("two", two, deterministic=False))
    x, w = torch.randn(4, 8), torch.randn(8)
    learn(free, "two")
    assert who(call(free, x, w, None), x, w) == "two"
    torch.use_deterministic_algorithms(True)
    assert who(call(free, x, w, None), x, w) == "one"


def test_no_contest_inside_backward(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[str] = []
    monkeypatch.setattr(dispatch_module, "settle", lambda o, case, regime: held.append(key(o, case, regime)))
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    with using("tune"):
        checkpoint(lambda a, b: call(op, a, b, None), x, w, use_reentrant=True).sum().backward()
    assert held == [key(op, zoo.case(4, 8, grad=False), "eager")], (
        "recomputation met a new key, with gradients"
    )


def test_no_contest_while_a_cuda_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = msgspec.structs.replace(zoo.case(), device="cuda:0")
    for capturing in (True, False):
        monkeypatch.setattr(hot, "capturing", lambda: capturing)  # noqa: B023
        assert dispatch_module._may_tune(case, "eager") is not capturing
    assert "a CUDA graph is being captured" in caplog.text


# ------------------------------------------------------------------------------ under torch.compile
def compiled(op: Op) -> Any:
    return torch.compile(
        lambda x, w: call(op, x, w, None) * 1.0, fullgraph=True, dynamic=None, backend="aot_eager"
    )


def test_the_decision_is_a_constant_of_the_graph(op: Op) -> None:
    learn(op, "two", regime="compiled")
    run = compiled(op)
    x, w = torch.randn(4, 8), torch.randn(8)
    assert who(run(x, w), x, w) == "two"
    policy.store.forget()
    policy.forget()
    assert who(run(x, w), x, w) == "two", "frozen until compiled anew"


def test_dynamic_lengths_compile_twice_at_most(op: Op) -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    run = torch.compile(lambda x, w: call(op, x, w, None) * 1.0, fullgraph=True, backend=counter)
    w = torch.randn(8)
    for rows in (4, 7, 130, 1000, 33, 5):
        x = torch.randn(rows, 8)
        assert who(run(x, w), x, w) == "eager"
    assert counter.frame_count == 2, "once for the first length, once for all"


def test_an_op_that_no_global_holds_compiles(op: Op) -> None:
    run = torch.compile(
        lambda x, w, flag: call(op, x, w, flag) * 1.0, fullgraph=True, dynamic=True, backend="eager"
    )
    for rows in (4, 7):
        x, w = torch.randn(rows, 8), torch.randn(8)
        assert who(run(x, w, None), x, w) == "eager"


def test_gradients_and_batches_of_sequences_compile(op: Op) -> None:
    learn(op, "two", regime="compiled")
    run = compiled(op)
    x, w = torch.randn(3, 5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    run(x, w).sum().backward()
    torch.testing.assert_close(x.grad, w.detach() * (1 - torch.tanh(x.detach()) ** 2))


def test_tracing_never_tunes(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_module, "settle", _must_not)
    x, w = torch.randn(4, 8), torch.randn(8)
    with using("tune"):
        assert who(compiled(op)(x, w), x, w) == "eager"


class OnlyForGrad(torch.autograd.Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor, flag: object) -> torch.Tensor:
        return one(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return dy * w * (1 - torch.tanh(x) ** 2), None, None


def test_a_demanded_candidate_tries_transforms_and_says_what_it_cannot(op: Op) -> None:
    picky = zoo.with_candidates(op, Candidate("picky", OnlyForGrad.apply))
    x, w = torch.randn(3, 4, 8), torch.randn(8)
    found = torch.func.grad(lambda x: call(picky, x, w, None, impl="picky").sum())(x)
    torch.testing.assert_close(found, w * (1 - torch.tanh(x) ** 2))
    with pytest.raises(Unsupported, match=r"'picky' can't run under this transform.*impl='eager'"):
        torch.vmap(lambda x: call(picky, x, w, None, impl="picky"))(x)
    assert torch.vmap(lambda x: call(picky, x, w, None, impl="eager"))(x).shape == x.shape


def test_impl_and_overrides_hold_under_compile(op: Op) -> None:
    x, w = torch.randn(4, 8), torch.randn(8)
    run = torch.compile(lambda x, w: call(op, x, w, None, impl="one"), fullgraph=True, backend="aot_eager")
    assert who(run(x, w), x, w) == "one"
    with using(zoo_counting="two"):
        assert who(compiled(op)(x, w), x, w) == "two"


def test_what_cannot_be_traced_says_so(op: Op) -> None:
    x, w = torch.randn(4, 8), torch.randn(8)
    run = torch.compile(lambda x, w: call(op, x, w, None, impl="opaque"), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"can't be traced by torch.compile"):
        run(x, w)


@pytest.mark.parametrize(
    ("settings", "impl", "error", "message"),
    [
        ({}, "tow", Unsupported, "has no candidate 'tow'"),
        ({"policy": "strict"}, None, PolicyError, "and the policy is strict"),
    ],
)
def test_what_cannot_be_had_raises_its_own_error_while_tracing(
    op: Op, settings: dict[str, Any], impl: str | None, error: type[Exception], message: str
) -> None:
    x, w = torch.ones(4, 8), torch.ones(8)
    with using(**settings), pytest.raises(error, match=message):
        torch.compile(lambda: call(op, x, w, None, impl=impl), backend="eager")()
    with using(**settings), pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        torch.compile(lambda: call(op, x, w, None, impl=impl), backend="eager", fullgraph=True)()


@pytest.mark.parametrize(
    ("x", "w", "error", "message"),
    [
        (torch.ones(4, 8), [1.0], TypeError, "zoo: w must be a tensor, got"),
        (torch.ones(4, 8), torch.ones(7), ValueError, "zoo: w has shape .*, expected"),
        (torch.ones(4, 8), torch.ones(8, device="meta"), ValueError, "must be on one device, got x on cpu"),
        (torch.ones(4, 8).to_sparse(), torch.ones(8), Unsupported, r"pass x.to_dense\(\)"),
    ],
)
def test_bad_arguments_raise_the_op_s_own_error_while_tracing(
    op: Op, x: Any, w: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        torch.compile(lambda: call(op, x, w, None), backend="eager")()
    if x.layout is torch.strided:  # torch.compile wraps it where it may not leave the graph
        with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
            torch.compile(lambda: call(op, x, w, None), backend="eager", fullgraph=True)()


def test_sizes_are_checked_as_they_are_and_left_open() -> None:
    """Also where one argument's rows are another's features, as a made-up number of rows would not fit."""
    checks = []

    def check(case: Any) -> None:
        checks.append(case.x.shape)
        if case.w.shape[0] > case.x.shape[0]:
            raise ValueError(f"zoo: w has {case.w.shape[0]} rows for {case.x.shape[0]}")

    def top(x: torch.Tensor, w: torch.Tensor, flag: Any = None) -> torch.Tensor:
        return x * w.sum()

    made = zoo.op(incumbent=Candidate("eager", top), name="zoo_rows", check=check, features={"x": 1, "w": 1})
    with zoo.registered(made):
        run = torch.compile(lambda x, w: call(made, x, w, None), fullgraph=True, backend="eager")
        w = torch.ones(100)
        for rows in (500, 300, 100, 150):
            assert run(torch.ones(rows, 3), w)[0, 0] == 100
        assert len(checks) == 2, "once for the first length, once for all"
        torch.compiler.reset()
        with pytest.raises(Exception, match="zoo: w has 100 rows for 99"):
            run(torch.ones(99, 3), w)


def test_tracing_is_recorded_with_a_case_of_moderate_size(op: Op) -> None:
    with recording() as recorded:
        compiled(op)(torch.randn(2, 3, 8), torch.randn(8))
    ((name, _),) = recorded
    assert name == "zoo_counting(x=fp32[*,8], w=fp32[8]) cpu compiled"
    (_, case), *_ = recorded.values()
    assert case.x.shape == (64, 64, 8)
    assert key(op, op.bucket(case), "compiled") == name


def test_ops_are_found_by_name_or_the_nearest_is_named(op: Op) -> None:
    assert find_op("zoo_counting") is op
    with pytest.raises(PolicyError, match="no op 'rms_nrm'; did you mean 'rms_norm'"):
        find_op("rms_nrm")
    with pytest.raises(PolicyError, match=r"no op 'q'; the ops are .*rms_norm"):
        find_op("q")


def test_a_call_decided_while_a_recording_begins_is_not_remembered() -> None:
    """Another thread's: the calls that follow must not pass it by."""
    recorded: list[dict[Any, Any]] = []

    def heuristic(case: Case, regime: str) -> str:
        if not recorded:
            recorded.append(begun.enter_context(recording()))
        return "eager"

    op, x, w = zoo.op(heuristic=heuristic, name="zoo_begun"), torch.randn(4, 8), torch.randn(8)
    with zoo.registered(op), contextlib.ExitStack() as begun:
        call(op, x, w, None)
        call(op, x, w, None)
    assert len(recorded[0]) == 1
