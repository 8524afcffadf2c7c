"""The configuration of a run: Structs, a TOML file, dotted overrides, and back to TOML.

`resolve` takes a recipe's Config, lays a file over it, then overrides such as ``train.steps=100``, and
checks every key and type. `to_toml` writes a Config so that reading it gives the same Config.
"""

import contextlib
import difflib
import json
import math
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from bakeoff.errors import BakeoffError
from bakeoff.models import byte_spectral, llm_med
from bakeoff.select import registry

__all__ = [
    "Config",
    "ConfigError",
    "Data",
    "Metrics",
    "Optim",
    "Parallel",
    "Select",
    "Train",
    "from_saved",
    "from_tree",
    "resolve",
    "to_toml",
    "to_tree",
]

_KIND = "kind"
"""The key of [model] that says which model it is."""

_LARGEST = 2**63 - 1  # of TOML's integers, and of what PyTorch takes
Count = Annotated[int, Meta(ge=0, le=_LARGEST)]
Positive = Annotated[int, Meta(ge=1, le=_LARGEST)]
Seconds = Annotated[float, Meta(ge=0)]


class ConfigError(BakeoffError, ValueError):
    """A key that does not exist, a value of the wrong type, or settings that contradict each other."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the TOML file. Its numbers are finite."""

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name}={value} must be a finite number")


class Data(Section, frozen=True):
    """[data] what is read, as bytes."""

    path: str = "stdlib"
    """A file, or a folder read recursively; "stdlib" is the Python standard library's sources here."""
    holdout: Annotated[float, Meta(gt=0, lt=1)] = 0.05
    """Share of the bytes, at the end, that is never trained on."""


