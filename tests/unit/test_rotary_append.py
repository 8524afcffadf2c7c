"""rotary_append_: the definition against rotary and plain stores, what is written, the errors."""

import doctest
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from bakeoff.models import build, llm_med
from bakeoff.nn import KeyValues
from bakeoff.ops import rotary_append_
from bakeoff.ops.rotary import rotary, rotary_tables
from bakeoff.ops.rotary_append import OP
from bakeoff.ops.rotary_append.reference import reference
from bakeoff.select import TensorMeta, using
from bakeoff.select.contests.draw import inputs
from tests.cut import cut


def made(B: int = 2, T: int = 1, H: int = 4, K: int = 2, D: int = 8, S: int = 6, at: int = 3) -> list[Tensor]:
    heads = torch.randn(B, T, H + 2 * K, D)
    q, k, v = heads.split((H, K, K), 2)
    cos, sin = (table[at:] for table in rotary_tables(at + T, D))
    return [q, k, v, torch.randn(B, K, S, D), torch.randn(B, K, S, D), cos, sin, torch.tensor([at])]


@pytest.mark.parametrize(("T", "at"), [(1, 0), (1, 5), (3, 2), (6, 0)])
@pytest.mark.parametrize("whole", [torch.int64, torch.int32], ids=str)
def test_tokens_are_rotated_and_stored_and_nothing_else_changes(T: int, at: int, whole: torch.dtype) -> None:
    q, k, v, k_cache, v_cache, cos, sin, place = made(T=T, at=at)
    before = k_cache.clone(), v_cache.clone()
    versions = k_cache._version, v_cache._version
    turned = rotary_append_(q, k, v, k_cache, v_cache, cos, sin, place.to(whole))
    want_q, want_k = rotary(q, k, cos, sin)
    torch.testing.assert_close(turned, want_q)
    here = (torch.arange(6) >= at) & (torch.arange(6) < at + T)
    torch.testing.assert_close(k_cache[:, :, here], want_k.transpose(1, 2))
    assert torch.equal(v_cache[:, :, here], v.transpose(1, 2))
    assert torch.equal(k_cache[:, :, ~here], before[0][:, :, ~here])
    assert torch.equal(v_cache[:, :, ~here], before[1][:, :, ~here])
    assert k_cache._version > versions[0]
    assert v_cache._version > versions[1]


@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: case.name)
def test_eager_equals_the_definition(case: Any) -> None:
    args = inputs(OP, cut(OP, case, 16, "cpu"), 0)
    exact = reference(*(x.double() if x.is_floating_point() else x for x in args))
    copies = [x.clone() for x in args]
    turned = OP.incumbent.implementation(*copies)
    got = (copies[3], copies[4], turned)
    for mine, want in zip(got, exact, strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=1e-2, atol=1e-2)


def test_gradients_are_refused_by_name() -> None:
    args = made()
    args[0] = args[0].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="carries no gradients: use rotary"):
        rotary_append_(*args)
    with torch.no_grad():
        rotary_append_(*args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.randn(2, 1, 4, 6)}, "k"),
        ({3: torch.randn(2, 6, 2, 8)}, "heads stand before places"),
        ({3: torch.randn(2, 2, 6, 8).half()}, "k_cache"),
        ({5: torch.randn(1, 5), 6: torch.randn(1, 5)}, "cos has 5 columns"),
        ({5: torch.randn(0, 4), 6: torch.randn(0, 4)}, "cos has 0 rows for 1 tokens"),
        ({7: torch.tensor([1, 2])}, "where the first token goes"),
        ({7: torch.tensor([1.0])}, "expected int32 or int64"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[int, Tensor], message: str) -> None:
    args = made()
    for place, value in change.items():
        args[place] = value
    with pytest.raises((ValueError, TypeError), match=message):
        rotary_append_(*args)


def test_caches_without_room() -> None:
    with pytest.raises(ValueError, match="k_cache has 6 places, 7 tokens come"):
        rotary_append_(*made(T=7, at=0))


def append(cache: KeyValues, layer: int, *args: Tensor) -> tuple[Tensor, ...] | None:
    """As `KeyValues.append` on a GPU."""
    held = cache.layers[layer]
    if cache.at is None or held is None:
        return None
    return rotary_append_(*args[:3], *held, *args[3:], cache.at), *held


def test_a_settled_cache_grows_by_it_and_text_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(llm_med.Config.sizes("tiny", kv_heads=2)).eval()
    prompt = torch.randint(256, (3, 9))
    with using("off"):
        text = model.generate(prompt, 20, temperature=0.0)
        monkeypatch.setattr(KeyValues, "append", append)
        assert torch.equal(text, model.generate(prompt, 20, temperature=0.0))


def test_caches_lie_densely_in_their_bucket() -> None:
    (case,) = [case for case in OP.cases() if case.name == "odd"]
    found = OP.bucket(case)
    assert found.k_cache == TensorMeta.dense((5, 5, 10, 34), torch.bfloat16)
    assert OP.bucket(found) == found


def test_examples() -> None:
    assert doctest.testmod(importlib.import_module("bakeoff.ops.rotary_append")).failed == 0
