"""Checkpoints: plain files, written beside and renamed, so that a name always means a whole one.

RUN/checkpoints/step-00000123/
  model.safetensors   the weights, whole
  config.toml         the run's configuration
  moments/            the optimizer's state, in the shards of the ranks that saved it
  run.safetensors     random generators of every rank, sums since the last metrics line
  run.json            step, seconds, and other numbers of the run
  manifest.json       step, and size and CRC-32 of each file; what does not match it is torn
RUN/best/             likewise, where `train.keep_best` asks for it
RUN/checkpoints/aside-1-step-00000123/
                      likewise; not of the steps that a run goes on from (`set_aside`, `spare`)

Any number of ranks, in shards or not, opens what any other saved; they share a file system. Nothing here
unpickles anything.
"""

import itertools
import json
import os
import shutil
import tomllib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import safetensors
import safetensors.torch
from torch import Tensor

from bakeoff.apps.train.config import Config, from_saved, to_toml
from bakeoff.apps.train.metrics import log
from bakeoff.errors import BakeoffError
from bakeoff.models import build
from bakeoff.models.byte_spectral import ByteSpectralLM
from bakeoff.models.llm_med import LLMMed
from bakeoff.models.longnet import LongNetLM
from bakeoff.models.titan_mac import TitanMAC
from bakeoff.parallel import ALONE, World

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "SavedProgress",
    "State",
    "best",
    "latest",
    "load",
    "load_run",
    "save",
    "set_aside",
    "spare",
    "steps",
    "tidy",
]

FOLDER = "checkpoints"
_PREFIX = "step-"
_PARTIAL = ".partial-"
_REPLACED = "-before"
_ASIDE = "aside-"
_BEST = "best"
_FILES = ("model.safetensors", "config.toml", "run.safetensors", "run.json")
_MOMENTS = "moments"


class CheckpointError(BakeoffError, RuntimeError):
    """A checkpoint that is missing, torn, or of another model."""


@dataclass(frozen=True)
class State:
    """What a checkpoint holds beside its configuration."""

    numbers: dict[str, Any]
    """Plain values, ``step`` among them; rank 0's are saved."""
    weights: dict[str, Tensor]
    """The whole model, by name; on rank 0."""
    tensors: dict[str, Tensor]
    """Small tensors by name, each rank's own."""
    moments: dict[str, Tensor]
    """The optimizer's state by name, sharded alike on all ranks, or equal on all."""


class SavedProgress(msgspec.Struct, frozen=True):
    """How far a run had come: the numbers that it saves."""

    step: int
    logged_step: int
    elapsed: float
    before: float
    """Held-out bits per byte before the first step."""
    best: float | None = None
    """The least held-out bits per byte so far, with `train.keep_best`; of RUN/best its own."""
    measured: str = ""
    """A digest of the rows that `best` was measured on; "" where an older version saved."""
    data_digest: str = ""
    """Of the bytes trained on; "" where an older version saved."""
    data_modified: int = 0
    """When the newest of their files was modified, in nanoseconds."""


class Checkpoint:
    """A loaded checkpoint: `step`, `config`, `weights`, `numbers`, `tensors` of all ranks."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        weights: dict[str, Tensor],
        numbers: dict[str, Any],
        tensors: dict[str, Tensor],
    ) -> None:
        self.folder, self.config, self.weights = folder, config, weights
        self.numbers, self.tensors = numbers, tensors
        self.step = int(numbers["step"])

    @property
    def run_dir(self) -> Path:
        """The folder of the run that saved it."""
        return self.folder.parent if self.folder.name == _BEST else self.folder.parent.parent

    def model(self, config: Config | None = None) -> LLMMed | ByteSpectralLM | TitanMAC | LongNetLM:
        """The model of `config` (default: the saved one) with the saved weights. Raises CheckpointError where
        they don't fit."""
        built = build((config or self.config).model)
        needed = {name: (own.shape, own.is_floating_point()) for name, own in built.state_dict().items()}
        given = {name: (own.shape, own.is_floating_point()) for name, own in self.weights.items()}
        if needed != given:
            odd = sorted(name for name in {**needed, **given} if needed.get(name) != given.get(name))
            raise CheckpointError(
                f"{self.folder / 'model.safetensors'} holds other weights than the model of its config.toml "
                f"has: see {', '.join(odd[:3])}. Give another checkpoint, or train anew"
            )
        built.load_state_dict(self.weights)
        return built

    def progress(self) -> SavedProgress:
        """The run's numbers. Raises CheckpointError where some are missing."""
        try:
            return msgspec.convert(self.numbers, SavedProgress)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{self.folder / 'run.json'}: {error}. Give another checkpoint") from None

    def read_moments(self, into: dict[str, Tensor], world: World = ALONE) -> None:
        """Fills `into` with the optimizer's state, in whatever shards `into` has. Raises CheckpointError."""
        from bakeoff.apps.train import moments  # torch.distributed.checkpoint takes a while to import

        try:
            moments.read_into(self.folder / _MOMENTS, into, world)
        except (OSError, KeyError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"{self.folder / _MOMENTS} does not fit this model: {error}. Resume with the settings of "
                f"{self.folder / 'config.toml'}"
            ) from error


