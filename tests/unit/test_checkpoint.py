"""Checkpoints: whole or absent, newest first, and nothing unpickled."""

import errno
import json
import logging
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn

from bakeoff.apps.train import checkpoint, train
from bakeoff.apps.train.checkpoint import CheckpointError, State, latest, load, load_run, save, steps
from bakeoff.apps.train.config import Config, resolve
from bakeoff.models.llm_med import Config as ModelConfig
from bakeoff.models.llm_med import LLMMed

CONFIG = Config(model=ModelConfig(d_model=16, layers=1, heads=2, max_seq_len=8))


def write(run: Path, step: int, keep: int = 9) -> nn.Module:
    torch.manual_seed(step)
    model = LLMMed(CONFIG.model)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    moments = {f"{name}/exp_avg": tensor * 2 for name, tensor in weights.items()}
    state = State({"step": step, "before": 8.25}, weights, {"window": torch.arange(5.0)}, moments)
    save(run, CONFIG, state, keep=keep)
    return model


def test_round_trip(tmp_path: Path) -> None:
    model = write(tmp_path, 123)
    folder = tmp_path / "checkpoints" / "step-00000123"
    assert sorted(f.name for f in folder.iterdir()) == [
        "config.toml",
        "manifest.json",
        "model.safetensors",
        "moments",
        "run.json",
        "run.safetensors",
    ]
    assert {f.suffix for f in (folder / "moments").iterdir()} == {".safetensors"}
    found = load(folder)
    assert (found.step, found.config) == (123, CONFIG)
    assert found.numbers == {"step": 123, "before": 8.25}
    assert torch.equal(found.tensors["window"], torch.arange(5.0))
    moments = {f"{name}/exp_avg": torch.zeros_like(t) for name, t in model.state_dict().items()}
    found.read_moments(moments)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.weights[name], tensor)
        assert torch.equal(moments[f"{name}/exp_avg"], 2 * tensor)


def changed(run: Path, name: str, change: Callable[[Path], None]) -> Path:
    """The newest checkpoint, one file of which was changed on purpose: the manifest knows of it."""
    folder = steps(run)[-1]
    change(folder / name)
    manifest = json.loads((folder / "manifest.json").read_text())
    data = (folder / name).read_bytes()
    manifest["files"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("how", ["missing", "extra", "shape", "int8"])
def test_weights_of_another_model_are_refused(tmp_path: Path, how: str) -> None:
    def change(path: Path) -> None:
        weights = load_file(path)
        name = min(weights)
        weights |= {
            "missing": {},
            "extra": {"extra": torch.ones(1)},
            "shape": {name: torch.ones(3)},
            "int8": {name: weights[name].to(torch.int8)},
        }[how]
        if how == "missing":
            del weights[name]
        save_file(weights, path)

    write(tmp_path, 1)
    folder = changed(tmp_path, "model.safetensors", change)
    with pytest.raises(CheckpointError, match=r"model.safetensors holds other weights .*: see "):
        load_run(tmp_path)
    with pytest.raises(CheckpointError, match="holds other weights"):
        load(folder).model()


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    def change(path: Path) -> None:
        save_file({name: torch.full_like(t, float("nan")) for name, t in load_file(path).items()}, path)

    write(tmp_path, 1)
    changed(tmp_path, "model.safetensors", change)
    with pytest.raises(CheckpointError, match="not finite: training diverged"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"step": 1}, "logged_step"),
        ({"step": 1, "logged_step": 1, "elapsed": None, "before": 8.0, "data_bytes": 3}, "elapsed"),
    ],
)
def test_numbers_that_a_run_needs(tmp_path: Path, numbers: dict[str, Any], said: str) -> None:
    def change(path: Path) -> None:
        path.write_text(json.dumps(numbers))

    write(tmp_path, 1)
    folder = changed(tmp_path, "run.json", change)
    with pytest.raises(CheckpointError, match=rf"run.json: .*{said}"):
        load(folder).progress()


