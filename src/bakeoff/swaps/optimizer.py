"""AdamW of PyTorch's as bakeoff's, with its state."""

import torch

from bakeoff.errors import SwapError
from bakeoff.optim import AdamW

__all__ = ["converted"]


def converted(optimizer: torch.optim.Optimizer) -> AdamW:
    """bakeoff's AdamW over the same parameters, groups and moments. `optimizer` itself is left as it is, but
    for its moments, which both have from then on: go on with the new one alone.

    Raises:
        SwapError: it is no plain torch.optim.AdamW, or something that can't be carried over depends on it.
    """
    if type(optimizer) is not torch.optim.AdamW:
        kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        raise SwapError(f"swap: optimizer is a {kind}; only a torch.optim.AdamW can be converted")
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise SwapError("swap: a scheduler already drives the optimizer; swap first, then make the scheduler")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise SwapError("swap: the optimizer has hooks on its step, which the new one would not call")
    for at, group in enumerate(optimizer.param_groups):
        for setting in ("amsgrad", "differentiable"):
            if group[setting]:
                raise SwapError(
                    f"swap: the optimizer's group {at} has {setting}=True, which AdamW here has not"
                )
    groups = [
        {name: group[name] for name in ("params", "lr", "betas", "eps", "weight_decay", "maximize")}
        for group in optimizer.param_groups
    ]
    other = AdamW(groups)
    saved = optimizer.state_dict()
    for group, kept in zip(other.state_dict()["param_groups"], saved["param_groups"], strict=True):
        kept.update({name: value for name, value in group.items() if name not in kept})
        kept.update(foreach=None, fused=None)
    other.load_state_dict(saved)
    return other
