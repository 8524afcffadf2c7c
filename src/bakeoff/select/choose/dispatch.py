"""Dispatch: from a call to a candidate, when the hot path's memo doesn't know it yet."""

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from bakeoff.errors import PolicyError, Unsupported
from bakeoff.select.choose import hot, policy
from bakeoff.select.choose.table import Found, differences
from bakeoff.select.choose.tune import note, recordings, settle
from bakeoff.select.declare.key import key
from bakeoff.select.declare.op import Candidate, Case, Op, TensorMeta, find_op

__all__ = ["ASK", "Asked", "Choice", "able", "checked", "choose", "decide", "dispatch"]

log = logging.getLogger("bakeoff")
_MOST_REMEMBERED = 4096
_UNKNOWN_ROWS = 4096  # stands for the number of rows while tracing, where lengths must stay symbolic

_said: set[tuple[str, int]] = set()


class Choice(NamedTuple):
    """The candidate for a case, why, and the verdict behind it (None where there is none)."""

    candidate: Candidate
    why: str
    found: Found | None


ASK = "the case that this call makes"
"""As `impl`: raise `Asked` in place of running anything."""


class Asked(Exception):
    """The case that a call makes."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.case = case


def dispatch(op: Op, args: Sequence[Any], impl: str | None) -> Any:
    """Decide for this call, remember the decision, and run it."""
    return _traced(op, args, impl) if torch.compiler.is_compiling() else _out_of_traces(op, args, impl)


def _dispatch(op: Op, args: Sequence[Any], impl: str | None) -> Any:
    if impl is ASK:
        raise Asked(checked(op, args))
    if any(map(_lazy, args)) and not hot.transformed():
        return op(*map(_resolved, args), impl=impl)
    if impl is not None:
        return _explicit(op, args, impl)
    if hot.transformed():
        if torch._C._get_tracing_state() is None:  # shapes are tensors in torch.jit.trace
            checked(op, args)
        return op.incumbent.call(*args)
    case = checked(op, args)
    wrapper = next((type(a) for a in args if isinstance(a, torch.Tensor) and _wraps(type(a))), None)
    if wrapper is not None:
        settings = policy.current()
        asked = settings.policy == "strict" or op.name in dict(settings.overrides)
        _say_once(
            f"{wrapper.__module__}.{wrapper.__qualname__} may redefine PyTorch's functions: {op.name} "
            f"runs on plain PyTorch, which composes with it",
            logging.WARNING if asked else logging.INFO,
        )
        return op.incumbent.call(*args)
    return decide(op, case, hot.fingerprint(op, args))(*args)


_out_of_traces = _dispatch
"""The same, out of torch.compile's reach from the first error of a trace on."""


def _lazy(value: Any) -> bool:
    """Whether this is a tensor whose memory holds the negative or the conjugate of its values, which
    torch.compile and kernels would take for the values."""
    return isinstance(value, torch.Tensor) and (value.is_neg() or value.is_conj())


def _resolved(value: Any) -> Any:
    return value.resolve_neg().resolve_conj() if _lazy(value) else value


def _wraps(kind: type) -> bool:
    """Whether tensors of this class may redefine what PyTorch's functions do, as no parameters do."""
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return False
    return (
        kind.__torch_function__ is not torch._C._disabled_torch_function_impl  # type: ignore[attr-defined]
        or kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]
    )


def decide(op: Op, case: Case, where: tuple[Any, ...]) -> Callable[..., Any]:
    """What runs `case` under the settings in force, remembered under `where` in their memo; noted instead
    where a step is being recorded."""
    settings = policy.current()
    if note(op, case, settings.on(case.device)):
        return choose(op, case, policy.unsettled(settings)).candidate.call
    call = choose(op, case, settings).candidate.call
    if not recordings:  # a recording that began meanwhile must see the next such call
        decided = policy.memo(settings)
        if len(decided) >= _MOST_REMEMBERED:
            decided.clear()
        decided[where] = call
    return call


