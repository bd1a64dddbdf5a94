"""The best draft of a step, beside every other draft of small steps."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.adaptive.planning import Underway, admitted, draft_lengths, survivals
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


@given(st.lists(st.lists(st.floats(0.02, 0.99), min_size=3, max_size=3), min_size=1, max_size=3), st.integers(0, 2), st.data())
def test_lengths_are_nearly_the_best(chances: list[list[float]], num_others: int, data: st.DataObject) -> None:
    limits = np.array([data.draw(st.integers(0, 3)) for _ in chances])
    values, num_sampled = np.array(chances), len(chances) + num_others
    lengths, promised = draft_lengths(Underway(num_sampled), np.ones(len(values)), values, limits, JAGGED, LEVEL)
    assert (lengths <= limits).all()

    def rate(chosen: tuple[int, ...]) -> float:
        at_place = np.array([sum(n > place for n in chosen) for place in range(3)])
        gained = sum(float(np.cumprod(row)[:n].sum()) for row, n in zip(values, chosen, strict=True))
        return float((num_sampled + gained) / (LEVEL[at_place].sum() + JAGGED[sum(chosen)]))

    assert rate(tuple(lengths.tolist())) == pytest.approx(promised)
    best = max(rate(chosen) for chosen in product(*(range(limit + 1) for limit in limits.tolist())))
    assert promised >= rate((0,) * len(chances))
    assert promised >= 0.97 * best


@given(
    st.lists(st.lists(st.floats(0.02, 0.99), min_size=2, max_size=2), min_size=1, max_size=3),
    st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3),
    st.integers(0, 3),
    st.floats(0.0, 3.0),
)
def test_what_is_drafted_already_is_paid_for(chances: list[list[float]], drafted: list[float], count: int, spent_ms: float) -> None:
    values, survival = np.array(chances), np.array(drafted[: len(chances)])
    step = Underway(len(chances) + count * 0.5, count, spent_ms)
    lengths, promised = draft_lengths(step, survival, values, np.full(len(values), 2), JAGGED, LEVEL)

    def rate(chosen: tuple[int, ...]) -> float:
        at_place = np.array([sum(n > place for n in chosen) for place in range(2)])
        gained = sum(s * float(np.cumprod(row)[:n].sum()) for s, row, n in zip(survival.tolist(), values, chosen, strict=True))
        return float((step.emitted + gained) / (spent_ms + LEVEL[at_place].sum() + JAGGED[count + sum(chosen)]))

    assert rate(tuple(lengths.tolist())) == pytest.approx(promised)
    assert promised >= 0.97 * max(map(rate, product(range(3), repeat=len(chances))))


def test_no_rows_and_no_room_are_a_plain_step() -> None:
    step = Underway(2.0)
    nothing = np.zeros(0), np.zeros((0, 4)), np.zeros(0, np.int64)
    assert draft_lengths(step, *nothing, JAGGED, LEVEL)[0].tolist() == []
    assert draft_lengths(step, np.ones(2), np.full((2, 3), 0.9), np.zeros(2, np.int64), JAGGED, LEVEL)[0].tolist() == [0, 0]
    assert draft_lengths(step, np.ones(2), np.zeros((2, 0)), np.full(2, 5), JAGGED, LEVEL)[0].tolist() == [0, 0]
    assert admitted(np.zeros(0), np.zeros(0, np.int64), 3, JAGGED, 0.0).tolist() == []