def save(
    run_dir: Path,
    config: Config,
    state: State,
    *,
    keep: int,
    place: Literal["newest", "spare", "best"] = "newest",
    world: World = ALONE,
) -> Path:
    """Writes a checkpoint of step N = ``state.numbers["step"]``. All ranks must call it.

    The newest is ``run_dir/checkpoints/step-N``, and of such all but the last `keep` are removed. A spare one
    is put aside there, and is not what a run goes on from. The best is ``run_dir/best``.

    Raises OSError, on every rank, when the disk is full or read-only, or `run_dir` is gone; nothing of the
    failed attempt remains, and earlier checkpoints stay.
    """
    from bakeoff.apps.train import moments  # torch.distributed.checkpoint takes a while to import

    parent = run_dir / FOLDER
    newest = parent / f"{_PREFIX}{int(state.numbers['step']):08d}"
    target = {"newest": newest, "spare": spare(newest), "best": run_dir / _BEST}[place]
    partial = parent / f"{_PARTIAL}{target.name}"
    tensors = {name: tensor for own in world.gather(state.tensors) for name, tensor in own.items()}

    def publish() -> None:
        _complete(partial, target, state)
        for old in steps(run_dir)[:-keep] if place == "newest" else ():
            shutil.rmtree(old, ignore_errors=True)

    try:
        _on_first(lambda: _write_files(partial, config, state, tensors), world)
        moments.write(partial / _MOMENTS, state.moments, world)
        _on_first(publish, world)
    except OSError:
        if world.first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _write_files(partial: Path, config: Config, state: State, tensors: dict[str, Tensor]) -> None:
    """Writes what one rank writes alone, into a new folder."""
    partial.parent.parent.stat()  # a run's folder that is gone is not made anew
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed here
    (partial / _MOMENTS).mkdir(parents=True)
    contents = (
        safetensors.torch.save(state.weights),
        to_toml(config).encode(),
        safetensors.torch.save(tensors),
        json.dumps(state.numbers).encode(),
    )
    for name, data in zip(_FILES, contents, strict=True):
        _write(partial / name, data)


def _complete(partial: Path, target: Path, state: State) -> None:
    """Makes the whole checkpoint in `partial` the one called `target`."""
    _write(partial / "manifest.json", json.dumps(_manifest(partial, state.numbers), indent=1).encode())
    _sync_folder(partial / _MOMENTS)
    before = partial.with_name(f"{partial.name}{_REPLACED}")
    if target.exists():  # the same step again, saved when the run was over and went on; or the best so far
        shutil.rmtree(before, ignore_errors=True)
        target.rename(before)
    partial.rename(target)
    _sync_folder(target.parent)
    shutil.rmtree(before, ignore_errors=True)


