"""What a causal model's answers must fulfil, and the error that says where one doesn't."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bakeoff.causal.copies import twin
from bakeoff.causal.edits import ROUNDS, Edits
from bakeoff.causal.subject import Subject, change, mode_name
from bakeoff.errors import BakeoffError

__all__ = ["CausalityError", "check", "compare_decode"]

_SCAN = 64  # passes spent on tracing a leak that was found


class CausalityError(BakeoffError, AssertionError):
    """An output depends on what it must not see.

    Attributes:
        position: the first position found leaking.
        ahead: how many positions ahead it sees, at least; 0 where the leak is not from the future (another
            row, the targets, a decode that differs from the whole pass).
        size: the largest change of an output that should have stood.
        tolerance: the change that rounding explains.
    """

    def __init__(self, message: str, *, position: int, ahead: int, size: float, tolerance: float) -> None:
        super().__init__(f"{message}: by {size:.3g}, where rounding explains {tolerance:.3g}")
        self.position, self.ahead, self.size, self.tolerance = position, ahead, size, tolerance


def check(subject: Subject, edits: Edits, stage: str) -> None:
    """Raises `CausalityError` where an output sees more than the tokens of its own row up to its own."""
    for training in (False, True):
        trial = _Trial(subject, edits, training, stage)
        trial.check_edits()
        trial.check_rows()
        if training and "targets" in subject.accepts:
            trial.check_targets()


class _Trial:
    """One mode at one stage: the outputs that should stand, and the change that rounding explains."""

    def __init__(self, subject: Subject, edits: Edits, training: bool, stage: str) -> None:
        self.subject, self.edits, self.rows, self.training = subject, edits, subject.rows, training
        self.when = f"in {mode_name(training)}, {stage}"
        self.base, self.tolerance = subject.settle(self.rows, training=training)

    def check_edits(self) -> None:
        """Outputs before the cut stand, whatever comes after it."""
        for number in range(ROUNDS):
            edited, cuts = self.edits.edited(number)
            found = self._change(edited)
            if self._leaking(found, cuts).any():
                self._blame(edited, cuts, found)

    def check_rows(self, row: int = 0) -> None:
        """Outputs of a row stand, whatever the other rows are."""
        others = self.edits.tokens(self.rows.shape)
        others[row] = self.rows[row]
        found = self._change(others)[row]
        if (found > self.tolerance).any():
            position = int((found > self.tolerance).nonzero()[0])
            message = f"output {position} of a row changes with the other rows of its batch"
            raise self._error(f"{self.when}, {message}", position, 0, found.max().item())

    def check_targets(self) -> None:
        """With targets given, in training mode: logits see neither them nor the future."""
        targets = self.rows.roll(-1, 1)
        base = self.subject.run(self.rows, training=True, targets=targets)
        if base is None:
            return
        others = self.edits.tokens(targets.shape)
        found = change(base, self.subject.logits(self.rows, training=True, targets=others))
        if (found > self.tolerance).any():
            position = int((found > self.tolerance).any(dim=0).nonzero()[0])
            message = f"{self.when}, logit {position} changes with the targets"
            raise self._error(message, position, 0, found.max().item())
        edited, cuts = self.edits.edited(0)
        found = change(base, self.subject.logits(edited, training=True, targets=targets))
        leaking = self._leaking(found, cuts)
        if leaking.any():
            row, position = leaking.nonzero()[0].tolist()
            ahead = int(cuts[row]) - position
            message = f"{self.when} and given targets, output {position} sees at least {ahead} ahead"
            raise self._error(message, position, ahead, found[leaking].max().item())

    def _change(self, ids: Tensor) -> Tensor:
        return change(self.base, self.subject.logits(ids, training=self.training))

    def _leaking(self, found: Tensor, cuts: Tensor) -> Tensor:
        places = torch.arange(found.shape[1], device=cuts.device)
        return (places < cuts[:, None]) & (found > self.tolerance)

    def _error(self, message: str, position: int, ahead: int, size: float) -> CausalityError:
        return CausalityError(message, position=position, ahead=ahead, size=size, tolerance=self.tolerance)

    def _blame(self, edited: Tensor, cuts: Tensor, found: Tensor) -> None:
        """Raises, after tracing the leak: its first position and how far that position sees."""
        leaking = self._leaking(found, cuts)
        row = int(leaking.any(dim=1).nonzero()[0])
        places = torch.arange(found.shape[1], device=cuts.device)
        new = torch.where(places < cuts[row], self.edits.tokens(places.shape), edited[row])
        scanned = torch.linspace(1, len(places) - 1, min(_SCAN, len(places) - 1)).long().tolist()
        seen, size = {}, 0.0
        for cut in sorted({int(cuts[row]), *scanned}):
            tried = self.rows.clone()
            # At the cut that gave it away the very same edit, which may have changed one token only.
            tried[row] = edited[row] if cut == cuts[row] else torch.where(places < cut, tried[row], new)
            after = self._change(tried)[row]
            seen[cut] = (places < cut) & (after > self.tolerance)
            size = max(size, after[:cut].max().item())
        if not any(where.any() for where in seen.values()):  # no, it was another row's edit
            self.check_rows(row)
            seen, size = {int(cuts[row]): leaking[row]}, found[leaking].max().item()
        first = min(int(where.nonzero()[0]) for where in seen.values() if where.any())
        ahead = max(cut for cut, where in seen.items() if where[first]) - first
        message = f"{self.when}, output {first} sees its future, at least {ahead} ahead, and changes"
        raise self._error(message, first, ahead, size)


def compare_decode(subject: Subject) -> None:
    """Raises `CausalityError` where what the model generates with its cache differs from one pass over the
    same text."""
    rows, model = subject.rows, twin(subject.model).eval()
    half = rows.shape[1] // 2
    prompt, count = rows[:, :half], rows.shape[1] - half
    generate = getattr(model, "generate", None)
    if generate is None or not _takes(generate, prompt, count, temperature=0.0):
        return
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
    whole, tolerance = subject.settle(text[:, :-1], training=False)
    tolerance *= 2  # other shapes run other kernels, so that every operation rounds differently
    if pieces and all(isinstance(piece, Tensor) and piece.ndim == 3 for piece in pieces):
        found = change(whole, torch.cat(pieces, dim=1).double())
    else:
        chosen = whole[:, half - 1 :].gather(-1, text[:, half:, None])
        found = F.pad((whole[:, half - 1 :].amax(-1, keepdim=True) - chosen)[..., 0] / 2, (half - 1, 0))
    if (found > tolerance).any():
        position = int((found > tolerance).any(dim=0).nonzero()[0])
        raise CausalityError(
            f"decoding differs from the whole pass at position {position} (prompt of {half})",
            position=position, ahead=0, size=found.max().item(), tolerance=tolerance,
        )  # fmt: skip


def _takes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _recording(decode: Callable[..., Any], pieces: list[Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        pieces.append(decode(*args, **kwargs))
        return pieces[-1]

    return call
