"""What a module's forward computes, found out by running it: on small stand-ins of its weights, on the CPU.

A replacement is offered only where both give the same numbers, so that a version of a library whose code has
changed is refused with a reason instead of being replaced by something else.
"""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Times", "agrees", "draw", "further_arguments", "in_both_modes", "on_meta", "quiet", "stand_in"]

_TOLERANCE = 1e-5
"""Of float32 results of some tens of operations; other formulas differ by 1e-2 and more."""


@contextmanager
def quiet() -> Iterator[None]:
    """Small work on the CPU that leaves the caller's random state, device, autocast and gradients alone."""
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers on the CPU."""
    return torch.randn(*shape, dtype=torch.float32, device="cpu").to(dtype)


class Times(nn.Module):
    """A product with a matrix, in the place of a projection."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(draw(given, made) / given**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def stand_in(
    module: nn.Module,
    parameters: Mapping[str, Tensor] | None = None,
    modules: Mapping[str, nn.Module] | None = None,
    **attributes: Any,
) -> nn.Module:
    """Another object of the module's class and settings, in training, with these parameters and submodules.

    Submodules that are not given are the module's own; no parameter and no buffer is, but for those that are
    None.
    """
    other = object.__new__(type(module))
    held = {name: value for name, value in vars(module).items() if name != "forward"}
    fresh = nn.Module()
    held.update(vars(fresh))
    vars(other).update(held)
    for name, child in {**module._modules, **(modules or {})}.items():
        other._modules[name] = child
    other._parameters.update({name: None for name, held in module._parameters.items() if held is None})
    other._buffers.update({name: None for name, held in module._buffers.items() if held is None})
    for name, tensor in (parameters or {}).items():
        other._parameters[name] = nn.Parameter(tensor)
    vars(other).update(attributes)
    return other


def on_meta(module: nn.Module) -> nn.Module:
    """A stand-in of the module and of all below it with weights that have a shape and no values."""
    other = stand_in(module)
    for name, child in module._modules.items():
        other._modules[name] = None if child is None else on_meta(child)
    for name, parameter in module._parameters.items():
        kept = None if parameter is None else nn.Parameter(torch.empty_like(parameter, device="meta"))
        other._parameters[name] = kept
    for name, buffer in module._buffers.items():
        other._buffers[name] = None if buffer is None else torch.empty_like(buffer, device="meta")
    return other


def in_both_modes(module: nn.Module, x: Tensor) -> list[Any]:
    """What the class's forward makes of x in training and in evaluation."""
    out = []
    for module.training in (True, False):
        out.append(type(module).forward(module, x))
    return out


def further_arguments(cls: Any) -> str:
    """What a module's forward takes beside its one input, by name; empty where it takes nothing else."""
    more = list(inspect.signature(cls.forward).parameters.values())[2:]
    return ", ".join(str(one).split(":")[0].split("=")[0].strip() for one in more)


def agrees(one: Any, other: Tensor) -> bool:
    """Whether two float32 results are the same but for rounding, row by row."""
    if not isinstance(one, Tensor) or one.shape != other.shape:
        return False
    scale = other.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return bool(((one.float() - other.float()).abs() <= _TOLERANCE * scale).all())
