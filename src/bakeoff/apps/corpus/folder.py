"""A corpus on disk: a folder of documents, one file each, with `.manifest.json`, which says what they are.

The manifest is hidden, so that the folder itself is what a model trains on: `ByteCorpus` skips hidden files.
Equal sources give equal files and an equal digest on every machine. Which files are held out follows from
their paths alone (`bakeoff.apps.train.data.place`), so no list of them has to be kept.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import msgspec

from bakeoff.apps.train.data import files_below, place
from bakeoff.errors import BakeoffError

__all__ = ["HELD_OUT", "CorpusError", "Document", "Entry", "Manifest", "build", "check", "read_manifest"]

HELD_OUT = 0.05
"""The share of files that `Data.holdout` and a plan's validation take by default; a manifest counts them."""
_NAME = ".manifest.json"
_LEAST = 64
"""Shorter documents say nothing."""

Hear = Callable[[str], None]


class CorpusError(BakeoffError, ValueError):
    """A corpus that can't be built or isn't what its manifest says; the message says what to change."""


class Document(NamedTuple):
    """A text for a corpus: its path there, and its bytes or why it is left out."""

    path: PurePosixPath
    content: bytes | None
    dropped: str = ""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A file of a corpus."""

    path: str
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, kw_only=True):
    """What a corpus holds and what it was made of."""

    schema: Literal[1] = 1
    kind: Literal["python", "english"]
    digest: str = ""
    """SHA-256 of the lines "SHA256  PATH" of all files, sorted by path, as sha256sum prints them."""
    bytes: int = 0
    files: int = 0
    held_out: dict[str, int] = {}
    """Files and bytes that are held out at the default share, and as many for validation."""
    settings: dict[str, Any] = {}
    sources: list[dict[str, Any]] = []
    dropped: dict[str, int] = {}
    """How many documents were left out, by reason."""
    entries: list[Entry] = []


def build(
    out: Path, manifest: Manifest, documents: Iterable[Document], limit: int | None, say: Hear
) -> Manifest:
    """Writes `documents` as the folder `out`, each content once, and completes `manifest`.

    Of documents with equal text, white space aside, the first stays. With a `limit` in bytes those stay that
    a hash of their path puts first, a sample of all sources. The folder appears whole or not at all.

    Raises CorpusError where `out` exists, can't be written, or nothing is left.
    """
    out = out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CorpusError(f"{out} exists: give a new folder, or remove it first")
    part = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        part.mkdir(parents=True)
        dropped = _written(part, documents, say)
        entries = [_entry(part, file) for file in files_below(part)]
        if not entries:
            reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "none was found"
            raise CorpusError(f"no document is left ({reasons}): give other sources")
        kept = _within(entries, limit)
        for entry in {*entries} - {*kept}:
            (part / entry.path).unlink()
        if len(kept) < len(entries):
            dropped["beyond the limit"] = len(entries) - len(kept)
        _complete(manifest, kept, dropped)
        (part / _NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        if out.exists():
            out.rmdir()
        part.rename(out)
    except OSError as error:
        raise CorpusError(f"can't write {out} ({error.strerror or error}): give a folder that can") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return manifest


def _written(part: Path, documents: Iterable[Document], say: Hear) -> dict[str, int]:
    """Writes those that stay; returns how many were dropped, by reason."""
    dropped: dict[str, int] = {}
    seen: set[bytes] = set()
    total = count = 0
    for path, content, unfit in documents:
        reason = unfit if content is None else _superfluous(path, content, seen)
        if reason or content is None:
            dropped[reason] = dropped.get(reason, 0) + 1
            continue
        target = part / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise CorpusError(
                f"a document has the path of the folder that {path} lies in: rename one of their files"
            ) from None
        if target.exists():
            raise CorpusError(f"two documents have the path {path}: rename one of their files")
        target.write_bytes(content)
        count, total = count + 1, total + len(content)
        if count % 500 == 0:
            say(f"{count:,} documents, {total / 2**20:,.0f} MiB")
    return dropped


def _superfluous(path: PurePosixPath, content: bytes, seen: set[bytes]) -> str:
    """Why this document adds nothing; "" where it does, and then its text is `seen`."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return "with names that are not UTF-8"
    text = b" ".join(content.split())
    digest = hashlib.sha256(text).digest()
    if len(text) < _LEAST or digest in seen:
        return "copies of others" if digest in seen else f"shorter than {_LEAST} bytes"
    seen.add(digest)
    return ""


