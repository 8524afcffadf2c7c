"""The table: verdicts on disk, stamped with hardware and versions.

A file is sorted, readable JSON, one per machine and set of versions, so that environments side by side keep
theirs. It is written beside and renamed under a lock, so a reader sees the old or the new file whole. A file
that can't be trusted is set aside and measured again; it never stops a run.
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib.resources
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from bakeoff import hardware
from bakeoff.errors import TableError
from bakeoff.paths import contents, expanded, write_whole
from bakeoff.select.contests.verdict import Verdict
from bakeoff.select.declare.op import Op

__all__ = ["Found", "Store", "Table", "cache_dir", "differences", "read", "write"]

log = logging.getLogger("bakeoff")
_LARGEST = 64 * 2**20
_LOCK_S = 10.0  # a table is written in milliseconds


class Table(msgspec.Struct, frozen=True):
    """What a table file holds: the machine's facts and the verdicts by key."""

    facts: hardware.Facts
    rows: dict[str, Verdict]
    schema: Literal[1] = 1


@dataclass(frozen=True)
class Found:
    """A verdict and where it came from."""

    verdict: Verdict
    source: str
    stale: bool


def cache_dir() -> Path:
    """``$BAKEOFF_CACHE``, else the platform's cache folder; below no folder where there is no such home."""
    own, shared = os.environ.get("BAKEOFF_CACHE"), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = own or f"{'~/Library/Caches' if sys.platform == 'darwin' else shared}/bakeoff"
    try:
        return expanded(folder)
    except FileNotFoundError:  # without a home nothing can be kept, which must not stop a run
        return Path(os.devnull, folder)


def read(path: Path) -> Table:
    """The table in `path`; raises `TableError` with what is wrong, whatever the file holds."""
    try:
        table = msgspec.json.decode(contents(path, _LARGEST), type=Table)
    except OSError as error:
        raise TableError(f"{path} can't be read: {error.strerror or error}") from error
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise TableError(f"{path} is not a table of this version: {error}") from error
    if not all(str(fact).isprintable() for fact in msgspec.structs.astuple(table.facts)):
        raise TableError(
            f"{path}: its facts hold control characters; take a table that bakeoff table export wrote"
        )
    for name, row in table.rows.items():
        if name != row.key or not _sound(row):
            raise TableError(f"{path}: row {name[:80]!r} contradicts itself")
    return table


def _sound(row: Verdict) -> bool:
    """Whether a row could have come out of a contest."""
    texts = [row.key, row.op, row.regime, row.why, row.warning, row.date]
    texts += [text for trial in row.trials for text in (trial.candidate, trial.rejected or "", trial.variant)]
    texts += [str(each) for trial in row.trials for pair in trial.variants.items() for each in pair]
    times = row.timings
    return (
        row.winner in times
        and all(timing.us > 0 and timing.spread >= 0 for timing in times.values())
        and times[row.winner].us <= next(iter(times.values())).us  # the incumbent stands first
        and all(text.isprintable() for text in texts)  # they go to terminals and logs
    )


