"""generate: bytes from a trained run, printed as text one by one."""

import codecs
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch

from bakeoff.apps.train import load_run
from bakeoff.device import named_device
from bakeoff.select.choose.policy import untuned

__all__ = ["continuation", "stream"]


def stream(run: Path, prompt: str, max_new: int, device: str, **sampling: Any) -> None:
    """Print `prompt` and what the run's model makes of it, byte by byte; broken UTF-8 becomes U+FFFD."""
    model, _ = load_run(run)
    model.to(named_device(device))
    click.echo(_bytes(prompt).decode("utf-8", "replace"), nl=False)
    with untuned():
        for text in continuation(model, prompt, max_new, **sampling):
            click.echo(text, nl=False)
    click.echo()


def continuation(model: Any, prompt: str, max_new: int, **sampling: Any) -> Iterator[str]:
    """The text of `max_new` bytes after `prompt`, in pieces of whole characters.

    Invalid UTF-8 becomes U+FFFD, and so do control characters, which could change the terminal's state.
    """
    device = next(model.parameters()).device
    symbols = list(_bytes(prompt)) or [ord("\n")]  # a model needs something to go on from
    ids = torch.tensor([symbols], dtype=torch.uint8, device=device)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for symbol in model.stream(ids, max_new, **sampling):
        value = int(symbol)
        yield _shown(decoder.decode(bytes([value]) if value < 256 else b"\xff"))
    yield decoder.decode(b"", final=True)


def _bytes(prompt: str) -> bytes:
    """The bytes of the prompt as they were typed, even if they are not UTF-8."""
    return prompt.encode("utf-8", "surrogateescape")


def _shown(text: str) -> str:
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)
