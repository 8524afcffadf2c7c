"""torch.optim.Muon's step behind this op's signature.

Written against PyTorch 2.13, which has it since 2.9. It walks over matrices one by one, in bfloat16 on every
device. What the adaptation costs counts as its own.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from bakeoff.ops.adamw.group import factor_of
from bakeoff.ops.muon.settings import COEFFICIENTS, EPS, arguments
from bakeoff.select import Case

__all__ = ["torch_muon", "torch_supports"]

_SCALES = {"match_rms": "match_rms_adamw", "spectral": "original"}


def torch_muon(*args: Any) -> None:
    """The function behind torch.optim.Muon. Its momentum is a mean, m + (1 - decay) (g - m): with gradients
    larger by 1/(1 - decay) that is this op's sum, and what is orthogonalised is the same."""
    from torch.optim._muon import muon

    matrices, how = arguments(args)
    assert not isinstance(how.lr, Tensor)
    larger: float | Tensor = factor_of(how) / (1.0 - how.momentum_decay)
    muon(
        list(matrices.params), list(torch._foreach_mul(matrices.grads, larger)), list(matrices.momentum),
        lr=how.lr, weight_decay=how.weight_decay, momentum=how.momentum_decay, nesterov=how.nesterov,
        ns_coefficients=COEFFICIENTS, ns_steps=how.steps, eps=EPS, adjust_lr_fn=_SCALES[how.scale],
        has_complex=False,
    )  # fmt: skip


def torch_supports(case: Case) -> str | None:
    """Why torch.optim.Muon can't take `case`, or None."""
    if find_spec("torch.optim._muon") is None:
        return "this PyTorch has no torch.optim.Muon; 2.9 is the first one that has"
    if case.found_inf is not None:
        return "torch.optim.Muon can't skip a step without the host"
    if case.sums is not None or case.direction is not None:
        return "torch.optim.Muon keeps no directions and sums"
    if not isinstance(case.lr, int | float) or case.lr_mult is not None:
        return "torch.optim.Muon waits for a rate on the device"
    if {meta.dtype for meta in case.lists.values()} != {torch.float32}:
        return "takes float32 alone: it would narrow the momentum, or divide it in place"
    return None if case.params.numel else "does not take empty matrices"
