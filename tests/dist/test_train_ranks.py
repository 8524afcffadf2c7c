"""Training on several ranks: the same losses, checkpoints that fit any world, one decision for all."""

import errno
import io
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from bakeoff.errors import BakeoffError
from bakeoff.models.llm_med import Config as ModelConfig, LLMMed
from bakeoff.models.longnet import Config as LongNetConfig
from bakeoff.graphs import NotCapturable
from bakeoff.parallel import ALONE, World, spread
from bakeoff.apps.train import ConfigError, device, moments, resolve, setup, step, train
from bakeoff.apps.train.checkpoint import latest, steps
from bakeoff.apps.train.config import Config, Data, Metrics, Optim, Select, Train, to_toml
from bakeoff.apps.train.metrics import read_metrics

Ranks = Callable[..., None]

TEXT = "".join(f"line {n}: the quick brown fox jumps over {n % 7} lazy dogs\n" for n in range(400))
STEPS = 12


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A small run at a constant rate, as a file; `run` lays a mode and a folder over it."""
    (tmp_path / "text.txt").write_text(TEXT)
    config = Config(
        model=ModelConfig(d_model=24, layers=2, heads=2, max_seq_len=32),
        data=Data(path=str(tmp_path / "text.txt")),
        optim=Optim(lr=3e-3, warmup=0.0, min_lr=1.0),
        train=Train(
            steps=STEPS, batch_size=8, accumulate=2, log_every=1, eval_rows=7, checkpoint_every=0,
            device="cpu", leak_check=False,
        ),
        select=Select(tune=False),
        metrics=Metrics(console=False),
    )  # fmt: skip
    file = tmp_path / "base.toml"
    file.write_text(to_toml(config))
    return file


def run(base: Path, name: str, *overrides: str, **more: Any) -> Any:
    config = resolve(Config(), base, [f"train.run_dir={base.parent / name}", *overrides])
    return train(config, console=Console(file=io.StringIO()), **more)


def trained(rank: int, base: Path, name: str, *overrides: str) -> None:
    result = run(base, name, *overrides)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (result.steps, result.bits_per_byte_after, str(result.checkpoint)))
    assert len(set(everybody)) == 1, everybody


def curve(base: Path, name: str) -> dict[str, list[float]]:
    rows = read_metrics(base.parent / name / "metrics.jsonl")
    found = {key: [row[key] for row in rows if row["event"] == "train"] for key in ("loss", "grad_norm")}
    found["held_out"] = [row["held_out_bits_per_byte"] for row in rows if row["event"] == "eval"]
    return found


def assert_same(one: dict[str, list[float]], other: dict[str, list[float]]) -> None:
    for key, values in one.items():
        assert len(values) == len(other[key]), key
        torch.testing.assert_close(torch.tensor(other[key]), torch.tensor(values), rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(("world", "mode"), [(2, "ddp"), (2, "fsdp"), (4, "fsdp")])
def test_losses_are_those_of_one_rank(ranks: Ranks, base: Path, world: int, mode: str) -> None:
    between = "train.eval_every=4", "train.checkpoint_every=4"  # after a measurement shards may still be whole
    run(base, "alone", *between)
    ranks(world, trained, base, "many", f"parallel.mode={mode}", *between)
    alone, many = curve(base, "alone"), curve(base, "many")
    assert len(alone["loss"]) == STEPS
    assert len(alone["held_out"]) == 4
    assert alone["loss"][-1] < alone["loss"][0] - 1
    assert_same(alone, many)
    (start,) = [r for r in read_metrics(base.parent / "many" / "metrics.jsonl") if r["event"] == "start"]
    assert (start["ranks"], start["parallel"]) == (world, mode)
    ends = [latest(base.parent / name) for name in ("alone", "many")]
    for name, tensor in ends[0].weights.items():
        torch.testing.assert_close(ends[1].weights[name], tensor, rtol=1e-3, atol=2e-4)


def trained_with_muon(rank: int, base: Path) -> None:
    trained(rank, base, "ddp", "optim.name=muon", "parallel.mode=ddp", "optim.share=true")
    trained(rank, base, "fsdp", "optim.name=muon", "parallel.mode=fsdp", "train.steps=5")
    trained(rank, base, "fsdp", "optim.name=muon", "parallel.mode=fsdp")


def test_losses_with_muon_are_those_of_one_rank(ranks: Ranks, base: Path) -> None:
    """Ranks share the work, of replicas and of shards, and a run of shards goes on where it stopped."""
    run(base, "alone", "optim.name=muon")
    ranks(2, trained_with_muon, base)
    alone, ddp, fsdp = (curve(base, name) for name in ("alone", "ddp", "fsdp"))
    assert alone["loss"][-1] < alone["loss"][0] - 0.5
    assert_same(alone, ddp)
    del alone["held_out"], fsdp["held_out"]  # a part of a run ends with a measurement
    assert_same(alone, fsdp)


def trained_in_parts(rank: int, base: Path) -> None:
    trained(rank, base, "ddp", "parallel.cp=2")
    trained(rank, base, "fsdp", "parallel.cp=2", "parallel.mode=fsdp", "train.steps=4")
    with pytest.raises(ConfigError, match=r"cp=3 ranks share a row, and 2 were launched: launch a multiple"):
        run(base, "refused", "parallel.cp=3")


def test_losses_of_rows_in_parts_are_those_of_one_rank(ranks: Ranks, base: Path) -> None:
    """Context parallelism: each of two ranks has one half of every row, and one segment is longer."""
    model = LongNetConfig(
        d_model=24, layers=2, heads=2, max_seq_len=32, segments=(8, 32), rates=(1, 2), d_ff=32
    )
    config = resolve(Config(), base)
    base.write_text(to_toml(msgspec.structs.replace(config, model=model)))
    run(base, "alone")
    ranks(2, trained_in_parts, base)
    alone, ddp, fsdp = (curve(base, name) for name in ("alone", "ddp", "fsdp"))
    assert alone["loss"][-1] < alone["loss"][0] - 1
    assert_same(alone, ddp)
    assert_same({name: alone[name][:4] for name in ("loss", "grad_norm")}, fsdp)
    ends = [latest(base.parent / name) for name in ("alone", "ddp")]
    for name, tensor in ends[0].weights.items():
        torch.testing.assert_close(ends[1].weights[name], tensor, rtol=1e-3, atol=2e-4)


def test_a_checkpoint_of_any_world_opens_in_any(ranks: Ranks, base: Path) -> None:
    run(base, "alone")
    ranks(2, trained, base, "chain", "parallel.mode=ddp", "train.steps=3")
    ranks(4, trained, base, "chain", "parallel.mode=fsdp", "train.steps=6")
    assert run(base, "chain", "train.steps=9").steps == 9
    ranks(2, trained, base, "chain", "parallel.mode=fsdp", f"train.steps={STEPS}")
    alone, chain = curve(base, "alone"), curve(base, "chain")
    del alone["held_out"], chain["held_out"]  # a part of a run ends with a measurement
    assert_same(alone, chain)


def told_to_stop(rank: int, base: Path) -> None:
    class Interrupted(setup.Stepper):
        made = 0

        def __call__(self, rows: torch.Tensor, lr: float) -> None:
            self.made += 1
            if rank == 1 and self.made == 3:
                signal.raise_signal(signal.SIGTERM)
            super().__call__(rows, lr)

    setup.Stepper = Interrupted
    result = run(base, "stopped")
    assert (result.steps, result.stopped) == (4, "SIGTERM")
    assert result.checkpoint == base.parent / "stopped" / "checkpoints" / "step-00000004"


def test_a_signal_to_one_rank_stops_all_at_the_same_step(ranks: Ranks, base: Path) -> None:
    run(base, "alone")
    ranks(2, told_to_stop, base)
    assert run(base, "stopped").steps == STEPS
    alone, stopped = curve(base, "alone"), curve(base, "stopped")
    torch.testing.assert_close(
        torch.tensor(alone["loss"]), torch.tensor(stopped["loss"]), rtol=2e-4, atol=1e-5
    )


def told_to_stop_first(rank: int, base: Path) -> None:
    measure = setup.Stepper.bits_per_byte

    def interrupted(stepper: setup.Stepper, rows: torch.Tensor) -> float:
        if rank == 1:
            signal.raise_signal(signal.SIGTERM)
        return measure(stepper, rows)

    setup.Stepper.bits_per_byte = interrupted
    result = run(base, "unstarted")
    assert (result.steps, result.stopped, result.checkpoint) == (0, "SIGTERM", None)


def test_a_signal_to_one_rank_before_the_first_step_stops_all(ranks: Ranks, base: Path) -> None:
    ranks(2, told_to_stop_first, base)
    assert latest(base.parent / "unstarted") is None
    assert read_metrics(base.parent / "unstarted" / "metrics.jsonl")[-1]["stopped"] == "SIGTERM"
    assert run(base, "unstarted").steps == STEPS


def against_the_clock(rank: int, base: Path) -> None:
    """Each rank has a clock of its own; rank 0's decides the rate and the end."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += (1.0, 37.0)[rank]
        return now

    rates: list[float] = []

    class Noted(setup.Stepper):
        def __call__(self, rows: torch.Tensor, lr: float) -> None:
            rates.append(lr)
            super().__call__(rows, lr)

    setup.Stepper = Noted
    overrides = ["train.steps=0", "train.max_seconds=120", "optim.min_lr=0.1"]
    result = run(base, "timed", *overrides, clock=clock)
    assert result.stopped == "time"
    assert rates[-1] < rates[0]
    everybody: list[Any] = [None] * 2
    dist.all_gather_object(everybody, (result.steps, rates))
    assert everybody[0] == everybody[1]


