"""Dispatch: from a call that the memo of the hot path doesn't know to a candidate."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from bakeoff import hardware
from bakeoff.errors import PolicyError, Unsupported
from bakeoff.select.choose import hot, missed, policy, sentinel
from bakeoff.select.choose.require import required
from bakeoff.select.choose.table import Found, differences
from bakeoff.select.choose.tune import note, recordings, settle
from bakeoff.select.declare.candidate import Candidate
from bakeoff.select.declare.case import Case
from bakeoff.select.declare.key import key
from bakeoff.select.declare.lists import TensorList
from bakeoff.select.declare.op import Op
from bakeoff.select.declare.variants import bound, unusable

__all__ = ["ASK", "Asked", "Choice", "able", "checked", "choose", "decide", "dispatch"]

log = logging.getLogger("bakeoff")
_MOST_REMEMBERED = 4096

_said: set[tuple[str, int]] = set()


class Choice(NamedTuple):
    """The candidate for a case, why, the verdict behind it (None where there is none), and the launch
    configuration in which it runs ("" is its default)."""

    candidate: Candidate
    why: str
    found: Found | None
    variant: str = ""

    @property
    def call(self) -> Callable[..., Any]:
        """What runs the case."""
        return bound(self.candidate, self.variant)


ASK = "the case that this call makes"
"""As `impl`: raise `Asked` in place of running anything."""


class Asked(Exception):
    """The case that a call makes."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.case = case


def dispatch(op: Op, args: Sequence[Any], impl: str | None) -> Any:
    """Decide for this call, outside of torch.compile's traces; remember the decision, and run it."""
    return _run(op, args, impl)


def _decide_and_run(op: Op, args: Sequence[Any], impl: str | None) -> Any:
    args = op.with_lists(args)
    if impl is ASK:
        raise Asked(checked(op, args))
    if any(map(_lazy, args)) and not hot.transformed():
        args = tuple(map(_resolved, args))
    if impl is not None:
        return _explicit(op, args, impl)
    if hot.transformed():
        if torch._C._get_tracing_state() is None:  # shapes are tensors in torch.jit.trace
            checked(op, args)
        return op.incumbent.implementation(*args)
    case = checked(op, args)
    wrapper = next(filter(_wraps, _classes(args)), None)
    if wrapper is not None:
        settings = policy.current()
        asked = settings.policy == "strict" or op.name in dict(settings.overrides)
        say_once(
            f"{wrapper.__module__}.{wrapper.__qualname__} may redefine PyTorch's functions: {op.name} "
            f"runs on plain PyTorch, which composes with it",
            logging.WARNING if asked else logging.INFO,
        )
        return op.incumbent.implementation(*args)
    fingerprint = hot.fingerprint(op, args)
    return (hot.current().get(fingerprint) or decide(op, case, fingerprint))(*args)


_run = _decide_and_run


def keep_from_torch_compile() -> None:
    """From now on torch.compile leaves `dispatch` uncompiled.

    Called at the first error found while tracing: torch.compile then runs the call again outside its graph,
    and would trace into what raises the error there, which fails with an error of its own in torch 2.11.
    """
    global _run
    if _run is _decide_and_run:
        _run = torch.compiler.disable(_decide_and_run)


def _lazy(value: Any) -> bool:
    """Whether this is a tensor whose memory holds the negative or the conjugate of its values: torch.compile
    and kernels would read the memory and take that for the values."""
    return isinstance(value, torch.Tensor) and (value.is_neg() or value.is_conj())


def _resolved(value: Any) -> Any:
    return value.resolve_neg().resolve_conj() if _lazy(value) else value


def _classes(args: Sequence[Any]) -> Iterator[type]:
    """The classes of all tensors, those in lists too."""
    for a in args:
        if isinstance(a, torch.Tensor):
            yield type(a)
        elif isinstance(a, TensorList):
            yield from a.subclasses


def _wraps(kind: type) -> bool:
    """Whether tensors of this class may redefine what PyTorch's functions do, as no parameters do."""
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return False
    return (
        kind.__torch_function__ is not torch._C._disabled_torch_function_impl  # type: ignore[attr-defined]
        or kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]
    )


