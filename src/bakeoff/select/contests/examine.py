"""Examination: what only shows when a candidate that is right by itself is used as models use it."""

import gc
import time
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bakeoff.select.contests.apart import keep_apart
from bakeoff.select.contests.copies import Copies, Rejected, tensors_in
from bakeoff.select.contests.judge import same_bits
from bakeoff.select.contests.poison import Poison, fenced
from bakeoff.select.contests.results import gradients, named_outputs, outputs_of, results
from bakeoff.select.contests.verify import judged
from bakeoff.select.contests.yardstick import Yardstick
from bakeoff.select.declare.candidate import Candidate
from bakeoff.select.declare.case import TensorMeta
from bakeoff.select.declare.op import Op

__all__ = ["batch_invariant", "examine"]

_LET_GO_S = 0.02, 0.5
"""How long another thread may hold on to a call after its results are gone: before cycles are looked for,
which takes most of a second's fifth, and after."""


def examine(op: Op, candidate: Candidate, stick: Yardstick) -> None:
    """Raises `Rejected` where calls get into each other's way, a call keeps memory, a backward can't run a
    second time, a NaN disappears, or autocast changes a dtype that it leaves alone in eager."""
    keep_apart(op, candidate, stick)
    _nothing_kept(op, candidate, stick)
    _passes_on_nan(op, candidate, stick)
    _as_under_autocast(op, candidate, stick)


