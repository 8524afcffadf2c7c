"""Who is still alive: a dead rank ends the job with an error that names it, instead of a hang.

Every rank's thread writes a sign of life into the job's store and reads the others'. A rank whose sign does
not change is dead; one that fails says so there. Collectives that break or never end are explained by that.
"""

import itertools
import os
import re
import sys
import threading
import time
from typing import Any

import torch.distributed as dist

from bakeoff.errors import BakeoffError

__all__ = ["RankError", "Watch"]

_GRACE_S = 5.0  # for a collective to break by itself once a rank is known to be dead
_LINGER_S = 3.0  # for the others to read why the store's host ends
_BECAUSE = "stopped: "
_BROKEN = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out|socket", re.IGNORECASE
)

_watches = itertools.count()


class RankError(BakeoffError, RuntimeError):
    """Another rank of the job died or failed; the message names it."""


class Watch:
    """Signs of life of `size` ranks in `store`; made on all ranks at once, and closed when its rank is done.

    A rank is dead when its sign has not changed for `dead_after_s` seconds. If the main thread is then still
    held by a collective five seconds later, the process ends with the same message, as no exception can.
    """

    def __init__(self, store: Any, rank: int, size: int, dead_after_s: float) -> None:
        self.store, self.rank, self.dead_after_s = _own(store), rank, dead_after_s
        self.others = [other for other in range(size) if other != rank]
        number = next(_watches)  # equal on all ranks, which make them together
        self.key = f"bakeoff/life/{number}/{rank}"
        self.keys = [f"bakeoff/life/{number}/{other}" for other in self.others]
        self.doing = "starting"
        """What the main thread does, for the others to read."""
        self.lost = ""
        """What is known about a dead or failed rank; "" while all is well."""
        self._silent: int | None = None  # the rank that is dead
        self._sign(0)
        dist.barrier()
        self._done = threading.Event()
        self._found = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bakeoff-watch", daemon=True)
        self._thread.start()

    def explain(self, error: BaseException) -> str:
        """What `error` means: "" for one of this rank's own, which the others are told of; else which rank is
        lost. Waits until that is known, at most a little longer than it takes to notice a death."""
        if not (isinstance(error, RuntimeError | dist.DistError) and _BROKEN.search(f"{error}")):
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._leave(f"failed with {text}")
            return ""
        self._found.wait(self.dead_after_s + _GRACE_S)
        self._leave(_BECAUSE + self.lost if self.lost else "stopped, because another rank was lost")
        if self.lost and self.rank == 0 and not _launcher_keeps_store():
            self._linger()
        return self.lost or f"a collective failed, and every rank is alive; {self._doings()}"

    def close(self) -> None:
        """The rank is done; the others are told so."""
        self._leave("left")

    def _leave(self, how: str) -> None:
        if self._done.is_set():
            return
        self._done.set()
        self._thread.join()
        try:
            self.store.set(self.key, how)
        except (dist.DistError, RuntimeError):
            return  # the store went with its host, and with it everybody who could read this

    def _linger(self) -> None:
        """The store ends with this rank: waits until the others have left, or have had time to read why."""
        deadline = time.monotonic() + _LINGER_S
        waiting = True
        while waiting and time.monotonic() < deadline:
            time.sleep(0.05)
            try:
                signs = zip(self.others, self._read(), strict=True)
            except (dist.DistError, RuntimeError):
                return
            waiting = any(sign[:1].isdigit() and rank != self._silent for rank, sign in signs)

    def _sign(self, beat: int) -> None:
        self.store.set(self.key, f"{beat} {self.doing}")

    def _read(self) -> list[str]:
        return [value.decode() for value in self.store.multi_get(self.keys)]

    def _doings(self) -> str:
        try:
            found = self._read()
        except (dist.DistError, RuntimeError):
            return "the store is gone"
        return "; ".join(
            f"rank {rank} was {text.partition(' ')[2] if text[:1].isdigit() else text}"
            for rank, text in zip(self.others, found, strict=True)
        )

    def _run(self) -> None:
        seen: dict[int, tuple[str, float]] = {}
        beat = 0
        while not self._done.wait(min(1.0, self.dead_after_s / 4)):
            beat += 1
            try:
                self._sign(beat)
                signs = self._read()
            except (dist.DistError, RuntimeError) as error:
                host = "the launcher" if _launcher_keeps_store() else "rank 0"
                self._lose(f"{host}, which keeps the job's store, can't be reached ({_first_line(error)})")
                return
            now = time.monotonic()
            for rank, sign in zip(self.others, signs, strict=True):
                if rank not in seen or seen[rank][0] != sign:
                    seen[rank] = sign, now
                if sign.startswith("failed"):
                    self._lose(f"rank {rank} {sign}")
                    return
                if sign.startswith(_BECAUSE):
                    self._lose(sign.removeprefix(_BECAUSE))
                    return
                if sign[:1].isdigit() and now - seen[rank][1] > self.dead_after_s:
                    doing, self._silent = sign.partition(" ")[2], rank
                    self._lose(
                        f"rank {rank} is dead: no sign of life for {self.dead_after_s:g} s, last {doing}"
                    )
                    return

    def _lose(self, text: str) -> None:
        self.lost = text
        self._found.set()
        if not self._done.wait(_GRACE_S):  # the main thread hangs in a collective that will never end
            sys.stderr.write(f"bakeoff: rank {self.rank} ends, too: {lost_text(text)}\n")
            sys.stderr.flush()
            os._exit(1)


def _launcher_keeps_store() -> bool:
    """Whether torchrun does, which outlives the ranks; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _own(store: Any) -> Any:
    """A connection of the watch's own: a main thread that waits for a key would hold up a common one.

    A file has no connections, and counts its users by their number, so it must not be opened again.
    """
    base = store
    while hasattr(base, "underlying_store"):
        base = base.underlying_store
    return store if type(base).__name__ == "FileStore" else store.clone()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def lost_text(text: str) -> str:
    """The message for people: which rank, and what to do."""
    return f"{text}. See that rank's own output, and start the job again: it goes on from its last checkpoint"


def raised(watch: Any, error: BaseException) -> None:
    """Raises `RankError` in place of an error that another rank's loss explains."""
    text = watch.explain(error)
    if text:
        raise RankError(lost_text(text)) from error
