"""The command line: what it prints, what it refuses and how, and that interrupting it loses nothing."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

import bakeoff
from bakeoff import hardware
from bakeoff.apps.bench.notation import read_case, split_key, write_case
from bakeoff.apps.bench.suites import cells
from bakeoff.apps.cli import main
from bakeoff.errors import BakeoffError, ContestError
from bakeoff.select import Case, Op, Verdict, find_op, registry
from bakeoff.select.choose import policy
from bakeoff.select.choose.table import Table, read, write
from bakeoff.select.contests import side_by_side
from bakeoff.select.declare.key import key
from tests.unit.benches import FakeWorker
from tests.unit.verdicts import made, no_verdicts

OURS = {**os.environ, "PYTHONPATH": str(Path(bakeoff.__file__).parents[1])}
SMALL = [
    "train.device=cpu", "model.d_model=32", "model.layers=1", "model.heads=2", "model.max_seq_len=32",
    "train.batch_size=2", "train.eval_rows=2", "train.max_seconds=0",
]  # fmt: skip
UNTUNED = [*SMALL, "select.tune=false", "train.steps=2"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty table cache and folder to work in."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    with no_verdicts(tmp_path, monkeypatch) as folder:
        yield folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file to train on."""
    path = tmp_path / "book.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def ok(*arguments: object) -> str:
    done = cli(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def verdict(shape: str = "x=fp32[4,8]", **us: float) -> Verdict:
    op = find_op("rms_norm")
    times = us or {"eager": 2.0, "compiled": 1.0}
    return made(op, read_case(op, [shape], "cpu"), times, min(times, key=lambda name: times[name]))


def keep(path: Path, *verdicts: Verdict, **facts: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    stamped = msgspec.structs.replace(hardware.facts("cpu"), **facts)
    write(path, Table(stamped, {row.key: row for row in verdicts}))
    return path


# Start-up and usage ----------------------------------------------------------------------------------------


def test_only_click_is_imported() -> None:
    heavy = "{'torch', 'rich', 'msgspec', 'numpy', 'triton'}"
    code = f"import sys, bakeoff.apps.cli; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=OURS)
    assert done.stdout == "set()\n"


WITHOUT_THE_COMPILER = """
    import sys
    import torch
    import bakeoff, bakeoff.apps.compare, bakeoff.apps.train
    from bakeoff.models.llm_med import Config, LLMMed
    from bakeoff.select.contests.contest import contest
    from tests.unit import zoo
    from tests.unit.zoo import GOOD, case

    verdict = contest(zoo.op(GOOD), case(), ("eager",), budget_s=0.1)[0]
    assert verdict.winner, verdict
    with torch.no_grad():
        bakeoff.assert_causal(LLMMed(Config(d_model=16, layers=1, heads=2, max_seq_len=16)))
    print({"torch._dynamo", "torch._inductor", "torch.distributed.fsdp"} & set(sys.modules))
"""


def test_what_needs_no_compiler_does_not_import_it() -> None:
    """It takes a second or two: of the command, of every process that holds contests, of the leak guard."""
    code = textwrap.dedent(WITHOUT_THE_COMPILER)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=OURS, cwd=root
    )
    assert done.stdout == "set()\n", done.stderr


def test_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bakeoff", "--version"], capture_output=True, text=True, check=True, env=OURS
    )
    assert re.fullmatch(r"bakeoff, version [\d.]+\n", done.stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["bench", "--budget", "0"],
        ["bench", "--budget", "nan!"],
        ["bench", "--budget", "nan"],
        ["tune", "llm-med-tiny", "--budget", "inf"],
        ["compare", "--minutes", "nan"],
        ["bench", "--suite", "all"],
        ["explain", "rms_norm", "--regime", "warp"],
        ["generate"],
        ["generate", "runs/x", "--top-p", "0"],
        ["generate", "runs/x", "--seed", "99999999999999999999999"],
        ["demo", "--seconds", "0"],
        ["table", "import"],
        ["train", "--no-such-option"],
        ["tune", "--missed", "llm-med-tiny"],
        ["tune", "--missed", "--data", "corpus"],
        ["tune", "--missed", "--config", "mine.toml"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    done = cli(*arguments)
    assert done.exit_code == 2
    assert "Usage:" in done.stderr


# Errors: one line, the fix in it, no traceback -------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--config", "absent.toml"], "absent.toml"),
        (["train", *UNTUNED, "select.rms_norm=cobol"], "no candidate 'cobol'; it has eager"),
        (["train", *UNTUNED, "select.policy=tabel"], "did you mean 'table'"),
        (["train", *UNTUNED, "--data", "absent.txt"], "can't read absent.txt"),
        (["train", *UNTUNED, "--data", ""], "data.path is empty: set it to a file or folder"),
        (["train", *UNTUNED, "--data", "~nosuchuser/x"], "write the path out. Set data.path to a file"),
        (["train", *UNTUNED, "--out", "~nosuchuser/x"], "train.run_dir=~nosuchuser/x can't be used"),
        (["train", *UNTUNED, "--resume", "~nosuchuser/x"], "train.resume=~nosuchuser/x can't be used"),
        (["train", *UNTUNED, "--resume", "absent"], "absent holds no checkpoint"),
        (["train", *UNTUNED, "train.device=warp"], "use auto, cpu, cuda"),
        (["tune", "llm-med-tiny", "--data", "absent.txt"], "can't read absent.txt"),
        (["explain", "rms_nrom"], "did you mean 'rms_norm'"),
        (["explain", "rms_norm"], "rms_norm needs x, too: write a tensor as x=bf16[8192,4096]"),
        (["explain", "rms_norm", "x=fp32[4,8]", "y=1"], "no argument 'y'; it has x, weight"),
        (["explain", "rms_norm", "x=fp23[4,8]"], "no dtype 'fp23'"),
        (["explain", "rms_norm", "x=int32[4,8]"], "convert it to a floating point dtype"),
        (["explain", "rms_norm", "x=fp32[4,8]", "weight=fp32[9]"], "expected [D] with D = 8"),
        (["explain", "rms_norm", "x=fp32[4,8]:loose"], "use dense, strided or other"),
        (["explain", "rms_norm", "x=fp32[4,8]", "--policy", "tabel"], "did you mean 'table'"),
        (["explain", "rms_norm", "x=fp32[4,8]", "--policy", "strict"], "policy is strict"),
        (["explain", "rms_norm(x=fp32[4,8"], "is no whole key"),
        (["explain", "rms_norm", "x=fp32[4,8]", "--regime", "compiled", "--tune"], "on a compiled step"),
        (["explain", "rms_norm", "x=fp32[4,8]", "--device", "banana"], "use auto, cpu, cuda"),
        (["bench", "rms_nrom"], "did you mean 'rms_norm'"),
        (["bench", "--device", "cpu", "--filter", "no such case"], "no case's name or shapes contain"),
        (["bench", "--device", "cpu", "--regimes", "warp"], "the regimes are eager, graph, compiled"),
        (["bench", "--device", "cpu", "--regimes", "graph"], "needs a CUDA device"),
        (
            ["bench", "--device", "cpu", "--suite", "selection", "--regimes", "eager"],
            "belongs to --suite ops",
        ),
        (["bench", "--suite", "selection", "--direction", "both"], "--direction belongs to --suite ops"),
        (["bench", "adamw_", "--device", "cpu", "--direction", "both"], "no case has a backward"),
        (["bench", "rms_norm", "--suite", "step"], "leave OP, --regimes and --jobs out"),
        (["generate", "absent"], "holds no checkpoint"),
        (["table", "export", "copy.json", "--device", "cpu"], "bakeoff tune RECIPE first"),
        (["table", "show", "absent.json", "--device", "cpu"], "absent.json can't be read"),
        (["table", "diff", "absent.json", "--device", "cpu"], "absent.json can't be read"),
        (["table", "import", "absent.json", "--device", "cpu"], "absent.json can't be read"),
    ],
)
def test_errors_name_the_fix(arguments: list[str], message: str) -> None:
    done = cli(*arguments)
    assert done.exit_code == 1, done.output
    assert message in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert line.startswith("Error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "lm-med"], "did you mean 'llm-med'"),
        (["train", "llm-med-tiny", "train.stepz=3"], "did you mean train.steps"),
        (["train", "train.steps=many"], "train.steps: expected int, got 'many'"),
        (["train", "llm-med-tiny", "steps"], "has no '='"),
        (["train", *UNTUNED, "select.rms_norn=eager"], "did you mean select.rms_norm"),
        (["train", *UNTUNED, "train.seed=99999999999999999999999"], "train.seed: expected int <= 9223372036"),
        (["train", "optim.lr=inf", "--print-config"], "optim: lr=inf must be a finite number"),
        (["tune", "llm-med-huge"], "There are llm-med, "),
        (["train", "llm-med-tiny", "model.nope=1"], "Error: unknown key 'model.nope'"),
        (["train", "--out", "a", "train.run_dir=b"], "train.run_dir and --out set the same: leave one"),
        (["compare", "--steps", "2", "--device", "cpu", "data.nope=1"], "unknown key 'data.nope'"),
    ],
)
def test_settings_that_do_not_exist_are_wrong_usage(arguments: list[str], message: str) -> None:
    done = cli(*arguments)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert line.startswith("Error: ")
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "holds no bytes"), (b"too short", "need at least 33 there"), (None, "neither a file nor")],
)
def test_bad_data(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "data.bin"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    for command in ("train", "tune"):
        done = cli(command, *UNTUNED, "--data", path)
        assert done.exit_code == 1
        assert message in done.stderr
        assert str(path) in done.stderr
        assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["train", "--out", ""], 2, "'--out': it is empty: give a path, . for the folder here"),
        (["train", "--config", "none"], 1, "can't read the configuration none: No such file or directory"),
        (["explain", "runs/none"], 1, "there is no folder runs/none: give the one that bakeoff train"),
        (["compare", "--model", "", "--steps", "2"], 1, "--model is empty: give it a recipe"),
        (["compare", "--model", "llm-med-tiny", "--lr", "nan"], 1, "learning rates must be finite and above"),
        (["order", "4x4", "--segments", "4", "--rates", "1", "--svg", "/dev/null"], 1, "give --svg another"),
        (["order", "axb"], 1, "SHAPE is 'axb'; it is whole numbers"),
        *(
            (["bench", "--suite", suite, "--filter", "none", "--device", "cpu"], 1, "'none' chooses nothing")
            for suite in ("step", "decode", "ranks", "context")
        ),
    ],
)
def test_what_can_not_be_meant_is_refused(
    arguments: list[str], status: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == status
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_torn_selection_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "selection.json").touch()
    done = CliRunner().invoke(main, ["explain", str(tmp_path)])
    assert done.exit_code == 1
    assert "selection.json can't be read or is torn: delete it" in done.stderr


