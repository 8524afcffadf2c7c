"""Decoding with a cache must give what one pass over the same text gives."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bakeoff.causal.checks import CausalityError
from bakeoff.causal.confirm import confirmed
from bakeoff.causal.copies import set_mode, twin
from bakeoff.causal.rounding import Change, Rounding
from bakeoff.causal.subject import Call, Subject

__all__ = ["compare_decode"]


def compare_decode(subject: Subject) -> None:
    """Raises `CausalityError` where what the model generates with its cache differs from one pass over the
    same text."""
    compared = _decoded(subject)
    if compared is None:
        return
    change, rounding = compared
    anywhere = torch.ones_like(change.ratio, dtype=torch.bool)

    def look(other: Subject) -> tuple[float, float]:
        again = _decoded(other, rounding)
        assert again is not None
        size, _, ratio = again[0].worst(anywhere)
        return ratio, size

    size, tolerance, ratio = change.worst(anywhere)
    if ratio > 1 and (note := confirmed(subject, ratio, look)) is not None:
        position = int((change.ratio > 1).any(dim=0).nonzero()[0])
        raise CausalityError(
            f"decoding differs from the whole pass at position {position} (prompt of "
            f"{subject.rows.shape[1] // 2})",
            position=position, ahead=0, size=size, tolerance=tolerance, note=note,
        )  # fmt: skip


def _decoded(subject: Subject, rounding: Rounding | None = None) -> tuple[Change, Rounding] | None:
    """From the whole pass to decoding, measured by `rounding`, by default what is found and given back; None
    without decoding."""
    rows, model = subject.rows, twin(subject.model)
    set_mode(model, training=False)
    half = rows.shape[1] // 2
    prompt, count = rows[:, :half], rows.shape[1] - half
    generate = getattr(model, "generate", None)
    if generate is None or not _generates(generate):
        return None
    pieces: list[Any] = []
    decode = getattr(model, "decode", None)
    if callable(decode):
        model.decode = _recording(decode, pieces)  # type: ignore[assignment]
    subject.same_draws()
    with torch.no_grad():
        text = generate(prompt, count, temperature=0.0)
    if text.shape != rows.shape or not torch.equal(text[:, :half], prompt):
        raise ValueError(
            f"generate(prompt, {count}) returned {tuple(text.shape)}, expected the prompt and {count} "
            f"more tokens, {tuple(rows.shape)}"
        )
    whole, found = subject.settle(text[:, :-1], Call())
    rounding = rounding or found
    # Twice the rounding: other shapes run other kernels, so that every operation rounds differently.
    if pieces and all(isinstance(piece, Tensor) and piece.ndim == 3 for piece in pieces):
        return Change.between(whole, torch.cat(pieces, dim=1).double(), rounding, slack=2.0), rounding
    chosen = text[:, half:, None]
    # The token chosen must be the likeliest, up to the rounding of both: as if its logit had moved up to it.
    late = whole[:, half - 1 :]
    moved = late.scatter(-1, chosen, torch.maximum(late.gather(-1, chosen), late.amax(-1, keepdim=True)))
    return Change.between(
        whole, torch.cat([whole[:, : half - 1], moved], dim=1), rounding, slack=4.0
    ), rounding


def _generates(generate: Callable[..., Any]) -> bool:
    """Whether it is ``generate(prompt, max_new, temperature=0.0)``; others have settings of their own."""
    signature = inspect.signature(generate)
    try:
        signature.bind(None, None, temperature=0.0)
    except TypeError:
        return False
    return "max_new" in signature.parameters


def _recording(decode: Callable[..., Any], pieces: list[Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        pieces.append(decode(*args, **kwargs))
        return pieces[-1]

    return call
