"""optim.DeepNestedOptimizer on the CPU: AdamW's step, periods, Muon, multipliers, states, errors."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bakeoff.apps.train.config import Optim
from bakeoff.apps.train.step import optimizer as configured
from bakeoff.models import llm_med, titan_mac
from bakeoff.ops.muon.plain import orthogonalised
from bakeoff.optim import AdamW, DeepNestedOptimizer, Muon, nested_groups

QUICK = {"wait": 0, "margin": 0.0}


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in shapes or ((3, 4), (5,))]


def twins(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


def gradients(params: list[nn.Parameter], *others: list[nn.Parameter]) -> None:
    for i, p in enumerate(params):
        p.grad = torch.randn_like(p)
        for other in others:
            other[i].grad = p.grad.clone()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 8))


def optimizer(net: nn.Module, **how: Any) -> DeepNestedOptimizer:
    groups = nested_groups(net, 0.1)
    groups[0]["muon"], groups[1]["period"] = True, 3
    return DeepNestedOptimizer(groups, 1e-2, controller=QUICK, **how)


def train(net: nn.Module, optim: DeepNestedOptimizer, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        ids = torch.randint(0, 8, (16,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(net(ids), (ids + 1) % 8)
        optim.zero_grad()
        loss.backward()
        optim.loss = loss.detach()
        optim.step()
        losses.append(loss.item())
    return losses


def test_without_its_additions_it_is_adamw() -> None:
    mine = parameters()
    peers, waiting = twins(mine), twins(mine)
    steppers = (
        DeepNestedOptimizer(mine, 1e-2, controller=False, max_grad_norm=1.0),
        AdamW(peers, 1e-2, (0.9, 0.95), max_grad_norm=1.0),
        DeepNestedOptimizer(waiting, 1e-2, controller={"wait": 100}, max_grad_norm=1.0),
    )
    for _ in range(4):
        gradients(mine, peers, waiting)
        for stepper in steppers:
            stepper.step()
    for a, b, c in zip(mine, peers, waiting, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c), "a multiplier of exactly 1 changes no bit"
    assert set(steppers[0].state[mine[0]]) == {"step", "exp_avg", "exp_avg_sq"}


def test_multipliers_scale_the_rate() -> None:
    mine = parameters()
    peers = twins(mine)
    stepper = DeepNestedOptimizer([{"params": [p]} for p in mine], 1e-2, controller={"wait": 100})
    assert stepper.controller is not None
    stepper.controller.multipliers.copy_(torch.tensor([2.0, 0.5]))
    rates = AdamW(
        [{"params": [p], "lr": lr} for p, lr in zip(peers, (2e-2, 5e-3), strict=True)], betas=(0.9, 0.95)
    )
    gradients(mine, peers)
    stepper.step()
    rates.step()
    for a, b in zip(mine, peers, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=0)


def test_the_controller_hears_the_hypergradient() -> None:
    """Along a valley's floor multipliers rise, across its walls they fall."""
    for curvature, rises in ((1e-3, True), (1.0, False)):
        p = nn.Parameter(torch.tensor([100.0 if rises else 0.01]))
        stepper = DeepNestedOptimizer([p], 0.1, (0.0, 0.9), weight_decay=0.0, controller=QUICK)
        assert stepper.controller is not None
        for _ in range(40):
            p.grad = curvature * p.detach().clone()
            stepper.step()
        assert (stepper.controller.multipliers.item() > 1.0) == rises