def write(path: Path, table: Table) -> None:
    """Write `table` whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = msgspec.structs.replace(table, rows=dict(sorted(table.rows.items())))
    write_whole(path, msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")


class Store:
    """The layers behind a lookup: the user's cache, then the tables shipped in the package.

    Rows measured since the start are kept in memory too, so a disk that is full or read-only costs only
    the next run's start.
    """

    def __init__(self) -> None:
        self.fresh: dict[tuple[str, str], Verdict] = {}
        self.agreed: dict[str, Verdict] | None = None
        """What alone decides, by key: rank 0's verdicts, once the ranks of a job have agreed; or the table of
        a run that goes on."""
        self.agreed_by = "rank 0"
        self.loaded: dict[tuple[Path, str], Table | None] = {}
        self.silent = False

    def path(self, device: str, facts: hardware.Facts | None = None) -> Path:
        """The user's table for the machine behind `device` and the versions here, or for these facts."""
        return cache_dir() / _file_name(facts or hardware.facts(_kind(device)))

    def paths(self, device: str) -> list[Path]:
        """The user's tables for this machine: that of the versions here, then others, the newest first."""
        own = self.path(device)
        found = {}
        with contextlib.suppress(OSError):
            for path in own.parent.glob(f"{own.name.partition('.')[0]}.*.json"):
                with contextlib.suppress(OSError):
                    found[path] = path.stat().st_mtime
        found.pop(own, None)
        return [own, *sorted(found, key=lambda path: found[path], reverse=True)]

    def lookup(self, op: Op, name: str, device: str) -> Found | None:
        """The best verdict for key `name`, or None."""
        if self.agreed is not None:
            row = self.agreed.get(name)
            return Found(row, self.agreed_by, stale=False) if row else None
        fresh = self.fresh.get((_kind(device), name))
        if fresh and _current(op, fresh):  # a notebook may have declared the op once more
            return Found(fresh, "measured now", stale=False)
        here = hardware.facts(_kind(device))
        for source, path in self._layers(device):
            table = self._load(path, device)
            row = table.rows.get(name) if table else None
            if table and row and _current(op, row):
                return Found(row, source, stale=table.facts.same_software != here.same_software)
        return None

    def rows(self, op: Op, device: str) -> dict[str, Verdict]:
        """All verdicts on `op` that hold here, by key; the best layer's where several know one."""
        if self.agreed is not None:
            return {name: row for name, row in self.agreed.items() if row.op == op.name}
        found = {name: row for (kind, name), row in self.fresh.items() if kind == _kind(device)}
        for _, path in self._layers(device):
            table = self._load(path, device)
            found = {**(table.rows if table else {}), **found}
        return {name: row for name, row in found.items() if _current(op, row)}

    def add(self, verdicts: Iterable[Verdict], device: str) -> None:
        """Keep verdicts, in memory and in the user's table; an unwritable disk is reported once."""
        rows = {verdict.key: verdict for verdict in verdicts}
        self.fresh.update({(_kind(device), name): row for name, row in rows.items()})
        path = self.path(device)
        facts = hardware.facts(_kind(device))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path):
                old = self._own(path, device)
                for left in path.parent.glob(f".{path.name}.*"):
                    left.unlink(missing_ok=True)  # by a writer that was killed: we hold the lock
                write(path, Table(facts, {**(old.rows if old else {}), **rows}))
        except OSError as error:
            if not self.silent:
                log.warning(
                    "the table %s can't be written (%s): verdicts hold for this run only; "
                    "set BAKEOFF_CACHE to a writable folder",
                    path,
                    error.strerror or error,
                )
                self.silent = True

    def forget(self) -> None:
        """Drop what was loaded, so that files are read again."""
        self.fresh.clear()
        self.loaded.clear()
        self.agreed = None

    def _layers(self, device: str) -> Iterator[tuple[str, Path]]:
        for path in self.paths(device):
            yield "user cache", path
        shipped = importlib.resources.files("bakeoff") / "tables"
        with contextlib.suppress(OSError):
            for entry in sorted(shipped.iterdir(), key=lambda e: e.name) if shipped.is_dir() else []:
                if entry.name.endswith(".json"):
                    yield f"shipped table {entry.name}", Path(str(entry))

    def _load(self, path: Path, device: str) -> Table | None:
        place = (path, _kind(device))
        if place not in self.loaded:
            self.loaded[place] = (self._own if path == self.path(device) else self._others)(path, device)
        return self.loaded[place]

    def _others(self, path: Path, device: str) -> Table | None:
        """A table of the package or of another environment, which stays where it is."""
        try:
            table = read(path)
        except TableError as error:
            log.warning("%s; ignored", error)
            return None
        return table if table.facts.same_machine == hardware.facts(_kind(device)).same_machine else None

    def _own(self, path: Path, device: str) -> Table | None:
        """The user's table in `path`; a file that isn't one for this machine is set aside."""
        if not os.path.lexists(path):
            return None
        try:
            table = read(path)
            if table.facts.same_machine != hardware.facts(_kind(device)).same_machine:
                raise TableError(f"{path} was measured on another machine ({table.facts.device!r})")
            if path.name != _file_name(table.facts):
                raise TableError(f"{path} was measured under other versions than its name says")
            return table
        except TableError as error:
            aside = path.with_suffix(f".broken-{os.getpid()}")
            try:
                os.replace(path, aside)
                log.warning("%s; set aside as %s, its contests will be held again", error, aside.name)
            except OSError:
                log.warning("%s; ignored", error)
            return None


def _current(op: Op, row: Verdict) -> bool:
    """Whether the row still speaks of today's code: no installed candidate is new or has another source."""
    known = {trial.candidate: trial.source_hash for trial in row.trials}
    return row.op == op.name and all(
        candidate.absent or known.get(candidate.name) == candidate.source_hash for candidate in op.candidates
    )


def differences(op: Op, row: Verdict, facts: hardware.Facts, device: str) -> str:
    """Where else than here a verdict was measured, in words; "" if nothing differs."""
    here = hardware.facts(_kind(device))
    found = []
    if facts.same_machine != here.same_machine:
        found.append(f"on another machine ({facts.device})")
    if facts.same_software != here.same_software:
        found.append(f"under other versions (torch {facts.torch}, triton {facts.triton})")
    if not _current(op, row):
        found.append(f"with other sources of {op.name}")
    return ", ".join(found)


def _file_name(facts: hardware.Facts) -> str:
    """MACHINE.VERSIONS.json"""

    def plain(parts: Iterable[object]) -> str:
        return re.sub(r"[^a-z0-9]+", "-", "-".join(map(str, parts)).lower()).strip("-")

    *versions, overrides = facts.same_software
    mark = [hashlib.sha256(overrides.encode()).hexdigest()[:8]] if overrides else []
    return f"{plain(facts.same_machine)}.{plain([*versions, *mark])}.json"


def _kind(device: str) -> str:
    return device if device.startswith("cuda") else "cpu"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[Any]:
    """The lock of a table; OSError where another process holds it for too long, as one that is stopped."""
    with open(path.with_suffix(".lock"), "w") as file:
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    text = f"another process has held {file.name} for {_LOCK_S:g} s; end it"
                    raise OSError(errno.EWOULDBLOCK, text) from None
                time.sleep(0.02)
        yield
