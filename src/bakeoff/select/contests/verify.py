"""Verification: a candidate's outputs and every gradient against the reference in float64.

There are no hand-tuned tolerances. The yardstick is the eager candidate's own error in the same dtype:
a candidate passes while its error is at most twice that, plus the rounding of one store and, where a gradient
is a long sum, that of a float32 sum in another order. Eager may have been lucky with a draw, on which its few
roundings cancel: before a candidate is called inaccurate, eager's errors are taken from further draws, too,
which differ from this one in the last bits alone.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch

from bakeoff.errors import ContestError
from bakeoff.select.contests.copies import Copies, Rejected, tensors_in
from bakeoff.select.contests.draw import DRAWS, cotangent, inputs, nudged
from bakeoff.select.contests.exact import each, exact_results
from bakeoff.select.contests.poison import Poison, fenced, unchanged
from bakeoff.select.contests.results import outputs_of, results, wants_grad
from bakeoff.select.declare.candidate import Candidate
from bakeoff.select.declare.case import Case
from bakeoff.select.declare.key import list_text
from bakeoff.select.declare.lists import ListMeta
from bakeoff.select.declare.op import Op

__all__ = [
    "Errors",
    "Inaccurate",
    "Rejected",
    "Yardstick",
    "judge",
    "same_bits",
    "verify",
    "yardsticks",
]

FACTOR = 2.0
_FURTHER = 4  # draws that may show what eager's error usually is
_MARGIN = 1.01  # an error that a value on the edge of its dtype's range may have
_PIECE = 1 << 25  # elements of the largest float64 piece


class Inaccurate(Rejected):
    """It does what it should, but with too large an error."""


class Errors(msgspec.Struct, frozen=True):
    """Distances from the reference: largest within a row relative to that row, relative RMS, and gain
    (the factor by which the result as a whole is too large or small)."""

    max: float
    rms: float
    gain: float

    def larger(self, other: "Errors") -> "Errors":
        """The larger of each."""
        return Errors(max(self.max, other.max), max(self.rms, other.rms), max(self.gain, other.gain))


@dataclass
class Yardstick:
    """One drawn input set with its float64 results and the errors eager makes on it.

    Where eager's own result isn't finite, or a little error could make it so, `exact` holds NaN: nothing is
    asked of a candidate there.
    """

    where: str
    args: list[Any]
    cotangents: list[torch.Tensor]
    names: list[str]
    """The arguments whose gradients are wanted."""
    exact: dict[str, torch.Tensor]
    dtypes: dict[str, torch.dtype]
    eager: dict[str, Errors]
    terms: dict[str, float]
    """How many output elements stand behind one element of a result: the length of the sums in gradients."""
    evenness: dict[str, float]
    aliases: set[int]
    """Outputs that share memory with an argument in plain PyTorch too."""
    further: Callable[[int], dict[str, Errors]]
    """Eager's errors on the i-th further draw of this kind."""
    looked: int = 0
    """How many further draws `eager` holds the largest errors of."""

    def look_further(self) -> bool:
        """Take one more draw into account; False where there is none left."""
        if self.looked == _FURTHER:
            return False
        found = self.further(self.looked)
        self.looked += 1
        self.eager = {name: mine.larger(found[name]) for name, mine in self.eager.items()}
        return True


def yardsticks(op: Op, case: Case, called: Case | None = None, seed: int = 0) -> Iterator[Yardstick]:
    """The draws a candidate must survive: on `case`, and on what was really `called`, or one item fewer,
    so that the last tile of a kernel is ragged at least once. Each is made when it is asked for, so that the
    largest case needs the memory of one."""
    for offset, kind in enumerate(DRAWS):
        where = f"{kind} inputs, seed {seed + offset}"
        yield _yardstick(op, case, seed + offset, (kind, kind), where)
    other = called if called is not None and called.args != case.args else _one_item_fewer(op, case)
    if other is not None:
        seed += len(DRAWS)
        shapes = ", ".join(
            f"{name} {list_text(meta) if isinstance(meta, ListMeta) else list(meta.shape)}"
            for name, meta in other.data.items()
        )
        kinds = ("normal", "adversarial")  # an even seed: the gradient it is given is transposed
        yield _yardstick(op, other, seed, kinds, f"normal inputs, seed {seed}, {shapes}")


