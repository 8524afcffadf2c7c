"""The sections of a configuration: every setting of a run, its type, range and default."""

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from bakeoff.errors import BakeoffError
from bakeoff.models import byte_spectral, llm_med, longnet, titan_mac
from bakeoff.select import find_op

__all__ = [
    "Config",
    "ConfigError",
    "Data",
    "Metrics",
    "Optim",
    "Parallel",
    "Select",
    "SettingError",
    "Train",
    "to_toml",
    "to_tree",
]

_LARGEST = 2**63 - 1  # the largest integer of TOML and of PyTorch
Count = Annotated[int, Meta(ge=0, le=_LARGEST)]
Positive = Annotated[int, Meta(ge=1, le=_LARGEST)]
Seconds = Annotated[float, Meta(ge=0)]


class ConfigError(BakeoffError, ValueError):
    """A key that does not exist, a value of the wrong type, or settings that contradict each other."""


class SettingError(ConfigError):
    """A recipe or key that does not exist, or a value that can't be: a command was used wrongly."""

    wrong_usage = True
    """So that a command ends with status 2."""


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
    validation: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share before these that is not trained on either, for choosing settings; never measured by a run."""
    may_change: bool = False
    """Go on, with a warning, where the bytes are no longer those that the run began with."""
    whole_files: bool = False
    """In a folder, hold out whole files instead: about this share of them, chosen by a hash of their path."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.holdout + self.validation >= 1.0:
            raise ValueError(
                f"holdout={self.holdout} and validation={self.validation} leave nothing to train on: their "
                "sum must be below 1"
            )

    @property
    def whole(self) -> float:
        """The share of files that is held out whole."""
        return self.holdout if self.whole_files else 0.0


class Optim(Section, frozen=True):
    """[optim] the optimizer, with linear warm-up and cosine decay."""

    name: Literal["adamw", "muon", "deep-nested"] = "adamw"
    """"muon": weights of linear layers by Muon, all else by AdamW. "deep-nested": AdamW with learned
    multipliers of each group's rate."""
    muon: bool = False
    """With deep-nested: step matrices other than embeddings by Muon."""
    muon_lr: Annotated[float, Meta(ge=0)] = 0.0
    """With name="muon": the rate of its matrices; 0 means `lr`, as updates are about as large as AdamW's."""
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    """Of Muon, with name="muon"."""
    share: bool = False
    """With name="muon" and parallel.mode="ddp": each rank orthogonalises some of the matrices, for all."""
    lr: Annotated[float, Meta(gt=0)] = 1e-3
    min_lr: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Share of `lr` left at the end."""
    warmup: Annotated[float, Meta(ge=0, lt=1)] = 0.02
    """Share of the run in which the rate climbs from 0, that of the first step, to `lr`."""
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0)] = 0.1
    """Decoupled, on matrices only."""
    clip: Annotated[float, Meta(ge=0)] = 1.0
    """Largest norm of the gradient; 0 means no clipping."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.muon and self.name != "deep-nested":
            raise ValueError('muon=true belongs to name="deep-nested": set that, too')
        if (self.muon_lr or self.share) and self.name != "muon":
            raise ValueError('muon_lr and share belong to name="muon": set that, too')


class Train(Section, frozen=True):
    """[train] length, batch, device, precision, measurements and checkpoints of a run."""

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
    fp8: bool = False
    """Multiply the projections of MLPs and attention in FP8 (see docs/fp8.md); weights stay as they are."""
    capture: Literal["auto", "on", "off"] = "auto"
    """Replay the whole step as one CUDA graph: where possible ("auto"), or else an error ("on")."""
    compile: bool = False
    """Run the training pass through torch.compile."""
    deterministic: bool = False
    """On CUDA, take deterministic kernels only, so that a run repeats itself bit for bit, at some cost."""
    leak_check: bool = True
    """Before the first step, make sure that no output of the model sees its own future."""
    sentinel: Count = 0
    """Steps between checks of what runs: a selected call is verified on the run's own values; 0 means never.
    What fails runs no more, and leaves a file in RUN/reproducers. One process only."""
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
    keep_best: bool = False
    """Keep in RUN/best the checkpoint that measured best on held-out bytes; needs `eval_every`."""
    run_dir: str = ""
    """Folder of the run; empty means runs/RECIPE-DATE-TIME."""
    resume: str = "auto"
    """"auto": go on if run_dir holds a checkpoint. "never": refuse such a folder. Else a run or checkpoint to
    start from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_best and not self.eval_every:
            raise ValueError("keep_best=true needs measurements to choose by: set eval_every, too")
        if self.sentinel and self.compile:
            raise ValueError("sentinel can't see calls inside compiled code: set sentinel=0 or compile=false")


class Parallel(Section, frozen=True):
    """[parallel] how the ranks that torchrun started share the work."""

    mode: Literal["auto", "none", "ddp", "fsdp"] = "auto"
    """"ddp": every rank holds the model. "fsdp": every rank holds a shard of it. "none": one process only.
    "auto": ddp where there are several ranks."""
    cp: Annotated[int, Meta(ge=1)] = 1
    """How many ranks share each row, each with a part of its bytes (context parallelism); for longnet."""
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

    def forced(self) -> dict[str, str]:
        """`ops` as a run takes them. What is said of `rotary` goes for `qkv_rotary`, too, where nothing is
        said of that and it has such a candidate: models called the former until the latter came."""
        said = self.ops.get("rotary", "")
        if "qkv_rotary" in self.ops or said not in find_op("qkv_rotary").by_name:
            return self.ops
        return {**self.ops, "qkv_rotary": said}


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
    model: llm_med.Config | byte_spectral.Config | titan_mac.Config | longnet.Config = llm_med.Config()
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
        if train.sentinel and self.select.policy == "off" and not self.select.ops:
            raise ValueError(
                "select.policy=off runs plain PyTorch, of which the sentinel checks nothing: set "
                "train.sentinel=0 or another policy"
            )
        if self.seq_len < 2:
            raise ValueError(
                f"rows of {self.seq_len} byte are too short: make train.seq_len, or model.max_seq_len where "
                "that is 0, at least 2"
            )
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