def batch_invariant(op: Op, candidate: Candidate, stick: Yardstick) -> bool:
    """Whether an item's outputs are the same, bit for bit, however many items there are beside it: shown with
    the first item alone, and with the second half. Of torch.compile's code nothing is shown: it is made anew
    for each size."""
    batched = [
        name in op.batched and isinstance(arg, torch.Tensor)
        for name, arg in zip(op.params, stick.args, strict=True)
    ]
    sizes = {len(arg) for arg, flag in zip(stick.args, batched, strict=True) if flag and arg.dim()}
    if candidate.name == "compiled" or op.mutates or not all(batched[:1]) or len(sizes) != 1:
        return False
    (items,) = sizes

    def outputs(cut: slice) -> list[torch.Tensor] | None:
        args = [
            arg.detach()[cut].requires_grad_(arg.requires_grad) if flag else arg
            for arg, flag in zip(stick.args, batched, strict=True)
        ]
        if candidate.supports(op.case(args)) is not None:
            return None
        return [out.detach() for out in outputs_of(candidate.implementation, Copies(op, args).args)]

    whole = outputs(slice(None))
    for cut in (slice(0, 1), slice(items // 2, None)) if items > 1 else ():
        part = outputs(cut)
        if whole is None or part is None:
            return False
        if not all(same_bits(one, every[cut]) for one, every in zip(part, whole, strict=True)):
            return False
    return items > 1


def _nothing_kept(op: Op, candidate: Candidate, stick: Yardstick) -> None:
    """A call after others: its backward runs twice, and nothing that it makes outlives its results."""
    copies, cotangents = Copies(op, stick.args), [fenced(dy) for dy in stick.cotangents]
    poison = Poison()
    with poison:
        outputs = outputs_of(candidate.implementation, copies.args)
        first = gradients(outputs, copies.args, cotangents, keep=True)
        try:
            second = gradients(outputs, copies.args, cotangents)
        except RuntimeError as error:
            raise Rejected(f"its backward runs once: {str(error).splitlines()[0][:200]}") from error
    slope = None
    for name, slope in zip(stick.names, second, strict=True):
        if slope is not None:
            try:
                judged(op, candidate, f"gradient of {name}", slope, stick)
            except Rejected as error:
                raise Rejected(f"when its backward runs a second time, {error}") from None
    held = [*copies.args, *cotangents, *outputs, *first, *second, *(raw for raw, _ in poison.buffers)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors_in(held)}
    references = [(storage.nbytes(), StorageWeakRef(storage)) for storage in storages.values()]
    poison.buffers.clear()  # autograd's thread holds the mode that was active for a moment longer
    del outputs, first, second, slope, copies, cotangents, held, storages, poison
    left = _left(references)
    if left:
        raise Rejected(
            f"keeps {left} bytes of a call after all its results are gone: memory grows, or a later call "
            f"writes over what this one returned ({stick.where})"
        )


def _left(references: list[tuple[int, StorageWeakRef]]) -> int:
    """The bytes of memory that is still held once other threads have had time, and cycles of references are
    gone: on a GPU, backward runs in a thread of autograd's own, which lets go of what it worked on after the
    results are there."""
    left = 0
    for collect, patience in zip((False, True), _LET_GO_S, strict=True):
        if collect:
            gc.collect()
        deadline = time.monotonic() + patience
        while left := sum(size for size, reference in references if not reference.expired()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
        if not left:
            break
    return left


def _passes_on_nan(op: Op, candidate: Candidate, stick: Yardstick) -> None:
    """NaN in the first item and infinity in the last one: wherever eager's items show it, so must these."""
    altered = _with_nan(op, stick)
    if altered is None:
        return
    want, got = (
        _items_lost(op, implementation, altered, stick)
        for implementation in (op.incumbent.implementation, candidate.implementation)
    )
    for name, lost in want.items():
        if bool((lost & ~got[name]).any()):
            item = f" in item {int((lost & ~got[name]).nonzero()[0])}" if lost.dim() else ""
            raise Rejected(f"{name} is finite{item} where its arguments are NaN or infinite, unlike eager's")


def _with_nan(op: Op, stick: Yardstick) -> list[Any] | None:
    """The draw with a NaN and an infinity in each ordinary argument that has items; None where none has."""
    generator = torch.Generator(device=stick.case.device).manual_seed(0)
    altered: list[Any] = []
    for name, arg in zip(op.params, stick.args, strict=True):
        meta = stick.case.args[name]
        ordinary = name in op.batched and isinstance(arg, torch.Tensor) and arg.is_floating_point()
        if not ordinary or not isinstance(meta, TensorMeta) or arg.dim() == 0 or arg.numel() == 0:
            altered.append(arg)
            continue
        if op.draw is not None and op.draw(name, meta, generator) is not None:  # values that mean something
            altered.append(arg)
            continue
        changed = arg.detach().clone()
        changed[(0, *(size // 2 for size in arg.shape[1:]))] = torch.nan
        if len(changed) > 1:
            changed[(-1, *(size // 2 for size in arg.shape[1:]))] = torch.inf
        altered.append(changed.requires_grad_(arg.requires_grad))
    return altered if any(new is not old for new, old in zip(altered, stick.args, strict=True)) else None


def _items_lost(op: Op, implementation: Any, args: list[Any], stick: Yardstick) -> dict[str, torch.Tensor]:
    """Of each result which items hold something that isn't finite; of what has no items whether it does."""
    copies = Copies(op, args)
    outputs = outputs_of(implementation, copies.args)
    found = results(outputs, copies.args, stick.cotangents, stick.names)
    lost = {}
    for name, tensor in found.items():
        bad = ~torch.isfinite(tensor)
        items = name.startswith("output") or name.removeprefix("gradient of ") in op.batched
        lost[name] = bad.reshape(bad.shape[0], -1).any(1) if items and bad.dim() else bad.any()
    return lost


def _as_under_autocast(op: Op, candidate: Candidate, stick: Yardstick) -> None:
    """The dtypes of its outputs are eager's under autocast, too; torch.compile traces autocast itself."""
    if candidate.name == "compiled" or op.mutates:
        return
    kind = torch.device(stick.case.device).type
    dtypes = []
    with torch.no_grad(), torch.autocast(kind, torch.bfloat16, cache_enabled=False):
        for implementation in (op.incumbent.implementation, candidate.implementation):
            try:
                outputs = outputs_of(implementation, Copies(op, stick.args).args)
            except Exception:
                if implementation is op.incumbent.implementation:
                    return  # eager itself can't run under autocast
                raise
            dtypes.append({name: out.dtype for name, out in named_outputs(outputs).items()})
    for name, dtype in dtypes[0].items():
        if dtypes[1][name] != dtype:
            raise Rejected(f"{name} is {dtypes[1][name]} under autocast, eager's is {dtype}")
