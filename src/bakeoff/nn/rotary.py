"""Rotary tables as part of a model."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from bakeoff.ops.rotary import rotary_tables

__all__ = ["HasRotaryTables"]


class HasRotaryTables(nn.Module):
    """Base of a model with the tables `cos` and `sin`, each [length, dim / 2], for `bakeoff.ops.rotary`.

    They are no part of its state, so they are made anew wherever the model's tensors move, be it alone or as
    a part of another: to a device or a dtype, or from the meta device to memory (``to_empty(device=...)``,
    ``load_state_dict(..., assign=True)``).

    >>> class Model(HasRotaryTables):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.make_tables(8, 4)
    >>> with torch.device("meta"):
    ...     model = Model()
    >>> model.to_empty(device="cpu").cos[0]
    tensor([1., 1.])
    """

    cos: Tensor
    sin: Tensor

    def make_tables(self, length: int, dim: int, base: float = 10_000.0) -> None:
        """To be called once, when the model is built; arguments as of `rotary_tables`."""
        self._rotary = (length, dim, base)
        for name, table in zip(("cos", "sin"), rotary_tables(*self._rotary), strict=True):
            self.register_buffer(name, table, persistent=False)
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]

    def fill_tables(self, device: torch.device | None = None) -> None:
        """Makes the tables anew, by default where they are."""
        device, dtype = device or self.cos.device, self.cos.dtype
        # Reached from float32, as by a model that was built with data.
        self.cos, self.sin = (table.to(dtype) for table in rotary_tables(*self._rotary, device=device))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = self.cos
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.cos is not before and not self.cos.is_meta:
            self.fill_tables()
        return self


def _after_loading(model: HasRotaryTables, _keys: object) -> None:
    """Puts tables that are still on the meta device where the parameters are."""
    device = next(model.parameters()).device
    if model.cos.is_meta and device.type != "meta":
        model.fill_tables(device)
