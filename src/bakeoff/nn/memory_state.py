"""What a neural memory remembers between the pieces of a sequence.

Shapes: B rows, G = B heads, E the width of a head, H a memory's hidden width.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node

from bakeoff.ops.memory_scan import Memory, MemoryState

__all__ = ["NeuralMemoryState", "outliving"]

_PARTS = ("memory", "momentum", "start")
_WEIGHTS = ("w1", "b1", "w2", "b2")


@dataclass(frozen=True)
class NeuralMemoryState:
    """The memories of B rows, as `NeuralMemory` returns them: to be carried on, detached, saved, loaded.

    States are values: nothing changes one in place, so that the same state may be carried on twice. Its size
    does not depend on how many tokens were seen.
    """

    config: str
    """Of the module that made it."""
    scan: MemoryState
    """Of all groups: memory and momentum after the last token, the memory at the start of its chunk, and how
    many tokens that chunk has."""
    conv: Tensor
    """[B, taps - 1, 3 dim], what the short convolution still sees."""

    @property
    def rows(self) -> int:
        """B."""
        return self.conv.shape[0]

    @property
    def memory(self) -> Memory:
        """(w1 [G, H, E], b1 [G, H], w2 [G, E, H], b2 [G, E]) after the last token."""
        return self.scan.memory

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        parts = zip(_PARTS, self.scan[:3], strict=True)
        named = {
            f"{part}.{name}": w for part, memory in parts for name, w in zip(_WEIGHTS, memory, strict=True)
        }
        return {**named, "conv": self.conv}

    def of(self, tensors: dict[str, Tensor]) -> "NeuralMemoryState":
        """The same state with other tensors, named as in `tensors`."""
        parts = ((tensors[f"{part}.{name}"] for name in _WEIGHTS) for part in _PARTS)
        memory, momentum, start = ((w1, b1, w2, b2) for w1, b1, w2, b2 in parts)
        scan = MemoryState(memory, momentum, start, self.scan.filled)
        return replace(self, scan=scan, conv=tensors["conv"])

    def detach(self) -> "NeuralMemoryState":
        """The same values, through which no gradient flows back to earlier pieces."""
        return self.of({name: tensor.detach() for name, tensor in self.tensors().items()})

    def outliving(self) -> "NeuralMemoryState":
        """The same values, made under inference_mode as copies that may be used outside of it, too."""
        return self.of({name: outliving(tensor) for name, tensor in self.tensors().items()})

    def to(self, device: torch.device | str) -> "NeuralMemoryState":
        """The same values on another device."""
        return self.of({name: tensor.to(device) for name, tensor in self.tensors().items()})

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file. Waits for the device."""
        tensors = {name: tensor.detach().clone() for name, tensor in self.tensors().items()}
        metadata = {"config": self.config, "filled": str(int(self.scan.filled))}
        safetensors.torch.save_file(tensors, path, metadata)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> "NeuralMemoryState":
        """Reads what `save` wrote. Raises ValueError for another file."""
        try:
            with safetensors.safe_open(path, "pt", str(device)) as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            empty = MemoryState((), (), (), int(metadata["filled"]))  # type: ignore[arg-type]
            return cls(metadata["config"], empty, tensors["conv"]).of(tensors)
        except (KeyError, ValueError, safetensors.SafetensorError) as error:
            raise ValueError(f"{path} holds no state of a NeuralMemory: give what its save wrote") from error


def _children(state: NeuralMemoryState) -> tuple[list[Any], tuple[str, int | None]]:
    *parts, filled = state.scan
    if isinstance(filled, Tensor):
        return [*parts, state.conv, filled], (state.config, None)
    return [*parts, state.conv], (state.config, filled)


def _named_children(state: NeuralMemoryState) -> tuple[list[tuple[Any, Any]], tuple[str, int | None]]:
    children, context = _children(state)
    names = map(GetAttrKey, (*_PARTS, "conv", "filled"))
    return [*zip(names, children, strict=False)], context


def _of_children(children: Iterable[Any], context: tuple[str, int | None]) -> NeuralMemoryState:
    memory, momentum, start, conv, *counted = children
    config, filled = context
    scan = MemoryState(memory, momentum, start, counted[0] if filled is None else filled)
    return NeuralMemoryState(config, scan, conv)


# FSDP2, torch.export and torch.func's transforms look for tensors in what modules take and return.
register_pytree_node(
    NeuralMemoryState,
    _children,
    _of_children,
    serialized_type_name="bakeoff.nn.NeuralMemoryState",
    flatten_with_keys_fn=_named_children,
)


def outliving(tensor: Tensor) -> Tensor:
    """`tensor`, or where it was made under inference_mode a copy that may be used outside of it, too."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()
