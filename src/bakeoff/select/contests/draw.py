"""Inputs for a case: ordinary ones and ones chosen to break kernels."""

from collections.abc import Sequence
from typing import Any

import torch

from bakeoff.select.contests.lists import drawn_list
from bakeoff.select.declare.case import Case, TensorMeta
from bakeoff.select.declare.lists import ListMeta, TensorList
from bakeoff.select.declare.op import Op

__all__ = ["cotangent", "inputs", "nudged", "shrunk"]

_APART = 1 << 32  # between an input's seed and a gradient's: equal draws would hide errors that cancel


def inputs(op: Op, case: Case, seed: int, kind: str = "normal") -> list[Any]:
    """The op's positional arguments, drawn reproducibly from `seed`.

    "adversarial" keeps the shapes and gives every eighth row another trouble: a large mean, a large
    scale, tiny values, zeros, one hot element. "unusual" does so with values that are all negative, constant,
    tied, denormal, or beyond 2e4.
    """
    generator = torch.Generator(device=case.device).manual_seed(seed)
    args: list[Any] = []
    huge = kind == "unusual"  # one argument alone: products of such values are nobody's
    for name in op.params:
        value = case.args[name]
        if isinstance(value, ListMeta):
            args.append(_list(op, name, value, generator, kind))
            continue
        if not isinstance(value, TensorMeta):
            args.append(value)
            continue
        drawn = op.draw(name, value, generator) if op.draw else None
        if drawn is None and op.draw_among:
            drawn = op.draw_among(name, case, generator)
        if drawn is None:
            drawn = _normal(value, generator, case.device)
            if kind == "adversarial":
                _disturb(drawn, mild=op.averages)
            elif kind == "unusual":
                _make_unusual(drawn, huge=huge)
                huge = False
        args.append(_placed(drawn, value).requires_grad_(value.requires_grad))
    return args


def _list(op: Op, name: str, meta: ListMeta, generator: torch.Generator, kind: str) -> TensorList:
    """A list of tensors of the sizes that a model's have, drawn as one tensor. Adversarially the tensors take
    turns at the troubles that the rows of a tensor have."""
    flat = TensorMeta.dense((meta.numel,), meta.dtype)
    drawn = op.draw(name, flat, generator) if op.draw else None
    ordinary = drawn is None
    if drawn is None:
        drawn = _normal(flat, generator, str(generator.device))
    tensors = drawn_list(drawn, meta)
    if ordinary and kind == "adversarial":
        _disturb_list(tensors)
    return TensorList.of(tensors, name)


def cotangent(output: torch.Tensor, args: Sequence[Any], seed: int, kind: str = "normal") -> torch.Tensor:
    """A ready-made gradient for `output`, laid out like the first of `args` that has its shape, as a model's
    layers agree on one layout, else like `output`; adversarially an expanded (stride 0) one, or one whose
    last dimensions lie the other way round; "constant" is one number for all elements, as the gradient of a
    sum is: all strides are 0."""
    generator = torch.Generator(device=output.device).manual_seed(_APART + seed)
    shape, dtype, device = output.shape, output.dtype, str(output.device)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros_like(output)  # carries no gradient; only its shape and dtype are looked at
    like = next((a for a in args if isinstance(a, torch.Tensor) and a.shape == shape), None)
    laid = output if like is None else torch.empty_like(like, dtype=dtype, device="meta")
    if kind == "constant":
        return _normal(TensorMeta.dense((), dtype), generator, device).expand(shape)
    if kind == "normal" or output.dim() < 2 or output.numel() == 0:
        meta = TensorMeta.of(laid)
        return _placed(_normal(meta, generator, device), meta)
    if seed % 2:
        return _normal(TensorMeta.dense(shape[-1:], dtype), generator, device).expand(shape)
    if not laid.is_contiguous():
        return _normal(TensorMeta.of(laid), generator, device)
    turned = TensorMeta.dense((*shape[:-2], shape[-1], shape[-2]), dtype)
    return _normal(turned, generator, device).transpose(-1, -2)


