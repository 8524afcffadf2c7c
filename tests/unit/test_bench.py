"""The benchmark: its cells, its files, its suites, the published helpers, and the README's table."""

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from bakeoff.bench import (
    benchmark_rms_norm,
    benchmark_rotary,
    contests,
    manual_kernel_benchmark,
    page,
    published,
    readme,
    regret,
    results,
    starts,
)
from bakeoff.bench.exact import exact
from bakeoff.bench.results import Env, File, ResultsError
from bakeoff.bench.suites import CPU_ELEMENTS, Cell, cells, cpu_cases, shrunk
from bakeoff.errors import ContestError
from bakeoff.select import Case, Explanation, Op, TensorMeta, Verdict, find_op, registry
from bakeoff.select.key import key, layout
from bakeoff.select.measure import Timing
from bakeoff.select.op import resolve
from bakeoff.select.render import selection_table
from tests.unit.verdicts import DATE, made

ROOT = Path(__file__).parents[2]
NAMES = ("rms_norm", "rotary")
ROW = {
    "op", "case", "dtype", "regime", "direction", "candidate", "us", "us_p20", "us_p80", "bytes", "flops",
    "share", "error", "eager_error", "verified", "chosen", "reason", "source_hash", "peak_bytes",
}  # fmt: skip
ENV = {
    "device", "sms", "memory", "driver", "torch", "triton", "cuda", "python", "date", "commit", "copy_gbps",
    "matmul_tflops",
}  # fmt: skip
ONE = "256,1000]"  # names one case of rms_norm's grid on the CPU


class FakeWorker:
    """Answers contests at once, from a function of (op, case, regime)."""

    answer: Callable[[Op, Case, str], Verdict] = staticmethod(
        lambda op, case, regime: made(op, case, {"eager": 2.0, "compiled": 1.0}, "compiled", regime)
    )
    held: list[str]

    def __init__(self, announce: Callable[[str], None] = lambda stage: None) -> None:
        self.announce = announce

    def contest(
        self, op: Op, case: Case, regimes: tuple[str, ...], budget_s: float, for_the_record: bool = False
    ) -> list[Verdict]:
        type(self).held.append(key(op, case, regimes[0]))
        return [self.answer(op, case, regime) for regime in regimes]

    def __enter__(self) -> "FakeWorker":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    class Mine(FakeWorker):
        pass

    Mine.held = []

    for module in (contests, published, regret):
        monkeypatch.setattr(module, "Worker", Mine)
    return Mine


@pytest.fixture
def rms_norm() -> Op:
    return find_op("rms_norm")


