"""corpus: builds and checks corpora, and says what they hold."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bakeoff.apps import corpus
from bakeoff.apps.cli.terminal import console, print_plain, working
from bakeoff.apps.corpus import Manifest
from bakeoff.apps.tabular import named_values

__all__ = ["check", "english", "python"]


def python(out: Path, roots: Sequence[str], limit: float | None) -> None:
    """Build a corpus of Python sources, and print what it holds."""
    printer = console()
    with working(printer, "reading sources") as status:
        manifest = corpus.python_corpus(out, roots, limit=_bytes(limit), say=status.update)
    _print(printer, out, manifest)


def english(out: Path, source: Path, limit: float | None) -> None:
    """Build a corpus of English text, and print what it holds."""
    printer = console()
    with working(printer, f"reading {source}") as status:
        manifest = corpus.english_corpus(out, source, limit=_bytes(limit), say=status.update)
    _print(printer, out, manifest)


def check(folder: Path, manifest: Path | None) -> None:
    """Compare a corpus with a manifest. Raises CorpusError where they differ."""
    printer = console()
    with working(printer, f"reading {folder}"):
        found = corpus.check(folder, manifest)
    print_plain(printer, f"{folder}: {found.files:,} files as in the manifest, digest {found.digest}")


def _bytes(mebibytes: float | None) -> int | None:
    return None if mebibytes is None else int(mebibytes * 2**20)


def _print(printer: Console, out: Path, manifest: Manifest) -> None:
    aside = manifest.held_out
    rows = [
        ("documents", f"{manifest.files:,} of {manifest.bytes:,} bytes"),
        ("held out", f"{aside['files']:,} of {aside['bytes']:,} bytes, at data.holdout=0.05"),
        ("left out", ", ".join(f"{n:,} {why}" for why, n in manifest.dropped.items()) or "none"),
        ("digest", manifest.digest),
    ]
    printer.print(named_values(rows))
    if aside["bytes"] < 2**20:
        print_plain(printer, "less than 1 MiB is held out: too little to compare models by")
    print_plain(
        printer, f"train on it: bakeoff train llm-med --data {shlex.quote(str(out))} data.whole_files=true"
    )