def test_a_run_goes_on_only_with_all_that_it_saved(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(range(256)) * 40)
    where = [f"data.path={data}", f"train.run_dir={tmp_path / 'run'}", "train.device=cpu"]
    config = resolve(CONFIG, None, [*where, "train.steps=1", "train.batch_size=2", "select.tune=false"])
    console = Console(quiet=True)
    train(config, console=console)
    changed(tmp_path / "run", "run.safetensors", lambda path: save_file({}, path))
    with pytest.raises(CheckpointError, match=r"run.safetensors is of another version: 'window'"):
        train(resolve(config, None, ["train.steps=2"]), console=console)


def test_moments_of_another_model_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 1)
    found = load(steps(tmp_path)[0])
    with pytest.raises(CheckpointError, match=r"does not fit this model: 'no tensor other/exp_avg'"):
        found.read_moments({"other/exp_avg": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"norm.weight/exp_avg is \(16,\) there, \(8,\) here"):
        found.read_moments({"norm.weight/exp_avg": torch.zeros(8)})


def test_a_trained_run_opens_by_run_or_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 1)
    newest = write(tmp_path, 2)
    ids = torch.randint(256, (1, 8))
    model, config = load_run(tmp_path)
    assert config == CONFIG
    assert not model.training
    assert torch.equal(model(ids)[0], newest(ids)[0])
    older, _ = load_run(tmp_path / "checkpoints" / "step-00000001")
    assert not torch.equal(older(ids)[0], newest(ids)[0])
    with pytest.raises(CheckpointError, match="holds no checkpoint: give the folder"):
        load_run(tmp_path / "elsewhere")


def test_the_last_are_kept_and_leftovers_go(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".partial-step-00000003" / "old").mkdir(parents=True)
    for step in (1, 2, 3, 10):
        write(tmp_path, step, keep=2)
    assert [folder.name for folder in steps(tmp_path)] == ["step-00000003", "step-00000010"]
    assert sorted(f.name for f in (tmp_path / "checkpoints").iterdir()) == ["step-00000003", "step-00000010"]
    again = write(tmp_path, 3, keep=2)
    assert torch.equal(load(steps(tmp_path)[0]).weights["embed.weight"], again.state_dict()["embed.weight"])


@pytest.mark.parametrize(
    "name", ["model.safetensors", "moments", "run.safetensors", "run.json", "config.toml", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "empty"])
