"""bakeoff.optim.AdamW against torch.optim.AdamW, on the CPU."""

import copy
import io
import itertools
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bakeoff
from bakeoff.ops.adamw.group import join
from bakeoff.ops.adamw.op import OP, update_case
from bakeoff.ops.adamw.update import overlap
from bakeoff.optim import AdamW

SHAPES: list[tuple[int, ...]] = [(3, 5), (7,), (), (33, 4), (0, 3)]
CANDIDATES = ["loop", "foreach", "fused", "compiled"]
ALL = [None, *CANDIDATES[:3]]


def parameters(dtype: torch.dtype = torch.float32, shapes: list[Any] = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def twins(params: list[nn.Parameter], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().to(dtype or p.dtype, copy=True)) for p in params]


def gradients(params: list[nn.Parameter], *others: list[nn.Parameter]) -> None:
    for i, p in enumerate(params):
        p.grad = torch.randn_like(p)
        for other in others:
            other[i].grad = p.grad.to(other[i].dtype, copy=True)


def distance(got: list[Any], exact: list[Any]) -> float:
    pairs = zip(got, exact, strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs if a.numel())


def train(steppers: list[torch.optim.Optimizer], lists: list[list[nn.Parameter]], steps: int = 3) -> None:
    for _ in range(steps):
        gradients(*lists)
        for stepper in steppers:
            stepper.step()


SETTINGS = [
    {"weight_decay": decay, "maximize": maximize, "betas": betas, "eps": eps}
    for decay, maximize, betas, eps in itertools.product(
        (0.0, 0.1), (False, True), ((0.9, 0.999), (0.0, 0.5)), (1e-8, 1e-3)
    )
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", ALL)
def test_is_as_exact_as_torch(dtype: torch.dtype, impl: str | None) -> None:
    """Over all settings, at most twice torch's own distance from float64, and a rounding of the result."""
    for settings in SETTINGS:
        mine = parameters(dtype)
        peers, exact = twins(mine), twins(mine, torch.float64)
        how: dict[str, Any] = {"lr": 1e-2, **settings}
        steppers = [
            AdamW(mine, impl=impl, **how),
            torch.optim.AdamW(peers, foreach=False, **how),
            torch.optim.AdamW(exact, foreach=False, **how),
        ]
        train(steppers, [mine, peers, exact])
        unit = 4 * torch.finfo(dtype).eps  # parameters reach 4
        assert distance(mine, exact) <= 2 * distance(peers, exact) + unit, settings


def test_compiled_is_as_exact_as_torch() -> None:
    reasons = OP.candidate("compiled").reasons(update_case(5, 100, "cpu", torch.float32))
    mine = parameters(shapes=SHAPES[:3])
    peers = twins(mine)
    stepper = AdamW(mine, impl="compiled")
    gradients(mine, peers)
    if reasons:
        with pytest.raises(bakeoff.Unsupported, match="compiler"):
            stepper.step()
        return
    train([stepper, torch.optim.AdamW(peers)], [mine, peers])
    assert distance(mine, peers) < 1e-6


def test_groups_and_schedulers() -> None:
    mine = parameters()
    peers = twins(mine)
    steppers = []
    for kind, params in ((AdamW, mine), (torch.optim.AdamW, peers)):
        stepper = kind(
            [{"params": params[:2], "weight_decay": 0.3}, {"params": params[2:4], "lr": 1e-3}], lr=1e-2
        )
        stepper.add_param_group({"params": params[4:], "betas": (0.5, 0.6)})
        steppers.append(stepper)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(s, max_lr=[1e-2, 1e-3, 1e-2], total_steps=8) for s in steppers
    ]
    for _ in range(6):
        gradients(mine, peers)
        for stepper, schedule in zip(steppers, schedules, strict=True):
            stepper.step()
            schedule.step()
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
    assert steppers[0].param_groups[0]["betas"] == steppers[1].param_groups[0]["betas"]
    assert distance(mine, peers) < 1e-6


def test_groups_may_be_plain_dicts() -> None:
    mine = parameters()
    peers = twins(mine)
    steppers = []
    for kind, params in ((AdamW, mine), (torch.optim.AdamW, peers)):
        stepper = kind(params[:3])
        stepper.param_groups = [dict(group) for group in stepper.param_groups]
        stepper.param_groups.append({**stepper.param_groups[0], "params": params[3:], "lr": 0.1})
        steppers.append(stepper)
    train(steppers, [mine, peers])
    assert distance(mine, peers) < 1e-6
    steppers[0].param_groups.append({**steppers[0].param_groups[0], "eps": -1.0})
    with pytest.raises(ValueError, match="eps"):
        steppers[0].step()


