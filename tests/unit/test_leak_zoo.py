"""The leak guard against its zoo: every leak is found, no honest model accused, odd ones work or are told."""

import functools
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bakeoff.causal import CausalityError, assert_causal
from bakeoff.errors import BakeoffError
from tests.unit.leak_zoo.body import Animal, Body, D, T, V, attempt, attend, lower
from tests.unit.leak_zoo.honest import HONEST, PaddedConvolution
from tests.unit.leak_zoo.leaks import LEAKS, LIMITS, LossAlone


@pytest.mark.parametrize("animal", LEAKS, ids=lambda animal: animal.name)
def test_a_leak_is_found_and_named(animal: Animal) -> None:
    for seed in range(2):
        with pytest.raises(CausalityError, match=animal.says) as caught:
            attempt(animal, "cpu", seed)
        found, (position, ahead) = caught.value, animal.at
        assert found.size > found.tolerance > 0
        assert f"{found.size:.3g}" in str(found)
        assert f"{found.tolerance:.3g}" in str(found)
        assert position in (None, found.position)
        assert ahead in (None, found.ahead)


@pytest.mark.parametrize("animal", HONEST, ids=lambda animal: animal.name)
def test_an_honest_model_passes(animal: Animal) -> None:
    attempt(animal, "cpu", 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 8))
def test_honest_models_pass_at_any_draw(seed: int) -> None:
    for animal in HONEST:
        attempt(animal, "cpu", seed)


@pytest.mark.parametrize("build", LIMITS, ids=lambda build: build.__name__)
def test_what_no_run_shows_is_still_a_limit(build: type[nn.Module]) -> None:
    """docs/leak-guard.md lists these; one that is found from now on belongs to the leaks."""
    attempt(Animal(build, length=T), "cpu", 0)


# Models of odd forms: each works, or gets one sentence with the fix in it


class Odd(Body):
    """A causal model of another form."""


class Locked(Odd):
    """Holds what can't be copied: a lock, a generator that runs, a tensor with a history."""

    def build(self) -> None:
        self.lock, self.source, self.parts = (
            threading.Lock(),
            iter(x for x in range(3)),
            {"deep": [threading.RLock()]},
        )
        self.shift = nn.Parameter(torch.zeros(D))
        self.last = self.shift * 2

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        with self.lock, self.parts["deep"][0]:
            self.last = h[:, 0] + self.shift
            return attend(h, lower(h))


class Leaky(Locked):
    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return super().mix(h, ids) + self.shift * h.flip(1)


def test_what_cannot_be_copied_is_shared() -> None:
    model = Locked()
    assert_causal(model, length=T)
    assert not model.lock.locked()
    with pytest.raises(CausalityError):
        assert_causal(Leaky(), length=T)


def test_a_model_that_refuses_copies_is_tried_as_a_function() -> None:
    class Refuses(Odd):
        def __deepcopy__(self, memo: Any) -> None:
            raise NotImplementedError("no copies")

    model = Refuses()
    with pytest.raises(
        TypeError, match=r"can't be copied \(NotImplementedError: no copies\): pass a function"
    ):
        assert_causal(model)
    assert_causal(model.forward, torch.randint(V, (2, T)), vocab=V)


def test_functions_are_tried_as_they_are() -> None:
    model, ids = Body(), torch.randint(V, (4, T))
    for function in (model.forward, functools.partial(Body.forward, model), PaddedConvolution().__call__):
        assert_causal(function, ids, vocab=V)
    with pytest.raises(CausalityError, match="as it is, output 0 sees its future"):
        assert_causal(lambda ids: model(ids).flip(1), ids, vocab=V)
    with pytest.raises(CausalityError):
        assert_causal(lambda ids: F.one_hot(ids, 256).float().cumsum(1).flip(1))


@pytest.mark.parametrize("size", [2, 3, 300])
def test_the_vocabulary_is_the_embedding_s(size: int) -> None:
    class Other(Odd):
        def build(self) -> None:
            self.place = nn.Embedding(512, D)
            self.embed, self.head = nn.Embedding(size, D), nn.Linear(D, size)

        def mix(self, h: Tensor, ids: Tensor) -> Tensor:
            return self.place(torch.arange(h.shape[1], device=h.device)).expand_as(h)

    assert_causal(Other())
    leaky = Other()
    leaky.embed.register_forward_hook(lambda _module, _inputs, out: out.roll(-1, 1))
    with pytest.raises(CausalityError):
        assert_causal(leaky)


def test_the_configuration_s_names() -> None:
    class Named(Odd):
        config = types.SimpleNamespace(vocab_size=V, block_size=12)

        def build(self) -> None:
            self.place = nn.Embedding(12, D)

        def mix(self, h: Tensor, ids: Tensor) -> Tensor:
            assert h.shape[1] <= 12
            return self.place(torch.arange(h.shape[1], device=h.device)).expand_as(h)

    assert_causal(Named())


