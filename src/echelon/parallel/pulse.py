"""Signs of life of ranks that share no memory: a thread of each counts in a store that all see, and looks at the others' counts."""

from __future__ import annotations

import threading
import time
from typing import Any

from echelon.errors import RankError
from echelon.inputs import first_line, shown
from echelon.parallel.group import AGAIN, SILENT_SECONDS

ALIVE_SECONDS = 0.5  # between signs of life
STOPPING_SECONDS = 5.0  # that the last one may take: a thread that is still at it when its interpreter ends aborts the process
ENDED = "ended"  # where a rank says why it ends
MOST_CHARACTERS = 300  # of that


def reason_in(store: Any) -> str:
    """Why a rank has ended, as it has said under ENDED; empty where none has."""
    said = store.get(ENDED) if store.check([ENDED]) else b""
    return shown(bytes(said).decode("utf-8", "replace")[:MOST_CHARACTERS], quote=False)


class Pulse:
    """Rank 0 looks at all others, they at rank 0. `store`: a connection of its own, since one that waits keeps others waiting."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._gone = store, rank, ""
        others = [0] if rank else range(1, size)
        self._seen = dict.fromkeys(others, (0, time.monotonic()))
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="signs of life", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `RankError` where one of them has been silent for too long."""
        if self._gone:
            raise RankError(f"{self._gone}; {AGAIN}")
        for rank, (_, seen) in self._seen.items():
            silent = time.monotonic() - seen
            if silent > SILENT_SECONDS:
                raise RankError(f"rank {rank} has given no sign of life for {silent:.0f} s; {AGAIN}")

    def stop(self) -> None:
        """Give none any more."""
        self._is_over.set()
        self._thread.join(STOPPING_SECONDS)

    def _beat(self) -> None:
        while not self._is_over.is_set() and not self._gone:
            try:
                self._store.add(f"alive/{self._rank}", 1)
                for rank, (count, _) in self._seen.items():
                    now = self._store.add(f"alive/{rank}", 0)
                    if now != count:
                        self._seen[rank] = now, time.monotonic()
                self._gone = reason_in(self._store)
            except RuntimeError as error:
                self._gone = f"the store in which ranks meet is gone ({first_line(error)})"
            self._is_over.wait(ALIVE_SECONDS)