def test_a_group_forces_no_candidate_of_its_own() -> None:
    for candidate in ("foreach", "fused"):
        group = {"params": parameters(), candidate: True}
        AdamW([dict(group)], impl=candidate)
        with pytest.raises(ValueError, match=f"force {candidate} .*{candidate}=True"):
            AdamW([dict(group)])
    with pytest.raises(ValueError, match="can't be differentiated"):
        AdamW([{"params": parameters(), "differentiable": True}])


@pytest.mark.parametrize(
    "own",
    [{"max_grad_norm": 1.0}, {"skip_nonfinite": True}, {"master_weights": "float32"}, {"impl": "loop"}],
)
def test_a_group_has_no_setting_that_holds_for_all(own: dict[str, Any]) -> None:
    (name,) = own
    with pytest.raises(ValueError, match=rf"{name} holds for all groups.*give AdamW\(\.\.\., {name}="):
        AdamW([{"params": parameters(), **own}])
    AdamW([{"params": parameters(), **own}], **own)  # what is true of all may be said of one


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("impl", ALL)
def test_a_tensor_rate(impl: str | None, shape: tuple[int, ...]) -> None:
    mine = parameters()
    peers = twins(mine)
    rate = torch.full(shape, 1e-2)
    steppers = [AdamW(mine, lr=rate, impl=impl), torch.optim.AdamW(peers, lr=1e-2)]
    train(steppers, [mine, peers], 1)
    rate.fill_(1e-3)
    steppers[1].param_groups[0]["lr"] = 1e-3
    train(steppers, [mine, peers], 1)
    assert distance(mine, peers) < 1e-6


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("to_torch", [False, True])
def test_state_moves_both_ways(fused: bool, to_torch: bool) -> None:
    def peer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-2, fused=fused)

    def own(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return AdamW(params, lr=1e-2)

    first, second = (own, peer) if to_torch else (peer, own)
    params = parameters()
    stepper = first(params)
    train([stepper], [params])
    blob = io.BytesIO()
    torch.save(stepper.state_dict(), blob)
    blob.seek(0)
    others = twins(params)
    loaded = second(others)
    loaded.load_state_dict(torch.load(blob, weights_only=True))
    assert set(loaded.state[others[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    train([stepper, loaded], [params, others])
    assert distance(params, others) < 1e-6
    assert {s["step"].item() for s in loaded.state.values()} == {6.0}


def test_a_foreign_checkpoint_leaves_the_choice_of_candidate_alone() -> None:
    params = parameters()
    peer = torch.optim.AdamW(params, foreach=True, capturable=False)
    train([peer], [params], 1)
    stepper = AdamW(params)
    stepper.load_state_dict(peer.state_dict())
    assert stepper.param_groups[0]["foreach"] is None
    assert stepper.impl is None


def test_state_is_loaded_onto_the_parameters_device_whatever_the_default() -> None:
    params = parameters()
    stepper = AdamW(params)
    train([stepper], [params], 1)
    loaded = AdamW(params)
    with torch.device("meta"):
        loaded.load_state_dict(stepper.state_dict())
    assert {(s["step"].device.type, s["step"].item()) for s in loaded.state.values()} == {("cpu", 1.0)}


def test_a_hook_may_replace_the_state_that_is_loaded() -> None:
    params = parameters(torch.bfloat16, [(3,), (3,)])
    stepper = AdamW(params, master_weights="float32")
    train([stepper], [params])
    loaded = AdamW(params[::-1], master_weights="float32")

    def reverse(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        return {**saved, "state": {0: saved["state"][1], 1: saved["state"][0]}}

    seen: list[Tensor] = []
    loaded.register_load_state_dict_pre_hook(reverse)
    loaded.register_load_state_dict_post_hook(lambda s: seen.append(s.state[params[0]]["exp_avg"]))
    loaded.load_state_dict(stepper.state_dict())
    for p in params:
        for key, value in stepper.state[p].items():
            assert torch.equal(loaded.state[p][key], value)
    assert torch.equal(seen[0], stepper.state[params[0]]["exp_avg"])


def amsgrad(params: list[nn.Parameter]) -> dict[str, Any]:
    peer = torch.optim.AdamW(params, amsgrad=True)
    train([peer], [params], 1)
    return peer.state_dict()


def momentum(params: list[nn.Parameter]) -> dict[str, Any]:
    peer = torch.optim.SGD(params, lr=0.5, momentum=0.9)
    train([peer], [params], 1)
    return peer.state_dict()


def reordered(params: list[nn.Parameter]) -> dict[str, Any]:
    peer = torch.optim.AdamW(params[::-1])
    train([peer], [params], 1)
    return peer.state_dict()


def negative(params: list[nn.Parameter]) -> dict[str, Any]:
    saved = AdamW(params).state_dict()
    saved["param_groups"][0]["eps"] = -1.0
    return saved


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (amsgrad, "amsgrad is not supported"),
        (momentum, "has no step, so it isn't AdamW's"),
        (reordered, "in the order they were saved in"),
        (negative, "eps must be in"),
        (lambda params: AdamW(params[1:]).state_dict(), "doesn't match the size"),
    ],
)
def test_a_state_that_is_refused_changes_nothing(make: Any, message: str) -> None:
    params = parameters()
    stepper = AdamW(params, lr=1e-2)
    train([stepper], [params], 1)
    saved = make(twins(params))
    before = copy.deepcopy(stepper.state_dict())
    with pytest.raises(ValueError, match=message):
        stepper.load_state_dict(saved)
    assert before["param_groups"] == stepper.state_dict()["param_groups"]
    for i, state in before["state"].items():
        for key, value in state.items():
            assert torch.equal(value, stepper.state_dict()["state"][i][key])
    train([stepper], [params], 1)


@pytest.mark.parametrize("impl", ALL)
def test_grad_scaler(impl: str | None) -> None:
    mine = parameters()
    peers = twins(mine)
    pairs = [
        (AdamW(mine, lr=1e-2, impl=impl), torch.amp.GradScaler("cpu", init_scale=128.0)),
        (torch.optim.AdamW(peers, lr=1e-2, fused=True), torch.amp.GradScaler("cpu", init_scale=128.0)),
    ]
    for i in range(5):
        gradients(mine)
        for p, q in zip(mine, peers, strict=True):
            p.grad.mul_(128.0)
            if i == 2 and p.numel():
                p.grad.view(-1)[0] = math.inf
            q.grad = p.grad.clone()
        for stepper, scaler in pairs:
            scaler.scale(torch.zeros(()))
            scaler.step(stepper)
            scaler.update()
    assert pairs[0][1].get_scale() == pairs[1][1].get_scale() == 64.0
    assert distance(mine, peers) < 1e-6
    assert {s["step"].item() for s in pairs[0][0].state.values()} == {4.0}


def test_grad_scaler_with_clipping_inside() -> None:
    mine = parameters()
    peers = twins(mine)
    stepper, scaler = AdamW(mine, max_grad_norm=0.5), torch.amp.GradScaler("cpu", init_scale=1024.0)
    peer = torch.optim.AdamW(peers)
    for _ in range(3):
        gradients(mine, peers)
        for p in mine:
            p.grad.mul_(1024.0)
        scaler.scale(torch.zeros(()))
        scaler.step(stepper)
        scaler.update()
        norm = nn.utils.clip_grad_norm_(peers, 0.5)
        peer.step()
        assert stepper.grad_norm is not None
        assert stepper.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    assert distance(mine, peers) < 1e-6


def test_closure() -> None:
    weight = nn.Parameter(torch.ones(3))
    stepper = AdamW([weight], lr=0.1)

    def closure() -> Tensor:
        stepper.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert stepper.step(closure).item() == 3.0
    assert (weight < 1).all()


def test_missing_gradients_keep_their_own_count() -> None:
    mine = parameters()
    peers = twins(mine)
    steppers = [AdamW(mine), torch.optim.AdamW(peers)]
    for i in range(4):
        gradients(mine, peers)
        for params in (mine, peers):
            params[i % 3].grad = None
        for stepper in steppers:
            stepper.step()
    counts = [
        [s.state[p]["step"].item() for p in params] for s, params in zip(steppers, (mine, peers), strict=True)
    ]
    assert counts[0] == counts[1]
    assert len(set(counts[0])) > 1
    assert distance(mine, peers) < 1e-6
    for p in mine:
        p.grad = None
    assert steppers[0].step() is None


@pytest.mark.parametrize("impl", ALL)
def test_layouts(impl: str | None) -> None:
    """Transposed, channels-last, strided and expanded tensors; a slice of another tensor."""
    store = [torch.randn(6, 8), torch.randn(6, 8)]
    mine, peers = (
        [
            nn.Parameter(torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).t()),
            nn.Parameter(torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)),
            nn.Parameter(whole[:, ::2]),
        ]
        for whole in store
    )
    with torch.no_grad():
        peers[2].copy_(mine[2])
    outside = store[0][:, 1::2].clone()
    steppers = [AdamW(mine, lr=1e-2, impl=impl), torch.optim.AdamW(peers, lr=1e-2, foreach=False)]
    for _ in range(3):
        drawn = [torch.randn(3, 5), torch.randn(2, 3, 4, 4), torch.randn(6, 1).expand(6, 4)]
        for params in (mine, peers):
            for p, g in zip(params, drawn, strict=True):
                p.grad = g
        for stepper in steppers:
            stepper.step()
    assert distance(mine, peers) < 1e-6
    assert torch.equal(store[0][:, 1::2], outside)


def test_tied_parameters() -> None:
    torch.manual_seed(0)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
        model[1].weight = model[0].weight
        models.append(model)
    steppers = [AdamW(models[0].parameters()), torch.optim.AdamW(models[1].parameters())]
    for _ in range(3):
        for model, stepper in zip(models, steppers, strict=True):
            stepper.zero_grad()
            model(torch.tensor([1, 2, 2])).square().sum().backward()
            stepper.step()
    assert distance(list(models[0].parameters()), list(models[1].parameters())) < 1e-6
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match="lists it once"):
        AdamW([models[0][0].weight, models[0][1].weight])