def _one_item_fewer(op: Op, case: Case) -> Case | None:
    cut: dict[str, Any] = {}
    for name, meta in case.tensors.items():
        if name in op.batched:
            if not meta.shape or meta.shape[0] < 2:
                return None
            cut[name] = msgspec.structs.replace(meta, shape=(meta.shape[0] - 1, *meta.shape[1:]))
    for name, listed in case.lists.items():
        if name in op.batched and listed.count > 1:
            fewer = listed.numel * (listed.count - 1) // listed.count
            cut[name] = msgspec.structs.replace(listed, count=listed.count - 1, numel=fewer)
    return case.replace(**cut) if cut else None


def _yardstick(
    op: Op, case: Case, seed: int, kinds: tuple[str, str], where: str, nudge: int = 0
) -> Yardstick:
    args = inputs(op, case, seed, kinds[0])
    if nudge:
        generator = torch.Generator(device=case.device).manual_seed(nudge)
        args = [each(partial(nudged, generator=generator), a) for a in args]
    run = Copies(op, args) if op.mutates else None
    given = run.args if run else args
    outputs = outputs_of(op.incumbent.implementation, given)
    aliases = _aliases(outputs, given)
    cotangents = [cotangent(out, args, seed + i, kinds[1]) for i, out in enumerate(outputs)]
    names = [op.params[i] for i, a in enumerate(args) if wants_grad(a)]
    got = results(outputs, given, cotangents, names) | (run.new_values() if run else {})
    del outputs, run, given
    exact = exact_results(op, args, cotangents, names)
    if set(got) != set(exact):
        raise ContestError(f"{op.name}: eager gives {sorted(got)}, but the reference gives {sorted(exact)}")
    for name, tensor in got.items():
        near = (exact[name] * _MARGIN).to(tensor.dtype)
        exact[name] = exact[name].masked_fill(~(torch.isfinite(tensor) & torch.isfinite(near)), math.nan)
    eager = {name: _errors(got[name], exact[name]) for name in got}
    if any(t.dtype == torch.float64 for t in tensors_in(args)):
        eager = _float64_errors(op, args, cotangents, names, exact, eager)
    dtypes = {name: tensor.dtype for name, tensor in got.items()}
    most = max((dy.numel() for dy in cotangents), default=0)
    terms = {name: max(1.0, most / max(tensor.numel(), 1)) for name, tensor in got.items()}
    evenness = {name: _evenness(tensor) for name, tensor in exact.items()}
    further = partial(_further, op, case, seed, kinds)
    return Yardstick(where, args, cotangents, names, exact, dtypes, eager, terms, evenness, aliases, further)


def _further(op: Op, case: Case, seed: int, kinds: tuple[str, str], number: int) -> dict[str, Errors]:
    return _yardstick(op, case, seed, kinds, "", nudge=number + 1).eager


def _float64_errors(
    op: Op,
    args: list[Any],
    cotangents: list[torch.Tensor],
    names: list[str],
    exact: dict[str, torch.Tensor],
    eager: dict[str, Errors],
) -> dict[str, Errors]:
    """Eager's errors in float64, where the reference is no more exact than eager and may be the same code:
    at least those it makes in float32, scaled by the ratio of the precisions."""
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    narrow = [each(_narrow, a) for a in args]
    copies = Copies(op, narrow) if op.mutates else None
    outputs = outputs_of(op.incumbent.implementation, copies.args if copies else narrow)
    dys = [dy.to(out.dtype) for dy, out in zip(cotangents, outputs, strict=True)]
    got = results(outputs, narrow, dys, names) | (copies.new_values() if copies else {})
    for name, tensor in got.items():
        errors = _errors(tensor, exact[name].masked_fill(~torch.isfinite(tensor), math.nan))
        eager[name] = eager[name].larger(Errors(*(ratio * e for e in msgspec.structs.astuple(errors))))
    return eager


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    narrow = tensor.detach().float() if tensor.dtype == torch.float64 else tensor.detach()
    return narrow.requires_grad_(tensor.requires_grad)


