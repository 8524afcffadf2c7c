"""What a module does beside its own forward."""

from torch import nn

__all__ = ["hooked"]


def hooked(module: nn.Module) -> bool:
    """Whether a call of `module` runs hooks, or a forward set on it alone."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks) or "forward" in vars(module)
