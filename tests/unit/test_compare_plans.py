"""Plans: equal models, what runs next, what is kept, and that no winner is named by noise or by choice."""

import gzip
import json
import lzma
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result

from bakeoff.apps.bench import copying, recall
from bakeoff.apps.cli import main
from bakeoff.apps.compare import CompareError, parameters, tried
from bakeoff.apps.compare.plans import (
    Budget,
    Entry,
    Finished,
    Plan,
    carry_out,
    curves,
    entries,
    read_runs,
    summarise,
)
from bakeoff.apps.compare.plans import record as records
from bakeoff.apps.compare.plans import tasks as task_runs
from bakeoff.apps.compare.plans.entries import flops_per_byte
from bakeoff.apps.compare.plans.render import markdown
from bakeoff.apps.compare.plans.scoring import packed
from bakeoff.apps.compare.plans.share import first_free
from bakeoff.apps.train.data import held_out_rows, open_parts
from bakeoff.models import build
from tests.unit.verdicts import no_verdicts

SMALL = [
    "model.d_model=32", "model.layers=1", "model.heads=2", "model.max_seq_len=32", "train.batch_size=2",
    "select.policy=off", "select.tune=false", "train.leak_check=false",
]  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty table cache and folder to work in."""
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.chdir(tmp_path)
    with no_verdicts(tmp_path, monkeypatch):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A corpus of 60 short files."""
    (tmp_path / "data").mkdir()
    for number in range(60):
        words = f"the quick brown fox number {number} jumps over the lazy dog. "
        (tmp_path / "data" / f"{number:02}.txt").write_text(words * 4)
    return tmp_path / "data"


def small(*models: str, folder: Path | None = None, rates: tuple[float, ...] = (1e-3,)) -> list[Entry]:
    return entries(models, SMALL, rates=rates, data=str(folder) if folder else None, device="cpu")


def plan_of(found: list[Entry], budgets: list[Budget] | None = None, **more: Any) -> Plan:
    return Plan.of(found, budgets or [Budget("steps", 2)], more.pop("lengths", [32]), **more)


# Models -----------------------------------------------------------------------------------------------------


def test_models_are_equal_but_for_what_they_say() -> None:
    first, second, third = entries(
        ["llm-med-tiny", "byte-spectral-tiny filter=poles",
         "llm-med-tiny logit_cap=15 optim.lr=1e-3,4e-3 optim.clip=2"],
        ["train.batch_size=4"], rates=(2e-3, 1e-3), device="cpu",
    )  # fmt: skip
    assert [entry.name for entry in (first, second, third)] == [
        "llm-med-tiny", "byte-spectral-tiny filter=poles", "llm-med-tiny logit_cap=15 optim.clip=2",
    ]  # fmt: skip
    counts = [parameters(entry.config.model) for entry in (first, second, third)]
    assert max(counts) <= 1.02 * counts[0]
    assert min(counts) >= 0.98 * counts[0]
    assert first.rates == second.rates == (2e-3, 1e-3)
    assert third.rates == (1e-3, 4e-3)
    assert third.config.model.logit_cap == 15  # type: ignore[union-attr]
    assert (first.config.optim.clip, third.config.optim.clip) == (1.0, 2.0)
    for entry in (second, third):
        assert entry.config.data == first.config.data
        assert entry.config.train == first.config.train
    assert (first.config.data.whole_files, first.config.data.validation) == (True, 0.05)


def test_rows_are_as_long_for_models_of_any_length() -> None:
    first, second = entries(
        ["llm-med-tiny", "byte-spectral layers=2 d_model=128 heads=4 attention_every=0 qk_norm=false"],
        device="cpu",
    )
    assert first.config.seq_len == second.config.seq_len == 256
    assert first.config.train.batch_size == second.config.train.batch_size == 8
    for length in (64, 512):
        one, two = first.at(length), second.at(length)
        assert one.seq_len == two.seq_len == length
        assert one.train.batch_size == two.train.batch_size == 8 * 256 // length
        assert parameters(two.model) == parameters(second.config.model)
        assert one.train.eval_rows * length >= 2**20


