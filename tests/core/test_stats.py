"""What is counted and timed of steps."""

from __future__ import annotations

from itertools import count

from echelon.stats import StepTimer


def test_a_clock_that_waits_for_the_device_is_not_read_where_a_device_works_ahead() -> None:
    readings = count()
    timer = StepTimer(lambda: float(next(readings)))
    with timer("forward"):
        pass
    with timer("schedule", is_overlapped=True):
        pass
    assert next(readings) == 2, "an overlapped part waited"
    with timer("forward"):
        pass
    seconds = timer.take()
    assert seconds["forward"] == 2.0 and 0.0 <= seconds["schedule"] < 1.0 and not any(timer.take().values())
