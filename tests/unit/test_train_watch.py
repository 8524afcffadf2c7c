"""The sentinel in a run: a candidate that goes wrong while a model trains is found, named and retired."""

import importlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bakeoff.apps.train import ConfigError, load_run, loop, resolve, setup, train
from bakeoff.apps.train.config import Config, Data, Metrics, Select, Train
from bakeoff.apps.train.step import Stepper
from bakeoff.models.llm_med import Config as ModelConfig
from bakeoff.ops.rms_norm.plain import eager
from bakeoff.select import Candidate, registry, replay
from bakeoff.select.choose import policy
from bakeoff.select.choose.sentinel import _quarantine

home = importlib.import_module("bakeoff.ops.rms_norm")  # bakeoff.ops has the function of that name
calls = 0
right_until = 0


def worn_out(*args: Any) -> Any:
    """As eager for some calls, a percent too large from then on."""
    global calls
    calls += 1
    found = eager(*args)
    if calls <= right_until:
        return found
    return (found[0] * 1.01, found[1]) if isinstance(found, tuple) else found * 1.01


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run of 8 steps whose norms run `worn_out`, watched after every second step."""
    (tmp_path / "text.txt").write_text("".join(f"line {n}: seven lazy dogs\n" for n in range(400)))
    monkeypatch.setenv("BAKEOFF_CACHE", str(tmp_path / "cache"))
    op = replace(
        home.OP,
        candidates=(home.OP.incumbent, Candidate("worn out", worn_out)),
        heuristic=lambda case, regime: "worn out",
    )
    monkeypatch.setattr(home, "OP", op)
    monkeypatch.setitem(registry, "rms_norm", op)
    monkeypatch.setattr(f"{__name__}.calls", 0)
    _quarantine.clear()
    policy.store.forget()
    policy.forget()
    yield Config(
        recipe="test",
        model=ModelConfig(d_model=32, layers=1, heads=2, max_seq_len=32, dropout=0.1),
        data=Data(path=str(tmp_path / "text.txt")),
        train=Train(
            steps=8, batch_size=4, log_every=1, eval_rows=4, checkpoint_every=0, device="cpu",
            leak_check=False, run_dir=str(tmp_path / "run"), sentinel=2,
        ),
        select=Select(tune=False),
        metrics=Metrics(console=True),
    )  # fmt: skip
    _quarantine.clear()
    policy.store.forget()
    policy.forget()


def test_what_goes_wrong_is_named_and_leaves_a_file(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.right_until", 25)
    shown = io.StringIO()
    train(config, console=Console(file=shown, width=400))
    files = [*Path(config.train.run_dir, "reproducers").iterdir()]
    assert files
    assert shown.getvalue().count("worn out is wrong and runs no more") == len(files), (
        "no file is overwritten"
    )
    assert all(file.name in shown.getvalue() and "is wrong" in str(replay(file)) for file in files)


def test_a_right_run_goes_as_it_does_unwatched(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.right_until", 1 << 40)
    quiet = Console(file=io.StringIO())
    train(config, console=quiet)
    watched = load_run(Path(config.train.run_dir))[0].state_dict()
    assert not Path(config.train.run_dir, "reproducers").exists()
    other = resolve(config, None, ["train.sentinel=0", f"train.run_dir={config.train.run_dir}-unwatched"])
    train(other, console=quiet)
    unwatched = load_run(Path(other.train.run_dir))[0].state_dict()
    assert all(torch.equal(value, unwatched[name]) for name, value in watched.items())


def test_what_a_captured_graph_holds_is_captured_anew(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the graph, which a CPU hasn't."""
    captures = []

    class Graph:
        captured, bytes = True, 0

        def __init__(self, step: Any) -> None:
            self.step = step

        def __call__(self, rows: torch.Tensor) -> None:
            self.step(rows)

        def reset(self) -> None:
            """There is nothing to give up."""

    class Captured(Stepper):
        def __call__(self, rows: torch.Tensor, lr: float) -> None:
            if not captures:
                self.capture()
            super().__call__(rows, lr)

        def capture(self) -> None:
            captures.append(calls)
            self.captured = Graph(self._step)  # type: ignore[assignment]

    monkeypatch.setattr(setup, "Stepper", Captured)
    monkeypatch.setattr(loop, "report_graph", lambda context: None)
    monkeypatch.setattr(f"{__name__}.right_until", 25)
    train(config, console=Console(file=io.StringIO()))
    files = [*Path(config.train.run_dir, "reproducers").iterdir()]
    assert len(captures) == 1 + len(files)


def test_compiled_code_can_not_be_watched(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"sentinel can't see calls inside compiled code"):
        resolve(config, None, ["train.compile=true"])


def test_plain_pytorch_is_not_watched(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"sentinel checks nothing"):
        resolve(config, None, ["select.policy=off"])
