"""Chances that are learned from what was verified: calibrated, forgetful, apart for rows, the same for the same steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.adaptive.survival import NUM_DEPTHS, Survival


def steps(survival: Survival, rng: np.random.Generator, count: int, right_of: dict[int, float], rows: tuple[int, ...] = (0,)) -> None:
    """`count` steps with a token at each place of `right_of`, right so often, with the probability 0.6 by the drafter's word."""
    for _ in range(count):
        for row in rows:
            depths = np.array(list(right_of), np.int64)
            survival.observe(
                np.full(len(depths), row), depths, np.full(len(depths), np.log(0.6)), rng.random(len(depths)) < list(right_of.values())
            )


def chance(survival: Survival, depth: int, probability: float = 0.6, row: int = 99) -> float:
    return float(survival.chances(survival.odds([row]), np.array([depth]), np.log(np.array([probability])))[0])


def test_chances_become_the_shares_that_were_right() -> None:
    survival = Survival()
    steps(survival, np.random.default_rng(0), 2000, {0: 0.9, 1: 0.3, 6: 0.6})
    assert [chance(survival, d) for d in (0, 1, 6)] == pytest.approx([0.9, 0.3, 0.6], abs=0.05)
    assert chance(survival, 20) == chance(survival, NUM_DEPTHS - 1)


def test_a_drafter_is_hoped_for_and_soon_found_out() -> None:
    survival = Survival()
    assert chance(survival, 0, 0.2) > 0.5
    assert chance(survival, 0, 0.2) < chance(survival, 0, 0.9) < 1.0
    steps(survival, np.random.default_rng(0), 40, {0: 0.0})
    assert chance(survival, 0, row=0) < 0.1


def test_what_was_right_long_ago_fades() -> None:
    survival, rng = Survival(), np.random.default_rng(0)
    steps(survival, rng, 3000, {0: 0.95})
    steps(survival, rng, 3000, {0: 0.2})
    assert chance(survival, 0) < 0.35


def test_rows_differ_by_what_became_of_their_own_drafts() -> None:
    survival, rng = Survival(), np.random.default_rng(0)
    for _ in range(200):
        steps(survival, rng, 1, {0: 0.95}, (1,))
        steps(survival, rng, 1, {0: 0.2}, (2,))
    assert chance(survival, 0, row=1) > 0.8
    assert chance(survival, 0, row=2) < 0.4
    survival.forget(1)
    assert chance(survival, 0, row=1) == chance(survival, 0)
    survival.forget(1)


def test_a_row_that_is_passed_over_is_tried_again() -> None:
    survival, rng = Survival(), np.random.default_rng(0)
    steps(survival, rng, 400, {0: 0.8}, (1, 3))
    for _ in range(60):
        steps(survival, rng, 1, {0: 0.0}, (2,))
    low = chance(survival, 0, row=2)
    for _ in range(400):
        survival.passed_over([2, 77])
    assert low < 0.5 * chance(survival, 0, row=2)
    assert chance(survival, 0, row=2) == pytest.approx(chance(survival, 0), abs=0.03)


def test_a_drafter_without_probabilities_has_a_bucket_of_its_own() -> None:
    survival = Survival()
    for _ in range(300):
        survival.observe(np.array([0]), np.array([0]), None, np.array([True]))
    unknown = survival.chances(np.ones(1), np.array([0]), None)[0]
    assert unknown > 0.95
    assert chance(survival, 0) == chance(Survival(), 0)


def test_what_is_foreseen_of_a_draft_follows_what_is_drafted() -> None:
    survival = Survival()
    for _ in range(500):
        survival.drafted(np.array([0, 1, 0, 1]), np.log(np.array([0.9, 0.4, 0.2, 0.4])))
    survival.rest(1)
    found = survival.foreseen(survival.odds([3, 4]), 0, 3)
    good, poor, second = chance(survival, 0, 0.9), chance(survival, 0, 0.2), chance(survival, 1, 0.4)
    assert found[0].tolist() == found[1].tolist()
    assert found[0, 0] == pytest.approx([good, good, poor, poor], abs=0.02)
    assert found[0, 1] == pytest.approx(found[0, 0] * second, abs=0.02)
    assert found[0, 2] == pytest.approx(found[0, 1] * second, abs=0.02)  # nothing was ever drafted there: as at the place before
    assert survival.foreseen(np.ones(1), 1, 1)[0, 0] == pytest.approx([second] * 4, abs=0.02)


@given(st.integers(0, 9), st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 0.99)), max_size=30))
def test_cases_keep_the_mean_and_fall(first: int, drafted: list[tuple[int, float]]) -> None:
    survival = Survival()
    if drafted:
        depths, probabilities = (np.array(part) for part in zip(*drafted, strict=True))
        survival.drafted(depths, np.log(probabilities))
        survival.rest(1)
    odds = np.array([0.3, 1.0, 4.0])
    found, single = survival.foreseen(odds, first, 4), [survival.foreseen(odds, first + place, 1) for place in range(4)]
    assert found.mean(2) == pytest.approx(np.cumprod([s[:, 0].mean(1) for s in single], 0).T)
    assert (np.diff(found, axis=1) <= 1e-12).all()
    assert (np.diff(found, axis=2) <= 1e-12).all()
    assert (found[0] <= found[1]).all()
    assert (found[1] <= found[2]).all()


def test_the_same_steps_give_the_same_chances() -> None:
    pair = [Survival(), Survival()]
    for survival in pair:
        steps(survival, np.random.default_rng(7), 50, {0: 0.7, 1: 0.5}, (0, 1, 2))
    assert [chance(s, d, p) for s in pair[:1] for d in range(3) for p in (0.1, 0.6)] == [
        chance(s, d, p) for s in pair[1:] for d in range(3) for p in (0.1, 0.6)
    ]


@pytest.mark.parametrize("score", [0.0, -np.inf, -1e-300, -800.0])
def test_extreme_probabilities_have_a_chance(score: float) -> None:
    found = Survival().chances(np.ones(1), np.array([0]), np.array([score]))
    assert 0.0 < found[0] < 1.0
