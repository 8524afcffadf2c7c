"""The unit lane: contests measure for a fifth of their usual time, enough to tell what tests let compete."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _short_contests(monkeypatch: pytest.MonkeyPatch) -> None:
    tune = sys.modules.get("bakeoff.select.choose.tune")
    if tune is not None:  # a test of nothing else needs no torch
        monkeypatch.setattr(tune, "_PER_KEY_S", 0.3)
