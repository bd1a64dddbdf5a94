"""The chance that a drafted token is what the target chooses, where all before it in the draft were, learned from what was verified.

A chance depends on the place in the draft and on the probability that the drafter gave the token, and on how the row has done so far. It is
a share of counts, in which older steps fade, by buckets of these; buckets with few counts lean on those of any place, and these on the
drafter's own word, taken hopefully at first. Counts in a fixed order: the same requests give the same chances.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.draft import Float64, Int64

Bool = NDArray[np.bool_]

NUM_DEPTHS = 8  # places of a draft that are told apart; later ones count as the last
LOG_ODDS = np.array([-4.0, -3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # between buckets of the drafter's probability
CASES = 4  # equally likely ones, of what a draft that is not made yet may be like
UNKNOWN = len(LOG_ODDS) + 1  # the bucket of a drafter without probabilities
HOPE = 0.5  # of what the drafter's word leaves open, so much is expected to be right at first
BUCKET_PRIOR, WORD_PRIOR, ROW_PRIOR = 8.0, 4.0, 8.0  # counts that each estimate leans on the next coarser one with
FADE, ROW_FADE = 0.5 ** (1 / 1024), 0.5 ** (1 / 64)  # of a count in a step: of all rows, of one
REST_FADE = 0.5 ** (1 / 512)  # of a count of all rows in a plain step


@dataclass
class _RowRecord:
    """What came of a row's drafts beside what was expected, in fading counts."""

    right: float = 0.0
    wrong: float = 0.0
    expected_right: float = 0.0
    expected_wrong: float = 0.0

    @property
    def odds(self) -> float:
        """How many times better than others' the row's odds are."""
        better = (self.right + ROW_PRIOR) / (self.expected_right + ROW_PRIOR)
        worse = (self.wrong + ROW_PRIOR) / (self.expected_wrong + ROW_PRIOR)
        return better / worse

    def count(self, num_right: float, num_tried: int, expected: float, num_steps: int) -> None:
        """Add the tokens of so many steps that were tried, of which so many were expected to be right."""
        self.fade(ROW_FADE**num_steps)
        self.right += num_right
        self.wrong += num_tried - num_right
        self.expected_right += expected
        self.expected_wrong += num_tried - expected

    def fade(self, factor: float) -> None:
        """Make what was counted weigh less."""
        self.right *= factor
        self.wrong *= factor
        self.expected_right *= factor
        self.expected_wrong *= factor


