"""Rotary embedding and attention inside an attention module of Hugging Face transformers.

Both are names that the module's forward looks up among its file's globals. The forward is run as it stands,
with these two looked up elsewhere: projections, norms of queries and keys, caches, windows, scales and masks
stay the library's business, whatever its version.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bakeoff.errors import SwapError
from bakeoff.ops import rotary
from bakeoff.ops.rotary.reference import reference as rotary_reference
from bakeoff.swaps.own_globals import innermost, with_globals
from bakeoff.swaps.probe import agrees, draw, quiet
from bakeoff.swaps.replacement import Found, note

__all__ = ["find_attention"]

_ROTARY, _INTERFACE = "apply_rotary_pos_emb", "ALL_ATTENTION_FUNCTIONS"
_FORMS = (
    ["q", "k", "cos", "sin", "unsqueeze_dim"],
    ["q", "k", "cos", "sin", "position_ids", "unsqueeze_dim"],
)
_R = 8


def find_attention(
    module: nn.Module, want_rotary: bool, want_attention: bool
) -> tuple[Found | None, dict[str, str]]:
    """What replaces rotary and attention of an attention module, and why one or both stay."""
    if "Attention" not in type(module).__name__ or not any(True for _ in module.children()):
        return None, {}
    refused: dict[str, str] = {}
    wanted = {"rotary": want_rotary, "attention": want_attention}
    checks: dict[str, Callable[[nn.Module], str | None]] = {"rotary": _no_rotary, "attention": _no_attention}
    for kind in (kind for kind, is_wanted in wanted.items() if is_wanted):
        reason = checks[kind](module)
        if reason is not None:
            refused[kind] = reason
    kinds = tuple(kind for kind, is_wanted in wanted.items() if is_wanted and kind not in refused)
    if not kinds:
        return None, refused
    try:
        cls: Any = type(module)
        _forward(cls, *kinds)
    except SwapError as error:
        return None, {**refused, **dict.fromkeys(kinds, str(error))}
    return Found(kinds, kinds, _forward, kinds), refused


@functools.cache
def _forward(cls: Any, *kinds: str) -> Callable[..., Any]:
    """The class's forward, with our functions in the place of what it calls by name."""
    known = innermost(cls.forward).__globals__
    own: dict[str, Any] = {}
    if "rotary" in kinds:
        own[_ROTARY] = _turn(known[_ROTARY])
    if "attention" in kinds:
        own[_INTERFACE] = _Interface(known[_INTERFACE])
    return with_globals(cls.forward, own)


# Rotary ----------------------------------------------------------------------------------------------------


def _no_rotary(module: nn.Module) -> str | None:
    """Why rotary can't be replaced in this attention module."""
    try:
        forward = innermost(type(module).forward)
    except SwapError as error:
        return str(error)
    if _ROTARY not in forward.__code__.co_names or _ROTARY not in forward.__globals__:
        return f"its forward calls no {_ROTARY}"
    return _unlike(forward.__globals__[_ROTARY]) or _other_tables(module, forward.__globals__)


