"""Two models trained alike: equal parameters, a judge that seed noise can't fool, a file that lasts."""

import io
import json
import logging
import random
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

import bakeoff.apps.compare as comparing
from bakeoff.apps.bench import results
from bakeoff.apps.cli import main
from bakeoff.apps.compare import (
    CompareError,
    Document,
    Run,
    Speed,
    compare,
    crossover,
    match,
    model_of,
    pair,
    parameters,
    quality,
    read,
    speed,
    table,
    winner,
)
from bakeoff.apps.compare.document import write
from bakeoff.apps.compare.judge import t_quantile
from bakeoff.apps.compare.lengths import sized
from bakeoff.apps.compare.page import filled
from bakeoff.apps.compare.page import main as page_command
from bakeoff.apps.train import ConfigError, resolve
from bakeoff.apps.train import Result as TrainResult
from bakeoff.apps.train.checkpoint import CheckpointError
from bakeoff.apps.train.data import Batches, ByteCorpus, split
from bakeoff.models import build
from tests.unit.verdicts import no_verdicts

SMALL = [
    "model.d_model=32", "model.layers=1", "model.heads=2", "model.max_seq_len=32",
    "train.batch_size=2", "train.eval_rows=2", "select.policy=off", "train.leak_check=false",
]  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty table cache and folder to work in."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(speed, "_BLOCK_S", 0.001)
    with no_verdicts(tmp_path, monkeypatch):
        yield


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file to train on."""
    path = tmp_path / "book.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


def tiny(text: Path, *more: object) -> list[object]:
    options = ["--device", "cpu", "--data", text, "--steps", 2, "--seeds", 2, "--lengths", "16,32"]
    return [*options, "--out", "out", *SMALL, *more]


def small_pair(text: Path, *more: str) -> tuple[comparing.Config, comparing.Config]:
    names = "byte-spectral-tiny", "llm-med-tiny"
    return pair(*names, [*SMALL, *more], data=str(text), device="cpu", steps=2)


# Equal ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["", "-tiny"])
@pytest.mark.parametrize("more", [[], ["first.model.attention_every=2"], ["first.model.filter=taps"]])
def test_parameters_are_equal(size: str, more: list[str]) -> None:
    first, second = pair(f"byte-spectral{size}", f"llm-med{size}", more, steps=1)
    matched = match(first, parameters(second.model))
    wanted = parameters(second.model)
    assert abs(parameters(matched.model) - wanted) <= 0.02 * wanted
    assert matched.model.d_ff % 8 == 0
    nearer = [
        abs(parameters(match_to(matched, d_ff).model) - wanted)
        for d_ff in (matched.model.d_ff - 8, matched.model.d_ff + 8)
    ]
    assert abs(parameters(matched.model) - wanted) <= min(nearer)


def match_to(config: comparing.Config, d_ff: int) -> comparing.Config:
    return resolve(config, None, [f"model.d_ff={d_ff}"])


def test_parameters_are_counted_as_built(text: Path) -> None:
    for config in small_pair(text):
        assert parameters(config.model) == sum(p.numel() for p in build(config.model).parameters())


def test_parameters_that_cannot_be_equal(text: Path) -> None:
    first, second = small_pair(text, "first.model.d_model=256")
    with pytest.raises(CompareError, match=r"d_ff=8.*lower first\.model\.d_model"):
        match(first, parameters(second.model))
    first, second = small_pair(
        text, "model.d_model=8", "model.heads=1", "first.model.filter=poles", "second.model.qk_norm=false"
    )
    with pytest.raises(CompareError, match="more than 2% off"):
        match(first, parameters(second.model) + 50)


def test_all_but_the_model_is_the_seconds(text: Path) -> None:
    first, second = small_pair(text, "optim.lr=0.5", "first.optim.clip=2", "second.model.d_ff=64")
    assert (first.recipe, second.recipe) == ("byte-spectral-tiny", "llm-med-tiny")
    assert first.data == second.data
    assert first.seq_len == second.seq_len == 32
    assert (first.optim.lr, second.optim.lr) == (0.5, 0.5)
    assert (first.optim.clip, second.optim.clip) == (2.0, 1.0)
    assert (first.model.d_ff, second.model.d_ff) == (0, 64)
    first, second = pair("byte-spectral-tiny", "llm-med-base", steps=1)
    assert first.seq_len == second.seq_len == first.model.max_seq_len == 2048
    assert (first.train.batch_size, first.optim) == (second.train.batch_size, second.optim)


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("train.steps=3", "--steps"),
        ("first.train.seed=3", "--seeds"),
        ("second.data.path=x", "--data"),
        ("first.model.d_ff=64", "set second.model.d_ff"),
        ("model.attention_every=2", "write first.model.attention_every=2"),
        ("model.kv_heads=1", "write second.model.kv_heads=1"),
    ],
)
def test_keys_that_are_refused(word: str, fix: str, text: Path) -> None:
    with pytest.raises(CompareError, match=re.escape(fix)):
        small_pair(text, word)


def test_a_mebibyte_is_scored_unless_rows_are_asked_for(text: Path) -> None:
    first, second = pair("byte-spectral-tiny", "llm-med-tiny", data=str(text), steps=1)
    assert first.train.eval_rows == second.train.eval_rows == 2**20 // 256
    assert first.data.whole_files
    assert pair("llm-med-tiny", "llm-med-tiny", ["train.eval_rows=3"], steps=1)[0].train.eval_rows == 3
    assert pair("llm-med-tiny", "llm-med-tiny", steps=1, scored=0)[0].train.eval_rows == 64


def test_what_was_scored_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_bytes(bytes(range(100)))
    words = [word for word in SMALL if not word.startswith("train.eval_rows")]
    both = pair("llm-med-tiny", "llm-med-tiny", [*words, "data.holdout=0.2"], data=str(folder), steps=2)
    said: list[str] = []
    document = compare(*both, tmp_path / "out", seeds=1, lengths=[8], say=said.append)
    held = document.held_bytes
    assert 0 < held < 2000
    assert held % 100 == 0
    seq = both[1].seq_len
    assert document.scored_bytes == held // (seq + 1) * seq
    sentence = (
        f"Bits per byte are of {document.scored_bytes:,} held-out bytes of whole files, chosen by a hash"
    )
    assert any(line.startswith(sentence) for line in said)
    assert sentence in " ".join(shown(document).split())


def test_a_key_that_nobody_has(text: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean model\.layers"):
        small_pair(text, "model.layer=2")


# Judge ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (10, 2.2281), (1e9, 1.95996)]
)
def test_quantiles_are_the_tables(freedom: float, t: float) -> None:
    assert t_quantile(freedom) == pytest.approx(t, rel=2e-4)


def test_quantiles_between_whole_degrees() -> None:
    assert t_quantile(4) < t_quantile(3.5) < t_quantile(3)


def test_welch_by_hand() -> None:
    # Means 2 and 5, variances 1 and 4, so the error is sqrt(1/3 + 4/3) and freedom (5/3)^2 / (17/18) = 2.941.
    found = winner([1.0, 2.0, 3.0], [3.0, 5.0, 7.0])
    assert found.difference == pytest.approx(-3.0)
    assert found.half_width == pytest.approx(t_quantile(50 / 17) * (5 / 3) ** 0.5)
    assert found.half_width == pytest.approx(4.155, abs=0.01)
    assert found.winner is None
    assert found.text.startswith("no difference outside seed noise (first - second = -3.0000 +- 4.15")


def test_the_lower_scores_win() -> None:
    low, high = [2.30, 2.31, 2.29], [2.40, 2.41, 2.42]
    assert winner(low, high).winner == "first"
    assert winner(high, low).winner == "second"
    assert "the second has fewer bits per byte" in winner(high, low).text


def test_equal_scores_without_noise_name_no_winner() -> None:
    found = winner([2.5, 2.5], [2.5, 2.5])
    assert (found.winner, found.difference, found.half_width) == (None, 0.0, 0.0)


def test_welch_with_unequal_numbers_of_seeds() -> None:
    # Variances 1 and 2, so the error is sqrt(1/3 + 2/2) and freedom (4/3)^2 / ((1/9) / 2 + 1) = 1.684.
    found = winner([1.0, 2.0, 3.0], [3.0, 5.0])
    assert found.half_width == pytest.approx(t_quantile(32 / 19) * (4 / 3) ** 0.5)


@pytest.mark.parametrize("scores", [([2.0], [3.0]), ([2.0], [3.0, 3.1]), ([], []), ([2.0, 2.0], [None, 3.0])])
def test_too_little_names_no_winner(scores: tuple[list[float | None], list[float | None]]) -> None:
    found = winner(*scores)
    assert found.winner is None
    assert "no winner" in found.text


@pytest.mark.parametrize(("seeds", "spreads"), [(3, (1.0, 1.0)), (5, (1.0, 3.0))])
def test_equal_models_seldom_win(seeds: int, spreads: tuple[float, float]) -> None:
    draw = random.Random(0)
    trials = 400
    wrong = sum(
        winner(*([draw.gauss(2.0, spread) for _ in range(seeds)] for spread in spreads)).winner is not None
        for _ in range(trials)
    )
    assert 0.015 < wrong / trials < 0.085


def test_a_clear_difference_wins() -> None:
    draw = random.Random(1)
    found = [
        winner([draw.gauss(2.0, 0.01) for _ in range(3)], [draw.gauss(2.1, 0.01) for _ in range(3)]).winner
        for _ in range(50)
    ]
    assert found.count("first") > 45


# Speed ------------------------------------------------------------------------------------------------------


def rows(**speeds: tuple[float | None, float | None]) -> list[Speed]:
    """Rows from ``L256=(first's tokens/s, second's)``."""
    return [
        Speed(side=side, length=int(name[1:]), rows=1, mode="eager", tokens_per_s=value)
        for name, both in speeds.items()
        for side, value in zip(("first", "second"), both, strict=True)
    ]


def test_crossover() -> None:
    assert crossover(rows(L1=(1.0, 2.0), L2=(3.0, 2.0), L3=(3.0, 2.0))) == 2
    assert crossover(rows(L3=(3.0, 2.0), L1=(3.0, 2.0), L2=(1.0, 2.0))) == 3
    assert crossover(rows(L1=(3.0, 2.0), L2=(3.0, 2.0))) == 1
    assert crossover(rows(L1=(3.0, 2.0), L2=(2.0, 2.0))) is None
    assert crossover(rows(L1=(1.0, 2.0), L2=(3.0, None))) == 2
    assert crossover(rows(L1=(3.0, 2.0), L2=(None, None))) == 1
    assert crossover([]) is None


def test_noise_is_no_crossover() -> None:
    def at(side: str, ms: float, p20: float, p80: float) -> Speed:
        return Speed(side=side, length=8, rows=1, mode="eager", tokens_per_s=8000 / ms, step_ms=ms,
                     step_ms_p20=p20, step_ms_p80=p80)  # fmt: skip

    assert crossover([at("first", 10.0, 9.9, 10.1), at("second", 10.3, 10.2, 10.4)]) == 8
    assert crossover([at("first", 10.0, 9.9, 10.1), at("second", 10.1, 10.0, 10.2)]) is None


@pytest.mark.parametrize(
    "key", ["data.holdout=0.5", "train.eval_rows=1", "train.seq_len=8", "train.batch_size=2"]
)
@pytest.mark.parametrize("side", ["first", "second"])
def test_neither_can_have_bytes_of_its_own(text: Path, side: str, key: str) -> None:
    with pytest.raises(CompareError, match=f"{key.partition('=')[0]} decides which bytes are seen"):
        pair("llm-med", "llm-med", [f"{side}.{key}"], data=str(text), steps=1)


def test_data_too_short_to_train_on_leave_no_folder(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_bytes(b"x" * 300)
    both = pair("llm-med-tiny", "llm-med-tiny", ["train.seq_len=256"], data=str(short), device="cpu", steps=1)
    with pytest.raises(CompareError, match=r"train\.seq_len=256: .* 257 there.*: give longer --data or set"):
        compare(*both, tmp_path / "out", lengths=[64])
    assert not (tmp_path / "out").exists()


def test_the_captured_mode_decides_the_crossover() -> None:
    found = rows(L1=(9.0, 1.0))
    found += [
        Speed(side="first", length=1, rows=1, mode="captured", tokens_per_s=1.0),
        Speed(side="second", length=1, rows=1, mode="captured", tokens_per_s=2.0),
    ]
    assert crossover(found) is None


def test_bytes_a_step_stay_about_constant(text: Path) -> None:
    first, _ = small_pair(text)
    found = [(c.seq_len, c.train.batch_size) for c in (sized(first, n) for n in (16, 24, 64, 500))]
    assert found == [(16, 4), (24, 2), (64, 1), (500, 1)]
    assert sized(first, 500).model.max_seq_len == 500


def test_what_a_large_holdout_leaves_is_named(text: Path, tmp_path: Path) -> None:
    both = small_pair(text, "data.holdout=0.99")
    with pytest.raises(CompareError, match=r"--lengths 256: .*of which 90 are .*or a smaller data\.holdout"):
        compare(*both, tmp_path / "out", lengths=[256])


def test_parameters_stay_equal_over_lengths(text: Path) -> None:
    first, second = small_pair(text, "first.model.filter=taps", "first.model.taps=0")
    first = match(first, parameters(second.model))
    for length in (16, 500):
        assert parameters(sized(first, length).model) == parameters(first.model)
        assert parameters(sized(second, length).model) == parameters(second.model)


def test_inference_drops_nothing(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = {"step": set[bool](), "infer": set[bool]()}

    class Watched(speed.Stage):
        def step(self) -> None:
            training["step"].add(self.model.training)
            super().step()

        def infer(self) -> torch.Tensor:
            training["infer"].add(self.model.training)
            return super().infer()

    monkeypatch.setattr(speed, "Stage", Watched)
    speed.measured(*small_pair(text, "model.dropout=0.5"), 16, CPU, lambda text: None)
    assert training == {"step": {True}, "infer": {False}}


def test_memory_that_ends_is_a_row(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = speed.Stage

    def starving(config: comparing.Config, device: torch.device) -> Any:
        if config.recipe.startswith("llm-med") and config.seq_len == 32:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nand more")
        return kept(config, device)

    monkeypatch.setattr(speed, "Stage", starving)
    document = compare(*small_pair(text), Path("out"), seeds=1, lengths=[16, 32])
    last = {row.side: row for row in document.speed if row.length == 32}
    assert last["first"].tokens_per_s
    assert not last["first"].reason
    assert last["second"].tokens_per_s is None
    assert last["second"].reason == "out of memory: DefaultCPUAllocator: can't allocate memory: you tried"
    assert document.crossover in (16, 32)
    assert f"llm-med-tiny, 32, eager: {last['second'].reason}" in shown(document, 200).splitlines()


def test_other_errors_are_not_called_memory(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: comparing.Config, device: torch.device) -> Any:
        raise RuntimeError("a shape is wrong")

    monkeypatch.setattr(speed, "Stage", broken)
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        speed.measured(*small_pair(text), 16, CPU, lambda text: None)


# Quality ----------------------------------------------------------------------------------------------------


def test_models_take_turns() -> None:
    assert quality.order(2) == [("first", 0), ("second", 0), ("first", 1), ("second", 1)]


def test_the_speed_of_a_resumed_run_is_of_its_steps(text: Path, tmp_path: Path) -> None:
    config, _ = small_pair(text)
    metrics = [
        {"event": "train", "step": 20, "steps": 20, "tokens_per_s": 100.0},
        {"event": "resume", "step": 20},
        {"event": "train", "step": 25, "steps": 5, "tokens_per_s": 400.0},
    ]
    shared = {"bits_per_byte": 2.0, "seconds": 1.0, "peak_bytes": 1}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row | shared) + "\n" for row in metrics))
    result = TrainResult(
        run_dir=tmp_path, checkpoint=None, steps=25, seconds=1.0, bits_per_byte_before=8.0,
        bits_per_byte_after=2.0, tokens_per_s=400.0, skipped=0, stopped="steps", selection=(),
    )  # fmt: skip
    run = quality.compared(result, config, "first", CPU)
    assert run.tokens_per_s == pytest.approx(25 / (20 / 100 + 5 / 400))
    row_bytes = config.train.batch_size * config.seq_len
    assert run.seconds == pytest.approx(row_bytes * (20 / 100 + 5 / 400))


def test_a_run_whose_checkpoints_are_torn_is_named(text: Path, tmp_path: Path) -> None:
    config, _ = small_pair(text)
    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"run in .*run can't be taken up.*: remove that folder"):
        quality.trained(config, "first", 0, tmp_path / "run", CPU, resume=True)


def test_curves_are_thinned() -> None:
    assert quality.thinned([1, 2, 3], 3) == [1, 2, 3]
    found = quality.thinned(range(1000))
    assert len(set(found)) == 200
    assert (found[0], found[-1]) == (0, 999)


def test_both_see_the_same_bytes(text: Path) -> None:
    seen = []
    for config in small_pair(text):
        corpus = ByteCorpus.open(config.data.path)
        span, _ = split(corpus, config.data.holdout, config.seq_len)
        size = config.train.batch_size
        seen.append(Batches(corpus, span, seq_len=config.seq_len, batch_size=size, seed=1).batch(3))
    assert torch.equal(*seen)


# What is shown ----------------------------------------------------------------------------------------------


def shown(document: Document, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table(document))
    return out.getvalue()


def filled_in(text: Path, peak: int | None) -> Document:
    """A comparison of one run each, with memory measured or not."""
    first, second = (model_of(config, config.recipe) for config in small_pair(text))
    run = Run(
        side="first", seed=0, steps=92, seconds=4.0, tokens_per_s=46626.0, bits_per_byte_before=7.5,
        bits_per_byte=2.9217, peak_bytes=peak, stopped="time", curve=[],
    )  # fmt: skip
    row = Speed(
        side="first", length=256, rows=8, mode="eager", step_ms=12.3, step_ms_p20=12.0, step_ms_p80=13.0,
        tokens_per_s=45678.0, peak_bytes=peak,
    )  # fmt: skip
    return Document(
        env=results.environment("cpu"), first=first, second=second, seeds=1, lengths=[256],
        runs=[run, msgspec.structs.replace(run, side="second", peak_bytes=None)],
        speed=[row, msgspec.structs.replace(row, side="second", peak_bytes=None)],
    )  # fmt: skip


@pytest.mark.parametrize("peak", [None, 3 * 2**20])
@pytest.mark.parametrize("width", [18, 80])
def test_models_keep_their_whole_names_and_nothing_is_cut(peak: int | None, width: int, text: Path) -> None:
    lines = shown(filled_in(text, peak), width).splitlines()
    assert not any("…" in line for line in lines)
    for name in ("byte-spectral-tiny", "llm-med-tiny"):
        assert sum(name in line for line in lines) >= 2


def test_memory_is_a_column_where_it_was_measured(text: Path) -> None:
    assert shown(filled_in(text, 3 * 2**20), 200).count("peak MiB") == 2
    lines = shown(filled_in(text, None)).splitlines()
    assert " ".join(lines[1].split()) == "model parameters seeds training s steps bytes/s bits/byte"
    assert not any("peak" in line for line in lines)


# The whole --------------------------------------------------------------------------------------------------


def test_a_whole_comparison(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = cli(*tiny(text))
    assert done.exit_code == 0, done.output
    document = read(Path("out"))
    assert [(run.side, run.seed, run.steps) for run in document.runs] == [
        ("first", 0, 2),
        ("second", 0, 2),
        ("first", 1, 2),
        ("second", 1, 2),
    ]
    assert [(row.side, row.length, row.rows) for row in document.speed] == [
        ("first", 16, 4),
        ("second", 16, 4),
        ("first", 32, 2),
        ("second", 32, 2),
    ]
    assert document.verdict == winner(document.scores("first"), document.scores("second"))
    assert document.crossover == crossover(document.speed)
    for run in document.runs:
        assert run.bits_per_byte is not None
        assert run.bits_per_byte_before is not None
        assert 0 < run.bits_per_byte < 12
        assert [point[1] for point in run.curve] == [2]
        assert run.seconds * run.tokens_per_s == pytest.approx(2 * 2 * 32)
        assert run.peak_bytes is None
    for row in document.speed:
        assert row.step_ms is not None
        assert row.infer_ms is not None
        assert row.step_ms_p20 <= row.step_ms <= row.step_ms_p80
        assert row.tokens_per_s == pytest.approx(1000 * 64 / row.step_ms)
    assert abs(document.first.parameters / document.second.parameters - 1) <= 0.02
    assert document.verdict is not None
    assert document.verdict.text in done.stdout
    mean = statistics.fmean(score or 0.0 for score in document.scores("first"))
    assert f"{mean:.4f} +-" in done.stdout
    assert f"{document.first.parameters:,}" in done.stdout
    assert "faster than llm-med-tiny" in done.stdout
    assert Path("out/runs/byte-spectral-tiny-1/metrics.jsonl").exists()
    _resumes(text, monkeypatch)


def _resumes(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the file holds is not done again, what it lacks is; other settings are refused."""
    before = json.loads(Path("out/compare.json").read_text())

    def forbidden(*args: object, **kwargs: object) -> Any:
        raise AssertionError("done again")

    with monkeypatch.context() as patch:
        patch.setattr(comparing, "trained", forbidden)
        patch.setattr(comparing, "measured", forbidden)
        done = cli(*tiny(text, "--resume"))
        assert done.exit_code == 0, done.output
    after = json.loads(Path("out/compare.json").read_text())
    assert {k: after[k] for k in ("runs", "speed", "verdict")} == {
        k: before[k] for k in ("runs", "speed", "verdict")
    }
    done = cli(*tiny(text, "--resume", "--lengths", "8,32", "--seeds", "3"))
    assert done.exit_code == 0, done.output
    document = read(Path("out"))
    assert [run.seed for run in document.runs] == [0, 0, 1, 1, 2, 2]
    assert [row.length for row in document.speed] == [8, 8, 16, 16, 32, 32]
    assert json.loads(Path("out/compare.json").read_text())["runs"][:4] == before["runs"]
    assert "add --resume" in cli(*tiny(text)).stderr
    other = cli(*tiny(text, "--resume", "optim.lr=0.1"))
    assert other.exit_code == 1
    assert "optim.lr=0.1, was 0.003" in other.stderr


