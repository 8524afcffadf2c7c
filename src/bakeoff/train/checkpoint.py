"""Checkpoints: plain files, written beside and renamed, so that a name always means a whole one.

RUN/checkpoints/step-00000123/
  model.safetensors   the weights
  config.toml         the run's configuration
  state.pt            optimizer, step, random generators; loaded with weights_only=True
  manifest.json       step, and size and CRC-32 of each file; what does not match it is torn

Nothing here unpickles objects.
"""

import io
import json
import os
import pickle
import shutil
import tomllib
import zlib
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from bakeoff.errors import BakeoffError
from bakeoff.models.llm_med import LLMMed
from bakeoff.train.config import Config, from_tree, to_toml
from bakeoff.train.metrics import log

__all__ = ["Checkpoint", "CheckpointError", "latest", "load", "load_run", "save", "steps"]

FOLDER = "checkpoints"
_PREFIX = "step-"
_PARTIAL = ".partial-"
_FILES = ("model.safetensors", "config.toml", "state.pt")


class CheckpointError(BakeoffError, RuntimeError):
    """A checkpoint that is missing, torn, or of another model."""


class Checkpoint:
    """A loaded checkpoint: `step`, `config`, `weights` by name, and `state` as it was saved."""

    def __init__(
        self, folder: Path, config: Config, weights: dict[str, Tensor], state: dict[str, Any]
    ) -> None:
        self.folder, self.config, self.weights, self.state = folder, config, weights, state
        self.step: int = state["step"]


def save(run_dir: Path, model: nn.Module, config: Config, state: dict[str, Any], *, keep: int) -> Path:
    """Writes ``run_dir/checkpoints/step-N`` with N = ``state["step"]``, then removes all but the last `keep`.

    `state` holds tensors, numbers, strings, and lists and dictionaries of them. Raises OSError when the disk
    is full or read-only; nothing of the failed attempt remains, and earlier checkpoints stay.
    """
    step = int(state["step"])
    buffer = io.BytesIO()
    torch.save(state, buffer)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    contents = dict(
        zip(
            _FILES,
            (safetensors.torch.save(weights), to_toml(config).encode(), buffer.getvalue()),
            strict=True,
        )
    )
    manifest = {
        "schema": 1,
        "step": step,
        "files": {name: {"bytes": len(data), "crc32": zlib.crc32(data)} for name, data in contents.items()},
    }
    contents["manifest.json"] = json.dumps(manifest, indent=1).encode()

    parent = run_dir / FOLDER
    target = parent / f"{_PREFIX}{step:08d}"
    partial = parent / f"{_PARTIAL}{target.name}"
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed here
        partial.mkdir(parents=True)
        for name, data in contents.items():
            with (partial / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        if target.exists():  # the same step again, after going back to an earlier one
            shutil.rmtree(target)
        partial.rename(target)
        _sync_folder(parent)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in steps(run_dir)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def steps(run_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first; not necessarily whole ones."""
    found = (run_dir / FOLDER).glob(f"{_PREFIX}*")
    return sorted(folder for folder in found if folder.name.removeprefix(_PREFIX).isdigit())


def load(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, every byte checked. Raises CheckpointError that says what is wrong."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        contents = {}
        for name in _FILES:
            data = (folder / name).read_bytes()
            expected = manifest["files"][name]
            if len(data) != expected["bytes"] or zlib.crc32(data) != expected["crc32"]:
                raise CheckpointError(f"{folder / name} is torn: it does not match manifest.json")
            contents[name] = data
    except OSError as error:
        raise CheckpointError(f"can't read the checkpoint {folder}: {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'manifest.json'} is torn: {error}") from None
    try:
        config = from_tree(tomllib.loads(contents["config.toml"].decode()))
        weights = safetensors.torch.load(contents["model.safetensors"])
        state = torch.load(io.BytesIO(contents["state.pt"]), map_location="cpu", weights_only=True)
        return Checkpoint(folder, config, weights, state)
    except (
        safetensors.SafetensorError,
        pickle.UnpicklingError,
        RuntimeError,
        ValueError,
        KeyError,
        TypeError,
    ) as error:
        raise CheckpointError(f"{folder} was not written by this version of bakeoff: {error}") from None


def latest(path: str | Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run folder, or of a checkpoint folder itself; None where none was
    ever written.

    A torn one is passed over with a warning. Raises CheckpointError when all are torn.
    """
    path = Path(path)
    if path.name.startswith(_PREFIX) and (path / "manifest.json").exists():
        return load(path)
    problems = []
    for folder in reversed(steps(path)):
        try:
            return load(folder)
        except CheckpointError as error:
            log.warning("%s; falling back to the checkpoint before it", error)
            problems.append(str(error))
    if problems:
        raise CheckpointError(f"no checkpoint of {path} can be used: {'; '.join(problems)}")
    return None


def load_run(run_dir: str | Path) -> tuple[LLMMed, Config]:
    """The trained model of a run, on the CPU in evaluation mode, and the run's Config.

    `run_dir` is a run's folder (its newest whole checkpoint is taken) or one checkpoint's. Raises
    CheckpointError when there is none.

    >>> model, config = load_run("runs/llm-med-tiny")  # doctest: +SKIP
    """
    found = latest(run_dir)
    if found is None:
        raise CheckpointError(f"{run_dir} holds no checkpoint: give the folder that `bakeoff train` printed")
    model = LLMMed(found.config.model)
    model.load_state_dict(found.weights)
    return model.eval(), found.config
