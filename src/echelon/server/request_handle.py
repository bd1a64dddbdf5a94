"""Requests as the event loop and the engine's thread both see them: their rows, the state of each, and why one ended early."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

from echelon.errors import EchelonError, row_error
from echelon.sequence import FinishReason, Sequence

LOGPROB_BYTES = 128  # of memory that one token with its log-probability takes


class RowState(NamedTuple):
    """Output of a row so far; an immutable value, so that the loop may read it while the engine goes on."""

    num_tokens: int = 0
    text: str = ""
    reason: FinishReason | None = None
    error: EchelonError | None = None


@dataclass(eq=False)
class RequestRow:
    """A sequence of a request with its timestamps (seconds of `time.monotonic`; 0: not yet)."""

    sequence: Sequence
    arrived_at: float
    started_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    state: RowState = field(default_factory=RowState)  # the engine's side writes it


@dataclass(eq=False)
class RequestHandle:
    """One HTTP request: the samples of all its prompts, in order. `states` is the newest that the loop has got.

    `num_sent`: tokens that the client had been sent when its connection stopped taking more; `None` while it takes what there is.
    """

    rows: list[RequestRow]
    loop: asyncio.AbstractEventLoop
    states: list[RowState] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    num_sent: int | None = None
    is_dropped: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether every row has ended, as far as the loop knows."""
        return bool(self.states) and all(s.reason is not None for s in self.states)

    @property
    def has_started(self) -> bool:
        """Whether a row has been in a step."""
        return any(row.started_at for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all rows, as far as the loop knows."""
        return sum(s.num_tokens for s in self.states)

    @property
    def num_unread_bytes(self) -> int:
        """Memory of the log-probabilities that wait for a client that does not read, about."""
        count = self.rows[0].sequence.params.logprobs
        if self.num_sent is None or count is None:
            return 0
        return (self.num_tokens - self.num_sent) * (1 + count) * LOGPROB_BYTES


def state_of(sequence: Sequence) -> RowState:
    """A row's state; where its text cannot be had, the row has failed."""
    watcher, error = sequence.watcher, sequence.error
    try:
        text = "" if watcher is None else watcher.finish() if sequence.is_finished and error is None else watcher.text
        return RowState(sequence.num_output_tokens, text, sequence.finish_reason, error)
    except Exception as failure:
        return RowState(sequence.num_output_tokens, "", FinishReason.ERROR, row_error(failure))
