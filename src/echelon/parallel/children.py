"""Workers of this machine that rank 0 starts itself.

A worker that has ended is noticed at once where it is awaited, one that hangs by its signs of life, which a thread of it writes: however
long it computes, it lives.
"""

from __future__ import annotations

import os
import platform
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import torch

from echelon.errors import ConfigError
from echelon.parallel.group import ENDING_SECONDS, SILENT_SECONDS, RankGroup
from echelon.parallel.rank_memory import LINE, LOOK_SECONDS, RECEIVED, SEEN, SPINS, shared_memory
from echelon.parallel.splits import SPLITS
from echelon.text_process import receive

WORKER = Path(__file__).with_name("worker.py")


class _Threads:
    """Of PyTorch in this process, which has a share of them while it has workers of any engine, and all again after the last."""

    def __init__(self) -> None:
        self._lock, self._num_groups, self._before = threading.Lock(), 0, 0

    @property
    def whole(self) -> int:
        """As many as there are without workers."""
        return self._before if self._num_groups else torch.get_num_threads()

    def take(self, share: int) -> None:
        """For one more engine."""
        with self._lock:
            self._before = self.whole
            self._num_groups += 1
        torch.set_num_threads(share)

    def give_back(self) -> None:
        """One engine has no workers any more."""
        with self._lock:
            self._num_groups -= 1
            if not self._num_groups:
                torch.set_num_threads(self._before)


_threads = _Threads()


class ChildRanks(RankGroup):
    """The workers of one engine, direct children of this process. While there are any, it has a share of the threads, as each has."""

    def __init__(self, setting: str, size: int) -> None:
        super().__init__(setting, size)
        cores, self.num_threads = len(os.sched_getaffinity(0)), max(1, _threads.whole // size)
        self.most_at_work, self.is_one_machine = min(size, max(1, cores // self.num_threads)), True
        spins = SPINS if size * self.num_threads <= cores else 0  # where ranks take turns, whoever waits makes room
        try:
            descriptor = shared_memory()
        except OSError as error:
            raise ConfigError(f"there is no memory for {size} ranks to share ({error.strerror}); free some, or take fewer ranks") from error
        self.memory = SPLITS[setting].memory(descriptor, 0, size, self.check, spins)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self.close = weakref.finalize(self, _end, os.getpid(), self._processes, self._connections)
        _threads.take(self.num_threads)
        try:
            for rank in range(1, size):
                self._start(rank, descriptor, spins)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(descriptor)

    def _start(self, rank: int, descriptor: int, spins: int) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)  # plans are sent at once, as long as there is room
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"OMP_NUM_THREADS": str(self.num_threads), "PYTHONPATH": os.pathsep.join(paths)}
        numbers = (rank, self.size, descriptor, rank * LINE + 8 * SEEN, spins, os.getpid())
        self.memory.seem_alive(rank)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), *map(str, numbers)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                env=environment,
            )
        self._processes.append(process)
        self._connections.append(ours)

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1, 2, …"""
        return [p.pid for p in self._processes]

    @property
    def seconds_to_plan(self) -> float:
        """From the start of packing the last plan until the last worker had read it."""
        return max(int(self.memory.number(rank, RECEIVED)) - self._planned_at for rank in range(1, self.size)) / 1e9

    def _answer(self, rank: int) -> bytes:
        connection = self._connections[rank - 1]
        while not _is_ready(connection, select.POLLIN):
            self.check()
        try:
            answer = receive(connection, time.monotonic() + SILENT_SECONDS)
            connection.setblocking(False)  # as when it was made; `receive` has set a timeout
        except (OSError, EOFError):
            self._fail(f"rank {rank} has ended while it was loading; see its own error above")
        return answer

    def _send(self, message: bytes) -> None:
        framed = memoryview(len(message).to_bytes(8, "big") + message)
        for rank, connection in enumerate(self._connections, 1):
            rest = framed
            try:
                while rest:
                    rest = rest[self._sent(connection, rest) :]
            except ConnectionError:
                self.check()
                self._fail(f"rank {rank} has closed its connection")

    def _sent(self, connection: socket.socket, rest: memoryview) -> int:
        """How many bytes there was room for; a worker that is in a step reads, and makes room, when it is done, however long that takes."""
        try:
            return connection.send(rest)
        except BlockingIOError:
            _is_ready(connection, select.POLLOUT)
            self.check()
            return 0

    def check(self) -> None:
        """Raise `RankError` where a worker has ended or hangs."""
        for rank, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                self._fail(f"rank {rank} (process {process.pid}) has ended with status {process.returncode}")
            silent = (time.monotonic_ns() - self.memory.number(rank, SEEN)) / 1e9
            if silent > SILENT_SECONDS:
                self._fail(f"rank {rank} (process {process.pid}) has given no sign of life for {silent:.0f} s")

    def _end_at_once(self) -> None:
        for process in self._processes:
            process.kill()


def check_machine(asked: str) -> None:
    """Raise `ConfigError` where ranks cannot share memory."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise ConfigError(f"{asked} is served on Linux on x86-64, not on {sys.platform} on {platform.machine()}; leave it out")


def _is_ready(connection: socket.socket, event: int) -> bool:
    """Whether it can be read or written, awaited for LOOK_SECONDS; `select` would refuse descriptors from 1,024 on."""
    poll = select.poll()
    poll.register(connection, event)
    return bool(poll.poll(LOOK_SECONDS * 1e3))


def _end(owner: int, processes: list[subprocess.Popen[bytes]], connections: list[socket.socket]) -> None:
    """Close the way to the workers, and end those that do not end by themselves."""
    for connection in connections:
        connection.close()
    if os.getpid() != owner:
        return
    _threads.give_back()
    until = time.monotonic() + ENDING_SECONDS
    for process in processes:
        try:
            process.wait(max(until - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
