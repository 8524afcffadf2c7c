"""A Config in layers: a recipe, then a TOML file, then overrides from the command line."""

import contextlib
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from bakeoff.apps.train.config.keys import KIND, as_table, key_types, section_at, type_of, unknown_key
from bakeoff.apps.train.config.sections import Config, ConfigError, SettingError, to_tree
from bakeoff.apps.train.config.validate import from_tree

__all__ = ["resolve"]


def resolve(base: Config, file: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """`base`, then the TOML file's keys, then ``section.key=value`` strings, checked.

    Values are read by the key's type: ``train.steps=100``, ``optim.lr=3e-4``, ``data.path=my file.txt``.
    Of two for one key the last holds; otherwise their order doesn't matter.

    Raises:
        ConfigError: the file can't be read.
        SettingError: an unknown key (the message names the nearest); a value of
            another type or out of range; settings that contradict each other.
    """
    tree = to_tree(base)
    if file is not None:
        _merge(tree, _read(file), Config, "")
    # The kind of model first, as it clears the keys of the model before it.
    for override in sorted(overrides, key=lambda text: _name(text) != f"model.{KIND}"):
        _override(tree, override)
    return from_tree(tree)


def _read(file: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"can't read the configuration {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"can't read the configuration {file}: it is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from None


def _merge(tree: dict[str, Any], given: Mapping[str, Any], section: type, prefix: str) -> None:
    """Replaces the keys of `tree` that `given` holds."""
    for key, value in given.items():
        name = f"{prefix}{key}"
        key_type = type_of(section, key, name)
        if not section_at(key_type):
            tree[key] = value
            continue
        table = as_table(value, name)
        if table.get(KIND, tree[key].get(KIND)) != tree[key].get(KIND):
            tree[key] = {}  # another model: the shape of the one before it is not meant
        inner = section_at(key_type, table if KIND in table else tree[key])
        _merge(tree[key], table, inner, f"{name}.")


def _name(override: str) -> str:
    return override.partition("=")[0].strip()


def _override(tree: dict[str, Any], override: str) -> None:
    """Sets one key of `tree` by a string such as train.steps=100."""
    name, (_, equals, text) = _name(override), override.partition("=")
    text = text.strip()
    if not equals:
        raise SettingError(f"override {override!r} has no '=': write KEY=VALUE, such as train.steps=100")
    *path, key = name.split(".")
    section: Any = Config
    table: Any = tree
    for part in path:
        table = table.get(part, {})
        section = section_at(type_of(section, part, name), table)
        if section is None:
            raise unknown_key(name)
    key_type = type_of(section, key, name)
    if inner := section_at(key_type):
        raise SettingError(
            f"{name} is a table of keys: set one of them, such as {name}.{next(iter(key_types(inner)))}=..."
        )
    if path and key == KIND and table.get(KIND) != text:
        table.clear()  # another model: the shape of the one before it is not meant
    table[key] = _parse(text, key_type)


def _parse(text: str, key_type: Any) -> Any:
    """The value that `text` stands for: TOML, or the text itself where it is not TOML or the key takes a
    string. A float may also be written as in Python, such as .1 or 1."""
    takes_text = key_type is str or typing.get_origin(key_type) is Literal
    if takes_text and text[:1] not in ("'", '"'):
        return text
    if getattr(key_type, "__origin__", key_type) is float:
        with contextlib.suppress(ValueError):
            return float(text)
    try:
        value = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return value["value"] if len(value) == 1 else text