@pytest.mark.parametrize("muon", [False, True])
def test_every_gradient_of_a_slow_group_is_used_exactly_once(muon: bool) -> None:
    slow, peer = parameters((3, 4)), []
    peer = twins(slow)
    how: dict[str, Any] = {"muon": muon, "controller": False, "max_grad_norm": 1.5, "skip_nonfinite": True}
    stepper = DeepNestedOptimizer(slow, 1e-2, period=3, **how)
    once = DeepNestedOptimizer(peer, 1e-2, **{**how, "max_grad_norm": None})
    used: list[Tensor] = []
    for step in range(14):
        gradients(slow)
        assert slow[0].grad is not None
        before = slow[0].detach().clone()
        if step in (4, 9):  # skipped: nothing is gathered, nothing is lost
            slow[0].grad[0, 0] = math.nan
            stepper.step()
            assert torch.equal(slow[0], before)
            continue
        used.append(slow[0].grad * min(1.0, 1.5 / (slow[0].grad.norm().item() + 1e-6)))
        stepper.step()
        if len(used) % 3:
            assert torch.equal(slow[0], before), "steps only at the period's end"
        else:
            peer[0].grad = torch.stack(used[-3:]).mean(0)
            once.step()
            assert not torch.equal(slow[0], before)
            assert torch.allclose(slow[0], peer[0], rtol=1e-5, atol=1e-6)
    assert len(used) == 12


def test_a_gradient_that_is_missing_at_the_end_of_a_period_loses_nothing() -> None:
    here, there = parameters((2, 2), (3,)), []
    there = twins(here)
    slow, full = (DeepNestedOptimizer(ps, 1e-2, period=2, controller=False) for ps in (here, there))
    gradients(here, there)
    for stepper in (slow, full):
        stepper.step()
    gradients(here, there)
    here[1].grad, there[1].grad = None, torch.zeros(3)
    for stepper in (slow, full):
        stepper.step()
    assert here[1].grad is None
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_state_only_where_it_is_used() -> None:
    net = model()
    stepper = optimizer(net)
    train(net, stepper, 2)
    kept = [set(stepper.state[group["params"][0]]) for group in stepper.param_groups]
    moments = {"step", "exp_avg", "exp_avg_sq"}
    assert kept == [{"momentum", "direction"}, {*moments, "gathered"}, moments]


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    for shape in ((2, 8, 20), (1, 20, 8), (3, 5, 5)):
        matrices = torch.randn(shape, dtype=torch.float64)
        result = orthogonalised(matrices)
        values = torch.linalg.svdvals(result)
        assert values.min() > 0.3
        assert values.max() < 1.3
        u, _, v = torch.linalg.svd(matrices, full_matrices=False)
        assert nn.functional.cosine_similarity(result.flatten(1), (u @ v).flatten(1)).min() > 0.95


def test_muon_by_hand() -> None:
    (p,) = parameters((4, 6))
    before, stepper = p.detach().clone(), DeepNestedOptimizer([p], 0.1, muon=True, weight_decay=0.5)
    momentum = torch.zeros(4, 6)
    for _ in range(3):
        gradients([p])
        assert p.grad is not None
        momentum = 0.9 * momentum + 0.1 * p.grad
        u = orthogonalised((0.1 * p.grad + 0.9 * momentum)[None])[0] * 0.2 * 6**0.5
        before = before * (1 - 0.1 * 0.5) - 0.1 * u
        stepper.step()
        assert torch.allclose(p, before, atol=1e-5)
    assert torch.allclose(stepper.state[p]["direction"].float(), u, rtol=1e-2)


def test_a_run_goes_on_from_its_state_bit_for_bit() -> None:
    whole, parted = model(), model()
    full = train(whole, optimizer(whole, skip_nonfinite=True, max_grad_norm=1.0), 14)
    first = optimizer(parted, skip_nonfinite=True, max_grad_norm=1.0)
    losses = train(parted, first, 7)
    saved = pickle.loads(pickle.dumps(first.state_dict()))
    second = optimizer(parted, skip_nonfinite=True, max_grad_norm=1.0)
    second.load_state_dict(saved)
    assert losses + train(parted, second, 7, 7) == full
    for a, b in zip(whole.parameters(), parted.parameters(), strict=True):
        assert torch.equal(a, b)
    assert second.controller is not None
    assert not torch.equal(second.controller.multipliers, torch.ones(3))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_and_pickles(duplicate: Any) -> None:
    net = model()
    stepper = optimizer(net)
    train(net, stepper, 4)
    other = duplicate(stepper)
    assert other.buffers().keys() == stepper.buffers().keys()
    assert all(torch.equal(other.buffers()[name], t) for name, t in stepper.buffers().items())
    for group in other.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    other.step()


