"""Policies: which verdict is used now, set by argument, `using`, configuration or ``BAKEOFF_POLICY``."""

import contextlib
import difflib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

import msgspec

from bakeoff.errors import PolicyError, TableError
from bakeoff.paths import expanded
from bakeoff.select.choose import hot
from bakeoff.select.choose.table import Store, Table, read
from bakeoff.select.declare.key import REGIMES
from bakeoff.select.declare.registry import find_op

__all__ = ["POLICIES", "Settings", "configure", "current", "forget", "store", "unsettled", "untuned", "using"]

POLICIES = ("off", "heuristic", "table", "tune", "pinned", "strict")

store = Store()


class Settings(msgspec.Struct, frozen=True):
    """The selection settings in force."""

    policy: str = "table"
    regime: str = "eager"
    overrides: tuple[tuple[str, str], ...] = ()
    pinned: str = ""
    """The table file of the ``pinned`` policy."""
    require: str = ""
    """A property that candidates must have been seen to have: ``batch_invariant``, or none."""

    def on(self, device: str) -> str:
        """The regime of a call on `device` now. Only CUDA has graphs; while one is being captured the regime
        is "graph", whether or not anybody said so."""
        if not device.startswith("cuda"):
            return "eager" if self.regime == "graph" else self.regime
        return "graph" if self.regime == "eager" and hot.capturing() else self.regime


_context: ContextVar[Settings | None] = ContextVar("bakeoff_settings", default=None)
_base = Settings()
_entered: list[Settings] = []
"""What blocks of `using` put in force, in any thread, in the order they were entered."""
_memos: dict[Settings, hot.Memo] = {}
_pinned: dict[str, Table] = {}


def current() -> Settings:
    """The settings in force here: this context's own, else those of the block the process entered last."""
    return _context.get() or (_entered[-1] if _entered else _base)


def configure(
    policy: str | None = None, regime: str | None = None, require: str | None = None, **overrides: str
) -> None:
    """Set selection for the rest of the process, as `using` does for a block; blocks keep their own."""
    global _base
    _base = _changed(_base, policy, regime, overrides, require)
    _follow()


@contextlib.contextmanager
def using(
    policy: str | None = None, *, regime: str | None = None, require: str | None = None, **overrides: str
) -> Iterator[Settings]:
    """Select differently inside a block.

    Args:
        policy: ``off`` (plain PyTorch) | ``heuristic`` | ``table`` (the default: the table, a heuristic on a
            miss) | ``tune`` (hold a contest on a miss) | ``pinned:FILE`` (that table and nothing else; plain
            PyTorch on a miss) | ``strict`` (a miss is an error).
        regime: ``eager`` (host time counts) or ``graph`` (device time, for calls captured in a CUDA graph).
        require: ``batch_invariant``: only candidates whose results for a row were seen not to depend on how
            many other rows there are, and one and the same for all numbers of rows, so that prefill and
            decoding agree in every bit; a call for which none is known is an error. "" requires nothing.
        overrides: ``op="candidate"`` forces a candidate; it raises where it can't run.

    Code that torch.compile has made keeps the choices in force when it was compiled; torch.compiler.reset()
    lets it choose anew.

    Raises:
        PolicyError: an unknown policy, regime or op. Unsupported: an unknown candidate.

    Example:
        >>> import torch, bakeoff
        >>> with bakeoff.using(rms_norm="eager"):
        ...     bakeoff.ops.rms_norm(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """
    settings = _changed(current(), policy, regime, overrides, require)
    outer = _context.get()
    _entered.append(settings)
    _context.set(settings)
    hot.memo.set(memo(settings))
    _follow()
    try:
        yield settings
    finally:
        # Another thread's block may have begun inside this one and outlive it.
        del _entered[next(i for i, entered in enumerate(_entered) if entered is settings)]
        _context.set(outer)
        hot.memo.set(None if outer is None else memo(outer))
        _follow()


def unsettled(settings: Settings) -> Settings:
    """`settings` for a call that must neither hold a contest nor fail for want of one."""
    if settings.policy in ("tune", "strict") or settings.require:
        policy = "table" if settings.policy in ("tune", "strict") else settings.policy
        return msgspec.structs.replace(settings, policy=policy, require="")
    return settings


@contextlib.contextmanager
def untuned() -> Iterator[None]:
    """Inside, calls are of shapes that nobody tunes: see `unsettled`."""
    changed = unsettled(current())
    with using(None if changed.policy == current().policy else changed.policy, require=changed.require):
        yield


def forget() -> None:
    """Drop remembered decisions (the table may have changed)."""
    for known in _memos.values():
        known.clear()


def memo(settings: Settings) -> hot.Memo:
    """The decisions made under `settings` so far."""
    return _memos.setdefault(settings, {})


def pinned_table(settings: Settings) -> Table:
    """The table of the ``pinned`` policy, read once."""
    if settings.pinned not in _pinned:
        _pinned[settings.pinned] = read(Path(settings.pinned))
    return _pinned[settings.pinned]


def _changed(
    old: Settings,
    policy: str | None,
    regime: str | None,
    overrides: dict[str, str],
    require: str | None = None,
) -> Settings:
    name, pinned = old.policy, old.pinned
    if policy is not None:
        if not isinstance(policy, str):
            raise PolicyError(f"a policy is a word or 'pinned:FILE', got {policy!r}")
        name, _, argument = policy.removesuffix(")").replace("(", ":", 1).partition(":")
        if name not in POLICIES:
            near = difflib.get_close_matches(name, POLICIES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise PolicyError(f"there is no policy {policy!r}{hint} The policies are {', '.join(POLICIES)}")
        if (name == "pinned") != bool(argument):
            raise PolicyError(
                "write the pinned policy with its table: 'pinned:FILE' (other policies take no file)"
            )
        pinned = _file(argument) if argument else ""
    if regime is not None and regime not in REGIMES[:2]:
        raise PolicyError(f"there is no regime {regime!r} to set; use 'eager' or 'graph'")
    if require not in (None, "", "batch_invariant"):
        raise PolicyError(f"nothing is known of {require!r}; what can be required is 'batch_invariant'")
    for op, candidate in overrides.items():
        find_op(op).candidate(candidate)
    merged = {**dict(old.overrides), **overrides}
    required = old.require if require is None else require
    if required and name in ("off", "pinned"):
        raise PolicyError(f"the policy {name!r} chooses whatever is required: use another, or require ''")
    settings = Settings(name, regime or old.regime, tuple(sorted(merged.items())), pinned, required)
    if settings.pinned:
        pinned_table(settings)
    return settings


def _file(argument: str) -> str:
    try:
        return str(expanded(argument).absolute())  # another file after a change of folder
    except FileNotFoundError as error:
        raise TableError(f"the pinned table {argument} can't be read: {error.strerror}") from None


def _follow() -> None:
    """Let contexts without settings of their own use the decisions of those now in force."""
    hot.process_memo = memo(_entered[-1] if _entered else _base)


try:
    configure(os.environ.get("BAKEOFF_POLICY") or None)
except (PolicyError, TableError) as error:
    raise type(error)(f"BAKEOFF_POLICY: {error}") from None
