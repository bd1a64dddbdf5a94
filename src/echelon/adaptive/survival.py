"""The chance that a drafted token is what the target chooses, where all before it in the draft were, learned from what was verified.

A chance depends on the place in the draft and on the probability that the drafter gave the token, and on how the row has done so far. It is
a share of counts, in which older steps fade, by buckets of these; buckets with few counts lean on those of any place, and these on the
drafter's own word, taken hopefully at first. Counts in a fixed order: the same requests give the same chances.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.draft import Float64, Int64

Bool = NDArray[np.bool_]

NUM_DEPTHS = 8  # places of a draft that are told apart; later ones count as the last
LOG_ODDS = np.array([-4.0, -3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # between buckets of the drafter's probability
UNKNOWN = len(LOG_ODDS) + 1  # the bucket of a drafter without probabilities
HOPE = 0.5  # of what the drafter's word leaves open, so much is expected to be right at first
BUCKET_PRIOR, WORD_PRIOR, ROW_PRIOR = 8.0, 4.0, 8.0  # counts that each estimate leans on the next coarser one with
HALF_LIFE = 1024.0  # steps until a count is worth half
ROW_HALF_LIFE = 64.0  # steps of a row


@dataclass
class _RowRecord:
    """What came of a row's drafts beside what was expected, in fading counts."""

    right: float = 0.0
    wrong: float = 0.0
    expected_right: float = 0.0
    expected_wrong: float = 0.0

    @property
    def shift(self) -> float:
        """Log-odds by which the row does better than others."""
        better = (self.right + ROW_PRIOR) / (self.expected_right + ROW_PRIOR)
        worse = (self.wrong + ROW_PRIOR) / (self.expected_wrong + ROW_PRIOR)
        return float(np.log(better / worse))

    def count(self, num_right: float, num_tried: int, expected: float) -> None:
        """Add the tokens of a step that were tried, of which so many were expected to be right."""
        fade = 0.5 ** (1.0 / ROW_HALF_LIFE)
        self.right = self.right * fade + num_right
        self.wrong = self.wrong * fade + num_tried - num_right
        self.expected_right = self.expected_right * fade + expected
        self.expected_wrong = self.expected_wrong * fade + num_tried - expected


class Survival:
    """Counts of drafted tokens that were verified, by place and by the drafter's probability, and of rows."""

    def __init__(self) -> None:
        shape = NUM_DEPTHS, UNKNOWN + 1
        self._right, self._tried = np.zeros(shape), np.zeros(shape)
        self._drafted = np.zeros(shape)  # the best of every draft at each place, verified or not
        self._rows: dict[int, _RowRecord] = {}
        self._table = self._chances()

    def chances(self, rows: Int64, depths: Int64, scores: Float64) -> Float64:
        """float64[N] for tokens at `depths` int64[N] (0 first) of drafts of `rows` int64[N]; `scores` float64[N] are the logarithms of the
        drafter's probabilities, NaN where it has none.
        """
        return _shifted(self._table[_places(depths), _buckets(scores)], self._shifts(rows))

    def expected(self, rows: Int64, num_places: int) -> Float64:
        """float64[B, num_places]: chances at each place of a draft of `rows` int64[B] that is not made yet."""
        hoped, drafted = (self._drafted * self._table).sum(1).tolist(), self._drafted.sum(1).tolist()
        means, mean = [], float(self._table[0, UNKNOWN])
        for place in range(num_places):
            at = min(place, NUM_DEPTHS - 1)
            mean = (hoped[at] + WORD_PRIOR * mean) / (drafted[at] + WORD_PRIOR)
            means.append(mean)
        return _shifted(np.array([means]), self._shifts(rows)[:, None])

    def drafted(self, depths: Int64, scores: Float64) -> None:
        """Note what was drafted, verified or not: the best token at each of `depths` int64[N], with `scores` float64[N] as in `chances`."""
        np.add.at(self._drafted, (_places(depths), _buckets(scores)), 1.0)

    def observe(self, rows: Int64, depths: Int64, scores: Float64, was_right: Bool) -> None:
        """Learn from a step: tokens whose parents were kept, and whether they were; as in `chances`, bool[N] the last."""
        fade = 0.5 ** (1.0 / HALF_LIFE)
        for counts in (self._right, self._tried, self._drafted):
            np.multiply(counts, fade, out=counts)
        at, expected = (_places(depths), _buckets(scores)), self._table[_places(depths), _buckets(scores)]
        np.add.at(self._tried, at, 1.0)
        np.add.at(self._right, at, was_right.astype(np.float64))
        ids, own = np.unique(rows, return_inverse=True)
        sums = (np.bincount(own, weights) for weights in (was_right, None, expected))
        for row, num_right, num_tried, hoped in zip(ids.tolist(), *(found.tolist() for found in sums), strict=True):
            self._rows.setdefault(row, _RowRecord()).count(num_right, num_tried, hoped)
        self._table = self._chances()

    def forget(self, row: int) -> None:
        """The row has ended; one that was never seen is fine."""
        self._rows.pop(row, None)

    def _shifts(self, rows: Int64) -> Float64:
        shifts = {row: self._rows[row].shift if row in self._rows else 0.0 for row in dict.fromkeys(rows.tolist())}
        return np.array([shifts[row] for row in rows.tolist()])

    def _chances(self) -> Float64:
        """float64[NUM_DEPTHS, buckets]"""
        word = _word()
        at_any_place = (self._right.sum(0) + WORD_PRIOR * word) / (self._tried.sum(0) + WORD_PRIOR)
        return np.asarray((self._right + BUCKET_PRIOR * at_any_place) / (self._tried + BUCKET_PRIOR))


def _word() -> Float64:
    """float64[buckets]: what a drafter's word is worth before anything was verified."""
    middles = np.concatenate([[LOG_ODDS[0] - 1.0], (LOG_ODDS[1:] + LOG_ODDS[:-1]) / 2.0, [LOG_ODDS[-1] + 1.0], [0.0]])
    stated = 1.0 / (1.0 + np.exp(-middles))
    return np.asarray(stated + HOPE * (1.0 - stated))


def _places(depths: Int64) -> Int64:
    return np.minimum(depths, NUM_DEPTHS - 1)


def _buckets(scores: Float64) -> Int64:
    with np.errstate(divide="ignore", invalid="ignore"):
        log_odds = scores - np.log(-np.expm1(np.minimum(scores, 0.0)))
    found = np.searchsorted(LOG_ODDS, log_odds, side="right")
    return np.where(np.isnan(scores), UNKNOWN, found)


def _shifted(chances: Float64, shifts: Float64) -> Float64:
    """Chances with their log-odds shifted."""
    odds = chances / (1.0 - chances) * np.exp(shifts)
    return np.asarray(odds / (1.0 + odds))