class Optim(Section, frozen=True):
    """[optim] AdamW, with linear warm-up and cosine decay."""

    lr: Annotated[float, Meta(gt=0)] = 1e-3
    min_lr: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Share of `lr` left at the end."""
    warmup: Annotated[float, Meta(ge=0, lt=1)] = 0.02
    """Share of the run in which the rate climbs from 0 to `lr`."""
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0)] = 0.1
    """Decoupled, on matrices only."""
    clip: Annotated[float, Meta(ge=0)] = 1.0
    """Largest norm of the gradient; 0 means no clipping."""


class Train(Section, frozen=True):
    """[train] how long, how much at once, and where to."""

    steps: Count = 1000
    """Optimizer steps; 0 means until `max_seconds`. The schedule then follows time, not steps."""
    max_seconds: Seconds = 0.0
    """Wall time of the whole run, resumed parts included; 0 means no limit."""
    batch_size: Positive = 32
    """Rows a step, over all ranks and accumulated parts."""
    seq_len: Count = 0
    """Bytes a row; 0 means the model's max_seq_len."""
    accumulate: Positive = 1
    """Parts a step's rows are cut into, one after the other, to save memory."""
    seed: Count = 0
    device: str = "auto"
    """"cpu", "cuda", "cuda:1", or "auto": CUDA where there is one."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """bf16 is autocast, with float32 weights; "auto" takes it on CUDA."""
    capture: Literal["auto", "on", "off"] = "auto"
    """Replay the whole step as one CUDA graph: where possible ("auto"), or else an error ("on")."""
    compile: bool = False
    """Run the training pass through torch.compile."""
    deterministic: bool = False
    """On CUDA, take deterministic kernels only, so that a run repeats itself bit for bit, at some cost."""
    leak_check: bool = True
    """Before the first step, make sure that no output of the model sees its own future."""
    log_every: Positive = 20
    """Steps between metrics lines; the host waits for the device only there."""
    eval_every: Count = 0
    """Steps between measurements on held-out bytes; 0 means only before and after."""
    eval_rows: Positive = 64
    """Rows of held-out bytes in a measurement, spread evenly."""
    checkpoint_every: Count = 500
    """Steps between checkpoints; 0 means only at the end."""
    keep: Positive = 2
    """Checkpoints kept."""
    run_dir: str = ""
    """Folder of the run; empty means runs/RECIPE-DATE-TIME."""
    resume: str = "auto"
    """"auto": go on if run_dir holds a checkpoint. "never": refuse such a folder. Else a run or checkpoint to
    start from."""


class Parallel(Section, frozen=True):
    """[parallel] how the ranks that torchrun started share the work."""

    mode: Literal["auto", "none", "ddp", "fsdp"] = "auto"
    """"ddp": every rank holds the model. "fsdp": every rank holds a shard of it. "none": one process only.
    "auto": ddp where there are several ranks."""
    dead_after_s: Annotated[float, Meta(gt=0)] = 20.0
    """Seconds without a sign of life after which a rank counts as dead, and the job ends."""


class Select(Section, frozen=True):
    """[select] which candidate of each op runs. ``select.OP = "CANDIDATE"`` forces one."""

    policy: str = ""
    """off | heuristic | table | tune | strict | pinned:FILE; empty: BAKEOFF_POLICY, else table."""
    tune: bool = True
    """Hold the contests this run needs before it starts."""
    budget_s: Annotated[float, Meta(gt=0)] = 30.0
    ops: dict[str, str] = {}
    """Forced candidates by op; written as keys of [select] itself."""


class Metrics(Section, frozen=True):
    """[metrics] where numbers go beside metrics.jsonl, which is always written."""

    tensorboard: bool = False
    wandb: bool = False
    wandb_project: str = "bakeoff"
    console: bool = True
    """Progress on the terminal."""


class Config(Section, frozen=True):
    """All of a run. Every field has a default; recipes are Configs with other defaults."""

    recipe: str = "llm-med"
    model: llm_med.Config | byte_spectral.Config = llm_med.Config()
    data: Data = Data()
    optim: Optim = Optim()
    train: Train = Train()
    parallel: Parallel = Parallel()
    select: Select = Select()
    metrics: Metrics = Metrics()

    def __post_init__(self) -> None:
        _check_text(to_tree(self))
        train = self.train
        if not train.steps and not train.max_seconds:
            raise ValueError("train.steps and train.max_seconds are both 0: give at least one of them")
        if self.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"train.seq_len={train.seq_len} is longer than model.max_seq_len={self.model.max_seq_len}: "
                "lower the one or raise the other"
            )
        if train.batch_size % train.accumulate:
            raise ValueError(
                f"train.batch_size={train.batch_size} can't be cut into train.accumulate={train.accumulate} "
                "equal parts: make it a multiple"
            )
        if getattr(self.model, "bidirectional", False):
            raise ValueError(
                "model.bidirectional=true makes an encoder, which learns no next byte: set it to false, "
                "or train ByteSpectralLM in a loop of your own"
            )
        if self.model.vocab < 256:
            raise ValueError(f"model.vocab={self.model.vocab} is too small: data are bytes, it needs 256")

    @property
    def seq_len(self) -> int:
        return self.train.seq_len or self.model.max_seq_len


def resolve(base: Config, file: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """`base`, then the TOML file's keys, then ``section.key=value`` strings, checked.

    Values are read by the key's type: ``train.steps=100``, ``optim.lr=3e-4``, ``data.path=my file.txt``.
    Of two for one key the last holds; otherwise their order doesn't matter.

    Raises:
        ConfigError: the file can't be read; an unknown key (the message names the nearest); a value of
            another type or out of range; settings that contradict each other.
    """
    tree = to_tree(base)
    if file is not None:
        try:
            given = tomllib.loads(Path(file).read_text("utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"can't read the configuration {file}: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{file} is not TOML: {error}") from None
        _lay_over(tree, given, Config, "")
    for override in sorted(overrides, key=lambda text: _name(text) != f"model.{_KIND}"):
        _override(tree, override)  # a kind first, or it would clear what is said of its keys
    return from_tree(tree)


def from_tree(tree: Mapping[str, Any]) -> Config:
    """A Config of nested plain values, as TOML gives them. Raises ConfigError."""
    tree = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    select = tree.get("select", {})
    if not isinstance(select, Mapping):
        raise ConfigError(f"select is a table of keys, got {select!r}: write [select] and its keys below")
    own = Select.__struct_fields__
    tree["select"] = {key: value for key, value in select.items() if key in own and key != "ops"}
    tree["select"]["ops"] = {key: value for key, value in select.items() if key not in own}
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_readable(str(error), tree)) from None


def from_saved(tree: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """The Config that a run saved, possibly by another version, and what differs, in words: keys that no
    longer exist, which are left out, and keys that were not there yet, which take their defaults.

    Raises ConfigError for values that this version can't take.
    """
    kept: dict[str, Any] = {}
    unknown, missing = _known_part(tree, Config, "", kept)
    notes = [f"unknown {name} is left out" for name in unknown]
    config = from_tree(kept)
    defaults = to_tree(config)
    for name in missing:
        value: Any = defaults
        for part in name.split("."):
            value = value[part]
        notes.append(f"missing {name} is " + ("all defaults" if isinstance(value, dict) else repr(value)))
    return config, notes


def _known_part(
    tree: Mapping[str, Any], section: type, prefix: str, kept: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """Copies the keys of `section` into `kept`; (names it does not have, names that are not given)."""
    fields = _fields(section)
    unknown = [f"{prefix}{key}" for key in tree if key not in fields]
    missing = []
    for key, kind in fields.items():
        name = f"{prefix}{key}"
        if key not in tree:
            if not (section is Select and key in registry):  # an op that nothing is forced for
                missing.append(name)
        elif (deeper_section := _section(kind, tree[key])) and isinstance(tree[key], Mapping):
            inner: dict[str, Any] = {}
            deeper = _known_part(tree[key], deeper_section, f"{name}.", inner)
            kept[key], unknown, missing = inner, unknown + deeper[0], missing + deeper[1]
        else:
            kept[key] = tree[key]
    return unknown, missing


def to_tree(config: Config) -> dict[str, Any]:
    """The nested plain values of a Config, forced ops as keys of ``select``."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    tree["select"].update(tree["select"].pop("ops"))
    return tree


