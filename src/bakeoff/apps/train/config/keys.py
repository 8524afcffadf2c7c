"""Which keys a configuration has, their types, and the known key nearest to an unknown one."""

import difflib
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from bakeoff.apps.train.config.sections import Config, Select, SettingError
from bakeoff.select import registry

__all__ = ["KIND", "as_table", "key_types", "model_kinds", "named", "section_at", "type_of", "unknown_key"]

KIND = "kind"
"""The key of [model] that says which model it is."""


def key_types(section: type) -> dict[str, Any]:
    """Key -> type of everything that `section` holds; in [select] every op is a key, too."""
    hints = typing.get_type_hints(section, include_extras=True)
    fields: tuple[str, ...] = section.__struct_fields__  # type: ignore[attr-defined]
    if section is Select:
        fields = tuple(name for name in fields if name != "ops")
        return {**{name: hints[name] for name in fields}, **dict.fromkeys(registry, str)}
    kind = {KIND: str} if section in _sections(_MODEL) else {}
    return {**{name: hints[name] for name in fields}, **kind}


def type_of(section: type, key: str, name: str) -> Any:
    """The type of `key` in `section`; `name` is its full name. Raises SettingError for an unknown key."""
    types = key_types(section)
    if key not in types:
        raise unknown_key(name)
    return types[key]


def unknown_key(name: str) -> SettingError:
    """The error for a key that does not exist; it names the nearest that does."""
    return SettingError(f"unknown key {name!r}{_suggestion(name)}")


def section_at(key_type: Any, value: object = None) -> Any:
    """The section that a key of this type holds, None where it holds a plain value. Of several models it is
    the one that the table `value` names, else the first."""
    sections = _sections(key_type)
    if not sections:
        return None
    kind = value.get(KIND) if isinstance(value, Mapping) else None
    return next((section for section in sections if section.__struct_config__.tag == kind), sections[0])


def model_kinds() -> list[str]:
    """The values of model.kind."""
    return [str(section.__struct_config__.tag) for section in _sections(_MODEL)]


def as_table(value: object, name: str) -> Mapping[str, Any]:
    """`value` if it is a table. Raises SettingError, which names the section, for anything else."""
    if not isinstance(value, Mapping):
        raise SettingError(f"{name} is a table of keys, got {value!r}: write [{name}] and its keys below")
    return value


def _sections(key_type: Any) -> list[Any]:
    choices = [key_type, *typing.get_args(key_type)]
    return [choice for choice in choices if isinstance(choice, type) and issubclass(choice, msgspec.Struct)]


_MODEL: Any = typing.get_type_hints(Config)["model"]


def named(last: str) -> str | None:
    """The full name of the setting whose last part is this, such as train.steps; None where there is none."""
    names = (
        f"{key}.{last}"
        for key, key_type in key_types(Config).items()
        for section in _sections(key_type)
        if last in key_types(section)
    )
    return next(names, None)


def _suggestion(name: str) -> str:
    """What to write in place of the unknown key `name`, as the end of a sentence."""
    top = key_types(Config)
    sections = {key: _sections(key_type) for key, key_type in top.items()}
    known = {key: key for key in top}  # full name -> last part
    for key, choices in sections.items():
        known |= {f"{key}.{inner}": inner for choice in choices for inner in key_types(choice)}
    parent, _, last = name.rpartition(".")
    if name in known:
        return f": the {KIND} of {parent} that is set has none"
    anywhere = {inner: full for full, inner in known.items()}
    if last in anywhere:
        return f"; did you mean {anywhere[last]}?"
    siblings = {inner: full for full, inner in known.items() if full.rpartition(".")[0] == parent}
    for candidates in (siblings, anywhere):
        if close := difflib.get_close_matches(last, candidates, n=1, cutoff=0.6):
            return f"; did you mean {candidates[close[0]]}?"
    if sections.get(parent):
        return f"; [{parent}] has {', '.join(siblings)}"
    return f"; a configuration has {', '.join(top)}"
