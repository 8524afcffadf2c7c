"""What a causal model's answers must fulfil, and the error that says where one doesn't."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from bakeoff.causal.confirm import confirmed
from bakeoff.causal.copies import Parameters
from bakeoff.causal.edits import ROUNDS, Edits
from bakeoff.causal.rounding import Change
from bakeoff.causal.subject import Call, Subject, mode_name
from bakeoff.errors import BakeoffError

__all__ = ["CausalityError", "Trial", "check_targets"]

_SCAN = 64  # passes spent on tracing a leak that was found
_WIDE = 4  # batches of the check's own in a pass over single places, which keeps nothing for a backward


class CausalityError(BakeoffError, AssertionError):
    """An output depends on what it must not see.

    Attributes:
        position: the first position found leaking.
        ahead: how many positions ahead it sees, at least; 0 where the leak is not from the future (another
            row, the targets, an earlier call, a decode that differs from the whole pass).
        size: the change of an output that should have stood, the one furthest beyond its tolerance.
        tolerance: the change of this output that rounding explains.
    """

    def __init__(
        self, message: str, *, position: int, ahead: int, size: float, tolerance: float, note: str = ""
    ) -> None:
        super().__init__(f"{message}: by {size:.3g}, where rounding explains {tolerance:.3g}{note}")
        self.position, self.ahead, self.size, self.tolerance = position, ahead, size, tolerance


class Trial:
    """One mode at one stage: the outputs that should stand, and the change that rounding explains."""

    def __init__(self, subject: Subject, edits: Edits, training: bool, stage: str) -> None:
        self.subject, self.edits, self.rows, self.call = subject, edits, subject.rows, Call(training)
        self.stage = stage
        self.base, self.rounding = subject.settle(self.rows, self.call)

    # Edits of the trial's own rows

    def check_edits(self) -> None:
        """Outputs before the cut stand, whatever comes after it."""
        for number in range(ROUNDS):
            edited, cuts = self.edits.edited(self.rows, number)
            change = self.change(edited)
            if (note := self.confirm(change, self.before(cuts), edited)) is not None:
                self._blame(edited, cuts, change, note)

    def check_rows(self, *, each: bool) -> None:
        """Outputs of a row stand, whatever the other rows are: of the first and the last, or of `each`, where
        the rows kept are chosen by the bits of their numbers, so that every pair is parted once each way."""
        numbers, last = torch.arange(len(self.rows), device=self.rows.device), len(self.rows) - 1
        sets = [numbers == 0, numbers == last]
        if each:
            sets = [numbers >> bit & 1 == value for bit in range(last.bit_length()) for value in (0, 1)]
        for kept in sets:
            others = torch.where(kept[:, None], self.rows, self.edits.tokens(self.rows.shape))
            change, where = self.change(others), kept[:, None].expand(self.rows.shape)
            if (note := self.confirm(change, where, others)) is not None:
                position = int((where & (change.ratio > 1)).any(0).nonzero()[0])
                message = f"output {position} of a row changes with the other rows of its batch"
                raise self.error(message, position, 0, change, where, note)

    def check_places(self, *, few: bool) -> None:
        """Outputs before a place stand, whatever token is there: a leak of one output finds its place."""
        places = self.edits.places(few=few)
        passes = math.ceil(len(places) / ((1 if few else _WIDE) * len(self.rows)))
        count = math.ceil(len(places) / passes)
        # One shape for all passes, so that they draw and round alike: the last one takes some places again.
        places = torch.cat([places, places[: passes * count - len(places)]])
        rows = self.rows.repeat(math.ceil(count / len(self.rows)), 1)[:count]
        base = self.subject.logits(rows, self.call)
        for cuts in places.split(count):
            edited = self.edits.single(rows, cuts)
            self.compare(base, edited, cuts, rows=rows)

    # Comparing and reporting

    def change(self, ids: Tensor, call: Call | None = None) -> Change:
        """From the trial's outputs to those for other `ids`."""
        return Change.between(self.base, self.subject.logits(ids, call or self.call), self.rounding)

    def before(self, cuts: Tensor) -> Tensor:
        """The positions [B, T] before the cut of each row [B]."""
        return torch.arange(self.rows.shape[1], device=cuts.device) < cuts[:, None]

    def compare(
        self,
        base: Tensor,
        edited: Tensor,
        cuts: Tensor,
        *,
        rows: Tensor,
        call: Call | None = None,
        circumstance: str = "",
    ) -> None:
        """Raises where outputs before the `cuts` change from `base`, those for `rows`, with `edited` rows."""
        call = call or self.call
        change = Change.between(base, self.subject.logits(edited, call), self.rounding)
        where = torch.arange(rows.shape[1], device=cuts.device) < cuts[:, None]
        if (note := self.confirm(change, where, edited, rows=rows, call=call)) is not None:
            row, position = (where & (change.ratio > 1)).nonzero()[0].tolist()
            raise self.sees(position, int(cuts[row]) - position, change, where, note, circumstance)

    def confirm(
        self,
        change: Change,
        where: Tensor,
        ids: Tensor,
        *,
        rows: Tensor | None = None,
        call: Call | None = None,
        other: Call | None = None,
    ) -> str | None:
        """As `confirmed`, of the `change` at `where`, from `rows`, by default the trial's, to `ids`, and from
        `call` to the `other`, by default the same; None where nothing changed."""
        leaking = where & (change.ratio > 1)
        if not leaking.any():
            return None
        before, call = self.rows if rows is None else rows, call or self.call

        def look(subject: Subject) -> tuple[float, float]:
            base, after = subject.logits(before, call), subject.logits(ids, other or call)
            size, _, ratio = Change.between(base, after, self.rounding).worst(leaking)
            return ratio, size

        return confirmed(self.subject, change.worst(leaking)[2], look)

    def error(
        self, message: str, position: int, ahead: int, change: Change, where: Tensor, note: str = ""
    ) -> CausalityError:
        """Says when, what, and by how much of the `change` at `where`."""
        size, tolerance, _ = change.worst(where & (change.ratio > 1))
        when = f"in {mode_name(self.call.training)}, {self.stage}"
        return CausalityError(
            f"{when}, {message}", position=position, ahead=ahead, size=size, tolerance=tolerance, note=note
        )

    def sees(
        self, position: int, ahead: int, change: Change, where: Tensor, note: str, circumstance: str = ""
    ) -> CausalityError:
        """Says that an output sees its future, in which `circumstance`."""
        message = f"{circumstance}output {position} sees its future, at least {ahead} ahead, and changes"
        return self.error(message, position, ahead, change, where, note)

    def _blame(self, edited: Tensor, cuts: Tensor, change: Change, note: str) -> None:
        """Raises, after tracing the leak: its first position and how far that position sees."""
        leaking = self.before(cuts) & (change.ratio > 1)
        row = int(leaking.any(dim=1).nonzero()[0])
        places = torch.arange(self.rows.shape[1], device=cuts.device)
        new = torch.where(places < cuts[row], self.edits.tokens(places.shape), edited[row])
        scanned = torch.linspace(1, len(places) - 1, min(_SCAN, len(places) - 1)).long().tolist()
        seen: dict[int, Tensor] = {}
        for cut in sorted({int(cuts[row]), *scanned}):
            tried = self.rows.clone()
            # At the cut that gave it away the very same edit, which may have changed one token only.
            tried[row] = edited[row] if cut == cuts[row] else torch.where(places < cut, tried[row], new)
            seen[cut] = (places < cut) & (self.change(tried).ratio[row] > 1)
        if not any(where.any() for where in seen.values()):  # no, it was another row's edit
            self.check_rows(each=True)
            seen = {int(cuts[row]): leaking[row]}
        first = min(int(where.nonzero()[0]) for where in seen.values() if where.any())
        ahead = max(cut for cut, where in seen.items() if where[first]) - first
        raise self.sees(first, ahead, change, leaking, note)


