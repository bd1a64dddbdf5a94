"""Measuring what steps cost on a machine with other work."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, count, repeat

import pytest

from echelon.adaptive.measure import PATIENCE, TURNS, _least


class Machine:
    """A clock that works move on, by milliseconds each time they are done."""

    def __init__(self) -> None:
        self.now, self.num_done = 0.0, 0

    def work(self, times: Iterator[float]) -> None:
        self.num_done += 1
        self.now += next(times) / 1e3

    def prepare(self) -> None:
        """What comes before a turn takes long, and is not its own."""
        self.now += 0.005

    def least(self, *times: Iterator[float]) -> list[float]:
        return _least([lambda own=own: self.work(own) for own in times], lambda: None, self.prepare, lambda: self.now)  # type: ignore[misc]


def test_a_single_short_turn_is_not_believed() -> None:
    """What comes before: a call that loads code, and a turn that is not counted."""
    machine = Machine()
    assert machine.least(chain([90.0, 90.0], [40.0, 10.0, 40.0, 40.0, 40.0, 10.5], repeat(1.0))) == pytest.approx([10.0])


def test_what_is_sure_takes_no_more_turns() -> None:
    machine = Machine()
    disturbed = chain([50.0] * (TURNS + 1), repeat(20.0))
    assert machine.least(repeat(10.0), disturbed) == pytest.approx([10.0, 50.0])
    assert machine.num_done == 1 + 2 * (TURNS + 1)
    machine = Machine()
    assert machine.least(repeat(300.0)) == pytest.approx([300.0])
    assert machine.num_done == 4, "a long one is done twice besides"


def test_patience_ends_where_no_two_turns_agree() -> None:
    machine = Machine()
    (least,) = machine.least(float(2**n) for n in count(5))
    assert least == pytest.approx(128.0)
    assert PATIENCE < machine.now < 4 * PATIENCE