def test_a_reason_is_given_once() -> None:
    op = find_op("attention")
    (flash,) = (candidate for candidate in op.candidates if candidate.name == "flash")
    assert flash.reasons(Case(op.cases()[0].args, "cpu")) == ["runs on CUDA, not on cpu"]


def test_a_wrong_variable_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bakeoff", "explain"],
        env={**OURS, "BAKEOFF_POLICY": "none"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("Error: BAKEOFF_POLICY: there is no policy 'none'")


def test_every_part_is_found_from_the_package() -> None:
    parts = "import bakeoff; bakeoff.parallel.joined; bakeoff.optim.AdamW; bakeoff.nn.RMSNorm"
    assert subprocess.run([sys.executable, "-c", parts], env=OURS).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_help_onto_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "bakeoff", "--help"], stdout=full, stderr=subprocess.PIPE, env=OURS
        )
    assert (done.returncode, done.stderr) == (1, b"Error: No space left on device\n")


def test_debug_shows_the_traceback() -> None:
    done = cli("--debug", "train", "lm-med")
    assert isinstance(done.exception, BakeoffError)


def test_unexpected_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr("bakeoff.apps.cli.listing.run", broken)
    assert isinstance(cli("ops").exception, KeyError)


def test_folders_that_cannot_be_written(tmp_path: Path, text: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    done = cli("train", *UNTUNED, "--data", text, "--out", tmp_path / "file" / "run")
    assert done.exit_code == 1
    assert "set train.run_dir" in done.stderr
    keep(policy.store.path("cpu"), verdict())
    done = cli("table", "export", tmp_path / "file" / "copy.json", "--device", "cpu")
    assert done.exit_code == 1
    assert str(tmp_path / "file") in done.stderr
    assert (tmp_path / "file").read_text() == "not a folder"


# train, generate -------------------------------------------------------------------------------------------


def test_print_config_is_read_back(tmp_path: Path) -> None:
    first = ok(
        "train", "llm-med", "train.steps=7", "select.rms_norm=eager", "--data", "a b.txt", "--print-config"
    )
    (tmp_path / "mine.toml").write_text(first)
    assert ok("train", "--config", tmp_path / "mine.toml", "--print-config") == first
    assert "steps = 7" in first
    assert 'path = "a b.txt"' in first


def test_train_resume_generate(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "run"
    first = ok("train", *UNTUNED, "--data", text, "--out", out)
    assert "held-out bits per byte: " in first
    assert "calls measured, " in first
    assert "candidate" not in first
    explained = ok("explain", out)
    assert "rms_norm(x=fp32[64,32]'" in explained
    assert "not measured" in explained
    assert f"bakeoff explain {out}` lists them" in first
    refused = cli("explain", tmp_path)
    assert refused.exit_code == 1
    assert "holds no selection.json" in refused.stderr
    assert f"bakeoff generate {out}" in first
    again = ok("train", *SMALL, "select.tune=false", "train.steps=3", "--data", text, "--out", out)
    assert "3 steps" in again
    done = cli("train", *UNTUNED, "--data", text, "--out", out, "--resume", "never")
    assert done.exit_code == 1
    assert "already holds a run" in done.stderr

    written = ok("generate", out, "--device", "cpu", "--prompt", "the", "--max-new", 40, "--seed", 3)
    assert written.startswith("the")
    assert written == ok("generate", out, "--device", "cpu", "--prompt", "the", "--max-new", 40, "--seed", 3)
    assert written != ok("generate", out, "--device", "cpu", "--prompt", "the", "--max-new", 40, "--seed", 4)
    likeliest = ok("generate", out, "--device", "cpu", "--max-new", 5, "--temperature", 0, "--prompt", "")
    for cold in (0, "1e-400", "1e-40", "1e-25"):
        words = ["--max-new", 5, "--temperature", cold, "--seed", 9, "--prompt", ""]
        assert likeliest == ok("generate", out, "--device", "cpu", *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["train", "llm-med-tiny", "--steps", "5"],
            "No such option: --steps. Settings are written KEY=VALUE: train.steps=5",
        ),
        (["train", "--batch-size=8"], "KEY=VALUE: train.batch_size=8"),
        (["tune", "--lr"], "KEY=VALUE: optim.lr=..."),
        (["train", "--no-such"], "No such option"),
    ],
)
def test_a_setting_given_as_an_option_is_answered_with_how_it_is_written(words: list[str], said: str) -> None:
    done = cli(*words)
    assert done.exit_code == 2
    assert said in done.stderr