def check_targets(trial: Trial, *, loss: bool) -> None:
    """With targets given: logits see neither them nor the future, and nor does the `loss`."""
    subject, name = trial.subject, trial.subject.form.targets
    targets = trial.rows.roll(-1, 1)
    given = replace(trial.call, targets=targets)
    base = subject.run(trial.rows, given).logits
    if base is not None:
        other = replace(given, targets=trial.edits.tokens(targets.shape))
        change = Change.between(base, subject.logits(trial.rows, other), trial.rounding)
        where = torch.ones_like(trial.rows, dtype=torch.bool)
        if (note := trial.confirm(change, where, trial.rows, call=given, other=other)) is not None:
            position = int((change.ratio > 1).any(dim=0).nonzero()[0])
            message = f"logit {position} changes with the {name}"
            raise trial.error(message, position, 0, change, where, note)
        edited, cuts = trial.edits.edited(trial.rows, 0)
        trial.compare(base, edited, cuts, rows=trial.rows, call=given, circumstance=f"given {name}, ")
    if loss:
        _check_loss(trial, replace(given, logits=False))


def _check_loss(trial: Trial, given: Call) -> None:
    """The loss of positions before a cut stands, whatever the order of the tokens after it.

    A loss shows no positions; but how it changes with the targets before a cut comes from the outputs there
    alone: l(y) - l(y') is the same for both orders.
    """
    subject, rows, name = trial.subject, trial.rows, trial.subject.form.targets
    cut = max(1, rows.shape[1] // 2)
    assert given.targets is not None
    # Orders alone are changed: a mean may count the tokens or targets of some kind.
    early = torch.cat([given.targets[:, :1], given.targets[:, 1:cut].flip(1), given.targets[:, cut:]], dim=1)
    swapped = torch.cat([rows[:, :cut], rows[:, cut:].flip(1)], dim=1)
    other = replace(given, targets=early)

    def moved(of: Subject, ids: Tensor, parameters: Parameters | None = None) -> tuple[float, float] | None:
        """The loss's change with the early targets, and the loss."""
        one, two = of.run(ids, given, parameters).loss, of.run(ids, other, parameters).loss
        return None if one is None or two is None else (float(one - two), float(one))

    base, found = moved(subject, rows), moved(subject, swapped)
    if base is None or found is None or not math.isfinite(base[0]):
        return
    size = abs(found[0] - base[0])
    tolerance = (subject.step + subject.floor) * (abs(base[1]) + abs(found[1]))
    if size <= tolerance:
        return
    again, shaken = moved(subject, rows), moved(subject, rows, subject.rounded())
    assert again is not None
    assert shaken is not None
    tolerance += 3 * abs(shaken[0] - base[0]) + 4 * abs(again[0] - base[0])
    if size <= tolerance:
        return

    def look(of: Subject) -> tuple[float, float]:
        one, two = moved(of, rows), moved(of, swapped)
        assert one is not None
        assert two is not None
        return abs(one[0] - two[0]) / tolerance, abs(one[0] - two[0])

    if (note := confirmed(subject, size / tolerance, look)) is not None:
        when = f"in {mode_name(given.training)}, {trial.stage}, given {name}"
        message = f"{when}, its loss at positions before {cut} changes with the tokens after"
        raise CausalityError(message, position=cut - 1, ahead=1, size=size, tolerance=tolerance, note=note)
