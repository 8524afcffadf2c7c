"""Linear layers of 8-bit products, and a model's linear layers made so."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from bakeoff.autocast import as_autocast
from bakeoff.ops.fp8_linear import fp8_linear

__all__ = ["Fp8Linear", "convert"]


class Fp8Linear(nn.Linear):
    """torch.nn.Linear whose product is of x and weight rounded to e4m3 with a scale for each row.

    Parameters, their names and their dtypes are nn.Linear's; nothing else is kept. Shapes: x
    [..., in_features] -> [..., out_features]. `grad` is that of `bakeoff.ops.fp8_linear`, whose errors are
    raised here. Under autocast x and the parameters are first cast to its dtype, as in nn.Linear.

    >>> layer = Fp8Linear(32, 16)
    >>> layer.load_state_dict(nn.Linear(32, 16).state_dict())
    <All keys matched successfully>
    """

    grad: Literal["bf16", "e5m2"] = "bf16"

    @classmethod
    def of(cls, linear: nn.Linear, grad: Literal["bf16", "e5m2"] = "bf16") -> "Fp8Linear":
        """A layer with the parameters of `linear`, which the two then share."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.grad = grad
        return layer.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = map(as_autocast, (x, self.weight, self.bias))
        return fp8_linear(x, weight, bias, grad=self.grad)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, grad={self.grad}"


def convert(
    model: nn.Module,
    accept: Callable[[str, nn.Linear], bool] = lambda name, linear: True,
    *,
    grad: Literal["bf16", "e5m2"] = "bf16",
) -> list[str]:
    """Replace linear layers inside `model`, in place, by `Fp8Linear` with the same parameters.

    Args:
        model: what holds them; a model that is an nn.Linear itself is `Fp8Linear.of(model)`.
        accept: called with each layer's name, as in `named_modules`, and the layer; whether to replace it.
            Embeddings' tied heads and last layers are best left out. By default all are taken.
        grad: of the new layers.

    Returns:
        The names of the layers replaced. Subclasses of nn.Linear and layers with hooks or parametrizations,
        which a new layer would lose, are left as they are.

    >>> model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
    >>> convert(model, lambda name, linear: linear.out_features > 2)
    ['0']
    """
    replaced: dict[nn.Module, Fp8Linear] = {}
    names = []
    for name, module in [*model.named_modules(remove_duplicate=False)]:
        if not name or type(module) is not nn.Linear or _has_hooks(module):
            continue
        if module in replaced or accept(name, module):
            parent, _, own = name.rpartition(".")
            replaced.setdefault(module, Fp8Linear.of(module, grad))
            setattr(model.get_submodule(parent), own, replaced[module])
            names.append(name)
    return names


def _has_hooks(module: nn.Module) -> bool:
    return any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
            module._state_dict_hooks,
            module._load_state_dict_pre_hooks,
        )
    )