@pytest.mark.parametrize("impl", ALL)
def test_shared_memory_goes_one_after_another(impl: str | None) -> None:
    """Two parameters over one memory: updated in order, as by torch."""
    results = []
    for kind, more in ((AdamW, {"impl": impl}), (torch.optim.AdamW, {})):
        memory = torch.ones(8)
        params = [nn.Parameter(memory), nn.Parameter(memory[2:6])]
        stepper = kind(params, lr=0.1, **more)  # type: ignore[arg-type]
        for p, value in zip(params, (1.0, -3.0), strict=True):
            p.grad = torch.full_like(p, value)
        stepper.step()
        results.append(memory)
    assert distance(results[:1], results[1:]) < 1e-6


@pytest.mark.parametrize("master", [None, "float32"])
def test_transposed_parameters_that_share_memory_see_each_other(master: str | None) -> None:
    results = []
    for kind, more in ((AdamW, {"master_weights": master}), (torch.optim.AdamW, {})):
        memory = torch.ones(4, 5).t()
        params = [nn.Parameter(memory[:4]), nn.Parameter(memory[1:])]
        stepper = kind(params, lr=0.1, weight_decay=0.0, **more)  # type: ignore[arg-type]
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            stepper.step()
        results.append(memory)
    assert distance(results[:1], results[1:]) < 1e-6


