"""How much of a prompt a step may read beside rows that decode, from what steps have cost lately.

A stream waits for the whole step: a piece as large as a step allows may take a hundred times as long as decoding does, on a processor where
arithmetic is dear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

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


class Step(NamedTuple):
    """Tokens that a step feeds, drafted ones with them, and its seconds."""

    tokens: float
    seconds: float


@dataclass
class StepCosts:
    """Seconds of a step as a line over its tokens: a step without prompts lies on it, and a further token, of a prompt or a draft, takes
    `token` seconds. A decoding row feeds `row_tokens`. Averages in which older steps fade; None: unseen.
    """

    decoding: Step | None = None
    token: float | None = None
    row_tokens: float = 1.0

    def observe(self, record: StepRecord) -> None:
        """Learn from a step: rows of one new token decode, others read."""
        step = Step(record.num_input_tokens, sum(record.seconds.values()))
        num_read = sum(row.num_new for row in record.rows if row.num_new > 1)
        num_decoding = sum(row.num_new == 1 for row in record.rows)
        if num_decoding:
            self.row_tokens = _averaged(self.row_tokens, (step.tokens - num_read) / num_decoding)
        if num_decoding and not num_read:
            self.decoding = step if self.decoding is None else Step(*map(_averaged, self.decoding, step))
        elif num_read >= SMALLEST_PIECE and (self.decoding is not None or not num_decoding):
            self._learn_token(step)

    def _learn_token(self, step: Step) -> None:
        """Learn from a step that reads: the slope between it and one that decodes, at most what leaves nothing for the step itself."""
        tokens, seconds = self.decoding or Step(0.0, 0.0)
        if abs(step.tokens - tokens) >= SMALLEST_PIECE:
            slope = min(max((step.seconds - seconds) / (step.tokens - tokens), 0.0), step.seconds / step.tokens)
            self.token = slope if self.token is None else _averaged(self.token, slope)

    def largest_piece(self, limit: int, num_decoding: int) -> int:
        """While costs are unseen, a step may read `limit`."""
        if self.decoding is None or self.token is None:
            return limit
        fed = num_decoding * self.row_tokens
        beside = max(self.decoding.seconds + self.token * (fed - self.decoding.tokens), self.token * fed)
        if PIECE * beside >= limit * self.token:
            return limit
        return min(limit, max(SMALLEST_PIECE, int(PIECE * beside / self.token)))


def _averaged(average: float, newest: float) -> float:
    return (1 - NEWEST) * average + NEWEST * newest
