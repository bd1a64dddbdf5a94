"""The best draft of a step, beside every other draft of small steps."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from echelon.adaptive.planning import Underway, admitted, drafted_further, survivals
from echelon.draft import node_depths

JAGGED = np.array([10.0, 10.5, 11.0, 16.0, 16.2, 16.4, 25.0, 25.1, 25.2, 25.3, 40.0, 40.1, 40.2, 40.3])  # of a step by drafted tokens


LEVEL = np.array([0.0, 0.6, 0.7, 0.8])  # milliseconds of drafting by rows


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    count = draw(st.integers(0, 9))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    return parents, draw(st.lists(st.floats(0.01, 0.99), min_size=count, max_size=count))


@given(forests(), st.integers(1, 4), st.floats(0.0, 5.0))
def test_what_is_admitted_is_connected_and_best(forest: tuple[list[int], list[float]], num_rows: int, spent_ms: float) -> None:
    parents, chances = forest
    depths = np.array(node_depths(parents), np.int64)
    survival = survivals(np.array(parents, np.int64), depths, np.array(chances))
    above = [survival[parent] if parent >= 0 else 1.0 for parent in parents]
    assert survival == pytest.approx(np.array(chances) * above)
    found = admitted(survival, depths, num_rows, JAGGED, spent_ms)
    assert all(parent < 0 or found[parent] for node, parent in enumerate(parents) if found[node])

    def rate(kept: tuple[bool, ...]) -> float:
        return float((num_rows + survival[list(kept)].sum()) / (spent_ms + JAGGED[sum(kept)]))

    connected = [
        kept
        for kept in product((False, True), repeat=len(parents))
        if all(parent < 0 or kept[parent] for node, parent in enumerate(parents) if kept[node])
    ]
    assert rate(tuple(found.tolist())) >= max(map(rate, connected)) - 1e-12


chains = st.lists(st.lists(st.floats(0.02, 0.99), min_size=2, max_size=2), min_size=1, max_size=3)


def certain(chances: NDArray[np.float64], limits: NDArray[np.int64]) -> NDArray[np.float64]:
    """Survivals of further tokens in one case, at most `limits` of each path."""
    survival = np.cumprod(chances, 1)
    return np.where(np.arange(survival.shape[1]) < limits[:, None], survival, 0.0)[..., None]


@given(chains, st.lists(st.floats(0.01, 1.0), max_size=3), st.integers(1, 4), st.floats(0.0, 3.0), st.data())
def test_what_is_drafted_further_is_nearly_the_best(
    chances: list[list[float]], drafted: list[float], num_sampled: int, spent_ms: float, data: st.DataObject
) -> None:
    limits = np.array([data.draw(st.integers(0, 2)) for _ in chances])
    further = certain(np.array(chances), limits)
    goes_on, promised = drafted_further(Underway(num_sampled, np.array(drafted), spent_ms), further, JAGGED, LEVEL)
    likeliest = sorted(drafted, reverse=True)

    def rate(lengths: tuple[int, ...]) -> float:
        at_place = np.array([sum(n > place for n in lengths) for place in range(2)])
        gained = sum(float(row[:n].sum()) for row, n in zip(further, lengths, strict=True))
        return max(
            (num_sampled + sum(likeliest[:kept]) + gained) / (spent_ms + LEVEL[at_place].sum() + JAGGED[kept + sum(lengths)])
            for kept in range(len(drafted) + 1)
        )

    rates = {lengths: rate(lengths) for lengths in product(*(range(limit + 1) for limit in limits.tolist()))}
    assert promised >= 0.97 * max(rates.values())
    if goes_on.any():
        reached = [value for lengths, value in rates.items() if [n > 0 for n in lengths] == goes_on.tolist()]
        assert promised == pytest.approx(max(reached), rel=0.03)
        assert promised > rates[(0,) * len(chances)]
    else:
        assert promised == pytest.approx(rates[(0,) * len(chances)])


def test_a_token_is_worth_its_good_cases() -> None:
    step, flat = Underway(1), np.arange(1.0, 12.0)  # a drafted token costs as much as the step without: it must be nearly certain
    level = np.array([0.0, 0.02])
    sure_or_wrong = np.array([[[0.99, 0.99, 0.01, 0.01]]])
    assert drafted_further(step, sure_or_wrong, flat, level)[0].tolist() == [False]
    assert drafted_further(step, sure_or_wrong, 1.0 + 0.8 * np.arange(11.0), level)[0].tolist() == [True]
    mean = np.full((1, 1, 4), sure_or_wrong.mean())
    assert drafted_further(step, mean, 1.0 + 0.8 * np.arange(11.0), level)[0].tolist() == [False]


def test_what_is_drafted_and_bad_is_not_in_the_way() -> None:
    step_ms = np.array([10.0, 10.0, 10.0, 18.0, 26.0, 34.0])  # two drafted tokens are free
    bad = Underway(1, np.array([0.9, 0.05, 0.05]))
    assert drafted_further(bad, np.full((1, 1, 1), 0.8), step_ms, np.array([0.0, 0.1]))[0].tolist() == [True]


def test_a_draft_that_has_to_begin_is_worth_less_than_one_that_goes_on() -> None:
    step, further, step_ms, level_ms = Underway(1), np.full((1, 1, 1), 0.8), np.array([10.0, 10.0]), np.array([0.0, 1.0])
    assert drafted_further(step, further, step_ms, level_ms)[0].tolist() == [True]
    assert drafted_further(step, further, step_ms, level_ms, 7.5)[0].tolist() == [False]
    deep = np.cumprod(np.full((1, 8, 1), 0.8), 1)
    assert drafted_further(step, deep, np.full(9, 10.0), level_ms, 7.5)[0].tolist() == [True], "for many tokens it is worth beginning"


def test_no_rows_and_no_room_are_a_plain_step() -> None:
    step = Underway(2)
    assert drafted_further(step, np.zeros((0, 4, 2)), JAGGED, LEVEL)[0].tolist() == []
    assert drafted_further(step, np.zeros((2, 3, 2)), JAGGED, LEVEL)[0].tolist() == [False, False]
    assert drafted_further(step, np.zeros((2, 0, 2)), JAGGED, LEVEL)[0].tolist() == [False, False]
    assert admitted(np.zeros(0), np.zeros(0, np.int64), 3, JAGGED, 0.0).tolist() == []
