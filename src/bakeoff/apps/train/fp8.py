"""train.fp8: the projections of MLPs and attention multiply in FP8."""

import torch
from torch import nn

from bakeoff.apps.train.config import ConfigError
from bakeoff.apps.train.metrics import log
from bakeoff.nn import Fp8Linear, convert
from bakeoff.ops.fp8_linear import lacks_fp8

__all__ = ["to_fp8"]

_PARENTS = ("mlp", "attention", "mixer")
_PROJECTIONS = ("gate_up", "down", "qkv", "q", "k", "v", "out")


def to_fp8(model: nn.Module, device: torch.device) -> list[str]:
    """Converts the model's projections and returns their names; none if that is done already. Warns where
    `device` multiplies no FP8, and raises ConfigError for a model that has no such layers."""
    if any(isinstance(module, Fp8Linear) for module in model.modules()):
        return []
    names = convert(model, _is_projection)
    if not names:
        raise ConfigError(
            "train.fp8=true: the model has no projections of MLPs or attention; set it to false"
        )
    reason = lacks_fp8(device)
    if reason is None:
        log.info("train.fp8: %d linear layers multiply in FP8", len(names))
    else:
        log.warning(
            "train.fp8: %s, so %d linear layers round to FP8 and multiply in float32, which is slower than "
            "train.fp8=false", reason, len(names),
        )  # fmt: skip
    return names


def _is_projection(name: str, linear: nn.Linear) -> bool:
    """Of the block's MLP or attention; memories, embeddings and heads are not."""
    *_, parent, own = ["", *name.split(".")]
    return parent in _PARENTS and own in _PROJECTIONS
