"""How much of a prompt a step may read beside rows that decode, from what steps have cost lately.

A stream waits for the whole step: a piece as large as a step allows may take a hundred times as long as decoding does, on a processor where
arithmetic is dear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from echelon.stats import StepRecord

PIECE = 1.75  # a piece may add as much time to a step as so many steps without a prompt take
SMALLEST_PIECE = 3  # tokens; even where arithmetic is dearest, these add less than a step and a half
NEWEST = 0.5  # weight of the last step in the averages


class PieceSizes(Protocol):
    """How large pieces of prompts are beside rows that decode."""

    def observe(self, record: StepRecord) -> None:
        """Learn from a settled step."""

    def largest_piece(self, limit: int, num_decoding: int) -> int:
        """Tokens of prompts, `limit` at most, that a step with so many decoding rows may read."""


@dataclass
class StepCosts:
    """Seconds of a step without prompts, and of a prompt's token; averages in which older steps fade. None: unseen."""

    decoding: float | None = None
    reading: float | None = None

    def observe(self, record: StepRecord) -> None:
        """Learn from a step: rows of one new token decode, others read."""
        seconds = sum(record.seconds.values())
        num_read = sum(row.num_new for row in record.rows if row.num_new > 1)
        num_decoding = sum(row.num_new == 1 for row in record.rows)
        if not num_read:
            self.decoding = _averaged(self.decoding, seconds)
        elif num_read >= SMALLEST_PIECE and not (num_decoding and self.decoding is None):
            beside = self.decoding if num_decoding and self.decoding is not None else 0.0
            self.reading = _averaged(self.reading, max(seconds - beside, 0.0) / num_read)

    def largest_piece(self, limit: int, num_decoding: int) -> int:  # noqa: ARG002
        """While costs are unseen, a step may read `limit`."""
        if self.decoding is None or self.reading is None or PIECE * self.decoding >= limit * self.reading:
            return limit
        return min(limit, max(SMALLEST_PIECE, int(PIECE * self.decoding / self.reading)))


def _averaged(average: float | None, newest: float) -> float:
    return newest if average is None else (1 - NEWEST) * average + NEWEST * newest
