"""Yardsticks: the draws a candidate must survive, with what the reference and plain PyTorch make of them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch

from bakeoff.errors import ContestError
from bakeoff.select.contests.conduct import Traits
from bakeoff.select.contests.copies import Copies, tensors_in
from bakeoff.select.contests.draw import cotangent, inputs, nudged, shrunk
from bakeoff.select.contests.exact import each, exact_results
from bakeoff.select.contests.judge import FURTHER, Errors, Sizes, Standard, denormal_rows, errors_of
from bakeoff.select.contests.kin import kin_of
from bakeoff.select.contests.results import outputs_of, results, wants_grad
from bakeoff.select.declare.case import Case
from bakeoff.select.declare.key import list_text
from bakeoff.select.declare.lists import ListMeta
from bakeoff.select.declare.op import Op

__all__ = ["REFERENCE", "Yardstick", "yardstick_for", "yardsticks"]

REFERENCE = "prepare the reference"
"""What a contest is at meanwhile."""
_MARGIN = 1.01  # an error that a value on the edge of its dtype's range may have


@dataclass(kw_only=True)
class Yardstick(Standard):
    """One drawn input set with its float64 results and what eager makes of it."""

    other: Callable[[int], "Yardstick"]
    """The i-th further draw of this kind."""
    case: Case
    args: list[Any]
    cotangents: list[torch.Tensor]
    names: list[str]
    """The arguments whose gradients are wanted."""
    traits: list[Traits]
    """Of eager's outputs."""
    aliases: set[int]
    """Outputs that share memory with an argument in plain PyTorch too."""
    again: str = ""
    """The circumstances of a candidate's second run: "late", "misaligned", "no_grad" or "inference_mode"."""
    kin: bool = False
    """Whether this is another case than the one in question, which a candidate need not support."""

    def others(self, count: int) -> Iterator["Yardstick"]:
        """Further draws than eager's errors were looked at on, with what is allowed here."""
        for number in range(FURTHER, FURTHER + count):
            other = self.other(number)
            other.eager = {name: mine.larger(self.eager[name]) for name, mine in other.eager.items()}
            other.looked = FURTHER
            yield other


def yardsticks(op: Op, case: Case, called: Case | None = None, seed: int = 0) -> Iterator[Yardstick]:
    """The draws a candidate must survive: ordinary, hostile and unusual values on `case`, ordinary ones on
    what was really `called`, and on a relative of other sizes, dimensions and strides, whose last tile is
    ragged. Each is made when it is asked for, so that the largest case needs the memory of one."""
    modes = ["no_grad", "inference_mode", "misaligned", "late"]
    if case.needs_grad:
        modes = ["late", "", "misaligned", ""]
    plain, hostile = ("normal", "normal"), ("adversarial", "adversarial")
    yield _yardstick(op, case, seed, plain, f"normal inputs, seed {seed}", modes[0])
    yield _yardstick(op, case, seed + 1, hostile, f"adversarial inputs, seed {seed + 1}", modes[1])
    relative = kin_of(op, case)
    other = called if called is not None and called.args != case.args else relative
    kinds = ("normal", "adversarial")  # an even seed: the gradient it is given is transposed
    if other is not None:
        where = f"normal inputs, seed {seed + 2}, {_shapes(other)}"
        yield _yardstick(op, other, seed + 2, kinds, where, modes[2], kin=other is relative)
    kinds = ("unusual", "constant")
    yield _yardstick(op, case, seed + 3, kinds, f"unusual inputs, seed {seed + 3}", modes[3])
    if other is not relative and relative is not None:
        where = f"normal inputs, seed {seed + 4}, {_shapes(relative)}"
        yield _yardstick(op, relative, seed + 4, ("normal", "adversarial"), where, kin=True)


def yardstick_for(op: Op, args: list[Any]) -> Yardstick:
    """The yardstick of a call's own arguments, with an ordinary gradient for its outputs."""
    held = [each(_as_leaf, a) for a in args]
    return _yardstick(op, op.case(held), 0, ("given", "normal"), "a call's own arguments", given_args=held)


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad and torch.is_grad_enabled())


def _shapes(case: Case) -> str:
    described = []
    for name, meta in case.data.items():
        dense = isinstance(meta, ListMeta) or meta.is_contiguous
        text = list_text(meta) if isinstance(meta, ListMeta) else str(list(meta.shape))
        described.append(f"{name} {text}" + ("" if dense else f" with strides {list(meta.stride)}"))  # type: ignore[union-attr]
    return ", ".join(described)


