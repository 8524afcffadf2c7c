"""The models' loss by linear_cross_entropy: that of their logits, whatever runs the op."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp

from bakeoff import models
from bakeoff.models import byte_spectral, llm_med, longnet, titan_mac
from bakeoff.select import using
from bakeoff.select.choose.tune import recording
from tests.unit.language_models import moved

ROWS: dict[str, Any] = {"d_model": 16, "layers": 2, "heads": 2, "max_seq_len": 24}
CONFIGS: dict[str, Any] = {
    "llm-med": llm_med.Config(**ROWS),
    "llm-med, own head": llm_med.Config(**ROWS, tie=False),
    "llm-med, own head, capped": llm_med.Config(**ROWS, tie=False, logit_cap=2.0),
    "llm-med, capped": llm_med.Config(**ROWS, logit_cap=2.0),
    "llm-med, a larger vocabulary": llm_med.Config(**ROWS, vocab=261, kv_heads=1),
    "byte-spectral": byte_spectral.Config(**ROWS),
    "byte-spectral, rows": byte_spectral.Config(**ROWS, bidirectional=True, classes=5),
    **{name: titan_mac.Config(**ROWS, variant=name, segment=8, chunk=4) for name in ("mac", "mag", "lmm")},
    "longnet": longnet.Config(**ROWS, segments=(8, 16), rates=(1, 2)),
    "longnet, own head": longnet.Config(**ROWS, segments=(8, 16), rates=(1, 2), tie=False),
}
EVERY = pytest.mark.parametrize("name", CONFIGS)
CANDIDATES = pytest.mark.parametrize("candidate", ["eager", "chunked"])


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return moved(models.build(CONFIGS[name]), dtype)


def batch_of(name: str, shape: tuple[int, int] = (3, 11)) -> tuple[Tensor, Tensor]:
    """Symbols and targets, some of which don't count."""
    ids = torch.randint(256, shape)
    if name == "byte-spectral, rows":
        return ids, torch.tensor([4, -100, 0])[: shape[0]]
    targets = ids.roll(-1, 1)
    targets[:, ::4] = -100
    return ids, targets


def by_logits(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    logits = model(ids)[0].flatten(0, -2)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())


def with_gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@EVERY
@CANDIDATES
def test_loss_and_gradients_are_those_of_the_logits(name: str, candidate: str) -> None:
    """In float64 to its rounding; plain PyTorch in float32 is as far from that as logits are."""
    exact, (ids, targets) = model_of(name, torch.float64), batch_of(name)
    want = with_gradients(exact, by_logits(exact, ids, targets))
    with using(linear_cross_entropy=candidate):
        torch.testing.assert_close(with_gradients(exact, exact(ids, targets)[1]), want)
        model = model_of(name)
        got = with_gradients(model, model(ids, targets)[1])
    other = with_gradients(model, by_logits(model, ids, targets))
    if candidate == "eager":
        torch.testing.assert_close(got, other, rtol=0, atol=0)
    for mine, theirs, true in zip(got, other, want, strict=True):
        error, usual = ((one - true).norm() / true.norm() for one in (mine, theirs))
        assert error <= 2 * usual + 1e-6


def apart(one: list[Tensor], other: list[Tensor]) -> float:
    """How far all gradients are apart, as a part of the other's."""
    pairs = list(zip(one[1:], other[1:], strict=True))
    return math.sqrt(sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs))


@pytest.mark.parametrize(
    "name", ["llm-med, own head", "llm-med, capped", "byte-spectral, rows", "mac", "longnet"]
)
def test_autocast_rounds_as_logits_do(name: str) -> None:
    model, (ids, targets) = model_of(name), batch_of(name)
    exact = with_gradients(model, by_logits(model, ids, targets))
    with torch.autocast("cpu", torch.bfloat16):
        loss = by_logits(model, ids, targets)
    other = with_gradients(model, loss)
    for candidate in ("eager", "chunked"):
        with torch.autocast("cpu", torch.bfloat16), using(linear_cross_entropy=candidate):
            loss = model(ids, targets)[1]
        assert loss.dtype == torch.float32
        found = with_gradients(model, loss)
        assert apart(found, exact) <= 1.1 * apart(other, exact)
        # The op caps in float32, and logits are capped in their own dtype.
        if candidate == "eager" and name != "llm-med, capped":
            torch.testing.assert_close(found, other, rtol=0, atol=0)


