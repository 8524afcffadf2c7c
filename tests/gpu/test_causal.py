"""The leak guard on a GPU: kernels that round by shape and by chance are no leak."""

import pytest
import torch
from torch import Tensor, nn

from bakeoff.causal import CausalityError, assert_causal
from bakeoff.models.llm_med import Config, LLMMed
from tests.unit.leak_zoo.body import Animal, attempt
from tests.unit.leak_zoo.honest import HONEST
from tests.unit.leak_zoo.leaks import LEAKS


class Mixer(nn.Module):
    """A residual filter over time by FFT; without room for the whole filter the row's end comes round."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.embed = nn.Embedding(256, 32)
        self.filter = nn.Parameter(torch.randn(64, 32) * 0.1)
        self.head = nn.Linear(32, 256)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        n = h.shape[1] * self.room
        spectrum = torch.fft.rfft(h.float(), n=n, dim=1) * torch.fft.rfft(
            self.filter[: h.shape[1]], n=n, dim=0
        )
        out: Tensor = self.head(h + torch.fft.irfft(spectrum, n=n, dim=1)[:, : h.shape[1]])
        return out


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("bf16", [False, True])
def test_verdicts_on_a_gpu(bf16: bool, precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    state = torch.cuda.get_rng_state()
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            for seed in range(3):
                assert_causal(LLMMed(Config.sizes("tiny", dropout=0.1, kv_heads=2)).cuda(), seed=seed)
                assert_causal(Mixer(2).cuda(), seed=seed)
                with pytest.raises(CausalityError) as caught:
                    assert_causal(Mixer(1).cuda(), seed=seed)
                assert (caught.value.position, caught.value.ahead) == (0, 63)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.parametrize("animal", LEAKS, ids=lambda animal: animal.name)
def test_a_leak_is_found_on_a_gpu(animal: Animal) -> None:
    with pytest.raises(CausalityError, match=animal.says):
        attempt(animal, "cuda", 0)


@pytest.mark.parametrize("animal", HONEST, ids=lambda animal: animal.name)
def test_an_honest_model_passes_on_a_gpu(animal: Animal) -> None:
    for seed in range(2):
        attempt(animal, "cuda", seed)
