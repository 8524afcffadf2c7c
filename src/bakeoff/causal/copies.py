"""Private copies of a model, and a surrounding in which trying them leaves no trace."""

import contextlib
import copy
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["Parameters", "copied", "device_of", "generators", "random_kept", "twin", "uncompiled"]

Parameters = dict[str, nn.Parameter]


def copied(model: nn.Module) -> nn.Module:
    """A copy with parameters of its own and no gradients."""
    fresh = {}
    for name, p in model.named_parameters():
        fresh[name] = nn.Parameter(p.detach().clone(), p.requires_grad)
        fresh[name].__dict__.update(p.__dict__)
    return twin(model, fresh)


def twin(model: nn.Module, replace: Parameters | None = None) -> nn.Module:
    """The model with the same (or the given) parameters and copies of everything else."""
    memo: dict[int, Any] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        memo.setdefault(id(p), (replace or {}).get(name, p))
    try:
        return copy.deepcopy(model, memo)
    except RuntimeError as error:
        raise TypeError(
            f"the model can't be copied ({str(error).partition('.')[0]}): keep no tensors with a gradient "
            "history as attributes; detach them"
        ) from error


def device_of(model: nn.Module) -> torch.device:
    """Where the model is; the CPU where it holds nothing."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def generators(model: nn.Module) -> list[torch.Generator]:
    """The default generators of the CPU and of the GPUs that the model is on."""
    used = {t.device.index for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    return [torch.default_generator, *(torch.cuda.default_generators[index] for index in sorted(used))]


@contextlib.contextmanager
def random_kept(model: nn.Module) -> Iterator[None]:
    """All random states are afterwards what they were."""
    used = generators(model)
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
def uncompiled() -> Iterator[None]:
    """Twins would be compiled anew, each; without a compiler loaded there is nothing to hold back."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
