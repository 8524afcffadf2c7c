"""Norms: through `rms_norm` and `layer_norm`."""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bakeoff.ops import rms_norm
from bakeoff.ops.rms_norm.reference import rms_norm as rms_reference
from bakeoff.swaps.probe import agrees, draw, further_arguments, in_both_modes, quiet, stand_in
from bakeoff.swaps.replacement import Found, note

__all__ = ["find_norm"]

_EPS = ("variance_epsilon", "eps", "epsilon")
_D = 8


def find_norm(module: nn.Module) -> Found | str | None:
    """What replaces a norm; why nothing does; None where the module is no norm."""
    if "norm" in type(module).__name__.lower() and hasattr(module, "parametrizations"):
        return "its weight is computed, by torch.nn.utils.parametrize"
    named = any(
        "norm" in cls.__name__.lower() for cls in type(module).__mro__
    )  # a subclass may have any name
    if not named or any(True for _ in module.children()):
        return None
    if isinstance(module, nn.LayerNorm):
        return _layer_norm(module)
    if more := further_arguments(type(module)):
        return f"its forward also takes {more}: no op has that form"
    shape = getattr(module, "normalized_shape", (_D,))
    if isinstance(shape, tuple) and len(shape) != 1:
        return f"it normalises over {len(shape)} dimensions: rms_norm takes the last one"
    tensors = {name: held for name, held in module._parameters.items() if held is not None}
    weight = tensors.pop("weight", None)
    others = sorted(tensors)
    others += [f"the buffer {name}" for name, held in module._buffers.items() if held is not None]
    if others:
        return f"it holds {', '.join(others)}, which rms_norm, with nothing beside a weight, doesn't know"
    if weight is not None and (weight.dim() != 1 or not weight.is_floating_point() or weight.itemsize < 2):
        return f"its weight is {weight.dtype}{list(weight.shape)}: rms_norm takes [D] of 16 bits or more"
    eps = next((given for given in _EPS if hasattr(module, given)), None)
    if eps is None:
        return f"it has none of {', '.join(_EPS)}"
    return _rms(module, eps, weight is not None)


def _rms(module: nn.Module, eps: str, affine: bool) -> Found | str:
    given: dict[str, Any] = {"normalized_shape": (_D,)} if hasattr(module, "normalized_shape") else {}
    given |= {"hidden_size": _D} if hasattr(module, "hidden_size") else {}
    with quiet():
        x = draw(4, 3, _D) * torch.tensor([1.0, 1e-3, 30.0, 1e-5]).view(4, 1, 1)
        weight = draw(_D) if affine else None
        try:
            held = {"weight": weight} if weight is not None else {}
            given |= {} if affine else {"weight": None}
            both = in_both_modes(stand_in(module, held, **given), x)
            mixed = _mixed(module, given) if affine else None
            depends = _depends_on_kind(module, held, given)
            if getattr(module, eps) is None and not _default_eps(module, given, affine):
                return "its eps is None, which is not float32's here"
        except Exception as error:  # noqa: BLE001
            return f"its forward fails on a small stand-in ({type(error).__name__}: {error})"
        value = getattr(module, eps)
        for offset in (0.0, 1.0) if affine else (0.0,):
            small = torch.finfo(torch.float32).eps if value is None else value
            want: Any = rms_reference(x, weight, small, None, offset)
            if all(agrees(y, want) for y in both):
                if depends:
                    return "its forward does something else at other dtypes or numbers of dimensions"
                return Found(("norms",), ("rms_norm",), _rms_forward, (eps, offset, mixed is torch.float32))
    return "its forward is neither x / rms(x) * weight nor x / rms(x) * (1 + weight)"


def _depends_on_kind(module: nn.Module, held: Mapping[str, Tensor], given: Mapping[str, Any]) -> bool:
    """Whether half precision, or another number of dimensions, gives something else than the same rows do."""
    x, forward = draw(2, 3, _D), type(module).forward
    want = forward(stand_in(module, held, **given), x)
    if want.shape != x.shape:
        return True
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        small = stand_in(module, {name: tensor.to(dtype) for name, tensor in held.items()}, **given)
        for shape in (x.shape, (6, _D), (2, 1, 3, _D)):
            y = forward(small, x.to(dtype).view(shape))
            near = (y.double() - want.view(shape)).abs() <= 0.02 * want.abs().amax()
            if y.dtype != dtype or not near.all():
                return True
    return False


def _mixed(module: nn.Module, given: dict[str, Any]) -> torch.dtype:
    """The dtype of what bfloat16 becomes under a float32 weight."""
    other = stand_in(module, {"weight": draw(_D)}, **given)
    return type(module).forward(other, draw(2, _D, dtype=torch.bfloat16)).dtype  # type: ignore[no-any-return]


def _default_eps(module: nn.Module, given: dict[str, Any], affine: bool) -> bool:
    """Whether no eps means float32's for bfloat16, too."""
    x = draw(4, _D).mul(1e-3).to(torch.bfloat16)
    held = {"weight": torch.ones(_D, dtype=x.dtype)} if affine else {}
    y = type(module).forward(stand_in(module, held, **given), x)
    want = rms_reference(x.float(), None, torch.finfo(torch.float32).eps)
    return bool(((y.float() - want).abs() <= 0.02 * want.abs().amax()).all())  # type: ignore[union-attr]


def _rms_forward(cls: Any, eps: str, offset: float, promotes: bool) -> Callable[..., Tensor]:
    """promotes: the result has the wider dtype of input and weight, instead of the input's."""
    original, native = cls.forward, issubclass(cls, nn.RMSNorm)

    def forward(module: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        (x,) = (*args, *kwargs.values())
        if native and _cast_by_autocast(x):
            return original(module, x)  # type: ignore[no-any-return]
        weight, value = getattr(module, "weight", None), getattr(module, eps)
        if value is None:
            if (
                weight is not None and weight.dtype != x.dtype
            ):  # what PyTorch takes for eps then is its own affair
                return original(module, x)  # type: ignore[no-any-return]
            value = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        note("norms")
        if promotes and weight is not None and weight.dtype != x.dtype:
            x = x.to(torch.promote_types(x.dtype, weight.dtype))
        return rms_norm(x, weight, value, offset=offset)  # type: ignore[return-value]

    return forward


def _cast_by_autocast(x: Tensor) -> bool:
    """Whether autocast may have PyTorch's own norm cast its input first."""
    return x.dtype != torch.float32 and torch.is_autocast_enabled(x.device.type)


def _layer_norm(module: nn.LayerNorm) -> Found | str:
    if importlib.util.find_spec("bakeoff.ops.layer_norm") is None:
        return "this version has no op layer_norm"
    if type(module).forward is not nn.LayerNorm.forward:
        return "its forward is not nn.LayerNorm's"
    if len(module.normalized_shape) != 1:
        return f"it normalises over {len(module.normalized_shape)} dimensions: layer_norm takes the last one"
    weight = module.weight
    if weight is not None and (not weight.is_floating_point() or weight.itemsize < 2):
        return f"its weight is {weight.dtype}: layer_norm takes floating point of 16 bits or more"
    return Found(("norms",), ("layer_norm",), _layer_forward, ())


def _layer_forward(cls: type) -> Callable[..., Tensor]:
    del cls
    from bakeoff.ops.layer_norm import layer_norm

    def forward(module: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        (x,) = (*args, *kwargs.values())
        if _cast_by_autocast(x):
            return nn.LayerNorm.forward(module, x)
        note("norms")
        return layer_norm(x, module.weight, module.bias, module.eps)  # type: ignore[return-value]

    return forward
