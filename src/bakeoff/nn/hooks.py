"""What a module does beside its own forward."""

from torch import nn

__all__ = ["hooked"]


def hooked(module: nn.Module) -> bool:
    """Whether a call of `module` runs hooks, or a forward set on it alone."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
    )
