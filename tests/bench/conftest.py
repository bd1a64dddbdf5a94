from __future__ import annotations

import math

import pytest

from echelon.drafters.guard import CallTimer


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No drafter is too slow: how busy the machine is decides nothing, though a cell with a drafter that failed fails."""
    monkeypatch.setattr(CallTimer, "is_too_slow", lambda *_: False)
    monkeypatch.setattr(CallTimer, "limit", lambda *_: math.inf)