def choose(op: Op, case: Case, settings: policy.Settings) -> Choice:
    """The decision for `case` under `settings`; holds a contest only under the ``tune`` policy."""
    forced = dict(settings.overrides).get(op.name)
    if forced:
        return Choice(able(op, case, forced, settings.regime), "forced by override", None)
    if settings.policy == "off":
        return Choice(op.incumbent, "selection is off", None)
    name = key(op, case, settings.on(case.device))
    if settings.policy == "pinned":
        found = _pinned(op, name, case.device, settings)
    elif settings.policy == "heuristic":
        found = None
    else:
        found = policy.store.lookup(op, name, case.device)
        if found is None and settings.policy == "tune" and _may_tune(case, settings.regime):
            settle(op, case, settings.on(case.device))
            found = policy.store.lookup(op, name, case.device)
    if found:
        best = _first_able(op, case, found)
        if best:
            stale = " (measured under other versions)" if found.stale else ""
            won = best.name == found.verdict.winner
            why = found.verdict.why if won else "the winner can't take this case"
            return Choice(best, f"{why}, from {found.source}{stale}", found)
    return _missed(op, case, settings, name)


def _pinned(op: Op, name: str, device: str, settings: policy.Settings) -> Found | None:
    """The pinned table's verdict as it stands, which is what pinning means; what has changed is said once."""
    table = policy.pinned_table(settings)
    row = table.rows.get(name)
    if row is None:
        return None
    changed = differences(op, row, table.facts, device)
    if changed:
        _say_once(f"{settings.pinned} was measured {changed}; its choices hold, pinned", logging.WARNING)
    where = f" (measured {changed})" if changed else ""
    return Found(row, f"pinned table {settings.pinned}{where}", stale=False)


def _missed(op: Op, case: Case, settings: policy.Settings, name: str) -> Choice:
    if settings.policy == "strict":
        raise PolicyError(
            f"no verdict for {name}, and the policy is strict. Run bakeoff.tune(step) or "
            f"`bakeoff tune` on this machine first, or use the policy 'table'"
        )
    if settings.policy == "pinned":
        _say_once(f"{name} is not in {settings.pinned}: plain PyTorch is used", logging.WARNING)
        return Choice(op.incumbent, "not in the pinned table", None)
    guess = op.by_name[op.heuristic(case, settings.regime)]
    reasons = guess.reasons(case)
    if reasons:
        if guess.absent:
            _say_once(f"{guess.absent}: {op.name} runs on plain PyTorch", logging.WARNING)
        return Choice(op.incumbent, f"no verdict; {guess.name}: {'; '.join(reasons)}", None)
    _say_once(f"{name} is outside the measured range: the heuristic takes {guess.name}", logging.INFO)
    return Choice(guess, "no verdict: heuristic", None)


def _first_able(op: Op, case: Case, found: Found) -> Candidate | None:
    deterministic = torch.are_deterministic_algorithms_enabled()
    for name in found.verdict.ranking(deterministic=deterministic):
        candidate = op.by_name.get(name)
        if candidate and not candidate.baseline and not candidate.reasons(case):
            return candidate
    return None


def able(op: Op, case: Case, name: str, regime: str = "eager") -> Candidate:
    """The candidate called `name`, or Unsupported with every reason why it can't take `case`."""
    candidate = op.candidate(name)
    reasons = candidate.reasons(case)
    if regime == "compiled" and not candidate.traceable:
        reasons.append("can't be traced by torch.compile")
    if reasons:
        raise Unsupported(f"{op.name}: {name!r} can't take this case: {'; '.join(reasons)}")
    return candidate


def _explicit(op: Op, args: Sequence[Any], impl: str) -> Any:
    """What `impl` makes of this call; some compose with some transforms, so that each may try."""
    candidate = able(op, checked(op, args), impl)
    if candidate is op.incumbent or not hot.transformed():
        return candidate.call(*args)
    try:
        return candidate.call(*args)
    except Exception as error:
        raise Unsupported(
            f"{op.name}: {impl!r} can't run under this transform of torch.func, forward-mode derivative or "
            f"torch.jit.trace: leave impl out, or pass impl={op.incumbent.name!r}"
        ) from error