def verify(op: Op, candidate: Candidate, sticks: Iterable[Yardstick]) -> tuple[Errors, bool]:
    """The candidate's worst errors and whether it repeats itself bit for bit; raises `Rejected`."""
    worst = Errors(0.0, 0.0, 0.0)
    deterministic = True
    for stick in sticks:
        copies = Copies(op, stick.args)
        cotangents = [fenced(dy) for dy in stick.cotangents]
        got = _poisoned_run(candidate, copies, cotangents, stick)
        _check_inputs(copies, cotangents, stick)
        got |= copies.new_values()
        for name in sorted(set(got) ^ set(stick.exact)):
            article = "a" if name in got else "no"
            raise Rejected(f"gives {article} {name}, unlike the reference ({stick.where})")
        for name, tensor in got.items():
            worst = worst.larger(judge(name, tensor, stick))
        copies = Copies(op, stick.args) if op.mutates else copies
        again = _run(candidate, copies, cotangents, stick)
        _check_inputs(copies, cotangents, stick)
        again |= copies.new_values()
        if not all(same_bits(got[name], again[name]) for name in got):
            if candidate.deterministic:
                raise Rejected(
                    f"differs from run to run although declared deterministic: a race ({stick.where})"
                )
            deterministic = False
    return worst, deterministic and candidate.deterministic


def _check_inputs(copies: Copies, cotangents: list[torch.Tensor], stick: Yardstick) -> None:
    copies.check(stick.where)
    for copy, original in zip(cotangents, stick.cotangents, strict=True):
        if not unchanged(copy, original):
            raise Rejected(f"modifies the gradient it is given ({stick.where})")


def _poisoned_run(
    candidate: Candidate, copies: Copies, cotangents: list[torch.Tensor], stick: Yardstick
) -> dict[str, torch.Tensor]:
    counter = candidate.launches
    count = counter() if counter else 0
    poison = Poison()
    if (
        candidate.name == "compiled" or candidate.all_compiled
    ):  # torch.compile steps aside while a dispatch mode is active
        got = _run(candidate, copies, cotangents, stick)
    else:
        with poison:
            got = _run(candidate, copies, cotangents, stick)
    if counter and counter() == count:
        raise Rejected("none of its own kernels ran: it silently computed something else")
    if poison.broken():
        raise Rejected(f"writes outside its output ({stick.where})")
    return got


def _run(
    candidate: Candidate, copies: Copies, cotangents: list[torch.Tensor], stick: Yardstick
) -> dict[str, torch.Tensor]:
    outputs = outputs_of(candidate.implementation, copies.args)
    if not outputs and cotangents:
        raise Rejected("returns a NoneType, not a tensor")
    if len(outputs) != len(cotangents):
        raise Rejected(f"returns {len(outputs)} tensors, not {len(cotangents)}")
    for out, dy in zip(outputs, cotangents, strict=True):
        if not isinstance(out, torch.Tensor):
            raise Rejected(f"returns a {type(out).__name__}, not a tensor")
        if out.shape != dy.shape or out.dtype != dy.dtype or out.device != dy.device:
            raise Rejected(
                f"returns {out.dtype}{list(out.shape)} on {out.device}, "
                f"not {dy.dtype}{list(dy.shape)} on {dy.device}"
            )
    # Writing to such an output would change the input, here and not where plain PyTorch runs.
    if not _aliases(outputs, copies.args) <= stick.aliases:
        raise Rejected(f"returns memory of an input ({stick.where})")
    return results(outputs, copies.args, cotangents, stick.names)


def _aliases(outputs: list[torch.Tensor], args: list[Any]) -> set[int]:
    taken = {t.untyped_storage().data_ptr() for t in tensors_in(args)} - {0}
    return {i for i, out in enumerate(outputs) if out.untyped_storage().data_ptr() in taken}