def test_an_adamws_state_is_taken_up() -> None:
    mine = parameters()
    peers = twins(mine)
    adamw = AdamW(peers, 1e-2, (0.9, 0.95))
    gradients(mine, peers)
    adamw.step()
    stepper = DeepNestedOptimizer(mine, 1e-2, period=2, controller=QUICK)
    stepper.load_state_dict(adamw.state_dict())
    assert stepper.param_groups[0]["period"] == 2
    assert stepper.state[mine[0]]["step"] == 1


def test_a_state_that_no_controller_looked_at_is_taken_up() -> None:
    net = model()
    groups = [{**group, "muon": group["name"] == "core"} for group in nested_groups(net)]
    for before in (Muon(groups, 1e-2), DeepNestedOptimizer(groups, 1e-2, controller=False)):
        train(net, before, 2)
        stepper = DeepNestedOptimizer(groups, 1e-2)
        stepper.load_state_dict(before.state_dict())
        train(net, stepper, 2)
        (matrix, *_) = stepper.param_groups[0]["params"]
        assert stepper.state[matrix]["direction"].any()


def test_a_state_for_other_groups_changes_nothing() -> None:
    net = model()
    stepper, before = optimizer(net), copy.deepcopy(net.state_dict())
    train(net, stepper, 2)
    other = DeepNestedOptimizer(net.parameters(), 1e-2)
    kept = copy.deepcopy(stepper.state_dict())
    with pytest.raises(ValueError, match="as many groups"):
        stepper.load_state_dict({**kept, "controller": other.state_dict()["controller"]})
    muons = DeepNestedOptimizer(nested_groups(net), muon=False)
    with pytest.raises(ValueError, match="no step"):
        muons.load_state_dict({**kept, "param_groups": [{**g, "muon": False} for g in kept["param_groups"]]})
    assert before.keys() == net.state_dict().keys()


def test_grad_scaler_skips_and_unscales() -> None:
    net, plain = model(), model()
    stepper, peer = optimizer(net), optimizer(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    ids = torch.arange(8)
    for step in range(6):
        for own, optim in ((net, stepper), (plain, peer)):
            optim.zero_grad()
            loss = nn.functional.cross_entropy(own(ids), ids)
            (scaler.scale(loss) if own is net else loss).backward()
        bad = step == 3
        if bad:
            net[1].weight.grad[0, 0] = math.inf
        scaler.step(stepper)
        scaler.update()
        if not bad:
            peer.step()
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_schedulers_and_closures() -> None:
    net = model()
    stepper = optimizer(net)
    scheduler = torch.optim.lr_scheduler.StepLR(stepper, 1, 0.5)
    ids = torch.arange(8)

    def closure() -> Tensor:
        stepper.zero_grad()
        loss = nn.functional.cross_entropy(net(ids), ids)
        loss.backward()
        return loss.detach()

    assert isinstance(stepper.step(closure), Tensor)
    assert stepper.controller is not None
    assert stepper.controller.state_dict()["loss"][1] == 1
    scheduler.step()
    assert [group["lr"] for group in stepper.param_groups] == [5e-3] * 3


def test_groups_may_be_added() -> None:
    first, later = parameters((3, 3)), parameters((2,))
    stepper = DeepNestedOptimizer(first, 1e-2, controller=QUICK)
    gradients(first)
    stepper.step()
    stepper.add_param_group({"params": later})
    gradients(first)
    stepper.step()  # the new group has no gradient
    gradients(first)
    gradients(later)
    stepper.step()
    assert stepper.controller is not None
    assert stepper.controller.multipliers.shape == (2,)


@pytest.mark.parametrize("loss", [torch.ones(3), 2.0])
def test_a_loss_that_is_no_scalar_tensor_is_refused_before_the_step(loss: Any) -> None:
    params = parameters((3,))
    stepper = DeepNestedOptimizer(params, 1e-2)
    gradients(params)
    before = params[0].detach().clone()
    stepper.loss = loss
    with pytest.raises(ValueError, match=r"tensor of one number, got (shape \(3,\)|2.0); give the mean"):
        stepper.step()
    assert torch.equal(params[0], before)


def test_a_first_group_may_be_empty() -> None:
    stepper = DeepNestedOptimizer([{"params": []}], 1e-2)
    later = parameters((2,))
    stepper.add_param_group({"params": later})
    gradients(later)
    stepper.step()
    assert stepper.controller is not None
    assert stepper.controller.multipliers.shape == (2,)


def test_dtypes_of_one_group_share_a_multiplier() -> None:
    params = [nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4).bfloat16())]
    stepper = DeepNestedOptimizer(params, 1e-2, controller=QUICK)
    for _ in range(3):
        gradients(params)
        stepper.step()
    assert stepper.controller is not None
    assert stepper.controller.state_dict()["count"].tolist() == [3.0]


