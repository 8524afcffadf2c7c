"""The dist lane: a few processes on one machine, joined by gloo.

``ranks(2, body, argument)`` calls ``body(rank, argument)`` in two fresh processes that already form a process
group, and raises the first one's exception here. `body` is a module-level function.
"""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT_S = 60

# Ranks are forked off one process that has imported what takes longest and has started no thread.
multiprocessing.set_forkserver_preload(["torch._dynamo", "bakeoff.apps.train", "bakeoff.parallel", "pytest"])


def _rank(
    rank: int, world: int, meeting: str, cache: str, body: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ["BAKEOFF_CACHE"] = f"{cache}/rank{rank}"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=LIMIT_S),
    )
    try:
        body(rank, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # PyTorch's threads have been seen to abort a process while the interpreter was taken down


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a function on several ranks; each has a table cache of its own."""
    # The process that ranks are forked off imports this checkout, as pytest does, and no installed one.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    forkserver.ensure_running()

    def run(world: int, body: Callable[..., None], *args: Any) -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            arguments = (world, f"{folder}/meeting", folder, body, args)
            mp.start_processes(_rank, arguments, nprocs=world, start_method="forkserver")

    return run