def test_a_torn_newest_falls_back_to_the_one_before(
    name: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    file = steps(tmp_path)[-1] / name
    if name == "moments":
        (file,) = file.iterdir()
    data = file.read_bytes()
    middle = len(data) // 2
    damaged = {
        "cut": data[:middle],
        "flip": data[:middle] + bytes([data[middle] ^ 0x80]) + data[middle + 1 :],
        "empty": b"",
    }
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(damaged[damage])
    with caplog.at_level(logging.WARNING, logger="bakeoff"):
        found = latest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert "step-00000002" in caplog.text
    assert "falling back" in caplog.text


def test_all_torn_is_an_error_and_none_is_none(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    write(tmp_path, 1)
    (steps(tmp_path)[0] / "run.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint of .*: .*run.json is torn.*train anew"):
        latest(tmp_path)


def test_a_torn_checkpoint_that_is_named_itself_is_not_replaced_but_the_fix_is_named(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    torn = steps(tmp_path)[1]
    (torn / "run.json").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"run.json is torn: .*Give another step-\* folder of the run, or"
    ):
        load_run(torn)
    load_run(steps(tmp_path)[0])
    load_run(tmp_path)


def replace(file: Path, data: bytes) -> None:
    """Writes `data` as if it had been saved so."""
    file.write_bytes(data)
    folder = next(parent for parent in file.parents if (parent / "manifest.json").exists())
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][str(file.relative_to(folder))] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("text", [b"select = 3\n", b"[model]\nd_model = 'x'\n", b"[train\n", b"\xff"])
def test_a_configuration_that_makes_no_sense_is_refused(text: bytes, tmp_path: Path) -> None:
    write(tmp_path, 1)
    folder = steps(tmp_path)[0]
    replace(folder / "config.toml", text)
    with pytest.raises(CheckpointError, match="was not written by this version of bakeoff"):
        load(folder)


def test_a_configuration_of_another_version_is_read_and_its_differences_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    folder = steps(tmp_path)[0]
    text = (folder / "config.toml").read_text()
    assert 'precision = "auto"\n' in text
    text = text.replace('precision = "auto"\n', "").replace("[train]\n", "[train]\nturbo = 3\n")
    text = text.replace("[parallel]", "[flux]")
    replace(folder / "config.toml", text.encode())
    with caplog.at_level(logging.WARNING, logger="bakeoff"):
        assert load(folder).config == CONFIG
    for note in (
        "unknown train.turbo is left out",
        "unknown flux is left out",
        "missing train.precision is 'auto'",
        "missing parallel is all defaults",
    ):
        assert note in caplog.text, note
    caplog.clear()
    write(tmp_path, 2)
    load(steps(tmp_path)[1])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("pwned"),)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "run.safetensors", "run.json", "config.toml", "moments"]
)
def test_a_hostile_pickle_is_refused_and_not_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = write(tmp_path, 1)
    torch.save(Hostile(), tmp_path / "hostile")
    file = steps(tmp_path)[0] / name
    if name == "moments":
        (file,) = file.iterdir()
    replace(file, (tmp_path / "hostile").read_bytes())
    with pytest.raises(CheckpointError, match=r"not written by this version|does not fit this model"):
        load(steps(tmp_path)[0]).read_moments(
            {f"{key}/exp_avg": torch.zeros_like(t) for key, t in model.state_dict().items()}
        )
    assert not Path("pwned").exists()
    torch.load(tmp_path / "hostile", weights_only=False)  # the file would have been harmful
    assert Path("pwned").exists()


@pytest.mark.parametrize("fails_at", ["write", "fsync", "rename", "mkdir"])
def test_a_full_or_read_only_disk_leaves_the_earlier_checkpoint(
    fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if fails_at == "fsync":
        monkeypatch.setattr(checkpoint.os, "fsync", refuse)
    elif fails_at == "write":
        monkeypatch.setattr(Path, "open", refuse)
    else:
        monkeypatch.setattr(Path, fails_at, refuse)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 2)
    monkeypatch.undo()
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    found = latest(tmp_path)
    assert found is not None
    assert found.step == 1


def test_what_a_killed_save_left_is_no_part_of_the_next(tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / ".partial-step-00000002"
    (left / "moments").mkdir(parents=True)
    (left / "moments" / "of-another-world.safetensors").write_bytes(b"torn")
    write(tmp_path, 2)
    (folder,) = steps(tmp_path)
    assert not any("another" in file.name for file in folder.rglob("*"))
    assert load(folder).step == 2


def test_a_checksum_is_of_all_the_bytes_of_a_large_file(tmp_path: Path) -> None:
    file, data = tmp_path / "large", bytes([7]) + bytes(9 << 20)
    file.write_bytes(data)
    assert checkpoint._crc32(file) == zlib.crc32(data)


def test_a_checkpoint_is_on_the_disk_before_its_name_and_then_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut leaves: each file is synchronised before the rename, the folder of names behind it."""
    events: list[int | str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(handle: int) -> None:
        events.append(os.fstat(handle).st_ino)
        fsync(handle)

    def renamed(path: Path, target: Path) -> Path:
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(checkpoint.os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    write(tmp_path, 1)
    (folder,) = steps(tmp_path)
    at = events.index("rename")
    files = {file.name: file.stat().st_ino for file in folder.rglob("*")}
    assert [name for name, inode in files.items() if inode not in events[:at]] == []
    assert folder.parent.stat().st_ino in events[at:]
