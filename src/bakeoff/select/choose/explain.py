"""Explain: the choice for a call, why, and everything the contest found."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from bakeoff import hardware
from bakeoff.select.choose import policy
from bakeoff.select.choose.dispatch import ASK, Asked, checked, choose
from bakeoff.select.choose.table import Found
from bakeoff.select.choose.tune import recording
from bakeoff.select.contests.verdict import Trial, Verdict
from bakeoff.select.declare.case import Case
from bakeoff.select.declare.key import key
from bakeoff.select.declare.op import Op
from bakeoff.select.declare.registry import find_op
from bakeoff.select.declare.variants import label

__all__ = ["Explanation", "Row", "choices", "explain", "explain_case", "rows_of"]


class Row(msgspec.Struct, frozen=True):
    """One candidate in an explanation. `share` is the part of the machine's limit it reaches (0 to 1)."""

    candidate: str
    us: float | None
    share: float | None
    error: float | None
    chosen: bool
    why: str
    variant: str = ""
    """The launch configuration that was measured; "" is the candidate's default."""


class Explanation(msgspec.Struct, frozen=True):
    """Why a call runs what it runs; `str()` of it is the table that the command line prints."""

    op: str
    key: str
    choice: str
    why: str
    source: str
    rows: tuple[Row, ...]
    warning: str = ""
    verdict: Verdict | None = None
    """The contest behind the choice; None where none was held or the choice is forced."""
    variant: str = ""
    """The launch configuration in which the choice runs; "" is its default."""

    def __str__(self) -> str:
        choice = label(self.choice, self.variant)
        lines = [f"{self.key}", f"  choice: {choice} ({self.why})", f"  source: {self.source}"]
        if self.warning:
            lines.append(f"  warning: {self.warning}")
        lines.append(f"  {'candidate':<10} {'us':>10} {'of limit':>8} {'error':>8}")
        for row in self.rows:
            us = "-" if row.us is None else f"{row.us:.2f}"
            share = "-" if row.share is None else f"{row.share:.0%}"
            error = "-" if row.error is None else f"{row.error:.1e}"
            mark = "*" if row.chosen else " "
            lines.append(f" {mark}{row.candidate:<10} {us:>10} {share:>8} {error:>8}  {row.why}".rstrip())
        return "\n".join(lines)


