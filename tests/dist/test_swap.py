"""A swapped model under FSDP2: the same losses and gradients as the model's own code, swapped before and after."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bakeoff

Ranks = Callable[..., None]


def _losses(model: Any, ids: Tensor) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}


def _sharded(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from tests.unit.swapped import made, tokens

    mesh, plain, ids = init_device_mesh("cpu", (2,)), made("llama"), tokens(2, 8, seed=rank)

    def shard(model: nn.Module) -> nn.Module:
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    want = _losses(shard(copy.deepcopy(plain)), ids)
    for first in ("swap", "shard"):
        model = copy.deepcopy(plain)
        if first == "shard":
            shard(model)
        report = bakeoff.swap(model, quiet=True, norms="require", rotary="require", mlp="require")
        if first == "swap":
            shard(model)
        got = _losses(model, ids)
        torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-5)
        assert not report.silent(), report.silent()
        report.undo()
        torch.testing.assert_close(model(input_ids=ids).logits.isfinite().all(), torch.tensor(True))


def test_sharded_parameters(ranks: Ranks) -> None:
    ranks(2, _sharded)
