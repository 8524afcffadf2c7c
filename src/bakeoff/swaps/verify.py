"""A swapped model against its own code, by the rule of contests.

Outputs, loss and every gradient are compared with the model's own code in float64; the yardstick is the error
of its own code in its own dtype.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bakeoff.errors import SwapError
from bakeoff.select.contests.copies import Rejected
from bakeoff.select.contests.judge import Errors, Standard, errors_of, judge
from bakeoff.swaps.replacement import replacement_of

if TYPE_CHECKING:
    from bakeoff.swaps.report import Report

__all__ = ["Comparison", "verify"]

Batch = tuple[Sequence[Any], Mapping[str, Any]]
Results = dict[str, Tensor]


class Comparison(NamedTuple):
    """Errors against float64, by name: ``output``, ``loss`` and ``d NAME`` of each parameter."""

    swapped: dict[str, Errors]
    own: dict[str, Errors]
    calls: dict[str, int]

    def __str__(self) -> str:
        worst = max(self.swapped, key=lambda name: self.swapped[name].rms)
        return (
            f"{len(self.swapped)} results agree; the furthest is {worst}: rms error "
            f"{self.swapped[worst].rms:.2g}, that of the model's own code {self.own[worst].rms:.2g}"
        )


class _KeepDouble(TorchFunctionMode):
    """What a model's code casts to float32 for accuracy is float64 instead, where it was float64 or whole
    numbers, such as positions."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        first = args[0] if args else None
        double = isinstance(first, Tensor) and (
            first.dtype == torch.float64 or not (first.is_floating_point() or first.is_complex())
        )
        if double and func is Tensor.float:
            return args[0].double()
        if double:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            given = {
                name: torch.float64 if value is torch.float32 else value for name, value in given.items()
            }
        return func(*args, **given)


def verify(report: "Report", args: Sequence[Any], kwargs: Mapping[str, Any]) -> Comparison:
    """See `Report.verify`."""
    batch: Batch = (args, kwargs)
    for name, held in report.replaced.items():
        if replacement_of(held.module) is not held:
            raise SwapError(f"verify: the swap of {name or 'the model'} has been undone; swap again first")
    before = {name: dict(held.calls) for name, held in report.replaced.items()}
    losses = [name for name, held in report.replaced.items() if "loss" in held.found.kinds]
    mine = _results(report.model, batch, losses)
    silent = [
        f"{name or 'the model'} ({kind})"
        for name, held in report.replaced.items()
        for kind, count in held.calls.items()
        if count == before[name][kind]
    ]
    if silent:
        raise SwapError(
            f"verify: {len(silent)} of the replacements did not run on this batch: {', '.join(silent[:5])}; "
            f"give labels for the loss, no mask and no row beyond a sliding window for attention, inputs "
            f"that reach these modules, or leave that kind out of the swap"
        )
    calls = report.calls()
    with report.undone():
        exact_model = _exact(report.model)

        def own(batch: Batch) -> tuple[Results, Results]:
            try:
                with _KeepDouble():
                    exact = _results(exact_model, _double(batch), losses)
            except Exception as error:
                raise SwapError(
                    f"verify: the model's own code, which results are compared with, fails in float64 "
                    f"({type(error).__name__}: {error}); compare with it in the model's own dtype yourself"
                ) from error
            return exact, _results(report.model, batch, losses)

        exact, plain = own(batch)
        standard = _standard(exact, plain, batch, own)
        swapped = {name: _judged(name, tensor, standard) for name, tensor in mine.items()}
    return Comparison(swapped, {name: errors_of(plain[name], exact[name]) for name in mine}, calls)


def _exact(model: nn.Module) -> Any:
    """A copy in float64; mixtures of experts without grouped products, which take no float64."""
    try:
        other: Any = copy.deepcopy(model).double()
    except Exception as error:
        raise SwapError(
            f"verify: the model can't be copied into float64 ({type(error).__name__}: {error}); compare with "
            f"its own code yourself, within `with report.undone():`"
        ) from error
    if hasattr(other, "set_experts_implementation"):
        other.set_experts_implementation("eager")
    return other


