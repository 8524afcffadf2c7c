"""Private copies of a model, and a surrounding in which trying them leaves no trace."""

import contextlib
import copy
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "Parameters",
    "copied",
    "device_of",
    "generators",
    "random_kept",
    "seeded_dropout",
    "set_mode",
    "twin",
    "uncompiled",
]

Parameters = dict[str, nn.Parameter]


def copied(model: nn.Module) -> nn.Module:
    """A copy with parameters of its own and no gradients."""
    fresh = {}
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise TypeError(f"parameter {name} has no shape yet: call the model once first")
        if p.is_meta:
            raise TypeError(f"parameter {name} is on the meta device: load or initialise the model first")
        fresh[name] = nn.Parameter(p.detach().clone(), p.requires_grad)
        fresh[name].__dict__.update(p.__dict__)
    return twin(model, fresh)


def twin(model: nn.Module, replace: Parameters | None = None) -> nn.Module:
    """The model with the same (or the given) parameters and copies of everything else.

    Tensors with a gradient history are copied without it; what can't be copied, such as a lock, is shared.
    """
    memo: dict[int, Any] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        memo.setdefault(id(p), (replace or {}).get(name, p))
    with contextlib.suppress(Exception):
        return _deepcopy(model, dict(memo))
    for module in model.modules():
        for name, value in vars(module).items():
            if name != "_modules":
                _prepare(value, memo)
    try:
        return _deepcopy(model, memo)
    except Exception as error:
        raise TypeError(
            f"the model can't be copied ({type(error).__name__}: {error}): pass a function, to try it as it "
            "is: assert_causal(lambda ids: model(ids), ids)"
        ) from error


def _deepcopy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """As `copy.deepcopy`, which spends most of its time on the empty tables of hooks that each module has."""
    shells = []
    for module in model.modules():
        if id(module) not in memo and all(
            getattr(type(module), name, None) is getattr(nn.Module, name, None) for name in _COPYING
        ):
            memo[id(module)] = type(module).__new__(type(module))
            shells.append((module, memo[id(module)]))
    for module, shell in shells:
        for name, value in vars(module).items():
            empty = type(value) in (dict, OrderedDict) and not value
            shell.__dict__[name] = type(value)() if empty else copy.deepcopy(value, memo)
    return copy.deepcopy(model, memo)


_COPYING = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__slots__")


def _prepare(value: Any, memo: dict[int, Any], depth: int = 4) -> None:
    """Puts into `memo` what stands for those parts of `value` that deepcopy refuses."""
    if id(value) in memo or isinstance(value, nn.Module):
        return
    if isinstance(value, Tensor):
        if not value.is_leaf:
            memo[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
        return
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:  # noqa: BLE001 (anything may refuse a copy in its own way)
        inner = list(value.values()) if isinstance(value, dict) else value
        held = (
            inner if isinstance(inner, list | tuple | set) else list(getattr(value, "__dict__", {}).values())
        )
        if depth and held:
            for part in held:
                _prepare(part, memo, depth - 1)
        else:
            memo[id(value)] = value


def set_mode(model: nn.Module, training: bool) -> None:
    """Puts `model` into training or evaluation mode, through its own `train`.

    Parts that the caller put into evaluation mode in a model that trains, such as a frozen BatchNorm, stay.
    """
    kept = [part for part in model.modules() if not part.training] if training and model.training else []
    model.train(training)
    for part in kept:
        part.training = False


def device_of(model: nn.Module) -> torch.device | None:
    """Where the model is; None where it holds nothing."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), None)


def generators(model: nn.Module, device: torch.device | None = None) -> list[torch.Generator]:
    """The default generators of the CPU and of the GPUs that the model and `device` are on."""
    devices = {t.device for t in (*model.parameters(), *model.buffers())} | ({device} if device else set())
    used = sorted({d.index or 0 for d in devices if d.type == "cuda"})
    return [torch.default_generator, *(torch.cuda.default_generators[index] for index in used)]


@contextlib.contextmanager
def random_kept(model: nn.Module, device: torch.device | None = None) -> Iterator[None]:
    """All random states are afterwards what they were."""
    used = generators(model, device)
    states, python, array = [g.get_state() for g in used], random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        for generator, state in zip(used, states, strict=True):
            generator.set_state(state)
        random.setstate(python)
        np.random.set_state(array)  # noqa: NPY002
        torch.clear_autocast_cache()


@contextlib.contextmanager
def seeded_dropout(model: nn.Module) -> Iterator[None]:
    """cuDNN's recurrent layers drop by a state that no seed resets; PyTorch's follow the seed."""
    drops = any(isinstance(part, nn.RNNBase) and part.dropout > 0 for part in model.modules())
    enabled = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = enabled and not drops
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = enabled


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Twins would be compiled anew, each; without a compiler loaded there is nothing to hold back."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
