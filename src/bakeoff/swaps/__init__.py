"""Other people's models with bakeoff's ops: per instance, reversible, and proven on a batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bakeoff.errors import SwapError
from bakeoff.swaps.attention import find_attention, rotary_embeddings
from bakeoff.swaps.loss import find_loss
from bakeoff.swaps.mlp import find_mlp
from bakeoff.swaps.norms import find_norm
from bakeoff.swaps.replacement import Found, Replacement, replacement_of
from bakeoff.swaps.report import Left, Report, remove

__all__ = ["Report", "swap", "unswap"]

Wish = bool | str
_KINDS = ("norms", "rotary", "mlp", "attention", "loss")
_WITHOUT = "it was swapped before without this; call bakeoff.unswap(model), then swap once with all"


def swap(
    model: nn.Module,
    *,
    norms: Wish = True,
    rotary: Wish = True,
    mlp: Wish = True,
    attention: Wish = True,
    loss: Wish = True,
    optimizer: torch.optim.Optimizer | None = None,
    quiet: bool = False,
) -> Report:
    """Run parts of a model through bakeoff's ops, and print which, which not, and why.

    Takes Hugging Face transformers' models (Llama, Qwen, Mistral, Gemma, Phi and what is built like them) and
    plain modules with `nn.RMSNorm` and `nn.LayerNorm`. A part is replaced where its own forward, tried out on
    small stand-ins of its weights, computes what the op does. Only these instances' attribute `forward` is
    set: module objects, classes, parameters, `state_dict` and hooks stay, and no other model changes. A
    module that was swapped before stays as it is.

    Swap before torch.compile and before wrapping (DDP, accelerate); before or after FSDP2's fully_shard.

    Args:
        model: the model; it is changed in place.
        norms: RMS norms, also with Gemma's 1 + weight, through `rms_norm`; nn.LayerNorm through `layer_norm`.
        rotary: the rotation of queries and keys inside attention modules, through `rotary`.
        mlp: SiLU of a gate times a second projection, through `swiglu`.
        attention: causal attention without a mask (implementation 'sdpa'), through `attention`.
        loss: in training, a causal language model's loss through `linear_cross_entropy`; the output's
            `logits` are then None, since they are never made. `model.eval()` returns them.
            Each is True (wherever it can be), False, or "require": an error where there is nothing to
            replace, or where one such part can't be.
        optimizer: a torch.optim.AdamW, to be converted with its state into `report.optimizer`.
        quiet: print nothing; the report says the same.

    Returns:
        Report: `undo()`, `calls()`, `verify(batch)`; as a context manager it undoes the swap at the end.

    Raises:
        SwapError: something required can't be replaced, or the model has been compiled. Nothing is changed
            then.
        TypeError, ValueError: no module; a value other than True, False and "require".

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RMSNorm(8))
        >>> report = swap(model, norms="require", quiet=True)
        >>> _ = model(torch.randn(2, 8))
        >>> report.calls()
        {'norms': 1}
        >>> report.undo()
    """
    wishes = dict(zip(_KINDS, (norms, rotary, mlp, attention, loss), strict=True))
    _check(model, wishes)
    found, before, left = _look(model, wishes)
    _require(wishes, found, before, left)
    if optimizer is not None:
        from bakeoff.swaps.optimizer import converted

        optimizer = converted(optimizer)
    replaced = {name: Replacement(module, what) for name, (module, what) in found.items()}
    for replacement in replaced.values():
        replacement.install()
    report = Report(model, replaced, left)
    report.optimizer = optimizer
    if not quiet:
        print(report)
    return report


def unswap(model: nn.Module) -> None:
    """Give every swapped module of `model` its own forward back; parameters stay as they are.

    Raises:
        SwapError: nothing in the model is swapped, or a forward has been wrapped since.
        TypeError: no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unswap: model must be a torch.nn.Module, got {type(model).__name__}")
    everything = ((name, replacement_of(module)) for name, module in model.named_modules())
    held = {name: one for name, one in everything if one is not None}
    if not held:
        raise SwapError("unswap: nothing in this model is swapped")
    remove(held)


def _check(model: Any, wishes: dict[str, Wish]) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"swap: model must be a torch.nn.Module, got {type(model).__name__}")
    for kind, wish in wishes.items():
        if wish not in (True, False, "require"):
            raise ValueError(f"swap: {kind} must be True, False or 'require', got {wish!r}")
    for name, module in model.named_modules():
        called = f"{name or 'the model'} ({type(module).__name__})"
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise SwapError(f"swap: {called} is compiled; swap first, then call torch.compile")
        if isinstance(module, torch.jit.ScriptModule):
            raise SwapError(f"swap: {called} is a TorchScript module, whose code is fixed")


def _look(
    model: nn.Module, wishes: dict[str, Wish]
) -> tuple[dict[str, tuple[nn.Module, Found]], list[str], list[Left]]:
    """What can be replaced, by module's name; the kinds that were before; what stays, and why."""
    found: dict[str, tuple[nn.Module, Found]] = {}
    before: list[str] = []
    left: list[Left] = []
    embeddings = rotary_embeddings(model)
    for name, module in model.named_modules():
        held = replacement_of(module)
        if held is not None:
            before += held.found.kinds
            left += [
                Left(kind, name, held.cls.__name__, "it was swapped before") for kind in held.found.kinds
            ]
            missing = {kind: kind not in held.found.kinds and wish for kind, wish in wishes.items()}
            what, refused = _fitting(module, missing, embeddings)
            if what is not None:
                refused = {**refused, **dict.fromkeys(what.kinds, _WITHOUT)}
            left += [Left(kind, name, held.cls.__name__, reason) for kind, reason in refused.items()]
            continue
        what, refused = _fitting(module, wishes, embeddings)
        if what is not None and "forward" in vars(module):
            reason = f"somebody has replaced its forward already ({vars(module)['forward']!r})"
            refused, what = {**refused, **dict.fromkeys(what.kinds, reason)}, None
        left += [Left(kind, name, type(module).__name__, reason) for kind, reason in refused.items()]
        if what is not None:
            found[name] = module, what
    return found, before, left


def _fitting(
    module: nn.Module, wishes: dict[str, Wish], embeddings: list[nn.Module] | None
) -> tuple[Found | None, dict[str, str]]:
    """What replaces a module's forward, and the kinds that can't be, with reasons."""
    for kind, find in (("norms", find_norm), ("mlp", find_mlp), ("loss", find_loss)):
        what = find(module) if wishes[kind] else None
        if isinstance(what, str):
            return None, {kind: what}
        if what is not None:
            return what, {}
    return find_attention(module, bool(wishes["rotary"]), bool(wishes["attention"]), embeddings)


def _require(
    wishes: dict[str, Wish],
    found: dict[str, tuple[nn.Module, Found]],
    before: Sequence[str],
    left: Sequence[Left],
) -> None:
    """Raises for what is required and can't be replaced."""
    reached = {kind for _, what in found.values() for kind in what.kinds} | set(before)
    for kind in (kind for kind, wish in wishes.items() if wish == "require"):
        reasons = [one for one in left if one.kind == kind and one.reason != "it was swapped before"]
        if reasons:
            lines = [f"{one.name or 'the model'} ({one.cls}): {one.reason}" for one in reasons[:5]]
            more = f"\n  and {len(reasons) - 5} more" if len(reasons) > 5 else ""
            raise SwapError(
                f"swap: {kind} is required and can't be replaced in\n  " + "\n  ".join(lines) + more
            )
        if kind not in reached:
            raise SwapError(f"swap: {kind} is required, and the model has nothing of that kind")