def decide(op: Op, case: Case, fingerprint: tuple[Any, ...]) -> Callable[..., Any]:
    """The implementation that runs `case` under the settings in force.

    It is remembered under the call's `fingerprint` in the memo of these settings; while a step is being
    recorded the call is noted instead.
    """
    settings = policy.current()
    if note(op, case, settings.on(case.device)):
        return choose(op, case, policy.unsettled(settings)).call
    choice, decided = choose(op, case, settings), policy.memo(settings)
    if op.name not in dict(settings.overrides):
        name = key(op, case, settings.on(case.device))
        checking = sentinel.watched(op, case, name, choice.candidate, choice.variant, choice.found)
        if checking is not None:
            return checking
    if hot.before_capture(fingerprint) is None or _may_begin_under_capture(op, choice.candidate, settings):
        implementation = choice.call
    else:  # what warming up has run, which has compiled
        warm = decided.get(hot.before_capture(fingerprint))
        implementation = op.incumbent.implementation if warm is None else warm
    if not recordings:  # a recording that began meanwhile must see the next such call
        if len(decided) >= _MOST_REMEMBERED:
            decided.clear()
        decided[fingerprint] = implementation
    return implementation


def _may_begin_under_capture(op: Op, candidate: Candidate, settings: policy.Settings) -> bool:
    """Whether a candidate chosen for a CUDA graph may run for the first time while one is being captured.

    Who captures without saying so has warmed up what the eager regime chooses. Plain PyTorch can begin now.
    So can kernels with a counter, ours, which are only compiled and loaded, if the driver can load code
    during a capture. torch.compile and third parties may wait for the device at their first call, which
    breaks the capture. Whoever asked for the regime or the candidate gets it.
    """
    asked = settings.regime == "graph" or op.name in dict(settings.overrides)
    own = candidate.launches is not None and not candidate.needs_warmup
    return asked or candidate is op.incumbent or (own and _loads_under_capture())


def _loads_under_capture() -> bool:
    """Whether the driver loads code while a CUDA graph is being captured, as those since CUDA 12.3 do."""
    return hardware.driver_cuda() >= (12, 3)


def choose(op: Op, case: Case, settings: policy.Settings, *, real: bool = True) -> Choice:
    """`_chosen`, but plain PyTorch where the sentinel saw what was chosen go wrong. Of `real` calls, which
    are about to run, misses are written down."""
    choice = _chosen(op, case, settings, real)
    if op.name in dict(settings.overrides):
        return choice
    why = sentinel.quarantined(key(op, case, settings.on(case.device)), choice.candidate.name)
    return choice if why is None else Choice(op.incumbent, why, choice.found)


def _chosen(op: Op, case: Case, settings: policy.Settings, real: bool) -> Choice:
    """The decision for `case` under `settings`; holds a contest only under the ``tune`` policy.

    A candidate that a verdict ranks runs in the configuration it was measured with. What is forced, or taken
    by a heuristic, runs in its default, whatever tables hold.
    """
    forced = dict(settings.overrides).get(op.name)
    if forced:
        return Choice(able(op, case, forced, settings.regime), "forced by override", None)
    if settings.policy == "off":
        return Choice(op.incumbent, "selection is off", None)
    if case.device == "meta":
        return Choice(op.incumbent, "tensors without data: there is nothing to measure", None)
    name = key(op, case, settings.on(case.device))
    if settings.require:
        known = policy.store.lookup(op, name, case.device)
        if known is None and settings.policy == "tune" and _may_tune(case, settings.regime):
            settle(op, case, settings.on(case.device))
        return Choice(*required(op, case, name), None)
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
            variant = _variant(op, case, best, found)
            default = ", in its default configuration" if found.verdict.variant(best.name) != variant else ""
            return Choice(best, f"{why}, from {found.source}{stale}{default}", found, variant)
    return _missed(op, case, settings, name, real)


def _pinned(op: Op, name: str, device: str, settings: policy.Settings) -> Found | None:
    """The pinned table's verdict as it stands, which is what pinning means; what has changed is said once."""
    table = policy.pinned_table(settings)
    row = table.rows.get(name)
    if row is None:
        return None
    changed = differences(op, row, table.facts, device)
    if changed:
        say_once(f"{settings.pinned} was measured {changed}; its choices hold, pinned", logging.WARNING)
    where = f" (measured {changed})" if changed else ""
    return Found(row, f"pinned table {settings.pinned}{where}", stale=False)