@functools.cache
def _unlike(function: Callable[..., Any]) -> str | None:
    """Why a function that turns queries and keys is not `rotary` on halves."""
    names = list(inspect.signature(function).parameters)
    if names not in _FORMS:
        return f"{_ROTARY} takes {', '.join(names)}, which no known version does"
    with quiet():
        q, k, angle = draw(2, 3, 5, _R), draw(2, 1, 5, _R), draw(2, 5, _R // 2)
        cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
        try:
            got = function(q, k, cos, sin)
        except Exception as error:  # noqa: BLE001
            return f"{_ROTARY} fails on small tensors ({type(error).__name__}: {error})"
        ids = torch.arange(10).view(2, 5)
        want = rotary_reference(
            q.transpose(1, 2),
            k.transpose(1, 2),
            angle.cos().flatten(0, 1),
            angle.sin().flatten(0, 1),
            False,
            ids,
        )
    if all(agrees(one, other.transpose(1, 2)) for one, other in zip(got, want, strict=True)):
        return None
    return f"{_ROTARY} does not turn the pairs (i, i + R/2)"


def _other_tables(module: nn.Module, names: dict[str, Any]) -> str | None:
    """Why the tables of this module's file may differ from halves that are equal."""
    config = getattr(module, "config", None)
    made = [
        value for name, value in names.items() if name.endswith("RotaryEmbedding") and _defined(value, names)
    ]
    if config is None or not made:
        return "where its tables are made is unknown: there is no config, or no RotaryEmbedding in its file"
    for cls in made:
        with quiet():
            try:
                tables = _tables(cls(config), config)
            except Exception as error:  # noqa: BLE001
                return f"{cls.__name__} can't be tried out ({type(error).__name__}: {error})"
        for table in tables:
            half = table.shape[-1] // 2
            if table.dim() != 3 or not torch.equal(table[..., :half], table[..., half:]):
                return f"{cls.__name__} makes tables whose halves differ"
    return None


def _defined(value: Any, names: dict[str, Any]) -> bool:
    return isinstance(value, type) and value.__module__ == names.get("__name__")


def _tables(embedding: nn.Module, config: Any) -> list[Tensor]:
    x, at = torch.zeros(1, 4, 1, device="cpu"), torch.arange(4, device="cpu").view(1, 4)
    parameters = inspect.signature(embedding.forward).parameters
    layers = sorted(set(config.layer_types)) if "layer_type" in parameters else []
    calls = [{"layer_type": layer} for layer in layers] or [{}]
    return [table for given in calls for table in embedding(x, at, **given)]


@functools.cache
def _turn(theirs: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`rotary` with the arguments and the results' dtype of the library's function."""
    third, promotes = list(inspect.signature(theirs).parameters).index("unsqueeze_dim") - 4, _promotes(theirs)

    def turn(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        note("rotary")
        heads_first = named.get("unsqueeze_dim", more[third] if len(more) > third else 1) == 1
        if heads_first:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        if promotes and cos.dtype != q.dtype:
            wide = torch.promote_types(q.dtype, cos.dtype)
            q, k = q.to(wide), k.to(wide)
        half, ids = cos.shape[-1] // 2, None
        if cos.shape[0] == 1:
            cos, sin = cos[0, :, :half], sin[0, :, :half]
        else:  # every row of the batch has its own positions
            rows, length = cos.shape[:2]
            cos, sin = cos[..., :half].flatten(0, 1), sin[..., :half].flatten(0, 1)
            ids = torch.arange(rows * length, device=q.device).view(rows, length)
        q, k = rotary(q, k, cos, sin, position_ids=ids)
        return (q.transpose(1, 2), k.transpose(1, 2)) if heads_first else (q, k)

    return turn


def _promotes(theirs: Callable[..., Any]) -> bool:
    """Whether bfloat16 queries become float32 under float32 tables."""
    with quiet():
        q, table = draw(1, 1, 2, _R, dtype=torch.bfloat16), draw(1, 2, _R)
        return theirs(q, q, table, table)[0].dtype is torch.float32


# Attention -------------------------------------------------------------------------------------------------


def _no_attention(module: nn.Module) -> str | None:
    """Why attention can't be replaced in this module."""
    if importlib.util.find_spec("bakeoff.ops.attention") is None:
        return "this version has no op attention"
    try:
        forward = innermost(type(module).forward)
    except SwapError as error:
        return str(error)
    if _INTERFACE not in forward.__code__.co_names or _INTERFACE not in forward.__globals__:
        return f"its forward looks nothing up in {_INTERFACE}"
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if chosen != "sdpa":
        return f"its attention implementation is {chosen!r}, not 'sdpa'"
    if not getattr(module, "is_causal", True):
        return "it looks at later positions, too"
    if getattr(module, "attn_logit_softcapping", None) is not None:
        return "it caps its scores"
    return None


class _Interface:
    """The library's register of attention functions, with ours in the place of 'sdpa'."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions
        self._own = _attend(functions["sdpa"])

    def get_interface(self, name: str, default: Any) -> Any:
        return self._own if name == "sdpa" else self._functions.get_interface(name, default)

    def __getitem__(self, name: str) -> Any:
        return self._own if name == "sdpa" else self._functions[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions, name)


def _attend(theirs: Callable[..., Any]) -> Callable[..., Any]:
    from bakeoff.ops.attention import attention

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Ours without a mask: the library gives none where plain causal attention of whole rows is meant,
        and where one query looks at all keys."""
        T, S = query.shape[2], key.shape[2]
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        odd = kwargs.get("softcap") is not None or kwargs.get("position_bias") is not None
        plain = attention_mask is None and not dropout and not odd and causal and (T == S or T == 1)
        if not plain or query.dtype != value.dtype or torch.is_autocast_enabled(query.device.type):
            return theirs(  # type: ignore[no-any-return]
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
                is_causal=is_causal, **kwargs,
            )  # fmt: skip
        note("attention")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        out = attention(q, k, v, causal=T == S, scale=scale)
        return out, None

    return attend