def _check_text(tree: Mapping[str, Any], prefix: str = "") -> None:
    """Raises ValueError for what TOML can't hold: names of files in another encoding."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            _check_text(value, f"{prefix}{key}.")
        elif isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                within = ", or give the folder that holds it" if (prefix, key) == ("data.", "path") else ""
                raise ValueError(f"{prefix}{key}={value!r} is not UTF-8: rename it{within}") from None


def to_toml(config: Config) -> str:
    """TOML that `resolve` reads back into an equal Config."""
    tree = to_tree(config)
    lines = [f"{key} = {_toml_value(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for section, values in tree.items():
        if isinstance(values, dict):
            lines += ["", f"[{section}]", *(f"{key} = {_toml_value(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _toml_value(value: str | bool | float) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def _fields(section: type) -> dict[str, Any]:
    """Key -> type of a section, with the tag that names the kind of model."""
    if section is Select:
        return {**_hints(Select), **dict.fromkeys(registry, str)}
    tag = section.__struct_config__.tag_field  # type: ignore[attr-defined]
    return {**_hints(section), **({tag: str} if tag else {})}


def _hints(section: type) -> dict[str, Any]:
    hints = typing.get_type_hints(section, include_extras=True)
    return {name: hints[name] for name in section.__struct_fields__ if name != "ops"}  # type: ignore[attr-defined]


def _section(kind: Any, value: Any = None) -> Any:
    """The Struct of a section, None for any other type; of several kinds of model the one that the table
    `value` names, else the first."""
    members = [kind, *typing.get_args(kind)]
    members = [m for m in members if isinstance(m, type) and issubclass(m, msgspec.Struct)]
    if not members:
        return None
    named = {member.__struct_config__.tag: member for member in members}
    return named.get(value.get(_KIND) if isinstance(value, Mapping) else None, members[0])


def _lay_over(tree: dict[str, Any], given: Mapping[str, Any], section: type, prefix: str) -> None:
    fields = _fields(section)
    for key, value in given.items():
        name = f"{prefix}{key}"
        if key not in fields:
            raise ConfigError(f"unknown key {name!r}{_nearest_key(name)}")
        if _section(fields[key]):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{name} is a table of keys, got {value!r}: write [{name}] and its keys below"
                )
            if value.get(_KIND, tree[key].get(_KIND)) != tree[key].get(_KIND):
                tree[key] = {}  # another model: nothing of the first one's shape is meant
            chosen = _section(fields[key], value if _KIND in value else tree[key])
            _lay_over(tree[key], value, chosen, f"{name}.")
        else:
            tree[key] = value


def _name(override: str) -> str:
    return override.partition("=")[0].strip()


def _override(tree: dict[str, Any], override: str) -> None:
    name, (_, equals, text) = _name(override), override.partition("=")
    text = text.strip()
    if not equals:
        raise ConfigError(f"override {override!r} has no '=': write KEY=VALUE, such as train.steps=100")
    *path, last = name.split(".")
    kind: Any = Config
    place: Any = tree
    for part in path:
        place = place.get(part, {}) if isinstance(place, Mapping) else {}
        kind = _section(_fields(kind).get(part), place) if kind else None
    found = _fields(kind).get(last) if kind else None
    if found is None:
        raise ConfigError(f"unknown key {name!r}{_nearest_key(name)}")
    if inner := _section(found):
        raise ConfigError(
            f"{name} is a table of keys: set one of them, such as {name}.{next(iter(_fields(inner)))}=..."
        )
    if path and last == _KIND and place.get(_KIND) != text:
        place.clear()  # another model: nothing of the first one's shape is meant
    place[last] = _parse(text, found)


def _parse(text: str, kind: Any) -> Any:
    """The value that `text` stands for: TOML, or the bare text where it is none or a string is wanted; as a
    float also what Python writes so, such as .1 or 1."""
    wants_text = kind is str or typing.get_origin(kind) is Literal
    if wants_text and text[:1] not in ("'", '"'):
        return text
    if getattr(kind, "__origin__", kind) is float:
        with contextlib.suppress(ValueError):
            return float(text)
    try:
        value = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return value["value"] if len(value) == 1 else text


def _nearest_key(name: str) -> str:
    known = list(_fields(Config))
    for key, kind in _fields(Config).items():
        for section_kind in dict.fromkeys([_section(kind), *map(_section, typing.get_args(kind))]):
            known += [f"{key}.{inner}" for inner in _fields(section_kind)] if section_kind else []
    section, _, last = name.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    anywhere = {key.rpartition(".")[2]: key for key in known}
    if name in known:
        return f": the {_KIND} of {section} that is set has none"
    if last in anywhere:
        return f"; did you mean {anywhere[last]}?"
    for candidates in (siblings, anywhere):
        close = difflib.get_close_matches(last, candidates, n=1, cutoff=0.6)
        if close:
            return f"; did you mean {candidates[close[0]]}?"
    inside = section in _fields(Config) and _section(_fields(Config)[section])
    place, names = (f"[{section}]", siblings) if inside else ("a configuration", _fields(Config))
    return f"; {place} has {', '.join(names)}"


def _readable(error: str, tree: Mapping[str, Any]) -> str:
    """msgspec's message with the key first: ``train.steps: expected int, got str 'abc'``."""
    message, at, path = error.partition(" - at `$")
    message = message.replace("`", "")
    key = path.removesuffix("`").lstrip(".")
    if not at or not key:
        return message
    section, _, last = key.partition(".")
    if not last:
        return f"{key}: {message}"  # a whole section's own check, which names its keys
    values = tree[section]
    if last == "ops[...]":  # which of them is not said
        values = values["ops"]
        last = next(op for op, forced in values.items() if not isinstance(forced, str))
        key = f"{section}.{last}"
    kind = _fields(_section(_fields(Config)[section], tree[section])).get(last)
    value = values.get(last)
    if typing.get_origin(kind) is Literal:
        return f"{key}: expected one of {', '.join(typing.get_args(kind))}, got {value!r}"
    if message.startswith("Invalid value"):  # the tag that names the kind of model
        kinds = (member.__struct_config__.tag for member in typing.get_args(_fields(Config)["model"]))
        return f"{key}: {value!r} is not a model; there are {', '.join(map(str, kinds))}"
    got = "" if value is None else f", got {value!r}"
    return f"{key}: {message[:1].lower()}{message[1:].partition(', got')[0]}{got}"