def _missed(op: Op, case: Case, settings: policy.Settings, name: str, real: bool) -> Choice:
    if settings.policy == "strict":
        raise PolicyError(
            f"no verdict for {name}, and the policy is strict. Run bakeoff.tune(step) or "
            f"`bakeoff tune` on this machine first, or use the policy 'table'"
        )
    if settings.policy == "pinned":
        say_once(f"{name} is not in {settings.pinned}: plain PyTorch is used", logging.WARNING)
        return Choice(op.incumbent, "not in the pinned table", None)
    if real and settings.policy == "table":
        missed.keep(op, case, settings.on(case.device), name)
    guess = op.by_name[op.heuristic(case, settings.on(case.device))]
    reasons = guess.reasons(case)
    if reasons:
        if guess.absent:
            say_once(f"{guess.absent}: {op.name} runs on plain PyTorch", logging.WARNING)
        elif too_old := hardware.without_triton(case.device):
            say_once(f"{too_old}: ops run on plain PyTorch", logging.WARNING)
        return Choice(op.incumbent, f"no verdict; {guess.name}: {'; '.join(reasons)}", None)
    say_once(f"{name} is outside the measured range: the heuristic takes {guess.name}", logging.INFO)
    return Choice(guess, "no verdict: heuristic", None)


def _first_able(op: Op, case: Case, found: Found) -> Candidate | None:
    deterministic = torch.are_deterministic_algorithms_enabled()
    for name in found.verdict.ranking(deterministic=deterministic):
        candidate = op.by_name.get(name)
        if candidate and not candidate.baseline and not candidate.reasons(case):
            return candidate
    return None


def _variant(op: Op, case: Case, candidate: Candidate, found: Found) -> str:
    """The configuration in which a verdict's `candidate` runs `case`: that of its contest, or the default
    where sources or versions have changed since, or where the table asks for one that it doesn't have."""
    trial = next(t for t in found.verdict.trials if t.candidate == candidate.name)
    agreed = policy.store.agreed is not None  # all ranks hold the same verdicts, and must run the same
    if not trial.variant or found.stale or (trial.source_hash != candidate.source_hash and not agreed):
        return ""
    problem = unusable(candidate, op.bucket(case), trial.variant)
    if problem:
        say_once(
            f"{found.source}: {op.name}: {candidate.name} runs in its default configuration: {problem}",
            logging.WARNING,
        )
        return ""
    return trial.variant


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
        return candidate.implementation(*args)
    try:
        return candidate.implementation(*args)
    except Exception as error:
        raise Unsupported(
            f"{op.name}: {impl!r} can't run under this transform of torch.func, forward-mode derivative or "
            f"torch.jit.trace: leave impl out, or pass impl={op.incumbent.name!r}"
        ) from error


def checked(op: Op, args: Sequence[Any]) -> Case:
    """The call's case, or an error that names the wrong argument and the fix."""
    devices: dict[str, str] = {}
    args = op.with_lists(args)
    for name, arg in zip(op.params, args, strict=True):
        if isinstance(arg, TensorList):
            if arg.wants_grad and torch.is_grad_enabled():
                raise Unsupported(
                    f"{op.name}: tensors in {name} require gradients, which lists don't carry; call it under "
                    f"torch.no_grad()"
                )
            devices.setdefault(str(arg.device), name)
        if not isinstance(arg, torch.Tensor):
            continue
        if type(arg).__name__ == "DTensor":
            raise Unsupported(
                f"{op.name}: {name} is a DTensor; ops work on local shards: pass {name}.to_local()"
            )
        if arg.layout is not torch.strided or arg.is_nested:
            raise Unsupported(other_layout(op.name, name, arg))
        devices.setdefault(str(arg.device), name)
    check_devices(op, devices)
    case = op.case(args)
    op.check(case)
    return case


def other_layout(op_name: str, name: str, tensor: torch.Tensor) -> str:
    nested = tensor.is_nested
    fix = f"torch.nested.to_padded_tensor({name}, 0.0)" if nested else f"{name}.to_dense()"
    form = "a nested tensor" if nested else f"of layout {tensor.layout}"
    return f"{op_name}: {name} is {form}; ops take dense tensors: pass {fix}"


def check_devices(op: Op, devices: dict[str, str]) -> None:
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
    if case.device.startswith("cuda") and hot.capturing():
        say_once("a CUDA graph is being captured: not tuning now", logging.WARNING)
        return False
    return torch._C._current_graph_task_id() == -1


def say_once(text: str, level: int) -> None:
    if (text, level) not in _said:
        _said.add((text, level))
        log.log(level, text)
