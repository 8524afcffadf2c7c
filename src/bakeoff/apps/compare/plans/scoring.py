"""Bits per byte of bytes that were not trained on: models' and general compressors'."""

import gzip
import lzma
import math
from pathlib import Path

import torch
from torch import Tensor

from bakeoff.apps.compare.plans.record import PackedRow
from bakeoff.apps.compare.stage import selecting
from bakeoff.apps.train import Config, load_run
from bakeoff.apps.train.checkpoint import CheckpointError
from bakeoff.apps.train.data import held_out_rows, open_parts
from bakeoff.apps.train.step import Stepper

__all__ = ["packed", "validated"]


def validated(config: Config, run_dir: Path, device: torch.device) -> float | None:
    """Bits per byte of the validation bytes, with the weights that the run in `run_dir` ended with; None
    where these are not finite."""
    try:
        model, _ = load_run(run_dir)
    except CheckpointError:
        return None
    corpus, training, held_out = open_parts(config.data, config.seq_len)
    between = range(training.stop, held_out.start)
    rows = held_out_rows(corpus, between, config.seq_len, config.train.eval_rows).to(device)
    graph = device.type == "cuda" and config.train.capture != "off"
    with selecting(config, "graph" if graph else "eager"):
        bits = Stepper(model.to(device), config, device).bits_per_byte(rows)
    return bits if math.isfinite(bits) else None


def packed(config: Config) -> list[PackedRow]:
    """gzip -9 and xz -9e on the rows that a run of `config` is scored on, as one stream each. The first byte
    of a row, which models are shown and not asked for, counts too: without it texts would have gaps."""
    corpus, _, held_out = open_parts(config.data, config.seq_len)
    rows: Tensor = held_out_rows(corpus, held_out, config.seq_len, config.train.eval_rows)
    scored = rows.numpy().tobytes()
    sizes = {
        "gzip -9": len(gzip.compress(scored, 9, mtime=0)),
        "xz -9e": len(lzma.compress(scored, preset=9 | lzma.PRESET_EXTREME)),
    }
    return [PackedRow(name, config.seq_len, len(scored), 8 * n / len(scored)) for name, n in sizes.items()]
