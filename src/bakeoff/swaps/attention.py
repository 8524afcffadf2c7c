"""Rotary embedding and attention inside an attention module of Hugging Face transformers.

Both are names that the module's forward looks up among its file's globals. The forward is run as it stands,
with these two looked up elsewhere: projections, norms of queries and keys, caches, windows, scales and masks
stay the library's business, whatever its version.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bakeoff.errors import SwapError
from bakeoff.ops import rotary
from bakeoff.ops.rotary.reference import reference as rotary_reference
from bakeoff.swaps.own_globals import innermost, with_globals
from bakeoff.swaps.probe import agrees, draw, on_meta, quiet
from bakeoff.swaps.replacement import Found, note

__all__ = ["find_attention", "rotary_embeddings"]

_ROTARY, _INTERFACE = "apply_rotary_pos_emb", "ALL_ATTENTION_FUNCTIONS"
_FORMS = (
    ["q", "k", "cos", "sin", "unsqueeze_dim"],
    ["q", "k", "cos", "sin", "position_ids", "unsqueeze_dim"],
)
_R = 8


def find_attention(
    module: nn.Module, want_rotary: bool, want_attention: bool, embeddings: Sequence[nn.Module] | None
) -> tuple[Found | None, dict[str, str]]:
    """What replaces rotary and attention of an attention module, and why one or both stay.

    `embeddings` are the model's modules that make rotary tables; None where it is a part of another model,
    which may hold them.
    """
    if not _attends(module) or any(_attends(below) for below in module.modules() if below is not module):
        return None, {}
    refused: dict[str, str] = {}
    wanted = {"rotary": want_rotary, "attention": want_attention}
    for kind in (kind for kind, is_wanted in wanted.items() if is_wanted):
        reason = _no_rotary(module, embeddings) if kind == "rotary" else _no_attention(module)
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


def _attends(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__ and any(True for _ in module.children())


def rotary_embeddings(model: nn.Module) -> list[nn.Module] | None:
    """A model's modules that make rotary tables; None where it has none and is no whole model."""
    named = ((name.rpartition(".")[2], module) for name, module in model.named_modules())
    found = [module for name, module in named if "Rotary" in type(module).__name__ or name == "rotary_emb"]
    return found if found or hasattr(model, "base_model_prefix") else None


def _forward(cls: Any, *kinds: str) -> Callable[..., Any]:
    """The class's forward, with our functions in the place of what it calls by name."""
    known = innermost(cls.forward).__globals__
    own: dict[str, Any] = {}
    if "rotary" in kinds:
        own[_ROTARY] = _turn(known[_ROTARY])
    if "attention" in kinds:
        own[_INTERFACE] = _Interface(known[_INTERFACE])
    return with_globals(cls.forward, own)


# What a layer calls ----------------------------------------------------------------------------------------


class _Reached(Exception):
    """The function that was looked for has been called, with these arguments by name."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.given = given


def _reached(*args: Any, **given: Any) -> Any:
    raise _Reached(given)


class _Reaching:
    """A register of attention functions that finds out what the one it gives is called with."""

    def get_interface(self, name: str, default: Any) -> Any:
        return _reached

    def __getitem__(self, name: str) -> Any:
        return _reached


def _tried(module: nn.Module, own: Mapping[str, Any], width: int) -> dict[str, Any] | None:
    """What the module's forward calls what raises _Reached with, by name, or None where it doesn't call it:
    not in every layer are queries and keys turned, and a setting may choose another function.

    It runs on shapes alone; where it can't, it is taken to call it with nothing.
    """
    cls: Any = type(module)
    with quiet():
        table = torch.empty(1, 2, width, device="meta")
        known: dict[str, Any] = {"position_embeddings": (table, table)}
        try:
            config: Any = module.config
            known["hidden_states"] = torch.empty(1, 2, config.hidden_size, device="meta")
            taken = list(inspect.signature(cls.forward).parameters.values())[1:]
            needed = [
                one.name
                for one in taken
                if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
            ]
            names = {*needed, *(one.name for one in taken if one.name in known)}
            given = {name: known.get(name) for name in names}
            with_globals(cls.forward, own)(on_meta(module), **given)
        except _Reached as call:
            return call.given
        except Exception:  # noqa: BLE001
            return {}
    return None


# Rotary ----------------------------------------------------------------------------------------------------


def _no_rotary(module: nn.Module, embeddings: Sequence[nn.Module] | None) -> str | None:
    """Why rotary can't be replaced in this attention module."""
    try:
        forward = innermost(type(module).forward)
    except SwapError as error:
        return str(error)
    if _ROTARY not in forward.__code__.co_names or _ROTARY not in forward.__globals__:
        return f"its forward calls no {_ROTARY}"
    reason = _unlike(forward.__globals__[_ROTARY])
    if reason is not None:
        return reason
    tables = _tables_of(module, forward.__globals__, embeddings)
    if isinstance(tables, str):
        return tables
    if _tried(module, {_ROTARY: _reached}, tables[0].shape[-1]) is None:
        return f"its forward calls no {_ROTARY} in this layer"
    return None


@functools.cache
def _unlike(function: Callable[..., Any]) -> str | None:
    """Why a function that turns queries and keys is not `rotary` on halves."""
    names = list(inspect.signature(function).parameters)
    if names not in _FORMS:
        return f"{_ROTARY} takes {', '.join(names)}, which no known version does"
    try:
        full = _takes_full_tables(function)
    except Exception as error:  # noqa: BLE001
        return f"{_ROTARY} fails on small tensors ({type(error).__name__}: {error})"
    for width in (_R, 2 * _R):  # of heads: twice that of what is turned of them
        try:
            got = _turned(function, width, full)
        except Exception:  # noqa: BLE001
            continue
        want = _turned(None, width, full)
        if not all(agrees(one, other) for one, other in zip(got, want, strict=True)):
            return f"{_ROTARY} does not turn the pairs (i, i + R/2) of the first R elements"
    return None


