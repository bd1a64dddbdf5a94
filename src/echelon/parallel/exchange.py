"""Memory that the ranks of one machine share: signs of life, how far each has come, and the activations that they bring together.

The memory has no name anywhere: workers inherit it, and it is gone with the last process that has it. A gather is a copy by every rank into
one of two slots and a number that each raises when it has written. A rank writes again only when all others have come as far as it has, and
with that have read the slot, so that nobody writes into one that is still read. x86-64 shows stores to others in their order; on no other
processor is this used.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from echelon.errors import RankError

LINE = 64  # bytes of a rank's own numbers, which no other rank writes: a cache line
ARRIVED, HASH, SEEN, RECEIVED = range(4)  # 8-byte numbers in it: gathers written, the running plan's hash, times (ns): alive, plan read
MOST_RANKS = 64
HEADER = LINE * MOST_RANKS
SLOT = 32 << 20  # bytes
SIZE = HEADER + 2 * SLOT
SPINS = 20_000  # looks at a number before the processor is given up: about a millisecond
MOST_VIEWS = 256  # of slots, by shape, that are kept from pass to pass
LOOK_SECONDS = 0.05  # between looks at whether the others still live

_FUTEX, _WAIT, _WAKE = 202, 0, 1  # the system call's number on x86-64, and its operations
_libc = ctypes.CDLL(None, use_errno=True)


class _Seconds(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_LOOK = _Seconds(0, int(LOOK_SECONDS * 1e9))


def shared_memory() -> int:
    """A file descriptor of SIZE bytes of memory, all of it taken.

    Raises
    ------
    OSError  there is not so much
    """
    descriptor = os.memfd_create("echelon-ranks")
    try:
        os.posix_fallocate(descriptor, 0, SIZE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class SharedExchange:
    """The gathers of one rank, over the memory `descriptor`. `check` raises where others are gone: it is called while they are awaited."""

    def __init__(self, descriptor: int, rank: int, size: int, check: Callable[[], None], spins: int = SPINS) -> None:
        self.rank, self.size, self.is_connected = rank, size, False
        self._check, self._spins = check, spins
        self._memory = mmap.mmap(descriptor, SIZE)
        self._numbers = memoryview(self._memory).cast("Q")
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._words = [ctypes.c_void_p(address + LINE * other + 8 * ARRIVED) for other in range(size)]  # that ranks sleep on
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._slots = [whole[start : start + SLOT] for start in (HEADER, HEADER + SLOT)]
        self._views: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._count, self._plan_hash, self._is_checked, self._awaits = 0, 0, True, False

    def number(self, rank: int, which: int) -> int:
        """One of a rank's own numbers."""
        return self._numbers[rank * LINE // 8 + which]

    def note(self, which: int, value: int) -> None:
        """Set one of this rank's numbers."""
        self._numbers[self.rank * LINE // 8 + which] = value

    def seem_alive(self, rank: int | None = None) -> None:
        """Note the time as a sign of life of this rank, or of one that is being started."""
        self._numbers[(self.rank if rank is None else rank) * LINE // 8 + SEEN] = time.monotonic_ns()

    @contextmanager
    def connected(self, plan_hash: int) -> Iterator[None]:
        """Inside, all ranks run the pass of one plan."""
        self.note(HASH, plan_hash)
        self.is_connected, self._plan_hash, self._is_checked = True, plan_hash, False
        try:
            yield
        finally:
            self.is_connected = False

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
        self.note(ARRIVED, self._count)
        self._wake()
        self._awaits = not awaited
        self._wait_for(awaited)
        if awaited and not self._is_checked:
            self._is_checked = True
            self._check_plans(awaited)
        return whole

    def _wait_for(self, ranks: range | tuple[()]) -> None:
        for rank in ranks:
            if rank != self.rank:
                self._wait(rank)

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

    def _wait(self, rank: int) -> None:
        """Wait until a rank has written as much as this one."""
        numbers, index, count = self._numbers, rank * LINE // 8 + ARRIVED, self._count
        for _ in range(self._spins):
            if numbers[index] >= count:
                break
        while (seen := numbers[index]) < count:
            _libc.syscall(_FUTEX, self._words[rank], _WAIT, ctypes.c_uint32(seen & 0xFFFFFFFF), ctypes.byref(_LOOK), None, 0)
            self._check()
        if numbers[index] > count + 1:
            raise self._parted(rank)

    def _check_plans(self, ranks: range | tuple[()]) -> None:
        """Refuse to go on with ranks that run another plan; all of them have written as much as this one, and so have said which."""
        for rank in ranks:
            if self.number(rank, HASH) != self._plan_hash:
                raise self._parted(rank)

    def _parted(self, rank: int) -> RankError:
        where = f"gather {self.number(rank, ARRIVED)} where {self._count} is due"
        return RankError(f"rank {rank} runs another plan than rank {self.rank} ({where}); make a new LLM")

    def _wake(self) -> None:
        _libc.syscall(_FUTEX, self._words[self.rank], _WAKE, self.size, None, None, 0)
