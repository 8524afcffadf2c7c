"""byte_spectral's corners: what isn't a tensor, autocast over bad weights, tensors without data."""

from typing import Any

import pytest
import torch

import bakeoff
from bakeoff.ops import byte_spectral
from bakeoff.ops.byte_spectral import OP

IDS = torch.zeros(2, 3, dtype=torch.uint8)
GOOD: dict[str, Any] = {"table": torch.zeros(256, 2), "window": torch.ones(8), "omega": torch.ones(3)}
EIGHT_BITS = torch.float8_e4m3fn


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ids": b"abc"}, TypeError, r"ids must be a tensor, got b'abc'; .* torch\.tensor\("),
        ({"ids": [[1, 2]]}, TypeError, r"ids must be a tensor, got \[\[1, 2\]\]"),
        ({"ids": IDS[0]}, ValueError, r"ids has shape \(3,\), expected \[B, T\]; one row is ids\[None\]"),
        ({"table": None}, TypeError, "table must be a tensor, got None"),
        ({"table": torch.zeros(256, 2).to(EIGHT_BITS)}, TypeError, "table is torch.float8.*at least 16 bits"),
        ({"window": 8}, TypeError, "window must be a tensor, got 8"),
        ({"omega": 1.0, "weight": torch.zeros(6, 2)}, TypeError, "omega must be a tensor, got 1.0"),
        ({"weight": [1.0]}, TypeError, r"weight must be a tensor, got \[1.0\]"),
        ({"weight": torch.zeros(6, 2, dtype=torch.int32)}, TypeError, "weight is torch.int32; convert it"),
        ({"weight": torch.zeros(6, 2), "bias": 1.0}, TypeError, "bias must be a tensor, got 1.0"),
        ({"causal": torch.tensor(True)}, TypeError, "causal is a tensor, expected True or False"),
    ],
)
def test_bad_input_names_the_fix(
    change: dict[str, Any], error: type[Exception], message: str, autocast: bool
) -> None:
    call: dict[str, Any] = {"ids": IDS, **GOOD} | change
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), pytest.raises(error, match=message):
        byte_spectral(**call)


@pytest.mark.parametrize("asked", [byte_spectral, OP, "byte_spectral"])
def test_explain_takes_what_a_call_takes(asked: Any) -> None:
    assert bakeoff.explain(asked, IDS, GOOD["table"], GOOD["window"]).op == "byte_spectral"


@pytest.mark.parametrize("D", [None, 4])
def test_tensors_without_data(D: int | None) -> None:
    weight = None if D is None else torch.zeros(6, D, device="meta")
    tensors = {name: value.to("meta") for name, value in GOOD.items()}
    out = byte_spectral(IDS.to("meta"), **tensors, weight=weight)
    assert (out.shape, out.device.type) == ((2, 3, D or 6), "meta")
