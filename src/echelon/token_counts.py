"""Counts of the tokens of a growing text, for penalties that cost the same however long the text is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


class TokenCounts:
    """Counts of each token in a text from position `start` on. The text is a list that only grows, so that after each step only
    its new tokens are counted; another list is counted anew.
    """

    def __init__(self, start: int = 0) -> None:
        self._start = start
        self._clear([])

    def _clear(self, tokens: Sequence[int]) -> None:
        self._tokens, self._num_read = tokens, self._start
        self._slots: dict[int, int] = {}  # token → its entry in the arrays
        self._ids, self._counts = np.zeros(64, np.int64), np.zeros(64, np.int64)

    @contextmanager
    def of(self, tokens: Sequence[int], path: Sequence[int]) -> Iterator[tuple[Int64, Int64]]:
        """Different token ids of `tokens` and then `path`, and how often each is there, int64 [U] both; valid inside the block."""
        if tokens is not self._tokens or len(tokens) < self._num_read:
            self._clear(tokens)
        for token in tokens[self._num_read :]:
            self._add(token)
        self._num_read = max(self._start, len(tokens))
        counted = path[max(0, self._start - len(tokens)) :]
        for token in counted:
            self._add(token)
        try:
            yield self._ids[: len(self._slots)], self._counts[: len(self._slots)]
        finally:
            for token in reversed(counted):
                self._remove(token)

    def _add(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids, self._counts = (np.concatenate([array, np.zeros_like(array)]) for array in (self._ids, self._counts))
        self._ids[slot] = token
        self._counts[slot] += 1

    def _remove(self, token: int) -> None:
        """Take back the token that was added last."""
        slot = self._slots[token]
        self._counts[slot] -= 1
        if self._counts[slot] == 0:
            del self._slots[token]
