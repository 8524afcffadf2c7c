"""Results files: what was measured, on which machine, by which code.

``{"schema": 1, "env": {...}, "rows": [...]}``. The file is written whole and renamed after every cell, so a
run that is killed keeps what it measured.
"""

import contextlib
import datetime
import fcntl
import functools
import importlib
import importlib.metadata
import importlib.util
import math
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

import bakeoff
from bakeoff import hardware
from bakeoff.apps.bench.suites import Cell, chosen
from bakeoff.errors import BakeoffError
from bakeoff.paths import contents, write_whole
from bakeoff.select import Candidate, Op, Trial, Verdict, registry

__all__ = [
    "Env",
    "File",
    "ResultsError",
    "Row",
    "candidate_of",
    "cell_of",
    "changed",
    "commit",
    "current",
    "declared",
    "environment",
    "failed_row",
    "keep",
    "open_file",
    "ours",
    "read",
    "require_chosen",
    "rows_of_verdict",
    "slug",
    "write",
]

_LARGEST = 2**28  # bytes


class ResultsError(BakeoffError, ValueError):
    """A results file that can't be read or belongs to another machine."""


def require_chosen(text: str, names: Iterable[str]) -> None:
    """Raises ResultsError where `text` chooses none of `names`."""
    known = list(dict.fromkeys(names))
    if not any(chosen(text, name) for name in known):
        raise ResultsError(f"--filter {text!r} chooses nothing; there are {', '.join(known)}")


_SAME = ("device", "sms", "driver", "torch", "triton", "cuda")
"""The fields of `Env` that must be equal for rows to stand in one file."""


class Env(msgspec.Struct, frozen=True):
    """The machine and the software of a run. `memory` is in bytes, `copy_gbps` counts bytes read plus
    written."""

    device: str
    sms: int
    memory: int
    driver: str
    torch: str
    triton: str
    cuda: str
    python: str
    date: str
    commit: str
    copy_gbps: float
    matmul_tflops: float
    packages: dict[str, str] = {}
    """Versions of the peers that are installed."""

    def unlike(self, today: "Env") -> str:
        """What keeps rows of today out of a file of this machine, in words: another device, driver or
        version. Empty where nothing does; a peer that only one of the two has is no hindrance."""
        pairs = [(name, getattr(self, name), getattr(today, name)) for name in _SAME]
        both = self.packages.keys() & today.packages.keys()
        pairs += [(name, self.packages[name], today.packages[name]) for name in sorted(both)]
        return ", ".join(f"{name} {then}, now {now}" for name, then, now in pairs if then != now)


class Row(msgspec.Struct, kw_only=True):
    """One candidate in one cell. Times are microseconds a call, `share` the part of the machine's limit
    reached (0 to 1), errors relative RMS against the float64 reference, `peak_bytes` device memory one call
    adds."""

    op: str
    case: str
    dtype: str
    regime: str
    direction: str
    candidate: str
    us: float | None = None
    us_p20: float | None = None
    us_p80: float | None = None
    bytes: int
    flops: int
    share: float | None = None
    error: float | None = None
    eager_error: float | None = None
    verified: bool = False
    chosen: bool = False
    reason: str = ""
    source_hash: str = ""
    peak_bytes: int | None = None
    key: str = ""
    date: str = ""
    commit: str = ""
    """The commit of the sources measured; that of `Env` is the last run's."""
    warning: str = ""
    variant: str = ""
    """The launch configuration (`bakeoff.select.declare.variants`); "" is the candidate's default."""
    variants: dict[str, float | str] | None = None
    """Where asked for: microseconds of each configuration in the screening, or why it is out."""

    @property
    def cell(self) -> tuple[str, str, str, str]:
        """The contest this row is part of."""
        return self.op, self.case, self.regime, self.direction


_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Row) if not field.required}


class File(msgspec.Struct):
    """A results file. Suites may add their own fields to rows, and a summary."""

    env: Env
    rows: list[dict[str, Any]]
    schema: Literal[1] = 1
    summary: dict[str, Any] = {}


