"""The models of a plan: what ``--model "RECIPE KEY=VALUE ..."`` says, with equal parameters."""

import functools
import math
import shlex
from collections.abc import Sequence

import msgspec
import torch

from bakeoff.apps.compare.equal import SCORED, TOLERANCE, CompareError, lengthened, match, parameters
from bakeoff.apps.compare.lengths import sized
from bakeoff.apps.train import Config, recipe, resolve
from bakeoff.models import build, byte_spectral, llm_med, longnet, titan_mac

__all__ = ["VALIDATION", "Entry", "entries", "flops_per_byte"]

Model = llm_med.Config | byte_spectral.Config | titan_mac.Config | longnet.Config

VALIDATION = 0.05
"""Share of the data by which learning rates are chosen."""
_SET = {
    "data.path": "--data",
    "train.steps": "--steps",
    "train.max_seconds": "--minutes",
    "train.seed": "--seeds",
    "train.seq_len": "--rows",
    "train.device": "--device",
    "train.run_dir": "--out",
}
"""Keys that a plan sets itself, and the option to use instead."""
_SHARED = ("data.", "train.eval_rows", "train.batch_size", "train.accumulate")
"""Beginnings of keys that are the same for all models."""
_QUIET = ("train.eval_every=0", "train.checkpoint_every=0", "train.keep=1", "train.steps=1")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A model of a plan. `name` is what was given for it; `config` lacks what each run sets: rate, seed, rows
    and budget."""

    name: str
    config: Config
    rates: tuple[float, ...]
    """Learning rates to choose among."""

    def at(self, length: int) -> Config:
        """The configuration with rows of `length` bytes, of which at least 1 MiB is scored."""
        config = sized(self.config, length) if length != self.config.seq_len else self.config
        rows = max(config.train.eval_rows, math.ceil(SCORED / length))
        return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, eval_rows=rows))


def entries(
    models: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    rates: Sequence[float] = (),
    data: str | None = None,
    device: str = "auto",
) -> list[Entry]:
    """The models of a plan, which train alike: everything but the model is the first's recipe's.

    Args:
        models: ``RECIPE [KEY=VALUE]...``, one string each. A KEY without a dot is one of [model];
            ``optim.lr=A,B`` are this model's learning rates. The first keeps its shape; the others get the
            ``d_ff`` that makes parameters equal within 2 %, unless they set one.
        overrides: ``KEY=VALUE`` for all.
        rates: learning rates of models that name none; () is the first's recipe's.
        data, device: as in `bakeoff.apps.compare.pair`.

    Raises:
        ConfigError: an unknown recipe or key, or a value that does not fit.
        CompareError: no model or one twice; a key that the plan sets itself or that all must share; unequal
            parameters.
    """
    if not models:
        raise CompareError("a plan needs models: give --model RECIPE, once for each")
    shared = [*_QUIET, f"train.device={device}", "data.whole_files=true", f"data.validation={VALIDATION}"]
    shared += [f"data.path={data}"] if data is not None else []
    for word in overrides:
        _refuse(word, _SET, "the plan")
    base: Config | None = None
    found: list[Entry] = []
    for text in models:
        name, *words = _words(text) or [""]
        words = [word if "." in word.partition("=")[0] else f"model.{word}" for word in words]
        for word in words:
            _refuse(word, _SET, text)
            if word.startswith(_SHARED):
                raise CompareError(
                    f"--model {text!r}: {word} is the same for all models: give it beside them"
                )
        own_rates = [word for word in words if word.startswith("optim.lr=")]
        words = [word for word in words if word not in own_rates]
        base = base or recipe(name)
        swapped = msgspec.structs.replace(base, recipe=name, model=recipe(name).model)
        config = resolve(swapped, None, [*shared, *overrides, *words])
        if not config.data.validation:
            raise CompareError("data.validation=0 leaves nothing to choose learning rates by: leave it out")
        config = _in_rows_of(config, found[0].config.seq_len if found else config.seq_len)
        asked = _rates(own_rates[-1].partition("=")[2]) if own_rates else tuple(rates)
        entry = Entry(name=" ".join([name, *_said(text)]), config=config, rates=asked or (config.optim.lr,))
        if entry.name in {other.name for other in found}:
            raise CompareError(f"--model {text!r} is given twice: leave one out, or set something else in it")
        found.append(_equal(entry, found[0], words) if found else entry)
    return found


def _said(text: str) -> list[str]:
    """What a model was given beside its recipe, without learning rates."""
    return [word for word in _words(text)[1:] if not word.startswith("optim.lr=")]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise CompareError(f"--model {text!r}: {str(error).lower()}: close it, or leave it out") from None


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise CompareError(f"learning rates {text!r}: give numbers, such as 5e-4,1e-3,2e-3") from None
    if not all(0.0 < rate < math.inf for rate in rates):
        raise CompareError(f"learning rates {text!r} must be above 0")
    return tuple(sorted(set(rates)))


def _refuse(word: str, keys: dict[str, str], where: str) -> None:
    key = word.partition("=")[0].strip()
    if key in keys:
        raise CompareError(f"{where}: {key} is set by the plan: use {keys[key]}")


def _equal(entry: Entry, first: Entry, words: Sequence[str]) -> Entry:
    """`entry` with as many parameters as the first, or CompareError."""
    config, wanted = entry.config, parameters(first.config.model)
    if not any(word.startswith("model.d_ff=") for word in words):
        try:
            return msgspec.structs.replace(entry, config=match(config, wanted))
        except CompareError:
            raise CompareError(
                f"--model {entry.name!r}: no d_ff gives it the {wanted:,} parameters of {first.name!r} "
                f"within {TOLERANCE:.0%}. Change its d_model, layers or tables"
            ) from None
    count = parameters(config.model)
    if abs(count - wanted) > TOLERANCE * wanted:
        raise CompareError(
            f"{entry.name} has {count:,} parameters with d_ff={config.model.ff_dim}, {first.name} has "
            f"{wanted:,}: more than {TOLERANCE:.0%} apart. Leave d_ff out, and it is chosen"
        )
    return entry


def _in_rows_of(config: Config, length: int) -> Config:
    """`config` with rows of `length` bytes, as many a step as before."""
    train = config.train
    return lengthened(sized(config, length), length, batch_size=train.batch_size, accumulate=train.accumulate)


def flops_per_byte(config: Config) -> int:
    """Floating-point operations of a training step, per byte. Allocates no memory."""
    return _flops(config.model, config.seq_len)


@functools.cache
def _flops(model: Model, length: int) -> int:
    with torch.device("meta"):
        return build(model).flops_per_token(length)
