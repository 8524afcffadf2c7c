"""The leak guard before the first step: a model that sees its future would learn to copy it."""

import torch
from torch import Tensor, nn

from bakeoff.apps.train.config import Config
from bakeoff.apps.train.step import uses_bf16
from bakeoff.causal import assert_causal
from bakeoff.select.choose.policy import untuned

__all__ = ["check_leaks"]

# Perturbed rows. With the 24 most frequent bytes right after a cut, they expose gates on one of these bytes.
_ROWS = 8
_LENGTH = {"cpu": 128, "cuda": 1024}  # bytes of a row: about 115 passes, most of them small, in some seconds


def check_leaks(model: nn.Module, rows: Tensor, config: Config, device: torch.device) -> None:
    """Raises `CausalityError`, naming the position, where an output of `model` sees its own future.

    A perturbed copy is tried on real `rows` [N, T] in float32, where the test is sharpest, and in the run's
    own precision, whose kernels may be others. The model and all random states stay as they are.
    """
    with untuned():
        for bf16 in (False, True) if uses_bf16(config, device) else (False,):
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
                assert_causal(
                    model,
                    rows[:_ROWS, : config.seq_len],
                    vocab=config.model.vocab,
                    length=_LENGTH[device.type],
                    samples=_ROWS,
                    check_decode=False,
                )
