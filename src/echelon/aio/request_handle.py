"""Requests as the event loop and the engine's thread both see them: their rows and the state of each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field

from echelon.sequence import RowState, Sequence

LOGPROB_BYTES = 128  # of memory that one token with its log-probability takes


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
    """One request: the samples of all its prompts, in order. `states` is the newest that the loop has got.

    `num_sent`: tokens that there were when the reader stopped taking more; `None` while it takes what there is.
    """

    rows: list[RequestRow]
    loop: asyncio.AbstractEventLoop
    states: list[RowState] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    num_sent: int | None = None
    is_dropped: bool = False
    is_aborted: bool = False

    @classmethod
    def of(cls, sequences: SequenceOf[Sequence], arrived_at: float) -> RequestHandle:
        """A request of the running event loop, which arrived at this time (`time.monotonic`)."""
        return cls([RequestRow(s, arrived_at) for s in sequences], asyncio.get_running_loop())

    @property
    def arrived_at(self) -> float:
        """When it did, in seconds of `time.monotonic`."""
        return self.rows[0].arrived_at

    def abort(self) -> None:
        """End whoever waits for its states."""
        self.is_aborted = True
        self.changed.set()

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

    @contextmanager
    def being_told(self) -> Iterator[None]:
        """While what there is becomes a part of an answer: nobody but the server keeps its reader from taking more."""
        self.num_sent = None
        try:
            yield
        finally:
            self.num_sent = self.num_tokens

    @property
    def num_unread_bytes(self) -> int:
        """Memory of the log-probabilities that wait for a client that does not read, about."""
        count = self.rows[0].sequence.params.logprobs
        if self.num_sent is None or count is None:
            return 0
        return (self.num_tokens - self.num_sent) * (1 + count) * LOGPROB_BYTES
