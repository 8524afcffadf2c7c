"""The README's table, docs/results.md and the tables on pages, from results files."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from bakeoff.apps.bench import (
    contests,
    decode,
    overview,
    page,
    readme,
    results,
)
from bakeoff.apps.bench.exact import exact
from bakeoff.apps.bench.launch import LaunchRow
from bakeoff.apps.bench.results import File
from bakeoff.apps.bench.suites import Cell, cells
from bakeoff.select import Case, Op
from tests.unit.benches import ONE, STEP, FakeWorker, environment
from tests.unit.benches import rms_norm as rms_norm
from tests.unit.benches import worker as worker
from tests.unit.verdicts import made

ROOT = Path(__file__).parents[2]


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
    assert "Stale rows, measured with earlier sources: rms_norm (triton 1 of 2)." in text
    assert f"- rms_norm {rms_norm.cases()[1].name}, both, graph: not enough GPU memory" in text


def older(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """Adds an H200 that measured last to a `folder` with an H100's results; the H100's rows."""
    file = results.read(folder / "h100" / "ops.json")
    now = environment(device="NVIDIA H200", date="2026-02-01", **changes)
    results.write(folder / "h200" / "ops.json", File(now, [row | {"date": now.date} for row in file.rows]))
    return file.rows


def test_readme_shows_the_newest_card_in_full_and_folds_the_others(rms_norm: Op, tmp_path: Path) -> None:
    folder = measured(rms_norm, tmp_path, {"eager": 20.0, "compiled": 10.0, "triton": 12.5})
    older(folder)
    results.write(folder / "h200x2" / "train.json", File(environment(device="NVIDIA H200"), []))
    newest, _, earlier = readme.render(folder).partition("<details><summary>Earlier: ")
    assert newest.startswith("**NVIDIA H200**, torch 2.11.0, triton 3.6.0, 2026-02-01: ")
    stale = results.read(folder / "h200" / "ops.json")
    stale.rows[0]["date"] = "2026-01-30"
    results.write(folder / "h200" / "ops.json", stale)
    assert "triton 3.6.0, 2026-01-30 to 2026-02-01: " in readme.render(folder)
    assert "[results/h200x2/train.json]" in newest, "the same card's, though older than the H100's"
    assert "The 1 cells in which a peer is faster" in newest
    assert "Cells not measured yet" in newest
    assert earlier.startswith("NVIDIA H100 80GB HBM3, torch 2.11.0, triton 3.6.0, 2026-01-02</summary>\n\n")
    assert "**NVIDIA H100 80GB HBM3**, torch 2.11.0, triton 3.6.0, 2026-01-02: " in earlier
    assert "| rms_norm | forward + backward | graph | 1 | " in earlier
    assert earlier.endswith("\n\n</details>")
    for left_out in ("peer is faster than ours", "not measured yet", "Stale", "earlier sources"):
        assert left_out not in earlier


def test_readme_counts_an_older_cards_stale_rows_and_names_the_newest_cards(
    rms_norm: Op, tmp_path: Path
) -> None:
    folder = measured(rms_norm, tmp_path, {"eager": 20.0, "triton": 10.0}, {"eager": 20.0, "triton": 10.0})
    rows = older(folder)
    rows[0]["source_hash"] = "000000000000"
    rows[-1]["candidate"] = "renamed since"
    for card in ("h100", "h200"):
        path = folder / card / "ops.json"
        results.write(path, File(results.read(path).env, rows))
    newest, _, earlier = readme.render(folder).partition("<details><summary>Earlier: ")
    assert (
        "Stale rows, measured with earlier sources: rms_norm (eager 1 of 2, renamed since 1 of 1)." in newest
    )
    assert f"2 of {len(rows)} rows in results/h100/ops.json were measured with earlier sources." in earlier
    assert "Stale" not in earlier


def test_a_gpu_comes_before_a_cpu_measured_later(rms_norm: Op, tmp_path: Path) -> None:
    folder = measured(rms_norm, tmp_path, {"eager": 20.0, "triton": 10.0})
    late = environment(device="AMD EPYC", cuda="none", date="2026-03-01")
    results.write(folder / "cpu" / "ops.json", File(late, results.read(folder / "h100" / "ops.json").rows))
    text = readme.render(folder)
    assert text.startswith("**NVIDIA H100")
    assert "<details><summary>Earlier: AMD EPYC" in text


def test_a_page_folds_older_cards(rms_norm: Op, tmp_path: Path) -> None:
    folder = measured(rms_norm, tmp_path, {"eager": 20.0, "triton": 10.0}, {"eager": 20.0, "triton": 10.0})
    rows = older(folder)
    for row in rows:
        row["source_hash"] = "000000000000"
    results.write(folder / "h100" / "ops.json", File(environment(), rows))
    text = page.render("rms_norm", folder)
    newest, _, earlier = text.partition("<details><summary>Earlier: NVIDIA H100 80GB HBM3, torch 2.11.0")
    assert newest.startswith("Forward and backward, graph, in us; NVIDIA H200, torch 2.11.0, triton 3.6.0, ")
    assert "earlier sources" not in newest
    assert "| **10.0** |" in earlier
    assert "(stale)" not in earlier
    timed = [row for row in rows if row["us"] is not None]
    note = "rows in results/h100/ops.json were measured with earlier sources."
    assert f"{len(timed)} of {len(timed)} {note}" in earlier
    results.write(folder / "h200" / "ops.json", File(environment(date="2026-02-01"), rows))
    (folder / "h100" / "ops.json").unlink()
    text = page.render("rms_norm", folder)
    assert "(stale)" not in text, "all cases are; one sentence says it"
    assert "Stale rows, measured with earlier sources: rms_norm (eager 2 of 2, triton 2 of 2)." in text


def test_readme_counts_what_is_missing(rms_norm: Op, tmp_path: Path) -> None:
    folder = measured(rms_norm, tmp_path, {"eager": 20.0, "triton": 10.0})
    path = folder / "h100" / "ops.json"
    count = sum(2 * (1 + case.needs_grad) for case in rms_norm.cases())
    assert f"Cells not measured yet: rms_norm {count - 1} of {count}." in readme.render(folder)
    file = results.read(path)
    for row in file.rows:
        row["op"] = "gone"
    results.write(path, file)
    text = readme.render(folder)
    assert "not measured yet" not in text, "an op that is gone has no grid"
    assert "Stale rows, measured with earlier sources: gone (compiled 1 of 1" in text
    assert "10.0" in page.render("gone", folder)


def test_readme_counts_the_cpus_own_cells(worker: type[FakeWorker], rms_norm: Op, tmp_path: Path) -> None:
    contests.run_ops([rms_norm], "cpu", tmp_path / "results" / "cpu" / "ops.json", text=ONE)
    count = len(list(cells(rms_norm, "cpu")))
    text = readme.render(tmp_path / "results")
    assert f"Cells not measured yet: rms_norm {count - 2} of {count}." in text


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


def test_readme_step_part(tmp_path: Path) -> None:
    late = {
        "mode": "captured",
        "launches": None,
        "peak_bytes": None,
        "reason": "it waits",
        "date": "2026-01-09",
    }
    rows = [{**STEP, **late}, STEP]
    results.write(tmp_path / "results" / "h100" / "step.json", File(environment(), rows))
    text = readme.render(tmp_path / "results")
    assert "steps on NVIDIA H100 80GB HBM3, torch 2.11.0, triton 3.6.0, 2026-01-02 (" in text
    assert "`bakeoff bench --suite step` wrote [results/h100/step.json](../results/h100/step.json)" in text
    start = "| LLMMed small, 17.9M, 48 x 512, bf16 |"
    assert f"{start} eager | 41,234 | 596,000 | 1,203 | 0 | 3,072 | 2.3457 | 2026-01-02 |" in text
    assert f"{start} captured (not captured) | 41,234 | 596,000 | - | 0 | - | 2.3457 | 2026-01-09 |" in text
    assert text.index(" eager |") < text.index(" captured (")


def test_a_profile_counts_the_loss_s_kernels_as_loss(tmp_path: Path) -> None:
    spent = {"_product_and_rows": 9.0, "_to_rows": 8.0, "_multiply": 1.0, "nvjet_hsh_128x256": 30.0}
    file = File(environment(), [{**STEP, "device_us": spent}])
    results.write(tmp_path / "results" / "h100" / "step.json", file)
    assert "| 30 | 0 | 0 | 0 | 0 | 0 | 18 | 0 | 0 | 48 |" in readme.render(tmp_path / "results")


def test_text_is_measured_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "environment", lambda device: environment())
    out = tmp_path / "results" / "h100" / "decode.json"
    heard: list[decode.DecodeRow] = []
    decode.run_decode("cpu", out, hear=heard.append)
    decode.run_decode("cpu", out, hear=heard.append, resume=True)
    with pytest.raises(results.ResultsError, match="chooses nothing; there are LLMMed tiny"):
        decode.run_decode("cpu", out, hear=heard.append, text="nothing has this name")
    (row,) = heard
    assert row.tokens_per_s == pytest.approx(1e6 / row.step_us)
    assert row.seq == 64 + 16 + 4 * 16
    file = results.read(out)
    file.rows[0] |= {"launches": 3, "kernels": 99, "syncs": 0, "step_us": 250.4, "tokens_per_s": 3993.6}
    results.write(out, file)
    text = readme.render(tmp_path / "results")
    assert (
        "`bakeoff bench --suite decode` wrote [results/h100/decode.json](../results/h100/decode.json)" in text
    )
    assert "| LLMMed tiny, 0.5M, float32 | 1 | eager | 250 | 3,994 | 3 | 99 | 0 | " in text


def test_readme_several_gpus_part(tmp_path: Path) -> None:
    size = {"model": "tiny", "params": 1.25e6, "batch": 4, "seq": 64, "precision": "bf16"}
    row = {**size, "ranks": 1, "mode": "ddp", "step_us": 5000.4, "tokens_per_s": 1e6}
    rows = [row, {**row, "ranks": 2, "mode": "fsdp", "largest_difference_from_one_gpu": 3.21e-5}]
    results.write(tmp_path / "results" / "h200x2" / "train.json", File(environment(), rows))
    text = readme.render(tmp_path / "results")
    assert "[results/h200x2/train.json](../results/h200x2/train.json)" in text
    assert "| tiny, 1.2M, 4 x 64, bf16 | 1 | ddp | 5,000 | 1,000,000 | - |" in text
    assert "| 2 | fsdp | 5,000 | 1,000,000 | 3.2e-05 |" in text


def test_readme_command(rms_norm: Op, tmp_path: Path) -> None:
    folder = measured(rms_norm, tmp_path, {"eager": 20.0, "triton": 10.0})
    page, full = tmp_path / "README.md", tmp_path / "docs" / "results.md"
    full.parent.mkdir()
    for path in (page, full):
        path.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    words = ["--readme", str(page), "--results", str(folder)]
    done = CliRunner().invoke(readme.main, [*words, "--check"])
    assert done.exit_code == 1
    assert "results.svg. Run python -m bakeoff.apps.bench.readme" in done.output
    assert "old" in page.read_text()
    assert CliRunner().invoke(readme.main, words).exit_code == 0
    assert CliRunner().invoke(readme.main, [*words, "--check"]).exit_code == 0
    assert page.read_text().startswith(f"before\n{readme.BEGIN}\n![")
    assert full.read_text().startswith(f"before\n{readme.BEGIN}\n**NVIDIA H100")
    for path in (page, full):
        assert path.read_text().endswith(f"{readme.END}\nafter\n")
    with pytest.raises(ValueError, match="the page needs the lines"):
        readme.replaced("no markers", "text")


def test_the_overview_has_the_newest_cards_ratios(rms_norm: Op, tmp_path: Path) -> None:
    folder = measured(
        rms_norm,
        tmp_path,
        {"eager": 20.0, "compiled": 12.0, "triton": 10.0},
        {"eager": 20.0, "compiled": 10.0, "triton": 12.5},
        {"eager": 40.0, "compiled": 40.0, "triton": 30.0},
    )
    row = "| rms_norm | H100 | forward + backward, graph | 3 | 0.50, 0.75 | 0.83, 1.25 | 1 of 3 |"
    assert row in overview.table(folder)
    picture = overview.picture(folder)
    assert picture.count("<rect") == 2
    assert ">0.50</text>" in picture
    older(folder)
    rows = [
        row
        for row in results.read(folder / "h200" / "ops.json").rows
        if row["case"] == rms_norm.cases()[1].name
    ]
    results.write(
        folder / "h200" / "ops.json", File(environment(device="NVIDIA H200", date="2026-02-01"), rows)
    )
    assert "| rms_norm | H200 | forward + backward, graph | 1 | 0.50, 0.50 | 1.25, 1.25 | 1 of 1 |" in (
        overview.table(folder)
    )
    for row in rows:
        row["source_hash"] = "earlier"
    results.write(
        folder / "h200" / "ops.json", File(environment(device="NVIDIA H200", date="2026-02-01"), rows)
    )
    assert "| rms_norm | H100 | " in overview.table(folder), "the newest card measured other sources"
    assert overview.table(tmp_path / "none") == readme.NONE


def test_the_readmes_table_has_ten_rows_at_most() -> None:
    text = overview.table(ROOT / "results")
    assert 3 <= text.count("\n| ") - 1 <= overview.MOST


def test_a_readme_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(readme.main, ["--readme", str(tmp_path / "nope.md")])
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert "nope.md can't be read" in line
    assert "--readme" in line


def test_times_of_the_host_stand_beside_the_devices(rms_norm: Op, tmp_path: Path) -> None:
    times = [
        ("eager", "forward", 256, "host", 30.0), ("eager", "forward", 256, "device", 1234.5),
        ("triton", "forward", 256, "host", 9.04), ("triton", "forward", 256, "device", None),
        ("triton", "both", 1024, "host", 1000.0),
    ]  # fmt: skip
    rows = []
    for candidate, direction, length, measure, us in times:
        row = LaunchRow(
            op="rms_norm", case=f"T={length}", dtype="float32", regime="eager", direction=direction,
            candidate=candidate, bytes=1, flops=1, us=us, measure=measure, length=length,
            date="2026-02-03", source_hash=rms_norm.by_name[candidate].source_hash,
        )  # fmt: skip
        rows.append(msgspec.to_builtins(row))
    for name, day, kept in ("old", "2026-01-01", rows[:1]), ("h200", "2026-02-03", rows):
        (tmp_path / name).mkdir()
        results.write(tmp_path / name / "launch.json", File(environment(device=name, date=day), kept))
    text = page.launches("rms_norm", tmp_path)
    assert "| 256 | 30.0 / 1,234 | 9.0 / - |" in text
    assert "| 1,024 | 1,000 / - |" in text
    assert "h200, " in text
    assert "2026-02-03" in text
    assert "Stale" not in text
    assert page.launches("rotary", tmp_path) == ""


def test_page_command(rms_norm: Op, tmp_path: Path) -> None:
    folder = measured(rms_norm, tmp_path, {"eager": 20.0, "triton": 10.0})
    path, other = tmp_path / "page.md", tmp_path / "other.md"
    path.write_text("before\n<!-- op: rms_norm -->\nold\n<!-- end -->\nafter\n")
    other.write_text("no table\n")
    words = [str(path), str(other), "--results", str(folder)]
    done = CliRunner().invoke(page.main, [*words, "--check"])
    assert done.exit_code == 1
    assert done.stderr == f"{path} is out of date: run python -m bakeoff.apps.bench.page {path}\n"
    assert "old" in path.read_text()
    assert CliRunner().invoke(page.main, words).exit_code == 0
    assert "| **10.0** |" in path.read_text()
    assert CliRunner().invoke(page.main, [*words, "--check"]).exit_code == 0


def test_a_page_names_only_ops_that_are_there(rms_norm: Op, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("<!-- op: nope -->\nold\n<!-- end -->\n")
    done = CliRunner().invoke(page.main, [str(path), "--results", str(tmp_path)])
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert "there is no op 'nope'; the ops are" in line
    assert "rms_norm" in line
    assert "old" in path.read_text()


def test_pages_know_rows_of_before_some_fields(rms_norm: Op, tmp_path: Path) -> None:
    folder = measured(rms_norm, tmp_path, {"eager": 20.0, "triton": 10.0})
    path = folder / "h100" / "ops.json"
    file = results.read(path)
    for row in file.rows:
        for name in ("share", "error", "source_hash", "peak_bytes", "reason", "commit"):
            del row[name]
        if row["us"] is None:
            del row["us"]
    results.write(path, file)
    assert "| **10.0** | - | - |" in page.render("rms_norm", folder)
    assert re.search(r"rms_norm \(.*triton 1 of 1\)", readme.render(folder))


def test_readme_and_results_are_up_to_date() -> None:
    words = ["--check", "--readme", str(ROOT / "README.md"), "--results", str(ROOT / "results")]
    done = CliRunner().invoke(readme.main, words)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_pages_are_up_to_date(path: Path) -> None:
    done = CliRunner().invoke(page.main, [str(path), "--results", str(ROOT / "results"), "--check"])
    assert done.exit_code == 0, done.output


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
