"""The leak guard against its zoo: every leak is found, no honest model is accused, odd ones work or are told."""

import pytest
import torch

from bakeoff.causal import CausalityError
from tests.unit.leak_zoo.body import Animal, T, attempt
from tests.unit.leak_zoo.honest import HONEST
from tests.unit.leak_zoo.leaks import LEAKS, LIMITS


@pytest.mark.parametrize("animal", LEAKS, ids=lambda animal: animal.name)
def test_a_leak_is_found_and_named(animal: Animal) -> None:
    for seed in range(2):
        with pytest.raises(CausalityError, match=animal.says) as caught:
            attempt(animal, "cpu", seed)
        assert caught.value.size > caught.value.tolerance > 0
        assert f"{caught.value.size:.3g}" in str(caught.value)


@pytest.mark.parametrize("animal", HONEST, ids=lambda animal: animal.name)
def test_an_honest_model_passes(animal: Animal) -> None:
    attempt(animal, "cpu", 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 8))
def test_honest_models_pass_at_any_draw(seed: int) -> None:
    for animal in HONEST:
        attempt(animal, "cpu", seed)


@pytest.mark.parametrize("build", LIMITS, ids=lambda build: build.__name__)
def test_what_no_run_shows_is_still_a_limit(build: type[torch.nn.Module]) -> None:
    """docs/leak-guard.md lists these; one that is found from now on belongs to the leaks."""
    attempt(Animal(build, length=T), "cpu", 0)
