"""How a model is asked and what it answers: which argument takes targets, where logits and loss are."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Answer", "Called", "Form", "answer", "form_of"]

_TARGETS = ("targets", "labels", "target", "label", "lm_labels")
_WRAP = "or pass a function of ids alone: assert_causal(lambda ids: ...)"


class Answer(NamedTuple):
    """Logits [B, T, -1] and a loss [], both as the model computed them; None where it gives none."""

    logits: Tensor | None
    loss: Tensor | None


class Called(nn.Module):
    """A function of ids as a module: it has no mode and no parameters, so it is tried as it is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["function"] = function  # a module in here stays the caller's own

    def __deepcopy__(self, memo: dict[int, Any]) -> "Called":
        return self

    def forward(self, ids: Tensor) -> Any:
        return self.__dict__["function"](ids)


class Form(NamedTuple):
    """How `forward` is called: the name of its targets, whether it must have them, and whether it takes
    ``return_logits=True``, for logits beside the loss."""

    targets: str | None = None
    needed: bool = False
    return_logits: bool = False


def form_of(model: nn.Module) -> Form:
    """Reads `forward`'s signature.

    Raises:
        TypeError: for a `forward` that ids alone can't call.
    """
    try:
        named = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):  # a compiled one that doesn't say
        return Form()
    name = next((p.name for p in named[1:] if p.name in _TARGETS), None)
    plain = [p for p in named if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not named or (plain and plain[0] is named[0] and plain[0].kind == inspect.Parameter.KEYWORD_ONLY):
        raise TypeError(
            f"forward({', '.join(map(str, named))}) can't be called as model(ids): take ids first, {_WRAP}"
        )
    needed = [p.name for p in plain[1:] if p.default is p.empty]
    if wanting := [need for need in needed if need != name]:
        raise TypeError(f"forward needs {', '.join(wanting)} beside ids: give a default, {_WRAP}")
    return Form(name, name in needed, any(p.name == "return_logits" for p in named))


def answer(out: Any, ids: Tensor, *, scored: bool) -> Answer:
    """Finds the logits and, where targets were given (`scored`), the loss in what a model returned.

    Raises:
        TypeError, ValueError: without logits and, if `scored`, without a loss, too; says what to return.
    """
    named, parts = _parts(out)
    logits = named.get("logits")
    if logits is None:
        logits = next((part for part in parts if _fits(part, ids, scored)), None)
    loss = named.get("loss")
    if loss is None and scored:
        loss = next((part for part in parts if part is not logits and _is_loss(part, ids)), None)
    if logits is None and loss is None:
        raise _nothing(out, parts, ids)
    if logits is not None:
        if not _fits(logits, ids, scored=False):
            raise _misshapen(logits, ids)
        logits = torch.view_as_real(logits) if logits.is_complex() else logits
        logits = logits.reshape(*ids.shape, -1)
    return Answer(logits, None if loss is None or not scored else loss.float().mean() if loss.ndim else loss)


def _parts(out: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The tensors that go by a name, and all in their order."""
    if isinstance(out, Tensor):
        return {}, [out]
    if isinstance(out, Mapping):
        held = {str(key): value for key, value in out.items() if isinstance(value, Tensor)}
        return held, list(held.values())
    named = {name: getattr(out, name, None) for name in ("logits", "loss")}
    held = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    listed = list(out) if isinstance(out, tuple | list) else list(held.values())
    return held, [part for part in listed if isinstance(part, Tensor)]


def _fits(part: Tensor, ids: Tensor, scored: bool) -> bool:
    """Whether these are the logits: [B, T, ...], or [B * T, vocab]."""
    if part.shape[:2] == ids.shape:
        return part.ndim > 2 or not scored
    return part.ndim == 2 and part.shape[0] == ids.numel() and part.shape[0] != part.shape[1]


def _is_loss(part: Tensor, ids: Tensor) -> bool:
    """One number, one to a row or one to a position."""
    sizes = {(), (1,), ids.shape[:1], ids.shape, (ids.numel(),)}
    return part.is_floating_point() and tuple(part.shape) in sizes


def _nothing(out: Any, parts: list[Tensor], ids: Tensor) -> Exception:
    if parts:
        return _misshapen(parts[0], ids)
    return TypeError(
        f"model(ids) gave {_described(out)}, expected logits [B, T, vocab]: alone, in a tuple, in a dict or "
        f"as .logits; return them, {_WRAP}"
    )


def _misshapen(found: Tensor, ids: Tensor) -> ValueError:
    shape, (rows, length) = tuple(found.shape), ids.shape
    advice = f"return one row of logits for every position, {_WRAP}"
    if len(shape) == 3 and shape[0] == rows and shape[2] == length:
        advice = "return logits.transpose(1, 2)"
    elif len(shape) >= 2 and shape[:2] == (length, rows):
        advice = "return logits.transpose(0, 1): batch first"
    elif len(shape) == 2 and shape[0] == rows:
        advice = "return the logits of all positions, not of the last alone"
    return ValueError(f"logits have shape {shape}, expected {(rows, length, 'vocab')}: {advice}")


def _described(value: Any) -> str:
    """The value's kind, and what it holds."""
    if isinstance(value, Mapping):
        return f"{type(value).__name__} of {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {', '.join(type(part).__name__ for part in value) or 'nothing'}"
    return type(value).__name__
