"""A corpus of English text: documents out of a file or folder that a reader has fetched, packed or not."""

import bz2
import contextlib
import gzip
import hashlib
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from bakeoff.apps.corpus.folder import CorpusError, Document, Manifest, build
from bakeoff.apps.train.data import files_below

__all__ = ["URLS", "english_corpus"]

URLS = {
    "enwik8": "https://mattmahoney.net/dc/enwik8.zip",
    "enwik9": "https://mattmahoney.net/dc/enwik9.zip",
    "Gutenberg": "https://www.gutenberg.org/ebooks/offline_catalogs.html",
}
"""What to fetch by hand: the first 10**8 and 10**9 bytes of English Wikipedia; books."""
_PIECE = 2**16
_PAGE = re.compile(rb"^[ \t]*<page>", re.MULTILINE)
_BOOK = re.compile(
    rb"\*\*\* ?START OF TH[EI]S? PROJECT GUTENBERG EBOOK.*?\*\*\*(.*?)(?:\*\*\* ?END OF|\Z)", re.DOTALL
)
_OPENERS: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
_TEXTS = {".txt", ".xml", ".md", ".rst", ""}

Hear = Callable[[str], None]


def english_corpus(
    out: Path, source: Path, *, limit: int | None = None, say: Hear = lambda line: None
) -> Manifest:
    """The text in `source` as the corpus `out`: one file a document, each text once.

    Args:
        out: a new folder.
        source: a file, or a folder of them: plain text, or packed as zip, xz, gz or bz2. Nothing is fetched;
            `URLS` says what may be. A dump of Wikipedia (enwik8) is cut before each ``<page>``; a book of
            Project Gutenberg loses its licence, which all have; any other file is one document. A single
            document of more than 64 KiB is cut into such pieces, at line ends, as files are held out whole.
        limit: bytes; a sample of so many.
        say: hears how far it is.

    Returns:
        The manifest that was written to ``out/.manifest.json``, with the SHA-256 of `source`'s files.

    Raises:
        CorpusError: `source` that is missing, is a pipe, can't be unpacked or holds no text, or `out` that
            exists.

    Example:
        >>> from bakeoff.apps.corpus import english_corpus
        >>> english_corpus(Path("corpora/enwik8"), Path("enwik8.zip")).files  # doctest: +SKIP
    """
    source = source.expanduser()
    if not source.exists():
        raise CorpusError(
            f"{source} does not exist. Fetch a text by hand, such as {URLS['enwik8']}, and give that file"
        )
    if not (source.is_file() or source.is_dir()):  # a pipe: it can't be read twice
        raise CorpusError(f"{source} is neither a file nor a folder: write its text to a file, and give that")
    files = files_below(source) if source.is_dir() else [source]
    say(f"reading {len(files):,} files")
    manifest = Manifest(
        kind="english",
        settings={"piece": _PIECE, "limit": limit},
        sources=[
            {"name": file.name, "bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files
        ],
    )
    return build(out, manifest, _documents(source, files), limit, say)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _documents(source: Path, files: list[Path]) -> Iterator[Document]:
    root = source if source.is_dir() else source.parent
    single = len(files) == 1 and (files[0].suffix != ".zip" or len(_members(files[0])) == 1)
    for file in files:
        for name, content in _unpacked(file, PurePosixPath(file.relative_to(root).as_posix())):
            if name.suffix not in _TEXTS:
                yield Document(name, None, "not named as text")
                continue
            for path, piece in _cut(name, content, single=single):
                try:
                    piece.decode("utf-8")
                except UnicodeDecodeError:
                    yield Document(path, None, "not UTF-8")
                else:
                    yield Document(path, piece)


@contextlib.contextmanager
def _unpacking(file: Path) -> Iterator[None]:
    """Raises CorpusError for each of the errors that a torn archive causes."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, RuntimeError) as error:
        raise CorpusError(f"{file} can't be unpacked ({error}): fetch it again") from None


def _members(file: Path) -> list[zipfile.ZipInfo]:
    """The files in a zip archive, sorted, without hidden ones."""
    with _unpacking(file), zipfile.ZipFile(file) as archive:
        found = [member for member in archive.infolist() if not member.is_dir()]
    parts = {member.filename: PurePosixPath(member.filename).parts for member in found}
    found = [
        m for m in found if not any(part.startswith((".", "/", "__MACOSX")) for part in parts[m.filename])
    ]
    return sorted(found, key=lambda member: member.filename)


def _unpacked(file: Path, name: PurePosixPath) -> Iterator[tuple[PurePosixPath, bytes]]:
    """(path in the corpus, bytes) of what is in `file`."""
    with _unpacking(file):
        if file.suffix == ".zip":
            members = _members(file)
            with zipfile.ZipFile(file) as archive:
                for member in members:
                    inner = PurePosixPath(member.filename)
                    alone = len(members) == 1
                    yield inner if alone else name.with_suffix("") / inner, archive.read(member)
        elif file.suffix in _OPENERS:
            with _OPENERS[file.suffix](file) as stream:
                yield name.with_suffix(""), stream.read()
        else:
            yield name, file.read_bytes()


def _cut(name: PurePosixPath, content: bytes, *, single: bool) -> Iterator[tuple[PurePosixPath, bytes]]:
    """The documents in a text."""
    starts = [match.start() for match in _PAGE.finditer(content)]
    if starts:
        pieces = [
            content[: starts[0]],
            *(content[a:b] for a, b in zip(starts, [*starts[1:], len(content)], strict=True)),
        ]
    else:
        book = _BOOK.search(content)
        content = book[1].strip() + b"\n" if book else content
        pieces = list(_pieces(content)) if single and len(content) > _PIECE else [content]
    if len(pieces) == 1:
        yield name, pieces[0]
        return
    for number, piece in enumerate(pieces):  # at most 1,000 files a folder
        yield name.with_suffix("") / f"{number // 1000:04}" / f"{number:07}.txt", piece


def _pieces(content: bytes) -> Iterator[bytes]:
    """About 64 KiB each, to the end of a line."""
    start = 0
    while start < len(content):
        end = content.find(b"\n", start + _PIECE) + 1 or len(content)
        yield content[start:end]
        start = end