def _turned(function: Callable[..., Any] | None, width: int, full: bool) -> Any:
    """What a function, or else the definition, makes of small queries and keys."""
    with quiet():
        q, k, angle = draw(2, 3, 5, width), draw(2, 1, 5, width), draw(2, 5, _R // 2)
        if function is not None:
            cos, sin = (torch.cat([table] * (1 + full), -1) for table in (angle.cos(), angle.sin()))
            return function(q, k, cos, sin)
        ids = torch.arange(10).view(2, 5)
        cos, sin = angle.cos().flatten(0, 1), angle.sin().flatten(0, 1)
        turned = rotary_reference(q.transpose(1, 2), k.transpose(1, 2), cos, sin, False, ids)
    return [tensor.transpose(1, 2) for tensor in turned]


@functools.cache
def _takes_full_tables(function: Callable[..., Any]) -> bool:
    """Whether cosines and sines come twice, once for either half; alone they are half as wide."""
    try:
        _turned(function, _R, True)
    except RuntimeError:
        _turned(function, _R, False)
        return False
    return True


def _tables_of(
    module: nn.Module, names: dict[str, Any], embeddings: Sequence[nn.Module] | None
) -> list[Tensor] | str:
    """The tables of this module's file, or why they may differ from halves that are equal."""
    config = getattr(module, "config", None)
    made = [
        value for name, value in names.items() if name.endswith("RotaryEmbedding") and _defined(value, names)
    ]
    if config is None or not made:
        return "where its tables are made is unknown: there is no config, or no RotaryEmbedding in its file"
    if embeddings is not None and not embeddings:
        return "the model has no RotaryEmbedding: nothing turns queries and keys"
    held = {type(one) for one in embeddings or ()}
    for cls in sorted(held - set(made), key=str):
        if not cls.__module__.startswith("transformers.models."):  # of another part of a model of several
            return f"its tables may come from {cls.__name__}, which is not of its file"
    own = {type(one) for one in embeddings or () if getattr(one, "config", None) is config} or held
    found: list[Tensor] = []
    for cls in [cls for cls in made if cls in own] or made:
        with quiet():
            try:
                tables = _tables(cls(config), config)
            except Exception as error:  # noqa: BLE001
                return f"{cls.__name__} can't be tried out ({type(error).__name__}: {error})"
        for table in tables:
            half = table.shape[-1] // 2
            full = _takes_full_tables(names[_ROTARY])
            if table.dim() != 3 or (full and not torch.equal(table[..., :half], table[..., half:])):
                return f"{cls.__name__} makes tables whose halves differ"
        found += tables
    return found


def _defined(value: Any, names: dict[str, Any]) -> bool:
    return isinstance(value, type) and value.__module__ == names.get("__name__")


def _tables(embedding: nn.Module, config: Any) -> list[Tensor]:
    x, at = torch.zeros(1, 4, 1, device="cpu"), torch.arange(4, device="cpu").view(1, 4)
    parameters = inspect.signature(embedding.forward).parameters
    layers = sorted(set(config.layer_types)) if "layer_type" in parameters else []
    layers = [layer for layer in layers if config.rope_parameters.get(layer)]  # not where nothing is turned
    calls = [{"layer_type": layer} for layer in layers] or [{}]
    made = [table for given in calls for table in embedding(x, at, **given)]
    try:  # of time, height and width, where it takes positions of three kinds
        three = embedding(x, torch.stack([at, 2 * at, 5 * at]), **calls[0])
    except Exception:  # noqa: BLE001
        return made
    return made + [table for table in three if table.dim() == 3]


@functools.cache
def _turn(theirs: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`rotary` with the arguments and the results' dtype of the library's function."""
    third = list(inspect.signature(theirs).parameters).index("unsqueeze_dim") - 4
    full = _takes_full_tables(theirs)
    promotes = _promotes(theirs, _R if full else _R // 2)

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
        half, ids = cos.shape[-1] // 2 if full else cos.shape[-1], None
        if cos.shape[0] == 1:
            cos, sin = cos[0, :, :half], sin[0, :, :half]
        else:  # every row of the batch has its own positions
            rows, length = cos.shape[:2]
            cos, sin = cos[..., :half].flatten(0, 1), sin[..., :half].flatten(0, 1)
            ids = torch.arange(rows * length, device=q.device).view(rows, length)
        q, k = rotary(q, k, cos, sin, position_ids=ids)
        return (q.transpose(1, 2), k.transpose(1, 2)) if heads_first else (q, k)

    return turn


def _promotes(theirs: Callable[..., Any], width: int) -> bool:
    """Whether bfloat16 queries become float32 under float32 tables."""
    with quiet():
        q, table = draw(1, 1, 2, _R, dtype=torch.bfloat16), draw(1, 2, width)
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
    given = _tried(module, {_INTERFACE: _Reaching()}, getattr(module, "head_dim", None) or _R)
    if given is None:
        return f"its forward looks nothing up in {_INTERFACE} in this layer"
    if getattr(module, "attn_logit_softcapping", None) is not None or given.get("softcap") is not None:
        return "it caps its scores"
    if given.get("position_bias") is not None:
        return "it adds a bias to its scores"
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
