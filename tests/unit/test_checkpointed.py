"""Activation checkpointing of parts of models: gradients as without, or an error that says what to do."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bakeoff import models
from bakeoff.models import byte_spectral, llm_med, longnet, titan_mac
from bakeoff.nn import NeuralMemory

MEMORY: dict[str, Any] = {"d_model": 16, "layers": 2, "heads": 2, "segment": 8, "chunk": 4, "persistent": 2}
BYTES: dict[str, Any] = {"d_model": 16, "layers": 2, "heads": 2, "max_seq_len": 24, "window": 5, "bins": 3}
ROWS: dict[str, Any] = {"d_model": 16, "layers": 2, "heads": 2, "max_seq_len": 24}
CONFIGS: dict[str, Any] = {
    **{name: titan_mac.Config(**MEMORY, variant=name) for name in ("mac", "mag", "lmm")},
    "mac, gate by segments": titan_mac.Config(**MEMORY, gate="segment", dropout=0.2),
    "poles": byte_spectral.Config(**BYTES, attention_every=2, dropout=0.2),
    "taps": byte_spectral.Config(**BYTES, filter="taps"),
    "llm-med": llm_med.Config(**ROWS, conv=3, qk_norm=True, dropout=0.2),
    "longnet": longnet.Config(**ROWS, segments=(8, 16), rates=(1, 2)),
}
EVERY = pytest.mark.parametrize("name", CONFIGS)
BOTH = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    model = models.build(CONFIGS[name]).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def checkpointed(model: nn.Module, part: str, reentrant: bool) -> None:
    """Lets this part of every block run again in backward."""
    for block in model.blocks:  # type: ignore[union-attr]
        module = block.get_submodule(part)

        def again(*args: Any, run: Any = module.forward) -> Any:
            return checkpoint(run, *args, use_reentrant=reentrant)

        module.forward = again


def parts(name: str) -> Iterator[str]:
    names = dict(model_of(name).blocks[0].named_modules())
    return (path for path in ("", "mixer", "attention", "mlp") if path in names)


def gradients(model: nn.Module, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)  # of dropout
    model(ids, ids.roll(-1, 1))[1].backward()
    return [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]


@EVERY
@BOTH
def test_gradients_are_those_without(name: str, reentrant: bool) -> None:
    ids = torch.randint(256, (2, 21), generator=torch.Generator().manual_seed(2))
    expected = gradients(model_of(name), ids)
    for part in parts(name):
        model = model_of(name)
        checkpointed(model, part, reentrant)
        torch.testing.assert_close(gradients(model, ids), expected, rtol=1e-9, atol=1e-12)


@EVERY
@BOTH
def test_what_goes_on_from_a_cache_is_not_run_again(name: str, reentrant: bool) -> None:
    model, ids = model_of(name), torch.randint(256, (2, 12))
    checkpointed(model, "", reentrant)
    cache = model.make_cache()
    logits = [model.decode(piece, cache) for piece in ids.split(5, dim=1)]
    with pytest.raises(RuntimeError, match=r"Train on whole rows, model\(ids\)"):
        torch.cat(logits, dim=1).square().sum().backward()


def test_a_memory_that_goes_on_from_a_state_has_its_gradients() -> None:
    torch.manual_seed(0)
    memory = NeuralMemory(16, heads=2, chunk=4).double()
    x = torch.randn(2, 11, 16, dtype=torch.float64)

    def run(again: bool) -> tuple[Tensor, ...]:
        found, state = [], None
        for piece in x.split(5, dim=1):
            y, state = (
                checkpoint(memory, piece, state, use_reentrant=False) if again else memory(piece, state)
            )
            found.append(y)
        return torch.autograd.grad(torch.cat(found, dim=1).sin().sum(), [*memory.parameters()])

    torch.testing.assert_close(run(True), run(False), rtol=1e-9, atol=1e-12)
