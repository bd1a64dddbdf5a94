"""What goes from stage to stage, each to the next and the last to rank 0, through memory that all share.

Every rank has two slots for what it hands on. It writes into one when the reader has taken what was there, and raises a number; the reader
copies, and raises a number of its own. What is larger than a slot goes in pieces, of as many rows as fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from echelon.parallel.rank_memory import ARRIVED, LINE, ROOM, SPINS, TAKEN, RankMemory

NUM_SLOTS = 2


class Handover(RankMemory):
    """One rank's way from the rank before it and to the one after it."""

    def __init__(self, descriptor: int, rank: int, size: int, check: Callable[[], None], spins: int = SPINS) -> None:
        super().__init__(descriptor, rank, size, check, spins)
        self._before, self._after = (rank - 1) % size, (rank + 1) % size
        self._slot_bytes = ROOM // (NUM_SLOTS * size) // LINE * LINE
        self._num_sent = self._num_taken = 0

    def send(self, states: Tensor) -> None:
        """Hand on states [T, columns]; returns once the last piece is in a slot, read or not."""
        for piece in self._pieces(states):
            self._await(self._after, TAKEN, self._num_sent + 1 - NUM_SLOTS)
            self._slot(self.rank, self._num_sent, piece).copy_(piece)
            self._num_sent += 1
            self._raise(ARRIVED, self._num_sent)

    def receive(self, into: Tensor) -> Tensor:
        """Wait for what the rank before hands on, as many states [T, columns] as `into` holds, which is returned."""
        for piece in self._pieces(into):
            self._await(self._before, ARRIVED, self._num_taken + 1)
            self._check_plans((self._before,))
            if self.number(self._before, ARRIVED) > self._num_taken + NUM_SLOTS:
                raise self._parted(self._before, self._num_taken + 1)
            piece.copy_(self._slot(self._before, self._num_taken, piece))
            self._num_taken += 1
            self._raise(TAKEN, self._num_taken)
        return into

    def _pieces(self, states: Tensor) -> Iterator[Tensor]:
        return iter(torch.split(states, self._slot_bytes // (states.shape[1] * states.itemsize)))

    def _slot(self, rank: int, count: int, like: Tensor) -> Tensor:
        """The slot in which a rank has what it writes after `count` others, as something of the shape and dtype of `like`."""
        start = (rank * NUM_SLOTS + count % NUM_SLOTS) * self._slot_bytes
        return self._room[start : start + like.nbytes].view(like.dtype).view(like.shape)
