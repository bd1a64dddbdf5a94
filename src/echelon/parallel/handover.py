"""What goes from stage to stage, each to the next and the last to rank 0, through memory that all share.

Every rank has NUM_SENT slots for what it hands on. It writes into one when the reader has taken what was there, and raises a number; the
reader copies, and raises a number of its own. What is larger than a slot goes in pieces, of as many rows as fit. Before every piece lies
the hash of the plan that it belongs to, as ranks may be in passes of different plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from echelon.parallel.group import NUM_SENT
from echelon.parallel.rank_memory import ARRIVED, HEADER, LINE, ROOM, SPINS, TAKEN, RankMemory


class Handover(RankMemory):
    """One rank's way from the rank before it and to the one after it."""

    def __init__(self, descriptor: int, rank: int, size: int, check: Callable[[], None], spins: int = SPINS) -> None:
        super().__init__(descriptor, rank, size, check, spins)
        self._before, self._after = (rank - 1) % size, (rank + 1) % size
        self._slot_bytes = ROOM // (NUM_SENT * size) // LINE * LINE  # the hash takes a line of it
        self._num_sent = self._num_taken = 0

    def send(self, states: Tensor, plan_hash: int) -> None:
        """Hand on states [T, columns] in the pass of a plan; returns once the last piece is in a slot, read or not."""
        for piece in self._pieces(states):
            self._await(self._after, TAKEN, self._num_sent + 1 - NUM_SENT)
            start = self._slot(self.rank, self._num_sent)
            self._numbers[(HEADER + start) // 8] = plan_hash
            self._like(start, piece).copy_(piece)
            self._num_sent += 1
            self._raise(ARRIVED, self._num_sent)

    def receive(self, into: Tensor, plan_hash: int) -> Tensor:
        """Wait for what the rank before hands on in the pass of a plan, as many states [T, columns] as `into` holds, which is returned."""
        for piece in self._pieces(into):
            self._await(self._before, ARRIVED, self._num_taken + 1)
            start = self._slot(self._before, self._num_taken)
            has_room = self.number(self._before, ARRIVED) <= self._num_taken + NUM_SENT
            if self._numbers[(HEADER + start) // 8] != plan_hash or not has_room:
                raise self._parted(self._before, self._num_taken + 1)
            piece.copy_(self._like(start, piece))
            self._num_taken += 1
            self._raise(TAKEN, self._num_taken)
        return into

    def fits(self, states: Tensor) -> bool:
        """Do states [T, columns] go in one piece?"""
        return states.nbytes <= self._slot_bytes - LINE

    def _pieces(self, states: Tensor) -> Iterator[Tensor]:
        return iter(torch.split(states, (self._slot_bytes - LINE) // (states.shape[1] * states.itemsize)))

    def _slot(self, rank: int, count: int) -> int:
        """Where in the room the slot begins in which a rank has what it writes after `count` others."""
        return (rank * NUM_SENT + count % NUM_SENT) * self._slot_bytes

    def _like(self, start: int, piece: Tensor) -> Tensor:
        """What lies behind the hash there, as something of the shape and dtype of `piece`."""
        first = start + LINE
        return self._room[first : first + piece.nbytes].view(piece.dtype).view(piece.shape)
