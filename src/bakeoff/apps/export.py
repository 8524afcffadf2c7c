"""A trained run for programs that have no bakeoff: its weights as safetensors, and its model as a program of
torch.export, which holds the weights and plain PyTorch operators and nothing else."""

import io
import warnings
from pathlib import Path

import msgspec
import safetensors.torch
import torch
from torch import Tensor, nn

from bakeoff.apps.train import Config, load_run, to_toml
from bakeoff.errors import BakeoffError
from bakeoff.models.llm_med import LLMMed
from bakeoff.select import using

__all__ = ["ExportError", "Exported", "export"]

WEIGHTS, CONFIG, PROGRAM = "model.safetensors", "config.toml", "program.pt2"
_TOLERANCE = 1e-3  # of logits between the program and the model; both compute in float32


class ExportError(BakeoffError, RuntimeError):
    """A run that can't be exported, or a folder that can't be written."""


class Exported(msgspec.Struct, frozen=True):
    """What `export` wrote below `out`, and which ids the program takes."""

    out: Path
    longest: int
    """Bytes of the longest row."""
    any_length: bool
    """Rows may be shorter, too."""
    any_batch: bool
    """Any number of rows; otherwise one."""

    @property
    def takes(self) -> str:
        """The ids that the program takes, for people."""
        batch = "batch" if self.any_batch else "1"
        length = f"length up to {self.longest}" if self.any_length else str(self.longest)
        return f"ids [{batch}, {length}] int64"


class _Logits(nn.Module):
    """ids [B, n] -> logits [B, n, vocab], where n is at most `length`.

    A model whose operators depend on the length (transforms, segments) is run at `length`, with the last id
    repeated behind each row: no output depends on what comes after it.
    """

    def __init__(self, model: nn.Module, length: int = 0) -> None:
        super().__init__()
        self.model, self.length = model, length

    def forward(self, ids: Tensor) -> Tensor:
        if not self.length:
            logits: Tensor = self.model(ids)[0]
            return logits
        count = ids.shape[1]
        ids = ids[:, torch.arange(self.length, device=ids.device).clamp(max=count - 1)]
        logits = self.model(ids)[0]
        # Copied, as of a view torch.export asks whether it is the whole, which depends on the length.
        return logits[:, torch.arange(count, device=ids.device)]


def export(run: Path, out: Path) -> Exported:
    """Writes model.safetensors, config.toml and program.pt2 of the run (its newest checkpoint, or a
    checkpoint's folder) below `out`, and makes sure that the program gives the model's logits.

    ``torch.export.load("program.pt2").module()(ids)`` are the logits [B, n, vocab] float32 of ids [B, n]
    int64, on the CPU. Raises CheckpointError where there is no run, ExportError.
    """
    model, config = load_run(run)
    try:
        out.mkdir(parents=True, exist_ok=True)
        taken = any(out.iterdir())
    except OSError as error:
        raise _unwritable(out, error) from None
    if taken:
        raise ExportError(f"{out} is not empty: give another --out")
    try:
        weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        (out / WEIGHTS).write_bytes(safetensors.torch.save(weights, metadata={"format": "pt"}))
        (out / CONFIG).write_text(to_toml(config), "utf-8")
        return _write_program(model, config, out)
    except BaseException as error:
        for name in (WEIGHTS, CONFIG, PROGRAM):  # no half of an export stays
            (out / name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _unwritable(out, error) from None
        raise


def _unwritable(out: Path, error: OSError) -> ExportError:
    return ExportError(f"can't write to {out} ({error.strerror or error}): give another --out")


def _write_program(model: nn.Module, config: Config, out: Path) -> Exported:
    longest = int(config.model.max_seq_len)
    any_length = longest > 2 or not isinstance(model, LLMMed)  # whose shortest row is 2
    program, any_batch = _traced(model, longest, any_length=any_length)
    packed = io.BytesIO()  # torch's own writer hides why a file can't be written
    torch.export.save(program, packed)
    (out / PROGRAM).write_bytes(packed.getbuffer())
    exported = Exported(out, longest, any_length, any_batch)
    _compare(model, exported)
    return exported


def _traced(model: nn.Module, longest: int, *, any_length: bool) -> tuple[torch.export.ExportedProgram, bool]:
    """(the program, whether it takes any number of rows); of a model whose operators depend on that number,
    one row."""
    padded = any_length and not isinstance(model, LLMMed)  # which alone takes any length as it is
    module = _Logits(model, longest if padded else 0).eval()
    length = {1: torch.export.Dim("length", min=1 if padded else 2, max=longest)} if any_length else {}
    example = max(2, longest - 1) if any_length else longest  # of one, torch.export makes a constant
    why: Exception | None = None
    for rows, batch in ((2, {0: torch.export.Dim("batch", min=1)}), (1, {})):
        ids = torch.zeros((rows, example), dtype=torch.int64)
        try:
            with using("off"), torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = torch.export.export(
                    module, (ids,), dynamic_shapes=({**batch, **length},), strict=False
                )
        except (RuntimeError, AssertionError, ValueError) as error:
            why = error
            continue
        return program, bool(batch)
    raise ExportError(f"torch.export can't trace this model: {why}") from why


def _compare(model: nn.Module, exported: Exported) -> None:
    """Raises ExportError where the program, as it was saved, gives other logits than the model."""
    program = torch.export.load(exported.out / PROGRAM).module()
    draw = torch.Generator().manual_seed(0)
    rows = 3 if exported.any_batch else 1
    lengths = (
        {exported.longest, (exported.longest + 1) // 2 + 1} if exported.any_length else {exported.longest}
    )
    for length in sorted(lengths):
        ids = torch.randint(256, (rows, length), generator=draw)
        with using("off"), torch.no_grad():
            expected = model(ids)[0]
            distance = float((program(ids) - expected).abs().max())
        if not distance <= _TOLERANCE * max(1.0, float(expected.abs().max())):
            raise ExportError(
                f"the program's logits differ by {distance:.1e} at rows of {length} bytes: torch.export of "
                f"torch {torch.__version__} does not fit this model"
            )
