"""Pages whose tables are written from committed results.

A table goes between the lines ``<!-- KIND: FILE -->`` and ``<!-- end -->``.
"""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import click

__all__ = ["Blocks", "Pictures", "filled", "page_command"]

Blocks = Mapping[str, Callable[[str, Path], str]]
"""By kind, what makes Markdown of (FILE, the folder that FILE lies below)."""
Pictures = Mapping[str, Callable[[str, Path], tuple[str, str]]]
"""By kind, what makes (a path beside the page, an SVG) of them."""


def filled(text: str, root: Path, blocks: Blocks) -> str:
    """`text` with every marked part of these kinds written anew, from files below `root`."""
    return _marked(blocks).sub(lambda match: match[1] + blocks[match[2]](match[3], root) + match[4], text)


def _marked(blocks: Blocks) -> re.Pattern[str]:
    return re.compile(rf"(<!-- ({'|'.join(blocks)}): (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def page_command(module: str, blocks: Blocks, pictures: Pictures = MappingProxyType({})) -> click.Command:
    """``python -m MODULE [--check] PAGE``."""

    @click.command()
    @click.option("--check", is_flag=True, help="Change nothing; exit with 1 when the page is out of date.")
    @click.argument("page", type=click.Path(path_type=Path, exists=True))
    def main(check: bool, page: Path) -> None:
        """Write the results into PAGE, and its pictures beside it."""
        old, root = page.read_text("utf-8"), page.resolve().parent.parent
        files = {page: filled(old, root, blocks)}
        for match in _marked(blocks).finditer(old):
            if match[2] in pictures:
                name, drawn = pictures[match[2]](match[3], root)
                files[page.parent / name] = drawn
        if check:
            stale = any(not file.exists() or file.read_text("utf-8") != new for file, new in files.items())
            sys.exit(f"{page} is out of date: run python -m {module} {page}" if stale else 0)
        for file, new in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(new, "utf-8")

    return main
