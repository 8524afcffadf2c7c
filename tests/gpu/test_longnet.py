"""LongNet on a GPU: steps never wait, a replayed step is the eager one, what LongNetLM writes."""

from typing import Any

import torch
from torch import Tensor

import bakeoff
from bakeoff.apps.train.config import Config as RunConfig
from bakeoff.apps.train.config import Optim, Train
from bakeoff.apps.train.step import Stepper
from bakeoff.graphs import capture_step, forbid_sync
from bakeoff.models.longnet import Cache, Config, ImageConfig, ImageLongNet, LongNetLM
from bakeoff.optim import AdamW
from bakeoff.select import using

CUDA = torch.device("cuda", 0)
SMALL: dict[str, Any] = {
    "d_model": 128, "layers": 2, "heads": 4, "kv_heads": 2, "segments": (64, 256), "rates": (1, 4),
    "max_seq_len": 256,
}  # fmt: skip
STEPS = 6


def batches() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(256, (4, 257), dtype=torch.uint8, generator=draw).to(CUDA) for _ in range(STEPS)]


def stepper(precision: str) -> Stepper:
    torch.manual_seed(0)
    config = RunConfig(
        model=Config(**SMALL),
        optim=Optim(lr=1e-3),
        train=Train(batch_size=4, precision=precision, device="cuda"),  # type: ignore[arg-type]
    )
    assert isinstance(config.model, Config)
    return Stepper(LongNetLM(config.model).to(CUDA).train(), config, CUDA)


def test_a_step_never_waits_for_the_device() -> None:
    made = stepper("bf16")
    for number, rows in enumerate(batches()):
        if number < 3:
            made(rows, 1e-3)
            continue
        with forbid_sync():
            made(rows, 1e-3)
    assert made.read(STEPS)["skipped"] == 0


def test_a_replayed_step_is_the_eager_one() -> None:
    ends = []
    for capture in (False, True):
        with using(regime="graph"):
            made = stepper("float32")
            if capture:
                made.capture()
            for rows in batches():
                made(rows, 1e-3)
        assert made.uncaptured == ""
        assert (made.captured is not None and made.captured.captured) == capture
        ends.append([p.detach().clone() for p in made.model.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_decoding_equals_the_whole_pass_and_never_waits() -> None:
    torch.manual_seed(0)
    model = LongNetLM(Config(**SMALL)).to(CUDA).double()
    ids = torch.randint(256, (2, 200), device=CUDA)
    with torch.no_grad():
        whole, _ = model(ids)
        for _ in range(2):  # the first time what PyTorch needs is made
            cache = Cache(model.config)
            first = model.decode(ids[:, :70], cache)
            with forbid_sync():
                rest = [model.decode(piece, cache) for piece in ids[:, 70:].split([1, 1, 100, 28], dim=1)]
    torch.testing.assert_close(torch.cat([first, *rest], dim=1), whole, rtol=1e-6, atol=1e-6)


def test_it_writes_text_and_leaks_nothing() -> None:
    torch.manual_seed(0)
    model = LongNetLM(Config(**SMALL)).to(CUDA)
    text = model.generate(torch.randint(256, (2, 5), device=CUDA), 70, temperature=0.0)
    assert text.shape == (2, 75)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        bakeoff.assert_causal(model, length=128, samples=2, check_decode=False)


def test_steps_on_images_never_wait_and_replay_as_they_run() -> None:
    """Training of ImageLongNet, eager under the guard and captured: equal losses and weights."""
    config = ImageConfig(
        shape=(32, 32),
        patch=2,
        d_model=48,
        layers=3,
        heads=4,
        segments=(64, 256),
        rates=(1, 4),
        labels="cell",
    )
    draw = torch.Generator().manual_seed(1)
    images = [torch.randn(4, 3, 32, 32, generator=draw).to(CUDA) for _ in range(STEPS)]
    targets = torch.randint(10, (4, 16, 16), generator=draw).to(CUDA)
    ends, losses = [], []
    for capture in (False, True):
        torch.manual_seed(0)
        model = ImageLongNet(config).to(CUDA).train()
        optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-3, device=CUDA))

        def step(batch: Tensor, model: ImageLongNet = model, optimizer: AdamW = optimizer) -> Tensor:
            _, loss = model(batch, targets)
            assert loss is not None
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        with using(regime="graph"):
            run = capture_step(step) if capture else step
            found = []
            for number, batch in enumerate(images):
                if number < 3 or capture:
                    found.append(run(batch).clone())
                    continue
                with forbid_sync():
                    found.append(run(batch))
        ends.append([p.detach().clone() for p in model.parameters()])
        losses.append(torch.stack(found))
        assert not capture or run.captured  # type: ignore[attr-defined]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
