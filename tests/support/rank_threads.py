"""Ranks that share memory, with a thread in the place of each process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from echelon.errors import RankError
from echelon.parallel.rank_memory import RankMemory, shared_memory

Memory = TypeVar("Memory", bound=RankMemory)
Result = TypeVar("Result")


def patience() -> Callable[[], None]:
    """What ends a thread that waits for one that has failed."""
    until = time.monotonic() + 60.0

    def check() -> None:
        if time.monotonic() > until:
            raise RankError("another rank never comes")

    return check


def ranks(kind: type[Memory], size: int, check: Callable[[], None] | None = None) -> list[Memory]:
    check = check or patience()
    descriptor = shared_memory()
    try:
        return [kind(descriptor, rank, size, check, spins=0) for rank in range(size)]
    finally:
        os.close(descriptor)


def together(group: Sequence[Memory], work: Callable[[Memory], Result]) -> list[Result]:
    with ThreadPoolExecutor(len(group)) as pool:
        return list(pool.map(work, group))