@EVERY
@CANDIDATES
def test_the_loss_does_not_depend_on_who_asks_for_logits(name: str, candidate: str) -> None:
    model, (ids, targets) = model_of(name).eval(), batch_of(name)
    with using(linear_cross_entropy=candidate):
        none, loss = model(ids, targets)
        logits, same = model(ids, targets, return_logits=True)
        with torch.no_grad():
            assert torch.allclose(model(ids, targets)[1], loss)
    assert none is None
    assert torch.equal(same, loss)
    assert torch.equal(logits, model(ids)[0])


@EVERY
@CANDIDATES
def test_the_loss_is_nan_where_no_target_counts(name: str, candidate: str) -> None:
    model, (ids, targets) = model_of(name), batch_of(name)
    with using(linear_cross_entropy=candidate):
        loss = model(ids, torch.full_like(targets, -100))[1]
    assert loss.isnan()


@EVERY
def test_bytes_as_targets_all_count(name: str) -> None:
    """Also 156, which -100 is in 8 bits."""
    model, (ids, targets) = model_of(name), batch_of(name)
    targets = targets.clamp(min=0) if targets.ndim == 1 else torch.full_like(ids, 156)
    whole = model(ids, targets)[1]
    assert torch.equal(model(ids.to(torch.uint8), targets.to(torch.uint8))[1], whole)
    assert torch.equal(model(ids.int(), targets.int())[1], whole)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_losses_of_parts_of_rows_have_the_rows_loss_as_mean(dtype: torch.dtype) -> None:
    model = model_of("longnet", torch.float64)
    x, targets = torch.randn(2, 12, 16, dtype=torch.float64), torch.randint(256, (2, 12))
    targets[0, :5] = 156 if dtype == torch.uint8 else -100
    targets = targets.to(dtype)
    whole, losses = model._loss(x, targets), []
    model.ranks = 3
    for model.rank in range(3):
        losses.append(model._loss(x[:, 4 * model.rank : 4 * model.rank + 4], targets))
    torch.testing.assert_close(torch.stack(losses).mean(), whole)


