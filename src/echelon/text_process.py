"""A process beside this one for work on text whose time and memory must be limited: what a client sends decides how long it takes.

The operating system limits it, as no line of Python could stop a template that multiplies a list by a billion; and it runs at a lower
priority, so that the steps of the engine go first. It is started when first needed, serves all models of this process, is started anew
after it had to be ended, and ends with whoever started it.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError

WALL_SECONDS = 60.0  # after which no answer is waited for, nor for the process to start: a busy machine gives it little of its time
WORKER = Path(__file__).with_name("text_worker.py")


class TextProcessError(EchelonError):
    """The process for work on text could not be started."""


class TextProcess:
    """The process and the way to it: one piece of work at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._owner = 0  # the process that started it; one that was forked from that starts its own
        self._loaded: object = None

    def ask(
        self,
        work: Mapping[str, Any],
        seconds: float,
        needed: object = None,
        preparation: Callable[[], Mapping[str, Any]] = dict,
    ) -> dict[str, Any]:
        """The process's result for `work`, which may take so many `seconds` of processor time; `error` says why there is none.

        needed  names what the `preparation` does in that process; it is done first, unless it was the last that was done

        Raises
        ------
        TextProcessError  it cannot be started
        """
        with self._lock:
            connection = self._connected()
            try:
                if needed is not None and self._loaded != needed:
                    self._loaded = None
                    prepared = self._exchange(connection, preparation(), WALL_SECONDS)
                    if "error" in prepared:
                        return prepared
                    self._loaded = needed
                return self._exchange(connection, work, seconds)
            except TimeoutError:
                self._end()
                return {"error": f"it took more than {WALL_SECONDS + seconds:.0f} s"}
            except (ConnectionError, EOFError):
                return {"error": self._end(seconds)}
            except BaseException:  # what it says next would be taken for the next one's answer
                self._end()
                raise

    def close(self) -> None:
        """End the process; it is started anew when it is needed."""
        with self._lock:
            self._end()

    @property
    def pid(self) -> int | None:
        """Process id, if it runs."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def _exchange(self, connection: socket.socket, work: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + WALL_SECONDS + seconds
        send(connection, json.dumps({**work, "seconds": seconds}).encode(), deadline)
        return dict(json.loads(receive(connection, deadline)))

    def _connected(self) -> socket.socket:
        if self._socket is not None and self._owner == os.getpid() and self.pid is not None:
            return self._socket
        self._end()
        ours, theirs = socket.socketpair()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER)], stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment
            )
        self._socket, self._owner = ours, os.getpid()
        atexit.unregister(self.close)
        atexit.register(self.close)
        try:
            receive(ours, time.monotonic() + WALL_SECONDS)
        except (OSError, EOFError):
            raise TextProcessError(f"the process for work on text did not start ({self._end()}); see its own error above") from None
        return ours

    def _end(self, seconds: float = 0.0) -> str:
        """Describe how the process ended, which may have had `seconds` of processor time, or that it was ended now."""
        process, connection, self._process, self._socket, self._loaded = self._process, self._socket, None, None, None
        if connection is not None:
            connection.close()
        if process is None or self._owner != os.getpid():
            return "its process is gone"
        try:
            status = process.wait(1.0)  # its socket is closed: it is ending, or never will
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        if status == -signal.SIGXCPU:
            return f"it took more than {seconds:g} s of processor time"
        return f"its process ended with status {status}"


TEXT_PROCESS = TextProcess()


def send(connection: socket.socket, message: bytes, deadline: float) -> None:
    """The length of a message in 8 bytes, and the message.

    Raises
    ------
    TimeoutError, ConnectionError
    """
    connection.settimeout(max(deadline - time.monotonic(), 1e-3))
    connection.sendall(len(message).to_bytes(8, "big") + message)


def receive(connection: socket.socket, deadline: float) -> bytes:
    """The next message.

    Raises
    ------
    EOFError                       the other side has closed
    TimeoutError, ConnectionError
    """
    return _receive_exactly(connection, int.from_bytes(_receive_exactly(connection, 8, deadline), "big"), deadline)


def _receive_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    received = bytearray()
    while len(received) < count:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = connection.recv(min(count - len(received), 2**16))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)
