"""The same demands in other circumstances: a row alone, other lengths, a later call, float64."""

import copy
from dataclasses import replace

import torch
from torch import Tensor

from bakeoff.causal.checks import Trial
from bakeoff.causal.confirm import FINEST, computes_in_float64, confirmed, exactly
from bakeoff.causal.edits import ROUNDS
from bakeoff.causal.rounding import Change
from bakeoff.causal.subject import Call, Subject
from bakeoff.select.choose.explain import choices

__all__ = ["check_alone", "check_earlier_calls", "check_exactly", "check_lengths"]


def check_alone(trial: Trial) -> None:
    """A row alone, with gradients and without: models have fast paths for it."""
    row = trial.rows[:1]
    for gradients in (False, True):
        call = replace(trial.call, gradients=gradients)
        base = trial.subject.logits(row, call)
        for number in (0, 2, 3) if gradients == call.training else (2,):
            edited, cuts = trial.edits.edited(row, number)
            trial.compare(base, edited, cuts, rows=row, call=call, circumstance="in a batch of one, ")


def check_lengths(trial: Trial, longer: Tensor) -> None:
    """Shorter rows, whole blocks or not, and `longer` ones: the same outputs, which see no future either."""
    length, training = trial.rows.shape[1], trial.call.training
    rows = trial.rows.repeat(2, 1)[:4]
    lengths = {length - 1, length // 2 + 1, length // 2, *(() if training else (length // 3, length // 4, 2))}
    for shorter in sorted((n for n in lengths - {length} if n > 1), reverse=True):
        _check_length(trial, rows[:, :shorter], whole=trial.base.repeat(2, 1, 1)[:4, :shorter])
    if longer.shape[1] > length:
        _check_length(trial, longer.repeat(2, 1), whole=None)


def _check_length(trial: Trial, rows: Tensor, whole: Tensor | None) -> None:
    length, call = rows.shape[1], trial.call
    try:
        base = trial.subject.logits(rows, call)
    except Exception:  # noqa: BLE001 (a length that the model refuses needs no check)
        return
    cuts = torch.tensor([length - 1, length // 2, 3 * length // 4, 1], device=rows.device).clamp(min=1)
    said = f"in rows of {length}, "
    trial.compare(base, trial.edits.suffix(rows, cuts), cuts, rows=rows, circumstance=said)
    if whole is None or call.training:  # draws differ with the length
        return
    change = Change.between(whole, base, trial.rounding, slack=2.0)  # other shapes run other kernels
    where = torch.ones_like(rows, dtype=torch.bool)
    if not (change.ratio > 1).any() or _draws(trial, rows, base):
        return

    def look(subject: Subject) -> tuple[float, float]:
        one = subject.logits(trial.rows, call).repeat(2, 1, 1)[:4, :length]
        size, _, ratio = Change.between(one, subject.logits(rows, call), trial.rounding, slack=2.0).worst(
            change.ratio > 1
        )
        return ratio, size

    note = confirmed(trial.subject, change.worst(where)[2], look, same_shape=False)
    if note is not None:
        position = int((change.ratio > 1).any(dim=0).nonzero()[0])
        message = (
            f"output {position} changes with the length of its row ({trial.rows.shape[1]}, then {length})"
        )
        raise trial.error(message, position, 0, change, where, note)


def _draws(trial: Trial, rows: Tensor, base: Tensor) -> bool:
    """Whether the outputs are made by chance, which gives other lengths other numbers."""
    other = copy.copy(trial.subject)
    other.seed += 1
    return bool((Change.between(base, other.logits(rows, trial.call), trial.rounding).ratio > 1).any())


def check_earlier_calls(trial: Trial) -> None:
    """A second call of the same model sees neither its own future nor the tokens of the first."""
    rows = trial.rows[:2]
    second = Call(earlier=(rows,))
    base = trial.subject.logits(rows, second)
    edited, cuts = trial.edits.edited(rows, 0)
    trial.compare(base, edited, cuts, rows=rows, call=second, circumstance="in a second call, ")
    half = torch.full((len(rows),), rows.shape[1] // 2, device=rows.device).clamp(min=1)
    where = torch.ones_like(rows, dtype=torch.bool)
    for before in (trial.edits.suffix(rows, half), trial.edits.tokens(rows.shape)):
        other = Call(earlier=(before,))
        change = Change.between(base, trial.subject.logits(rows, other), trial.rounding)
        if (note := trial.confirm(change, where, rows, rows=rows, call=second, other=other)) is not None:
            position = int((change.ratio > 1).any(dim=0).nonzero()[0])
            message = f"output {position} changes with the tokens of an earlier call (begin each call afresh)"
            raise trial.error(message, position, 0, change, where, note)


def check_exactly(trial: Trial) -> None:
    """A float64 copy, for leaks below the rounding of float32; where all of it computes in float64."""
    if trial.subject.step > FINEST:
        return
    ran = choices(lambda: trial.subject.logits(trial.rows[:1], trial.call))
    try:
        with exactly(trial.subject, ran) as exact:
            if not computes_in_float64(exact):
                return
            precise = Trial(exact, trial.edits, False, f"{trial.stage}, in float64")
    except Exception:  # noqa: BLE001 (a model may raise anything in another dtype)
        return
    with exactly(trial.subject, ran):
        for number in range(ROUNDS):
            edited, cuts = trial.edits.edited(precise.rows, number)
            precise.compare(precise.base, edited, cuts, rows=precise.rows)