class Adapted(nn.Module):
    """A head with a product of two small matrices beside it, as adapters have."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.base = head
        self.low = nn.Sequential(nn.Linear(16, 2, bias=False), nn.Linear(2, 256, bias=False))

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.base(x) + self.low(x)
        return logits


def _biased(head: nn.Linear) -> nn.Module:
    head.bias = nn.Parameter(torch.randn(256))
    return head


def _forwarded(head: nn.Linear) -> nn.Module:
    own = head.forward
    head.forward = lambda x: 3 * own(x)  # type: ignore[method-assign]
    return head


def _hooked(head: nn.Linear) -> nn.Module:
    head.register_forward_hook(lambda module, given, logits: 3 * logits)
    return head


def _hooked_before(head: nn.Linear) -> nn.Module:
    head.register_forward_pre_hook(lambda module, given: (3 * given[0],))
    return head


HEADS: dict[str, Any] = {
    "an adapter": Adapted,
    "layers": lambda head: nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 256)),
    "a bias": _biased,
    "another forward": _forwarded,
    "a hook": _hooked,
    "a hook before": _hooked_before,
    "a parametrization": nn.utils.parametrizations.weight_norm,
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", ["llm-med, own head", "llm-med, own head, capped", "longnet, own head"])
def test_a_head_of_another_kind_is_called(head: str, name: str) -> None:
    """Only what is a product with a weight and no more is left to the op."""
    model, (ids, targets) = model_of(name, torch.float64), batch_of(name)
    x = model._hidden(ids, None)
    before = model.head(x)
    model.head = HEADS[head](model.head).double()
    after = model.head(x)
    assert torch.equal(before, after) == (head == "a parametrization")
    if model.softcap is not None:
        after = model.softcap * torch.tanh(after / model.softcap)
    torch.testing.assert_close(model(ids)[0], after)
    want = with_gradients(model, F.cross_entropy(after.flatten(0, -2), targets.flatten()))
    with recording() as recorded:
        loss = model(ids, targets)[1]
    torch.testing.assert_close(with_gradients(model, loss), want)
    calls = [op.name for op, _ in recorded.values()]
    assert ("linear_cross_entropy" in calls) == (head == "a parametrization")
    assert model(ids, torch.full_like(targets, -100))[1].isnan()


def test_hooks_on_the_way_back_through_a_head() -> None:
    model, (ids, targets), seen = model_of("llm-med, own head"), batch_of("llm-med, own head"), []
    model.head.register_full_backward_pre_hook(lambda module, arriving: seen.append("before"))
    model.head.register_full_backward_hook(lambda module, made, arriving: seen.append("after"))
    model(ids, targets)[1].backward()
    assert seen == ["before", "after"]


@EVERY
def test_the_step_s_call_is_there_to_be_tuned(name: str) -> None:
    model, (ids, targets) = model_of(name), batch_of(name)
    with recording() as recorded:
        model(ids, targets)[1].backward()
    (case,) = (case for op, case in recorded.values() if op.name == "linear_cross_entropy")
    assert case.x.shape == (*targets.shape, 16)
    assert case.x.requires_grad
    with recording() as recorded:
        model(ids)
    assert all(op.name != "linear_cross_entropy" for op, _ in recorded.values())


@pytest.mark.parametrize("name", ["llm-med, capped", "byte-spectral"])
def test_derivatives_by_forward_mode_and_of_gradients(name: str) -> None:
    """They are plain PyTorch's, which the op then is; attention has no second ones."""
    model, (ids, targets) = model_of(name, torch.float64), batch_of(name, (1, 7))
    weights = {key: p.detach() for key, p in model.named_parameters()}
    ways = {key: torch.randn_like(p) for key, p in weights.items()}
    _, slope = jvp(lambda some: functional_call(model, some, (ids, targets))[1], (weights,), (ways,))
    loss, parameters = model(ids, targets)[1], list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, create_graph=name == "byte-spectral")
    along = sum((g * way).sum() for g, way in zip(gradients, ways.values(), strict=True))
    torch.testing.assert_close(slope, along)
    if name == "byte-spectral":
        assert all(g.isfinite().all() for g in torch.autograd.grad(along, parameters))


@EVERY
def test_without_data(name: str) -> None:
    with torch.device("meta"):
        model = models.build(CONFIGS[name])
        ids, targets = torch.zeros(3, 11, dtype=torch.long), torch.zeros(3, 11, dtype=torch.long)
    logits, loss = model(ids, targets[:, 0] if name == "byte-spectral, rows" else targets)
    assert logits is None
    assert loss.shape == ()
    assert loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "candidate"),
    [
        ("llm-med, capped", "chunked"),
        ("longnet", "eager"),
        pytest.param("llm-med, capped", "eager", marks=pytest.mark.exhaustive),
        pytest.param("longnet", "chunked", marks=pytest.mark.exhaustive),
    ],
)
def test_one_graph_of_torch_compile(name: str, candidate: str) -> None:
    torch.compiler.reset()
    model, (ids, targets) = model_of(name), batch_of(name)
    want = with_gradients(model, model(ids, targets)[1])
    with using(linear_cross_entropy=candidate):
        loss = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, targets)[1]
        torch.testing.assert_close(with_gradients(model, loss), want, rtol=1e-4, atol=1e-5)
