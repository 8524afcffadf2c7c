"""The benchmark: its cells, its files, and the published helpers."""

import json
import math
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from bakeoff.apps.bench import contests, results
from bakeoff.apps.bench.exact import exact
from bakeoff.apps.bench.results import File, ResultsError
from bakeoff.apps.bench.suites import CPU_ELEMENTS, Cell, cells, cpu_cases, shrunk
from bakeoff.apps.cli import main
from bakeoff.apps.render import selection_table
from bakeoff.bench import benchmark_rms_norm, benchmark_rotary, manual_kernel_benchmark
from bakeoff.errors import ContestError
from bakeoff.select import Case, Explanation, Op, TensorMeta, Verdict, find_op
from bakeoff.select.contests.side_by_side import Workers
from bakeoff.select.contests.worker import op_at
from bakeoff.select.declare.key import key, layout
from tests.unit.benches import ONE, STEP, FakeWorker, environment
from tests.unit.benches import rms_norm as rms_norm
from tests.unit.benches import worker as worker
from tests.unit.verdicts import made

NAMES = ("rms_norm", "rotary")
ROW = {
    "op", "case", "dtype", "regime", "direction", "candidate", "us", "us_p20", "us_p80", "bytes", "flops",
    "share", "error", "eager_error", "verified", "chosen", "reason", "source_hash", "peak_bytes",
}  # fmt: skip
ENV = {
    "device", "sms", "memory", "driver", "torch", "triton", "cuda", "python", "date", "commit", "copy_gbps",
    "matmul_tflops",
}  # fmt: skip


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
        assert all(meta.numel <= CPU_ELEMENTS for meta in case.data.values())
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
    assert len(list(cells(rms_norm, "cpu", f"{ONE}|bf16[1,4096]"))) == 4, "one text or the other"
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
    assert op_at(twin.home) is twin  # a worker process finds it
    assert find_op("rms_norm") is rms_norm
    with pytest.raises(AttributeError, match="no attribute 'rms_nrom'"):
        op_at("bakeoff.apps.bench.exact:rms_nrom")


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
    count = len(rms_norm.candidates)
    assert [row["direction"] for row in plain["rows"]] == ["forward"] * count + ["both"] * count
    assert plain["rows"][count]["bytes"] > eager["bytes"]
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


def tuned(op: Op, case: Case, regime: str) -> Verdict:
    """Won by a candidate in a launch configuration of its own."""
    verdict = made(op, case, {"eager": 2.0, "compiled": 1.0}, "compiled", regime)
    record = {"": 1.5, "forward(rows=2)": 1.0, "forward(rows=4)": "output is wrong [a]"}
    eager, compiled, *others = verdict.trials
    compiled = msgspec.structs.replace(compiled, variant="forward(rows=2)", variants=record)
    return msgspec.structs.replace(verdict, trials=(eager, compiled, *others))


@pytest.mark.parametrize("flags", [[], ["--thorough"], ["--variants"], ["--thorough", "--variants"]])
def test_a_candidate_is_one_row_whatever_it_was_tried_with(
    worker: type[FakeWorker],
    rms_norm: Op,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
) -> None:
    monkeypatch.setattr(worker, "answer", staticmethod(tuned))
    out = tmp_path / "ops.json"
    words = ["bench", "rms_norm", "--filter", ONE, "--device", "cpu", "--out", str(out), *flags]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert worker.thorough == ["--thorough" in flags] * 2
    rows = [row for row in results.read(out).rows if row["direction"] == "forward"]
    others = [""] * (len(rms_norm.candidates) - 2)
    assert [row["variant"] for row in rows] == ["", "forward(rows=2)", *others]
    assert ("forward(rows=4)" in done.output) == ("--variants" in flags)
    assert ("output is wrong [a]" in done.output) == ("--variants" in flags)
    assert (rows[1]["variants"] is not None) == ("--variants" in flags)
    assert "as forward(rows=2) (1.50 times as fast" in " ".join(done.output.split())


def test_launch_configurations_belong_to_the_suite_of_ops() -> None:
    for flag, suite in (("--thorough", "selection"), ("--variants", "step")):
        done = CliRunner().invoke(main, ["bench", "--suite", suite, flag, "--device", "cpu"])
        assert done.exit_code == 1
        assert "belong to --suite ops" in done.output