def _yardstick(
    op: Op,
    case: Case,
    seed: int,
    kinds: tuple[str, str],
    where: str,
    again: str = "",
    *,
    kin: bool = False,
    nudge: int = 0,
    given_args: list[Any] | None = None,
) -> Yardstick:
    args = inputs(op, case, seed, kinds[0]) if given_args is None else given_args
    if nudge:
        generator = torch.Generator(device=case.device).manual_seed(nudge)
        args = [
            each(partial(nudged, generator=generator, coarsely=name in op.rounded), a)
            for name, a in zip(op.params, args, strict=True)
        ]
    run = Copies(op, args) if op.mutates else None
    given = run.args if run else args
    outputs = outputs_of(op.incumbent.implementation, given)
    aliases = aliases_of(outputs, given)
    traits = [Traits.of(out) for out in outputs]
    cotangents = [cotangent(out, args, seed + i, kinds[1]) for i, out in enumerate(outputs)]
    if nudge:
        cotangents = [shrunk(dy, generator) for dy in cotangents]
    names = [op.params[i] for i, a in enumerate(args) if wants_grad(a)]
    got = results(outputs, given, cotangents, names) | (run.new_values() if run else {})
    del outputs, run, given
    exact = exact_results(op, args, cotangents, names)
    if set(got) != set(exact):
        raise ContestError(f"{op.name}: eager gives {sorted(got)}, but the reference gives {sorted(exact)}")
    for name, tensor in got.items():
        near = (exact[name] * _MARGIN).to(tensor.dtype)
        exact[name] = exact[name].masked_fill(~(torch.isfinite(tensor) & torch.isfinite(near)), math.nan)
    sizes = {name: Sizes.of(tensor, whole=op.averages) for name, tensor in exact.items()}
    eager = {name: errors_of(got[name], exact[name], sizes[name]) for name in got}
    if any(t.dtype == torch.float64 for t in tensors_in(args)):
        eager = _float64_errors(op, args, cotangents, names, exact, eager)
    most = max((dy.numel() for dy in cotangents), default=0)
    other = partial(_further, op, case, seed, kinds, where, given_args)
    return Yardstick(
        where=where,
        exact=exact,
        sizes=sizes,
        dtypes={name: tensor.dtype for name, tensor in got.items()},
        eager=eager,
        terms={name: max(1.0, most / max(tensor.numel(), 1)) for name, tensor in got.items()},
        denormal={
            name: denormal_rows(tensor, exact[name])
            for name, tensor in got.items()
            if name.startswith("output")
            and tensor.is_floating_point()
            and tensor.numel()
            # Kernels of CUDA's libraries flush numbers below 1e-38; in float16 they begin at 6e-5.
            and (not tensor.is_cuda or tensor.dtype == torch.float16)
        },
        whole=op.averages,
        further=lambda number: other(number).eager,
        other=other,
        case=case,
        args=args,
        cotangents=cotangents,
        names=names,
        traits=traits,
        aliases=aliases,
        again=again,
        kin=kin,
    )


def _further(
    op: Op, case: Case, seed: int, kinds: tuple[str, str], where: str, args: list[Any] | None, number: int
) -> Yardstick:
    """The draw with other last bits."""
    where = f"{where}, other last bits"
    return _yardstick(op, case, seed, kinds, where, nudge=number + 1, given_args=args)


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
        known = exact[name].masked_fill(~torch.isfinite(tensor), math.nan)
        errors = errors_of(tensor, known, Sizes.of(known, whole=op.averages))
        eager[name] = eager[name].larger(Errors(*(ratio * e for e in msgspec.structs.astuple(errors))))
    return eager


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    narrow = tensor.detach().float() if tensor.dtype == torch.float64 else tensor.detach()
    return narrow.requires_grad_(tensor.requires_grad)


def aliases_of(outputs: list[torch.Tensor], args: list[Any]) -> set[int]:
    """The outputs that share memory with an argument."""
    taken = {t.untyped_storage().data_ptr() for t in tensors_in(args)} - {0}
    return {i for i, out in enumerate(outputs) if out.untyped_storage().data_ptr() in taken}
