"""Gathers of activations: every rank's columns, brought together in memory that all share.

A gather is a copy by every rank into one of two slots and a number that each raises when it has written. A rank writes again only when all
others have come as far as it has, and with that have read the slot, so that nobody writes into one that is still read.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from echelon.parallel.rank_memory import ARRIVED, ROOM, SPINS, RankMemory

SLOT = ROOM // 2  # bytes
MOST_VIEWS = 256  # of slots, by shape, that are kept from pass to pass


class SharedExchange(RankMemory):
    """The gathers of one rank."""

    def __init__(self, descriptor: int, rank: int, size: int, check: Callable[[], None], spins: int = SPINS) -> None:
        super().__init__(descriptor, rank, size, check, spins)
        self._slots = [self._room[start : start + SLOT] for start in (0, SLOT)]
        self._views: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._count, self._awaits = 0, False

    def gathered(self, part: Tensor, first: int, columns: int) -> Tensor:
        """This rank's columns from `first` on, [..., n] → [..., columns], those of all ranks, in a slot or in memory of its own."""
        return self._in_pieces(part, first, columns, range(self.size))

    def gathered_by_first(self, part: Tensor, first: int, columns: int) -> Tensor:
        """The same on rank 0; others wait for nobody, and what they get [..., columns] may be unfinished."""
        return self._in_pieces(part, first, columns, range(self.size) if self.rank == 0 else ())

    def _in_pieces(self, part: Tensor, first: int, columns: int, awaited: range | tuple[()]) -> Tensor:
        most = SLOT // (columns * part.itemsize)
        if math.prod(part.shape[:-1]) <= most:
            return self._exchanged(part, first, columns, awaited)
        rows, out = part.flatten(0, -2), part.new_empty(*part.shape[:-1], columns)
        for target, piece in zip(torch.split(out.view(-1, columns), most), torch.split(rows, most), strict=True):
            target.copy_(self._exchanged(piece, first, columns, range(self.size)))  # awaited by all: pieces follow one another
        return out

    def _exchanged(self, part: Tensor, first: int, columns: int, awaited: range | tuple[()]) -> Tensor:
        """part [..., n] → [..., columns], which a slot holds."""
        if self._awaits:
            self._wait_for(range(self.size))
        whole, own = self._viewed(part, first, columns)
        own.copy_(part)
        self._count += 1
        self._raise(ARRIVED, self._count)
        self._awaits = not awaited
        self._wait_for(awaited)
        if awaited:
            self._check_plans(awaited)
        return whole

    def _wait_for(self, ranks: range | tuple[()]) -> None:
        """Wait until others have written as much as this rank."""
        for rank in ranks:
            if rank != self.rank:
                self._await(rank, ARRIVED, self._count)
                if self.number(rank, ARRIVED) > self._count + 1:
                    raise self._parted(rank, self._count)

    def _viewed(self, part: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
        """The next slot as [..., columns], and of these the ones that `part` [..., n] goes to."""
        key = (self._count % 2, part.dtype, part.shape, first, columns)
        views = self._views.get(key)
        if views is None:
            if len(self._views) == MOST_VIEWS:
                self._views.clear()
            shape = (*part.shape[:-1], columns)
            whole = self._slots[self._count % 2].view(part.dtype)[: math.prod(shape)].view(shape)
            views = self._views[key] = whole, whole[..., first : first + part.shape[-1]]
        return views