def test_time_is_rank_0_s(ranks: Ranks, base: Path) -> None:
    ranks(2, against_the_clock, base)


def full_disk_on_one_rank(rank: int, base: Path) -> None:
    if rank == 1:
        write = moments.HuggingFaceStorageWriter.write_data

        def refuse(writer: Any, *args: Any) -> Any:
            if "00000002" in str(writer.path):
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(writer, *args)

        moments.HuggingFaceStorageWriter.write_data = refuse
    result = run(base, "full", "parallel.mode=fsdp", "train.checkpoint_every=2", "train.steps=4")
    assert result.steps == 4


def test_a_full_disk_of_one_rank_is_a_failed_save_for_all(ranks: Ranks, base: Path) -> None:
    ranks(2, full_disk_on_one_rank, base)
    assert [folder.name for folder in steps(base.parent / "full")] == ["step-00000004"]
    assert [f.name for f in (base.parent / "full" / "checkpoints").iterdir()] == ["step-00000004"]


def refused(rank: int, base: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't be shared by 2 ranks of train.accumulate=8 parts"):
        run(base, "refused", "train.accumulate=8")
    with pytest.raises(ConfigError, match="is for one process, and 2 were launched"):
        run(base, "refused", "parallel.mode=none")
    # Found by rank 0, told to all.
    with pytest.raises(BakeoffError, match="can't write to the run folder"):
        run(base, "text.txt/run")


def test_what_can_not_be_shared_is_refused_on_every_rank(ranks: Ranks, base: Path) -> None:
    ranks(2, refused, base)


def decided(rank: int) -> None:
    world = World(rank, 2, dist.group.WORLD)
    assert world.decide(lambda: f"by rank {rank}") == "by rank 0"
    assert world.gather(rank) == [0, 1]
    with pytest.raises((ValueError, BakeoffError), match="no such thing"):
        world.decide(lambda: int("no such thing"))


def test_rank_0_decides_for_all(ranks: Ranks) -> None:
    ranks(2, decided)


class Warming:
    """A step that says it can't be captured in the third call of one rank, and goes on warming up elsewhere."""

    bytes, captured = 0, False

    def __init__(self, made: Callable[[torch.Tensor], None], refuses: bool) -> None:
        self.step, self.refuses, self.calls = made, refuses, 0

    def __call__(self, rows: torch.Tensor) -> None:
        self.calls += 1
        self.step(rows)
        if self.refuses and self.calls == 3:
            raise NotCapturable("the step waits for the device", ran=True)

    def reset(self) -> None:
        """There is no graph."""


def gives_up(rank: int, base: Path, who: int) -> None:
    made: list[Warming] = []

    def capture(function: Callable[[torch.Tensor], None], warmup: int) -> Warming:
        assert warmup == 12
        made.append(Warming(function, rank == who))
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "capture_step", capture)
        patch.setattr(device, "why_no_graph", lambda *_: "")
        trained(rank, base, "refused")
    assert made[0].calls == 3


