"""What suites share that several ranks run together: rank 0 keeps the results of all."""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bakeoff.apps.bench import results
from bakeoff.apps.bench.results import Env, File
from bakeoff.device import synchronize
from bakeoff.parallel import World, joined, own_device

__all__ = ["Together", "together"]

_BLOCKS, _BLOCK_S, _MOST = 5, 0.1, 100


class Together:
    """The ranks of a suite, the device of this one, and the file that rank 0 writes."""

    def __init__(self, world: World, device: str, out: Path, env: Env) -> None:
        self.world, self.device, self.out, self.env = world, torch.device(device), out, env

    def held(self) -> list[dict[str, Any]]:
        """The rows that are there, on every rank."""
        return self.world.decide(lambda: results.open_file(self.out, self.env).rows)

    def keep(self, row: dict[str, Any], same: tuple[str, ...]) -> None:
        """Write a row in the place of the one that is equal in the fields of `same`."""

        def put(file: File) -> None:
            others = [r for r in file.rows if any(r.get(name) != row[name] for name in same)]
            file.rows = [*others, row]

        if self.world.first:
            results.changed(self.out, self.env, put)

    def microseconds(self, call: Callable[[], Any]) -> float:
        """Of a call that all ranks make together: the median over blocks of the slowest rank's mean."""
        call()
        once = self._slowest(call, 1)
        count = max(1, min(_MOST, int(_BLOCK_S / once)))
        return 1e6 * statistics.median(self._slowest(call, count) for _ in range(_BLOCKS))

    def _slowest(self, call: Callable[[], Any], count: int) -> float:
        synchronize(self.device)
        self.world.gather(None)
        start = time.perf_counter()
        for _ in range(count):
            call()
        synchronize(self.device)
        return max(self.world.gather(time.perf_counter() - start)) / count

    def peak_bytes(self, call: Callable[[], Any]) -> int | None:
        """The most memory that a call takes on any rank beyond what is there; None on the CPU."""
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        synchronize(self.device)
        return max(self.world.gather(torch.cuda.max_memory_allocated(self.device) - before))


@contextlib.contextmanager
def together(device: str, out: Path | None, name: str) -> Iterator[Together]:
    """All ranks that torchrun started, or this process alone; results go to results/GPUxRANKS/`name`."""
    device = own_device(device)
    with joined(torch.device(device)) as world:
        env = world.decide(functools.partial(results.environment, device))
        ranks = f"x{world.size}" if world.size > 1 else ""
        yield Together(world, device, out or Path("results", results.slug(device) + ranks, name), env)
