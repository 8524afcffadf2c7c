"""The sentinel: now and then one selected call of a run is verified again, on the run's own values.

A contest proves a candidate on drawn inputs, in a process of its own. What is right there and wrong in the
run, or after a hundred thousand calls, is what this is for. It is off by default.
"""

import contextlib
import datetime
import itertools
import logging
import pickle
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from bakeoff import hardware
from bakeoff.errors import BakeoffError
from bakeoff.select.choose import hot, policy
from bakeoff.select.choose.table import Found, cache_dir
from bakeoff.select.contests.failure import DeviceLost, printable, reason
from bakeoff.select.contests.verify import verify
from bakeoff.select.contests.yardstick import yardstick_for
from bakeoff.select.declare.candidate import Candidate
from bakeoff.select.declare.case import Case
from bakeoff.select.declare.lists import TensorList
from bakeoff.select.declare.op import Op
from bakeoff.select.declare.registry import find_op
from bakeoff.select.declare.variants import at, label

__all__ = ["Sentinel", "quarantined", "replay", "sentinel", "watched"]

log = logging.getLogger("bakeoff")
_quarantine: dict[tuple[str, str], str] = {}
"""By key and candidate why it runs no more in this process."""
_on_duty: list["Sentinel"] = []


class Sentinel:
    """Count steps by `step`; see `sentinel`."""

    def __init__(self, every: int, folder: Path) -> None:
        self.every, self.folder = every, folder
        self.steps = self.turn = self.seen = 0
        self.armed = False
        self.checked: dict[str, int] = {}
        """By key and candidate how many calls were verified."""
        self.failed: dict[str, Path] = {}
        """Likewise the file that repeats what went wrong."""

    def step(self) -> None:
        """A step of the run begins. Of each `every`-th one kind of calls is watched, each in its turn."""
        self.rest()
        if self.steps % self.every == 0:
            self.armed, self.seen = True, 0
            policy.forget()  # remembered calls would pass unseen
        self.steps += 1

    def rest(self) -> None:
        """The step is over: nothing is watched until another begins."""
        if self.armed:
            self.armed = False
            self.turn = (self.turn + 1) % max(self.seen, 1)

    def wants(self) -> bool:
        """Whether the kind of call that is decided now is the one whose turn it is."""
        if not self.armed:
            return False
        self.seen += 1
        return self.seen == self.turn + 1


@contextlib.contextmanager
def sentinel(every: int = 1000, folder: str | Path | None = None) -> Iterator[Sentinel]:
    """Watch a run: each `every`-th step, one selected call is verified against the reference in float64 and
    eager's own error, with the call's own arguments and an ordinary gradient.

    A candidate that fails runs no more: its calls go to plain PyTorch, its row in the table says why, and a
    file in `folder` (default: the cache's ``reproducers``) holds the arguments; `replay` repeats the check.
    Calls inside torch.compile's code and CUDA graphs are decided once and for all, and not watched.

    Args:
        every: steps between checks, at least 1. A check takes as long as some dozen calls of plain PyTorch in
            float64, and waits for the device.
        folder: where files about failures go.

    Example:
        >>> import torch, bakeoff
        >>> from bakeoff.select import sentinel
        >>> with sentinel(every=1) as guard:
        ...     guard.step()
        ...     y = bakeoff.ops.rms_norm(torch.randn(8, 16))
        >>> guard.failed
        {}
    """
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r} must be a number of steps, at least 1")
    guard = Sentinel(every, Path(folder) if folder else cache_dir() / "reproducers")
    _on_duty.append(guard)
    policy.forget()
    try:
        yield guard
    finally:
        _on_duty.remove(guard)
        policy.forget()


def quarantined(name: str, candidate: str) -> str | None:
    """Why a candidate runs no more for key `name`, or None."""
    return _quarantine.get((name, candidate))


