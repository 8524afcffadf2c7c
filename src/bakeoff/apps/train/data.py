"""Bytes as training data: any file, a folder of files, or the Python standard library's sources.

`ByteCorpus` is the concatenation of files, read where rows need them. `Batches` cuts it into rows. Which
rows a step takes is a pure function of (seed, step): nothing has to be remembered to go on from a step,
and any number of ranks sees the same global batch, each its slice.

Files are read with pread, not mapped into memory: a mapped file that shrinks ends the process with SIGBUS.
"""

import hashlib
import math
import os
import stat
import sysconfig
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePath
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bakeoff import hardware
from bakeoff.apps.train.config import Data
from bakeoff.apps.train.metrics import log
from bakeoff.errors import BakeoffError
from bakeoff.paths import expanded

__all__ = [
    "Batches",
    "ByteCorpus",
    "DataError",
    "Prefetcher",
    "files_below",
    "held_out_rows",
    "open_parts",
    "permute",
    "place",
    "split",
    "stdlib_files",
]

Bytes = npt.NDArray[np.uint8]

DIGEST_PIECES, DIGEST_PIECE = 128, 2**20
OPEN_FILES = 256  # 1024 open files are a usual limit of a process
WATCH_S = 10.0  # between looks at the files' sizes and times of modification
_LONGER = "give a longer data.path or a smaller train.seq_len"
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class DataError(BakeoffError, ValueError):
    """Data that are missing, empty, unreadable or too short; the message names the path and the fix."""


