"""Memory that the ranks of one machine share: signs of life, how far each has come, and room for what goes from one to another.

It has no name anywhere: workers inherit it, and it is gone with the last process that has it. A rank writes its own numbers alone, and
others wait until one is large enough. x86-64 shows stores to others in their order; on no other processor is this used.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from echelon.errors import RankError

LINE = 64  # bytes of a rank's own numbers, which no other rank writes: a cache line
# 8-byte numbers in it: times it has written, and read; the running plan's hash; times (ns) when it was alive, and had read the plan; bytes
# that a gather is of, and in the number behind it those of every other one (csrc/layer/ranks.cpp reads some of them too)
ARRIVED, TAKEN, HASH, SEEN, RECEIVED, GATHERED = range(6)
MOST_RANKS = 64
HEADER = LINE * MOST_RANKS
ROOM = 64 << 20  # bytes besides
SIZE = HEADER + ROOM
SPINS = 20_000  # looks at a number before the processor is given up: about a millisecond
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


class RankMemory:
    """The memory `descriptor` as one rank sees it. `check` raises where others are gone: it is called while they are awaited."""

    def __init__(self, descriptor: int, rank: int, size: int, check: Callable[[], None], spins: int = SPINS) -> None:
        self.rank, self.size, self.is_connected = rank, size, False
        self._check, self._spins = check, spins
        self._memory = mmap.mmap(descriptor, SIZE)
        self._numbers = memoryview(self._memory).cast("Q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._room = torch.frombuffer(self._memory, dtype=torch.uint8)[HEADER:]
        self._plan_hash, self._is_checked = 0, True

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
        self.note(RECEIVED, time.monotonic_ns())
        self.note(HASH, plan_hash)
        self.is_connected, self._plan_hash, self._is_checked = True, plan_hash, False
        try:
            yield
        finally:
            self.is_connected = False

    def _raise(self, which: int, count: int) -> None:
        """Set one of this rank's numbers, and wake those that wait for it."""
        self.note(which, count)
        _libc.syscall(_FUTEX, self._word(self.rank, which), _WAKE, self.size, None, None, 0)

    def _await(self, rank: int, which: int, count: int) -> None:
        """Wait until a rank's number is at least `count`."""
        numbers, index = self._numbers, rank * LINE // 8 + which
        for _ in range(self._spins):
            if numbers[index] >= count:
                break
        while (seen := numbers[index]) < count:
            wanted = ctypes.c_uint32(seen & 0xFFFFFFFF)
            _libc.syscall(_FUTEX, self._word(rank, which), _WAIT, wanted, ctypes.byref(_LOOK), None, 0)
            self._check()

    def _check_plans(self, ranks: range | tuple[()]) -> None:
        """Once a pass, refuse to go on with ranks that run another plan; all of them have written something in theirs."""
        if self._is_checked:
            return
        self._is_checked = True
        for rank in ranks:
            if self.number(rank, HASH) != self._plan_hash:
                raise self._parted(rank, self.number(self.rank, ARRIVED))

    def _parted(self, rank: int, count: int) -> RankError:
        where = f"it has written {self.number(rank, ARRIVED)} times where {count} are due"
        return RankError(f"rank {rank} runs another plan than rank {self.rank} ({where}); make a new LLM")

    def _word(self, rank: int, which: int) -> ctypes.c_void_p:
        """Where a number lies, for those that sleep until it changes."""
        return ctypes.c_void_p(self._address + LINE * rank + 8 * which)
