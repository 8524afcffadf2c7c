"""Context lengths: which can be measured, with how many rows, and from which the first model is faster."""

from collections.abc import Sequence

from bakeoff.compare.document import SIDES, Place, Speed
from bakeoff.compare.equal import CompareError, lengthened
from bakeoff.train import Config, DataError
from bakeoff.train.data import ByteCorpus, split

__all__ = ["check_lengths", "crossover", "sized"]


def check_lengths(lengths: Sequence[int], config: Config) -> None:
    """Raises CompareError where a length is below 2 or the data are too short for it."""
    for length in lengths:
        if length < 2:
            raise CompareError(f"--lengths has {length}: a row needs at least 2 bytes")
    if not lengths:
        raise CompareError("--lengths is empty: give at least one, such as 256,1024")
    corpus = ByteCorpus.open(config.data.path)
    try:
        split(corpus, config.data.holdout, max(lengths))
    except DataError:
        raise CompareError(
            f"{corpus.name} holds {len(corpus)} bytes, and --lengths {max(lengths)} needs at least "
            f"{2 * (max(lengths) + 1)}: give longer --data or leave that length out"
        ) from None


def sized(config: Config, length: int) -> Config:
    """`config` with rows of `length` bytes, of which a step has about as many bytes as before."""
    rows = max(1, config.train.batch_size * config.seq_len // length)
    return lengthened(config, length, batch_size=rows, accumulate=1)


def crossover(rows: Sequence[Speed]) -> int | None:
    """The shortest measured length from which the first model has more training tokens/s at every longer
    measured length, too; None if there is none.

    Of several modes the trainer's counts, captured. A model that can't be measured is slower than one that
    can.
    """
    speeds: dict[int, dict[Place, float]] = {}
    for row in rows:
        if row.mode == "captured" or not _has(rows, row.length, "captured"):
            speeds.setdefault(row.length, {})[row.side] = row.tokens_per_s or 0.0
    found = None
    for length in sorted(speeds, reverse=True):
        first, second = (speeds[length].get(side, 0.0) for side in SIDES)
        if first == second == 0.0:
            continue  # nothing was measured
        if first <= second:
            break
        found = length
    return found


def _has(rows: Sequence[Speed], length: int, mode: str) -> bool:
    return any(row.length == length and row.mode == mode for row in rows)