def checked(op: Op, args: Sequence[Any]) -> Case:
    """The call's case, or an error that names the wrong argument and the fix."""
    devices: dict[str, str] = {}
    for name, arg in zip(op.params, args, strict=True):
        if not isinstance(arg, torch.Tensor):
            continue
        if type(arg).__name__ == "DTensor":
            raise Unsupported(
                f"{op.name}: {name} is a DTensor; ops work on local shards: pass {name}.to_local()"
            )
        if arg.layout is not torch.strided or arg.is_nested:
            raise Unsupported(_other_layout(op.name, name, arg))
        devices.setdefault(str(arg.device), name)
    _check_devices(op, devices)
    case = op.case(args)
    op.check(case)
    return case


def _other_layout(op_name: str, name: str, tensor: torch.Tensor) -> str:
    nested = tensor.is_nested
    fix = f"torch.nested.to_padded_tensor({name}, 0.0)" if nested else f"{name}.to_dense()"
    form = "a nested tensor" if nested else f"of layout {tensor.layout}"
    return f"{op_name}: {name} is {form}; ops take dense tensors: pass {fix}"


def _check_devices(op: Op, devices: dict[str, str]) -> None:
    """Raises unless there is one device at most, of `devices` with an argument's name each."""
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(
            f"{op.name}: all tensors must be on one device, got {places}; move them with .to(device)"
        )


def _may_tune(case: Case, regime: str) -> bool:
    """Not while tracing or capturing a CUDA graph, not inside backward (recomputation), not without data, not
    on one rank of several."""
    if regime == "compiled" or case.device == "meta" or policy.store.agreed is not None:
        return False
    if case.device.startswith("cuda") and torch.cuda.is_current_stream_capturing():
        _say_once("a CUDA graph is being captured: not tuning now", logging.WARNING)
        return False
    return torch._C._current_graph_task_id() == -1


def _traced(op: Op, args: Sequence[Any], impl: str | None) -> Any:
    """Inside torch.compile: the decision is a constant, read from the table without touching row counts."""
    from torch._dynamo.comptime import comptime  # here, because it brings all of torch._dynamo

    known: list[Any] = []
    for name, arg in zip(op.params, args, strict=True):
        if isinstance(arg, torch.Tensor):
            if arg.layout is not torch.strided or arg.is_nested:
                raise Unsupported(_other_layout(op.name, name, arg))
            comptime(_note_shape)
            # With dynamic=True the number of an op that no global holds is a symbol.
            rows = arg.dim() - operator.index(op.features.get(name, 0))
            features = tuple([operator.index(size) for size in arg.shape[rows:]])  # specialises these alone
            known.append((features, rows, arg.dtype, str(arg.device), arg.requires_grad))
        elif isinstance(arg, float):  # with dynamic=True a symbol, but selection may depend on it
            comptime(_note_number)
            noted = _noted_number(name)
            known.append(arg if noted is None else noted)
        else:
            known.append(arg)
    described = tuple(known)
    fault = _constant_fault(op.name, described)
    if fault:
        raise _FAULTS[fault[0]](fault[1])
    chosen, kind, text = _constant_choice(op.name, described, torch.is_grad_enabled(), impl)
    if kind:
        raise _FAULTS[kind](text)
    return op.traced[chosen](*args)


_shapes: dict[str, tuple[int | None, ...]] = {}
"""Of the tensors of the call being traced, by argument, as they are in this trace."""
_numbers: dict[str, float] = {}
_FAULTS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (PolicyError, Unsupported, TypeError, ValueError)
}