class ByteCorpus:
    """The bytes of `files`, one after the other, with nothing between them.

    Files are opened when first read and at most `OPEN_FILES` stay open. Not for use by two threads at once.
    """

    held: int = 0
    """Bytes of the files at the end that are held out whole; 0 where none are."""
    validating: int = 0
    """Bytes of the whole files before these that settings may be chosen by."""

    def __init__(self, name: str, files: Sequence[Path]) -> None:
        self.name = name
        self.files = []
        self._stamps: list[tuple[int, int]] = []
        """(bytes, time of modification) of each file."""
        for file in files:
            stamp = _stamp(file)
            if stamp[0]:
                self.files.append(file)
                self._stamps.append(stamp)
        if not self.files:
            raise DataError(f"{name} holds no bytes: give data.path a file or folder with text in it")
        self._ends = np.cumsum(np.array([size for size, _ in self._stamps], dtype=np.int64))
        self._open: OrderedDict[int, int] = OrderedDict()
        """File descriptors by the file's place."""
        weakref.finalize(self, _close, self._open)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @classmethod
    def open(cls, path: str | Path, whole: float = 0.0, validation: float = 0.0) -> "ByteCorpus":
        """The corpus at `path`: a file, a folder (regular files in sorted order, hidden ones skipped), or
        "stdlib". Of a folder's files the share `whole`, chosen by a hash of their path, come last, where
        `split` holds them out, and before them the share `validation`. Raises DataError."""
        if not str(path):  # which pathlib takes for the current folder
            raise DataError("data.path is empty: set it to a file or folder, . for this one, or leave it out")
        if str(path) == "stdlib":
            root = Path(sysconfig.get_path("stdlib"))
            return cls("the Python standard library", stdlib_files())._holding(root, whole, validation)
        try:
            root = expanded(path)
            mode = root.stat().st_mode
        except OSError as error:
            raise DataError(
                f"can't read {error.filename}: {error.strerror}. Set data.path to a file or folder"
            ) from None
        if stat.S_ISDIR(mode):
            return cls(str(root), files_below(root))._holding(root, whole, validation)
        if not stat.S_ISREG(mode):
            raise DataError(f"{root} is neither a file nor a folder: set data.path to one")
        return cls(str(root), [root])

    def _holding(self, root: Path, share: float, validation: float) -> "ByteCorpus":
        """The same files, with those last that a hash of their path below `root` puts aside."""
        places = {file: place(file.relative_to(root)) for file in self.files}
        held = [file for file in self.files if places[file] < share]
        if not held or len(held) == len(self.files):
            return self
        aside = [file for file in self.files if share <= places[file] < share + validation]
        rest = [file for file in self.files if places[file] >= share + validation]
        if not rest:
            return self
        corpus = ByteCorpus(self.name, [*rest, *aside, *held])
        starts = [0, *corpus._ends.tolist()]
        corpus.held = starts[-1] - starts[len(rest) + len(aside)]
        corpus.validating = starts[len(rest) + len(aside)] - starts[len(rest)]
        return corpus

    def read(self, start: int, length: int) -> Bytes:
        """`length` bytes from byte `start`, across files. Raises IndexError outside the corpus, DataError
        when a file changed under the run."""
        if start < 0 or length < 0 or start + length > len(self):
            raise IndexError(f"bytes {start} to {start + length} are outside the {len(self)} of {self.name}")
        out = np.empty(length, dtype=np.uint8)
        index = int(np.searchsorted(self._ends, start, side="right"))
        filled = 0
        while filled < length:
            begin = int(self._ends[index - 1]) if index else 0
            offset = start + filled - begin
            piece = min(length - filled, int(self._ends[index]) - begin - offset)
            self._fill(out[filled : filled + piece], index, offset)
            filled += piece
            index += 1
        return out

    def _fill(self, out: Bytes, index: int, offset: int) -> None:
        """The bytes of one file from `offset` on."""
        file, done = self.files[index], 0
        try:
            handle = self._handle(index)
            while done < len(out):
                piece = os.pread(handle, len(out) - done, offset + done)
                if not piece:
                    size = os.fstat(handle).st_size
                    expected = int(self._ends[index]) - (int(self._ends[index - 1]) if index else 0)
                    raise DataError(
                        f"{file} shrank from {expected} to {size} bytes during the run: restore it and resume"
                    )
                out[done : done + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
                done += len(piece)
        except OSError as error:
            raise DataError(f"can't read {file} any more: {error.strerror}. Restore it and resume") from None

    def _handle(self, index: int) -> int:
        handle = self._open.get(index)
        if handle is None:
            handle = self._open[index] = os.open(self.files[index], os.O_RDONLY | os.O_CLOEXEC)
            if len(self._open) > OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
        else:
            self._open.move_to_end(index)
        return handle

    def digest(self) -> str:
        """SHA-256 of the number of bytes and of all of them; of more than 128 MiB only 1 MiB in every 128th
        part is read (`sampled`), so that it takes a fraction of a second, however large the data."""
        total = len(self)
        digest = hashlib.sha256(str(total).encode())
        for start in range(0, total, max(DIGEST_PIECE, math.ceil(total / DIGEST_PIECES))):
            digest.update(self.read(start, min(DIGEST_PIECE, total - start)).data)
        return digest.hexdigest()

    @property
    def sampled(self) -> bool:
        """Whether `digest` leaves bytes out."""
        return len(self) > DIGEST_PIECE * DIGEST_PIECES

    @property
    def modified(self) -> int:
        """When the newest file was modified, in nanoseconds, as of the opening or the last `touched`."""
        return max(time_ns for _, time_ns in self._stamps)

    def touched(self) -> Path | None:
        """The first file that was written or replaced since the corpus was opened or this was last asked;
        open files are opened anew then. Raises DataError for one that is gone."""
        changed = None
        for index, file in enumerate(self.files):
            stamp = _stamp(file)
            if stamp != self._stamps[index]:
                self._stamps[index] = stamp
                changed = changed or file
        if changed is not None:
            _close(self._open)
        return changed


def _close(handles: OrderedDict[int, int]) -> None:
    while handles:
        os.close(handles.popitem()[1])


def place(path: PurePath) -> float:
    """Where a hash of its path puts a file, in [0, 1): below the share held out it is held out."""
    word = hashlib.sha256(path.as_posix().encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(word[:8]) / 2**64


def stdlib_files() -> list[Path]:
    """The Python standard library's ``.py`` files on this machine, in a fixed order, without its tests and
    without installed packages. Raises DataError where only compiled files are installed."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in files_below(root, _SKIPPED) if file.suffix == ".py"]
    if not files:
        raise DataError(f"no Python sources under {root}: set data.path to any file or folder of text")
    return files


def files_below(root: Path, skipped: AbstractSet[str] = frozenset()) -> list[Path]:
    """The regular files below `root`, sorted by path, without hidden ones and folders named in `skipped`.
    Raises DataError for a folder that can't be listed."""

    def refuse(error: OSError) -> None:
        raise DataError(f"can't list {error.filename}: {error.strerror}. Make it readable or move it away")

    files: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(
        (file for file in files if file.is_file()), key=lambda file: file.relative_to(root).as_posix()
    )


def _stamp(file: Path) -> tuple[int, int]:
    """(bytes, time of modification) of a file that can be read."""
    try:
        found = file.stat()
    except OSError as error:
        raise DataError(f"can't read {file}: {error.strerror}. Make it readable or move it away") from None
    if not os.access(file, os.R_OK):
        raise DataError(f"can't read {file}: permission denied. Make it readable (chmod u+r) or move it away")
    return found.st_size, found.st_mtime_ns


def split(
    corpus: ByteCorpus,
    holdout: float,
    seq_len: int,
    fix: str = _LONGER,
    validation: float = 0.0,
) -> tuple[range, range]:
    """(bytes to train on, held-out bytes): the held-out ones are one piece at the end, the corpus's held
    files or else `holdout` of all, but at least one row. With `validation`, a piece of about that share lies
    between the two. Raises DataError, which names `fix`, when a part is shorter than the seq_len + 1 bytes of
    a row."""
    row = seq_len + 1
    total = len(corpus)
    tail = max(corpus.held or int(total * holdout), row)
    aside = max(corpus.validating if corpus.held else int(total * validation), row) if validation else 0
    if total - tail - aside < row:
        smaller = ", or a smaller data.holdout" if total >= (3 if validation else 2) * row else ""
        put_aside = f"{row} to validate and {row} held out" if validation else f"{row} held out"
        raise DataError(
            f"{corpus.name} holds {total} bytes, of which {max(0, total - tail - aside)} are left to train "
            f"on; rows of {seq_len} bytes need at least {row} there and {put_aside}: {fix}{smaller}"
        )
    return range(total - tail - aside), range(total - tail, total)


def open_parts(data: Data, seq_len: int, fix: str = _LONGER) -> tuple[ByteCorpus, range, range]:
    """The corpus that [data] names, the bytes to train on and the held-out ones, as `split` gives them; what
    lies between the two is for validation."""
    corpus = ByteCorpus.open(data.path, data.whole, data.validation)
    return corpus, *split(corpus, data.holdout, seq_len, fix, data.validation)


def held_out_rows(corpus: ByteCorpus, held_out: range, seq_len: int, rows: int) -> Tensor:
    """At most `rows` rows [rows, seq_len + 1] uint8, spread evenly over `held_out`, without overlap."""
    fit = len(held_out) // (seq_len + 1)
    rows = min(rows, fit)
    starts = [held_out.start + (i * fit // rows) * (seq_len + 1) for i in range(rows)]
    return torch.from_numpy(np.stack([corpus.read(start, seq_len + 1) for start in starts]))


class Batches:
    """The training rows of every step.

    The bytes are cut into windows of `seq_len`, at an offset of their own in every pass over the data
    (epoch), and each pass takes every window once in a random order. Row r of step n is window number
    n * batch_size + r of that endless order.
    """

    def __init__(
        self,
        corpus: ByteCorpus,
        span: range,
        *,
        seq_len: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size % world_size:
            raise DataError(
                f"train.batch_size={batch_size} can't be shared by {world_size} ranks: make it a multiple"
            )
        if 0 < hardware.facts("cpu").memory < batch_size * (seq_len + 1):
            raise DataError(
                f"train.batch_size={batch_size} rows of {seq_len + 1} bytes are more than this machine's "
                "memory holds: make it smaller"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}")
        self.corpus, self.span, self.seq_len, self.seed = corpus, span, seq_len, seed
        self.batch_size = batch_size
        share = batch_size // world_size
        self.rows = range(rank * share, (rank + 1) * share)
        # One window less than fits leaves room for the epoch's offset; a row is seq_len + 1 bytes.
        self.windows = max(1, (len(span) - 1) // seq_len - 1)

    def starts(self, step: int) -> list[int]:
        """The first byte of each of this rank's rows at `step`."""
        numbers = [step * self.batch_size + row for row in self.rows]
        return [self._start(*divmod(number, self.windows)) for number in numbers]

    def _start(self, epoch: int, position: int) -> int:
        slack = len(self.span) - 1 - self.windows * self.seq_len
        offset = mix(self.seed, epoch, 0) % (min(slack, self.seq_len - 1) + 1)
        window = permute(position, self.windows, mix(self.seed, epoch, 1))
        return self.span.start + offset + window * self.seq_len

    def batch(self, step: int) -> Tensor:
        """[rows of this rank, seq_len + 1] uint8: inputs and, one further, targets."""
        rows = [self.corpus.read(start, self.seq_len + 1) for start in self.starts(step)]
        return torch.from_numpy(np.stack(rows))


def mix(*words: int) -> int:
    """A 64-bit hash of small integers (the SplitMix64 finaliser, chained; Steele et al. 2014)."""
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


def permute(index: int, count: int, key: int) -> int:
    """Where `index` lands in a random order of ``range(count)``, without writing the order down.

    A four-round Feistel network over the next even power of two, walked until it lands inside.
    """
    half = max(1, (count - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            left, right = right, left ^ (mix(key, turn, right) & mask)
        index = left << half | right
        if index < count:
            return index


class Prefetcher:
    """Reads the next step's rows in a thread while this step runs, into pinned memory for CUDA.

    Now and then the thread looks at the files' sizes and times of modification. Where these changed and the
    bytes no longer have the `digest` they had, `get` raises DataError; with `may_change` it is a warning.
    """

    def __init__(
        self, batches: Batches, device: torch.device, digest: str = "", *, may_change: bool = False
    ) -> None:
        self.batches, self.device = batches, device
        self.digest, self.may_change = digest, may_change
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bakeoff-data")
        self._next: tuple[int, Future[Tensor]] | None = None
        self._watched = time.monotonic()

    def get(self, step: int) -> Tensor:
        """`batches.batch(step)` on the device; starts reading the step after it."""
        if self._next is not None and self._next[0] == step:
            batch = self._next[1].result()
        else:
            batch = self._pool.submit(self._read, step).result()
        self._next = (step + 1, self._pool.submit(self._read, step + 1))
        return batch.to(self.device, non_blocking=True)

    def _read(self, step: int) -> Tensor:
        if self.digest and time.monotonic() - self._watched >= WATCH_S:
            self._watch()
            self._watched = time.monotonic()
        batch = self.batches.batch(step)
        return batch.pin_memory() if self.device.type == "cuda" else batch

    def _watch(self) -> None:
        corpus = self.batches.corpus
        file = corpus.touched()
        if file is None:
            return
        digest = corpus.digest()
        if digest == self.digest:
            if corpus.sampled:
                log.warning("%s was written during the run; the bytes that were compared are equal", file)
            return
        if not self.may_change:
            raise DataError(
                f"{file} changed during the run: restore it and resume from the last checkpoint, or go on "
                "from there with the new data by data.may_change=true"
            )
        log.warning("%s changed during the run, so losses can't be repeated", file)
        self.digest = digest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