def environment(device: str) -> Env:
    """The environment of a run that starts now; measures the device's limits (about a second)."""
    facts, limits = hardware.facts(device), hardware.ceilings(device)
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # contests are held in another process, which needs the memory
    return Env(
        facts.device,
        facts.sms,
        facts.memory,
        facts.driver,
        facts.torch,
        facts.triton,
        facts.cuda,
        facts.python,
        now(),
        commit(),
        limits.copy_gbps,
        limits.matmul_tflops,
        _packages(),
    )


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def rows_of_verdict(cell: Cell, verdict: Verdict, *, variants: bool = False) -> list[Row]:
    """A row per candidate of a contest held on this device; with `variants`, what was tried of each, too."""
    limit = hardware.limit_us(verdict.cost.bytes, verdict.cost.flops, cell.case.device)
    eager = next(
        (t.errors.rms for t in verdict.trials if t.candidate == cell.op.incumbent.name and t.errors), None
    )
    rows = []
    for trial in verdict.trials:
        timing = trial.timing
        rows.append(
            Row(
                **_place(cell, verdict.regime),
                candidate=trial.candidate,
                us=timing.us if timing else None,
                us_p20=timing.p20 if timing else None,
                us_p80=timing.p80 if timing else None,
                bytes=verdict.cost.bytes,
                flops=verdict.cost.flops,
                share=limit / timing.us if timing and timing.us else None,
                error=_finite(trial.errors.rms) if trial.errors else None,
                eager_error=None if eager is None else _finite(eager),
                verified=_verified(trial),
                chosen=trial.candidate == verdict.winner,
                reason=trial.rejected or (verdict.why if trial.candidate == verdict.winner else ""),
                source_hash=trial.source_hash,
                peak_bytes=trial.peak_bytes,
                key=verdict.key,
                date=verdict.date,
                commit=commit(),
                warning=verdict.warning,
                variant=trial.variant,
                variants=trial.variants if variants else None,
            )
        )
    return rows


def failed_row(cell: Cell, regime: str, reason: str) -> Row:
    """The row of a cell whose contest could not be held: the incumbent, without a time, and the reason."""
    cost, incumbent = cell.op.cost(cell.case), cell.op.incumbent
    return Row(
        **_place(cell, regime),
        candidate=incumbent.name,
        bytes=cost.bytes,
        flops=cost.flops,
        reason=reason,
        source_hash=incumbent.source_hash,
        date=now(),
        commit=commit(),
    )


def read(path: Path) -> File:
    """The results in `path`; rows of ops have all of `Row`'s fields. Raises ResultsError with what
    is wrong."""
    try:
        file = msgspec.json.decode(contents(path, _LARGEST), type=File)
        msgspec.convert([row for row in file.rows if "op" in row], type=list[Row])
    except OSError as error:
        raise ResultsError(f"{path} can't be read: {error.strerror or error}") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ResultsError(f"{path} is no results file of this version: {error}. Move it away") from None
    for row in file.rows:
        if "op" in row:
            row.update(_DEFAULTS | row)
    return file


def open_file(path: Path, env: Env) -> File:
    """The results in `path` to add to, or new ones.

    Raises:
        ResultsError: it can't be read, or belongs to another machine or other versions.
    """
    if not path.exists():
        return File(env, [])
    held = read(path)
    if unlike := held.env.unlike(env):
        raise ResultsError(
            f"{path} was measured elsewhere ({unlike}): give another --out, or move that file away"
        )
    env = msgspec.structs.replace(env, packages=held.env.packages | env.packages)
    return File(env, held.rows, summary=held.summary)


def changed(path: Path, env: Env, change: Callable[[File], None]) -> File:
    """Make `change` to what `path` holds now, which another run may have added to, and write it.

    Raises:
        ResultsError: as `open_file`, or it can't be written.
    """
    with locked(path.parent):
        file = open_file(path, env)
        change(file)
        write(path, file)
    return file