def _note_shape(context: Any) -> None:
    """While tracing: notes the shape of `arg`, without a guard on it; None for a size that is data."""
    shape = context.get_local("arg").as_fake().shape
    known = [size if isinstance(size, int) else size.node.hint for size in shape]
    _shapes[context.get_local("name").as_python_constant()] = tuple(known)


def _note_number(context: Any) -> None:
    """While tracing: notes the number `arg`, on which the trace depends from then on."""
    arg = context.get_local("arg")
    value = arg.as_python_constant() if arg.is_python_constant() else float(arg.as_fake())
    _numbers[context.get_local("name").as_python_constant()] = value


def _noted_number(name: str) -> float | None:
    return _numbers.pop(name, None)


def _constant_fault(op_name: str, known: tuple[Any, ...]) -> tuple[str, str] | None:
    """The kind and the text of the error that the arguments deserve, or None."""
    op = find_op(op_name)
    values: dict[str, Any] = {}
    devices: dict[str, str] = {}
    shapes = {**_shapes}
    _shapes.clear()
    for name, value in zip(op.params, known, strict=True):
        values[name] = value
        if isinstance(value, tuple) and len(value) == 5:
            _, _, dtype, device, wants = value
            devices.setdefault(device, name)
            shape = shapes.get(name, (None,))
            if None in shape:  # not traced by torch.compile, or a size that only the data tell
                return None
            values[name] = TensorMeta.dense(shape, dtype, grad=wants)  # type: ignore[arg-type]
    try:
        _check_devices(op, devices)
        op.check(Case(values, next(iter(devices), "cpu")))
    except (TypeError, ValueError) as error:
        return _fault(TypeError if isinstance(error, TypeError) else ValueError, error)
    return None


def _constant_choice(
    op_name: str, known: tuple[Any, ...], grad: bool, impl: str | None
) -> tuple[str, str, str]:
    """The candidate; or "", and the kind and the text of the error that asking for one deserves."""
    op = find_op(op_name)
    values: dict[str, Any] = {}
    device = "cpu"
    # Equal in every row dimension, so that arguments agree with each other whatever their dimensions mean.
    most = max([rows for _, rows, *_ in (value for value in known if isinstance(value, tuple))], default=1)
    size = round(_UNKNOWN_ROWS ** (1 / max(most, 1)))
    for name, value in zip(op.params, known, strict=True):
        if isinstance(value, tuple) and len(value) == 5:
            features, rows, dtype, device, wants = value
            shape = (*([size] * rows), *features)
            values[name] = TensorMeta.dense(shape, dtype, grad=wants and grad)
        else:
            values[name] = op.scalar(name, value)
    case = Case(values, device)
    settings = msgspec.structs.replace(policy.current(), regime="compiled")
    try:
        if impl is not None:
            chosen = able(op, case, impl, "compiled")
        else:
            if note(op, case, "compiled"):
                settings = policy.unsettled(settings)
            chosen = choose(op, case, settings).candidate
    except (PolicyError, Unsupported) as error:
        return "", *_fault(type(error), error)
    if chosen.name == "compiled":
        chosen = op.incumbent  # the region around it is compiled already
    op.traced[chosen.name] = chosen.call
    return chosen.name, "", ""


def _fault(kind: type[Exception], error: Exception) -> tuple[str, str]:
    """The error's kind and text.

    It ends the trace, and the call is made again outside. Dynamo would trace what raises it there, too, and
    fail of that in torch 2.11 with an error of its own.
    """
    global _out_of_traces
    if _out_of_traces is _dispatch:
        _out_of_traces = torch.compiler.disable(_dispatch)
    return kind.__name__, str(error)


# What torch.compiler.assume_constant_result sets; calling it would import all of torch._dynamo at once.
_constant_choice._dynamo_marked_constant = True  # type: ignore[attr-defined]
_constant_fault._dynamo_marked_constant = True  # type: ignore[attr-defined]
_noted_number._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _say_once(text: str, level: int) -> None:
    if (text, level) not in _said:
        _said.add((text, level))
        log.log(level, text)
