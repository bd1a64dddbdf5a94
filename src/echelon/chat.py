"""Conversations to text, in a model's own chat template.

Templates are programs from a model's folder that run on what clients send. They run in a process of their own, whose processor time and
memory the operating system limits: no line of Python could stop one that multiplies a list by a billion. That process is started when
first needed, serves all models of this one, is started anew after it had to be ended, and ends with this one.
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
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, Protocol

from echelon.errors import EchelonError, RequestError

TEMPLATE_SECONDS = 5.0  # of processor time that a chat template may take; whole ones are counted
TEMPLATE_BYTES = 2**29  # of memory that it may take
WALL_SECONDS = 60.0  # after which no answer is waited for, nor for the process to start: a busy machine gives it little of its time
WORKER = Path(__file__).with_name("chat_worker.py")


class ChatTokenizer(Protocol):
    """The part of a tokenizer that conversations need."""

    @property
    def special_tokens_map(self) -> Mapping[str, str]: ...

    def get_chat_template(self) -> str: ...


class RendererError(EchelonError):
    """The process that renders chat templates ended, or said nothing, where no template can be blamed."""


class Renderer:
    """The process, and the way to it: one conversation at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._owner = 0  # the process that started it; one that was forked from that starts its own

    def render(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """`text`, or why there is none as `error`, or the `length` of one that is too long.

        Raises
        ------
        RendererError  the process cannot be started
        """
        message = json.dumps(asked | {"seconds": TEMPLATE_SECONDS}).encode()
        with self._lock:
            connection = self._connected()
            try:
                deadline = time.monotonic() + WALL_SECONDS
                send(connection, message, deadline)
                if (answer := receive(connection, deadline)) is not None:
                    found: dict[str, Any] = json.loads(answer)
                    return found
                return {"error": self._end()}
            except TimeoutError:
                self._end()
                return {"error": f"it took more than {WALL_SECONDS:.0f} s"}
            except ConnectionError:
                return {"error": self._end()}
            except BaseException:  # what it says next would be taken for the next one's answer
                self._end()
                raise

    def close(self) -> None:
        """End the process; it is started anew when it is needed."""
        with self._lock:
            self._end()

    @property
    def pid(self) -> int | None:
        """Of the process, if it runs."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def _connected(self) -> socket.socket:
        if self._socket is not None and self._owner == os.getpid() and self.pid is not None:
            return self._socket
        self._end()
        ours, theirs = socket.socketpair()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            command = [sys.executable, "-P", str(WORKER), str(TEMPLATE_BYTES)]
            self._process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.DEVNULL, env=environment)
        self._socket, self._owner = ours, os.getpid()
        atexit.unregister(self.close)
        atexit.register(self.close)
        try:
            is_ready = receive(ours, time.monotonic() + WALL_SECONDS) is not None
        except OSError:
            is_ready = False
        if not is_ready:
            raise RendererError(f"the process that renders chat templates did not start ({self._end()}); see its error above")
        return ours

    def _end(self) -> str:
        """How the process ended, or that it was ended now."""
        process, connection, self._process, self._socket = self._process, self._socket, None, None
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
            return f"it took more than {TEMPLATE_SECONDS:g} s of processor time"
        return f"its process ended with status {status}"


RENDERER = Renderer()


def send(connection: socket.socket, message: bytes, deadline: float) -> None:
    """The length of a message in 8 bytes, and the message.

    Raises
    ------
    TimeoutError, ConnectionError
    """
    connection.settimeout(max(deadline - time.monotonic(), 1e-3))
    connection.sendall(len(message).to_bytes(8, "big") + message)


def receive(connection: socket.socket, deadline: float) -> bytes | None:
    """The next message; None where the other side has closed.

    Raises
    ------
    TimeoutError, ConnectionError
    """
    head = _receive_exactly(connection, 8, deadline)
    return None if head is None else _receive_exactly(connection, int.from_bytes(head, "big"), deadline)


def _receive_exactly(connection: socket.socket, count: int, deadline: float) -> bytes | None:
    pieces = bytearray()
    while len(pieces) < count:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = connection.recv(min(count - len(pieces), 2**16))
        if not piece:
            return None
        pieces += piece
    return bytes(pieces)


def render_chat(tokenizer: ChatTokenizer, messages: SequenceOf[Mapping[str, Any]], most_characters: int) -> str:
    """The text that `tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)` gives.

    Raises
    ------
    RequestError   the template refuses the conversation, fails, takes too long or too much memory, or its text is too long
    RendererError  there is no process to render it in
    """
    trouble = "the chat template cannot render this conversation"
    try:
        asked = {
            "template": tokenizer.get_chat_template(),
            "messages": [{name: value for name, value in dict(m).items() if value is not None} for m in messages],
            "special_tokens": dict(tokenizer.special_tokens_map),
            "most_characters": most_characters,
        }
        json.dumps(asked["messages"])
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{trouble}: {error}; send messages as mappings of plain JSON values") from error
    answer = RENDERER.render(asked)
    if "length" in answer:
        raise RequestError(f"the conversation becomes {answer['length']:,} characters, more than {most_characters:,} can fit; shorten it")
    if "error" in answer:
        raise RequestError(f"{trouble}: {answer['error']}; change the conversation, or the template in the model's folder")
    text: str = answer["text"]
    return text