def test_brackets_in_a_path_are_part_of_it(text: Path) -> None:
    said = ok("train", *UNTUNED, "--data", text.rename("[red]b.txt"), "--out", "a[/b] [small]")
    assert "run: a[/b] [small]" in said
    assert "text from it: bakeoff generate 'a[/b] [small]'" in said
    assert "data: [red]b.txt, 9,000 bytes" in said


def test_train_with_standard_output_closed(text: Path, tmp_path: Path) -> None:
    train = [sys.executable, "-m", "bakeoff", "train", *UNTUNED, "--data", str(text), "--out", "run"]
    environment = {name: value for name, value in OURS.items() if name != "COLUMNS"}
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *train]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


def test_a_prompt_that_is_no_text_is_taken_as_its_bytes(text: Path) -> None:
    ok("train", *UNTUNED, "--data", text, "--out", "run")
    prompt = b"\xff\xfeok".decode("utf-8", "surrogateescape")  # as Python reads the command line
    written = ok("generate", "run", "--device", "cpu", "--prompt", prompt, "--max-new", 1)
    assert written.startswith("\ufffd\ufffdok")


def test_generated_text_cannot_drive_the_terminal() -> None:
    import torch

    from bakeoff.apps.cli.generating import continuation

    class Parrot(torch.nn.Linear):
        def stream(self, ids: torch.Tensor, max_new: int, **sampling: object) -> Iterator[torch.Tensor]:
            yield from (torch.tensor([byte]) for byte in "é€\n\t\x1b[31m\x07\x9bok".encode() + b"\xff\xc3")

    assert "".join(continuation(Parrot(1, 1), "x", 99)) == "é€\n\t\ufffd[31m\ufffd\ufffdok\ufffd\ufffd"