def _judged(name: str, tensor: Tensor, standard: Standard) -> Errors:
    try:
        return judge(name, tensor, standard)
    except Rejected as error:
        raise SwapError(f"verify: {error}") from None


def _standard(
    exact: Results, plain: Results, batch: Batch, own: Callable[[Batch], tuple[Results, Results]]
) -> Standard:
    """The model's own errors as a yardstick, on this batch and on shifted ones."""

    def further(number: int) -> dict[str, Errors]:
        exact, plain = own(_shifted(batch, number + 1))
        return {name: errors_of(plain[name], exact[name]) for name in exact}

    rows = max((t.numel() // max(t.shape[-1], 1) for t in [exact["output"]]), default=1)
    return Standard(
        where="this batch",
        exact=exact,
        dtypes={name: tensor.dtype for name, tensor in plain.items()},
        eager={name: errors_of(plain[name], exact[name]) for name in plain},
        terms={name: 1.0 if name == "output" else float(rows) for name in exact},
        denormal={},
        further=further,
    )


def _results(model: nn.Module, batch: Batch, losses: Sequence[str]) -> Results:
    """Outputs without labels, the loss, and the gradient of each parameter that isn't frozen; `losses` are
    the names of modules whose loss was replaced."""
    args, kwargs = batch
    with _evaluating(model), torch.enable_grad():
        with torch.no_grad():
            shifts = getattr(
                getattr(model, "config", None), "is_encoder_decoder", False
            )  # labels into inputs
            told = {name: value for name, value in kwargs.items() if name != "labels" or shifts}
            outputs = _tensors(model(*args, **told))
        if not outputs:
            raise SwapError("verify: the model returned no floating-point tensor")
        for name in ("", *losses):  # of these alone: it decides whether the loss needs logits
            model.get_submodule(name).training = True
        out = model(*args, **kwargs)
        loss: Any = getattr(out, "loss", None)
        if loss is None:
            loss = sum(_projected(tensor) for tensor in _tensors(out))
        wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True) if wanted else ()
    found = {"output": outputs[0], "loss": loss.detach()}
    found |= {f"output {i}": tensor for i, tensor in enumerate(outputs[1:], 1)}
    # Flat: a weight's row is one unit's gradient, which may cancel to nothing to be relative to.
    found |= {
        f"d {name}": grad.flatten() for name, grad in zip(wanted, grads, strict=True) if grad is not None
    }
    return found


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _projected(tensor: Tensor) -> Tensor:
    """A number that every element has a part in."""
    flat = tensor.reshape(-1)
    wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return (wide * torch.linspace(-1, 1, flat.numel(), dtype=wide.dtype, device=flat.device)).sum()


def _tensors(out: Any) -> list[Tensor]:
    """Floating-point tensors of a model's output; of a language model, its logits."""
    if isinstance(out, Tensor):
        return [out] if out.is_floating_point() else []
    if getattr(out, "logits", None) is not None:
        return [out.logits]
    values = out.values() if isinstance(out, Mapping) else out if isinstance(out, (tuple, list)) else ()
    return [tensor for value in values for tensor in _tensors(value)]


def _double(batch: Batch) -> Batch:
    def wide(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    args, kwargs = batch
    return [wide(value) for value in args], {name: wide(value) for name, value in kwargs.items()}


def _shifted(batch: Batch, by: int) -> Batch:
    """The batch with every sequence turned by some places; masks and positions stay."""

    def turned(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2 or "mask" in name or "position" in name:
            return value
        return value.roll(by, 1)

    args, kwargs = batch
    return [turned("", value) for value in args], {name: turned(name, v) for name, v in kwargs.items()}
