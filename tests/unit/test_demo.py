"""`bakeoff demo`: what it refuses before anything long begins, what it prints, how it ends."""

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

import bakeoff
from bakeoff.apps.cli import demo as demo_module
from bakeoff.apps.cli import main
from bakeoff.apps.cli.demo import GPU_BYTES_PER_S, demo_configs
from bakeoff.apps.cli.training import program
from bakeoff.apps.compare import parameters
from bakeoff.apps.train import Config, load_run, loop
from bakeoff.apps.train import train as trained
from bakeoff.apps.train.checkpoint import steps
from bakeoff.apps.train.context import Context
from bakeoff.apps.train.data import ByteCorpus
from bakeoff.select import TuneReport
from tests.unit.verdicts import no_verdicts


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty table cache and folder to work in."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    with no_verdicts(tmp_path, monkeypatch):
        yield


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file to train on."""
    path = tmp_path / "a[" / "b].txt"
    path.parent.mkdir()
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine is looked at, and no contest held."""
    report = TuneReport((), 1, {}, 10.0)
    monkeypatch.setattr("bakeoff.apps.cli.doctor.examine", lambda device: None)
    monkeypatch.setattr("bakeoff.apps.cli.doctor.show", lambda report, out: None)
    monkeypatch.setattr("bakeoff.apps.cli.demo.rehearsed", lambda *_, **__: (report, "cpu"))


