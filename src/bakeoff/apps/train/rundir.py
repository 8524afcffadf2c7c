"""The folder of a run: a new one, or the one of a run to resume."""

import contextlib
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bakeoff.apps.train import checkpoint
from bakeoff.apps.train.checkpoint import Checkpoint, CheckpointError
from bakeoff.apps.train.config import Config, ConfigError, Optim, to_toml, to_tree
from bakeoff.apps.train.lock import RunLock
from bakeoff.apps.train.metrics import log
from bakeoff.parallel import ALONE, World
from bakeoff.paths import expanded, write_whole

__all__ = ["claim", "open_run"]

# A run that resumes with another value of these does not repeat the interrupted one's losses.
_CURVE = {
    "model": ("dropout",),  # the only setting of a model that its weights don't depend on
    "data": ("path", "holdout", "validation", "whole_files"),
    "optim": Optim.__struct_fields__,
    "train": ("steps", "batch_size", "seq_len", "accumulate", "seed", "precision", "compile", "fp8"),
}
# Of [optim], what decides which state the optimizer has.
_OPTIMIZER = ("name", "muon")


def open_run(config: Config, lock: RunLock, world: World = ALONE) -> tuple[Path, Checkpoint | None]:
    """The run's folder, which exists, and the checkpoint to go on from, if any; rank 0 chooses both, once it
    has taken the `lock` on the folder.

    Raises ConfigError for a folder that can't be used, FolderInUse for one that another process trains in,
    CheckpointError for a checkpoint that can't be used.
    """
    loaded: list[Checkpoint | None] = []  # on rank 0

    def choose() -> tuple[Path, Path | None]:
        given = _folder("run_dir", config.train.run_dir) if config.train.run_dir else None
        run_dir = _locked_folder(config, given, lock)
        start = _start(config, given)
        loaded.append(start)
        return run_dir, start.folder if start else None

    run_dir, folder = world.decide(choose)
    if loaded:
        return run_dir, loaded[0]
    return run_dir, checkpoint.load(folder) if folder else None


def claim(config: Config, run_dir: Path, start: Checkpoint | None) -> None:
    """Writes the run's config.toml, and sees to it that no checkpoint is later than `start`. For one process,
    once it is known that there will be steps. Raises ConfigError for a folder that can't be written to."""
    try:
        write_whole(run_dir / "config.toml", to_toml(config).encode())
        later = checkpoint.set_aside(run_dir, start.step) if start else []
    except OSError as error:
        raise _unwritable(run_dir, error) from None
    if start and later:
        paths = ", ".join(map(str, later))
        log.warning("going on from step %d: the checkpoints behind it are now %s", start.step, paths)


def _start(config: Config, given: Path | None) -> Checkpoint | None:
    """The checkpoint to go on from, which fits the configuration."""
    resume = config.train.resume
    if resume == "never":
        if given and checkpoint.steps(given):
            raise ConfigError(
                f"{given} already holds a run: give another train.run_dir, or train.resume=auto to go on"
            )
        return None
    if resume == "auto":
        start = checkpoint.latest(given) if given else None
    else:
        source = _folder("resume", resume)
        start = checkpoint.latest(source)
        if start is None:
            raise CheckpointError(
                f"train.resume={source} holds no checkpoint: give a run's folder, auto or never"
            )
    if start is not None:
        _compare(config, start)
    return start


def _locked_folder(config: Config, given: Path | None, lock: RunLock) -> Path:
    """The run's folder, made where there is none, locked, and rid of what a killed process left half done."""
    try:
        run_dir = given or _fresh(config.recipe)
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.take(run_dir)
        checkpoint.tidy(run_dir)
    except OSError as error:
        raise _unwritable(given or Path("runs"), error) from None
    return run_dir


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"can't write to the run folder {folder} ({error.strerror}): set train.run_dir to a folder that can "
        "be written"
    )


def _folder(key: str, path: str) -> Path:
    try:
        return expanded(path)
    except FileNotFoundError as error:
        raise ConfigError(f"train.{key}={path} can't be used: {error.strerror}") from None


def _fresh(recipe: str) -> Path:
    """Creates a folder that no other run has."""
    name = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    for count in itertools.count(1):
        folder = Path("runs", name if count == 1 else f"{name}-{count}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError  # the count has no end


def _compare(config: Config, start: Checkpoint) -> None:
    """Raises CheckpointError if `start` holds another model or another optimizer's state; warns of settings
    that change the losses."""
    now, then = to_tree(config), to_tree(start.config)
    shape = [key for key in now["model"] if key not in _CURVE["model"]]
    changed = _changes(now["model"], then["model"], "model", shape)
    if changed and now["model"]["kind"] != then["model"]["kind"]:
        changed = _changes(now["model"], then["model"], "model", ["kind"])  # the rest differs with it
    other = "model"
    if not changed:
        changed, other = _changes(now["optim"], then["optim"], "optim", _OPTIMIZER), "optimizer"
    if changed:
        raise CheckpointError(
            f"{start.folder} holds another {other} ({', '.join(changed)}): set these back, or train in "
            "another train.run_dir"
        )
    for section, keys in _CURVE.items():
        changed += _changes(now[section], then[section], section, keys)
    if not config.train.steps:  # the learning rate follows time
        changed += _changes(now["train"], then["train"], "train", ["max_seconds"])
    if changed:
        log.warning("resuming with changed settings, so losses will differ: %s", ", ".join(changed))


def _changes(now: dict[str, Any], then: dict[str, Any], section: str, keys: Sequence[str]) -> list[str]:
    return [
        f"{section}.{key}={now[key]!r}, was {then.get(key)!r}" for key in keys if now[key] != then.get(key)
    ]