# explain, ops ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rms_norm", "rotary"])
def test_cases_survive_being_written(name: str) -> None:
    op = find_op(name)
    for cell in cells(op, "cpu"):
        again = read_case(op, write_case(op, cell.case).split(" "), "cpu")
        assert key(op, again, "eager") == key(op, cell.case, "eager")


def test_explain_finds_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)  # any program that exists: nothing is compiled
    row = verdict("x=fp32[4,8]'")
    keep(policy.store.path("cpu"), row)
    for words in (["rms_norm", "x=fp32[4,8]'"], ["rms_norm", "x=fp32[4,8]", "--grad"], [row.key]):
        out = ok("explain", *words, "--device", "cpu")
        assert row.key in out
        assert re.search(r"compiled +0\.0010 .* yes +made to win", out)
        assert re.search(r"triton +- .*made to be out", out)
        assert "user cache" in out
    assert "no verdict for this key" in ok("explain", "rms_norm", "x=fp32[4,8]", "--device", "cpu")
    found = json.loads(ok("explain", "rms_norm", "x=fp32[4,8]'", "--device", "cpu", "--json"))
    assert (found["choice"], found["source"]) == ("compiled", "user cache")
    assert {r["candidate"] for r in found["rows"]} == set(find_op("rms_norm").by_name)
    out = ok("explain", row.key, "--policy", "off")
    assert re.search(r"eager +0\.0020 .* yes +forced by the policy off", out)
    assert re.search(r"compiled +0\.0010 .* +made to win", out)


