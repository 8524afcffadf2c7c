"""Older GPUs: what each generation can't do is known before anything is compiled for it."""

import logging
from pathlib import Path

import pytest
import torch

from bakeoff import hardware
from bakeoff.select import Case, Op, TensorMeta, find_op
from bakeoff.select.choose import dispatch, policy
from tests.unit.verdicts import no_verdicts

OPS = ("rms_norm", "swiglu", "rotary", "pole_scan", "spectral_filter")


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that makes ``cuda`` a card of the given compute capability."""

    def made(*capability: int) -> None:
        monkeypatch.setattr(hardware, "index", lambda device: 0 if device.startswith("cuda") else -1)
        monkeypatch.setattr(hardware, "capability", lambda number: capability if number >= 0 else (0, 0))

    monkeypatch.setattr(dispatch, "_said", set())
    with no_verdicts(tmp_path, monkeypatch):
        yield made


def first_case(op: Op) -> Case:
    return next(case for case in op.cases() if case.device == "cuda")


@pytest.mark.parametrize("name", OPS)
def test_before_volta_nothing_of_triton_is_tried(card, name: str) -> None:
    card(6, 1)
    op = find_op(name)
    for candidate in op.candidates:
        triton = "triton" in candidate.requires or candidate.name == "compiled"
        reasons = candidate.reasons(first_case(op))
        assert any("Volta" in reason and "6.1" in reason for reason in reasons) == (
            triton and candidate.absent is None
        )


def test_before_volta_plain_pytorch_runs_and_that_is_said_once(card, caplog) -> None:
    card(6, 1)
    with caplog.at_level(logging.WARNING, "bakeoff"), policy.using("heuristic"):
        for name in OPS:
            op = find_op(name)
            assert dispatch.choose(op, first_case(op), policy.current()).candidate is op.incumbent
    assert [r.getMessage().count("ops run on plain PyTorch") for r in caplog.records] == [1]


@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (9, 0), (12, 0)])
def test_from_volta_on_kernels_of_triton_are_tried(card, capability: tuple[int, int]) -> None:
    card(*capability)
    op = find_op("swiglu")
    assert op.candidate("triton").reasons(first_case(op)) == []


def test_bfloat16_is_native_from_ampere_on(card) -> None:
    for capability, native in {(6, 0): False, (7, 5): False, (8, 0): True, (9, 0): True}.items():
        card(*capability)
        assert hardware.native_bf16("cuda") is native
        assert not hardware.native_bf16("cpu")


def test_a_candidate_for_newer_cards_says_which(card) -> None:
    card(8, 0)
    op = find_op("rotary")
    newest = [c for c in op.candidates if c.min_capability > (8, 0)]
    meta = TensorMeta.dense((2, 8, 4, 64), torch.bfloat16)
    case = first_case(op).replace(q=meta, k=meta)
    for candidate in newest:
        if candidate.absent is None:
            assert "needs compute capability 9.0" in candidate.reasons(case)
