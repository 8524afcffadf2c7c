"""Training over two GPUs: losses of one, checkpoints that any number opens, a rank that dies."""

import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from bakeoff.apps.train.metrics import read_metrics
from tests.dist.test_train_deaths import SOON_S, ended, settings  # noqa: F401  (a fixture)

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(300),
]

BAKEOFF = "from bakeoff.apps.cli import main; main(prog_name='bakeoff')"
BY_LAYERS = f"from bakeoff.parallel import spread; spread._UNIT = 1; {BAKEOFF}"
"""Shards are gathered a layer at a time."""
SETTINGS = [
    "train.precision=float32", "train.log_every=1", "train.eval_rows=4", "train.steps=40",
    "train.checkpoint_every=8", "train.eval_every=8", "train.leak_check=false", "optim.warmup=0",
    "optim.min_lr=1", "select.tune=false", "metrics.console=false",
]  # fmt: skip


def trained(folder: Path, ranks: int, *given: str, code: str = BAKEOFF) -> None:
    """Runs the command line under torchrun, or alone."""
    run = [sys.executable, "-c", code, "train", "llm-med-tiny", *SETTINGS, "--out", str(folder), *given]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, "--no-python", *run] if ranks > 1 else run
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[list[float], list[float]]]:
    """The losses of one GPU with the settings that are given, and those of its evaluations."""

    @lru_cache
    def found(*given: str) -> tuple[list[float], list[float]]:
        folder = tmp_path_factory.mktemp("alone") / "run"
        trained(folder, 1, *given)
        return losses(folder)

    return found


def losses(folder: Path) -> tuple[list[float], list[float]]:
    """Of all steps, and bits a byte of held-out text after every eighth."""
    rows = read_metrics(folder / "metrics.jsonl")
    held_out = {
        r["step"]: r["held_out_bits_per_byte"] for r in rows if r["event"] == "eval" and r["step"] % 8 == 0
    }
    return [row["loss"] for row in rows if row["event"] == "train"], [held_out[k] for k in sorted(held_out)]


@pytest.mark.parametrize(
    ("mode", "given", "code"),
    [
        pytest.param("ddp", (), BAKEOFF, id="ddp"),
        pytest.param("fsdp", (), BAKEOFF, id="fsdp"),
        pytest.param("ddp", ("optim.name=muon",), BAKEOFF, id="muon"),
        pytest.param("ddp", ("optim.name=muon", "optim.share=true"), BAKEOFF, id="muon shared out"),
        pytest.param("ddp", ("model.dropout=0.1",), BAKEOFF, id="dropout"),
        pytest.param("fsdp", (), BY_LAYERS, id="fsdp by layers"),
        pytest.param("fsdp", ("optim.name=muon",), BAKEOFF, id="fsdp, muon"),
        pytest.param("fsdp", ("train.accumulate=2",), BAKEOFF, id="fsdp, parts of a step"),
    ],
)
def test_losses_and_checkpoints_are_those_of_one_gpu(
    tmp_path: Path,
    mode: str,
    given: tuple[str, ...],
    code: str,
    alone: Callable[..., tuple[list[float], list[float]]],
) -> None:
    """Two GPUs train sixteen steps, one goes on to twenty, two to the end, from graphs; weights that shards
    gathered for one evaluation are not those of the next."""
    for ranks, end in ((2, 16), (1, 20), (2, 40)):
        shared = [f"parallel.mode={mode}"] if ranks > 1 else []
        trained(tmp_path / "moved", ranks, f"train.steps={end}", *shared, *given, code=code)
    alike = tuple(text for text in given if text != "optim.share=true")  # which one GPU has no use for
    (one, scored), (moved, scored_moved) = alone(*alike), losses(tmp_path / "moved")
    assert len(one) == len(moved) == 40
    assert len(scored) == len(scored_moved) == 6
    rows = read_metrics(tmp_path / "moved" / "metrics.jsonl")
    reasons = [row["reason"] for row in rows if row["event"] == "capture"]  # "" where steps are captured
    shared_out = "optim.share=true" in given or (mode, *given) == ("fsdp", "optim.name=muon")
    assert reasons == [""] * (1 if shared_out else 3)  # ranks that share out matrices never try
    assert one[-1] < one[0]
    if "model.dropout=0.1" in given:  # which differs from rank to rank
        assert moved[-1] < moved[0]
    else:
        torch.testing.assert_close(torch.tensor(moved), torch.tensor(one), rtol=2e-3, atol=1e-4)
        torch.testing.assert_close(torch.tensor(scored_moved), torch.tensor(scored), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("who", "when", "mode"), [(0, 5, "ddp"), (1, 5, "ddp"), (0, 30, "ddp"), (1, 30, "ddp"), (1, 30, "fsdp")]
)
def test_a_killed_rank_is_named(settings: Path, who: int, when: int, mode: str) -> None:  # noqa: F811
    """Its peer, which waits for it in NCCL, ends within seconds, too; from step 13 on in a replayed graph."""
    on_cpu = settings.read_text()
    assert 'device = "cpu"' in on_cpu
    assert on_cpu.count('mode = "auto"') == 1
    settings.write_text(
        on_cpu.replace('device = "cpu"', 'device = "cuda"').replace('mode = "auto"', f'mode = "{mode}"')
    )
    said, seconds = ended(settings, 2, who, "SIGKILL", when, cuda=True)
    assert seconds < SOON_S
    for text in said:
        why = f"rank {who} is dead", "can't be reached"  # rank 0 keeps the store
        assert any(f"rank {who}" in line and any(w in line for w in why) for line in text.splitlines()), text
