"""What a causal model's answers must fulfil, and the error that says where one doesn't."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bakeoff.causal.confirm import confirmed
from bakeoff.causal.copies import twin
from bakeoff.causal.edits import ROUNDS, Edits
from bakeoff.causal.subject import Subject, change, mode_name
from bakeoff.errors import BakeoffError

__all__ = ["CausalityError", "check", "compare_decode"]

_SCAN = 64  # passes spent on tracing a leak that was found
_WIDE = 4  # batches of the check's own in a pass over single places, which keeps nothing for a backward


class CausalityError(BakeoffError, AssertionError):
    """An output depends on what it must not see.

    Attributes:
        position: the first position found leaking.
        ahead: how many positions ahead it sees, at least; 0 where the leak is not from the future (another
            row, the targets, a decode that differs from the whole pass).
        size: the largest change of an output that should have stood.
        tolerance: the change that rounding explains.
    """

    def __init__(
        self, message: str, *, position: int, ahead: int, size: float, tolerance: float, note: str = ""
    ) -> None:
        super().__init__(f"{message}: by {size:.3g}, where rounding explains {tolerance:.3g}{note}")
        self.position, self.ahead, self.size, self.tolerance = position, ahead, size, tolerance


def check(subject: Subject, edits: Edits, stage: str, *, each_place: bool) -> None:
    """Raises `CausalityError` where an output sees more than the tokens of its own row up to its own.

    With `each_place` single tokens are changed at one place after the other, too.
    """
    for training in (False, True):
        trial = _Trial(subject, edits, training, stage)
        trial.check_edits()
        trial.check_rows()
        if each_place and not training:
            trial.check_places()
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
            leaking = self._leaking(found, cuts)
            if (note := self._confirmed(found, leaking, edited)) is not None:
                self._blame(edited, cuts, found, note)

    def check_rows(self, row: int = 0) -> None:
        """Outputs of a row stand, whatever the other rows are."""
        others = self.edits.tokens(self.rows.shape)
        others[row] = self.rows[row]
        found = self._change(others)
        leaking = found > self.tolerance
        leaking[:row], leaking[row + 1 :] = False, False
        if (note := self._confirmed(found, leaking, others)) is not None:
            position = int(leaking[row].nonzero()[0])
            message = f"output {position} of a row changes with the other rows of its batch"
            raise self._error(f"{self.when}, {message}", position, 0, found[row].max().item(), note)

    def check_places(self) -> None:
        """Outputs before a place stand, whatever token is there: a leak of one output finds its place."""
        places = self.edits.places()
        passes = math.ceil(len(places) / (_WIDE * len(self.rows)))
        count = math.ceil(len(places) / passes)
        # One shape for all passes, so that they draw and round alike: the last one takes some places again.
        places = torch.cat([places, places[: passes * count - len(places)]])
        rows = self.rows.repeat(math.ceil(count / len(self.rows)), 1)[:count]
        base = self.subject.logits(rows, training=self.training)
        for cuts in places.split(count):
            edited = self.edits.single(rows, cuts)
            found = change(base, self.subject.logits(edited, training=self.training))
            leaking = self._leaking(found, cuts)
            if (note := self._confirmed(found, leaking, edited, rows=rows)) is not None:
                row, position = leaking.nonzero()[0].tolist()
                raise self._sees(position, int(cuts[row]) - position, found[leaking].max().item(), note)

    def check_targets(self) -> None:
        """With targets given, in training mode: logits see neither them nor the future."""
        targets = self.rows.roll(-1, 1)
        base = self.subject.run(self.rows, training=True, targets=targets)
        if base is None:
            return
        others = self.edits.tokens(targets.shape)
        found = change(base, self.subject.logits(self.rows, training=True, targets=others))
        leaking = found > self.tolerance
        if (note := self._confirmed(found, leaking, self.rows, targets, others)) is not None:
            position = int(leaking.any(dim=0).nonzero()[0])
            message = f"{self.when}, logit {position} changes with the targets"
            raise self._error(message, position, 0, found.max().item(), note)
        edited, cuts = self.edits.edited(0)
        found = change(base, self.subject.logits(edited, training=True, targets=targets))
        leaking = self._leaking(found, cuts)
        if (note := self._confirmed(found, leaking, edited, targets, targets)) is not None:
            row, position = leaking.nonzero()[0].tolist()
            ahead = int(cuts[row]) - position
            message = f"{self.when} and given targets, output {position} sees at least {ahead} ahead"
            raise self._error(message, position, ahead, found[leaking].max().item(), note)

    def _change(self, ids: Tensor) -> Tensor:
        return change(self.base, self.subject.logits(ids, training=self.training))

    def _leaking(self, found: Tensor, cuts: Tensor) -> Tensor:
        places = torch.arange(found.shape[1], device=cuts.device)
        return (places < cuts[:, None]) & (found > self.tolerance)

    def _confirmed(
        self,
        found: Tensor,
        leaking: Tensor,
        ids: Tensor,
        targets: Tensor | None = None,
        others: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> str | None:
        """As `confirmed`, of the change where it is `leaking`, from `rows`, by default the trial's, to `ids`
        and, where given, from `targets` to `others`; None where nothing is."""
        if not leaking.any():
            return None

        def look(subject: Subject) -> float:
            before = self.rows if rows is None else rows
            base = subject.logits(before, training=self.training, targets=targets)
            after = subject.logits(ids, training=self.training, targets=others)
            return change(base, after)[leaking].max().item()

        return confirmed(self.subject, found[leaking].max().item(), self.tolerance, look)

    def _error(self, message: str, position: int, ahead: int, size: float, note: str) -> CausalityError:
        return CausalityError(
            message, position=position, ahead=ahead, size=size, tolerance=self.tolerance, note=note
        )

    def _sees(self, position: int, ahead: int, size: float, note: str) -> CausalityError:
        message = f"{self.when}, output {position} sees its future, at least {ahead} ahead, and changes"
        return self._error(message, position, ahead, size, note)

    def _blame(self, edited: Tensor, cuts: Tensor, found: Tensor, note: str) -> None:
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
        raise self._sees(first, ahead, size, note)


def compare_decode(subject: Subject) -> None:
    """Raises `CausalityError` where what the model generates with its cache differs from one pass over the
    same text."""
    compared = _decoded(subject)
    if compared is None:
        return
    found, tolerance = compared

    def look(other: Subject) -> float:
        again = _decoded(other)
        assert again is not None
        return again[0].max().item()

    if (found > tolerance).any():
        note = confirmed(subject, found.max().item(), tolerance, look)
        if note is not None:
            position = int((found > tolerance).any(dim=0).nonzero()[0])
            raise CausalityError(
                f"decoding differs from the whole pass at position {position} (prompt of "
                f"{subject.rows.shape[1] // 2})",
                position=position, ahead=0, size=found.max().item(), tolerance=tolerance, note=note,
            )  # fmt: skip


def _decoded(subject: Subject) -> tuple[Tensor, float] | None:
    """How far decoding is from the whole pass [B, T], and what rounding explains; None without decoding."""
    rows, model = subject.rows, twin(subject.model).eval()
    half = rows.shape[1] // 2
    prompt, count = rows[:, :half], rows.shape[1] - half
    generate = getattr(model, "generate", None)
    if generate is None or not _takes(generate, prompt, count, temperature=0.0):
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
    whole, tolerance = subject.settle(text[:, :-1], training=False)
    tolerance *= 2  # other shapes run other kernels, so that every operation rounds differently
    if pieces and all(isinstance(piece, Tensor) and piece.ndim == 3 for piece in pieces):
        return change(whole, torch.cat(pieces, dim=1).double()), tolerance
    chosen = whole[:, half - 1 :].gather(-1, text[:, half:, None])
    short = (whole[:, half - 1 :].amax(-1, keepdim=True) - chosen)[..., 0] / 2
    return F.pad(short, (half - 1, 0)), tolerance


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
