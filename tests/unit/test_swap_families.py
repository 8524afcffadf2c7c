"""swap in many families of transformers' models: what is replaced, and that results are right."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bakeoff
from tests.unit.families import KINDS, V, built
from tests.unit.swapped import gradients as _gradients

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.randint(3, V, (2, 8), generator=torch.Generator().manual_seed(1))
LABELS = IDS.clone()
LABELS[0, 2:4] = -100
MASK = torch.ones_like(IDS)
MASK[1, :3] = 0


def test_the_documented_families_are_these() -> None:
    text = (Path(__file__).parents[2] / "docs" / "in-your-own-model.md").read_text()
    rows = re.findall(r"^\| ((?:norms|rotary|mlp)[a-z, ]*) \| ([a-z0-9_ ]+) \|$", text, re.MULTILINE)
    told = {family: set(kinds.split(", ")) for kinds, families in rows for family in families.split()}
    assert told == {family: set(kinds.split()) for family, kinds in KINDS.items()}


def gradients(model: Any, **batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """With the same dropout each time."""
    torch.manual_seed(0)
    return _gradients(model, **batch)


@pytest.mark.parametrize("family", KINDS)
def test_family(family: str) -> None:
    """Proven on a batch; the same with left padding; undone bit for bit."""
    model = built(family)
    names = list(model.state_dict())
    padded: dict[str, Any] = {"input_ids": IDS, "labels": LABELS, "attention_mask": MASK}
    own = gradients(model, **padded)
    report = bakeoff.swap(model, quiet=True)
    assert list(model.state_dict()) == names
    kinds = {kind for held in report.replaced.values() for kind in held.found.kinds}
    assert kinds == set(KINDS[family].split())
    report.verify(input_ids=IDS, labels=LABELS)
    loss, grads = gradients(model, **padded)
    assert loss.dtype == own[0].dtype
    torch.testing.assert_close(loss, own[0], rtol=1e-5, atol=1e-5)
    assert grads.keys() == own[1].keys()
    for name, grad in own[1].items():
        assert (grads[name] - grad).norm() <= 1e-4 * grad.norm() + 1e-6, name
    report.undo()
    again = gradients(model, **padded)
    assert torch.equal(again[0], own[0])
    assert all(torch.equal(again[1][name], grad) for name, grad in own[1].items())


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", KINDS)
def test_family_in_other_ways(family: str) -> None:
    """Positions of each row, embeddings in the place of tokens, checkpointing, generation with a cache."""
    both = built(family), built(family)
    bakeoff.swap(both[1], quiet=True)
    embedded = both[0].get_input_embeddings()(IDS).detach()
    batches: list[dict[str, Any]] = [{"input_ids": IDS, "attention_mask": MASK}, {"inputs_embeds": embedded}]
    if "position_ids" in inspect.signature(both[0].forward).parameters:
        batches[0]["position_ids"] = (MASK.cumsum(-1) - 1).clamp(min=0)
    for batch in batches:
        want, got = (gradients(model, **batch, labels=LABELS)[0] for model in both)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    if both[0].supports_gradient_checkpointing:
        for model in both:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        want, got = (gradients(model, input_ids=IDS, labels=LABELS)[0] for model in both)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    told = {"attention_mask": MASK, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    for beams in (1, 2):
        texts = [model.eval().generate(IDS, num_beams=beams, pad_token_id=0, **told) for model in both]
        assert torch.equal(*texts)