def environment(**changes: Any) -> Env:
    plain = Env(
        "NVIDIA H100 80GB HBM3", 132, 85 * 10**9, "580.1", "2.11.0", "3.6.0", "13.0", "3.12.3", DATE, "abc",
        3000.0, 700.0,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


# Cells -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_cpu_cases_keep_every_form(name: str) -> None:
    op = find_op(name)

    def forms(grid: list[Case]) -> set[tuple[Any, ...]]:
        return {
            tuple(
                (
                    meta.dtype,
                    layout(meta, op.features[arg]),
                    meta.requires_grad,
                    meta.shape[-op.features[arg] or 99 :],
                )
                if isinstance(meta, TensorMeta)
                else meta
                for arg, meta in case.args.items()
            )
            for case in grid
        }

    small = cpu_cases(op)
    assert forms(small) == forms(op.cases())
    assert len({case.name for case in small}) == len(small)
    for case in small:
        assert case.device == "cpu"
        assert all(meta.numel <= CPU_ELEMENTS for meta in case.tensors.values())
        op.check(case)


def test_shrinking_keeps_what_belongs_together() -> None:
    op = find_op("rotary")
    for case in op.cases():
        small = shrunk(op, Case(case.args, "cpu"), 2**16)
        assert max(meta.numel for meta in small.tensors.values()) <= 2**16
        assert small.q.shape[1] == small.k.shape[1] <= small.cos.shape[0]
        assert small.cos == small.sin
        head_major = layout(case.q, 2) == "other"
        assert head_major == (small.q.stride[1] < small.q.stride[2])
        assert shrunk(op, Case(case.args, "cpu"), 2**40).args == case.args


def test_cells_come_forward_then_both(rms_norm: Op) -> None:
    grid = list(cells(rms_norm, "cpu"))
    assert [cell.direction for cell in grid] == ["forward", "both"] * (len(grid) // 2)
    assert all(cell.case.needs_grad == (cell.direction == "both") for cell in grid)
    assert [cell.direction for cell in cells(find_op("rotary"), "cuda:0", "decode")] == ["forward"]
    assert {cell.case.device for cell in cells(rms_norm, "cuda:0")} == {"cuda:0"}
    assert [cell.direction for cell in cells(rms_norm, "cpu", ONE)] == ["forward", "both"]
    assert list(cells(rms_norm, "cpu", "no such case")) == []


@pytest.mark.parametrize("text", ["8192x4096", "bf16[8192,4096]", "bf16[64,4096]", "residual"])
def test_a_filter_finds_cases_by_the_name_they_had_before_rows_were_cut(rms_norm: Op, text: str) -> None:
    found = [cell.case.name for cell in cells(rms_norm, "cpu", text)]
    whole = [case.name for case in cpu_cases(rms_norm)]
    assert set(found) < set(whole)
    assert found
    assert all("4096]" in name or "residual=" in name for name in found)


def test_exact_twin(rms_norm: Op) -> None:
    twin = exact(rms_norm)
    case = Case(
        {**rms_norm.cases()[0].args, "x": TensorMeta.dense((1001, 4096), rms_norm.cases()[0].x.dtype)}, "cpu"
    )
    assert "[1001,4096]" in key(twin, case, "eager")
    assert "[1024,4096]" in key(rms_norm, case, "eager")
    assert resolve(twin.home) is twin  # a worker process finds it
    assert find_op("rms_norm") is rms_norm
    with pytest.raises(AttributeError, match="no attribute 'rms_nrom'"):
        resolve("bakeoff.bench.exact:rms_nrom")


# Files -----------------------------------------------------------------------------------------------------


def test_file_has_the_published_names(worker: type[FakeWorker], rms_norm: Op, tmp_path: Path) -> None:
    out = tmp_path / "cpu" / "ops.json"
    contests.run_ops([rms_norm], "cpu", out, text=ONE)
    plain = json.loads(out.read_text())
    assert plain["schema"] == 1
    assert set(plain["env"]) >= ENV
    assert plain["env"]["copy_gbps"] > 0
    assert len(plain["rows"]) == 2 * len(rms_norm.candidates)
    assert all(set(row) >= ROW for row in plain["rows"])
    eager, compiled, triton = plain["rows"][:3]
    assert (compiled["us"], compiled["us_p20"], compiled["us_p80"]) == (1.0, 0.9, 1.1)
    assert (compiled["verified"], compiled["chosen"], compiled["reason"]) == (True, True, "made to win")
    assert (eager["chosen"], eager["reason"], eager["eager_error"]) == (False, "", 1e-7)
    assert (triton["us"], triton["share"], triton["error"], triton["verified"]) == (None, None, None, False)
    assert triton["reason"] == "made to be out"
    assert compiled["share"] == pytest.approx(2 * eager["share"])
    assert compiled["source_hash"] == rms_norm.candidate("compiled").source_hash
    assert [row["direction"] for row in plain["rows"]] == ["forward"] * 6 + ["both"] * 6
    assert plain["rows"][6]["bytes"] > eager["bytes"]
    assert results.read(out).rows == plain["rows"]


def test_what_failed_after_timing_is_not_verified(rms_norm: Op) -> None:
    (cell, _) = cells(rms_norm, "cpu", ONE)
    verdict = made(cell.op, cell.case, {"eager": 2.0, "compiled": 1.0}, "eager")
    late = msgspec.structs.replace(
        verdict.trials[1], rejected="after compiled had been timed: output is wrong"
    )
    unfit = msgspec.structs.replace(verdict.trials[1], rejected="can't be captured in a CUDA graph")
    timing = verdict.trials[1].timing
    assert timing is not None
    for trial, verified in ((late, False), (unfit, True)):
        changed = msgspec.structs.replace(verdict, trials=(verdict.trials[0], trial))
        row = results.rows_of_verdict(cell, changed)[1]
        assert (row.verified, row.us, row.reason) == (verified, timing.us, trial.rejected)


def test_every_cell_is_on_disk_at_once(worker: type[FakeWorker], rms_norm: Op, tmp_path: Path) -> None:
    out = tmp_path / "ops.json"
    sizes = []

    def hear(cell: Cell, verdicts: list[Verdict], reason: str) -> None:
        sizes.append(len(results.read(out).rows))
        if len(sizes) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        contests.run_ops([rms_norm], "cpu", out, hear=hear)
    assert sizes == [6, 12, 18]
    assert len(results.read(out).rows) == 18
    worker.held.clear()
    contests.run_ops([rms_norm], "cpu", out, resume=True)
    assert len(worker.held) == len(list(cells(rms_norm, "cpu"))) - 3
    file = results.read(out)
    assert len({results.cell_of(row) for row in file.rows}) * 6 == len(file.rows)


def test_resume_measures_changed_sources_again(
    worker: type[FakeWorker], rms_norm: Op, tmp_path: Path
) -> None:
    out = tmp_path / "ops.json"
    file = contests.run_ops([rms_norm], "cpu", out, text=ONE)
    file.rows[1]["source_hash"] = "000000000000"
    results.write(out, file)
    worker.held.clear()
    contests.run_ops([rms_norm], "cpu", out, text=ONE, resume=True)
    assert len(worker.held) == 1
    assert all(results.current(row) for row in results.read(out).rows)


def test_other_cells_stay(worker: type[FakeWorker], rms_norm: Op, tmp_path: Path) -> None:
    out = tmp_path / "ops.json"
    contests.run_ops([rms_norm], "cpu", out, text=ONE)
    contests.run_ops([rms_norm], "cpu", out, text="bf16[1,4096]")
    contests.run_ops([rms_norm], "cpu", out, text=ONE)
    rows = results.read(out).rows
    assert len(rows) == 24
    assert len({(*results.cell_of(row), row["candidate"]) for row in rows}) == 24


def test_runs_side_by_side_keep_each_others_rows(
    worker: type[FakeWorker], rms_norm: Op, tmp_path: Path
) -> None:
    out = tmp_path / "ops.json"

    def hear(*_: Any) -> None:
        contests.run_ops([rms_norm], "cpu", out, text="bf16[1,4096]")

    contests.run_ops([rms_norm], "cpu", out, text=ONE, hear=hear)
    assert len({results.cell_of(row) for row in results.read(out).rows}) == 4


def test_a_writer_waits_for_another(tmp_path: Path) -> None:
    out = tmp_path / "ops.json"
    order = []

    def first(file: File) -> None:
        thread.start()
        thread.join(0.2)
        order.append("first")

    thread = threading.Thread(
        target=lambda: results.changed(out, environment(), lambda _: order.append("second"))
    )
    results.changed(out, environment(), first)
    thread.join()
    assert order == ["first", "second"]


def test_a_cell_without_memory_is_a_row(worker: type[FakeWorker], rms_norm: Op, tmp_path: Path) -> None:
    def starved(op: Op, case: Case, regime: str) -> Verdict:
        if case.needs_grad:
            raise ContestError("not enough GPU memory to hold a contest")
        return FakeWorker.answer(op, case, regime)

    worker.answer = staticmethod(starved)
    heard = []
    out = tmp_path / "ops.json"
    contests.run_ops(
        [rms_norm], "cpu", out, text=ONE, hear=lambda cell, verdicts, reason: heard.append(reason)
    )
    assert heard == ["", "not enough GPU memory to hold a contest"]
    row = results.read(out).rows[-1]
    assert set(row) >= ROW
    assert (row["direction"], row["candidate"], row["us"], row["verified"]) == ("both", "eager", None, False)
    assert row["reason"] == heard[1]


HALF = msgspec.json.encode({"env": environment(), "rows": [{"op": "rms_norm", "case": "x"}]})
"""Whose row says neither what was measured nor how."""


@pytest.mark.parametrize("content", [b"", b"{", b'{"schema":2,"env":{},"rows":[]}', b"[" * 10**5, HALF])
def test_bad_results_file_is_left_alone(
    worker: type[FakeWorker], rms_norm: Op, tmp_path: Path, content: bytes
) -> None:
    out = tmp_path / "ops.json"
    out.write_bytes(content)
    with pytest.raises(ResultsError, match="Move it away"):
        contests.run_ops([rms_norm], "cpu", out, text=ONE)
    assert out.read_bytes() == content


@pytest.mark.parametrize("path", [Path(os.devnull), Path("/dev/full")])
def test_what_is_no_file_is_no_results_file(path: Path) -> None:
    with pytest.raises(ResultsError, match="not a regular file"):
        results.read(path)


def test_another_machines_file_is_left_alone(worker: type[FakeWorker], rms_norm: Op, tmp_path: Path) -> None:
    out = tmp_path / "ops.json"
    results.write(out, File(environment(), [{"mode": "x"}]))
    before = out.read_bytes()
    with pytest.raises(ResultsError, match="give another --out"):
        contests.run_ops([rms_norm], "cpu", out, text=ONE)
    assert out.read_bytes() == before


def test_unwritable_folder(worker: type[FakeWorker], rms_norm: Op, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="give a writable --out"):
        contests.run_ops([rms_norm], "cpu", tmp_path / "file" / "ops.json", text=ONE)


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "ops.json"
    results.write(out, File(environment(), []))
    before = out.read_bytes()

    def full(self: Path, text: str, encoding: str) -> None:
        with self.open("w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ResultsError, match="No space left"):
        results.write(out, File(environment(), [{"mode": "x"}]))
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ],
)
def test_folder_names(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results.hardware, "facts", lambda _: environment(device=device))
    assert results.slug("cuda:0") == name
    assert results.slug("cpu") == "cpu"


# The selection suite ---------------------------------------------------------------------------------------


def test_regret_is_against_the_best(rms_norm: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    (cell, _) = cells(rms_norm, "cpu", ONE)

    def fixed(samplers: Mapping[str, Any], budget_s: float) -> dict[str, Timing]:
        return {name: Timing(us, us, us, 0.0, 9) for name, us in {"eager": 10.0, "compiled": 12.5}.items()}

    class Untimed:
        def sampler(self, calls: Any) -> Any:
            return None

    monkeypatch.setattr(regret, "interleave", fixed)
    monkeypatch.setattr(regret, "timers_for", lambda case: {"eager": Untimed()})
    verdict = made(rms_norm, cell.case, {"eager": 2.0, "compiled": 1.0}, "compiled")
    rows = regret.regret_rows(cell, results.rows_of_verdict(cell, verdict), 1.0)
    eager, compiled, triton = rows[:3]
    assert (compiled.us, compiled.chosen, compiled.regret, compiled.against_eager) == (12.5, True, 1.25, 1.25)
    assert (eager.us, eager.chosen, eager.regret, eager.against_eager) == (10.0, False, 1.0, 1.0)
    assert (triton.us, triton.regret) == (None, None)
    assert triton.reason
    found = regret.summary([msgspec.to_builtins(row) for row in rows])
    assert found["eager"]["cells"] == 1
    assert found["eager"]["worst_regret"] == 1.25
    assert cell.case.name in found["eager"]["worst_cell"]


def test_summary() -> None:
    def row(us: float, regime: str, **more: Any) -> dict[str, Any]:
        return {"op": "rms_norm", "case": f"{us}", "direction": "both", "regime": regime, "us": us, **more}

    rows = [
        row(1, "eager", chosen=True, regret=1.0, against_eager=0.5),
        row(2, "eager", chosen=True, regret=1.21, against_eager=1.01),
        row(3, "eager", chosen=False, regret=7.0, against_eager=7.0),
        row(4, "graph", chosen=True, regret=1.0, against_eager=0.9),
        row(1.5, "eager", measure="overhead"),
        row(1.2, "eager", measure="overhead"),
        {"model": "LLMMed small", "tune_s": 21.0, "cached_start_s": 0.15, "load_s": 0.5},
    ]
    found = regret.summary(rows)
    assert found["eager"]["geomean_regret"] == pytest.approx(math.sqrt(1.21))
    assert (found["eager"]["cells"], found["eager"]["worst_regret"]) == (2, 1.21)
    assert found["eager"]["worst_against_eager_cell"] == "rms_norm 2 both"
    assert found["graph"]["worst_regret"] == 1.0
    assert found["overhead_us"] == {"rms_norm": 1.5}
    assert (found["tune_s"], found["cached_start_s"]) == (21.0, 0.15)


def test_overhead_is_the_median_difference() -> None:
    now = 0.0
    slow = iter([100e-6] * 10)  # a disturbance that a mean would show

    def clock() -> float:
        return now

    def call(seconds: float) -> Callable[[], None]:
        def run() -> None:
            nonlocal now
            now += seconds + next(slow, 0.0)

        return run

    found = regret.overhead_us(call(5e-6), call(3e-6), "cpu", rounds=21, calls=4, clock=clock)
    assert found == pytest.approx(2.0)


def test_host_and_overhead_of_real_calls(rms_norm: Op) -> None:
    (row,) = [r for r in regret.overhead_rows(rms_norm, "cpu") if r.candidate == "eager"]
    assert row.measure == "overhead"
    assert row.us is not None
    assert row.us > 0  # a dictionary lookup is not free
    small = regret._tiny(rms_norm, "cpu").case
    assert all(meta.numel <= regret.TINY for meta in small.tensors.values())
    assert small.needs_grad


def test_every_op_has_a_tiny_call() -> None:
    """Those without gradients, too: forward alone."""
    for op in registry.values():
        cell = regret._tiny(op, "cpu")
        assert cell.direction == ("both" if any(case.needs_grad for case in op.cases()) else "forward")
        assert cell.case.needs_grad == (cell.direction == "both")


def test_selection_suite_writes_its_file(
    worker: type[FakeWorker], rms_norm: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.answer = staticmethod(lambda op, case, regime: made(op, case, {"eager": 2.0}, "eager", regime))
    monkeypatch.setattr(regret, "host_rows", lambda op, device, budget_s: [])
    tuned = {"model": "LLMMed small", "tune_s": 21.0, "cached_start_s": 0.15, "load_s": 0.5}
    monkeypatch.setattr(starts, "measured", lambda device: tuned)
    out = tmp_path / "selection.json"
    for _ in range(2):  # the second run replaces the first's rows
        regret.run_selection([rms_norm], "cpu", out, text=ONE, budget_s=0.05)
        file = results.read(out)
        assert file.rows.count(tuned) == 1
        times = [row for row in file.rows if row.get("measure") == "time"]
        assert len(times) == 12
        assert [row["regret"] for row in times if row["chosen"]] == [1.0, 1.0]
        assert file.summary["eager"]["cells"] == 2
        assert file.summary["tune_s"] == 21.0
    assert "[256,1000]" in worker.held[0]  # the contest is held at the bucket, times are the exact shape's


def test_selection_resumed_measures_the_host_once(
    worker: type[FakeWorker], rms_norm: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.answer = staticmethod(lambda op, case, regime: made(op, case, {"eager": 2.0}, "eager", regime))
    cell = regret._tiny(rms_norm, "cpu")
    taken = [regret._row(cell, name, 1, 1, measure="host", us=5.0) for name in rms_norm.by_name]
    asked = []
    monkeypatch.setattr(regret, "host_rows", lambda *_: asked.append(1) or taken)
    monkeypatch.setattr(regret, "overhead_rows", lambda *_: [])
    out = tmp_path / "selection.json"
    for resume in (False, True):
        regret.run_selection([rms_norm], "cpu", out, text=ONE, budget_s=0.05, tuning=False, resume=resume)
    assert len(asked) == 1
    taken[0].source_hash = "of old"
    results.changed(out, results.environment("cpu"), lambda file: results.keep(file, taken))
    regret.run_selection([rms_norm], "cpu", out, text=ONE, budget_s=0.05, tuning=False, resume=True)
    assert len(asked) == 2


def test_selection_reads_decisions_where_the_case_is_its_bucket(
    worker: type[FakeWorker], rms_norm: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.answer = staticmethod(lambda op, case, regime: made(op, case, {"eager": 2.0}, "eager", regime))
    monkeypatch.setattr(regret, "host_rows", lambda op, device, budget_s: [])
    own, rounded = ONE, "x=bf16[200,1000]"
    odd = rms_norm.cases()[5].replace(x=TensorMeta.dense((201, 1000), rms_norm.cases()[5].x.dtype))
    grid = [
        *cells(rms_norm, "cpu", own),
        Cell(exact(rms_norm), Case(odd.without_grad().args, "cpu", rounded), "forward"),
    ]
    for module in (contests, regret):
        monkeypatch.setattr(module, "cells", lambda op, device, text="": grid)
    contests.run_ops([rms_norm], "cpu", tmp_path / "ops.json")
    worker.held.clear()
    out = tmp_path / "selection.json"
    regret.run_selection([rms_norm], "cpu", out, budget_s=0.05, tuning=False)
    assert worker.held == [key(rms_norm, grid[2].case, "eager")]
    assert "[224,1000]" in worker.held[0]
    assert results.read(out).summary["eager"]["cells"] == 3
    regret.run_selection([rms_norm], "cpu", out, budget_s=0.05, tuning=False, resume=True)
    assert len(worker.held) == 1


def test_a_candidate_that_fails_at_the_exact_case_says_so(
    rms_norm: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell, _) = cells(rms_norm, "cpu", ONE)
    verdict = made(rms_norm, cell.case, {"eager": 2.0, "compiled": 1.0}, "compiled")
    monkeypatch.setattr(regret, "work", lambda op, case, call, sets: call is rms_norm.incumbent.call)

    class Fussy:
        def sampler(self, calls: Any) -> Any:
            if not calls:
                raise RuntimeError("no such kernel\nmore")
            return lambda: 1e-6

    monkeypatch.setattr(regret, "timers_for", lambda case: {"eager": Fussy()})
    eager, compiled = regret.regret_rows(cell, results.rows_of_verdict(cell, verdict), 0.01)[:2]
    assert (compiled.us, compiled.regret, compiled.reason) == (None, None, "RuntimeError: no such kernel")
    assert (eager.regret, eager.chosen) == (1.0, False)


def test_tuning_times_leave_the_step_out(monkeypatch: pytest.MonkeyPatch) -> None:
    base = dict.fromkeys(("model", "mode", "batch", "seq", "params", "keys", "unsettled"), 1)
    answers = iter(
        [
            {**base, "measured": 3, "tune_s": 20.0, "step_s": 2.0, "first_s": 9.0},
            {**base, "measured": 0, "tune_s": 1.25, "step_s": 1.0, "first_s": 3.0},
        ]
    )
    folders = []

    def once(device: str, folder: str) -> dict[str, Any]:
        folders.append(folder)
        return next(answers)

    monkeypatch.setattr(starts, "_once", once)
    row = starts.measured("cpu")
    assert (row["tune_s"], row["cached_start_s"], row["step_us"], row["measured"]) == (
        18.0,
        0.25,
        1e6,
        [3, 0],
    )
    assert row["load_s"] == 2.0
    assert folders[0] == folders[1]
    assert not Path(folders[0]).exists()


def test_failing_start_says_why() -> None:
    with pytest.raises(ContestError, match=r"on banana failed: .*banana"):
        starts.measured("banana")


# The published helpers -------------------------------------------------------------------------------------


def test_published_result(worker: type[FakeWorker]) -> None:
    found = benchmark_rms_norm(2, 500, 384, device="cpu")
    assert worker.held == ["rms_norm(x=fp32[2,500,384]', weight=fp32[384]', eps=1e-06, offset=0.0) cpu eager"]
    assert found["key"] == worker.held[0]
    assert (found["pytorch_time"], found["triton_time"], found["speedup"]) == (0.002, None, 2.0)
    assert (found["choice"], found["use_triton"], found["why"]) == ("compiled", False, "made to win")
    assert found["times"] == {"eager": 0.002, "compiled": 0.001}
    assert set(found["errors"]) == {"eager", "compiled"}
    assert found["rejected"]["triton"] == "made to be out"
    json.dumps(found)

    worker.answer = staticmethod(
        lambda op, case, regime: made(
            op, case, {"eager": 2.0, "compiled": 1.0, "triton": 0.5}, "triton", regime
        )
    )
    found = benchmark_rotary(1, 9, 4, 16, n_kv_heads=2, device="cpu")
    assert "q=fp32[1,9,4,16]', k=fp32[1,9,2,16]', cos=fp32[9,8]" in found["key"]
    assert (found["triton_time"], found["speedup"], found["use_triton"]) == (0.0005, 4.0, True)


def test_manual_benchmark_prints_both(worker: type[FakeWorker], capsys: pytest.CaptureFixture[str]) -> None:
    found = manual_kernel_benchmark(device="cpu")
    assert list(found) == ["rms_norm", "rotary"]
    printed = capsys.readouterr().out
    for text in ("rms_norm: compiled", "rotary: compiled", "eager", "made to be out"):
        assert text in printed


def test_a_real_contest() -> None:
    found = benchmark_rms_norm(3, 7, 24, device="cpu", budget_s=0.05)
    assert "x=fp32[3,7,24]'" in found["key"]
    assert found["choice"] in found["times"]
    assert found["pytorch_time"] > 0
    assert found["errors"]["eager"] < 1e-6
    assert set(found["times"]) | set(found["rejected"]) == set(find_op("rms_norm").by_name)


@pytest.mark.parametrize("size", [0, -1, math.nan, math.inf, 2.0, None, "8", True])
@pytest.mark.parametrize("name", ["batch_size", "seq_len", "d_model"])
def test_sizes_are_positive_whole_numbers(name: str, size: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}=.* must be a positive whole number"):
        benchmark_rms_norm(**{name: size}, device="cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 0}, "n_heads=0 must be a positive"),
        ({"n_kv_heads": math.nan}, "n_kv_heads=nan must be a positive"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"device": "banana"}, "device='banana' is not on this machine"),
        ({"regime": "graph"}, "no regime 'graph' on cpu; use eager"),
        ({"budget_s": math.nan}, "budget_s=nan must be a positive"),
        ({"budget_s": 0}, "budget_s=0 must be a positive"),
    ],
)
def test_other_settings_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        benchmark_rotary(**{"device": "cpu", **arguments})


# Rendering -------------------------------------------------------------------------------------------------


def test_selection_table(rms_norm: Op, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from bakeoff.select.render import explained

    case = next(cells(rms_norm, "cpu", ONE)).case
    verdict = made(rms_norm, case, {"eager": 2000.0, "compiled": 150.0}, "compiled")
    bare = Explanation("rotary", "rotary(...)", "eager", "selection is off", "no verdict for this key", ())
    Console(width=120).print(selection_table([explained(verdict, "cpu"), bare]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == verdict.key
    assert lines[1].split() == ["candidate", "ms", "of", "limit", "error", "chosen", "why"]
    assert lines[2].split()[:2] == ["eager", "2.00"]
    assert lines[3].split()[:2] == ["compiled", "0.1500"]
    assert lines[3].rstrip().endswith("yes  made to win")
    assert "made to be out" in lines[4]
    assert any(line.split() == ["eager", "-", "-", "-", "yes", "selection", "is", "off"] for line in lines)


# The README's table ----------------------------------------------------------------------------------------


def measured(rms_norm: Op, tmp_path: Path, *cells_us: dict[str, float]) -> Path:
    """A results folder whose contests in the graph regime took these times."""
    rows = []
    for number, us in enumerate(cells_us):
        case = Case(rms_norm.cases()[number].args, "cpu", rms_norm.cases()[number].name)
        cell = Cell(exact(rms_norm), case, "both")
        verdict = made(cell.op, case, us, min(us, key=lambda name: us[name]), "graph")
        rows += [msgspec.to_builtins(row) for row in results.rows_of_verdict(cell, verdict)]
    out = tmp_path / "results" / "h100" / "ops.json"
    results.write(out, File(environment(), rows))
    return tmp_path / "results"


def test_readme_table_shows_worst_and_lost_cells(rms_norm: Op, tmp_path: Path) -> None:
    folder = measured(
        rms_norm,
        tmp_path,
        {"eager": 20.0, "compiled": 12.0, "triton": 10.0},
        {"eager": 20.0, "compiled": 10.0, "triton": 12.5, "liger": 15.0},
        {"eager": 20.0, "compiled": 18.0, "triton": 9.0},
    )
    text = readme.render(folder)
    name = rms_norm.cases()[1].name
    assert "**NVIDIA H100 80GB HBM3**, torch 2.11.0, triton 3.6.0, 2026-01-02" in text
    assert "copy 3.00 TB/s" in text
    assert "`bakeoff bench`" in text
    start = "| rms_norm | forward + backward | graph | 3 | 0.50, 0.50 | 1.00, 1.00 | 0.83, 1.25 | "
    assert f"{start}{name}: 12.5 us, compiled 10.0 us | 1 of 3 |" in text
    assert f"- rms_norm {name}, both, graph: 12.5 us, compiled 10.0 us (1.25)" in text
    assert "Stale" not in text


def test_readme_marks_stale_and_unmeasured(rms_norm: Op, tmp_path: Path) -> None:
    folder = measured(rms_norm, tmp_path, {"eager": 20.0, "triton": 10.0}, {"eager": 20.0, "triton": 10.0})
    path = folder / "h100" / "ops.json"
    file = results.read(path)
    file.rows[2]["source_hash"] = "000000000000"  # triton's
    file.rows[4]["source_hash"] = "000000000000"  # quack's: another version was installed there
    for row in file.rows[6:]:
        row.update(us=None, chosen=False, reason="not enough GPU memory")
    results.write(path, file)
    text = readme.render(folder)
    assert "Stale, measured with another source: rms_norm triton (1 of 2 rows)." in text
    assert f"- rms_norm {rms_norm.cases()[1].name}, both, graph: not enough GPU memory" in text


def test_readme_counts_what_is_missing(rms_norm: Op, tmp_path: Path) -> None:
    """On a GPU, whose cells have the grid's names; an op that is gone has no grid."""
    folder = measured(rms_norm, tmp_path, {"eager": 20.0, "triton": 10.0})
    path = folder / "h100" / "ops.json"
    count = sum(2 * (1 + case.needs_grad) for case in rms_norm.cases())
    assert f"Cells not measured yet: rms_norm {count - 1} of {count}." in readme.render(folder)
    for changes in ({"regime": "eager"}, {"regime": "graph", "op": "gone"}):
        file = results.read(path)
        for row in file.rows:
            row.update(changes)
        results.write(path, file)
        assert "not measured yet" not in readme.render(folder)
    assert "Stale, measured with another source: gone compiled" in readme.render(folder)
    assert "10.0" in page.render("gone", folder)


def test_readme_selection_part(tmp_path: Path) -> None:
    part = {"cells": 9, "geomean_regret": 1.0123, "worst_regret": 1.05, "worst_cell": "rotary small both",
            "worst_against_eager": 1.0, "worst_against_eager_cell": "rotary odd both"}  # fmt: skip
    summary = {
        "graph": part,
        "overhead_us": {"rotary": 1.234},
        "tune_s": 21.04,
        "cached_start_s": 0.151,
        "load_s": 0.52,
    }
    results.write(tmp_path / "results" / "h100" / "selection.json", File(environment(), [], summary=summary))
    text = readme.render(tmp_path / "results")
    for piece in (
        "over 9 cells",
        "1.012 times",
        "1.05 at worst (rotary small both)",
        "rotary 1.23 us",
        "21.0 s",
        "0.15 s",
    ):
        assert piece in text


STEP = {"model": "LLMMed small", "mode": "eager", "batch": 48, "seq": 512, "params": 17_900_000,
        "step_us": 41234.5, "tokens_per_s": 596000.4, "launches": 1203, "syncs": 0, "peak_bytes": 3 * 2**30,
        "loss": 2.34567, "reason": "", "precision": "bf16"}  # fmt: skip


def test_readme_step_part(tmp_path: Path) -> None:
    rows = [STEP, {**STEP, "mode": "captured", "launches": None, "peak_bytes": None, "reason": "it waits"}]
    results.write(tmp_path / "results" / "h100" / "step.json", File(environment(), rows))
    text = readme.render(tmp_path / "results")
    assert "steps on NVIDIA H100 80GB HBM3, torch 2.11.0, 2026-01-02" in text
    assert "`bakeoff bench --suite step` wrote [results/h100/step.json](results/h100/step.json)" in text
    start = "| LLMMed small, 17.9M, 48 x 512, bf16 |"
    assert f"{start} eager | 41,234 | 596,000 | 1,203 | 0 | 3,072 | 2.3457 |" in text
    assert f"{start} captured (not captured) | 41,234 | 596,000 | - | 0 | - | 2.3457 |" in text


def test_readme_several_gpus_part(tmp_path: Path) -> None:
    size = {"model": "tiny", "params": 1.25e6, "batch": 4, "seq": 64, "precision": "bf16"}
    row = {**size, "ranks": 1, "mode": "ddp", "step_us": 5000.4, "tokens_per_s": 1e6}
    rows = [row, {**row, "ranks": 2, "mode": "fsdp", "largest_difference_from_one_gpu": 3.21e-5}]
    results.write(tmp_path / "results" / "h200x2" / "train.json", File(environment(), rows))
    text = readme.render(tmp_path / "results")
    assert "[results/h200x2/train.json](results/h200x2/train.json)" in text
    assert "| tiny, 1.2M, 4 x 64, bf16 | 1 | ddp | 5,000 | 1,000,000 | - |" in text
    assert "| 2 | fsdp | 5,000 | 1,000,000 | 3.2e-05 |" in text


def test_other_suites_leave_step_rows_alone(worker: type[FakeWorker], rms_norm: Op, tmp_path: Path) -> None:
    out = tmp_path / "all.json"
    results.write(out, File(results.environment("cpu"), [STEP]))
    contests.run_ops([rms_norm], "cpu", out, regimes=["eager"], text=ONE)
    contests.run_ops([rms_norm], "cpu", out, regimes=["eager"], text=ONE, resume=True)
    rows = results.read(out).rows
    assert rows[0] == STEP
    assert {row["op"] for row in rows[1:]} == {"rms_norm"}


def test_readme_command(rms_norm: Op, tmp_path: Path) -> None:
    folder = measured(rms_norm, tmp_path, {"eager": 20.0, "triton": 10.0})
    page = tmp_path / "README.md"
    page.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    words = ["--readme", str(page), "--results", str(folder)]
    assert CliRunner().invoke(readme.main, [*words, "--check"]).exit_code == 1
    assert "old" in page.read_text()
    ours = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-m", "bakeoff.bench.readme", *words], check=True, env=ours)
    assert "Stale" not in page.read_text()
    assert CliRunner().invoke(readme.main, [*words, "--check"]).exit_code == 0
    assert page.read_text().startswith(f"before\n{readme.BEGIN}\n**NVIDIA H100")
    assert page.read_text().endswith(f"{readme.END}\nafter\n")
    with pytest.raises(ValueError, match="the README needs the lines"):
        readme.replaced("no markers", "text")


def test_readme_is_up_to_date() -> None:
    page = (ROOT / "README.md").read_text()
    assert readme.replaced(page, readme.render(ROOT / "results")) == page, (
        "run python -m bakeoff.bench.readme"
    )


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_pages_are_up_to_date(path: Path) -> None:
    text = path.read_text()
    assert page.rewritten(text, ROOT / "results") == text, (
        f"run python -m bakeoff.bench.page docs/{path.name}"
    )


def test_a_page_shows_what_was_chosen_and_what_was_out(rms_norm: Op, tmp_path: Path) -> None:
    def row(case: str, candidate: str, us: float | None, **more: Any) -> dict[str, Any]:
        place = {"op": "rms_norm", "case": case, "dtype": "bfloat16", "direction": "both", "regime": "graph"}
        figures = {
            "us": us,
            "share": 0.5,
            "error": 0.0025,
            "eager_error": 0.00166,
            "bytes": 1,
            "flops": 1,
            "chosen": False,
        }
        source = rms_norm.by_name[candidate].source_hash
        return {**place, **figures, "candidate": candidate, "verified": True, "source_hash": source, **more}

    rows = [
        row("a", "eager", 1234.4),
        row("a", "triton", 99.96, chosen=True),
        row("a", "liger", 80.0, verified=False),
        row("a", "fla", None),
        row("b", "eager", 7.0, source_hash="of old"),
        row("a", "eager", 5.0, op="rotary"),
        # Measured last, but the first of the op's cases, in the direction and regime that come first.
        row("8192x4096 bf16", "eager", 2.0, direction="forward"),
        row("8192x1024 bf16", "eager", 1.0, direction="forward"),
        row("8192x1024 bf16", "eager", 3.0),
    ]
    file = results.read(ROOT / "results/h100/ops.json")
    results.write(tmp_path / "results/h100/ops.json", results.File(file.env, rows))
    text = page.rewritten("x\n<!-- op: rms_norm -->\nold\n<!-- end -->\ny\n", tmp_path / "results")
    assert "| a | 1,234 | **100.0** | ~~80.0~~ | 50% | 2.5e-03, 1.7e-03 |" in text
    assert "| b (stale) | 7.0 | - | - | - | - |" in text
    assert "old" not in text
    assert "| 5.0 |" not in text
    first = [line.split(" |")[0] for line in text.splitlines() if line.startswith(("| 8192", "| a "))]
    assert first == ["| 8192x1024 bf16", "| 8192x4096 bf16", "| 8192x1024 bf16", "| a"]
    assert page.rewritten(text, tmp_path / "results") == text


def test_changed_sources_show_in_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked from the package's folder, Git takes paths as relative to it."""
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        asked.append(command)
        top = str(Path(results.bakeoff.__file__).parents[2])
        answers = {"--show-toplevel": top, "HEAD": "abc"}
        return SimpleNamespace(returncode=0, stdout=answers.get(command[-1], " M src/bakeoff/launch.py"))

    monkeypatch.setattr(results.subprocess, "run", run)
    assert results.commit.__wrapped__() == "abc+changes"
    assert asked[-1][-1] == ":/src"
