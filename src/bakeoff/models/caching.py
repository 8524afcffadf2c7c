"""What decoding remembers: first of pieces of any length, then of one symbol a call at fixed addresses."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["DecodeCache", "rows_at"]


class DecodeCache:
    """Base of the models' caches.

    A cache begins empty and takes pieces of any length, whose count is a number on the host. Once settled, it
    takes one symbol a row and call, of which the device counts: every call then runs the same operations on
    the same addresses, without gradients, so that it may be a CUDA graph.
    """

    def __init__(self) -> None:
        self.length = 0
        """How many positions it holds. Whoever replays a graph sets it."""
        self.at: Tensor | None = None
        """Once settled: the same number on the device, [1] int64."""
        self._fixed: dict[str, Tensor] = {}

    @property
    def capacity(self) -> int | None:
        """How many positions it has room for; None: any number."""
        return None

    def state(self) -> dict[str, Tensor]:
        """The tensors that a step makes anew, by name."""
        return {}

    def put(self, state: dict[str, Tensor]) -> None:
        """Takes tensors for those that `state` gives."""

    def buffers(self) -> list[Tensor]:
        """The tensors that a step writes in place."""
        return []

    def held(self) -> Iterator[Tensor]:
        """The tensors of a cache that is not empty."""
        yield from self.buffers()
        yield from self.state().values()

    def grow(self, ids: Tensor) -> None:
        """Counts ids [B, T], which it holds from now on."""
        self.length += ids.shape[1]

    def widen(self, model: Any, at: Tensor) -> None:
        """Gives the tensors of `model` the shapes that they have in a row without end."""

    def begin_step(self, at: Tensor) -> None:
        """Prepares what all layers of a step share."""

    def settle(self, model: Any) -> None:
        """From here on `model.decode` takes one symbol a row. To be called behind the first piece.

        Raises:
            ValueError: nothing was decoded yet.
        """
        if not self.length:
            raise ValueError("an empty cache can't be settled: decode the first symbols, then settle it")
        with torch.inference_mode(False), torch.no_grad():
            self.at = torch.full((1,), self.length, device=next(model.parameters()).device)
            self.widen(model, self.at)
            # Copies: two names may share a tensor, and one made in inference mode can't be written outside.
            self.put({name: tensor.detach().clone() for name, tensor in self.state().items()})
        self._fixed = self.state()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around what decodes a piece. Once settled, brings what was made anew to its place, and counts."""
        if self.at is None:
            yield
            return
        with torch.no_grad():
            self.begin_step(self.at)
            yield
            made = self.state()
            moved: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for name, fixed in self._fixed.items():
                if made[name] is not fixed:
                    moved[fixed.dtype].append((fixed, made[name]))
            for pairs in moved.values():  # one launch for all of a dtype
                torch._foreach_copy_([fixed for fixed, _ in pairs], [new for _, new in pairs])
            self.put(self._fixed)
            self.at += 1

    def take(self, other: "DecodeCache") -> None:
        """Becomes as `other`, a settled cache of the same shapes; addresses stay."""
        assert self.at is not None and other.at is not None
        mine, theirs = [*self.state().values(), *self.buffers()], [*other.state().values(), *other.buffers()]
        torch._foreach_copy_([self.at, *mine], [other.at, *theirs])
        self.length = other.length


def rows_at(table: Tensor, count: int, cache: DecodeCache | None) -> Tensor:
    """The rows of `table` for `count` positions that follow what `cache` holds."""
    if cache is None:
        return table[:count]
    if not len(table):  # of a model without positions
        return table
    if cache.at is None:
        return table[cache.length : cache.length + count]
    return table.index_select(0, cache.at)