def test_groups_of_a_model() -> None:
    net = llm_med.LLMMed(llm_med.Config.sizes("tiny", tie=False))
    groups = {group["name"]: group for group in nested_groups(net, 0.1)}
    assert set(groups) == {"core", "embed", "scales"}
    assert groups["core"]["weight_decay"] == 0.1
    assert groups["scales"]["weight_decay"] == 0.0
    assert len(groups["embed"]["params"]) == 2
    assert all(p.ndim == 2 for p in groups["core"]["params"])
    assert sum(len(group["params"]) for group in groups.values()) == len(list(net.parameters()))


@pytest.mark.parametrize("size", [llm_med.Config.sizes("tiny"), titan_mac.Config.sizes("tiny")])
def test_with_muon_what_has_more_than_two_dimensions_is_apart(size: Any) -> None:
    titan = isinstance(size, titan_mac.Config)
    net = titan_mac.TitanMAC(size) if titan else llm_med.LLMMed(size)
    groups = {group["name"]: group for group in nested_groups(net, 0.1, muon=True)}
    assert ("tables" in groups) is titan, "persistent keys and values have four dimensions"
    assert [name for name, group in groups.items() if group["muon"]] == ["core"]
    assert all(p.ndim == 2 for p in groups["core"]["params"])
    assert sum(len(group["params"]) for group in groups.values()) == len(list(net.parameters()))
    before = [p.detach().clone() for p in net.parameters()]
    stepper = configured(net, Optim(name="deep-nested", muon=True), torch.device("cpu"))
    gradients(list(net.parameters()))
    stepper.step()
    assert not any(torch.equal(old, p) for old, p in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"period": 0}, "period must be an int of at least 1, got 0"),
        ({"period": 2.0}, "period must be an int"),
        ({"period": 2, "impl": "foreach"}, "can't wait for the end of a period"),
        ({"muon": True}, r"muon takes matrices, and parameter 1 of the group has shape \(5,\)"),
        ({"muon": True, "master_weights": "float32"}, "muon keeps no wider weights"),
        ({"controller": {"ratio": 0.5}}, "ratio must be above 1"),
        ({"base_lr": -1.0}, "lr must be in"),
    ],
)
def test_bad_settings_are_named(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeepNestedOptimizer(parameters(), **how)


@pytest.mark.parametrize("controller", [None, 0, "yes"])
def test_a_controller_is_asked_for_in_clear_words(controller: Any) -> None:
    with pytest.raises(TypeError, match=r"controller must be True, False .* or a dict of settings"):
        DeepNestedOptimizer(parameters(), controller=controller)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("when", ["always", "at first", "later"])
def test_the_default_dtype_changes_nothing(dtype: torch.dtype, when: str) -> None:
    plain, other = model(), model()
    wanted = train(plain, optimizer(plain, max_grad_norm=1.0), 8)
    try:
        torch.set_default_dtype(torch.float32 if when == "later" else dtype)
        optim = optimizer(other, max_grad_norm=1.0)
        torch.set_default_dtype(torch.float32 if when == "at first" else dtype)
        losses = train(other, optim, 8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert optim.controller is not None
    assert optim.controller.multipliers.dtype == torch.float32
    assert losses == wanted
