"""The unit lane: contests measure for a fifth of their usual time, enough to tell what tests let compete."""

import pytest

from bakeoff.select.choose import tune


@pytest.fixture(autouse=True)
def _short_contests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_PER_KEY_S", 0.3)
