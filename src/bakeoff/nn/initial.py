"""First values: of a module that is built, and of one that was built without data and then given memory."""

import torch
from torch import Tensor, nn

__all__ = ["StartsAnew", "fill", "start_anew"]


def start_anew(*modules: nn.Module) -> None:
    """Calls `reset_parameters` of each module; where there is none, of the modules that it is made of.

    In the order in which they were built, so that as many random numbers are drawn as for new ones.
    """
    for module in modules:
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        else:
            start_anew(*module.children())


class StartsAnew(nn.Module):
    """Base of a module that is made of others. Its `__init__` ends with `first_values`, when the others have
    theirs."""

    def first_values(self) -> None:
        """Gives its own parameters their first values, and changes those of its parts where needed."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Gives all parameters and buffers their first values, also in memory that holds none yet, as after
        ``to_empty`` of what was built on the meta device. The same random state gives a new module's values.
        """
        start_anew(*self.children())
        self.first_values()


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor) -> None:
    """Writes `values` into `tensor`, of the same shape; where `fully_shard` made it, into this rank's part,
    with the first rank's values."""
    if hasattr(tensor, "placements") and not hasattr(values, "placements"):
        from torch.distributed.tensor import distribute_tensor  # takes half a second to import

        values = distribute_tensor(values, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    tensor.copy_(values)
