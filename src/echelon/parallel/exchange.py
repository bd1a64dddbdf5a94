"""Gathers of activations: every rank's columns, brought together in memory that all share.

A gather is a copy by every rank into one of two slots and a number that each raises when it has written. A rank writes again only when all
others have come as far as it has, and with that have read the slot, so that nobody writes into one that is still read.

Layers that run in one call of the compiled kernels gather by themselves, in the same memory and order (csrc/layer/ranks.cpp). How many
bytes a gather is of is compared, since a rank that runs a layer in another way would cut a long prompt elsewhere.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch
from torch import Tensor

from echelon.model.patches.split import Part, Parts
from echelon.ops.cpu import RankArguments
from echelon.parallel.rank_memory import ARRIVED, GATHERED, HEADER, ROOM, SPINS, RankMemory

SLOT = ROOM // 2  # bytes
MOST_VIEWS = 256  # of slots, by shape, that are kept from pass to pass


GivesUp = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)


class SharedExchange(RankMemory):
    """The gathers of one rank."""

    def __init__(self, descriptor: int, rank: int, size: int, check: Callable[[], None], spins: int = SPINS) -> None:
        super().__init__(descriptor, rank, size, check, spins)
        self._slots = [self._room[start : start + SLOT] for start in (0, SLOT)]
        self._views: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._count, self._awaits = 0, False
        self._failure: BaseException | None = None

    @property
    def inside(self) -> SharedExchange:
        """For layers that run in one call."""
        return self

    def within(self, run: Callable[[RankArguments], Tensor]) -> Tensor:
        """What `run` returns, in which layers gather by themselves.

        Raises
        ------
        RankError  another rank has ended, hangs or runs something else
        """
        if not self.is_connected:
            return run(RankArguments())
        plan, gives_up = self._plan_hash - (self._plan_hash >> 63 << 64), GivesUp(self._ask)  # as a signed number; kept until `run` is done
        self._failure = None
        try:
            out = run(
                RankArguments(
                    self._address,
                    self._address + HEADER,
                    SLOT,
                    self.rank,
                    self.size,
                    self._count,
                    self._awaits,
                    not self._is_checked,
                    plan,
                    self._spins,
                    ctypes.cast(gives_up, ctypes.c_void_p).value or 0,
                )
            )
        except RuntimeError:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure from None
            raise
        if self._count != self.number(self.rank, ARRIVED):
            self._count, self._awaits, self._is_checked = self.number(self.rank, ARRIVED), False, True
        return out

    def _ask(self, rank: int) -> int:
        """Whether kernels that wait for others shall give up: `rank` runs something else, or, where it is −1, others may be gone."""
        try:
            if rank >= 0:
                raise self._parted(rank, self.number(self.rank, ARRIVED))
            self._check()
        except BaseException as error:  # an interrupt too: no exception can pass through the kernels
            self._failure = error
            return 1
        return 0

    def gathered(self, own: Tensor, parts: Parts) -> Tensor:
        """This rank's columns [..., n] → [..., whole], those of all ranks, in a slot or in memory of its own."""
        return self._in_pieces(own, parts[self.rank], range(self.size))

    def gathered_by_first(self, own: Tensor, parts: Parts) -> Tensor:
        """The same on rank 0; others wait for nobody, and what they get [..., whole] may be unfinished."""
        return self._in_pieces(own, parts[self.rank], range(self.size) if self.rank == 0 else ())

    def _in_pieces(self, own: Tensor, part: Part, awaited: range | tuple[()]) -> Tensor:
        most = SLOT // (part.whole * own.itemsize)
        if math.prod(own.shape[:-1]) <= most:
            return self._exchanged(own, part, awaited)
        rows, out = own.flatten(0, -2), own.new_empty(*own.shape[:-1], part.whole)
        for target, piece in zip(torch.split(out.view(-1, part.whole), most), torch.split(rows, most), strict=True):
            target.copy_(self._exchanged(piece, part, range(self.size)))  # awaited by all: pieces follow one another
        return out

    def _exchanged(self, own: Tensor, part: Part, awaited: range | tuple[()]) -> Tensor:
        """own [..., n] → [..., whole], which a slot holds."""
        if self._awaits:
            self._wait_for(range(self.size))
        whole, place = self._viewed(own, part)
        place.copy_(own)
        self._count += 1
        self.note(GATHERED + self._count % 2, whole.nbytes)
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
                which = GATHERED + self._count % 2
                if self.number(rank, ARRIVED) > self._count + 1 or self.number(rank, which) != self.number(self.rank, which):
                    raise self._parted(rank, self._count)

    def _viewed(self, own: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        """The next slot as [..., whole], and of these columns the ones that `own` [..., n] goes to."""
        key = (self._count % 2, own.dtype, own.shape, part.first, part.whole)
        views = self._views.get(key)
        if views is None:
            if len(self._views) == MOST_VIEWS:
                self._views.clear()
            shape = (*own.shape[:-1], part.whole)
            whole = self._slots[self._count % 2].view(own.dtype)[: math.prod(shape)].view(shape)
            views = self._views[key] = whole, whole[..., part.first : part.last]
        return views
