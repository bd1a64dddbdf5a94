"""A worker: loads its share of a model, and runs the passes that rank 0 plans, until the way there is closed.

`echelon.parallel.group` starts it with a socket as standard input and the shared memory as another open file. Signs of life come from a
thread, from before anything large is imported, so that no load or step, however long, is taken for a process that hangs.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
import time

ALIVE_SECONDS = 0.5  # between signs of life


def main() -> None:
    """Serve one engine."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are the parent's, which closes the socket when it ends
        signal.signal(number, signal.SIG_IGN)
    rank, size, descriptor, sign_at, spins, parent = map(int, sys.argv[1:])
    threading.Thread(target=_live, args=(descriptor, sign_at, parent), daemon=True).start()
    from echelon.parallel.serving import SocketWay, serve

    serve(SocketWay(rank, size, descriptor, spins))
    os._exit(0)  # whoever waits for the end does not wait for what an interpreter tidies up


def _live(descriptor: int, sign_at: int, parent: int) -> None:
    """Write the time into the shared memory, and end this process with the one that started it."""
    memory = mmap.mmap(descriptor, 0)
    numbers = memoryview(memory).cast("Q")
    while os.getppid() == parent:
        numbers[sign_at // 8] = time.monotonic_ns()
        time.sleep(ALIVE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