def test_a_number_makes_the_key_that_calls_make(cache: Path) -> None:
    words = ["x=fp32[4,8]", "weight=fp32[8]", "offset=1", "--device", "cpu"]
    assert "offset=1.0" in ok("explain", "rms_norm", *words)


def test_explain_holds_no_contest_that_the_table_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[str] = []
    monkeypatch.setattr("bakeoff.apps.cli.explaining._tune", lambda op, case, regime: held.append(regime))
    words = ["explain", "rms_norm", "x=fp32[4,8]", "--device", "cpu", "--tune"]
    ok(*words)
    assert held == ["eager"]
    keep(policy.store.path("cpu"), verdict())
    policy.store.forget()
    ok(*words)
    assert held == ["eager"]


def test_explain_says_why_its_contest_left_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    class Starved(FakeWorker):
        start = FakeWorker.__enter__

        @staticmethod
        def answer(op: Op, case: Case, regime: str) -> Verdict:
            if case.args["x"].shape == (4, 8):
                raise ContestError("not enough memory")
            return FakeWorker.answer(op, case, regime)

    Starved.held, Starved.thorough = [], []
    monkeypatch.setattr(side_by_side, "Worker", Starved)
    done = cli("explain", "rms_norm", "x=fp32[4,8]", "--device", "cpu", "--tune")
    assert done.exit_code == 1
    assert "Error: --tune left no verdict" in done.stderr
    assert "not enough memory" in done.stderr.splitlines()[-1]
    assert "measured now" in ok("explain", "rms_norm", "x=fp32[4,16]", "--device", "cpu", "--tune")
    assert len(Starved.held) == 2