@pytest.mark.parametrize(
    ("models", "overrides", "fix"),
    [
        ([], [], "give --model RECIPE"),
        (["llm-med-tiny", "llm-med-tiny"], [], "is given twice"),
        (["llm-med-tiny train.steps=3"], [], r"train\.steps is set by the plan: use --steps"),
        (["llm-med-tiny"], ["train.seed=3"], r"train\.seed is set by the plan: use --seeds"),
        (["llm-med-tiny train.batch_size=3"], [], "is the same for all models"),
        (["llm-med-tiny data.holdout=0.2"], [], "is the same for all models"),
        (["llm-med-tiny", "llm-med-tiny d_ff=8"], [], r"more than 2% apart\. Leave d_ff out"),
        (["llm-med-tiny", "byte-spectral-tiny d_model=512"], [], "no d_ff gives it the"),
        (["llm-med-tiny"], ["data.validation=0"], "nothing to choose learning rates by"),
        (["llm-med-tiny optim.lr=fast"], [], "give numbers, such as 5e-4"),
        (["llm-med-tiny optim.lr=0"], [], "must be above 0"),
        (["llm-med-tiny nonsense=1"], [], r"unknown key 'model\.nonsense'"),
        (["llm-mad"], [], "did you mean"),
        (['llm-med-tiny "d_ff=8'], [], "no closing quotation: close it"),
    ],
)
def test_models_that_are_refused(models: list[str], overrides: list[str], fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        entries(models, overrides, device="cpu")


# What runs next ---------------------------------------------------------------------------------------------


def finished(run: Any, validation: float | None, score: float | None, **more: Any) -> Finished:
    return Finished(
        key=run.key, model=run.entry.name, task=run.setting.task, budget=run.setting.budget.kind,
        amount=run.setting.budget.amount, length=run.setting.length, rows=2, rate=run.rate, seed=run.seed,
        parameters=1, flops_per_byte=1, steps=2, seconds=1.0, flops=1.0, bytes_per_s=1.0,
        validation=validation, score=score, **more,
    )  # fmt: skip


def carried(plan: Plan, score: Any) -> tuple[list[tuple[str, float, int]], dict[str, Finished]]:
    """(model, rate, seed) of the runs in their order, and what they gave."""
    done: dict[str, Finished] = {}
    order = []
    while (run := next(plan.missing(done), None)) is not None:
        order.append((run.entry.name.split("-")[0], run.rate, run.seed))
        done[run.key] = finished(run, *score(run))
        assert len(order) <= plan.size
    return order, done


def test_all_rates_run_once_and_the_best_by_validation_with_every_seed() -> None:
    plan = plan_of(small("llm-med-tiny", "byte-spectral-tiny", rates=(1e-3, 2e-3)), seeds=3)

    def score(run: Any) -> tuple[float, float]:
        better = run.rate == (1e-3 if run.entry.name.startswith("llm") else 2e-3)
        return (1.0 if better else 2.0), (5.0 if better else 0.5)  # the held-out score must not choose

    order, done = carried(plan, score)
    assert order == [
        ("llm", 1e-3, 0), ("byte", 1e-3, 0), ("llm", 2e-3, 0), ("byte", 2e-3, 0),
        ("llm", 1e-3, 1), ("byte", 2e-3, 1), ("llm", 1e-3, 2), ("byte", 2e-3, 2),
    ]  # fmt: skip
    assert len(order) == plan.size
    (outcome,) = summarise(plan, done)
    assert [(line.rate, line.edge, line.seeds, line.score) for line in outcome.lines] == [
        (1e-3, True, 3, 5.0), (2e-3, True, 3, 5.0),
    ]  # fmt: skip
    assert outcome.lines[0].tried == {"0.001": 1.0, "0.002": 2.0}
    assert "is at the end of those tried: try more" in outcome.verdict


def test_a_rate_that_diverges_is_not_chosen_and_one_alone_ends_the_plan() -> None:
    plan = plan_of(small("llm-med-tiny", "byte-spectral-tiny", rates=(1e-3, 9.0)), seeds=2)
    order, done = carried(plan, lambda run: (None, None) if run.rate == 9.0 else (1.0, 1.0))
    assert [rate for _, rate, seed in order if seed] == [1e-3, 1e-3]
    order, done = carried(plan, lambda run: (None, None))
    assert {seed for _, _, seed in order} == {0}
    assert "are missing" in summarise(plan, done)[0].verdict


def test_a_run_is_known_by_what_decides_how_it_ends() -> None:
    (entry,) = small("llm-med-tiny")
    plan = plan_of([entry], digest="d")
    setting = plan.settings[0]
    run = plan.run(entry, setting, 1e-3, 0)

    def key(overrides: list[str] = [], plan: Plan = plan, rate: float = 1e-3, seed: int = 0) -> str:  # noqa: B006
        (other,) = entries(["llm-med-tiny"], [*SMALL, *overrides], rates=(1e-3,), device="cpu")
        return plan.run(other, setting, rate, seed).key

    assert key() == run.key
    assert key(["metrics.tensorboard=true", "train.log_every=7"]) == run.key
    (elsewhere,) = entries(["llm-med-tiny"], SMALL, rates=(1e-3,), data="elsewhere", device="cpu")
    assert plan.run(elsewhere, setting, 1e-3, 0).key == run.key
    renamed = msgspec.structs.replace(entry, config=msgspec.structs.replace(entry.config, recipe="other"))
    assert plan.run(renamed, setting, 1e-3, 0).key == run.key
    others = [
        key(["optim.clip=2"]),
        key(["model.logit_cap=9"]),
        key(rate=2e-3),
        key(seed=1),
        key(["train.batch_size=4"]),
    ]
    others.append(key(plan=msgspec.structs.replace(plan, digest="other")))
    assert len({run.key, *others}) == 7


def test_budgets_are_steps_minutes_or_operations() -> None:
    (entry,) = small("llm-med-tiny")
    config = entry.at(32)
    assert Budget("steps", 7).apply(config).train.steps == 7
    timed = Budget("minutes", 0.5).apply(config).train
    assert (timed.steps, timed.max_seconds) == (0, 30.0)
    assert flops_per_byte(config) == build(config.model).flops_per_token(32)
    step = flops_per_byte(config) * config.train.batch_size * 32
    assert Budget("flops", 10.2 * step).apply(config).train.steps == 10
    with pytest.raises(CompareError, match="a step of llm-med-tiny alone takes"):
        Budget("flops", 1).apply(config)
    with pytest.raises(CompareError, match="give --steps, --minutes or --flops"):
        plan_of([entry], []).of([entry], [], [32])


# Verdicts ---------------------------------------------------------------------------------------------------


def verdict(scores: dict[str, list[float | None]]) -> str:
    plan = plan_of(small(*scores), seeds=3)
    values = {name: iter(row) for name, row in scores.items()}
    return summarise(plan, carried(plan, lambda run: (1.0, next(values[run.entry.name])))[1])[0].verdict


def test_a_winner_is_ahead_of_all_others_outside_noise() -> None:
    clear = {"llm-med-tiny": [1.0, 1.01, 0.99], "byte-spectral-tiny": [2.0, 2.02, 1.98]}
    assert verdict(clear).startswith("llm-med-tiny is ahead of the other (-1.0000 ±")
    third = {**clear, "llm-med-tiny logit_cap=9": [1.005, 1.0, 1.02]}
    text = verdict(third)
    assert text.startswith(
        "no winner: llm-med-tiny does not differ from llm-med-tiny logit_cap=9 outside seed"
    )
    lost = {**clear, "llm-med-tiny logit_cap=9": [0.1, None, 0.1]}
    assert verdict(lost) == "no winner: runs of llm-med-tiny logit_cap=9 ended without a finite score"


def test_more_models_ask_for_more() -> None:
    close = {"llm-med-tiny": [1.0, 1.01, 0.99], "byte-spectral-tiny": [1.024, 1.034, 1.014]}
    assert "is ahead of the other" in verdict(close)
    crowd = {f"llm-med-tiny logit_cap={cap}": [9.0, 9.01, 8.99] for cap in range(1, 9)}
    assert verdict({**close, **crowd}).startswith(
        "no winner: llm-med-tiny does not differ from byte-spectral-tiny"
    )


# Whole plans ------------------------------------------------------------------------------------------------


def test_a_plan_is_made_kept_and_taken_up_run_by_run(folder: Path, tmp_path: Path) -> None:
    out, said = tmp_path / "out", []
    found = small("llm-med-tiny", "byte-spectral-tiny taps=8", folder=folder, rates=(1e-3, 3e-3))
    record = carry_out(plan_of(found, seeds=2), out, say=said.append)
    runs = read_runs(out)
    assert "bytes are held out, less than the 1,048,576 that are advised" in said.pop(0)
    assert len(said) == len(runs) == 6
    assert record == records.read_record(out)
    assert not list(out.glob("runs/*/checkpoints"))
    for run in runs.values():
        assert run.steps == 2
        assert run.scored_bytes > 0
        assert 5 < run.score < 9
        assert 5 < run.validation < 9
        assert run.score != run.validation
        assert run.flops == run.steps * run.rows * 32 * run.flops_per_byte > 0
    said.clear()
    carry_out(plan_of(found, seeds=2), out, say=said.append)
    assert len(said) == 1  # nothing is made again
    said.clear()
    carry_out(plan_of(found, seeds=3), out, say=said.append)
    assert len(said) == 3
    assert all("seed 2" in line for line in said[1:])
    text = markdown(records.read_record(out) or record, "here")
    assert "| gzip -9 |" in text
    assert "equal 2 steps, rows of 32 bytes" in text


def test_a_run_that_ended_before_it_was_kept_keeps_its_speed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the process is killed while the run is scored."""
    plan, out = plan_of(small("llm-med-tiny", folder=folder), seeds=1), tmp_path / "out"
    module = sys.modules[carry_out.__module__]

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "add_run", killed)
        with pytest.raises(KeyboardInterrupt):
            carry_out(plan, out)
    carry_out(plan, out)
    (run,) = read_runs(out).values()
    (metrics,) = out.glob("runs/*/metrics.jsonl")
    assert metrics.read_text().count('"start"') == 1  # it isn't trained again
    assert run.steps == 2
    assert run.seconds > 0
    assert run.bytes_per_s > 0


def test_curves_are_means_over_the_seeds_of_the_rate_that_was_chosen(folder: Path) -> None:
    plan = plan_of(small("llm-med-tiny", folder=folder, rates=(1e-3, 3e-3)), seeds=2)
    _, done = carried(plan, lambda run: (run.rate, 1.0))  # the lower rate is the better one
    runs = []
    for run in done.values():
        level = float(run.seed) if run.rate == 1e-3 else 100.0
        curve = [(float(s), s, level + s) for s in range(1, 601)]
        runs.append(msgspec.structs.replace(run, curve=curve))
    drawn = curves.points(summarise(plan, done), runs)
    assert len(drawn) == 60
    assert {row["model"] for row in drawn} == {"llm-med-tiny"}
    assert all(row["bits"] == pytest.approx(row["s"] + 0.5) for row in drawn)


def test_a_line_cut_off_is_made_again(tmp_path: Path) -> None:
    plan = plan_of(small("llm-med-tiny"), seeds=3)
    runs = [finished(plan.run(plan.entries[0], plan.settings[0], 1e-3, seed), 1.0, 2.0) for seed in range(3)]
    for run in runs[:2]:
        records.add_run(tmp_path, run)
    path = tmp_path / "runs.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert list(read_runs(tmp_path).values()) == runs[:1]
    records.add_run(tmp_path, runs[2])
    assert list(read_runs(tmp_path).values()) == [runs[0], runs[2]]
    path.write_bytes(b"nonsense\n" + path.read_bytes())
    with pytest.raises(CompareError, match="line 1, is no run of this version"):
        read_runs(tmp_path)


def test_a_limit_ends_between_runs(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    ticks = iter(range(0, 10**6, 10))
    plan = plan_of(small("llm-med-tiny", folder=folder), seeds=3)
    carry_out(plan, tmp_path / "out", stop_after=25.0, say=said.append, clock=lambda: next(ticks))
    assert said[-1] == "stopped, as asked, with 1 of 3 runs made: the same command goes on"
    assert len(read_runs(tmp_path / "out")) == 1
    said.clear()
    minutes = plan_of(small("llm-med-tiny", folder=folder), [Budget("minutes", 1.0)], seeds=3)
    carry_out(minutes, tmp_path / "none", stop_after=59.0, say=said.append, clock=lambda: 0.0)
    assert said[1:] == ["stopped, as asked, with 0 of 3 runs made: the same command goes on"]


def test_processes_share_a_plan(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run is made once, those that follow from others' too; a claim is free once its process ended."""
    made: list[str] = []

    def make(run: Any, *_: Any) -> Finished:
        made.append(run.key)
        time.sleep(0.05)
        return finished(run, 1.0 + run.rate, 2.0)

    monkeypatch.setattr(sys.modules[carry_out.__module__], "_made_run", make)
    plan = plan_of(small("llm-med-tiny", folder=folder, rates=(1e-3, 2e-3, 4e-3)), seeds=4)
    out = tmp_path / "out"
    ends = "import os, sys; from bakeoff.apps.compare.plans.share import *; from pathlib import Path\n"
    ends += "with first_free(Path(sys.argv[1]), sys.argv[2:]) as key: print(key, flush=True); os._exit(1)"
    first = plan.run(plan.entries[0], plan.settings[0], 1e-3, 0).key
    died = subprocess.run([sys.executable, "-c", ends, out, first], capture_output=True, check=False)
    assert died.stdout.decode().strip() == first
    with ThreadPoolExecutor(3) as pool:
        together = [
            pool.submit(carry_out, plan, out, sleep=lambda _: time.sleep(0.01), say=lambda _: None)
            for _ in range(3)
        ]
        records_of = [each.result() for each in together]
    assert len(made) == len(set(made)) == len(read_runs(out)) == 6
    assert all(record.rows == records_of[0].rows for record in records_of)
    assert records.read_record(out).rows == records_of[0].rows  # type: ignore[union-attr]


def test_waiting_for_others_ends_when_asked(folder: Path, tmp_path: Path) -> None:
    plan = plan_of(small("llm-med-tiny", folder=folder), seeds=1)
    out, said, waits = tmp_path / "out", [], []
    ticks = iter(range(0, 10**6, 10))
    carry_out(plan, out, stop_after=0.0, clock=lambda: next(ticks))  # makes nothing, knows the data's digest
    run = next(iter(plan_with_digest(plan, out).missing({})))
    with first_free(out, [run.key]) as key:
        assert key == run.key
        carry_out(plan, out, stop_after=45.0, say=said.append, clock=lambda: next(ticks), sleep=waits.append)
    assert waits
    assert said[-1] == "stopped, as asked, with 0 of 1 runs made: the same command goes on"


def plan_with_digest(plan: Plan, out: Path) -> Plan:
    """`plan` on the data that `out` knows."""
    record = records.read_record(out)
    assert record is not None
    return msgspec.structs.replace(plan, digest=record.data_digest)


def test_other_data_are_not_pooled(folder: Path, tmp_path: Path) -> None:
    plan = plan_of(small("llm-med-tiny", folder=folder), seeds=1)
    carry_out(plan, tmp_path / "out", stop_after=0.0, clock=lambda: 0.0)
    (folder / "00.txt").write_text("something else entirely " * 10)
    with pytest.raises(CompareError, match=r"other bytes of .*: restore them, or give another --out"):
        carry_out(plan, tmp_path / "out")


def test_compressors_see_the_scored_bytes(folder: Path) -> None:
    config = small("llm-med-tiny", folder=folder)[0].at(32)
    corpus, _, held_out = open_parts(config.data, 32)
    scored = held_out_rows(corpus, held_out, 32, config.train.eval_rows).numpy().tobytes()
    rows = {row.name: row for row in packed(config)}
    assert {row.bytes for row in rows.values()} == {len(scored)}
    assert rows["gzip -9"].bits_per_byte == 8 * len(gzip.compress(scored, 9, mtime=0)) / len(scored)
    whole = lzma.compress(scored, preset=9 | lzma.PRESET_EXTREME)
    assert rows["xz -9e"].bits_per_byte == 8 * len(whole) / len(scored)


# Tasks ------------------------------------------------------------------------------------------------------


def test_a_copy_is_told_after_the_mark() -> None:
    task = copying.Copying(alphabet=9, length=5, rows=3)
    ids, targets = copying.draw(task, torch.Generator().manual_seed(0))
    assert ids.shape == targets.shape == (3, 10)
    for row, wanted in zip(ids.tolist(), targets.tolist(), strict=True):
        assert row[5] == 255
        assert max(row[:5]) < 9
        assert row[6:] == row[:4]
        assert wanted == [-100] * 5 + row[:5]
    assert copying.draw(task, torch.Generator().manual_seed(0), 20)[0].shape == (3, 40)


def test_right_answers_are_counted() -> None:
    ids, targets = copying.draw(copying.Copying(rows=2), torch.Generator().manual_seed(0))

    class Copies(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.any = torch.nn.Parameter(torch.zeros(()))

        def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, None]:
            answers = torch.zeros(*ids.shape, 256)
            answers[:, 127:].scatter_(2, ids[:, : ids.shape[1] - 127, None], 1.0)
            return answers.roll(1, 1), None

    assert recall.right(Copies(), ids, targets) == 1.0


@pytest.mark.parametrize("task", ["recall", "copy"])
def test_models_learn_tasks_beside_text(
    task: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_runs, "_MANY", 1)
    found = small(
        "llm-med-tiny", "byte-spectral-tiny taps=8 optim.name=muon optim.muon_lr=2e-3", folder=folder
    )
    plan = Plan.of(found, [], [32], tasks=[task], task_steps=2, seeds=1)  # type: ignore[list-item]
    record = carry_out(plan, tmp_path / "out")
    for run in read_runs(tmp_path / "out").values():
        assert (run.task, run.steps, run.length) == (task, 2, {"recall": 224, "copy": 256}[task])
        assert 0.8 < run.score <= 1.0
        assert 0.8 < run.farther <= 1.0
        assert run.curve[-1][1] == 2
    assert f"{task}, equal 2 steps" in markdown(record, "here")


def test_rows_of_tasks_are_apart() -> None:
    kinds = [task_runs.mix(0, 0, kind) for kind in range(4)]
    drawn = [task_runs.draw("copy", seed, rows=1)[0] for seed in kinds]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


# The command ------------------------------------------------------------------------------------------------


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


def test_the_command(folder: Path) -> None:
    options = ["--model", "llm-med", "--model", "byte-spectral taps=8 optim.lr=2e-3", "--lr", "1e-3,3e-3"]
    options += [
        "--data",
        folder,
        "--device",
        "cpu",
        "--steps",
        1,
        "--seeds",
        1,
        "--rows",
        "32,16",
        "--out",
        "out",
    ]
    done = cli(*options, *SMALL)
    assert done.exit_code == 0, done.output
    assert "6 runs of 2 models on cpu, to out" in done.output
    assert "equal 1 steps, rows of 32 bytes" in done.output
    assert "byte-spectral-tiny taps=8" in done.output
    assert "no winner: one seed does not show seed noise" in done.output
    assert len(Path("out/runs.jsonl").read_text().splitlines()) == 6
    assert json.loads(Path("out/plan.json").read_text())["schema"] == 1


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--model", "llm-med", "byte-spectral", "--steps", 1], "leave byte-spectral out"),
        (["--model", "llm-med", "--steps", 1, "--lengths", "16"], "leave --lengths out"),
        (["--model", "llm-med", "--steps", 1, "--resume"], "leave --resume out"),
        (["--model", "llm-med"], "give --steps, --minutes or --flops"),
        (["--model", "llm-med", "--steps", 1, "--lr", "fast"], "--lr 'fast': give numbers"),
        (["--model", "llm-med", "--steps", 1, "--rows", "1"], "a row needs at least 2 bytes"),
        (["--model", "llm-med", "--steps", 1, "--tasks", "sort"], "the tasks are recall, copy"),
        (["--lr", "1e-3"], "--lr: of a plan, whose models --model names"),
    ],
)
def test_options_that_are_refused(words: list[object], fix: str) -> None:
    done = cli(*words, "--device", "cpu")
    assert done.exit_code != 0
    assert fix in " ".join(done.output.split())


# What was tried ---------------------------------------------------------------------------------------------


def test_figures_are_looked_up(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("model,seed,bits\na,0,1.5\na,1,1.25\nb,0,2\n")
    assert tried.figure(path, "model=a;seed=1", "bits") == 1.25
    for where, count in (("model=a", 2), ("model=c", 0)):
        with pytest.raises(CompareError, match=f"has {count} rows with {where}: one is needed"):
            tried.figure(path, where, "bits")
    lines = path.with_suffix(".jsonl")
    lines.write_text(
        '{"model": "a", "rate": 0.002, "score": 0.5}\n{"model": "b", "rate": 0.002, "score": 0.75}\n'
    )
    assert tried.figure(lines, "model=b;rate=0.002", "score") == 0.75
