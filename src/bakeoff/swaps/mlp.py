"""Gated MLPs: the activation and its product through `swiglu`; projections are called as they are."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bakeoff.nn.hooks import hooked
from bakeoff.ops import swiglu
from bakeoff.swaps.probe import Times, agrees, draw, further_arguments, in_both_modes, quiet, stand_in
from bakeoff.swaps.replacement import Found, note

__all__ = ["find_mlp"]

_APART = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_TOGETHER = ("gate_up_proj", "down_proj")
_ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation")
_D, _F = 6, 10


def find_mlp(module: nn.Module) -> Found | str | None:
    """What replaces a gated MLP; why nothing does; None where the module is no MLP."""
    children = {name for name, _ in module.named_children()}
    names = next((three for three in (*_APART, _TOGETHER) if children.issuperset(three)), None)
    if names is None:
        kind = type(module).__name__
        if not any(word in kind for word in ("MLP", "FeedForward", "Experts")):
            return None
        if any(parameter.dim() == 3 for parameter in module._parameters.values() if parameter is not None):
            return "its experts' weights are stacked in one parameter: there are no projections to call"
        return f"it has no gate and no projections called {', '.join(_APART[0])} or {', '.join(_TOGETHER)}"
    if more := further_arguments(type(module)):
        return f"its forward also takes {more}"
    for name, child in module.named_children():
        if isinstance(child, nn.Dropout) and child.p > 0:
            return f"it drops out ({name}, p = {child.p})"
        if name not in names and any(True for _ in child.parameters()):
            return f"it has {name} ({type(child).__name__}) beside its projections"
        if name not in names and hooked(child):
            return f"its {name} has hooks, which would not be called; remove them before the swap"
    with quiet():
        x = draw(3, 4, _D)
        wide = 2 * _F if names == _TOGETHER else _F
        small: dict[str, nn.Module] = {name: Times(_D, wide) for name in names[:-1]}
        small[names[-1]] = Times(_F, _D)
        other = stand_in(module, None, small)
        try:
            both = in_both_modes(other, x)
        except Exception as error:  # noqa: BLE001
            return f"its forward fails on a small stand-in ({type(error).__name__}: {error})"
        want = _forward_of(names)(other, x)
        if all(agrees(y, want) for y in both):
            others = (pair for pair in module.named_children() if pair[0] not in names)
            beside = tuple((name, type(child)) for name, child in others)
            return Found(("mlp",), ("swiglu",), _forward, (names, beside))
    return f"its forward is not down(silu(gate(x)) * up(x)){_because(module)}"


def _because(module: nn.Module) -> str:
    """The activation, where it is known and not SiLU."""
    for name in _ACTIVATIONS:
        found = getattr(module, name, None)
        if found is not None:
            called = getattr(found, "__name__", type(found).__name__)
            return "" if "silu" in called.lower() else f": its activation is {called}"
    return ""


def _forward(
    cls: Any, names: tuple[str, ...], beside: tuple[tuple[str, type[nn.Module]], ...]
) -> Callable[..., Tensor]:
    """`beside` are the names and classes of the children that aren't called: the activation, and dropout that
    drops nothing."""
    original, ours = cls.forward, _forward_of(names)

    def forward(module: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        for name, kind in beside:  # since the swap there may be hooks on the activation, or another one
            child = getattr(module, name, None)
            if type(child) is not kind or hooked(child):
                out: Tensor = original(module, *args, **kwargs)
                return out
        return ours(module, *args, **kwargs)

    return forward


@functools.cache
def _forward_of(names: tuple[str, ...]) -> Callable[..., Tensor]:
    down = names[-1]

    def forward(module: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        (x,) = (*args, *kwargs.values())
        note("mlp")
        if len(names) == 2:
            inner = swiglu(getattr(module, names[0])(x))
        else:
            gate, up = getattr(module, names[0])(x), getattr(module, names[1])(x)
            if gate.dtype != up.dtype:  # an adapter of one of them in a wider dtype: PyTorch's product widens
                wide = torch.promote_types(gate.dtype, up.dtype)
                gate, up = gate.to(wide), up.to(wide)
            inner = swiglu(gate, up)
        return getattr(module, down)(inner)  # type: ignore[no-any-return]

    return forward
