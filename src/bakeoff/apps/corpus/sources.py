"""A corpus of Python sources: what is installed on this machine, or other folders of code."""

import importlib.metadata
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from bakeoff.apps.corpus.folder import CorpusError, Document, Manifest, build
from bakeoff.apps.train.data import files_below

__all__ = ["python_corpus", "refused"]

_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "node_modules"}
LARGEST, LONGEST, MEAN = 2**20, 1000, 100
"""Bytes of a file; characters of a line; of a mean line. Beyond these files are data or generated code."""

Hear = Callable[[str], None]


def python_corpus(
    out: Path,
    roots: Sequence[str] = (),
    *,
    limit: int | None = None,
    say: Hear = lambda line: None,
) -> Manifest:
    """The ``.py`` files below `roots` as the corpus `out`, each text once.

    A file keeps its path below its root, below the root's name. Left out are hidden files, files that aren't
    UTF-8 or hold control characters, those of more than 1 MiB, with a line of more than 1,000 characters or a
    mean line of more than 100, and copies of others.

    Args:
        out: a new folder.
        roots: ``[NAME=]FOLDER``; the NAME is the folder's where left out. Without any: "stdlib", Python's
            standard library, and "site-packages", what is installed beside it.
        limit: bytes; a sample of so many.
        say: hears how far it is.

    Returns:
        The manifest that was written to ``out/.manifest.json``; it names the versions of the packages found.

    Raises:
        CorpusError: a root that isn't a folder, two of one name, no file that stays, or `out` that exists.

    Example:
        >>> from bakeoff.apps.corpus import python_corpus
        >>> python_corpus(Path("corpora/python"), ["src=."], limit=2**26).digest  # doctest: +SKIP
    """
    named = _named(roots) if roots else _installed()
    manifest = Manifest(
        kind="python",
        settings={"largest": LARGEST, "longest_line": LONGEST, "mean_line": MEAN, "limit": limit},
        sources=[_source(name, root) for name, root in named.items()],
    )
    return build(out, manifest, _documents(named), limit, say)


def refused(content: bytes) -> str:
    """Why this file isn't text that people write; "" where it is."""
    if len(content) > LARGEST:
        return "larger than 1 MiB"
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"
    if any(character < " " and character not in "\t\n\r\f" for character in set(text)):
        return "with control characters"
    lines = text.splitlines()
    if lines and (max(map(len, lines)) > LONGEST or len(text) > MEAN * len(lines)):
        return "with long lines"
    return ""


def _named(roots: Sequence[str]) -> dict[str, Path]:
    """Folders by the name that their files get."""
    named: dict[str, Path] = {}
    for word in roots:
        name, equals, folder = word.partition("=")
        root = Path(folder if equals else word).expanduser().resolve()
        name = name if equals else root.name
        if not root.is_dir():
            raise CorpusError(f"{root} is no folder: give --from [NAME=]FOLDER")
        if not name or name.startswith(".") or "/" in name:
            raise CorpusError(f"--from {word}: {name!r} can't name a folder; write NAME={root}")
        if name in named:
            raise CorpusError(f"two folders are named {name}: write --from OTHERNAME={root}")
        named[name] = root
    return named


def _installed() -> dict[str, Path]:
    named = {"stdlib": Path(sysconfig.get_path("stdlib"))}
    for key in ("purelib", "platlib"):
        root = Path(sysconfig.get_path(key)).resolve()
        if root.is_dir() and root not in named.values():
            named["site-packages" if key == "purelib" else "site-packages-platform"] = root
    return named


def _source(name: str, root: Path) -> dict[str, Any]:
    """What a reader needs to have the same files; nothing about where they lie here."""
    if name == "stdlib":
        return {"name": name, "python": platform.python_version()}
    found = importlib.metadata.distributions(path=[str(root)])
    versions = {d.metadata["Name"]: d.version for d in found if d.metadata["Name"]}
    return {"name": name, "distributions": dict(sorted(versions.items()))}


def _documents(named: dict[str, Path]) -> Iterator[Document]:
    for name, root in named.items():
        for file in files_below(root, _SKIPPED):
            if file.suffix != ".py":
                continue
            path = PurePosixPath(name, file.relative_to(root).as_posix())
            try:
                content = file.read_bytes() if file.stat().st_size <= LARGEST else bytes(LARGEST + 1)
            except OSError:
                yield Document(path, None, "not readable")
                continue
            reason = refused(content)
            yield Document(path, None if reason else content, reason)
