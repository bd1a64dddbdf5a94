"""Bounds of what waits for the engine, and who is told of what becomes of requests."""

from __future__ import annotations

from pydantic import Field, StrictInt

from echelon.aio.request_handle import RequestRow
from echelon.settings import Settings


class Limits(Settings):
    """Seconds, bytes and places."""

    max_queue: StrictInt = Field(default=256, ge=0, description="Sequences that may wait; more are refused with 429.")
    max_unread_bytes: int = Field(
        default=2**20, ge=0, description="Bytes of a request's log-probabilities that may wait for somebody who does not read."
    )
    queue_timeout: float = Field(default=120.0, gt=0, description="Seconds that a request may wait for its first step.")
    total_timeout: float = Field(default=1800.0, gt=0, description="Seconds that a request may take, to its last token.")
    stall_timeout: float = Field(
        default=60.0, ge=0.1, description="Seconds without a step while there is work, before the engine is no longer healthy."
    )


class RequestObserver:
    """Is told of rows as they start, grow and end, in the engine's thread, and of readers that were cut; this one does nothing."""

    def started(self, row: RequestRow) -> None:
        """A row enters its first step."""

    def grew(self, row: RequestRow, before: float, now: float) -> None:
        """A row emitted tokens; `before` is when it last did, 0 if this is the first time."""

    def finished(self, row: RequestRow, now: float, reason: str) -> None:
        """A row has ended, for `reason`."""

    def cut(self) -> None:
        """A request ends because nobody reads it."""
