"""Verification: outputs and every gradient against the reference in float64, and a candidate's conduct."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from bakeoff.select.contests.conduct import bystanders, check_traits
from bakeoff.select.contests.copies import Copies, Rejected, tensors_in
from bakeoff.select.contests.judge import Errors, Inaccurate, judge, same_bits
from bakeoff.select.contests.poison import Poison, fenced, fresh_version, unchanged
from bakeoff.select.contests.results import named_outputs, outputs_of, results
from bakeoff.select.contests.yardstick import Yardstick, aliases_of, yardsticks
from bakeoff.select.declare.candidate import Candidate
from bakeoff.select.declare.op import Op

__all__ = ["Rejected", "Yardstick", "judged", "verify", "yardsticks"]

_PAUSES = 4_000_000, 64_000_000
"""Of the GPU's clock, 2 and 32 milliseconds: by then the host has issued a call."""
_UNLUCKY = 2.0
"""Times what is allowed, up to which an error may be one draw's bad luck."""
_CHANCES = 3
"""Other draws on which it then has to be within what is allowed."""
_MODES = {
    "no_grad": "under torch.no_grad(), with arguments that require gradients",
    "inference_mode": "under torch.inference_mode()",
    "misaligned": "with memory that is not aligned to 16 bytes",
    "late": "with arguments that are written late on its stream (does it leave work on another stream?)",
}


def verify(op: Op, candidate: Candidate, sticks: Iterable[Yardstick]) -> tuple[Errors, bool]:
    """The candidate's worst errors and whether it repeats itself bit for bit; raises `Rejected`."""
    worst = Errors(0.0, 0.0, 0.0)
    deterministic = True
    for stick in sticks:
        if stick.kin and not _takes(candidate, stick):
            continue
        plain = _again(op, candidate, stick, "")
        got = _poisoned(op, candidate, stick)
        for name in sorted(set(got) ^ set(stick.exact)):
            article = "a" if name in got else "no"
            raise Rejected(f"gives {article} {name}, unlike the reference ({stick.where})")
        for name, tensor in got.items():
            worst = worst.larger(judged(op, candidate, name, tensor, stick))
        alike = _alike(got, plain)
        if not alike:
            for name, tensor in plain.items():
                judged(op, candidate, name, tensor, stick)
        del plain  # they may be large
        if not (_alike_otherwise(op, candidate, stick, got) and alike):
            if candidate.deterministic:
                raise Rejected(
                    "differs from run to run although declared deterministic: a race; or it adds up in any "
                    f"order, then declare it with Candidate(..., deterministic=False) ({stick.where})"
                )
            deterministic = False
    return worst, deterministic and candidate.deterministic


def judged(op: Op, candidate: Candidate, name: str, tensor: torch.Tensor, stick: Yardstick) -> Errors:
    """The errors of the result called `name`. One that is a little too large passes where it is not on
    `_CHANCES` other draws of the kind; raises `Inaccurate` otherwise."""
    try:
        return judge(name, tensor, stick)
    except Inaccurate as error:
        if error.times > _UNLUCKY:
            raise
        for other in stick.others(_CHANCES):
            try:
                judge(name, _again(op, candidate, other, "")[name], other)
            except Inaccurate:
                raise error from None
        return error.errors


def _takes(candidate: Candidate, stick: Yardstick) -> bool:
    """Whether a case that is not the one in question counts for a candidate. What torch.compile makes is made
    anew for other sizes, and shows nothing of the code in question."""
    return not candidate.compiles and candidate.supports(stick.case) is None


def _poisoned(op: Op, candidate: Candidate, stick: Yardstick) -> dict[str, torch.Tensor]:
    """What it gives in poisoned memory. That is not its first run: compilers try out code in memory of their
    own, which would all be kept."""
    copies, cotangents = Copies(op, stick.args), [fenced(dy) for dy in stick.cotangents]
    counter = candidate.launches
    count = counter() if counter else 0
    poison = Poison()
    with poison:
        got = run(candidate, copies, cotangents, stick)
    if counter and counter() == count:
        raise Rejected("none of its own kernels ran: it silently computed something else")
    if poison.broken():
        raise Rejected(f"writes outside its output ({stick.where})")
    check_inputs(copies, cotangents, stick)
    return got | copies.new_values()


def _alike_otherwise(op: Op, candidate: Candidate, stick: Yardstick, got: dict[str, torch.Tensor]) -> bool:
    """Run once more, under the circumstances that the draw asks for, if any; whether the same bits come out.

    Another path may give other bits, which are judged. Two plain runs then tell a race from a path.
    """
    mode = stick.again if stick.again != "late" or tensors_in(stick.args)[0].is_cuda else ""
    again = _again(op, candidate, stick, mode) if mode else {}
    if _alike(got, again):
        return True
    try:
        for name, tensor in again.items():
            judged(op, candidate, name, tensor, stick)
    except Rejected as error:
        raise Rejected(f"{_MODES[mode]}, {error}") from None
    return all(_alike(got, _again(op, candidate, stick, "")) for _ in range(2))


def _alike(got: dict[str, torch.Tensor], again: dict[str, torch.Tensor]) -> bool:
    """Whether all that came again came before, in the same bits."""
    return all(name in got and same_bits(got[name], tensor) for name, tensor in again.items())


