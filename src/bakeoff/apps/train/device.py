"""Where a run computes: its device, its ranks, whether steps can be captured; and running out of memory."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bakeoff.apps.train.config import Config, ConfigError
from bakeoff.apps.train.result import TrainError
from bakeoff.device import on
from bakeoff.graphs import KEEPS_PINNED
from bakeoff.models import longnet
from bakeoff.parallel import World, joined, launched, own_device

__all__ = ["Placement", "memory_errors", "pick_device", "placed"]


@dataclass(frozen=True)
class Placement:
    """Where a run computes."""

    device: torch.device
    world: World
    mode: str
    """How ranks share the work: "none", "ddp" or "fsdp"."""
    no_graph: str
    """Why steps can't be captured as a CUDA graph; empty where they can."""


@contextlib.contextmanager
def placed(config: Config) -> Iterator[Placement]:
    """Joins the ranks that the launcher started, on the configured device. Inside, kernels are deterministic
    where the configuration wants that. Raises ConfigError."""
    device = pick_device(config.train.device)
    with (
        on(device),
        _deterministic(config.train.deterministic),
        joined(device, config.parallel.dead_after_s) as world,
    ):
        mode = spread_mode(config, world.size)
        yield Placement(device, world, mode, why_no_graph(config, device, mode))


def pick_device(name: str) -> torch.device:
    """The device called "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N"; of several ranks, each
    has a GPU of its own. Raises ConfigError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if launched() > 1 and name.startswith("cuda:"):
        raise ConfigError(f"train.device={name!r} can't hold {launched()} ranks: use cuda, one GPU each")
    name = own_device(name)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"train.device={name!r} is no device: use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"train.device={name!r} is not supported: use auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"train.device={name!r}: PyTorch sees {count} CUDA devices here; use auto or cpu")
    return device


def spread_mode(config: Config, ranks: int) -> str:
    """How this many ranks share the work: "none", "ddp" or "fsdp". Raises ConfigError where they can't."""
    mode, train = config.parallel.mode, config.train
    cp = config.parallel.cp
    if ranks % cp:
        raise ConfigError(
            f"parallel.cp={cp} ranks share a row, and {ranks} were launched: launch a multiple of {cp}, such "
            f"as torchrun --nproc-per-node {cp} -m bakeoff train ..."
        )
    if cp > 1 and not isinstance(config.model, longnet.Config):
        raise ConfigError(
            f"parallel.cp={cp} is for longnet: of other models ranks can't share rows; use cp=1"
        )
    if config.seq_len % cp:
        raise ConfigError(
            f"parallel.cp={cp} ranks can't share rows of {config.seq_len} bytes in equal parts: set "
            f"train.seq_len to a multiple of {cp}"
        )
    if ranks == 1:
        return "none"
    if mode == "none":
        raise ConfigError(
            f"parallel.mode='none' is for one process, and {ranks} were launched: use ddp or fsdp"
        )
    parts = train.accumulate * ranks // cp
    if train.batch_size % parts:
        groups = f"{ranks} ranks" if cp == 1 else f"{ranks // cp} groups of {cp} ranks"
        raise ConfigError(
            f"train.batch_size={train.batch_size} can't be shared by {groups} of "
            f"train.accumulate={train.accumulate} parts each: make it a multiple of {parts}"
        )
    return "ddp" if mode == "auto" else mode


def why_no_graph(config: Config, device: torch.device, mode: str = "none") -> str:
    """Why steps can't be captured as a CUDA graph; "" where they can. Raises ConfigError where they must be
    and can't."""
    if config.train.capture == "off":
        return "train.capture is off"
    why = ""
    if device.type != "cuda":
        why = "only a CUDA device has graphs"
    elif mode == "fsdp" and not KEEPS_PINNED:
        why = f"shards of torch {torch.__version__} can't be in a graph, only from 2.11 on"
    elif _muon_is_shared_out(config, mode):
        why = "ranks share out Muon's matrices"
    elif config.parallel.cp > 1:
        why = f"with parallel.cp={config.parallel.cp} ranks exchange parts of rows"
    if why and config.train.capture == "on":
        raise ConfigError(f"train.capture='on' can't be had, {why}: use auto or off")
    return why


def _muon_is_shared_out(config: Config, mode: str) -> bool:
    """Whether each rank orthogonalises some matrices for all: on wish, and always where these are shards."""
    optim = config.optim
    if mode == "fsdp":
        return optim.name == "muon" or (optim.name == "deep-nested" and optim.muon)
    return mode == "ddp" and optim.share


@contextlib.contextmanager
def _deterministic(enabled: bool) -> Iterator[None]:
    """Inside, and if `enabled`, PyTorch takes deterministic kernels only."""
    if not enabled:
        yield
        return
    fills: Any = torch.utils.deterministic  # a module that turns into an object when imported
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    before = torch.are_deterministic_algorithms_enabled(), fills.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    fills.fill_uninitialized_memory = False  # costs a pass over every new tensor
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        fills.fill_uninitialized_memory = before[1]


@contextlib.contextmanager
def memory_errors(where: str, fix: str) -> Iterator[None]:
    """Turns running out of memory, on the GPU or the host, into a TrainError that says where and the fix."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        starved = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        # The CPU's allocator raises a plain RuntimeError.
        if not starved and "can't allocate memory" not in str(error):
            raise
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise TrainError(f"out of memory {where}: {fix}. ({first_line})") from error
