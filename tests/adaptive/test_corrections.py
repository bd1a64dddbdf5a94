"""Factors between what a cost table says and what steps take: found, told apart, followed as the machine changes, and bounded."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.adaptive.corrections import LEAST, MOST, DraftingFactors, StepFactors

WIDTHS = (1, 2, 4, 8, 16, 32)


def test_nothing_is_corrected_at_first() -> None:
    assert StepFactors(WIDTHS).at(np.array([1, 3, 7, 1000])).tolist() == [1.0] * 4


def test_factors_of_several_widths_are_found() -> None:
    """Narrow steps take half as long again as the table says and wide ones twice, as with a table from another minute."""
    factors, rng = StepFactors(WIDTHS), np.random.default_rng(0)
    for _ in range(400):
        tokens = int(rng.integers(4, 20))
        truth = float(np.interp(np.log2(tokens), [3.0, 4.0], [1.5, 2.0]))
        factors.observe(tokens, 10.0, 10.0 * truth * float(np.exp(0.05 * rng.normal())))
    assert factors.at(np.array([4, 6])) == pytest.approx(1.5, rel=0.06)
    assert factors.at(np.array([16, 18])) == pytest.approx(2.0, rel=0.06)
    assert 1.0 < factors.at(np.array([1]))[0] < 1.6, "what was never seen goes with what lies next to it"


def test_a_machine_that_slows_down_is_believed_within_200_steps() -> None:
    """All widths at once, of which two are seen."""
    factors = StepFactors(WIDTHS)
    for speed in (1.0, 2.0):
        for step in range(200):
            factors.observe(8 + 4 * (step % 2), 10.0, speed * 10.0)
    assert factors.at(np.array([8, 12])) == pytest.approx(2.0, rel=0.05)
    assert factors.at(np.array([2, 32])) == pytest.approx(2.0, rel=0.25)


def test_plain_steps_tell_a_width_apart_that_drafts_never_show() -> None:
    drafting, told_apart = StepFactors(WIDTHS), StepFactors(WIDTHS)
    for step in range(300):
        speed = 1.0 if step < 150 else 2.0
        drafting.observe(16, 10.0, speed * 15.0)
        told_apart.observe(*((8, 10.0, speed * 10.0) if step % 20 == 0 else (16, 10.0, speed * 15.0)))
    for factors in (drafting, told_apart):
        assert factors.at(np.array([16]))[0] == pytest.approx(3.0, rel=0.03)
    assert drafting.at(np.array([8]))[0] > 2.2
    assert told_apart.at(np.array([8]))[0] == pytest.approx(2.0, rel=0.06)


def test_no_measurement_is_believed_without_bound() -> None:
    factors = StepFactors(WIDTHS)
    for measured, bound in ((1e9, MOST), (1e-9, LEAST)):
        for _ in range(200):
            factors.observe(1, 10.0, measured)
        assert factors.at(np.array([1])).tolist() == [bound]
        assert ((factors.at(np.array(WIDTHS)) >= LEAST) & (factors.at(np.array(WIDTHS)) <= MOST)).all()


def test_the_beginning_of_a_draft_is_told_from_its_levels() -> None:
    factors, rng = DraftingFactors(), np.random.default_rng(0)
    for _ in range(100):
        levels = float(rng.integers(1, 8))
        factors.observe(1.0, 0.5 * levels, 1.8 + 0.4 * levels)
    assert (factors.start, factors.level) == pytest.approx((1.8, 0.8), rel=0.05)


def test_levels_alone_are_corrected_where_a_draft_begins_at_once() -> None:
    factors = DraftingFactors()
    for _ in range(50):
        factors.observe(0.0, 2.0, 5.0)
    assert factors.level == pytest.approx(2.5, rel=0.03)


def test_one_slow_draft_ends_no_drafting() -> None:
    factors = DraftingFactors()
    factors.observe(1.0, 4.0, 40.0)
    assert max(factors.start, factors.level) < 1.4
    for _ in range(60):
        factors.observe(1.0, 4.0, 5.0)
    assert (factors.start, factors.level) == pytest.approx((1.0, 1.0), abs=0.15)


def test_what_is_not_seen_for_long_goes_back_to_the_table_and_one_hiccup_moves_it_little() -> None:
    factors = StepFactors(WIDTHS)
    for _ in range(30):
        factors.observe(32, 10.0, 25.0)
    dear = factors.at(np.array([32]))[0]
    for _ in range(5_000):
        factors.observe(2, 10.0, 10.0)
    assert dear > 2.2
    assert factors.at(np.array([32]))[0] == pytest.approx(1.0, abs=0.05)
    factors.observe(32, 10.0, 60.0)
    assert factors.at(np.array([32]))[0] < 1.3
    resting = DraftingFactors()
    for _ in range(50):
        resting.observe(1.0, 4.0, 20.0)
    assert resting.level > 3.0
    resting.rest(3_000)
    assert resting.level < 1.2