def watched(
    op: Op, case: Case, name: str, candidate: Candidate, variant: str, found: Found | None
) -> Callable[..., Any] | None:
    """What runs the call that is decided now if it is to be verified first, else None."""
    guard = next((guard for guard in _on_duty if guard.wants()), None)
    if guard is None or candidate is op.incumbent or hot.capturing():
        return None

    def call(*args: Any) -> Any:
        failure = _failure(op, at(candidate, variant), args)
        place = f"{name}: {label(candidate.name, variant)}"
        guard.checked[place] = guard.checked.get(place, 0) + 1
        if failure is None:
            return at(candidate, variant).implementation(*args)
        file = _reproducer(guard.folder, op, candidate.name, variant, args, failure)
        guard.failed[place] = file
        _retire(op, name, candidate.name, failure, found, case.device)
        log.error(
            "%s went wrong in this run: %s. Its calls go to plain PyTorch from now on; "
            "bakeoff.select.replay(%r) repeats the check", place, failure, str(file),
        )  # fmt: skip
        return op.incumbent.implementation(*args)

    return call


def _failure(op: Op, candidate: Candidate, args: Any) -> str | None:
    try:
        verify(op, candidate, [yardstick_for(op, list(args))])
    except DeviceLost:
        raise
    except torch.cuda.OutOfMemoryError:
        log.info("%s: no memory to verify a call; it goes unchecked", op.name)
    except Exception as error:  # noqa: BLE001  whatever a candidate raises
        return printable(reason(candidate.name, error))
    return None


def _retire(op: Op, name: str, candidate: str, failure: str, found: Found | None, device: str) -> None:
    """Let a candidate run no more for a key: in this process, and in the user's table."""
    why = f"wrong in a run: {failure}"
    _quarantine[name, candidate] = why
    if found is not None and policy.store.agreed is None:
        row = found.verdict
        trials = tuple(
            msgspec.structs.replace(t, rejected=why) if t.candidate == candidate else t for t in row.trials
        )
        lost = row.winner == candidate
        row = msgspec.structs.replace(
            row,
            trials=trials,
            winner=op.incumbent.name if lost else row.winner,
            why=f"{candidate} was {why}" if lost else row.why,
        )
        policy.store.add([row], device)
    policy.forget()


def _reproducer(folder: Path, op: Op, candidate: str, variant: str, args: Any, failure: str) -> Path:
    """Write down a call's arguments, as ``torch.load(file, weights_only=True)`` reads them."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    facts = hardware.facts(op.case(args).device)
    held = {
        "op": op.name,
        "candidate": candidate,
        "variant": variant,
        "failure": failure,
        "date": date,
        "device": facts.device,
        "torch": facts.torch,
        "triton": facts.triton,
        "args": [_kept(a) for a in args],
        "requires_grad": [isinstance(a, torch.Tensor) and a.requires_grad for a in args],
    }
    name = f"{op.name}-{candidate}-{re.sub(r'[^0-9T]', '', date)}"
    path = next(
        path
        for number in itertools.count(1)
        if not (path := folder / (f"{name}.pt" if number == 1 else f"{name}-{number}.pt")).exists()
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(held, path)
    except (OSError, RuntimeError) as error:
        log.warning("%s can't be written: %s", path, error)
    return path


def _kept(value: Any) -> Any:
    if isinstance(value, TensorList):
        return [t.detach() for t in value]
    return value.detach() if isinstance(value, torch.Tensor) else value


def replay(file: str | Path, device: str | None = None) -> str | None:
    """Repeat the check that a file of `sentinel` is about; what goes wrong, or None where nothing does.

    Args:
        file: as the error's text names it.
        device: where to; default: where it happened.

    Raises:
        BakeoffError: the file is not of `sentinel`, or of a GPU that is not here.
    """
    try:
        held = torch.load(file, weights_only=True, map_location=device)
        op = find_op(held["op"])
    except (EOFError, KeyError, RuntimeError, TypeError, pickle.UnpicklingError, struct.error) as error:
        raise BakeoffError(
            f"{file} can't be replayed: give a file that sentinel wrote, and device='cpu' where it is of a "
            f"GPU that is not here ({type(error).__name__})"
        ) from error
    args = [
        a.requires_grad_(grad) if isinstance(a, torch.Tensor) else a
        for a, grad in zip(held["args"], held["requires_grad"], strict=True)
    ]
    return _failure(op, at(op.candidate(held["candidate"]), held["variant"]), op.with_lists(args))
