"""generate: bytes from a trained run, printed as text while they come."""

import codecs
import itertools
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from bakeoff.apps.train import load_run
from bakeoff.device import current_device
from bakeoff.select.choose.policy import untuned

__all__ = ["continuation", "stream"]


_AT_ONCE = 32  # bytes that are read from a CUDA device together: each reading waits for it


def stream(run: Path, prompt: str, max_new: int, device: str, **sampling: Any) -> None:
    """Print `prompt`, or with "-" what standard input holds, and what the run's model makes of it, byte by
    byte; broken UTF-8 becomes U+FFFD."""
    if prompt == "-" and sys.stdin is None:
        raise click.UsageError("--prompt -: standard input is closed; give the text itself, or < FILE")
    given = sys.stdin.buffer.read() if prompt == "-" else _bytes(prompt)
    model, _ = load_run(run)
    model.to(current_device(device))
    decoder = _decoder()
    click.echo(decoder.decode(given), nl=False)
    with untuned():
        for text in continuation(model, given, max_new, decoder, **sampling):
            click.echo(text, nl=False)
    click.echo()


def continuation(
    model: Any,
    prompt: str | bytes,
    max_new: int,
    decoder: codecs.IncrementalDecoder | None = None,
    **sampling: Any,
) -> Iterator[str]:
    """The text of `max_new` bytes after `prompt`, in pieces of whole characters. A `decoder` that has read
    the prompt goes on with the character in which the prompt ends.

    Invalid UTF-8 becomes U+FFFD, and so do control characters, which could change the terminal's state.
    """
    device = next(model.parameters()).device
    given = prompt if isinstance(prompt, bytes) else _bytes(prompt)
    symbols = list(given) or [ord("\n")]  # a model needs something to go on from
    ids = torch.tensor([symbols], dtype=torch.uint8, device=device)
    decoder = decoder or _decoder()
    for value in _read(model.stream(ids, max_new, **sampling), _AT_ONCE if device.type == "cuda" else 1):
        yield _shown(decoder.decode(bytes([value]) if value < 256 else b"\xff"))
    yield decoder.decode(b"", final=True)


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def _read(symbols: Iterator[Tensor], at_once: int) -> Iterator[int]:
    """The values of symbols [1]; the device has the next ones to do while some are read."""
    ahead: Tensor | None = None
    while some := list(itertools.islice(symbols, at_once)):
        if ahead is not None:
            yield from ahead.tolist()
        ahead = torch.cat(some)
    if ahead is not None:
        yield from ahead.tolist()


def _bytes(prompt: str) -> bytes:
    """The bytes of the prompt as they were typed, even if they are not UTF-8."""
    return prompt.encode("utf-8", "surrogateescape")


def _shown(text: str) -> str:
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)
