"""Committed measurements: each file keeps the format, and no row passes for today's whose source has changed.

On the card measured last, a candidate that has changed since must be measured again or be named stale on
docs/results.md. Files of other cards stay as they are, and that page says how many of their rows measured
earlier sources.
"""

import copy
import importlib
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from bakeoff.apps import compare
from bakeoff.apps.bench.launch import LaunchRow
from bakeoff.apps.compare.plans import Outcome, read_runs
from bakeoff.apps.compare.plans.record import read_record
from bakeoff.select import find_op, registry

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


class Env(msgspec.Struct):
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


class OpRow(msgspec.Struct):
    """One candidate at one case; the numbers are None where it was rejected."""

    op: str
    case: str
    dtype: str
    regime: Literal["eager", "graph", "compiled"]
    direction: Literal["forward", "both"]
    candidate: str
    us: float | None
    us_p20: float | None
    us_p80: float | None
    bytes: int
    flops: int
    share: float | None
    error: float | None
    eager_error: float | None
    verified: bool
    chosen: bool
    reason: str
    source_hash: str
    peak_bytes: int | None
    measure: Literal["time", "host", "overhead"] = "time"
    """What `us` is: a contest's time; the host's time of a tiny call; what selection adds to a call."""


class ModelRow(msgspec.Struct, kw_only=True):
    """Something done with a whole model."""

    model: str
    mode: str
    batch: int
    seq: int
    params: int
    step_us: float


class RunRow(ModelRow):
    """A training run."""

    tokens_per_s: float
    launches: int
    syncs: int
    peak_bytes: int
    loss: float


class DecodeRow(ModelRow):
    """Text: a step is one byte of every row, `begin_s` what comes before."""

    tokens_per_s: float
    begin_s: float
    launches: int | None
    syncs: int | None
    peak_bytes: int


class RanksRow(msgspec.Struct, kw_only=True):
    """A training run of several GPUs, or of one to compare them with."""

    ranks: int
    mode: str
    step_us: float
    tokens_per_s: float
    largest_difference_from_one_gpu: float | None = None


class SwapRow(msgspec.Struct, kw_only=True):
    """A step of a Hugging Face model; it has its time, or says why not."""

    mode: str
    step_us: float | None
    tokens_per_s: float | None
    peak_bytes: int | None
    loss: float | None
    gradients: float | None
    reason: str
    date: str


class ContextRow(msgspec.Struct, kw_only=True):
    """A method of attention over several GPUs; it has its times, or says why not."""

    setting: str
    method: str
    ranks: int
    tokens: int
    forward_us: float | None
    both_us: float | None
    forward_tflops: float | None
    both_tflops: float | None
    peak_bytes: int | None
    received_bytes: int | None
    difference: float | None
    reason: str


class TuneRow(ModelRow):
    """Seconds that tuning takes from nothing, and with the table there."""

    tune_s: float
    cached_start_s: float


KINDS: dict[str, type[msgspec.Struct]] = {
    "op": OpRow,
    "tune_s": TuneRow,
    "setting": ContextRow,
    "gradients": SwapRow,
    "ranks": RanksRow,
    "begin_s": DecodeRow,
}
"""What a row is, by a field that no other kind has."""


def problems(document: dict[str, Any], stale: str = "", *, newest: bool = True) -> list[str]:
    """What is wrong with a results file, in words; `stale` is the page's text that names the stale
    candidates of the newest card."""
    if document.get("schema") != 1:
        return [f"schema is {document.get('schema')!r}, expected 1"]
    found = []
    try:
        msgspec.convert(document.get("env"), Env)
    except msgspec.ValidationError as error:
        found.append(f"env: {error}")
    rows = document.get("rows") or []
    if not rows:
        found.append("there are no rows")
    contests: dict[str, list[OpRow]] = {}
    for number, raw in enumerate(rows):
        kind = next((kind for name, kind in KINDS.items() if name in raw), RunRow)
        try:
            row = msgspec.convert(raw, kind)
        except msgspec.ValidationError as error:
            found.append(f"row {number}: {error}")
            continue
        if isinstance(row, OpRow):
            found += [f"row {number}: {text}" for text in _wrong(row, stale, newest)]
            if row.measure == "time":
                cell = f"{row.op} {row.case} {row.dtype} {row.regime} {row.direction}"
                contests.setdefault(cell, []).append(row)
    for cell, held in contests.items():
        chosen = sum(row.chosen for row in held)
        if chosen != any(row.us is not None for row in held):  # one that could not be held has no winner
            found.append(f"{cell}: {chosen} rows are chosen")
    return found


