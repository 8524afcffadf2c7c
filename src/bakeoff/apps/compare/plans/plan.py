"""What a plan runs, and which run comes next."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from bakeoff.apps.compare.equal import CompareError
from bakeoff.apps.compare.plans.entries import Entry, flops_per_byte
from bakeoff.apps.compare.plans.record import Finished
from bakeoff.apps.train import Config

__all__ = ["TASKS", "Budget", "Plan", "Planned", "Setting", "Task"]

Task = Literal["text", "recall", "copy"]
TASKS: tuple[Task, ...] = ("recall", "copy")
_TASK_LENGTHS = {"recall": 224, "copy": 256}


class Budget(msgspec.Struct, frozen=True):
    """What all models get equally of: steps, minutes of training, or floating-point operations."""

    kind: Literal["steps", "minutes", "flops"]
    amount: float

    def apply(self, config: Config) -> Config:
        """`config` with this limit; operations are turned into steps of its model."""
        steps, seconds = 0, 0.0
        if self.kind == "steps":
            steps = int(self.amount)
        elif self.kind == "minutes":
            seconds = 60 * self.amount
        else:
            step = flops_per_byte(config) * config.train.batch_size * config.seq_len
            steps = round(self.amount / step)
            if steps < 1:
                raise CompareError(
                    f"--flops {self.amount:g}: a step of {config.recipe} alone takes {step:.2g}"
                )
        train = msgspec.structs.replace(config.train, steps=steps, max_seconds=seconds)
        return msgspec.structs.replace(config, train=train)

    def __str__(self) -> str:
        amount = f"{self.amount:g}" if self.kind == "flops" else f"{self.amount:,g}"
        return f"{amount} {self.kind if self.kind != 'flops' else 'FLOPs'}"


class Setting(msgspec.Struct, frozen=True):
    """In which models are compared: what they learn, for how long, in rows of how many bytes."""

    task: Task
    budget: Budget
    length: int

    def __str__(self) -> str:
        what = "" if self.task == "text" else f"{self.task}, "
        return f"{what}equal {self.budget}, rows of {self.length:,} bytes"


class Planned(msgspec.Struct, frozen=True):
    """One run."""

    entry: Entry
    setting: Setting
    rate: float
    seed: int
    config: Config
    key: str
    """Equal for runs that would end alike."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Models, and what each of them runs: in every setting every learning rate with the first seed, then the
    best of them, by validation, with the other seeds."""

    entries: Sequence[Entry]
    settings: Sequence[Setting]
    seeds: int = 3
    digest: str = ""
    """Of the data."""

    def __post_init__(self) -> None:
        if not self.settings:
            raise CompareError("a plan needs a budget: give --steps, --minutes or --flops")

    @classmethod
    def of(
        cls,
        entries: Sequence[Entry],
        budgets: Sequence[Budget],
        lengths: Sequence[int],
        *,
        tasks: Sequence[Task] = (),
        task_steps: int = 500,
        seeds: int = 3,
        digest: str = "",
    ) -> "Plan":
        """Each of `budgets` at each of `lengths` on text, and each of `tasks` for `task_steps`."""
        texts = [Setting("text", budget, length) for length in lengths for budget in budgets]
        others = [Setting(task, Budget("steps", task_steps), _TASK_LENGTHS[task]) for task in tasks]
        return cls(entries=entries, settings=[*texts, *others], seeds=seeds, digest=digest)

    @property
    def size(self) -> int:
        """How many runs it has."""
        return len(self.settings) * sum(len(entry.rates) + self.seeds - 1 for entry in self.entries)

    def run(self, entry: Entry, setting: Setting, rate: float, seed: int) -> Planned:
        """The run of `entry` with this rate and seed."""
        config = entry.at(setting.length)
        config = setting.budget.apply(config)
        config = msgspec.structs.replace(
            config,
            optim=msgspec.structs.replace(config.optim, lr=rate),
            train=msgspec.structs.replace(config.train, seed=seed),
        )
        digest = self.digest if setting.task == "text" else ""
        return Planned(entry, setting, rate, seed, config, _key(config, setting, digest))

    def swept(self, entry: Entry, setting: Setting) -> list[Planned]:
        """The runs that choose the learning rate."""
        return [self.run(entry, setting, rate, 0) for rate in entry.rates]

    def best(self, entry: Entry, setting: Setting, done: Mapping[str, Finished]) -> Planned | None:
        """The run of the best rate with the first seed; None while some are missing or none is finite."""
        runs = self.swept(entry, setting)
        scores = [done[run.key].validation if run.key in done else math.nan for run in runs]
        if any(score is not None and math.isnan(score) for score in scores):
            return None
        known = [(score, run) for score, run in zip(scores, runs, strict=True) if score is not None]
        return min(known, key=lambda pair: pair[0])[1] if known else None

    def scored(self, entry: Entry, setting: Setting, done: Mapping[str, Finished]) -> list[Planned]:
        """The runs of the best rate, one a seed; [] while that isn't known."""
        best = self.best(entry, setting, done)
        return [] if best is None else [self.run(entry, setting, best.rate, n) for n in range(self.seeds)]

    def missing(self, done: Mapping[str, Finished]) -> Iterator[Planned]:
        """The runs to make next, in turns of models, so that a machine's drift hits all. Those of the best
        rates follow once these are known: ask again after each run."""
        for setting in self.settings:
            swept = [self.swept(entry, setting) for entry in self.entries]
            most = max(map(len, swept))
            turns = [runs[number] for number in range(most) for runs in swept if number < len(runs)]
            yield from (run for run in turns if run.key not in done)
            seeds = [self.scored(entry, setting, done) for entry in self.entries]
            turns = [runs[number] for number in range(1, self.seeds) for runs in seeds if runs]
            yield from (run for run in turns if run.key not in done)


def _key(config: Config, setting: Setting, digest: str) -> str:
    """A digest of everything that decides how a run ends; what it is called, where it is written and on which
    device are left out. Settings at their defaults don't count, so that new settings leave it as it is."""
    tree = _changed(config)
    tree.pop("recipe", None)
    for name in ("run_dir", "resume", "device", "log_every"):
        tree.get("train", {}).pop(name, None)
    tree.pop("metrics", None)
    tree.get("data", {}).pop("path", None)
    told = msgspec.json.encode([tree, setting, digest], order="deterministic")
    return hashlib.sha256(told).hexdigest()[:16]


def _changed(section: msgspec.Struct) -> dict[str, Any]:
    """The fields that aren't at their defaults."""
    default = type(section)()
    changed: dict[str, Any] = {}
    for name, value in msgspec.structs.asdict(section).items():
        if isinstance(value, msgspec.Struct):
            kind = {"kind": value.__struct_config__.tag} if name == "model" else {}
            changed[name] = kind | _changed(value)
        elif value != getattr(default, name):
            changed[name] = value
    return changed