def test_overlap() -> None:
    memory = torch.zeros(10)
    assert overlap([memory[:6], memory[5:]])
    assert not overlap([memory[:5], memory[5:], memory[5:5]])


def test_sparse_gradients_are_refused() -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    stepper = AdamW(layer.parameters())
    with pytest.raises(RuntimeError, match="SparseAdam"):
        stepper.step()
    assert not any(stepper.state.values())


@pytest.mark.parametrize("impl", ALL)
def test_clipping_is_torchs(impl: str | None) -> None:
    mine = parameters()
    peers = twins(mine)
    groups = [{"params": mine[:2]}, {"params": mine[2:], "lr": 1e-3}]
    stepper = AdamW(groups, max_grad_norm=0.7, impl=impl)
    peer = torch.optim.AdamW([{"params": peers[:2]}, {"params": peers[2:], "lr": 1e-3}])
    for _ in range(3):
        gradients(mine, peers)
        kept = [p.grad.clone() for p in mine]
        norm = nn.utils.clip_grad_norm_(peers, 0.7)
        stepper.step()
        peer.step()
        assert stepper.grad_norm is not None
        assert stepper.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
        assert all(torch.equal(p.grad, g) for p, g in zip(mine, kept, strict=True)), (
            "gradients are never written"
        )
    assert distance(mine, peers) < 1e-6