def nudged(tensor: torch.Tensor, generator: torch.Generator, *, coarsely: bool = False) -> torch.Tensor:
    """A copy of which each number is up to two units in its last place away: so hard a draw as before, but
    all roundings fall otherwise. `coarsely`: in what is its last place once it is rounded to bfloat16."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    once = _once(tensor)
    units = torch.randint(-2, 3, once.shape, generator=generator, device=tensor.device)
    unit = max(torch.finfo(tensor.dtype).eps, torch.finfo(torch.bfloat16).eps if coarsely else 0.0)
    return _like(tensor, once * (1 + units * unit).to(once.dtype))


def shrunk(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A copy times one factor from 1/2 to 1: a gradient, products with which are rounded otherwise."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    factor = 0.5 + 0.5 * torch.rand((), generator=generator, device=tensor.device)
    return _like(tensor, _once(tensor) * factor.to(tensor.dtype))


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """What is expanded in `tensor` taken once."""
    return tensor.detach()[tuple(slice(1 if step == 0 else None) for step in tensor.stride())]


def _like(tensor: torch.Tensor, once: torch.Tensor) -> torch.Tensor:
    """`once` laid out and expanded like `tensor`."""
    laid = _placed(once.expand(tensor.shape), TensorMeta.of(tensor))
    return laid.requires_grad_(tensor.requires_grad)


def _placed(drawn: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """`drawn` in the layout of `meta`; windows that overlap in memory become dense."""
    once = tuple(1 if step == 0 else size for size, step in zip(meta.shape, meta.stride, strict=True))
    reach = 0
    for step, size in sorted(zip(meta.stride, once, strict=True)):
        if size > 1 and step <= reach:
            return drawn.contiguous()
        reach += (size - 1) * step
    tensor = torch.empty_strided(once, meta.stride, dtype=meta.dtype, device=drawn.device)
    tensor.copy_(drawn[tuple(slice(size) for size in once)])
    return tensor.expand(meta.shape)


def _normal(meta: TensorMeta, generator: torch.Generator, device: str) -> torch.Tensor:
    if not (meta.dtype.is_floating_point or meta.dtype.is_complex):
        raise TypeError(f"an op with a {meta.dtype} argument must draw it itself (Op.draw)")
    return torch.randn(meta.shape, generator=generator, dtype=meta.dtype, device=device)


def _disturb(tensor: torch.Tensor, *, mild: bool = False) -> None:
    """Give rows i, i+8, i+16, ... the i-th trouble, in place; a tensor of one row gets a large mean. Products
    of two rows are scores of some hundreds where it is `mild`: past that float32 rounds the weights that a
    softmax gives by percents."""
    mean, factor, hot = (2, 8, 16) if mild else (30, 1000, 3000)
    if tensor.numel() == 0:
        return
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(1, -1)
    rows[0::8] += mean
    rows[1::8] *= factor
    rows[2::8] *= 1e-4
    rows[3::8] = 0
    rows[4::8, rows.shape[-1] // 2] += hot


def _make_unusual(tensor: torch.Tensor, *, huge: bool) -> None:
    """As `_disturb`, with values that are rare; a tensor of one row becomes all negative. Only matrices have
    a row of `huge` ones: rows of a sequence have to do with each other, and an FFT rounds all of them as
    coarsely as the largest."""
    if tensor.numel() == 0:
        return
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).flatten(-2)
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(1, -1)
    rows[0::8] = -rows[0::8].abs()
    rows[1::8] = rows[1::8, :1].clone()
    rows[2::8] = rows[2::8].mul(2).round().div(2)
    rows[3::8] *= torch.finfo(tensor.dtype).smallest_normal / 8
    if huge and tensor.dim() <= 2:
        rows[4:5] = 3e4 * rows[4:5].sgn()


def _disturb_list(tensors: list[torch.Tensor]) -> None:
    """As `_disturb`, with tensors for rows."""
    for first, change in enumerate(
        (
            lambda some: torch._foreach_add_(some, 30),
            lambda some: torch._foreach_mul_(some, 1000),
            lambda some: torch._foreach_mul_(some, 1e-4),
            torch._foreach_zero_,
        )
    ):
        if tensors[first::8]:
            change(tensors[first::8])
    for tensor in tensors[4::8]:
        if tensor.numel():
            tensor[(-1,) * tensor.dim()] += 3000