def cell_of(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """The contest a stored row is part of."""
    return row["op"], row["case"], row["regime"], row["direction"]


def keep(file: File, rows: Sequence[Row]) -> None:
    """Put `rows` in the place of the file's rows of the same cells."""
    cells_now = {row.cell for row in rows}
    file.rows = [row for row in file.rows if "op" not in row or cell_of(row) not in cells_now]
    file.rows += [msgspec.to_builtins(row) for row in rows]


def write(path: Path, file: File) -> None:
    """Write `file` whole or not at all: a header, then one row a line."""
    parts = [f'"schema":{file.schema}', f'"env":{_text(file.env)}']
    if file.summary:
        parts.append(f'"summary":{_text(file.summary)}')
    rows = ",\n".join(_text(row) for row in file.rows)
    text = "{" + ",\n".join([*parts, f'"rows":[\n{rows}\n]']) + "}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        raise ResultsError(f"can't write {path} ({error.strerror or error}): give a writable --out") from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lets one writer at a time into `folder`; no lock where the file system has none."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # writing says what is wrong
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def candidate_of(row: dict[str, Any]) -> Candidate | None:
    """The candidate that a row measured, or None where there is none of that name any more."""
    op = declared().get(row["op"])
    return op.by_name.get(row["candidate"]) if op else None


def current(row: dict[str, Any]) -> bool:
    """Whether the candidate a row measured still has that source. Third-party candidates count as current:
    their hash contains the version that was installed on the measuring machine."""
    candidate = candidate_of(row)
    if candidate is None:
        return False
    return candidate.third_party or candidate.source_hash == row["source_hash"]


def ours(row: dict[str, Any]) -> bool:
    """Whether the candidate a row measured runs kernels of this package."""
    candidate = candidate_of(row)
    return candidate is not None and bool(candidate.launches)


def slug(device: str) -> str:
    """The folder of a machine's results: ``h100`` for "NVIDIA H100 80GB HBM3", ``cpu`` for any CPU."""
    if device == "cpu":
        return "cpu"
    words = re.findall(r"[a-z0-9]+", hardware.facts(device).device.lower())
    noise = re.compile(r"nvidia|geforce|tesla|graphics|\d+gb|hbm\d\w*|sxm\d*")
    return "-".join(word for word in words if not noise.fullmatch(word)) or "gpu"


def _place(cell: Cell, regime: str) -> dict[str, Any]:
    dtype = next(iter(cell.case.data.values())).dtype
    return {
        "op": cell.op.name,
        "case": cell.case.name,
        "dtype": str(dtype).removeprefix("torch."),
        "regime": regime,
        "direction": cell.direction,
    }


def _verified(trial: Trial) -> bool:
    """Whether it passed verification, also after it had been timed (reasons from then begin with "after")."""
    return trial.errors is not None and not (trial.rejected or "").startswith("after ")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def declared() -> dict[str, Op]:
    """The ops of this package by name."""
    importlib.import_module("bakeoff.ops")
    return registry


def _packages() -> dict[str, str]:
    versions = {}
    required = {package for op in declared().values() for c in op.candidates for package in c.requires}
    distributions = importlib.metadata.packages_distributions()
    for package in sorted(required - {"triton"}):
        if importlib.util.find_spec(package):
            name = distributions.get(package, [package])[0]
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:  # a folder, not installed
                versions[name] = "unknown"
    return versions


@functools.cache
def commit() -> str:
    """The repository's commit, with "+changes" when files differ from it; empty outside the repository."""
    package = Path(bakeoff.__file__).parent

    def git(*words: str) -> str:
        try:
            done = subprocess.run(
                ["git", "-C", str(package), *words], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    top = git("rev-parse", "--show-toplevel")
    if not top or Path(top, "src", "bakeoff") != package.resolve():
        return ""
    return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--", ":/src") else "")