def test_every_cell_is_on_disk_at_once(worker: type[FakeWorker], rms_norm: Op, tmp_path: Path) -> None:
    out = tmp_path / "ops.json"
    sizes = []

    def hear(cell: Cell, verdicts: list[Verdict], reason: str) -> None:
        sizes.append(len(results.read(out).rows))
        if len(sizes) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        contests.run_ops([rms_norm], "cpu", out, hear=hear)
    count = len(rms_norm.candidates)
    assert sizes == [count, 2 * count, 3 * count]
    assert len(results.read(out).rows) == 3 * count
    worker.held.clear()
    contests.run_ops([rms_norm], "cpu", out, resume=True)
    assert len(worker.held) == len(list(cells(rms_norm, "cpu"))) - 3
    file = results.read(out)
    assert len({results.cell_of(row) for row in file.rows}) * count == len(file.rows)


def test_several_contests_at_a_time_are_those_of_one_at_a_time(
    worker: type[FakeWorker], rms_norm: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []
    hold = Workers.hold

    def counting(self: Workers, wanted: Any) -> Any:
        rounds.append(len(wanted))
        return hold(self, wanted)

    monkeypatch.setattr(Workers, "hold", counting)
    heard: list[Cell] = []
    grid = list(cells(rms_norm, "cpu"))
    out = tmp_path / "ops.json"
    contests.run_ops([rms_norm], "cpu", out, jobs=3, hear=lambda cell, *_: heard.append(cell))
    assert [cell.case.name for cell in heard] == [cell.case.name for cell in grid]
    assert sum(rounds) == len(grid)
    assert rounds[0] == 3
    contests.run_ops([rms_norm], "cpu", tmp_path / "one.json")
    places = [
        [results.cell_of(row) for row in results.read(path).rows] for path in (out, tmp_path / "one.json")
    ]
    assert places[0] == places[1]
    worker.held.clear()
    contests.run_ops([rms_norm], "cpu", out, jobs=3, resume=True)
    assert not worker.held


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


def test_a_file_of_before_some_fields_is_gone_on_with(
    worker: type[FakeWorker], rms_norm: Op, tmp_path: Path
) -> None:
    out = tmp_path / "ops.json"
    file = contests.run_ops([rms_norm], "cpu", out, text=ONE)
    for row in file.rows:
        del row["source_hash"], row["commit"], row["peak_bytes"]
        row["measure"] = "time"
    results.write(out, file)
    held = results.read(out).rows[0]
    assert (held["source_hash"], held["peak_bytes"], held["measure"]) == ("", None, "time")
    worker.held.clear()
    contests.run_ops([rms_norm], "cpu", out, text=ONE, resume=True)
    assert len(worker.held) == 2, "whose source it was isn't known"
    assert all(row["source_hash"] for row in results.read(out).rows)


def test_other_cells_stay(worker: type[FakeWorker], rms_norm: Op, tmp_path: Path) -> None:
    out = tmp_path / "ops.json"
    contests.run_ops([rms_norm], "cpu", out, text=ONE)
    contests.run_ops([rms_norm], "cpu", out, text="bf16[1,4096]")
    contests.run_ops([rms_norm], "cpu", out, text=ONE)
    rows = results.read(out).rows
    assert len(rows) == 4 * len(rms_norm.candidates)
    assert len({(*results.cell_of(row), row["candidate"]) for row in rows}) == len(rows)


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

    def full(descriptor: int) -> None:
        os.ftruncate(descriptor, 10)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
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


def test_one_direction(worker: type[FakeWorker], rms_norm: Op, tmp_path: Path) -> None:
    out = tmp_path / "all.json"
    for direction, measured in (("both", {"both"}), ("forward", {"forward", "both"})):
        contests.run_ops([rms_norm], "cpu", out, regimes=["eager"], direction=direction, text=ONE)
        assert {row["direction"] for row in results.read(out).rows} == measured


def test_other_suites_leave_step_rows_alone(worker: type[FakeWorker], rms_norm: Op, tmp_path: Path) -> None:
    out = tmp_path / "all.json"
    results.write(out, File(results.environment("cpu"), [STEP]))
    contests.run_ops([rms_norm], "cpu", out, regimes=["eager"], text=ONE)
    contests.run_ops([rms_norm], "cpu", out, regimes=["eager"], text=ONE, resume=True)
    rows = results.read(out).rows
    assert rows[0] == STEP
    assert {row["op"] for row in rows[1:]} == {"rms_norm"}


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
        ({"device": "banana"}, "'banana' is no device: use auto, cpu, cuda"),
        ({"regime": "graph"}, "no regime 'graph' on cpu; use eager"),
        ({"budget_s": math.nan}, "budget_s=nan must be a positive"),
        ({"budget_s": 0}, "budget_s=0 must be a positive"),
    ],
)
def test_other_settings_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        benchmark_rotary(**{"device": "cpu", **arguments})


def test_selection_table(rms_norm: Op, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from bakeoff.apps.render import explained

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