@pytest.mark.parametrize(
    "options", [["--grad"], ["--regime", "eager"], ["--policy", "nonsense"], ["--tune"], ["--json"]]
)
def test_explain_refuses_a_calls_options_without_a_call(options: list[str]) -> None:
    done = cli("explain", "--device", "cpu", *options)
    assert done.exit_code == 2
    assert "Usage:" in done.stderr
    assert f"{options[0]} without a call: name an op" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x=fp32[4,8]", "--regime", "graph"], "--regime graph needs a CUDA device"),
        (["x=fp32[4,8]", "x=fp32[4,16]"], "x is given twice"),
        (["x=fp32[4,8"], "write a tensor as x=bf16[8,40]"),
        (["x=fp32[4,8]", "weight=fp32[-8]"], "write a tensor as weight=bf16[8,40]"),
    ],
)
def test_explain_refuses_what_is_no_call(words: list[str], message: str) -> None:
    done = cli("explain", "rms_norm", *words, "--device", "cpu")
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert message in line


def test_explain_reads_any_key() -> None:
    op = find_op("rms_norm")
    for regime in ("eager", "graph", "compiled"):
        case = read_case(op, ["x=bf16[8192,4096]'", "weight=fp32[4096]", "eps=1e-5"], "cpu")
        text = key(op, case, regime)
        parts = split_key(text)
        assert parts is not None
        assert parts[0] == "rms_norm"
        assert parts[2:] == ("cpu", regime)
        assert key(op, read_case(op, parts[1], "cpu"), regime) == text


def test_ops_lists_every_candidate() -> None:
    listed = json.loads(ok("ops", "--device", "cpu", "--json"))
    assert {row["op"] for row in listed} == set(registry)
    op = find_op("rms_norm")
    rows = [row for row in listed if row["op"] == "rms_norm"]
    assert [row["candidate"] for row in rows] == list(op.by_name)
    eager, triton = (next(row for row in rows if row["candidate"] == name) for name in ("eager", "triton"))
    assert eager["available"]
    assert not triton["available"]
    assert triton["reasons"]
    assert eager["source_hash"] == op.incumbent.source_hash
    assert eager["source"] == "bakeoff.ops.rms_norm.plain"
    assert all(row["source"].startswith(f"bakeoff.ops.{row['op'].rstrip('_')}") for row in rows)
    out = ok("ops", "--device", "cpu")
    assert all(name in out for name in op.by_name)


# table -----------------------------------------------------------------------------------------------------


def test_table_path_show(cache: Path) -> None:
    path = Path(ok("table", "path", "--device", "cpu").strip())
    assert path.parent == cache
    assert "no verdicts yet" in ok("table", "show", "--device", "cpu")
    row = verdict()
    keep(path, row)
    for words in (["table", "show"], ["explain"]):
        out = ok(*words, "--device", "cpu")
        assert row.key in out
        assert "in force" in out
    stale = ok("table", "show", keep(cache / "old.json", row, torch="2.11.0"), "--device", "cpu")
    assert "stale: torch 2.11.0" in stale
    foreign = ok("table", "show", keep(cache / "foreign.json", row, device="NVIDIA B300"), "--device", "cpu")
    assert "another machine's" in foreign


def test_a_table_that_can_not_be_read_hides_no_other(cache: Path) -> None:
    row = verdict()
    own = Path(keep(policy.store.path("cpu"), row))
    newer = own.with_name(f"{own.name.partition('.')[0]}.newer.json")
    newer.write_text('{"schema": 2}')
    for words in (["table", "show"], ["explain"]):
        done = cli(*words, "--device", "cpu")
        assert done.exit_code == 0
        assert row.key in done.stdout
        assert "ignored" in done.stderr
    done = cli("table", "show", str(newer), "--device", "cpu")
    assert done.exit_code == 1
    assert "is not a table" in done.stderr


