"""Two configurations that differ in their model alone, with equal parameters."""

import math
from collections.abc import Sequence

import msgspec
import torch

from bakeoff.apps.train import Config, recipe, resolve
from bakeoff.errors import BakeoffError
from bakeoff.models import build, byte_spectral, llm_med, longnet, titan_mac

__all__ = ["TOLERANCE", "CompareError", "lengthened", "match", "pair", "parameters"]

SCORED = 2**20
"""Held-out bytes that a comparison scores at least, where there are so many."""
TOLERANCE = 0.02
"""Share by which the numbers of parameters may differ."""
_MULTIPLE = 8
"""d_ff is a multiple of this, for the sake of tensor cores."""

_OPTIONS = {
    "data.path": "--data",
    "train.steps": "--steps",
    "train.max_seconds": "--minutes",
    "train.seed": "--seeds",
    "train.device": "--device",
    "train.run_dir": "--out",
    "train.resume": "--resume",
}
"""Keys that a comparison sets itself, and the option to use instead."""
_BYTES = ("data.holdout", "train.eval_rows", "train.seq_len", "train.batch_size", "train.accumulate")
"""Keys that decide which bytes are trained on, in which order, and which are scored."""
_QUIET = ("train.eval_every=0", "train.checkpoint_every=0", "train.keep=1")
"""Evaluations and checkpoints during a run would cost the faster model more of its time."""


class CompareError(BakeoffError, ValueError):
    """A comparison that isn't possible with these settings; the message says what to change."""


def pair(
    first: str,
    second: str,
    overrides: Sequence[str] = (),
    *,
    data: str | None = None,
    device: str = "auto",
    minutes: float | None = None,
    steps: int | None = None,
    scored: int = SCORED,
) -> tuple[Config, Config]:
    """The configurations of two recipes that train alike: everything but the model is the second's.

    Args:
        first, second: names of recipes.
        overrides: ``KEY=VALUE`` for both; ``first.KEY=VALUE`` or ``second.KEY=VALUE`` for one.
        data: file or folder; None is the recipe's.
        device: as in `Train.device`.
        minutes: of every run; steps: instead of minutes. One of them must be given.
        scored: held-out bytes, of whole files where the data are a folder, on which models are judged at
            least, unless an override sets train.eval_rows.

    Raises:
        ConfigError: an unknown recipe or key, or a value that does not fit.
        CompareError: a key that the comparison sets itself, that one model lacks, or that would give one side
            other bytes; both limits, or none.
    """
    if (minutes is None) == (steps is None):
        raise CompareError("equal time or equal steps: give either --minutes or --steps")
    limit = (
        ["train.steps=0", f"train.max_seconds={60 * minutes!r}"]
        if minutes is not None
        else [f"train.steps={steps}", "train.max_seconds=0"]
    )
    fixed = [*_QUIET, *limit, f"train.device={device}", "data.whole_files=true"]
    if data is not None:
        fixed.append(f"data.path={data}")
    both, own = _sorted(overrides)
    model = recipe(first).model
    base = recipe(second)
    swapped = msgspec.structs.replace(base, recipe=first, model=model)
    _check_keys(both, swapped, base)
    other = resolve(base, None, [*fixed, *both, *own["second"]])
    one = resolve(swapped, None, [*fixed, *both, *own["first"]])
    if one.train.seq_len == 0:
        one = lengthened(one, other.seq_len)
    if scored and not any(word.strip().startswith("train.eval_rows") for word in both):
        rows = max(other.train.eval_rows, math.ceil(scored / other.seq_len))
        one, other = (
            msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, eval_rows=rows))
            for config in (one, other)
        )
    return one, other


def lengthened(config: Config, length: int, **train: int) -> Config:
    """`config` with rows of `length` bytes, by a model that takes them, and other settings of [train]."""
    model = msgspec.structs.replace(config.model, max_seq_len=max(config.model.max_seq_len, length))
    return msgspec.structs.replace(
        config, model=model, train=msgspec.structs.replace(config.train, seq_len=length, **train)
    )


def parameters(model: llm_med.Config | byte_spectral.Config | titan_mac.Config | longnet.Config) -> int:
    """The number of parameters of a model of this shape; shared ones count once. Allocates no memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in build(model).parameters())


def match(config: Config, target: int) -> Config:
    """`config` with the ``model.d_ff``, a multiple of 8, that brings its parameters nearest to `target`.

    Raises CompareError where that is not within 2 %.
    """

    def sized(d_ff: int) -> llm_med.Config | byte_spectral.Config | titan_mac.Config | longnet.Config:
        return msgspec.structs.replace(config.model, d_ff=d_ff)

    least = parameters(sized(_MULTIPLE))
    per_step = parameters(sized(2 * _MULTIPLE)) - least  # every layer's gated MLP is linear in d_ff
    model = sized(_MULTIPLE * (1 + max(0, round((target - least) / per_step))))
    count = parameters(model)
    if abs(count - target) > TOLERANCE * target:
        change = (
            "lower first.model.d_model or first.model.layers"
            if count > target
            else "raise model.d_model for both"
        )
        raise CompareError(
            f"{config.recipe} can't have about {target:,} parameters: with d_ff={model.d_ff}, the nearest, "
            f"it has {count:,}, more than {TOLERANCE:.0%} off. To make them equal, {change}"
        )
    return msgspec.structs.replace(config, model=model)


def _check_keys(words: Sequence[str], first: Config, second: Config) -> None:
    """Raises CompareError for a key meant for both that one model lacks."""
    sides = {"first": first, "second": second}
    for word in words:
        section, _, key = word.partition("=")[0].strip().partition(".")
        having = [side for side, config in sides.items() if key in config.model.__struct_fields__]
        if section == "model" and len(having) == 1:
            raise CompareError(
                f"only {sides[having[0]].recipe} has {section}.{key}: write {having[0]}.{word.strip()}"
            )


def _sorted(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """(overrides for both, overrides for each side)."""
    both: list[str] = []
    own: dict[str, list[str]] = {"first": [], "second": []}
    for text in overrides:
        side, _, rest = text.strip().partition(".")
        key = (rest if side in own else text).partition("=")[0].strip()
        if key in _OPTIONS:
            raise CompareError(f"{key} is the same for both and set by the comparison: use {_OPTIONS[key]}")
        if side in own and key in _BYTES:
            raise CompareError(f"{key} decides which bytes are seen: write {rest.strip()}, for both")
        if side == "first" and key == "model.d_ff":
            raise CompareError(
                "first.model.d_ff is chosen so that the parameters are equal: set second.model.d_ff"
            )
        own.get(side, both).append(rest if side in own else text)
    return both, own
