"""Costs of steps: curves through what was measured, and what later steps correct."""

from __future__ import annotations

import numpy as np
import pytest

from echelon import ConfigError
from echelon.adaptive.cost_table import CostCurve, CostTable, monotone

CURVE = CostCurve(tokens=(1, 4, 8), milliseconds=(10.0, 13.0, 21.0))


def test_a_curve_goes_through_its_points_and_on() -> None:
    assert CURVE.at(np.array([0, 1, 2, 4, 6, 8, 10])).tolist() == [0.0, 10.0, 11.0, 13.0, 17.0, 21.0, 25.0]


@pytest.mark.parametrize(
    ("times", "found"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
        ([5.0, 4.0, 6.0], [4.5, 4.5, 6.0]),
        ([3.0, 2.0, 1.0], [2.0, 2.0, 2.0]),
        ([1.0, 9.0, 2.0], [1.0, 5.5, 5.5]),
    ],
)
def test_noise_in_measured_times_is_levelled(times: list[float], found: list[float]) -> None:
    assert monotone([1, 2, 3], times).milliseconds == pytest.approx(found)


@pytest.mark.parametrize(
    "broken", [{"tokens": ()}, {"tokens": (1,)}, {"tokens": (4, 1, 8)}, {"milliseconds": (1.0, 2.0)}, {"milliseconds": (1.0, 0.0, 2.0)}]
)
def test_what_is_no_curve_is_refused(broken: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(ConfigError):
        CostCurve(**{"tokens": (1, 4, 8), "milliseconds": (1.0, 2.0, 3.0)} | broken)


def test_a_step_costs_its_tokens_keys_and_places() -> None:
    table = CostTable(step=CURVE, key_ms=0.01, place_ms=0.1, drafting=CostCurve(tokens=(1, 2), milliseconds=(1.0, 1.5)))
    assert table.step_ms(np.array([4, 8]), 100, np.array([0, 5])).tolist() == [14.0, 22.5]
    assert table.level_ms(np.array([0, 1, 3])).tolist() == [0.0, 1.0, 2.0]
    assert CostTable(step=CURVE).level_ms(np.array([[3, 4]])).tolist() == [[0.0, 0.0]]
    assert table.model_copy(update={"start_ms": 5.0}).drafting_ms(2, np.arange(3)).tolist() == [0.0, 6.5, 8.0]
    assert CostTable(**table.model_dump()) == table