def test_rows_without_a_candidate_of_today_are_not_in_force(cache: Path) -> None:
    row = verdict(eager=1.0)
    known = tuple(trial for trial in row.trials if trial.candidate != "compiled")
    keep(policy.store.path("cpu"), msgspec.structs.replace(row, trials=known))
    assert "ignored: compiled is new" in ok("table", "show", "--device", "cpu")
    assert policy.store.lookup(find_op("rms_norm"), row.key, "cpu") is None


def test_a_cache_that_can_not_be_looked_into_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 300)  # a longer name than a folder may have: unlike a locked one, for root too
    monkeypatch.setenv("BAKEOFF_CACHE", str(folder))
    for words in (["show"], ["export", "copy.json"]):
        done = cli("table", *words, "--device", "cpu")
        assert done.exit_code == 1
        assert str(policy.store.path("cpu")) in done.stderr
        assert "set BAKEOFF_CACHE" in done.stderr


def test_table_export_import(cache: Path, tmp_path: Path) -> None:
    own, copy = policy.store.path("cpu"), tmp_path / "copy.json"
    keep(own, verdict())
    ok("table", "export", copy, "--device", "cpu")
    assert read(copy) == read(own)
    keep(own, verdict("x=fp32[4,16]"))
    policy.store.forget()
    ok("table", "import", copy, "--device", "cpu")
    assert set(read(own).rows) == {verdict().key, verdict("x=fp32[4,16]").key}


@pytest.mark.parametrize("place", [".", "folder"])
def test_no_table_is_exported_onto_a_folder(place: str, cache: Path) -> None:
    keep(policy.store.path("cpu"), verdict())
    Path("folder").mkdir()
    done = cli("table", "export", place, "--device", "cpu")
    assert done.exit_code == 1
    assert f"{place} is a folder: give a file in it" in done.stderr


def test_a_copy_that_cannot_be_written_is_named(cache: Path) -> None:
    keep(policy.store.path("cpu"), verdict())
    Path("file").write_text("")
    done = cli("table", "export", "file/copy.json", "--device", "cpu")
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: file/copy.json can't be written (")
    assert "give a file in a writable folder" in done.stderr


def test_table_import_refuses_what_says_nothing_here(cache: Path, tmp_path: Path) -> None:
    own = keep(policy.store.path("cpu"), verdict())
    before = own.read_bytes()
    foreign = keep(tmp_path / "foreign.json", verdict(), device="NVIDIA B300")
    for words in ([], ["--replace"]):
        done = cli("table", "import", foreign, "--device", "cpu", *words)
        assert done.exit_code == 1
        assert "measured on NVIDIA B300" in done.stderr
    older = keep(tmp_path / "older.json", verdict("x=fp32[4,16]"), torch="2.11.0")
    done = cli("table", "import", older, "--device", "cpu")
    assert done.exit_code == 1
    assert "--replace" in done.stderr
    assert own.read_bytes() == before
    assert "the old table is" in ok("table", "import", older, "--replace", "--device", "cpu")
    assert read(policy.store.path("cpu", read(older).facts)) == read(older)
    (aside,) = cache.glob("*.before-*")
    assert aside.read_bytes() == before
    policy.store.forget()
    found = policy.store.lookup(find_op("rms_norm"), verdict("x=fp32[4,16]").key, "cpu")
    assert found is not None
    assert found.stale
    assert "stale: torch 2.11.0" in ok("table", "show", "--device", "cpu")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"schema":2}', b"[" * 100_000, b"\xff\xfe", b'{"facts":{},"rows":{}}']
)
def test_hostile_table_files(tmp_path: Path, content: bytes) -> None:
    own = keep(policy.store.path("cpu"), verdict())
    before = own.read_bytes()
    path = tmp_path / "hostile.json"
    path.write_bytes(content)
    for words in (["show"], ["import"], ["import", "--replace"], ["diff"]):
        done = cli("table", words[0], path, *words[1:], "--device", "cpu")
        assert done.exit_code == 1, done.output
        assert done.stderr.startswith(f"Error: {path} is not a table of this version")
    assert own.read_bytes() == before
    assert path.read_bytes() == content


