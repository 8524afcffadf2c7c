"""From nested plain values, as TOML gives them, to a Config: every key and value is checked on its own, so
that an error knows which one it is about."""

import operator
import sys
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from bakeoff.apps.train.config.keys import KIND, as_table, key_types, model_kinds, section_at, type_of
from bakeoff.apps.train.config.sections import Config, Select, SettingError, to_tree
from bakeoff.select import registry

__all__ = ["from_saved", "from_tree"]


def from_tree(tree: Mapping[str, Any]) -> Config:
    """A Config of nested plain values, as TOML gives them. Raises SettingError."""
    config: Config = _section(Config, tree, "")
    return config


def from_saved(tree: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """The Config that a run saved, possibly by another version, and what differs, in words: keys that no
    longer exist, which are left out, and keys that were not there yet, which take their defaults.

    Raises SettingError for values that this version can't take.
    """
    known, unknown, missing = _known_keys(tree, Config, "")
    notes = [f"unknown {name} is left out" for name in unknown]
    config = from_tree(known)
    defaults = to_tree(config)
    for name in missing:
        value: Any = defaults
        for part in name.split("."):
            value = value[part]
        notes.append(f"missing {name} is " + ("all defaults" if isinstance(value, dict) else repr(value)))
    return config, notes


def _section(section: type, table: Mapping[str, Any], name: str) -> Any:
    """The Struct `section` with the values of `table`, which stands at `name` in the tree."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        full = f"{name}.{key}" if name else key
        key_type = type_of(section, key, full)
        if section_at(key_type):
            values[key] = _section(_chosen(key_type, as_table(value, full), full), value, full)
        else:
            values[key] = _value(key_type, value, full)
    if section is Select:
        values["ops"] = {key: values.pop(key) for key in list(values) if key in registry}
    values.pop(KIND, None)  # has chosen the section
    try:
        return section(**values)
    except ValueError as error:
        raise SettingError(f"{name}: {error}" if name else str(error)) from None


def _chosen(key_type: Any, table: Mapping[str, Any], name: str) -> type:
    """The section that `table` is to be: of several models the one that it names."""
    if typing.get_args(key_type):
        kinds = ", ".join(model_kinds())
        if KIND not in table:
            raise SettingError(f"{name}.{KIND} is missing; there are {kinds}")
        if table[KIND] not in model_kinds():
            raise SettingError(f"{name}.{KIND}: {table[KIND]!r} is not a model; there are {kinds}")
    section: type = section_at(key_type, table)
    return section


def _value(key_type: Any, value: object, name: str) -> Any:
    """`value` as the type of its key: an int may stand for a float. Raises SettingError."""
    try:
        return msgspec.convert(value, key_type)
    except msgspec.ValidationError:
        raise SettingError(f"{name}: expected {_expected(key_type, value)}, got {value!r}") from None


_BOUNDS = (
    ("ge", ">=", operator.ge),
    ("gt", ">", operator.gt),
    ("le", "<=", operator.le),
    ("lt", "<", operator.lt),
)


def _expected(key_type: Any, value: object) -> str:
    """The type that `value` does not have, in words, with the bound that it exceeds."""
    if typing.get_origin(key_type) is Literal:
        return f"one of {', '.join(typing.get_args(key_type))}"
    if typing.get_origin(key_type) is tuple:
        return "a list of int, such as [256, 1024]"
    metas: tuple[Meta, ...] = ()
    if typing.get_origin(key_type) is Annotated:
        key_type, *rest = typing.get_args(key_type)
        metas = tuple(rest)
    type_name: str = key_type.__name__
    numbers = {int: (int,), float: (int, float)}.get(key_type, ())
    if not isinstance(value, numbers) or isinstance(value, bool):
        return type_name
    for meta in metas:
        for attribute, sign, holds in _BOUNDS:
            bound = getattr(meta, attribute)
            if bound is not None and not holds(value, bound):
                return f"{type_name} {sign} {key_type(bound)}"
    return f"{type_name} up to {sys.float_info.max:.2g}"


def _known_keys(
    tree: Mapping[str, Any], section: type, prefix: str
) -> tuple[dict[str, Any], list[str], list[str]]:
    """(the part of `tree` that `section` has keys for, names it has no keys for, names not in `tree`)."""
    types = key_types(section)
    known: dict[str, Any] = {}
    unknown = [f"{prefix}{key}" for key in tree if key not in types]
    missing: list[str] = []
    for key, key_type in types.items():
        name = f"{prefix}{key}"
        if key not in tree:
            if not (section is Select and key in registry):  # an op whose candidate is not forced
                missing.append(name)
        elif (inner := section_at(key_type, tree[key])) and isinstance(tree[key], Mapping):
            known[key], inner_unknown, inner_missing = _known_keys(tree[key], inner, f"{name}.")
            unknown += inner_unknown
            missing += inner_missing
        else:
            known[key] = tree[key]
    return known, unknown, missing
