"""corpus: python, english, check."""

from typing import Any

import click

from bakeoff.apps.cli.commands.group import Command, Group
from bakeoff.apps.cli.commands.options import FILE, Finite

__all__ = ["corpus"]

_limit = click.option(
    "--limit",
    type=Finite(0, min_open=True),
    help="MiB; a sample of the documents of that size. [default: all]",
)


@click.group(cls=Group)
def corpus() -> None:
    """Build data to train on that others can build, too.

    A corpus is a folder of documents, each once, with a manifest of their digests: the same sources give the
    same corpus on every machine. Train on the folder; with data.whole_files=true (bakeoff compare sets it)
    whole documents are held out, chosen by a hash of their path.

    Examples:
      bakeoff corpus python corpora/python
      bakeoff corpus english corpora/enwik8 --from enwik8.zip
      bakeoff corpus check corpora/python theirs.json
    """


@corpus.command(cls=Command)
@click.argument("out", type=FILE)
@click.option(
    "--from",
    "roots",
    multiple=True,
    metavar="[NAME=]FOLDER",
    help="A folder of sources; may be repeated. [default: the standard library and the installed packages]",
)
@_limit
def python(**values: Any) -> None:
    """Python sources of this machine, as the folder OUT.

    Left out are files that aren't UTF-8 text, are larger than 1 MiB, have lines of more than 1,000 characters
    or of more than 100 on average, and copies of others, white space aside. The manifest names Python's
    version and those of the packages: install these elsewhere, and the same command builds the same corpus.

    Examples:
      bakeoff corpus python corpora/python
      bakeoff corpus python corpora/mine --from ~/projects --from vendored=third_party --limit 64
    """
    from bakeoff.apps.cli.corpora import python

    python(**values)


@corpus.command(cls=Command)
@click.argument("out", type=FILE)
@click.option(
    "--from",
    "source",
    type=FILE,
    required=True,
    metavar="FILE",
    help="A text, or a folder of them; plain or packed as zip, xz, gz or bz2.",
)
@_limit
def english(**values: Any) -> None:
    """English text that you have fetched, as the folder OUT.

    Nothing is fetched here. Good sources: https://mattmahoney.net/dc/enwik8.zip (100 MB of Wikipedia),
    https://mattmahoney.net/dc/enwik9.zip (1 GB), books of https://www.gutenberg.org as plain text. A dump of
    Wikipedia becomes one document a page; books lose Project Gutenberg's licence; any other file is one
    document, and a single long one is cut into pieces of 64 KiB.

    Examples:
      bakeoff corpus english corpora/enwik8 --from enwik8.zip
      bakeoff corpus english corpora/books --from downloads/ --limit 100
    """
    from bakeoff.apps.cli.corpora import english

    english(**values)


@corpus.command(cls=Command)
@click.argument("folder", type=FILE)
@click.argument("manifest", type=FILE, required=False)
def check(**values: Any) -> None:
    """Read every file of the corpus in FOLDER and compare it with its manifest, or with MANIFEST.

    Examples:
      bakeoff corpus check corpora/python
      bakeoff corpus check corpora/python theirs.json
    """
    from bakeoff.apps.cli.corpora import check

    check(**values)