@pytest.fixture
def nothing_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where the demo gets as far as looking at the machine."""

    def begun(device: str) -> None:
        raise AssertionError("something long began")

    monkeypatch.setattr("bakeoff.apps.cli.doctor.examine", begun)


def demo(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["demo", "--quick", "--device", "cpu", *map(str, arguments)])


# What it is given -------------------------------------------------------------------------------------------


def test_configs_fit_the_device(tmp_path: Path, text: Path) -> None:
    cpu, gpu = (demo_configs(device, None, None, tmp_path, quick=False) for device in ("cpu", "cuda:0"))
    assert [config.recipe for config in (*cpu, *gpu)] == [
        "llm-med-tiny", "byte-spectral-tiny", "llm-med", "byte-spectral",
    ]  # fmt: skip
    assert {config.train.max_seconds for config in cpu} == {45}
    assert {config.train.steps for config in (*cpu, *gpu)} == {0}
    (seconds,) = {config.train.max_seconds for config in gpu}
    assert 4 < seconds * GPU_BYTES_PER_S / len(ByteCorpus.open("stdlib")) < 5
    sizes = [parameters(config.model) for config in cpu]
    assert abs(sizes[0] - sizes[1]) < 0.02 * sizes[0]
    own = demo_configs("cpu", 5.0, str(text), tmp_path, quick=True)[1]
    assert (own.train.max_seconds, own.data.path) == (5, str(text))
    assert own.train.run_dir == str(tmp_path / "byte-spectral-tiny")


@pytest.mark.parametrize(
    ("size", "asked", "seconds"), [(10**10, None, 60), (10**4, None, 4), (10**4, 30.0, 30)]
)
def test_a_gpu_has_less_time_for_few_data(
    size: int, asked: float | None, seconds: float, tmp_path: Path
) -> None:
    with (tmp_path / "data.bin").open("wb") as file:
        file.truncate(size)
    configs = demo_configs("cuda", asked, str(tmp_path / "data.bin"), tmp_path, quick=False)
    assert [(config.train.steps, config.train.max_seconds) for config in configs] == [(0, seconds)] * 2


@pytest.mark.usefixtures("nothing_long")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("absent", "can't read absent: No such file or directory. Set --data to a file or folder"),
        ("", "--data is empty: set it to a file"),
        ("empty", "empty holds no bytes: give --data a file"),
        ("short", "at least 257 there and 257 held out: give a longer --data\n"),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused_at_once(data: str, message: str) -> None:
    Path("empty").touch()
    Path("short").write_text("too short")
    done = demo("--data", data, "--out", "out")
    assert done.exit_code == 1
    assert message in done.stderr
    assert "data.path" not in done.stderr
    assert not Path("out").exists()


@pytest.mark.usefixtures("nothing_long")
@pytest.mark.parametrize("out", ["file/out", "~nosuchuser/x"])
def test_a_folder_that_cannot_be_made_is_refused_at_once(out: str, text: Path) -> None:
    Path("file").touch()
    done = demo("--data", text, "--out", out)
    assert done.exit_code == 1
    assert f"can't write to {out} (" in done.stderr
    assert "set --out to a folder that can be written" in done.stderr
    assert "run_dir" not in done.stderr


@pytest.mark.usefixtures("nothing_long")
@pytest.mark.parametrize("recipe", ["llm-med-tiny", "byte-spectral-tiny"])
def test_a_folder_that_holds_a_run_is_refused_at_once(recipe: str, text: Path) -> None:
    Path("out", recipe, "checkpoints", "step-00000001").mkdir(parents=True)
    done = demo("--data", text, "--out", "out")
    assert done.exit_code == 1
    assert f"out/{recipe} already holds a run: give another --out" in done.stderr


# What it does -----------------------------------------------------------------------------------------------


def short(config: Config, count: int = 2, leak_check: bool = True, **options: object) -> object:
    """Trains, but for some steps only."""
    assert config.train.resume == "never"
    brief = msgspec.structs.replace(
        config.train, steps=count, max_seconds=0.0, eval_rows=2, batch_size=2, leak_check=leak_check
    )
    return trained(msgspec.structs.replace(config, train=brief), **options)


@pytest.mark.usefixtures("untuned")
def test_it_trains_both_and_shows_what_came_of_it(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bakeoff.apps.cli.demo.train", short)
    monkeypatch.setattr(sys, "argv", ["bin/bakeoff"])
    done = demo("--data", text.relative_to(Path.cwd()), "--out", "my demo")
    assert done.exit_code == 0, done.output
    out = done.stdout
    assert "The contests of one step of llm-med-tiny: none begins after 4 s" in out
    assert "1 contest held in 10 s, preparation included" in out
    assert "3. Training llm-med-tiny on a[/b].txt for 4 s of a processor" in out
    lines = out[out.index("4. What came of it") :].splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["model", "byte-spectral-tiny", "llm-med-tiny"]
    assert "…" not in out
    assert "go on               bin/bakeoff generate 'my demo/llm-med-tiny' --prompt 'class '" in lines
    assert "compare             bin/bakeoff compare" in lines
    assert load_run("my demo/byte-spectral-tiny")[1].recipe == "byte-spectral-tiny"


@pytest.mark.parametrize("blank", [1, 99])
def test_a_sample_is_drawn_again_where_it_is_blank(
    blank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds: list[int] = []

    def drawn(*_: object, seed: int, **__: object) -> list[str]:
        seeds.append(seed)
        return ["  \n" * 100 + "x"] if len(seeds) <= blank else ["some text, " * 27]

    monkeypatch.setattr(demo_module, "continuation", drawn)
    monkeypatch.setattr(demo_module, "load_run", lambda _: (torch.nn.Identity(), None))
    demo_module._sample(Config(recipe="r"), SimpleNamespace(run_dir=Path()), "cpu", Console())
    out = capsys.readouterr().out
    assert seeds == ([0, 1] if blank == 1 else [0, 1, 2, 3, 4])
    assert ("some text" in out) == (blank == 1)
    assert ("hardly more than blanks: give more --seconds" in out) == (blank == 99)


def test_of_poor_samples_the_one_with_most_letters_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = lambda *_, seed, **__: [f"{seed}" * (40 if seed == 2 else 5), "\n \n" * 50]  # noqa: E731
    monkeypatch.setattr(demo_module, "continuation", drawn)
    monkeypatch.setattr(demo_module, "load_run", lambda _: (torch.nn.Identity(), None))
    demo_module._sample(Config(recipe="r"), SimpleNamespace(run_dir=Path()), "cpu", Console())
    assert capsys.readouterr().out.splitlines()[2:] == ["  | def " + "2" * 40]


def test_on_a_processor_time_is_its_own(text: Path, monkeypatch: pytest.MonkeyPatch, untuned: None) -> None:
    """A machine that does other things trains as much, in more time."""
    clocks: list[object] = []

    def noted(config: Config, **options: object) -> object:
        clocks.append(options["clock"])
        return SimpleNamespace(checkpoint=None, stopped="SIGINT", signal="SIGINT")

    monkeypatch.setattr("bakeoff.apps.cli.demo.train", noted)
    demo("--data", text, "--out", "out")
    assert clocks == [time.thread_time]


@pytest.mark.usefixtures("untuned")
def test_an_interruption_says_how_to_go_on(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: Config, **options: object) -> object:
        def clock() -> float:
            ticks.append(0)
            if len(ticks) == 40:
                signal.raise_signal(signal.SIGINT)
            return float(len(ticks))

        ticks: list[int] = []
        return short(config, 1000, leak_check=False, **{**options, "clock": clock})

    monkeypatch.setattr("bakeoff.apps.cli.demo.train", interrupted)
    monkeypatch.setattr(sys, "argv", ["bin/bakeoff"])
    done = demo("--data", text, "--out", "my demo")
    assert done.exit_code == 130, done.output
    hint = "bin/bakeoff train --config 'my demo/llm-med-tiny/config.toml' --resume auto"
    assert done.stdout.splitlines()[-1] == f"to finish this run alone: {hint}"
    assert "byte-spectral-tiny on" not in done.stdout
    made = int(steps(Path("my demo/llm-med-tiny"))[-1].name.removeprefix("step-"))
    words = [*shlex.split(hint)[1:], f"train.steps={made + 1}"]
    again = CliRunner().invoke(main, words)
    assert again.exit_code == 0, again.output
    assert f"{made + 1} steps in" in again.stdout
    assert "text from it: bin/bakeoff generate 'my demo/llm-med-tiny'" in again.stdout


@pytest.mark.usefixtures("untuned")
def test_an_interruption_once_a_run_is_over_ends_the_demo(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = loop.evaluate

    def measured(context: Context) -> float:
        if context.progress.step:
            signal.raise_signal(signal.SIGINT)
        return measure(context)

    monkeypatch.setattr(
        "bakeoff.apps.cli.demo.train", lambda config, **options: short(config, 3, leak_check=False, **options)
    )
    monkeypatch.setattr(loop, "evaluate", measured)
    done = demo("--data", text, "--out", "out")
    assert done.exit_code == 130, done.output
    assert "SIGINT: the run was over at step 3, saved" in done.stdout
    assert "to finish" not in done.stdout
    assert "byte-spectral-tiny on" not in done.stdout


@pytest.mark.usefixtures("untuned")
def test_an_interruption_before_the_first_step_has_no_way_on(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unstarted = SimpleNamespace(checkpoint=None, stopped="SIGTERM", signal="SIGTERM")
    monkeypatch.setattr("bakeoff.apps.cli.demo.train", lambda *_, **__: unstarted)
    done = demo("--data", text, "--out", "out")
    assert done.exit_code == 143
    assert "to finish" not in done.stdout


# How it names itself ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ran", "path", "named"),
    [
        ("here/bin/bakeoff", "here/bin", "bakeoff"),
        ("here/bin/bakeoff", "other", "here/bin/bakeoff"),
        ("here/bin/bakeoff", "", "here/bin/bakeoff"),
        ("a b/bakeoff", "", "'a b/bakeoff'"),
        ("bakeoff", "", "./bakeoff"),
        ("/x/bakeoff", "", "/x/bakeoff"),
        ("/usr/bin/pytest", "", "bakeoff"),
    ],
)
def test_the_program_is_named_as_a_shell_finds_it(
    ran: str, path: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("here/bin", "other"):
        Path(folder).mkdir(parents=True)
        Path(folder, "bakeoff").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / path) if path else "/nowhere")
    monkeypatch.setattr(sys, "argv", [ran])
    assert program() == named


def test_the_module_is_named_with_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/site-packages/bakeoff/__main__.py"])
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("PYTHONPATH", str(Path(bakeoff.__file__).parents[1]))
    words = f"{program()} --version"
    done = subprocess.run(["/bin/sh", "-c", words], capture_output=True, text=True)
    assert done.stdout.startswith("bakeoff, version"), done.stderr
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert program() == f"{Path(sys.executable).name} -m bakeoff"
