"""Context lengths: which can be measured, with how many rows, and from which the first model is faster."""

from collections.abc import Sequence

import msgspec

from bakeoff.apps.compare.document import SIDES, Side, Speed
from bakeoff.apps.compare.equal import CompareError, lengthened
from bakeoff.apps.train import Config, DataError
from bakeoff.apps.train.data import ByteCorpus, split
from bakeoff.models import byte_spectral

__all__ = ["check_lengths", "crossover", "sized"]


def check_lengths(lengths: Sequence[int], config: Config) -> None:
    """Raises CompareError where a length is below 2 or the data are too short for it, or for the rows that
    `config` trains on."""
    for length in lengths:
        if length < 2:
            raise CompareError(f"--lengths has {length}: a row needs at least 2 bytes")
    if not lengths:
        raise CompareError("--lengths is empty: give at least one, such as 256,1024")
    data = config.data
    corpus = ByteCorpus.open(data.path, data.whole, data.validation)
    asked = {
        f"train.seq_len={config.seq_len}": (config.seq_len, "set shorter rows"),
        f"--lengths {max(lengths)}": (max(lengths), "leave that length out"),
    }
    for name, (length, instead) in asked.items():
        try:
            split(corpus, data.holdout, length, f"give longer --data or {instead}", data.validation)
        except DataError as error:
            raise CompareError(f"{name}: {error}") from None


def sized(config: Config, length: int) -> Config:
    """`config` with rows of `length` bytes, of which a step has about as many bytes as before, and with
    filters as long as before, so that parameters stay equal."""
    rows = max(1, config.train.batch_size * config.seq_len // length)
    model = config.model
    if isinstance(model, byte_spectral.Config):
        model = msgspec.structs.replace(model, taps=model.n_taps)
        config = msgspec.structs.replace(config, model=model)
    return lengthened(config, length, batch_size=rows, accumulate=1)


def crossover(rows: Sequence[Speed]) -> int | None:
    """The shortest measured length from which the first model has more training tokens/s at every longer
    measured length, too; None if there is none.

    Of several modes the trainer's counts, captured. More is what stays more when the first model's steps take
    their 80th percentile and the second's their 20th. A model that can't be measured is slower than one that
    can.
    """
    counted: dict[int, dict[Side, Speed]] = {}
    for row in rows:
        if row.mode == "captured" or not _has(rows, row.length, "captured"):
            counted.setdefault(row.length, {})[row.side] = row
    shortest = None
    for length in sorted(counted, reverse=True):
        first, second = (counted[length].get(side) for side in SIDES)
        least = _speed(first, first.step_ms_p80) if first else 0.0
        most = _speed(second, second.step_ms_p20) if second else 0.0
        if least == most == 0.0:
            continue  # nothing was measured
        if least <= most:
            break
        shortest = length
    return shortest


def _speed(row: Speed, step_ms: float | None) -> float:
    """Tokens/s of steps of `step_ms`, or of the median's where that isn't known."""
    if not row.tokens_per_s:
        return 0.0
    return row.tokens_per_s * row.step_ms / step_ms if row.step_ms and step_ms else row.tokens_per_s


def _has(rows: Sequence[Speed], length: int, mode: str) -> bool:
    return any(row.length == length and row.mode == mode for row in rows)