def _wrong(row: OpRow, stale: str, newest: bool) -> list[str]:
    found = []
    if row.chosen and not row.verified:
        found.append(f"{row.candidate} is chosen and not verified")
    if row.us is None:
        if row.chosen or not row.reason:
            found.append("has no time, so it isn't chosen and says why")
    elif not math.isfinite(row.us):
        found.append(f"its time is {row.us}")
    elif row.measure != "overhead":
        if row.us_p20 is None or row.us_p80 is None or row.share is None:
            found.append("has a time without its spread and its share of the limit")
        elif not 0 < row.us_p20 <= row.us <= row.us_p80 < math.inf or row.share <= 0:
            found.append(f"out of order: {row.us_p20}, {row.us}, {row.us_p80}; share {row.share}")
    if newest and _changed(row) and not _named(row, stale):
        candidate = registry[row.op].by_name.get(row.candidate) if row.op in registry else None
        if row.op not in registry:
            found.append(f"there is no op {row.op!r}")
        elif candidate is None:
            found.append(f"{row.op} has no candidate {row.candidate!r}")
        else:
            found.append(
                f"{row.op} {row.candidate} measured source {row.source_hash}, here is "
                f"{candidate.source_hash}: run `bakeoff bench` again, or `python -m "
                f"bakeoff.apps.bench.readme`, which marks it stale"
            )
    return found


def _changed(row: OpRow) -> bool:
    """Whether our own candidate is another one now, or is gone. A peer's hash holds the version installed
    there."""
    candidate = registry[row.op].by_name.get(row.candidate) if row.op in registry else None
    if candidate is None:
        return True
    return set(candidate.requires) <= {"triton"} and candidate.source_hash != row.source_hash


def _named(row: OpRow, stale: str) -> bool:
    """Whether `stale`, "op (candidate N of N, ...), ...", names the row's candidate."""
    names = dict(re.findall(r"(\w+) \(([^)]*)\)", stale))
    return re.search(rf"(^|, ){re.escape(row.candidate)} \d", names.get(row.op, "")) is not None


def _newest_card(documents: dict[Path, dict[str, Any]]) -> str:
    """The GPU that measured last."""
    gpus = [document["env"] for document in documents.values() if document["env"]["cuda"] != "none"]
    return str(max(gpus, key=lambda env: str(env["date"]))["device"])


def _plan_says_what_its_runs_say(folder: Path) -> None:
    record, runs = read_record(folder), list(read_runs(folder).values())
    assert record is not None
    assert record.packed
    lines = [line for row in record.rows for line in msgspec.convert(row, Outcome).lines]
    assert lines
    for line in lines:
        own = [run for run in runs if (run.model, run.rate) == (line.model, line.rate)]
        assert line.seeds == len(own) > 0
        assert line.score == pytest.approx(statistics.fmean(run.score for run in own))  # type: ignore[type-var]
        first = [run for run in runs if run.model == line.model and run.seed == 0]
        tried = {f"{run.rate:g}": run.validation for run in first}
        assert line.tried.items() <= tried.items()


def test_committed_files() -> None:
    importlib.import_module("bakeoff.ops")
    page = (ROOT / "docs" / "results.md").read_text()
    documents, found = {}, []
    for path in sorted(RESULTS.rglob("*.json")):
        if path.name == "compare.json":
            assert compare.read(path.parent).verdict is not None
        elif path.name == "plan.json":
            _plan_says_what_its_runs_say(path.parent)
        elif path.name == "launch.json":  # not verified, so nothing is chosen; pages show it
            rows = msgspec.convert(json.loads(path.read_text())["rows"], list[LaunchRow])
            for row in rows:
                assert (row.us is None) != (row.reason == "")
        else:
            documents[path] = json.loads(path.read_text())
    newest = _newest_card(documents)
    for path, document in documents.items():
        name = path.relative_to(ROOT).as_posix()
        last = document["env"]["device"] == newest
        _, _, after = page.partition(f"](../{name})")  # which links to every file
        part = after.partition("](../results/")[0]
        stale = re.search(r"^Stale.*$", part, re.MULTILINE) if last else None
        texts = problems(document, stale[0] if stale else "", newest=last)
        rows = [msgspec.convert(row, OpRow) for row in document["rows"] if "op" in row]
        changed = sum(map(_changed, rows))
        sentence = f"\n\n{changed} of {len(rows)} rows in {name} were measured with earlier sources."
        if changed and not last and sentence not in part:
            texts.append(f"docs/results.md does not say: {sentence.strip()}")
        found += [f"{name}: {text}" for text in texts]
    assert not found, "\n".join(found[:20])


