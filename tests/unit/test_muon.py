"""bakeoff.optim.Muon on the CPU: which parameter is which, groups, state, skipping, blocks."""

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bakeoff.apps.train.config import Config, ConfigError, resolve
from bakeoff.apps.train.step import Stepper
from bakeoff.models import llm_med, titan_mac
from bakeoff.ops.muon import muon_
from bakeoff.optim import AdamW, Muon, muon_groups, nested_groups


class Model(nn.Module):
    """Tied and untied heads, a convolution, a table of its own, a fused projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.qkv = nn.Linear(6, 18)
        self.inner = nn.Sequential(nn.Linear(18, 11), nn.Linear(11, 6))
        self.conv = nn.Conv1d(6, 6, 3)
        self.poles = nn.Parameter(torch.randn(6, 4))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.inner(self.qkv(self.embed(ids))) * self.poles.sum(1)
        x = x + self.conv(x.T[None])[0].mean(-1)
        return self.head(self.norm(x))


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def train(net: nn.Module, stepper: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        ids = torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(net(ids), (ids + 1) % 11)
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return losses


def names(groups: list[dict[str, Any]]) -> dict[str, list[str]]:
    return {
        f"{group['name']} {group['splits'] or ''}".strip(): [n for n, _ in group["params"]]
        for group in groups
    }


def everything(net: nn.Module, stepper: torch.optim.Optimizer) -> list[Tensor]:
    return [*net.parameters(), *(value for state in stepper.state.values() for value in state.values())]


def test_parameters_are_split_by_what_their_modules_are() -> None:
    net, lines = model(), io.StringIO()
    groups = muon_groups(net, 0.2, adamw_lr=0.5, report=lambda line: print(line, file=lines))
    assert names(groups) == {
        "matrices": ["qkv.weight", "inner.0.weight", "inner.1.weight"],
        "embeddings": ["embed.weight"],
        "heads": ["head.weight"],
        "filters": ["poles", "conv.weight"],
        "vectors": [
            "qkv.bias",
            "inner.0.bias",
            "inner.1.bias",
            "conv.bias",
            "norm.weight",
            "norm.bias",
            "head.bias",
        ],
    }  # fmt: skip
    assert [group["weight_decay"] for group in groups] == [0.2, 0.2, 0.2, 0.0, 0.0]
    assert ["lr" in group for group in groups] == [False, True, True, True, True]
    assert lines.getvalue().splitlines()[:2] == [
        "matrices: Muon, 3 tensors, 372 parameters", "embeddings: AdamW, 1 tensors, 66 parameters",
    ]  # fmt: skip
    listed = [p for group in groups for _, p in group["params"]]
    assert len(listed) == len(set(listed)) == len(list(net.parameters()))


def test_a_tied_head_is_an_embedding_and_what_is_frozen_is_left_out() -> None:
    net = model()
    net.head.weight = net.embed.weight
    net.qkv.weight.requires_grad_(False)
    found = names(muon_groups(net))
    assert "heads" not in found
    assert found["embeddings"] == ["embed.weight"]
    assert found["matrices"] == ["inner.0.weight", "inner.1.weight"]


def test_patterns_say_otherwise() -> None:
    how: dict[str, Any] = {
        "splits": {"qkv.*": 3, "inner.1.*": (2, 4)},
        "matrices": ["poles"],
        "others": ["inner.0.*"],
    }
    found = names(muon_groups(model(), **how))
    assert found["matrices"] == ["poles"]
    assert found["matrices 3"] == ["qkv.weight"]
    assert found["matrices (2, 4)"] == ["inner.1.weight"]
    assert found["filters"] == ["inner.0.weight", "conv.weight"]
    with pytest.raises(ValueError, match=r"no parameter is called 'q\.\*'; names look like"):
        muon_groups(model(), splits={"q.*": 3})
    with pytest.raises(TypeError, match=r"others must be a list of patterns, got 'inner.*'; pass \['inner"):
        muon_groups(model(), others="inner.*")
    with pytest.raises(ValueError, match=r"conv.weight is in matrices and has shape \(6, 6, 3\).*leave"):
        muon_groups(model(), matrices=["conv.weight"])
    with pytest.raises(ValueError, match=r"inner.1.weight is in matrices and in others"):
        muon_groups(model(), matrices=["inner.*.weight"], others=["inner.1.*"])
    with pytest.raises(
        ValueError, match=r"splits fit nothing that Muon steps at \['poles'\]; put the matrix"
    ):
        muon_groups(model(), splits={"poles": 2, "qkv.*": 3})


@pytest.mark.parametrize("groups", [muon_groups, nested_groups])
def test_what_has_no_shape_yet_is_refused(groups: Any) -> None:
    net = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"_groups: 0.weight has no shape yet.*; call the model once first"):
        groups(net)
    net(torch.randn(2, 4))
    assert groups(net)[0]["name"] in ("matrices", "core")


def test_models_of_this_package() -> None:
    found = names(muon_groups(llm_med.LLMMed(llm_med.Config(d_model=32, layers=1, heads=2))))
    assert [n.split(".", 2)[-1] for n in found["matrices"]] == [
        "attention.qkv.weight", "attention.out.weight", "mlp.gate_up.weight", "mlp.down.weight",
    ]  # fmt: skip
    titan = names(muon_groups(titan_mac.TitanMAC(titan_mac.Config())))
    assert all("memory.w" not in name and "persistent" not in name for name in titan["matrices"])


def test_it_is_muon_for_matrices_and_adamw_for_the_rest() -> None:
    mine, peer = model(), model()
    stepper = Muon(muon_groups(mine, 0.1, adamw_lr=3e-3), 0.05, momentum=0.9, betas=(0.8, 0.9), eps=1e-6)
    groups = muon_groups(peer, 0.1)
    rest = AdamW([{**g, "lr": 3e-3} for g in groups if not g["muon"]], betas=(0.8, 0.9), eps=1e-6)
    matrices = [p for _, p in groups[0]["params"]]
    momentum = [torch.zeros_like(p) for p in matrices]
    for step in range(4):
        train(mine, stepper, 1, step)
        train(peer, rest, 1, step)
        muon_(matrices, [p.grad for p in matrices], momentum, lr=0.05, momentum_decay=0.9, weight_decay=0.1)
        for p in matrices:
            p.grad = None
    for a, b in zip(mine.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert set(stepper.state[mine.qkv.weight]) == {"momentum"}
    assert set(stepper.state[mine.embed.weight]) == {"step", "exp_avg", "exp_avg_sq"}


def test_it_learns() -> None:
    net = model()
    losses = train(net, Muon(muon_groups(net), 0.02), 25)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("splits", [3, (4, 6, 8)])
def test_blocks_of_rows_step_as_matrices_of_their_own(splits: Any) -> None:
    whole = nn.Parameter(torch.randn(18, 7))
    heights = [6] * 3 if splits == 3 else list(splits)
    parts = [nn.Parameter(p.clone()) for p in whole.detach().split(heights)]
    one, each = Muon([whole], 0.1, splits=splits), Muon(parts, 0.1)
    for _ in range(3):
        whole.grad = torch.randn_like(whole)
        for p, g in zip(parts, whole.grad.split(heights), strict=True):
            p.grad = g.clone()
        one.step()
        each.step()
    torch.testing.assert_close(whole.detach(), torch.cat([p.detach() for p in parts]))


def test_a_run_goes_on_from_its_state_bit_for_bit() -> None:
    whole, parted = model(), model()
    how: dict[str, Any] = {"max_grad_norm": 1.0, "skip_nonfinite": True}
    full = train(whole, Muon(muon_groups(whole), 0.02, **how), 8)
    first = Muon(muon_groups(parted), 0.02, **how)
    losses = train(parted, first, 4)
    saved = pickle.loads(pickle.dumps(first.state_dict()))
    second = Muon(muon_groups(parted), 0.5, **how)
    second.load_state_dict(saved)
    assert losses + train(parted, second, 4, 4) == full
    for a, b in zip(whole.parameters(), parted.parameters(), strict=True):
        assert torch.equal(a, b)
    copied = copy.deepcopy(second)
    assert copied.param_groups[0]["momentum"] == 0.95
    plain = AdamW([{"params": group["params"]} for group in muon_groups(parted)])
    train(parted, plain, 1)
    with pytest.raises(ValueError, match="no momentum, so it isn't"):
        second.load_state_dict(plain.state_dict())


def test_a_bf16_parameters_momentum_stays_float32() -> None:
    p = nn.Parameter(torch.randn(4, 6).bfloat16())
    stepper = Muon([p])
    p.grad = torch.randn_like(p)
    stepper.step()
    kept = stepper.state[p]["momentum"].clone()
    assert kept.dtype == torch.float32
    stepper.load_state_dict(stepper.state_dict())
    assert torch.equal(stepper.state[p]["momentum"], kept)


def test_clipping_and_skipping_hold_for_both_rules() -> None:
    mine, peer = model(), model()
    clipped = Muon(muon_groups(mine), 0.02, max_grad_norm=0.1, skip_nonfinite=True)
    plain = Muon(muon_groups(peer), 0.02)
    for step in range(4):
        for net in (mine, peer):
            ids = torch.arange(8) + step % 3
            net.zero_grad()
            nn.functional.cross_entropy(net(ids), ids).backward()
        norm = nn.utils.clip_grad_norm_(peer.parameters(), 0.1)
        if step == 2:
            mine.qkv.weight.grad[0, 0] = math.nan
        before = [
            t.clone() for t in [*mine.parameters(), *(v for s in clipped.state.values() for v in s.values())]
        ]
        clipped.step()
        if step == 2:
            assert all(map(torch.equal, before, everything(mine, clipped)))
            continue
        plain.step()
        assert clipped.grad_norm is not None
        assert clipped.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    assert clipped.skipped is not None
    assert clipped.skipped.item() == 1
    for a, b in zip(mine.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_grad_scaler_schedulers_new_groups_and_tensor_rates() -> None:
    mine, peer = model(), model()
    rate = torch.tensor(0.02)
    first = muon_groups(mine)
    scaled = Muon(first[:1], rate)
    for group in first[1:]:
        scaled.add_param_group(group)
    plain = Muon(muon_groups(peer), 0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1 / (1 + step))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for step in range(4):
        ids = torch.arange(8) + step % 3
        for net in (mine, peer):
            net.zero_grad()
            loss = nn.functional.cross_entropy(net(ids), ids)
            (scaler.scale(loss) if net is mine else loss).backward()
        bad = step == 1
        if bad:
            mine.poles.grad[0, 0] = math.inf
        scaler.step(scaled)
        scaler.update()
        if not bad:
            plain.step()
            schedule.step()
            rate.fill_(plain.param_groups[0]["lr"])
    for a, b in zip(mine.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("params", "how", "message"),
    [
        ((5,), {}, r"muon takes matrices, and parameter 0 of the group has shape \(5,\).*muon_groups"),
        ((4, 5), {"splits": 3}, "splits must be how many equal blocks the 4 rows of parameter 0"),
        ((4, 5), {"splits": (1, 2)}, "or the rows of each block, got"),
        ((4, 5), {"splits": (2.0, 2.0)}, "or the rows of each block, got"),
        ((4, 5), {"splits": "22"}, "or the rows of each block, got '22'"),
        ((4, 5), {"momentum": 1.0}, "momentum_decay must be in"),
        ((4, 5), {"steps": 0}, "steps must be a whole number"),
        ((4, 5), {"scale": "x"}, "scale must be one of"),
        ((4, 5), {"master_weights": "float32"}, "muon keeps no wider weights"),
        ((4, 5), {"muon": "no"}, "muon must be True or False, got 'no'"),
        ((4, 5), {"maximize": "no"}, "maximize must be True or False, got 'no'"),
        ((4, 5), {"muon_impl": "x"}, "muon_ has no candidate 'x'"),
    ],
)
def test_bad_settings_are_named(params: Any, how: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        Muon([nn.Parameter(torch.randn(params))], **how)


def test_states_of_other_rules_are_named() -> None:
    p = nn.Parameter(torch.randn(4, 5))
    for other in (torch.optim.Muon([p]), torch.optim.AdamW([p])):
        p.grad = torch.randn(4, 5)
        other.step()
        with pytest.raises(
            ValueError, match=r"^Muon: .* has no momentum, so it isn't Muon's; load the state of"
        ):
            Muon([p]).load_state_dict(other.state_dict())


def test_sparse_gradients_are_refused() -> None:
    p = nn.Parameter(torch.randn(4, 5))
    p.grad = torch.eye(4, 5).to_sparse()
    with pytest.raises(RuntimeError, match="Muon: muon takes no sparse gradients"):
        Muon([p]).step()


def test_the_trainer_steps_matrices_at_a_rate_of_their_own() -> None:
    given = ["optim.name=muon", "optim.muon_lr=0.02", "optim.lr=0.001", "train.device=cpu"]
    config = resolve(Config(model=llm_med.Config(d_model=32, layers=1, heads=2)), None, given)
    stepper = Stepper(llm_med.LLMMed(config.model), config, torch.device("cpu"))
    stepper(torch.randint(0, 256, (32, 17), dtype=torch.uint8), 5e-4)
    assert [g["lr"] for g in stepper.optimizer.param_groups] == pytest.approx([0.01, 5e-4, 5e-4])
    for wrong in ("optim.share=true", "optim.muon_lr=0.1"):
        with pytest.raises(ConfigError, match='muon_lr and share belong to name="muon"'):
            resolve(Config(), None, [wrong])