@pytest.mark.parametrize("impl", [None, "loop", "fused"])
@pytest.mark.parametrize("master", [None, "float32", "remainder"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(impl: str | None, master: str | None, bad: float) -> None:
    params = parameters(torch.bfloat16 if master else torch.float32)
    stepper = AdamW(params, skip_nonfinite=True, max_grad_norm=1.0, master_weights=master, impl=impl)
    train([stepper], [params], 2)
    before = copy.deepcopy(([p.data for p in params], stepper.state_dict()["state"]))
    gradients(params)
    params[3].grad[2, 1] = bad
    stepper.step()
    after = ([p.data for p in params], stepper.state_dict()["state"])
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    for i, state in before[1].items():
        assert all(torch.equal(value, after[1][i][key]) for key, value in state.items())
    assert stepper.skipped is not None
    assert stepper.skipped.item() == 1
    train([stepper], [params], 1)
    assert stepper.skipped.item() == 1
    assert not torch.equal(before[0][0], params[0].data)


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize("kind", ["float32", "remainder"])
def test_wider_weights_follow_the_float32_run(impl: str | None, kind: str) -> None:
    mine = parameters(torch.bfloat16)
    wide = twins(mine, torch.float32)
    steppers = [AdamW(mine, lr=1e-4, master_weights=kind, impl=impl), torch.optim.AdamW(wide, lr=1e-4)]
    for _ in range(20):
        gradients(mine, wide)
        for stepper in steppers:
            stepper.step()
    states = [steppers[0].state[p] for p in mine]
    masters = [
        s["master"] if kind == "float32" else join(p, s["remainder"])
        for p, s in zip(mine, states, strict=True)
    ]
    assert distance(masters, wide) < 1e-6
    assert distance(mine, wide) < 0.01
    assert all(s["exp_avg"].dtype == torch.float32 for s in states)


@pytest.mark.parametrize("kind", ["float32", "remainder"])
def test_weights_written_after_a_step_stay_once_masters_are_refreshed(kind: str) -> None:
    params = parameters(torch.bfloat16)
    stepper = AdamW(params, lr=1e-3, master_weights=kind)
    train([stepper], [params])
    kept = copy.deepcopy(stepper.state[params[1]])
    with torch.no_grad():
        params[0].zero_()  # a negative remainder would make of this a NaN
        params[3].fill_(5.0)
    stepper.refresh_masters()
    if kind == "float32":
        assert torch.equal(stepper.state[params[1]]["master"], kept["master"])
    train([stepper], [params], 1)
    assert distance(params[:1], [torch.zeros(3, 5)]) < 0.01
    assert distance(params[3:4], [torch.full((33, 4), 5.0)]) < 0.05
    AdamW(params).refresh_masters()


@pytest.mark.parametrize("saved", [None, "float32", "remainder"])
@pytest.mark.parametrize("kind", ["float32", "remainder"])
def test_wider_weights_survive_a_checkpoint(saved: str | None, kind: str) -> None:
    params = parameters(torch.bfloat16)
    stepper = AdamW(params, lr=1e-3, master_weights=saved)
    train([stepper], [params])
    others = twins(params)
    loaded = AdamW(others, lr=1e-3, master_weights=kind)
    loaded.load_state_dict(stepper.state_dict())
    for p, q in zip(params, others, strict=True):
        if saved == "remainder":
            weight = join(p, stepper.state[p]["remainder"])
        else:
            weight = stepper.state[p]["master"] if saved else p.detach().float()
        mine = loaded.state[q]["master"] if kind == "float32" else join(q, loaded.state[q]["remainder"])
        assert torch.equal(mine, weight)
        assert torch.equal(loaded.state[q]["exp_avg"], stepper.state[p]["exp_avg"].float())
    train([loaded], [others], 1)


def test_mixed_dtypes_in_one_group() -> None:
    mine = [*parameters(), *parameters(torch.bfloat16), *parameters(torch.float64)]
    peers = twins(mine)
    steppers = [AdamW(mine, max_grad_norm=1e9), torch.optim.AdamW(peers, foreach=False)]
    train(steppers, [mine, peers], 2)
    assert distance(mine[:5] + mine[10:], peers[:5] + peers[10:]) < 1e-6
    assert distance(mine[5:10], peers[5:10]) < 0.02


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: torch.load(_saved(s), weights_only=False)])
def test_copies_and_pickles(duplicate: Any) -> None:
    params = parameters()
    stepper = AdamW(params, lr=1e-2, max_grad_norm=1.0, skip_nonfinite=True, impl="loop")
    train([stepper], [params], 2)
    twin = duplicate(stepper)
    others = twin.param_groups[0]["params"]
    assert (twin.max_grad_norm, twin.skip_nonfinite, twin.impl) == (1.0, True, "loop")
    twin.param_groups[0]["lr"] = 1e-2
    train([stepper, twin], [params, others], 2)
    assert distance(params, others) == 0