def _entry(root: Path, file: Path) -> Entry:
    content = file.read_bytes()
    return Entry(file.relative_to(root).as_posix(), len(content), hashlib.sha256(content).hexdigest())


def _within(entries: list[Entry], limit: int | None) -> list[Entry]:
    """Those that fit into `limit` bytes. The hash of "/" and their path orders them, another one than that
    which holds files out, or a sample would hold out nearly all."""
    if limit is None:
        return entries
    kept, total = [], 0
    for entry in sorted(entries, key=lambda entry: hashlib.sha256(b"/" + entry.path.encode()).digest()):
        if total + entry.bytes <= limit:
            kept.append(entry)
            total += entry.bytes
    if not kept:
        raise CorpusError(f"no document fits into the limit of {limit:,} bytes: raise --limit")
    return sorted(kept, key=lambda entry: entry.path)


def _complete(manifest: Manifest, entries: list[Entry], dropped: dict[str, int]) -> None:
    manifest.entries, manifest.digest = entries, _digest(entries)
    manifest.bytes, manifest.files = sum(entry.bytes for entry in entries), len(entries)
    manifest.dropped = dict(sorted(dropped.items()))
    held = [entry for entry in entries if place(PurePosixPath(entry.path)) < HELD_OUT]
    aside = [entry for entry in entries if HELD_OUT <= place(PurePosixPath(entry.path)) < 2 * HELD_OUT]
    manifest.held_out = {
        "files": len(held), "bytes": sum(entry.bytes for entry in held),
        "validation_files": len(aside), "validation_bytes": sum(entry.bytes for entry in aside),
    }  # fmt: skip


def _digest(entries: Iterable[Entry]) -> str:
    lines = "".join(f"{entry.sha256}  {entry.path}\n" for entry in sorted(entries, key=lambda e: e.path))
    return hashlib.sha256(lines.encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """The manifest of the corpus in the folder `path`, or that file. Raises CorpusError."""
    file = path / _NAME if path.is_dir() else path
    try:
        return msgspec.json.decode(file.read_bytes(), type=Manifest)
    except OSError as error:
        raise CorpusError(
            f"{file} can't be read ({error.strerror or error}): give a folder that bakeoff corpus made"
        ) from None
    except msgspec.MsgspecError as error:
        raise CorpusError(f"{file} is no manifest of this version: {error}") from None


def check(folder: Path, against: Path | None = None) -> Manifest:
    """The manifest of the corpus in `folder`, once every file is known to be what that, or the one at
    `against`, says. Raises CorpusError, which counts and names the differences."""
    manifest = read_manifest(against or folder)
    wanted = {entry.path: entry for entry in manifest.entries}
    found = {entry.path: entry for entry in (_entry(folder, file) for file in files_below(folder))}
    differing = [
        f"{word}: {', '.join(paths[:3])}{', ...' if len(paths) > 3 else ''} ({len(paths)})"
        for word, paths in _differences(wanted, found)
        if paths
    ]
    if differing:
        raise CorpusError(
            f"{folder} is not the corpus {manifest.digest[:12]} of {manifest.files} files: "
            f"{'; '.join(differing)}. Build it again from the sources that its manifest names"
        )
    if _digest(manifest.entries) != manifest.digest:
        raise CorpusError(f"{against or folder}: the manifest's digest is not that of its entries")
    return manifest


def _differences(wanted: dict[str, Entry], found: dict[str, Entry]) -> Iterator[tuple[str, list[str]]]:
    yield "missing", sorted(wanted.keys() - found.keys())
    yield "not in it", sorted(found.keys() - wanted.keys())
    yield "changed", sorted(path for path in wanted.keys() & found.keys() if wanted[path] != found[path])
