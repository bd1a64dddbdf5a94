"""The socket: uvicorn with bounds on slow clients, and a shutdown that lets running requests finish."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from echelon.api import LLM
from echelon.server.app import create_app
from echelon.server.bridge import Bridge
from echelon.server.config import ServerConfig
from echelon.server.protocol import ApiError

SEND_BYTES = 2**17  # that the system holds for a client that does not read; as much again waits in this process
THREAD_SECONDS = 60.0  # that a server in a thread may take to start, and to end
logger = logging.getLogger("echelon.server")


class BoundedProtocol(H11Protocol):
    """A connection that is cut when its client takes too long to send a request's head, or to read what it asked for."""

    header_timeout = 10.0
    write_timeout = 60.0
    _head: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets an error like all others, unless an answer is on its way already."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            is_head = getattr(sys.exception(), "error_status_hint", 400) == 431
            error = ApiError(431, "the head of the request is too large; send less", "head_too_large") if is_head else ApiError(400, msg)
            body = json.dumps(error.body).encode()
            headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
            for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head)
        self._head = None
        _cancel(self._stuck)
        self._stuck = None
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self._stuck or self.loop.call_later(self.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._stuck)
        self._stuck = None
        super().resume_writing()

    def _watch_head(self) -> None:
        """The clock runs from the connection, or the first byte of a further request, until the head is complete."""
        is_new = self.cycle is None
        is_half_read = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if self.conn.their_state is h11.IDLE and (is_new or is_half_read):
            self._head = self._head or self.loop.call_later(self.header_timeout, self.transport.abort)
        else:
            _cancel(self._head)
            self._head = None


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class Server(uvicorn.Server):
    """On the first SIGTERM or SIGINT, requests are refused while running ones finish; on the second, the server stops at once."""

    def __init__(self, config: uvicorn.Config, bridge: Bridge) -> None:
        super().__init__(config)
        self._bridge = bridge
        self._gives_up_at = 0.0
        self.has_started = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_started.set()

    def handle_exit(self, _sig: int, _frame: FrameType | None) -> None:
        if self._bridge.is_draining:
            self.should_exit = self.force_exit = True
            return
        logger.info("shutting down: %d sequences are finished first", self._bridge.num_in_flight)
        self._bridge.is_draining = True
        self._gives_up_at = time.monotonic() + self._bridge.config.drain_timeout

    async def on_tick(self, counter: int) -> bool:
        if self._bridge.is_draining and not self.should_exit:
            self.should_exit = self._bridge.num_in_flight == 0 or time.monotonic() > self._gives_up_at
        return await super().on_tick(counter)


def build_server(app: Any, bridge: Bridge, config: ServerConfig) -> Server:
    """A server of `app` with the bounds of `config`; it does not install a log configuration."""
    protocol = type("Protocol", (BoundedProtocol,), {"header_timeout": config.header_timeout, "write_timeout": config.write_timeout})
    settings = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http=protocol,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=config.max_header_bytes,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
        backlog=2048,
    )
    return Server(settings, bridge)


def serve_until_told(llm: LLM, config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT, and until the requests of that moment are answered."""
    app = create_app(llm, config)
    build_server(app, app.service.bridge, config).run()


@contextmanager
def serving_in_thread(app: Any, bridge: Bridge, config: ServerConfig) -> Iterator[tuple[str, Server]]:
    """URL and server of `app`, in a thread of this process until the end of the block."""
    server = build_server(app, bridge, config)
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        if not server.has_started.wait(THREAD_SECONDS):
            raise RuntimeError(f"the server has not started within {THREAD_SECONDS:.0f} s")
        yield f"http://{config.host}:{server.servers[0].sockets[0].getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(THREAD_SECONDS)
    if thread.is_alive():
        raise RuntimeError(f"the server has not ended within {THREAD_SECONDS:.0f} s")