def _saved(stepper: AdamW) -> io.BytesIO:
    blob = io.BytesIO()
    torch.save(stepper, blob)
    blob.seek(0)
    return blob


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"amsgrad": True}, "amsgrad is not supported; use torch.optim.AdamW"),
        ({"differentiable": True}, "can't be differentiated"),
        ({"foreach": True, "fused": True}, "one of them at most"),
        ({"lr": -1.0}, "lr must be in"),
        ({"lr": math.nan}, "lr must be in"),
        ({"lr": torch.ones(2)}, "one element"),
        ({"lr": torch.tensor(-1.0)}, r"lr must be in \[0, inf\)"),
        ({"lr": torch.tensor(torch.nan)}, r"lr must be in \[0, inf\)"),
        ({"betas": 0.9}, "betas must be two numbers"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"maximize": "no"}, "AdamW: maximize must be True or False, got 'no'"),
        ({"betas": (1.0, 0.9)}, r"beta1 must be in \[0, 1\)"),
        ({"betas": (0.9, -0.1)}, "beta2"),
        ({"betas": (torch.tensor(0.9), torch.tensor(0.9))}, "must be numbers"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"max_grad_norm": 0.0}, "None turns clipping off"),
        ({"master_weights": "fp8"}, "'float32' or 'remainder'"),
        ({"skip_nonfinite": True, "foreach": True}, "foreach can't skip .* turn skip_nonfinite off"),
        ({"skip_nonfinite": True, "impl": "compiled"}, "compiled can't skip"),
        ({"impl": "cobol"}, "it has loop, foreach, fused, compiled, triton"),
    ],
)
def test_bad_settings_are_named(how: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        AdamW(parameters(), **how)


def test_bad_parameters_are_named() -> None:
    with pytest.raises(TypeError, match=r"parameter 0 is torch.complex64"):
        AdamW([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(TypeError, match=r"is torch.float8_e4m3fn; it takes float16, bfloat16, float32 and"):
        AdamW([nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn), requires_grad=False)])
    with pytest.raises(TypeError, match="remainder"):
        AdamW(parameters(torch.float16), master_weights="remainder")
    stepper = AdamW(parameters())
    with pytest.raises(ValueError, match="eps"):
        stepper.add_param_group({"params": parameters(), "eps": -1.0})
    assert len(stepper.param_groups) == 1


def test_a_parameter_of_another_shape_does_not_take_up_the_old_state() -> None:
    weight = nn.Parameter(torch.randn(4, 3))
    stepper = AdamW([weight])
    gradients([weight])
    stepper.step()
    weight.grad = None
    weight.data = torch.randn(2, 6)
    gradients([weight])
    with pytest.raises(
        ValueError, match=r"of shape \(2, 6\) had \(4, 3\) at its last step; take its state away"
    ):
        stepper.step()
    del stepper.state[weight]
    stepper.step()
    assert stepper.state[weight]["exp_avg"].shape == (2, 6)


def test_selection_is_asked_and_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for name in ("loop", "foreach", "fused"):
        candidate = OP.candidate(name)
        real = candidate.implementation
        monkeypatch.setitem(
            candidate.__dict__, "implementation", lambda *a, n=name, r=real: (ran.append(n), r(*a))
        )
    params = parameters()
    stepper = AdamW(params)
    gradients(params)
    for name in ("foreach", "loop", "fused"):
        with bakeoff.using(adamw_=name):
            stepper.step()
            stepper.step()
    with bakeoff.using("off"):
        stepper.step()
    assert ran == ["foreach", "foreach", "loop", "loop", "fused", "fused", "loop"]


def test_tune_sees_the_step() -> None:
    params = parameters()
    stepper = AdamW(params, max_grad_norm=1.0)
    gradients(params)
    report = bakeoff.tune(stepper.step, budget_s=0)
    assert [name.split("(")[0] for name in report.unsettled] == ["global_norm", "adamw_"]


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_parameters_update_their_shards(mesh: Any) -> None:
    plain = parameters(shapes=[(4, 3), (6,)])
    sharded = [nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)])) for p in plain]
    steppers = [AdamW(params, lr=1e-2, max_grad_norm=0.5) for params in (plain, sharded)]
    for _ in range(2):
        gradients(plain)
        for p, q in zip(plain, sharded, strict=True):
            q.grad = distribute_tensor(p.grad, mesh, [Shard(0)])
        for stepper in steppers:
            stepper.step()
    assert distance([q.to_local() for q in sharded], plain) == 0
    assert isinstance(steppers[1].state[sharded[0]]["exp_avg"], DTensor)
    mixed = AdamW([plain[0], sharded[1]], max_grad_norm=0.5)
    mixed.step()
    torch.testing.assert_close(mixed.grad_norm, steppers[0].grad_norm)


