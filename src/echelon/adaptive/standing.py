"""For how many steps a decision stands: for so many that deciding takes a small share of the time, however short the steps are."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from echelon.sequence import PlannedRow

HELD, MOST_HELD = 4, 16  # steps that a decision on drafts stands for: as few as this, and as many
RESTED, MOST_RESTED = 16, 64  # those that one for plain steps does
DECIDED = 0.02  # share of the time that deciding may take before it comes more seldom


class Standing:
    """The latest decision, and for how many more steps it stands. A decision not to draft survives rows being replaced, until the batch
    shrinks; a decision to draft holds only while the rows stay the same.

    may_draft   of each row, by that decision
    num_passed  steps that have gone by it since it was made
    """

    def __init__(self) -> None:
        self.may_draft: list[bool] = []
        self.num_passed = self._num_left = 0
        self._every = HELD  # of plain steps, one in so many is learned from

    @property
    def is_plain(self) -> bool:
        return not any(self.may_draft)

    @property
    def is_held(self) -> bool:
        return self._num_left > 0

    def covers(self, num_rows: int, num_before: int, are_same: bool) -> bool:
        """Whether a step of `num_rows` rows goes by it, after one of `num_before`, the same or others."""
        return self.is_held and (num_rows >= num_before if self.is_plain else are_same)

    def passes(self) -> bool:
        """A step goes by it; returns whether there is nothing to learn from that, as it is one of many plain ones."""
        self._num_left, self.num_passed = self._num_left - 1, self.num_passed + 1
        return self.is_plain and self._num_left % self._every > 0

    def stands(self, deciding_ms: float, step_ms: float, is_settled: bool) -> None:
        """It shall stand for further steps of `step_ms`, if deciding takes `deciding_ms`; not for many before it `is_settled`."""
        least, most = ((RESTED, MOST_RESTED) if self.is_plain else (HELD, MOST_HELD)) if is_settled else (1, HELD)
        num_steps = int(min(max(deciding_ms / (DECIDED * step_ms), least), most))
        self._num_left, self._every = num_steps - 1, max(HELD, num_steps // HELD)

    def falls(self) -> None:
        """The next step is decided on by itself."""
        self._num_left = 0

    def begins(self) -> None:
        """Another decision is made."""
        self._num_left = self.num_passed = 0
        self.may_draft = []

    def limited(self, rows: SequenceOf[PlannedRow]) -> list[PlannedRow]:
        """The rows of a step that goes by it: who may draft."""
        may_draft = self.may_draft if not self.is_plain else [False] * len(rows)
        return [row if may or not row.max_draft_depth else row.drafting(0, 0) for row, may in zip(rows, may_draft, strict=True)]
