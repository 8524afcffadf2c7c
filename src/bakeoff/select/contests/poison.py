"""Hostile memory: uninitialised tensors hold NaN and stand between guard bands."""

import functools
import math
from typing import Any

import torch

from bakeoff.modes import UntracedMode

__all__ = ["GUARD", "NAN", "Poison", "fenced", "fresh_version", "unchanged", "written_inside"]

GUARD = 1024  # bytes on each side; a multiple of every alignment a kernel may ask for
_CANARY = 0xA5
NAN = 0xFF  # as bytes, a NaN of every floating dtype
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_permuted.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_FILLED = {
    torch.ops.aten.zeros.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.full.default,
    torch.ops.aten.full_like.default,
    torch.ops.aten.new_full.default,
    torch.ops.aten.ones.default,
    torch.ops.aten.ones_like.default,
    torch.ops.aten.new_ones.default,
}
_COPIED = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}
_LARGEST_COPY = 2**28  # bytes: plain PyTorch makes many copies, and each would be held until the end
_MADE = _EMPTY | _FILLED | _COPIED


class Poison(UntracedMode):
    """While active, new tensors and copies (also in backward) are fenced, uninitialised ones filled with NaN.

    A kernel that reads what it never wrote yields NaN; one that writes outside its tensor breaks a
    fence, which `broken()` reports.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Calls go the way that they go without it: torch.compile, which gives up what it first meets under
        another mode for good, compiles as ever."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[tuple[torch.Tensor, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in _MADE or not isinstance(made, torch.Tensor) or not _plain(made):
            return made
        if func in _COPIED and made.nbytes > _LARGEST_COPY:
            return made
        span = 1 + sum((size - 1) * step for size, step in zip(made.shape, made.stride(), strict=True))
        nbytes = span * made.element_size()
        raw = torch.full(
            (nbytes + 2 * GUARD + (-nbytes) % 16,), _CANARY, dtype=torch.uint8, device=made.device
        )
        self.buffers.append((raw, nbytes))
        inside = raw[GUARD : GUARD + nbytes].view(made.dtype)
        placed = inside.as_strided(made.shape, made.stride())
        if func not in _EMPTY:
            placed.copy_(made)
        elif made.dtype.is_floating_point or made.dtype.is_complex:
            inside.fill_(math.nan)
        return placed

    def broken(self) -> bool:
        """Whether anything outside a tensor was written."""
        return any(
            bool((raw[:GUARD] != _CANARY).any() or (raw[GUARD + nbytes :] != _CANARY).any())
            for raw, nbytes in self.buffers
        )


def _plain(made: torch.Tensor) -> bool:
    """Whether it has memory that can be laid out elsewhere."""
    data = made.layout is torch.strided and made.device.type != "meta"
    return data and not made.is_quantized and made.numel() > 0


def fenced(tensor: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """A copy of `tensor` in the same layout, gaps included, with NaN on both sides of its storage; `shift`
    elements away from a multiple of every alignment.

    A kernel that reads past its input meets NaN, and one that writes there is seen by `unchanged`.
    """
    held = _bytes(tensor)
    first = GUARD + shift * tensor.element_size()
    raw = torch.full((held.numel() + 2 * first,), NAN, dtype=torch.uint8, device=tensor.device)
    raw[first : first + held.numel()] = held
    start = first // tensor.element_size() + tensor.storage_offset()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(raw.untyped_storage(), start, tensor.shape, tensor.stride())
    return copy.requires_grad_(tensor.requires_grad)


@functools.cache
def fresh_version() -> int:
    """The version of a `fenced` copy that nobody has written to."""
    return fenced(torch.zeros(1))._version


def unchanged(copy: torch.Tensor, original: torch.Tensor) -> bool:
    """Whether a `fenced` copy still holds what `original` does, bit for bit, between intact fences."""
    held, first = _bytes(copy), _first(copy, original)
    fences = (held[:first] == NAN).all() & (held[-first:] == NAN).all()
    return bool(fences) and torch.equal(held[first:-first], _bytes(original))


def written_inside(copy: torch.Tensor, original: torch.Tensor) -> bool:
    """Whether nothing but elements of a `fenced` copy of `original` was written: no fence, no gap."""
    shift = (_first(copy, original) - GUARD) // original.element_size()
    expected = fenced(original.detach(), shift)
    expected.copy_(copy.detach())
    return torch.equal(_bytes(copy), _bytes(expected))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage behind `tensor`."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _first(copy: torch.Tensor, original: torch.Tensor) -> int:
    """The bytes of the fence before a `fenced` copy."""
    return int(copy.storage_offset() - original.storage_offset()) * original.element_size()