class Survival:
    """Counts of drafted tokens that were verified, by place and by the drafter's probability, and of rows."""

    def __init__(self) -> None:
        shape = NUM_DEPTHS, UNKNOWN + 1
        self._right, self._tried = np.zeros(shape), np.zeros(shape)
        self._drafted = np.zeros(shape)  # the best of every draft at each place, verified or not
        self._rows: dict[int, _RowRecord] = {}
        self._table = self._chances()
        self._cases: Float64 | None = None  # [NUM_DEPTHS, CASES], when they are asked for

    def odds(self, rows: SequenceOf[int]) -> Float64:
        """float64[B]: how many times better than others' the odds of these rows' drafts are."""
        return np.array([record.odds if (record := self._rows.get(row)) is not None else 1.0 for row in rows])

    def chances(self, odds: Float64, depths: Int64, scores: Float64 | None) -> Float64:
        """float64[N] for tokens at `depths` int64[N] (0 first) of drafts of rows with `odds` float64[N]; `scores` float64[N] are the
        logarithms of the drafter's probabilities, None where it has none.
        """
        return _shifted(self._table[_places(depths), _buckets(scores, len(depths))], odds)

    def foreseen(self, odds: Float64, first: int, num_places: int) -> Float64:
        """float64[B, num_places, CASES]: survivals of tokens that are not drafted yet, from place `first` on, in equally likely cases, best
        first; of rows with `odds` float64[B]. Chances at different places are taken for independent.
        """
        if self._cases is None:
            self._cases = self._in_cases()
        places = _places(first + np.arange(num_places))
        chances = _shifted(self._cases[places], odds[:, None, None])
        found = np.empty(chances.shape)
        for place in range(num_places):
            if place == 0:
                found[:, 0] = chances[:, 0]
            else:
                products = (found[:, place - 1, :, None] * chances[:, place, None]).reshape(len(odds), -1)
                products.sort(1)
                found[:, place] = products[:, ::-1].reshape(-1, CASES, CASES).mean(2)
        return found

    def means(self) -> Float64:
        """float64[NUM_DEPTHS]: the mean chance of the likeliest token at each place of a draft that is not made yet."""
        return np.asarray((self._shares() * self._table).sum(1))

    def drafted(self, depths: Int64, scores: Float64 | None) -> None:
        """Note what was drafted, verified or not: the best token at each of `depths` int64[N], with `scores` float64[N] as in `chances`."""
        np.add.at(self._drafted, (_places(depths), _buckets(scores, len(depths))), 1.0)
        self._cases = None

    def observe(self, rows: Int64, depths: Int64, scores: Float64 | None, was_right: Bool, num_steps: int = 1) -> None:
        """Learn from so many steps: tokens of `rows` int64[N] whose parents were kept, and whether they were bool[N]; as in `chances`."""
        fade = FADE**num_steps
        for counts in (self._right, self._tried, self._drafted):
            np.multiply(counts, fade, out=counts)
        at = _places(depths), _buckets(scores, len(depths))
        expected = self._table[at]
        np.add.at(self._tried, at, 1.0)
        np.add.at(self._right, at, was_right.astype(np.float64))
        ids, own = np.unique(rows, return_inverse=True)
        sums = (np.bincount(own, weights) for weights in (was_right, None, expected))
        for row, num_right, num_tried, hoped in zip(ids.tolist(), *(found.tolist() for found in sums), strict=True):
            self._rows.setdefault(row, _RowRecord()).count(num_right, num_tried, hoped, num_steps)
        self._table = self._chances()
        self._cases = None

    def passed_over(self, rows: SequenceOf[int], num_steps: int = 1) -> None:
        """Steps without drafts for `rows`: what is known of them apart from others fades, so that they are tried again."""
        for row in rows:
            if (record := self._rows.get(row)) is not None:
                record.fade(ROW_FADE**num_steps)

    def rest(self, num_steps: int) -> None:
        """Steps in which nothing seemed to pay: what is known fades, so that a few probes can outweigh it."""
        self._right *= REST_FADE**num_steps
        self._tried *= REST_FADE**num_steps
        self._table = self._chances()
        self._cases = None

    def forget(self, row: int) -> None:
        """The row has ended; one that was never seen is fine."""
        self._rows.pop(row, None)

    def _chances(self) -> Float64:
        """float64[NUM_DEPTHS, buckets]"""
        at_any_place = (self._right.sum(0) + WORD_PRIOR * WORD) / (self._tried.sum(0) + WORD_PRIOR)
        return np.asarray((self._right + BUCKET_PRIOR * at_any_place) / (self._tried + BUCKET_PRIOR))

    def _in_cases(self) -> Float64:
        """float64[NUM_DEPTHS, CASES]: mean chances of the best part of what is drafted at a place, of the next best, and so on."""
        order = np.argsort(-self._table, 1, kind="stable")
        upto = np.cumsum(np.take_along_axis(self._shares(), order, 1), 1)
        edges = np.concatenate([np.zeros((NUM_DEPTHS, 1)), upto[:, :-1], np.ones((NUM_DEPTHS, 1))], 1)[:, None]
        begin, end = np.arange(CASES)[:, None] / CASES, np.arange(1, CASES + 1)[:, None] / CASES
        overlap = np.maximum(np.minimum(edges[..., 1:], end) - np.maximum(edges[..., :-1], begin), 0.0)  # [NUM_DEPTHS, CASES, buckets]
        return np.asarray((overlap * np.take_along_axis(self._table, order, 1)[:, None]).sum(2) * CASES)

    def _shares(self) -> Float64:
        """float64[NUM_DEPTHS, buckets]: how often each bucket is drafted at a place."""
        share, shares = np.zeros(UNKNOWN + 1), []
        share[UNKNOWN] = 1.0  # nothing is known; later places lean on earlier ones
        for counts, count in zip(self._drafted, self._drafted.sum(1).tolist(), strict=True):
            share = (counts + WORD_PRIOR * share) / (count + WORD_PRIOR)
            shares.append(share)
        return np.array(shares)


def _word() -> Float64:
    """float64[buckets]: what a drafter's word is worth before anything was verified."""
    middles = np.concatenate([[LOG_ODDS[0] - 1.0], (LOG_ODDS[1:] + LOG_ODDS[:-1]) / 2.0, [LOG_ODDS[-1] + 1.0], [0.0]])
    stated = 1.0 / (1.0 + np.exp(-middles))
    return np.asarray(stated + HOPE * (1.0 - stated))


WORD = _word()


def _places(depths: Int64) -> Int64:
    return np.minimum(depths, NUM_DEPTHS - 1)


def _buckets(scores: Float64 | None, count: int) -> Int64:
    if scores is None:
        return np.full(count, UNKNOWN)
    with np.errstate(divide="ignore"):
        log_odds = scores - np.log(-np.expm1(np.minimum(scores, 0.0)))
    return np.searchsorted(LOG_ODDS, log_odds, side="right")


def _shifted(chances: Float64, odds: Float64) -> Float64:
    """Chances whose odds are so many times better."""
    better = chances / (1.0 - chances) * odds
    return np.asarray(better / (1.0 + better))
