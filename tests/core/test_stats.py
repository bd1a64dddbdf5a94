"""What is counted and timed of steps."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

from echelon.stats import StepTimer


def test_a_clock_that_waits_for_the_device_is_not_read_where_a_device_works_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    readings, own = count(), count(step=5)
    monkeypatch.setattr("echelon.stats.time", SimpleNamespace(perf_counter=lambda: float(next(own))))
    timer = StepTimer(lambda: float(next(readings)))
    with timer("forward"):
        pass
    with timer("schedule", is_overlapped=True):
        pass
    assert next(readings) == 2, "an overlapped part waited"
    with timer("forward"):
        pass
    seconds = timer.take()
    assert seconds["forward"] == 2.0 and seconds["schedule"] == 5.0 and not any(timer.take().values())