def good() -> dict[str, Any]:
    importlib.import_module("bakeoff.ops")
    candidate = find_op("rms_norm").candidate("eager")
    row = {
        "op": "rms_norm", "case": "8192x4096", "dtype": "bfloat16", "regime": "graph", "direction": "both",
        "candidate": "eager", "us": 220.0, "us_p20": 219.0, "us_p80": 221.5, "bytes": 335544320,
        "flops": 10**8, "share": 0.5, "error": 1e-3, "eager_error": 1e-3, "verified": True, "chosen": True,
        "reason": "", "source_hash": candidate.source_hash, "peak_bytes": 1,
    }  # fmt: skip
    out = {
        **row, "candidate": "compiled", "us": None, "us_p20": None, "us_p80": None, "share": None,
        "error": None, "verified": False, "chosen": False, "reason": "it lost a gradient",
        "source_hash": find_op("rms_norm").candidate("compiled").source_hash, "peak_bytes": None,
    }  # fmt: skip
    overhead = {
        **row, "measure": "overhead", "us": -0.1, "us_p20": None, "us_p80": None, "share": None,
        "chosen": False, "verified": False, "peak_bytes": None,
    }  # fmt: skip
    model = {
        "model": "llm-med", "mode": "train", "batch": 48, "seq": 512, "params": 10**7, "step_us": 1e5,
        "tokens_per_s": 2e5, "launches": 300, "syncs": 0, "peak_bytes": 10**9, "loss": 1.5,
    }  # fmt: skip
    tune = {**model, "mode": "tune", "tune_s": 12.0, "cached_start_s": 0.1}
    env = {
        "device": "NVIDIA H100 80GB HBM3", "sms": 132, "memory": 85 * 10**9, "driver": "580",
        "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0", "python": "3.12.3",
        "date": "2026-01-01", "commit": "abc", "copy_gbps": 3020.0, "matmul_tflops": 605.0,
    }  # fmt: skip
    ranks = {
        "ranks": 2, "mode": "ddp", "step_us": 1e5, "tokens_per_s": 2e5,
        "largest_difference_from_one_gpu": 1e-5,
    }  # fmt: skip
    decode = {**model, "mode": "captured", "begin_s": 0.5}
    return {"schema": 1, "env": env, "rows": [row, out, overhead, model, tune, ranks, decode]}


def test_a_good_file_passes() -> None:
    assert problems(good()) == []


def test_a_contest_that_could_not_be_held_passes() -> None:
    document = good()
    document["rows"] = document["rows"][1:2]
    assert problems(document) == []


def test_a_stale_row_must_be_named() -> None:
    document = good()
    document["rows"][0]["source_hash"] = "000000000000"
    assert problems(document)
    start = "Stale rows, measured with earlier sources:"
    assert problems(document, f"{start} rotary (eager 1 of 2), rms_norm (triton 1 of 2).")
    assert not problems(document, f"{start} rms_norm (eager 1 of 3, triton 1 of 1), rotary (eager 1 of 2).")
    document["rows"][0]["candidate"] = "gone"
    assert problems(document, f"{start} rms_norm (eager 1 of 2).")
    assert not problems(document, f"{start} rms_norm (gone 1 of 1).")


def test_an_older_cards_rows_may_be_stale() -> None:
    document = good()
    document["rows"][0]["source_hash"] = "000000000000"
    document["rows"][1]["candidate"] = "gone"
    assert problems(document)
    assert not problems(document, newest=False)
    document["rows"][0]["us"] = math.nan
    assert problems(document, newest=False), "all else still holds"


def test_the_newest_card_is_the_gpu_that_measured_last() -> None:
    env = {"device": "old", "cuda": "13.0", "date": "2026-01-02T03:04:05+00:00"}
    documents = {
        Path("a"): {"env": env},
        Path("b"): {"env": {**env, "device": "new", "date": "2026-01-03"}},
        Path("c"): {"env": {"device": "a CPU", "cuda": "none", "date": "2026-02-01"}},
    }
    assert _newest_card(documents) == "new"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("schema",), 2, "schema"),
        (("env", "sms"), "132", "env"),
        (("rows",), [], "no rows"),
        (("rows", 0, "source_hash"), "000000000000", "run `bakeoff bench` again"),
        (("rows", 0, "us"), math.nan, "time is nan"),
        (("rows", 0, "us_p80"), 1.0, "out of order"),
        (("rows", 0, "verified"), False, "chosen and not verified"),
        (("rows", 0, "chosen"), False, "0 rows are chosen"),
        (("rows", 0, "candidate"), "cobol", "no candidate 'cobol'"),
        (("rows", 0, "op"), "rmsnorm", "no op 'rmsnorm'"),
        (("rows", 0, "regime"), "warp", "regime"),
        (("rows", 1, "reason"), "", "says why"),
        (("rows", 1, "chosen"), True, "isn't chosen"),
        (("rows", 2, "us"), math.inf, "time is inf"),
        (("rows", 3, "loss"), None, "loss"),
        (("rows", 4, "tune_s"), "12", "tune_s"),
        (("rows", 5, "largest_difference_from_one_gpu"), "small", "largest_difference_from_one_gpu"),
    ],
)
def test_a_bad_file_is_seen(place: tuple[Any, ...], value: Any, message: str) -> None:
    document = copy.deepcopy(good())
    spot: Any = document
    for step in place[:-1]:
        spot = spot[step]
    spot[place[-1]] = value
    assert any(message in text for text in problems(document)), problems(document)
