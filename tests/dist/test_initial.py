"""Models that are built without data, sharded, given memory and begun anew: FSDP2's usual way."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bakeoff.models import byte_spectral, llm_med, longnet, titan_mac
from bakeoff.models.byte_spectral import ByteSpectralLM
from bakeoff.models.llm_med import LLMMed
from bakeoff.models.longnet import LongNetLM
from bakeoff.models.titan_mac import TitanMAC

SIZES = {"d_model": 60, "layers": 2, "heads": 3, "max_seq_len": 24}


def bytes_model(kind: str) -> nn.Module:
    config = byte_spectral.Config(**SIZES, filter=kind, attention_every=2, qk_norm=True, ngrams=2)  # type: ignore[arg-type]
    return ByteSpectralLM(config)


def memory_model(variant: str) -> nn.Module:
    return TitanMAC(titan_mac.Config(**SIZES, segment=8, chunk=4, persistent=2, variant=variant))  # type: ignore[arg-type]


def rows_model(_: str) -> nn.Module:
    return LLMMed(llm_med.Config(**SIZES, conv=3, qk_norm=True, ngrams=2))  # type: ignore[arg-type]


def dilated_model(_: str) -> nn.Module:
    return LongNetLM(longnet.Config(**SIZES, segments=(8, 16), rates=(1, 2)))  # type: ignore[arg-type]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def begun_in_shards(rank: int, build: Callable[[str], nn.Module], kind: str) -> None:
    expected = build(kind)
    with torch.device("meta"):
        model = build(kind)
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan"))
    torch.manual_seed(rank)  # ranks need not draw alike
    model.reset_parameters()  # type: ignore[operator]
    found = {name: whole(parameter) for name, parameter in model.named_parameters()}
    for name, value in expected.named_parameters():
        other, deviation = found[name], 0.3 * value.std() + 1e-6
        assert other.isfinite().all(), name
        assert abs(other.std() - value.std()) < deviation, name
        assert abs(other.mean() - value.mean()) < deviation, name
    for (name, table), value in zip(model.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(table, value), name
    expected.load_state_dict(found)
    ids = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(ids)[0], expected(ids)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        *[(bytes_model, kind) for kind in ("poles", "taps", "minimum_phase")],
        *[(memory_model, variant) for variant in ("mac", "mag", "lmm")],
        (rows_model, ""),
        (dilated_model, ""),
    ],
)
def test_shards_begin_as_the_whole(ranks: Callable[..., None], build: object, kind: str) -> None:
    ranks(2, begun_in_shards, build, kind)
