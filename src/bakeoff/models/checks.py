"""What models refuse, with the fix in the message."""

import math
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.compiler import is_compiling

from bakeoff.select.choose.hot import transformed

__all__ = [
    "Devices",
    "check_cache",
    "check_capacity",
    "check_device",
    "check_fields",
    "check_ids",
    "check_kind",
    "check_no_recomputing",
    "check_sampling",
    "check_symbols",
    "check_targets",
    "check_values",
]


Devices = tuple[torch.device, ...]
"""Of a model: that of its tables, and of its embedding, which may be elsewhere (functional_call of a model
without data; shards that rest on the CPU)."""


def check_fields(config: msgspec.Struct) -> None:
    """Raises TypeError where an int, float or bool field holds another type, and ValueError where a float is
    negative or not finite."""
    own = [getattr(kind, "__annotations__", {}) for kind in type(config).__mro__]
    for name, kind in (field for annotations in own for field in annotations.items()):
        if name not in config.__struct_fields__:
            continue
        value = getattr(config, name)
        if kind in (int, bool) and type(value) is not kind:
            raise TypeError(f"{name}={value!r} must be {'True or False' if kind is bool else 'an int'}")
        if kind is float:
            if type(value) not in (int, float):
                raise TypeError(f"{name}={value!r} must be a number")
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name}={value!r} must be a finite number, not negative")


def check_kind(name: str, value: object, *kinds: type) -> None:
    """Raises TypeError unless the value is of one of these classes."""
    if not isinstance(value, kinds):
        wanted = " or ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
        given = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(f"{name} must be a {wanted}, got a {given}")


def check_symbols(name: str, symbols: object) -> None:
    """Raises TypeError unless these are whole numbers in a tensor."""
    if not isinstance(symbols, Tensor):
        raise TypeError(
            f"{name} must be a tensor, got {type(symbols).__name__}: bytes become one by "
            f"torch.tensor([list(b'text')])"
        )
    if symbols.dtype not in (torch.uint8, torch.int32, torch.int64):
        raise TypeError(f"{name} are {symbols.dtype}, expected uint8, int32 or int64: call {name}.long()")


def check_ids(name: str, ids: Tensor, devices: Devices, vocab: int) -> None:
    """Raises unless `ids` is a non-empty [B, T] tensor of symbols on one of these devices."""
    check_symbols(name, ids)
    if ids.ndim != 2:
        raise ValueError(f"{name} have shape {tuple(ids.shape)}, expected [B, T]; one row is {name}[None]")
    if ids.numel() == 0:
        raise ValueError(f"{name} have shape {tuple(ids.shape)}, no symbols: give at least one row of one")
    check_values(name, ids, devices, vocab)


def check_targets(targets: Tensor, ids: Tensor, vocab: int) -> None:
    """Raises unless `targets` are next symbols for `ids`."""
    check_symbols("targets", targets)
    if targets.shape != ids.shape:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)}, ids {tuple(ids.shape)}: make them equal"
        )
    check_values("targets", targets, (ids.device,), vocab, ignored=-100)


def check_device(name: str, tensor: Tensor, devices: Devices) -> None:
    """Raises ValueError unless the tensor is on one of a model's devices, the first of which is named."""
    if tensor.device in devices:
        return
    device = devices[0]
    if device.type == "meta":
        raise ValueError(
            f"{name} are on {tensor.device}, and the model is on the meta device, without data: call "
            f"model.to_empty(device='{tensor.device}'), then model.reset_parameters() or load_state_dict"
        )
    raise ValueError(f"{name} are on {tensor.device}, the model on {device}: call {name}.to('{device}')")


def check_values(
    name: str, symbols: Tensor, devices: Devices, count: int, ignored: int | None = None
) -> None:
    """Raises ValueError unless the symbols are on one of the devices, and on the CPU IndexError unless they
    are 0 to count - 1 or `ignored`: another device would have to be waited for."""
    check_device(name, symbols, devices)
    unseen = is_compiling() or transformed() or type(symbols) is not Tensor
    if symbols.device.type != "cpu" or unseen or (symbols.dtype == torch.uint8 and count > 255):
        return
    if symbols.dtype == torch.uint8:
        ignored = None  # which -100 would be 156 in
    wrong = symbols[(symbols < 0) | (symbols >= count)]
    if ignored is not None:
        wrong = wrong[wrong != ignored]
    if len(wrong):
        besides = "" if ignored is None else f", or {ignored} where none counts"
        raise IndexError(f"{name} hold {wrong[0].item()}: this model takes 0 to {count - 1}{besides}")


def check_capacity(capacity: int | None) -> None:
    """Raises TypeError or ValueError unless a cache can be of so many positions; None: as many as the model
    takes."""
    if capacity is not None and type(capacity) is not int:
        raise TypeError(f"capacity={capacity!r} must be an int, or None for max_seq_len")
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity={capacity} must be at least 1, or None for max_seq_len")


def check_cache(cache: Any, config: msgspec.Struct, ids: Tensor) -> None:
    """Raises ValueError unless `cache` is for such a model, has room for `ids`, and is empty or of as many
    rows on this device; a settled one takes one symbol a row."""
    if cache.config is not config and cache.config != config:
        raise ValueError("cache was made for another model: use Cache(model.config)")
    if cache.rows not in (None, ids.shape[0]):
        raise ValueError(
            f"ids have {ids.shape[0]} rows, the cache {cache.rows}: decode the same rows, or begin with a "
            f"new Cache(model.config)"
        )
    held = cache.at if cache.at is not None or cache.rows is None else next(cache.held())
    if held is not None and held.device != ids.device:
        raise ValueError(
            f"the cache is on {held.device}, ids and model on {ids.device}: begin with a new "
            f"Cache(model.config), as it doesn't move with the model"
        )
    if cache.at is not None and ids.shape[1] != 1:
        raise ValueError(
            f"ids have {ids.shape[1]} symbols a row, and a settled cache takes one a call: decode ids[:, :1] "
            f"first, or settle the cache behind them"
        )
    room, length = cache.capacity, cache.length + ids.shape[1]
    if room is not None and length > room:
        raise ValueError(
            f"{length} positions are more than the cache's capacity of {room}: begin with "
            f"model.make_cache({length}) or more"
        )


def check_no_recomputing(cache: object) -> None:
    """Raises RuntimeError where a part of a model that writes to `cache` runs again in backward, as
    torch.utils.checkpoint has it; None, of whole rows, is nothing that it writes to."""
    if cache is not None and not is_compiling() and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "torch.utils.checkpoint can't run this again: the cache holds its result already. Train on whole "
            "rows, model(ids), whose blocks may be checkpointed; or decode without torch.utils.checkpoint"
        )


def check_sampling(max_new: int, temperature: float, top_k: int, top_p: float, seed: int | None) -> None:
    """Raises TypeError or ValueError for a setting that no sampling has."""
    for name, whole in (("max_new", max_new), ("top_k", top_k), ("seed", 0 if seed is None else seed)):
        if type(whole) is not int:
            raise TypeError(f"{name}={whole!r} must be an int")
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        if type(value) not in (int, float):
            raise TypeError(f"{name}={value!r} must be a number")
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed={seed} must fit 64 bits")
    if max_new < 0:
        raise ValueError(f"max_new={max_new} must not be negative")
    if not 0.0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be 0 (the likeliest symbol) or a positive number")
    if top_k < 0:
        raise ValueError(f"top_k={top_k} must not be negative (0 means all symbols)")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p={top_p} must be in (0, 1]")
