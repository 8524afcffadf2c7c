"""The optimizer's state on disk, by torch.distributed.checkpoint: saved in whatever shards, read in others.

Its safetensors format is used: nothing is pickled, and every file can be opened by other tools.
"""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from bakeoff.parallel import World

__all__ = ["read_into", "write"]


def write(folder: Path, tensors: dict[str, Tensor], world: World) -> None:
    """Writes every rank's part of `tensors` (DTensors, or equal tensors on all ranks) below `folder`.

    Raises OSError on every rank when one can't write.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with _quiet():
            save(tensors, storage_writer=writer, process_group=world.control, no_dist=world.size == 1)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, OSError):
            raise OSError(cause.errno, f"{cause.strerror} (rank {rank})") from error
        raise cause from error


def read_into(folder: Path, tensors: dict[str, Tensor], world: World) -> None:
    """Fills `tensors` from what `write` left, whatever ranks and shards it was written by.

    Raises KeyError for a tensor that is not there, ValueError for one of another shape.
    """
    try:
        with _quiet():
            reader = HuggingFaceStorageReader(str(folder))
            saved = reader.read_metadata().state_dict_metadata
            for name, tensor in tensors.items():
                entry = saved.get(name)
                if not isinstance(entry, TensorStorageMetadata):
                    raise KeyError(f"no tensor {name}")
                if entry.size != tensor.shape:
                    raise ValueError(f"{name} is {tuple(entry.size)} there, {tuple(tensor.shape)} here")
            load(
                tensors,
                storage_reader=HuggingFaceStorageReader(str(folder)),
                process_group=world.control,
                no_dist=world.size == 1,
            )
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch warns that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