def test_ranks_give_up_a_capture_together(ranks: Ranks, base: Path) -> None:
    """What rank 1 finds ends the warm-up of rank 0 after the same step, and no step is made twice."""
    ranks(1, trained, base, "alone")
    ranks(2, gives_up, base, 1)
    assert_same(curve(base, "alone"), curve(base, "refused"))
    rows = read_metrics(base.parent / "refused" / "metrics.jsonl")
    (event,) = [row for row in rows if row["event"] == "capture"]
    assert (event["step"], event["captured"]) == (3, False)
    assert event["reason"] == "rank 1: the step waits for the device"


def in_units(rank: int, base: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spread, "_UNIT", 1)
        trained(rank, base, "fsdp", "parallel.mode=fsdp")


def test_shards_of_a_block_each_are_those_of_all_together(ranks: Ranks, base: Path) -> None:
    ranks(1, trained, base, "alone")
    ranks(2, in_units, base)
    assert_same(curve(base, "alone"), curve(base, "fsdp"))


def replays(rank: int) -> None:
    config = Config(model=ModelConfig(d_model=24, layers=2, heads=2, max_seq_len=32), train=Train(batch_size=4))
    rows = torch.arange(4 * 33, dtype=torch.uint8).view(4, 33)

    def made(world: World, mode: str) -> step.Stepper:
        torch.manual_seed(1)
        return step.Stepper(LLMMed(config.model), config, torch.device("cpu"), world, mode)

    for unit in (1, 1 << 27):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spread, "_UNIT", unit)
            shards, whole = made(World(rank, 2), "fsdp"), made(ALONE, "none")
        scores = []
        for _ in range(2):
            with torch.no_grad():
                for weight in (*shards.parameters, *whole.parameters):
                    weight.mul_(2.0)
            scores.append(shards.bits_per_byte(rows))
            assert scores[-1] == pytest.approx(whole.bits_per_byte(rows), rel=1e-5)
        assert scores[0] != pytest.approx(scores[1], rel=1e-2)


def test_a_measurement_has_the_weights_that_replays_left(ranks: Ranks) -> None:
    """A replayed step changes shards without a pass that PyTorch would notice."""
    ranks(2, replays)