def explain(op: Any, *args: Any, **kwargs: Any) -> Explanation:
    """The choice for ``op(*args, **kwargs)`` under the settings in force, without running it.

    Args:
        op: an op's name (``"rms_norm"``), its public function, or the `Op`.
        args, kwargs: the arguments of the call, `impl` too.

    Raises:
        What the call would raise for such arguments.

    Example:
        >>> import torch, bakeoff
        >>> bakeoff.explain("rms_norm", torch.ones(2, 4)).op
        'rms_norm'
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", "")
    if not (isinstance(op, Op) or name):
        raise TypeError(f"explain takes an op's name, its public function or an Op, not {op!r}")
    found = op if isinstance(op, Op) else find_op(name)
    public = _public(found)
    if inspect.isfunction(op) and public and inspect.unwrap(op) not in (public, found.reference):
        raise TypeError(
            f"{op.__module__}.{name} is not the op {name}: pass the op's name, or {public.__module__}'s"
        )
    settings, impl = policy.current(), kwargs.pop("impl", None)
    if impl is not None:
        overrides = {**dict(settings.overrides), found.name: impl}
        settings = msgspec.structs.replace(settings, overrides=tuple(sorted(overrides.items())))
    return explain_case(found, _case(found, op, args, kwargs), settings)


def explain_case(op: Op, case: Case, settings: policy.Settings | None = None) -> Explanation:
    """`explain` for a case, under `settings` (default: those in force); holds no contest."""
    settings = settings or policy.current()
    if settings.policy == "tune":
        settings = msgspec.structs.replace(settings, policy="table")
    choice = choose(op, case, settings, real=False)
    chosen = choice.candidate.name
    name = key(op, case, settings.on(case.device))
    if choice.found is not None:
        verdict, source = choice.found.verdict, _source(choice.found)
        rows = rows_of(verdict, case.device, chosen)
        return Explanation(
            op.name, name, chosen, choice.why, source, rows, verdict.warning, verdict, choice.variant
        )
    overridden = op.name in dict(settings.overrides)
    if overridden or settings.require or settings.policy in ("off", "heuristic"):
        known = policy.store.lookup(op, name, case.device)
        if known is not None:
            told = overridden or settings.require
            reason = choice.why if told else f"forced by the policy {settings.policy}"
            source = _source(known)
            rows = tuple(_forced(row, reason) for row in rows_of(known.verdict, case.device, chosen))
            reason = next((row.why for row in rows if row.chosen), reason)
            return Explanation(op.name, name, chosen, reason, source, rows, known.verdict.warning)
    why = {c.name: "; ".join(c.reasons(case)) or "not measured" for c in op.candidates}
    rows = tuple(Row(name, None, None, None, name == chosen, text) for name, text in why.items())
    return Explanation(op.name, name, chosen, choice.why, "no verdict for this key", rows)


def _source(found: Found) -> str:
    return found.source + (" (measured under other versions)" if found.stale else "")


def choices(step: Callable[[], object]) -> set[tuple[str, str]]:
    """Every (op, candidate) that step() runs; nothing is tuned meanwhile."""
    with recording() as recorded:
        step()
    settings = policy.unsettled(policy.current())
    chosen = ((op, choose(op, case, settings, real=False)) for op, case in recorded.values())
    return {(op.name, choice.candidate.name) for op, choice in chosen}


def rows_of(verdict: Verdict, device: str, chosen: str) -> tuple[Row, ...]:
    """A verdict's trials as rows, with the share of the limit of `device` (where that device is here)."""
    here = not device.startswith("cuda") or torch.cuda.is_available()
    limit = hardware.limit_us(verdict.cost.bytes, verdict.cost.flops, device) if here else None
    rows = []
    for trial in verdict.trials:
        us = trial.timing.us if trial.timing and not trial.rejected else None
        why = trial.rejected or (verdict.why if trial.candidate == verdict.winner else "")
        if trial.variant and us is not None:
            why = "; ".join(filter(None, (why, _configured(trial))))
        rows.append(
            Row(
                trial.candidate,
                us,
                limit / us if limit and us else None,
                trial.errors.rms if trial.errors else None,
                trial.candidate == chosen,
                why,
                trial.variant,
            )
        )
    return tuple(rows)


def _configured(trial: Trial) -> str:
    """The configuration behind a trial's time, and what it gained in the screening."""
    base, mine = trial.variants.get(""), trial.variants.get(trial.variant)
    known = isinstance(base, float) and isinstance(mine, float) and mine > 0
    return f"as {trial.variant}" + (f" ({base / mine:.2f} times as fast as its default)" if known else "")  # type: ignore[operator]


def _forced(row: Row, why: str) -> Row:
    """`row`, if it is the chosen one, with the reason before what its contest said."""
    why += ", in its default configuration" if row.variant else ""
    said = f"{why}; {row.why}" if row.why else why
    return msgspec.structs.replace(row, why=said) if row.chosen else row


def _case(op: Op, asked: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Case:
    """The case that a call of `asked` (the op, its name or its public function) makes: by the public function
    where it takes the op's own arguments, which it may cast and complete, or some of them in a tuple; else by
    the definition."""
    public = _public(op) if isinstance(asked, str) else asked
    if inspect.isfunction(public) and _takes(public, op, args, kwargs):
        try:
            public(*args, **kwargs, impl=ASK)
        except Asked as answer:
            return answer.case
    bound = inspect.signature(op.reference).bind(*args, **kwargs)
    bound.apply_defaults()
    return checked(op, [bound.arguments[name] for name in op.params])


def _takes(public: Any, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a public function takes the op's own arguments; or takes `args` and `kwargs`, and the op's
    arguments in tuples, as `memory` for memory_w1 and others."""
    signature = inspect.signature(public)
    names, own = {*signature.parameters} - {"impl"}, {*op.params}
    tuples = tuple(f"{name}_" for name in names - own)
    if "impl" not in signature.parameters or not all(name.startswith(tuples) for name in own - names):
        return False
    if not tuples:
        return names == own
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _public(op: Op) -> Any:
    """The public function of `op`: in the package around its declaration, under the op's name; or None."""
    package = op.home.partition(":")[0].rpartition(".")[0]
    return getattr(sys.modules.get(package), op.name, None)