def judge(name: str, tensor: torch.Tensor, stick: Yardstick) -> Errors:
    """The errors of the result called `name`; raises `Rejected` where they are larger than is allowed."""
    exact, dtype = stick.exact[name], stick.dtypes[name]
    if tensor.dtype != dtype or tensor.shape != exact.shape:
        raise Rejected(f"{name} is {tensor.dtype}{list(tensor.shape)}, not {dtype}{list(exact.shape)}")
    bad = ~torch.isfinite(tensor) & torch.isfinite(exact)
    if bool(bad.any()):
        index = tuple(bad.nonzero()[0].tolist())
        raise Rejected(f"{name} is {tensor[index].item()} at {list(index)} ({stick.where})")
    errors = _errors(tensor, exact)
    inexact = dtype.is_floating_point or dtype.is_complex
    store = torch.finfo(dtype).eps if inexact else 0.0
    unit = min(store, torch.finfo(torch.float32).eps)
    chain = unit * stick.terms[name] ** 0.5  # a plain sum in another order than eager's pairwise one
    floors = Errors(
        store / 2 + 4 * unit + chain,
        store / 16 + 2 * unit + chain / 4,
        store / 32 + 2 * unit + (store + chain / 4) / stick.evenness[name] ** 0.5,
    )
    for norm in ("max", "rms", "gain"):
        mine, floor = getattr(errors, norm), getattr(floors, norm)
        while not mine <= FACTOR * getattr(stick.eager[name], norm) + floor:
            if not stick.look_further():
                eager = getattr(stick.eager[name], norm)
                place = f" at {_worst_index(tensor, exact)}" if norm == "max" else ""
                raise Inaccurate(
                    f"{name} is wrong: {norm} error {mine:.2g}{place}, eager's is {eager:.2g}, "
                    f"allowed {FACTOR * eager + floor:.2g} ({stick.where})"
                )
    return errors


def _errors(got: torch.Tensor, exact: torch.Tensor) -> Errors:
    """Distances over the finite elements of `exact`."""
    if exact.numel() == 0:
        return Errors(0.0, 0.0, 0.0)
    got, exact = _rows(got), _rows(exact)
    # All is divided by the peak, so that squares stay finite.
    peak = exact.abs().nan_to_num(0.0, 0.0, 0.0).max().item() or 1.0
    step = max(1, _PIECE // max(exact.shape[1], 1))
    worst, square, norm, along = 0.0, 0.0, 0.0, 0.0
    for start in range(0, exact.shape[0], step):
        want = exact[start : start + step]
        known = torch.isfinite(want)
        off = ((got[start : start + step].to(want.dtype) - want) / peak).masked_fill(~known, 0)
        want = (want / peak).masked_fill(~known, 0)
        scale = want.abs().amax(1).clamp(min=1e-6)
        worst = max(worst, (off.abs().amax(1) / scale).max().item())
        square += off.abs().square().sum().item()
        norm += want.abs().square().sum().item()
        along += (off * want.conj()).sum().real.item()
    norm = norm or 1.0
    return Errors(worst, (square / norm) ** 0.5, abs(along) / norm)


def _evenness(exact: torch.Tensor) -> float:
    """How many elements of equal size would average out errors as well: (sum x^2)^2 / sum x^4, at least 1.

    The gain is an average of the elements' relative errors weighted by x^2, and one loud element its own.
    """
    peak = exact.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if exact.numel() else 0.0
    squares = fourths = 0.0
    for piece in exact.reshape(-1).split(_PIECE):
        power = (piece.abs() / (peak or 1.0)).nan_to_num(0.0, 0.0, 0.0).square()
        squares += power.sum().item()
        fourths += power.square().sum().item()
    return max(squares * squares / (fourths or 1.0), 1.0)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, elements]; a column counts as one row: an element can't be judged by nothing but itself."""
    rows = tensor.dim() > 1 and tensor.shape[-1] > 1
    return tensor.reshape(-1, tensor.shape[-1]) if rows else tensor.reshape(1, -1)


def _worst_index(got: torch.Tensor, exact: torch.Tensor) -> list[int]:
    off, size = (got.to(exact.dtype) - exact).abs().nan_to_num(0.0), exact.abs().nan_to_num(0.0)
    scale = size.amax(-1, keepdim=True) if exact.dim() > 1 and exact.shape[-1] > 1 else size.max()
    flat = int((off / scale.clamp(min=size.max() * 1e-6)).argmax())
    return [int(i) for i in torch.unravel_index(torch.tensor(flat), exact.shape)] if exact.dim() else []


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal bit for bit, NaN included."""
    one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(one, other)
