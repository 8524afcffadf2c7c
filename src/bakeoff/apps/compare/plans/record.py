"""What a plan leaves behind: OUT/runs.jsonl, a line for each finished run, and OUT/plan.json."""

import logging
import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from bakeoff.apps.bench.results import Env, locked
from bakeoff.apps.compare.equal import CompareError
from bakeoff.paths import write_whole

__all__ = [
    "Finished",
    "ModelRow",
    "PackedRow",
    "Record",
    "add_run",
    "read_record",
    "read_runs",
    "write_record",
]

log = logging.getLogger(__name__)


class Finished(msgspec.Struct, kw_only=True):
    """One run. `validation` and `score` are of bytes, or of rows of a task, that were not trained on: bits
    per byte, or the share of wrong answers; None where they are not finite. The first chooses the learning
    rate, the second is what models are judged by."""

    key: str
    model: str
    task: str
    budget: str
    amount: float
    length: int
    rows: int
    rate: float
    seed: int
    parameters: int
    flops_per_byte: int
    steps: int
    seconds: float
    """Time of the training steps; evaluating and saving don't count."""
    flops: float
    bytes_per_s: float
    validation: float | None
    score: float | None
    farther: float | None = None
    """Of a task: the share of wrong answers in longer rows than were trained on."""
    scored_bytes: int = 0
    peak_bytes: int | None = None
    stopped: str = "steps"
    reason: str = ""
    """Why steps were not captured."""
    curve: list[tuple[float, int, float | None]] = []
    """(seconds, step, bits per byte of training rows, or share of wrong answers)."""
    device: str = ""
    torch: str = ""
    commit: str = ""
    date: str = ""


class PackedRow(msgspec.Struct, frozen=True):
    """A general compressor on the held-out rows that models are scored on, as one stream."""

    name: str
    length: int
    """Of the rows that these bytes are cut into for the models."""
    bytes: int
    bits_per_byte: float


class ModelRow(msgspec.Struct, frozen=True):
    """A model of the plan, its learning rates, and the configuration that all its runs share."""

    name: str
    parameters: int
    rates: list[float]
    config: dict[str, Any]


class Record(msgspec.Struct, kw_only=True):
    """OUT/plan.json: the machine, the models, the data and what compressors make of them."""

    schema: Literal[1] = 1
    env: Env
    models: list[ModelRow]
    settings: list[dict[str, Any]]
    seeds: int
    data: str
    data_bytes: int
    data_digest: str
    held_bytes: int
    """Bytes of the files that were held out whole; 0 where the held-out bytes are the end of the data."""
    packed: list[PackedRow] = []
    rows: list[dict[str, Any]] = []
    """The table: an `Outcome` a setting, with the means over seeds."""
    verdicts: dict[str, str] = {}
    """By setting."""


def read_runs(out: Path) -> dict[str, Finished]:
    """The finished runs in the folder `out`, by key. A last line that was cut off is left out."""
    path = out / "runs.jsonl"
    if not path.exists():
        return {}
    found: dict[str, Finished] = {}
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            run = msgspec.json.decode(line, type=Finished)
        except msgspec.MsgspecError as error:
            if number == len(lines) and not line.endswith(b"\n"):
                log.warning("%s ends in the middle of a line: that run is made again", path)
                break
            raise CompareError(f"{path}, line {number}, is no run of this version: {error}") from None
        found[run.key] = run
    return found


def add_run(out: Path, run: Finished) -> None:
    """Adds a line for `run`, in the place of one that was cut off. It is on disk when this returns. Other
    processes may add theirs at the same time."""
    path = out / "runs.jsonl"
    try:
        with locked(out), path.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1 if end else 0)
            file.write(msgspec.json.encode(run) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CompareError(f"can't write {path} ({error.strerror or error}): give a writable --out") from None


def read_record(out: Path) -> Record | None:
    """The plan kept in the folder `out`; None where there is none."""
    path = out / "plan.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise CompareError(f"{path} is no plan of this version: {error}. Move it away") from None


def write_record(out: Path, record: Record) -> None:
    """Write it whole or not at all."""
    path = out / "plan.json"
    with locked(out):
        try:
            write_whole(path, msgspec.json.format(msgspec.json.encode(record), indent=1))
        except OSError as error:
            why = error.strerror or error
            raise CompareError(f"can't write {path} ({why}): give a writable --out") from None
