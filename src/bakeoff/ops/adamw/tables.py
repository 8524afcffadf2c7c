"""Where a group's tensors lie, told to the device: pointer tables and chunk maps.

A launch over many tensors reads their addresses from a table in device memory. The host compares addresses on
every call, which reads no data, and when one has changed it writes a new table into pinned memory, from where
a kernel fetches it. Nobody waits, and nothing in flight is overwritten: a slot is used again, on its own
stream, when its last fetch is done. No PyTorch operation takes part, so to whoever watches a step all steps
look alike. What a CUDA graph fetches stays as it is, as often as the graph is replayed: some KB a capture.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["Fetch", "Table", "table_for"]

Fetch = Callable[[int, Tensor], None]
"""Launches a kernel that copies from an address in pinned memory to an int32 device tensor."""

_RESERVE = 1 << 20  # bytes kept for uploads inside CUDA graph capture, at least,
_UPLOADS = 64  # and as many times what a table takes: a graph of that many calls
_MOST_TABLES = 256
_SLOTS = 8
"""Tables that a step may place before the device has fetched the first of them, without an allocation."""

_UNPREPARED = (
    "nothing is prepared for this CUDA graph; take one step with the same tensors outside capture "
    "first, and between captures of many steps"
)


class _Slot:
    """A table in pinned memory and its copy on the device."""

    def __init__(self, pinned: Tensor, placed: Tensor) -> None:
        self.pinned, self.placed = pinned, placed
        self.host, self.address = pinned.numpy(), pinned.data_ptr()
        self.words = placed.view(torch.int32)
        self.fetched = torch.cuda.Event()


def _slots(shape: tuple[int, ...], device: torch.device) -> list[_Slot]:
    """Several at a time: whoever compares two steps must not see one of them allocate."""
    size = math.prod(shape)
    space = (_SLOTS, -(-size // 2) * 2)  # kernels read 16 bytes at a time
    # Not torch.empty(pin_memory=True): a contest replaces fresh memory by its own, which isn't pinned.
    pinned = torch.empty(space, dtype=torch.int64).pin_memory()
    placed = torch.empty(space, dtype=torch.int64, device=device)
    pairs = zip(pinned, placed, strict=True)
    return [_Slot(host[:size].view(shape), there[:size].view(shape)) for host, there in pairs]


class _Reserve:
    """Memory prepared for uploads inside captures: a pinned and a device buffer, used up from the start."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.pinned = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
        self.placed = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.free = slice(0, nbytes)

    def take(self, nbytes: int) -> tuple[Tensor, Tensor]:
        """The next bytes of both buffers, for good."""
        end = self.free.start + nbytes
        if end > self.free.stop:
            raise RuntimeError(_UNPREPARED)
        taken = self.pinned[self.free.start : end], self.placed[self.free.start : end]
        self.free = slice(-(-end // 16) * 16, self.free.stop)  # kernels read 16 bytes at a time
        return taken


_reserves: dict[torch.device, _Reserve] = {}
_captured: list[Tensor] = []
"""What CUDA graphs refer to. A graph doesn't tell when it dies, so these stay: some KB a capture."""


class Table:
    """The addresses of tensors of fixed sizes, cut into chunks of `chunk` elements.

    `chunks` is int32 [count, 2] on the device: for each chunk the tensor's index and the chunk's index in it.
    """

    def __init__(self, sizes: Sequence[int], chunk: int, device: torch.device, fetch: Fetch) -> None:
        self.device, self.fetch = device, fetch
        self.sizes = np.asarray(sizes, dtype=np.int64)
        per_tensor = -(-self.sizes // chunk)
        self.count = int(per_tensor.sum())
        first = np.cumsum(per_tensor) - per_tensor
        chunks = np.empty((self.count, 2), dtype=np.int32)
        chunks[:, 0] = np.repeat(np.arange(len(self.sizes)), per_tensor)
        chunks[:, 1] = np.arange(self.count) - np.repeat(first, per_tensor)
        self.chunks = torch.from_numpy(chunks)
        if device.type == "cuda":
            self.chunks = self.chunks.pin_memory().to(device, non_blocking=True)
        self._users: dict[int, torch.cuda.Stream] = {}
        """Other streams than the one `chunks` was uploaded on, once they are ordered after the upload."""
        self._home = _stream(device)[0]
        self._uploaded = torch.cuda.Event() if device.type == "cuda" else None
        if self._uploaded is not None:
            self._uploaded.record(torch.cuda.current_stream(device))
        self._rows = self.sizes[None]
        """What was placed last."""
        self._addresses: tuple[list[int], ...] = ()
        self._last = -1
        self._slots: dict[tuple[int, int], deque[_Slot]] = {}
        """By the number of rows and the stream; the one whose fetch is the oldest first."""
        self._where: Tensor | None = None

    def rows(self, *addresses: list[int]) -> Tensor:
        """int64 [1 + columns, tensors] on the device: the sizes, then each column's addresses."""
        stream, capturing = _stream(self.device)
        where = self._where
        if where is None or stream != self._last or addresses != self._addresses:
            self._write(addresses)
            where = self._place(self._rows, stream, capturing)
            if not capturing:  # a captured copy has not happened yet
                self._last, self._where = stream, where
                self._prepare(stream, where.nbytes)
            else:
                self._where = None
        if capturing:  # and never write there again
            _captured.extend((where, self.chunks))
            for slots in self._slots.values():
                for slot in [slot for slot in slots if slot.placed is where]:
                    slots.remove(slot)
                    _captured.append(slot.pinned)
        return where

    def _write(self, addresses: tuple[list[int], ...]) -> None:
        """Take up these addresses; most columns are the ones that are there."""
        if len(addresses) != len(self._addresses):
            self._addresses = ()
            self._rows = np.empty((1 + len(addresses), len(self.sizes)), dtype=np.int64)
            self._rows[0] = self.sizes
        for i, column in enumerate(addresses):
            if not self._addresses or column != self._addresses[i]:
                self._rows[1 + i] = column
        self._addresses = addresses

    @property
    def idle(self) -> bool:
        """Whether nothing is being fetched from this table's pinned memory, so that it may be freed."""
        return all(slot.fetched.query() for slots in self._slots.values() for slot in slots)

    def retire(self) -> None:
        """Before the last reference goes: `chunks` must outlive the launches that still read it."""
        for stream in self._users.values():
            self.chunks.record_stream(stream)

    def _place(self, rows: np.ndarray, stream: int, capturing: bool) -> Tensor:
        """`rows` on the device, in order of `stream`."""
        if self.device.type != "cuda":
            return torch.from_numpy(rows.copy())
        if capturing:
            if self.device not in _reserves:
                raise RuntimeError(_UNPREPARED)
            staged, placed = _reserves[self.device].take(rows.nbytes)
            staged.numpy()[:] = rows.view(np.uint8).ravel()
            self.fetch(staged.data_ptr(), placed.view(torch.int32))
            _captured.append(staged)
            return placed.view(torch.int64).view(rows.shape)
        slots = self._slots.setdefault((len(rows), stream), deque())
        if not slots or not slots[0].fetched.query():
            slots.extendleft(_slots(rows.shape, self.device))
        slot = slots.popleft()
        slots.append(slot)
        slot.host[...] = rows
        self.fetch(slot.address, slot.words)
        slot.fetched.record(torch.cuda.current_stream(self.device))
        return slot.placed

    def _prepare(self, stream: int, nbytes: int) -> None:
        """Order `stream` after the upload of `chunks`, and prepare captures."""
        if self._uploaded is None:
            return
        if stream != self._home and stream not in self._users:
            self._users[stream] = torch.cuda.current_stream(self.device)
            self._uploaded.wait(self._users[stream])
        reserve = _reserves.get(self.device)
        needed = max(_RESERVE, _UPLOADS * (nbytes + 15))
        if reserve is None or reserve.free.stop - reserve.free.start < needed:
            _reserves[self.device] = _Reserve(needed, self.device)


def table_for(
    sizes: tuple[int, ...],
    chunk: int,
    device: torch.device,
    known: "OrderedDict[object, Table]",
    fetch: Fetch,
) -> Table:
    """The table for tensors of these sizes from `known`, made when there is none."""
    key = (chunk, device, sizes)
    table = known.get(key)
    if table is None:
        if _stream(device)[1]:
            raise RuntimeError(_UNPREPARED)
        table = known[key] = Table(sizes, chunk, device, fetch)
        oldest = next(iter(known))
        if len(known) > _MOST_TABLES and known[oldest].idle:
            known.pop(oldest).retire()
    return table


def _stream(device: torch.device) -> tuple[int, bool]:
    """The current stream, and whether it is being captured."""
    if device.type != "cuda":
        return 0, False
    return torch._C._cuda_getCurrentRawStream(device.index or 0), torch.cuda.is_current_stream_capturing()