def test_other_data_are_not_pooled(text: Path, caplog: pytest.LogCaptureFixture) -> None:
    out, said = Path("out"), "does not say what its data were"

    def compared(*, resume: bool) -> comparing.Document:
        return compare(*small_pair(text), out, seeds=1, lengths=[16], resume=resume)

    assert compared(resume=False).data_bytes == len(text.read_bytes())
    document = compared(resume=True)
    text.write_bytes(text.read_bytes()[::-1])
    with pytest.raises(CompareError, match=r"other bytes of .*book\.txt: restore them"):
        compared(resume=True)
    kept = text.read_bytes()
    text.write_bytes(kept[1:])
    with pytest.raises(CompareError, match=r"other bytes of .*book\.txt \(9000 then, 8999 now\): restore"):
        compared(resume=True)
    text.write_bytes(kept)
    document.data_bytes, document.data_digest = 0, ""
    write(out, document)
    with caplog.at_level(logging.WARNING, "bakeoff"):
        assert not compared(resume=True).data_digest
    assert caplog.text.count(said) == 1


def test_an_interruption_keeps_what_is_done(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = comparing.trained

    def interrupted(config: Any, side: Any, seed: int, *args: Any, **kwargs: Any) -> Any:
        if seed == 1:
            raise KeyboardInterrupt
        return kept(config, side, seed, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(comparing, "trained", interrupted)
        done = cli(*tiny(text, "--lengths", "16"))
    assert done.exit_code == 130
    document = read(Path("out"))
    assert [(run.side, run.seed) for run in document.runs] == [("first", 0), ("second", 0)]
    assert document.verdict is None


@pytest.mark.parametrize("ended", ["SIGTERM", "steps"], ids=["early", "once the run was over"])
def test_a_signal_in_a_run_ends_the_comparison(
    ended: str, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = quality.train

    def stopped(config: Any, **options: Any) -> Any:
        return msgspec.structs.replace(kept(config, **options), stopped=ended, signal="SIGTERM")

    monkeypatch.setattr(quality, "train", stopped)
    first, _ = small_pair(text)
    with pytest.raises(KeyboardInterrupt):
        quality.trained(first, "first", 0, Path("run"), CPU, resume=False)


def test_one_recipe_against_itself(text: Path) -> None:
    done = cli("llm-med", "llm-med", *tiny(text, "--seeds", 1, "--lengths", 16, "first.optim.lr=0.1"))
    assert done.exit_code == 0, done.output
    document = read(Path("out"))
    assert (document.first.name, document.second.name) == ("llm-med-tiny-first", "llm-med-tiny-second")
    assert document.first.parameters == document.second.parameters
    assert document.runs[0].bits_per_byte != document.runs[1].bits_per_byte
    assert "use --seeds 2 or more (3 are advised)" in done.stdout


@pytest.mark.parametrize(
    ("more", "status", "says"),
    [
        (["--minutes", 1], 2, "give one of them"),
        (["--seeds", 0], 2, "--seeds"),
        (["--lengths", "16,x"], 1, "such as 256,1024,4096"),
        (["--lengths", ""], 1, "such as 256,1024,4096"),
        (["--lengths", "1"], 1, "at least 2 bytes"),
        (["--lengths", "16,100000"], 1, "give longer --data or leave that length out\n"),
        (["byte-spectrl"], 2, "did you mean 'byte-spectral'"),
        (["llm-med", "llm-med", "llm-med"], 2, "two recipes are compared"),
        (["train.steps=4"], 1, "use --steps"),
        (["--out", "book.txt/below"], 1, "give a writable --out"),
    ],
)
def test_errors_name_the_fix(more: list[object], status: int, says: str, text: Path) -> None:
    done = cli(*tiny(text, *more))
    assert done.exit_code == status, done.output
    assert says in done.stderr
    assert not Path("out").exists()


def test_how_many_seeds_a_verdict_needs_is_said_once(text: Path) -> None:
    assert "2 or more (3 are advised)" in " ".join(cli("--help").stdout.split())
    with pytest.raises(CompareError, match=r"2 or more \(3 are advised\)"):
        compare(*small_pair(text), Path("out"), seeds=0)


def test_options_that_need_others() -> None:
    done = cli("--resume")
    assert done.exit_code == 2
    assert "--out" in done.stderr
    done = cli("--minutes", "nan")
    assert done.exit_code == 2


def test_a_torn_file_is_named(text: Path) -> None:
    Path("out").mkdir()
    Path("out/compare.json").write_text('{"schema": 1')
    done = cli(*tiny(text, "--resume"))
    assert done.exit_code == 1
    assert "compare.json" in done.stderr
    assert "Move it away" in done.stderr


# Documents -------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "path",
    [p for p in (ROOT / "docs").glob("*.md") if "<!-- comparison:" in p.read_text()],
    ids=lambda p: p.name,
)
def test_pages_say_what_the_results_say(path: Path) -> None:
    text = path.read_text("utf-8")
    assert filled(text, ROOT) == text, f"run python -m bakeoff.apps.compare.page {path.name}"
    for name in re.findall(r"\]\((images/[^)]+)\)", text):
        assert (path.parent / name).exists(), f"run python -m bakeoff.apps.compare.page {path.name}"
        assert text.count(f"({name})") == 1, "a picture of two comparisons"


def test_a_page_is_filled_between_its_marks(tmp_path: Path) -> None:
    document = read(ROOT / "results" / "cpu" / "enwik8-poles")
    write(tmp_path / "results" / "mine", document)
    page = "before\n<!-- comparison: results/mine -->\nold\n<!-- end -->\nafter\n"
    text = filled(page, tmp_path)
    assert text.startswith("before\n<!-- comparison: results/mine -->\n**")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text
    assert "enwik8-4MB.txt, rows" in text
    assert f"{document.first.parameters:,}" in text
    assert "images/mine-curves.svg" in text
    assert filled(text, tmp_path) == text
    document.data_bytes = 4_000_000
    write(tmp_path / "results" / "mine", document)
    assert "enwik8-4MB.txt of 4,000,000 bytes, rows" in filled(page, tmp_path)


@pytest.mark.parametrize("absent", ["altair", "vl_convert"])
def test_pictures_name_what_they_need(absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    write(tmp_path / "results" / "mine", read(ROOT / "results" / "cpu" / "enwik8-poles"))
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("<!-- comparison: results/mine -->\nold\n<!-- end -->\n")
    done = CliRunner().invoke(page_command, [str(page)])
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: pictures need ")
    assert absent in line
    assert line.endswith(": pip install -e '.[report]'")
    assert "old" in page.read_text()
    assert CliRunner().invoke(page_command, ["--check", str(page)]).exit_code == 1