def tidy(run_dir: Path) -> None:
    """Removes what a process that was killed while it saved has left half written, once a checkpoint that it
    was about to replace has its name back. For the one process that may save in `run_dir`. Raises OSError."""
    parent = run_dir / FOLDER
    for before in parent.glob(f"{_PARTIAL}*{_REPLACED}"):
        name = before.name.removeprefix(_PARTIAL).removesuffix(_REPLACED)
        target = run_dir / _BEST if name == _BEST else parent / name
        if not target.exists():
            before.rename(target)
    for partial in parent.glob(f"{_PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)


def best(run_dir: Path) -> SavedProgress | None:
    """The numbers of RUN/best; None where there is none."""
    try:
        return msgspec.json.decode((run_dir / _BEST / "run.json").read_bytes(), type=SavedProgress)
    except (OSError, msgspec.MsgspecError):
        return None


def _on_first(function: Callable[[], None], world: World) -> None:
    """Runs on rank 0; the others wait, and raise its OSError, too."""
    problem: OSError | None = None
    if world.first:
        try:
            function()
        except OSError as error:
            problem = error
    reason = world.gather((problem.errno, problem.strerror) if problem else None)[0]
    if problem is not None:
        raise problem
    if reason is not None:
        raise OSError(*reason)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _manifest(folder: Path, numbers: dict[str, Any]) -> dict[str, Any]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {
        "schema": 2,
        "step": numbers["step"],
        "files": {
            str(file.relative_to(folder)): {"bytes": file.stat().st_size, "crc32": _crc32(file)}
            for file in files
        },
    }


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def steps(run_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first; not necessarily whole ones."""
    folders = (run_dir / FOLDER).glob(f"{_PREFIX}*")
    return sorted(folder for folder in folders if folder.name.removeprefix(_PREFIX).isdigit())


def set_aside(run_dir: Path, step: int) -> list[Path]:
    """Renames the checkpoints later than `step`, which a run goes on from: they are of another branch, or
    torn, and would count as the newest. Returns their new paths."""
    later = [folder for folder in steps(run_dir) if int(folder.name.removeprefix(_PREFIX)) > step]
    return [folder.rename(spare(folder)) for folder in later]


def spare(folder: Path) -> Path:
    """The path, not taken yet, at which the checkpoint called `folder` stands aside."""
    names = (f"{_ASIDE}{number}-{folder.name}" for number in itertools.count(1))
    return next(path for name in names if not (path := folder.with_name(name)).exists())


def load(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, every byte checked. Raises CheckpointError that says what is wrong."""
    _check(folder)
    try:
        config, notes = from_saved(tomllib.loads((folder / "config.toml").read_bytes().decode()))
        numbers = json.loads((folder / "run.json").read_bytes())
        loaded = Checkpoint(
            folder,
            config,
            safetensors.torch.load_file(folder / "model.safetensors"),
            numbers,
            safetensors.torch.load_file(folder / "run.safetensors"),
        )
    except (safetensors.SafetensorError, OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} was not written by this version of bakeoff: {error}") from None
    if notes:
        log.warning("%s is another version's: %s", folder / "config.toml", "; ".join(notes))
    return loaded


def _check(folder: Path) -> None:
    """Raises CheckpointError unless every file is there and is what the manifest says."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        files = dict(manifest["files"])
        if missing := [name for name in _FILES if name not in files]:
            raise CheckpointError(
                f"{folder} was not written by this version of bakeoff: it has no {', '.join(missing)}"
            )
        for name, expected in files.items():
            path = folder / name
            if path.stat().st_size != expected["bytes"] or _crc32(path) != expected["crc32"]:
                raise CheckpointError(f"{path} is torn: it does not match manifest.json")
    except OSError as error:
        raise CheckpointError(
            f"can't read the checkpoint {folder}: {error.filename or ''} ({error.strerror or error})"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'manifest.json'} is torn: {error}") from None


def latest(path: str | Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run folder, or of a checkpoint folder itself; None where none was
    ever written.

    A torn one is passed over with a warning. Raises CheckpointError when all are torn.
    """
    path = Path(path)
    if (path / "manifest.json").exists():
        try:
            return load(path)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. Give another {_PREFIX}* folder of the run, or the run's own, which stands for its "
                "newest whole one"
            ) from None
    problems = []
    for folder in reversed(steps(path)):
        try:
            return load(folder)
        except CheckpointError as error:
            log.warning("%s; falling back to the checkpoint before it", error)
            problems.append(str(error))
    if problems:
        raise CheckpointError(
            f"no checkpoint of {path} can be used: {'; '.join(problems)}. Give another run, or train anew in "
            "another train.run_dir"
        )
    return None


def load_run(run_dir: str | Path) -> tuple[LLMMed | ByteSpectralLM | TitanMAC | LongNetLM, Config]:
    """The trained model of a run, on the CPU in evaluation mode, and the run's Config.

    `run_dir` is a run's folder (its newest whole checkpoint is taken) or one checkpoint's. Raises
    CheckpointError when there is none.

    >>> model, config = load_run("runs/llm-med-tiny")  # doctest: +SKIP
    """
    newest = latest(run_dir)
    if newest is None:
        raise CheckpointError(f"{run_dir} holds no checkpoint: give the folder that `bakeoff train` printed")
    if not all(bool(weight.isfinite().all()) for weight in newest.weights.values()):
        raise CheckpointError(
            f"{newest.folder / 'model.safetensors'} holds weights that are not finite: training diverged. "
            "Give an earlier checkpoint, or train anew with a lower optim.lr"
        )
    return newest.model().eval(), newest.config