def _again(op: Op, candidate: Candidate, stick: Yardstick, mode: str) -> dict[str, torch.Tensor]:
    if mode == "late":
        return _late(op, candidate, stick)
    shift = 1 if mode == "misaligned" else 0
    copies, cotangents = Copies(op, stick.args, shift), [fenced(dy, shift) for dy in stick.cotangents]
    with _named(mode), _entered(mode, copies.args):
        found = run(candidate, copies, cotangents, stick, mode)
    check_inputs(copies, cotangents, stick)
    return found | copies.new_values()


def _late(op: Op, candidate: Candidate, stick: Yardstick) -> dict[str, torch.Tensor]:
    """What is there as soon as it returns, while its stream is still busy: in memory without earlier results,
    with arguments that are written after a pause, a longer one where the host took longer than that."""
    found: dict[str, torch.Tensor] = {}
    for cycles in _PAUSES:
        copies, cotangents = Copies(op, stick.args), [fenced(dy) for dy in stick.cotangents]
        pause = _Pause([*copies.args, *cotangents], [*stick.args, *stick.cotangents], cycles)
        with _named("late"), Poison():
            found = run(candidate, copies, cotangents, stick, pause=pause)
        check_inputs(copies, cotangents, stick)
        found |= copies.new_values()
        if not pause.was_over:
            break
    return found


@contextlib.contextmanager
def _named(mode: str) -> Iterator[None]:
    """Errors say under which circumstances they came."""
    try:
        yield
    except Rejected:
        raise
    except Exception as error:
        if not mode:
            raise
        raise type(error)(f"{error} ({_MODES[mode]})") from error


@contextlib.contextmanager
def _entered(mode: str, args: list[Any]) -> Iterator[None]:
    """The mode of a forward-only call: models call so with parameters that require gradients."""
    if mode not in ("no_grad", "inference_mode"):
        yield
        return
    for a in args:
        if isinstance(a, torch.Tensor) and (a.is_floating_point() or a.is_complex()):
            a.requires_grad_(True)
    with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
        yield
    for a in args:
        if isinstance(a, torch.Tensor):
            a.requires_grad_(False)


class _Pause:
    """Lets `copies` hold NaN until the current stream gets to what follows, while the host goes on."""

    def __init__(self, copies: list[Any], originals: list[Any], cycles: int) -> None:
        pairs = [
            (copy.data, original.detach())
            for copy, original in zip(tensors_in(copies), tensors_in(originals), strict=True)
            if copy.is_floating_point() and 0 not in copy.stride()
        ]
        for copy, _ in pairs:
            copy.fill_(torch.nan)
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        for copy, original in pairs:
            copy.copy_(original)
        self._end = torch.cuda.Event()
        self._end.record()
        self.was_over = False
        """Whether the host came too late, as far as `look` saw."""

    def look(self) -> None:
        """To be called when the host has issued what had to be issued before the end."""
        self.was_over = self._end.query()


def check_inputs(copies: Copies, cotangents: list[torch.Tensor], stick: Yardstick) -> None:
    """Raises `Rejected` where a run has written to what it was given."""
    copies.check(stick.where)
    for copy, original in zip(cotangents, stick.cotangents, strict=True):
        if not unchanged(copy, original):
            raise Rejected(f"modifies the gradient it is given ({stick.where})")
        if copy._version != fresh_version():
            raise Rejected(f"bumps the version of the gradient it is given ({stick.where})")


def run(
    candidate: Candidate,
    copies: Copies,
    cotangents: list[torch.Tensor],
    stick: Yardstick,
    mode: str = "",
    pause: _Pause | None = None,
) -> dict[str, torch.Tensor]:
    """What a candidate makes of `copies`: outputs, and gradients where no mode forbids them; raises
    `Rejected` where it gives something else than tensors like eager's, or changes what is not its own."""
    with bystanders([*copies.args, *cotangents], stick.where):
        outputs = outputs_of(candidate.implementation, copies.args)
        if not outputs and cotangents:
            raise Rejected("returns a NoneType, not a tensor")
        if len(outputs) != len(cotangents):
            raise Rejected(f"returns {len(outputs)} tensors, not {len(cotangents)}")
        plain_mode = mode if mode in ("no_grad", "inference_mode") else ""
        for i, (out, traits) in enumerate(zip(outputs, stick.traits, strict=True)):
            may_alias = i in stick.aliases
            check_traits(out, traits, copies.args, stick.where, plain_mode, may_alias=may_alias)
        # Writing to such an output would change the input, here and not where plain PyTorch runs.
        if not aliases_of(outputs, copies.args) <= stick.aliases:
            raise Rejected(f"returns memory of an input ({stick.where})")
        if plain_mode:
            return {name: out.clone() for name, out in named_outputs(outputs).items()}
        if pause is None:
            return results(outputs, copies.args, cotangents, stick.names)
        # What is still being computed elsewhere is not there yet.
        early = {name: out.clone() for name, out in named_outputs(outputs).items()}
        pause.look()
        found = results(outputs, copies.args, cotangents, stick.names) | early
        return {name: t.clone() for name, t in found.items()}
