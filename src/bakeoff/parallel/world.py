"""The ranks of a job, as torchrun launched them, and what they tell each other."""

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bakeoff.errors import BakeoffError
from bakeoff.parallel.watch import RankError, Watch, raised

__all__ = ["ALONE", "World", "joined", "launched", "local_rank", "own_device"]

T = TypeVar("T")

# Longer than any rank's compilation or tuning; deaths are noticed by the watch, long before.
_LIMIT = timedelta(minutes=10)


class World:
    """`size` ranks, of which this process is number `rank`; one of them alone needs no process group."""

    def __init__(self, rank: int, size: int, control: Any = None, watch: Watch | None = None) -> None:
        self.rank, self.size, self.control, self.watch = rank, size, control, watch

    @property
    def first(self) -> bool:
        """Whether this rank is the one that writes and prints."""
        return self.rank == 0

    def doing(self, what: str) -> None:
        """Notes what this rank is at, for the message of the others should it die."""
        if self.watch is not None:
            self.watch.doing = what

    def decide(self, function: Callable[[], T]) -> T:
        """What `function` returns on rank 0, on every rank. Its error is raised on every rank, too."""
        if self.size == 1:
            return function()
        sent: list[Any] = [None]
        problem: Exception | None = None
        if self.first:
            try:
                sent = [(function(), None)]
            except Exception as error:  # noqa: BLE001 (raised again below, here and on the others)
                problem, sent = error, [(None, str(error))]
        dist.broadcast_object_list(sent, src=0, group=self.control)
        value, text = sent[0]
        if problem is not None:
            raise problem
        if text is not None:
            raise BakeoffError(f"rank 0: {text}")
        return value  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        """Everybody's value, by rank, on every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.control)
        return found

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over ranks, in place, without waiting for the device."""
        if self.size > 1:
            dist.all_reduce(value)
            value /= self.size
        return value

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def post(self, stop: int, seconds: float) -> "Posted":
        """Sends this rank's wish to stop (not 0) and rank 0's clock; `Posted.read` hears what came of it.

        It is on its way while the host issues a step, by host memory only: no device is waited for.
        """
        if self.size == 1:
            return Posted(stop, seconds)
        values = torch.tensor([float(stop), seconds if self.first else -1.0], dtype=torch.float64)
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self.control, async_op=True)
        return Posted(stop, seconds, values, work)


class Posted:
    """A message on its way."""

    def __init__(
        self, stop: int, seconds: float, values: torch.Tensor | None = None, work: Any = None
    ) -> None:
        self.stop, self.seconds, self.values, self.work = stop, seconds, values, work

    def read(self) -> tuple[int, float]:
        """(the largest wish to stop, rank 0's seconds), equal on all ranks."""
        if self.values is None:
            return self.stop, self.seconds
        self.work.wait()
        stop, seconds = self.values.tolist()
        return int(stop), seconds


ALONE = World(0, 1)


def launched() -> int:
    """How many ranks the launcher started; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Which of this machine's ranks this is."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))


def own_device(name: str) -> str:
    """The GPU of this rank, where `name` is one and the launcher started several ranks."""
    return f"cuda:{local_rank()}" if launched() > 1 and name.startswith("cuda") else name


def _end_at_once() -> None:
    """Ends a process that lost a rank: its GPU may wait for that, and whoever waits for the GPU then, too."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


@contextlib.contextmanager
def joined(device: torch.device, dead_after_s: float = 20.0) -> Iterator[World]:
    """The world that the launcher started (torchrun's environment), or the process group that exists already.

    NCCL carries CUDA tensors, gloo everything else. Inside, the death of a rank raises `RankError` on all
    others, naming it; on GPUs their processes then end with 1, whatever they do until then. The process group
    stays until the process ends: a launcher's meeting place serves once.
    """
    size = launched()
    if size == 1:
        yield ALONE
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        if device.type == "cuda":
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=_LIMIT, device_id=device)
        else:
            dist.init_process_group("gloo", timeout=_LIMIT)
        atexit.register(dist.destroy_process_group)
    store = dist.distributed_c10d._get_default_store()
    control = dist.new_group(backend="gloo", timeout=_LIMIT)
    watch = Watch(store, dist.get_rank(), size, dead_after_s)
    try:
        yield World(dist.get_rank(), size, control, watch)
        watch.doing = "leaving"
        dist.barrier(control)  # nobody takes the store away while others still need it
    except BaseException as error:
        # Taking down a group that lost a rank may wait for that rank.
        atexit.unregister(dist.destroy_process_group)
        try:
            raised(watch, error)
        except RankError:
            if device.type == "cuda":
                atexit.register(_end_at_once)
            raise
        raise
    finally:
        watch.close()
