"""First values: the same in a new module, and in memory that was given to one built without data."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bakeoff.models import byte_spectral, llm_med, longnet, titan_mac
from bakeoff.models.byte_spectral import ByteSpectralLM
from bakeoff.models.llm_med import LLMMed
from bakeoff.models.longnet import ImageConfig, ImageLongNet, LongNetLM
from bakeoff.models.ngrams import NGrams
from bakeoff.models.titan_mac import TitanMAC
from bakeoff.nn import MLP, Fp8Linear, LayerNorm, NeuralMemory, QKNorm, RMSNorm
from bakeoff.nn.filters import MinimumPhase, Poles, Taps, WholeRow

BYTES: dict[str, Any] = {"d_model": 16, "layers": 2, "heads": 2, "max_seq_len": 24, "window": 5, "bins": 3}
MEMORY: dict[str, Any] = {"d_model": 16, "layers": 2, "heads": 2, "segment": 8, "chunk": 4, "persistent": 2}
ROWS: dict[str, Any] = {"d_model": 16, "layers": 2, "heads": 2, "max_seq_len": 24}
IMAGE: dict[str, Any] = {"shape": (8, 8), "d_model": 16, "layers": 2, "heads": 2, "segments": (8, 16)}


def bytes_model(**changes: Any) -> Callable[[], nn.Module]:
    return lambda: ByteSpectralLM(byte_spectral.Config(**{**BYTES, **changes}))


def memory_model(**changes: Any) -> Callable[[], nn.Module]:
    return lambda: TitanMAC(titan_mac.Config(**{**MEMORY, **changes}))


def rows_model(**changes: Any) -> Callable[[], nn.Module]:
    return lambda: LLMMed(llm_med.Config(**{**ROWS, **changes}))


def image_model(**changes: Any) -> Callable[[], nn.Module]:
    return lambda: ImageLongNet(ImageConfig(**{**IMAGE, "rates": (1, 2), **changes}))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "poles": bytes_model(),
    "taps": bytes_model(filter="taps", taps=6, channels=3, ngrams=3, ngram_bits=4, tie=False),
    "minimum phase": bytes_model(filter="minimum_phase", features="complex"),
    "attention": bytes_model(attention_every=2, qk_norm=True),
    "encoder": bytes_model(bidirectional=True, classes=3),
    "mac": memory_model(),
    "mag": memory_model(variant="mag", tie=False),
    "lmm": memory_model(variant="lmm", per_token=False, momentum=False),
    "no memory": memory_model(memory=False, persistent=0),
    "llm-med": rows_model(),
    "llm-med, all rungs": rows_model(qk_norm=True, conv=3, ngrams=2, ngram_bits=4, tie=False),
    "longnet": lambda: LongNetLM(longnet.Config(**ROWS, segments=(8, 16), rates=(1, 2))),
    "image": image_model(),
    "symbols": image_model(channels=0, symbols=5, labels="cell"),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "NeuralMemory": lambda: NeuralMemory(16, heads=2),
    "NeuralMemory, last": lambda: NeuralMemory(16, learns="last", per_token=False, momentum=False),
    "RMSNorm": lambda: RMSNorm(8),
    "LayerNorm": lambda: LayerNorm(8),
    "QKNorm": lambda: QKNorm(8),
    "Fp8Linear": lambda: Fp8Linear(8, 4),
    "Poles": lambda: Poles(4, 3, 16),
    "Taps": lambda: Taps(4, 16),
    "MinimumPhase": lambda: MinimumPhase(4, 16),
    "WholeRow": lambda: WholeRow(4, 16),
    "NGrams": lambda: NGrams(3, 4, 8),
}


def everything(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, those too that are no part of the state."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def spoiled(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in everything(module).values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else -7)
    return module


@pytest.mark.parametrize("build", [*MODELS.values(), *LAYERS.values()], ids=[*MODELS, *LAYERS])
def test_what_was_built_without_data_begins_as_what_was_built_with_it(build: Callable[[], Any]) -> None:
    torch.manual_seed(3)
    built = build()
    with torch.device("meta"):
        empty = build()
    given = spoiled(empty.to_empty(device="cpu"))
    torch.manual_seed(3)
    given.reset_parameters()
    for (name, value), expected in zip(everything(given).items(), everything(built).values(), strict=True):
        assert torch.equal(value, expected), name


@pytest.mark.parametrize("build", [*MODELS.values(), *LAYERS.values()], ids=[*MODELS, *LAYERS])
def test_beginning_anew_is_beginning(build: Callable[[], Any]) -> None:
    torch.manual_seed(3)
    built, once = build(), torch.random.get_rng_state()
    torch.manual_seed(3)
    spoiled(built).reset_parameters()
    assert torch.equal(torch.random.get_rng_state(), once), "as many random numbers"


@pytest.mark.parametrize("build", [*MODELS.values(), *LAYERS.values(), lambda: MLP(8, 8)])
def test_whatever_has_parameters_or_buffers_of_its_own_can_begin_anew(build: Callable[[], Any]) -> None:
    for name, module in build().named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        assert not own or isinstance(module, nn.ParameterList) or hasattr(module, "reset_parameters"), name