class Form(Odd):
    """What `forward` gives, by `give(logits, ids)`."""

    def __init__(self, give: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.give = give

    def forward(self, ids: Tensor) -> Any:
        return self.give(super().forward(ids), ids)


class Fields(NamedTuple):
    loss: Tensor
    logits: Tensor


GIVEN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda y, ids: (y, ids),
    "loss first": lambda y, ids: (y.mean(), y),
    "hidden states": lambda y, ids: (None, [y], y),
    "dict": lambda y, ids: {"logits": y, "ids": ids},
    "dict of another name": lambda y, ids: {"aux": y.mean(), "scores": y},
    "named tuple": lambda y, ids: Fields(y.mean(), y),
    "fields": lambda y, ids: types.SimpleNamespace(logits=y, hidden=None),
    "flattened": lambda y, ids: y.flatten(0, 1),
    "a number to a position": lambda y, ids: y[..., 0],
    "heads": lambda y, ids: y.unflatten(-1, (2, -1)),
    "complex": lambda y, ids: torch.complex(y, -y),
    "integers": lambda y, ids: (y * 100).long(),
    "without gradient": lambda y, ids: y.detach(),
    "numbers of minus infinity": lambda y, ids: y.masked_fill(y < 0, -torch.inf),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_answers_of_any_form(kind: str) -> None:
    give = GIVEN[kind]
    assert_causal(Form(give), length=T)
    with pytest.raises(CausalityError):
        assert_causal(Form(lambda y, ids: give(y.roll(-1, 1), ids)), length=T)


@pytest.mark.parametrize(
    ("give", "says"),
    [
        (lambda y, ids: None, r"gave NoneType, expected logits \[B, T, vocab\]"),
        (lambda y, ids: {"hidden": None}, "gave dict of hidden, expected logits"),
        (lambda y, ids: (None, None), "gave tuple of NoneType, NoneType, expected logits"),
        (lambda y, ids: y.transpose(1, 2), r"return logits.transpose\(1, 2\)"),
        (lambda y, ids: y.transpose(0, 1), r"return logits.transpose\(0, 1\): batch first"),
        (lambda y, ids: y[:, -1], "not of the last alone"),
        (lambda y, ids: y[:, 1:], "logits for every position"),
        (lambda y, ids: y.mean(), r"logits have shape \(\), expected \(4, 24, 'vocab'\)"),
    ],
)
def test_answers_without_logits_are_told(give: Callable[[Tensor, Tensor], Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says) as caught:
        assert_causal(Form(give), length=T)
    assert "\n" not in str(caught.value)


class NeedsMask(Odd):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids)


class NeedsTargets(Odd):
    """Must have targets, and gives logits beside the loss."""

    def forward(self, ids: Tensor, targets: Tensor) -> Any:  # type: ignore[override]
        logits = super().forward(ids)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


class NeedsTargetsForALoss(NeedsTargets):
    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        return super().forward(ids, targets)[0]


class ByKeyword(Odd):
    def forward(self, *, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids)


class Lazy(Odd):
    def build(self) -> None:
        self.late = nn.LazyLinear(D)


class Starts(Odd):
    """Takes no more than 8 positions."""

    def build(self) -> None:
        self.place = nn.Embedding(8, D)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.place(torch.arange(h.shape[1])).expand_as(h)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (NeedsMask, r"forward needs mask beside ids: give a default, or pass a function of ids alone"),
        (NeedsTargetsForALoss, r"expected \(logits, loss\)"),
        (ByKeyword, "take ids first"),
        (Lazy, "call the model once first"),
        (lambda: Body().to("meta"), "on the meta device"),
        (Starts, r"model\(ids\) fails for ids \(4, 64\) .*IndexError.*pass ids=, vocab= or length="),
    ],
)
def test_forms_that_cannot_be_called_are_told(build: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises((TypeError, BakeoffError), match=says) as caught:
        assert_causal(build())
    assert "\n" not in str(caught.value)


def test_forms_that_can_be_called() -> None:
    assert_causal(NeedsTargets(), length=T)
    mask, model = torch.ones(T), NeedsMask()
    assert_causal(lambda ids: model(ids, mask), torch.randint(V, (2, T)), vocab=V)
    assert_causal(Starts(), length=8)
    assert_causal(nn.DataParallel(Body()), length=T)
    with warnings.catch_warnings(action="ignore"):
        traced = torch.jit.trace(Body(), torch.zeros(2, T, dtype=torch.long))
        assert_causal(traced, length=T, vocab=V)


def test_a_blind_loss_is_a_limit() -> None:
    """A loss alone that its model makes with the targets at hand: only the logits could show it."""

    class Blind(LossAlone):
        def peek(self, h: Tensor, targets: Tensor) -> Tensor:
            return h + 0.1 * self.embed(targets)

    assert_causal(Blind(), length=T)