def test_parameters_that_were_moved_onto_each_other_are_seen() -> None:
    results = []
    for kind in (AdamW, torch.optim.AdamW):
        params = [nn.Parameter(torch.ones(4)) for _ in range(2)]
        stepper = kind(params, lr=0.1)
        for _ in range(2):
            for p in params:
                p.grad = torch.ones(4)
            stepper.step()
            params[1].data = params[0].data
        results.append(params[0].data)
    assert distance(results[:1], results[1:]) < 1e-6


def test_what_changes_between_steps_is_seen() -> None:
    """States in other memory, by assignment and through .data, parameters cast and moved, gradients laid out
    otherwise: each as torch's optimizer takes it."""

    def replaced(state: dict[str, Tensor], p: nn.Parameter) -> None:
        state.update({key: value.clone() for key, value in state.items()})

    def moved(state: dict[str, Tensor], p: nn.Parameter) -> None:
        for value in state.values():
            value.data = value.data.clone()

    def transposed(state: dict[str, Tensor], p: nn.Parameter) -> None:
        p.data = p.data.t().contiguous().t()
        assert p.grad is not None
        p.grad = p.grad.t().contiguous().t()

    def remade(state: dict[str, Tensor], p: nn.Parameter) -> None:
        p.data = p.data.clone()

    shapes = [(4, 4), (3, 5)]
    mine = parameters(shapes=shapes)
    peers = twins(mine)
    steppers = [AdamW(mine, lr=1e-2), torch.optim.AdamW(peers, lr=1e-2)]
    train(steppers, [mine, peers], 2)
    for change in (replaced, moved, transposed, remade):
        for _ in range(2):
            gradients(mine, peers)
            for stepper, params in zip(steppers, (mine, peers), strict=True):
                change(stepper.state[params[0]], params[0])
            for stepper in steppers:
                stepper.step()
            assert distance(mine, peers) < 1e-6, change.__name__
        train(steppers, [mine, peers], 2)
        assert distance(mine, peers) < 1e-6, change.__name__


def test_a_step_keeps_no_memory_alive() -> None:
    params = parameters()
    stepper = AdamW(params, max_grad_norm=1.0)
    train([stepper], [params], 3)
    grads = [weakref.ref(p.grad) for p in params]
    states = [weakref.ref(stepper.state[p]["exp_avg"]) for p in params]
    stepper.zero_grad()
    for state in stepper.state.values():
        state["exp_avg"] = state["exp_avg"].clone()
    assert all(ref() is None for ref in [*grads, *states])
    train([stepper], [params], 1)


def test_the_counter_of_the_state_that_was_loaded_stays() -> None:
    one, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    first, second = AdamW([one]), AdamW([other])
    one.grad, other.grad = torch.ones(3), torch.ones(3)
    first.step()
    second.load_state_dict(first.state_dict())
    second.step()
    assert [o.state[p]["step"].item() for o, p in ((first, one), (second, other))] == [1, 2]
