"""Ranks that meet on loopback, with a thread in the place of each process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from echelon.config import RANKS
from echelon.parallel.meeting import Meeting
from echelon.parallel.summons import Summons

Result = TypeVar("Result")
_TAKEN: list[socket.socket] = []


def free_port() -> int:
    """One that the system gives to nobody else while this process lives, and on which whoever asks for it may listen."""
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind(("127.0.0.1", 0))
    _TAKEN.append(taken)
    return int(taken.getsockname()[1])


def summonses(size: int, *tokens: str) -> list[Summons]:
    """Of ranks on loopback; without a token each, of the empty one."""
    port = free_port()
    return [Summons(rank, size, "127.0.0.1", port, "127.0.0.1", (tokens or ("",) * size)[rank], False, "0") for rank in range(size)]


def at_once(work: Callable[[int], Result], size: int) -> list[Result | Exception]:
    """What a thread for each rank returns or raises."""

    def tried(rank: int) -> Result | Exception:
        try:
            return work(rank)
        except Exception as error:  # the test says which
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(tried, range(size)))


@contextmanager
def meetings(size: int) -> Iterator[list[Meeting]]:
    """All ranks have met; afterwards they leave."""
    summoned = summonses(size)
    met = at_once(lambda rank: Meeting(RANKS[0], summoned[rank]), size)
    assert all(isinstance(one, Meeting) for one in met), met
    found: list[Meeting] = [one for one in met if isinstance(one, Meeting)]
    yield found
    for one in found:
        one.leave(has_failed=False)