def test_table_diff(tmp_path: Path) -> None:
    shapes = {
        name: f"x=fp32[4,{size}]" for size, name in enumerate(("same", "faster", "other", "left", "right"), 8)
    }
    a = keep(
        tmp_path / "a.json",
        verdict(shapes["same"]), verdict(shapes["faster"]), verdict(shapes["other"]), verdict(shapes["left"]),
    )  # fmt: skip
    b = keep(
        tmp_path / "b.json",
        verdict(shapes["same"], eager=2.0, compiled=1.01), verdict(shapes["faster"], eager=2.0, compiled=0.5),
        verdict(shapes["other"], eager=0.7, compiled=1.0), verdict(shapes["right"]),
    )  # fmt: skip
    out = ok("table", "diff", a, b)
    found = {
        name: [line for line in out.splitlines() if f"[4,{size}]" in line]
        for size, name in enumerate(shapes, 8)
    }
    assert found["same"] == []
    assert found["faster"][0].endswith("compiled 0.0010 ms -> compiled 0.0005 ms (0.50 times)")
    assert found["other"][0].endswith("compiled 0.0010 ms -> eager 0.0007 ms")
    assert found["left"][0].startswith(f"only in {a}")
    assert found["right"][0].startswith(f"only in {b}")
    assert "4 of 5 keys differ" in out
    assert "0 of 4 keys differ" in ok("table", "diff", a, a)


# Ctrl-C ----------------------------------------------------------------------------------------------------


def command_line(process: str) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:  # over already
        return b""


def test_ctrl_c_while_tuning(cache: Path, text: Path) -> None:
    keep(policy.store.path("cpu"), verdict())
    before = policy.store.path("cpu").read_bytes()
    command = [sys.executable, "-m", "bakeoff", "tune", *UNTUNED, "--data", str(text)]
    environment = {**OURS, "BAKEOFF_CACHE": str(cache)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    threads = Path(f"/proc/{process.pid}/task")
    deadline = time.monotonic() + 60
    workers: list[str] = []
    try:
        while not workers and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
            found = []
            for children in threads.glob("*/children"):
                with contextlib.suppress(OSError):  # a thread that has ended
                    found += children.read_text().split()
            workers = [child for child in found if b"bakeoff.select.contests.worker" in command_line(child)]
        assert workers, process.communicate(timeout=60)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 130, error
        assert "Interrupted" in error
        assert "Traceback" not in error
        assert not any(command_line(worker) for worker in workers), "a worker was left behind"
    finally:
        process.kill()
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(worker), signal.SIGKILL)
        process.communicate()
    table = read(policy.store.path("cpu"))
    assert set(table.rows) >= {verdict().key}
    assert policy.store.path("cpu").read_bytes() == before or len(table.rows) > 1


# order -----------------------------------------------------------------------------------------------------


def test_order_compares_the_orders_and_draws_them(tmp_path: Path) -> None:
    words = ("order", "16x16", "--segments", "16,64", "--rates", "1,2", "--tile", "4")
    done = cli(*words, "--svg", tmp_path / "pictures")
    assert done.exit_code == 0, done.output
    assert {"row", "hilbert", "random"} <= {line.split()[0] for line in done.stdout.splitlines()}
    assert "<polyline" in (tmp_path / "pictures" / "order-hilbert.svg").read_text()
    reports = json.loads(cli(*words, "--json").stdout)
    assert reports["hilbert"]["kept"] > reports["row"]["kept"] > reports["random"]["kept"]
    assert len({round(report["keys"], 6) for report in reports.values()}) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("16",), "2 or 3 sizes"),
        (("16xa",), "whole numbers, such as 64x64"),
        (("4x4", "--segments", "4", "--rates", "8"), "at most its segment"),
    ],
)
def test_order_refuses(words: tuple[str, ...], message: str) -> None:
    done = cli("order", *words)
    assert done.exit_code == 1
    assert message in done.stderr


def test_tune_missed_says_that_there_was_nothing(cache: Path) -> None:
    result = cli("tune", "--missed")
    assert (result.exit_code, result.output.split(":")[0]) == (0, "nothing was missed")
