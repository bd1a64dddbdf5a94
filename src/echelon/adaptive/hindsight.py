"""What was decided beside what happened: predicted and measured milliseconds, and the best single draft length in hindsight."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from echelon.adaptive.planning import Bool
from echelon.adaptive.survival import NUM_DEPTHS
from echelon.draft import Draft, Float64, Int64

LONGEST = NUM_DEPTHS  # draft lengths that are compared
MOST_REMEMBERED = 1024  # steps whose errors are


class ChainFates(NamedTuple):
    """What a step has shown of the likeliest chains of B rows that emitted.

    num_right  int64[B]: tokens of it, from the first on, that the target chose
    is_open    bool[B]: whether nothing is known of the next one, as it was not verified
    available  int64[B]: tokens that the drafter had for it at most
    share      float64[B]: how likely it had any, 1 where it was asked
    chances    float64[B, LONGEST]: of a token at each place, if those before it are kept
    """

    num_right: Int64
    is_open: Bool
    available: Int64
    share: Float64
    chances: Float64

    @classmethod
    def of(cls, draft: Draft, is_kept: Bool, is_likeliest: Bool, available: Int64, share: Float64, chances: Float64) -> ChainFates:
        """Of verified drafts: bool[N] nodes that were kept, bool[N] those that are the likeliest of their row at their depth."""
        rows, depths = draft.rows, draft.depths
        num_kept = np.bincount(rows[is_kept], minlength=draft.num_rows)
        num_right = num_kept.copy()
        beside = is_kept & ~is_likeliest
        np.minimum.at(num_right, rows[beside], depths[beside])
        is_open = num_right == num_kept
        is_open[rows[is_likeliest & (depths == num_right[rows])]] = False
        return cls(num_right, is_open, available, share, chances)

    def only(self, rows: SequenceOf[int]) -> ChainFates:
        """Of these rows."""
        at = np.array(rows, np.int64)
        return ChainFates(self.num_right[at], self.is_open[at], self.available[at], self.share[at], self.chances[at])

    def drafted(self) -> Float64:
        """float64[LONGEST + 1]: tokens that would have been drafted for all rows, with at most 0, 1, 2 … for each."""
        return np.asarray((self.share[:, None] * np.minimum(np.arange(LONGEST + 1), self.available[:, None])).sum(0))

    def emitted(self) -> Float64:
        """float64[LONGEST + 1]: tokens that the rows would have emitted with these; of what was not verified, those to be expected."""
        place = np.arange(LONGEST)
        is_right = place < self.num_right[:, None]
        hoped = np.cumprod(np.where(is_right, 1.0, self.chances), 1) * (self.is_open * self.share)[:, None]
        kept = np.where(is_right, 1.0, hoped) * (place < self.available[:, None])
        return len(kept) + np.concatenate([np.zeros(1), np.cumsum(kept.sum(0))])


@dataclass
class Hindsight:
    """Sums over the steps that read no prompt. Of a run of plain steps only some are summed.

    num_proposed  of all steps: tokens drafted, verified or not; rows in them, `num_row_steps`; and rows that a drafter was asked for that
                  copies, those it had any for
    predicted_ms  of these steps, and what they took
    tokens, ms    float64[LONGEST + 1]: what chains of 0, 1, 2 … tokens for every row would have emitted, as `ChainFates.emitted`, and what
                  they would have taken by the costs as corrected
    errors        |predicted ÷ measured − 1| of the latest steps, the newest last
    """

    num_steps: int = 0
    num_proposed: int = 0
    num_row_steps: int = 0
    num_asked: int = 0
    num_found: int = 0
    num_emitted: int = 0
    predicted_ms: float = 0.0
    measured_ms: float = 0.0
    tokens: Float64 = field(default_factory=lambda: np.zeros(LONGEST + 1))
    ms: Float64 = field(default_factory=lambda: np.zeros(LONGEST + 1))
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_REMEMBERED))

    @property
    def share_found(self) -> float:
        """Of rows, for which a drafter that copies has something."""
        return (self.num_found + 1) / (self.num_asked + 1)

    def observe(self, predicted_ms: float, measured_ms: float, num_emitted: int, tokens: Float64, ms: Float64) -> None:
        """Add a step that emitted so many tokens, and what steps of every length would have emitted and taken."""
        self.num_steps += 1
        self.num_emitted += num_emitted
        self.predicted_ms += predicted_ms
        self.measured_ms += measured_ms
        self.tokens += tokens
        self.ms += ms
        if measured_ms > 0.0:
            self.errors.append(abs(predicted_ms / measured_ms - 1.0))

    @property
    def regret(self) -> float:
        """Share by which the best single length would have emitted more tokens a millisecond; below 0 where it would not have."""
        if not self.predicted_ms:
            return 0.0
        best = float((self.tokens / self.ms).max())
        return 1.0 - self.num_emitted / self.predicted_ms / best if best else 0.0

    @property
    def error(self) -> float:
        """The median of |predicted ÷ measured − 1| over the latest steps."""
        return float(np.median(self.errors)) if self.errors else 0.0

    def as_metrics(self) -> dict[str, Any]:
        """Counters and gauges by name; those that drift with the machine are of the latest steps."""
        return {
            "num_steps": self.num_steps,
            "num_proposed_tokens": self.num_proposed,
            "num_row_steps": self.num_row_steps,
            "predicted_ms": self.predicted_ms,
            "measured_ms": self.measured_ms,
            "prediction_error": self.error,
            "regret": self.regret,
            "best_length": int((self.tokens / self.ms).argmax()) if self.predicted_ms else 0,
        }
