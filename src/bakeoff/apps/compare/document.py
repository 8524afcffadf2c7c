"""OUT/compare.json: what was compared, every run and every length, and the verdict."""

from pathlib import Path
from typing import Any, Literal

import msgspec

from bakeoff.apps.bench.results import Env
from bakeoff.apps.compare.equal import CompareError, parameters
from bakeoff.apps.compare.judge import Verdict
from bakeoff.apps.train import Config
from bakeoff.apps.train.config import to_tree
from bakeoff.paths import write_whole

__all__ = [
    "SIDES",
    "Document",
    "Model",
    "Run",
    "Side",
    "Speed",
    "model_of",
    "path_of",
    "read",
    "scored",
    "write",
]

Side = Literal["first", "second"]
SIDES: tuple[Side, Side] = ("first", "second")


class Model(msgspec.Struct, kw_only=True):
    """One of the two. `name` is the recipe's, with the side where both have the same recipe; `config` is the
    resolved configuration that all its runs share."""

    name: str
    parameters: int
    config: dict[str, Any]


class Run(msgspec.Struct, kw_only=True):
    """One training run. Bits per byte are of held-out rows; None where they are not finite."""

    side: Side
    seed: int
    steps: int
    seconds: float
    """Time of the training steps; evaluating and saving don't count."""
    tokens_per_s: float
    bits_per_byte_before: float | None
    bits_per_byte: float | None
    peak_bytes: int | None
    """Device memory; None on the CPU, where a process has one peak for all its runs."""
    stopped: str
    curve: list[tuple[float, int, float | None]]
    """(seconds, step, bits per byte of the training rows since the point before)."""


class Speed(msgspec.Struct, kw_only=True):
    """A model at one context length. Times are medians over blocks, in ms, with 20th and 80th percentiles;
    None where it could not be measured, and `reason` says why."""

    side: Side
    length: int
    rows: int
    mode: str
    """How training steps are issued: eager or captured."""
    step_ms: float | None = None
    step_ms_p20: float | None = None
    step_ms_p80: float | None = None
    tokens_per_s: float | None = None
    infer_ms: float | None = None
    """A forward pass of the same rows without gradients, issued eagerly."""
    infer_ms_p20: float | None = None
    infer_ms_p80: float | None = None
    peak_bytes: int | None = None
    """Device memory of training steps; None on the CPU."""
    reason: str = ""


class Document(msgspec.Struct, kw_only=True):
    """A comparison, finished or not."""

    schema: Literal[1] = 1
    env: Env
    first: Model
    second: Model
    seeds: int
    lengths: list[int]
    data_bytes: int = 0
    """Bytes of the data, training and held out; 0 where unknown."""
    data_digest: str = ""
    """Digest of these bytes, from `ByteCorpus.digest`."""
    scored_bytes: int = 0
    """Held-out bytes that bits per byte are of; 0 where unknown."""
    held_bytes: int = 0
    """Bytes of the files that were held out whole; 0 where the held-out bytes are the end of the data."""
    runs: list[Run] = []
    speed: list[Speed] = []
    verdict: Verdict | None = None
    """None until every run is there."""
    crossover: int | None = None
    """The shortest measured length from which the first trains faster at every longer one, too."""

    def model(self, side: Side) -> Model:
        return self.first if side == "first" else self.second

    def scores(self, side: Side) -> list[float | None]:
        """Held-out bits per byte, one a run."""
        return [run.bits_per_byte for run in self.runs if run.side == side]


def model_of(config: Config, name: str) -> Model:
    """What a comparison keeps of the model that `config` trains, under this `name`."""
    return Model(name=name, parameters=parameters(config.model), config=to_tree(config))


def scored(document: Document) -> str:
    """A sentence on what bits per byte are of; empty where that isn't known."""
    if not document.scored_bytes:
        return ""
    where = "whole files, chosen by a hash of their path" if document.held_bytes else "the end of the data"
    return f"Bits per byte are of {document.scored_bytes:,} held-out bytes of {where}."


def path_of(out: Path) -> Path:
    """The file of the comparison in the folder `out`."""
    return out / "compare.json"


def read(out: Path) -> Document:
    """The comparison kept in the folder `out`. Raises CompareError."""
    path = path_of(out)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Document)
    except OSError as error:
        raise CompareError(f"{path} can't be read: {error.strerror or error}") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CompareError(f"{path} is no comparison of this version: {error}. Move it away") from None


def write(out: Path, document: Document) -> None:
    """Write it whole or not at all. Raises CompareError where the folder can't be written."""
    path = path_of(out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.format(msgspec.json.encode(document), indent=1))
    except OSError as error:
        raise CompareError(f"can't write {path} ({error.strerror or error}): give a writable --out") from None
