"""The server: uvicorn with bounds on its connections, and a shutdown that lets running requests finish, or tells them why not."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from echelon.aio.engine_thread import POLL_SECONDS
from echelon.errors import ConfigError
from echelon.llm import LLM
from echelon.server.app import create_app
from echelon.server.config import ServerConfig, url_of
from echelon.server.connection import protocol_class
from echelon.server.middleware import AdmissionMiddleware

THREAD_SECONDS = 60.0  # that a server in a thread may take to start, and to end
LAST_SECONDS = 1.0  # that clients have to be told why their answers end, and an engine to end its step, once nothing is waited for
ENGINE_FAILED, REQUESTS_CUT = 1, 3  # exit status
logger = logging.getLogger("echelon.server")


class Server(uvicorn.Server):
    """On the first SIGTERM or SIGINT, requests are refused while running ones finish, for the drain timeout; on the second, or then, they
    are cut: each is told so. Where the engine has died all have been told, and the server ends by itself."""

    def __init__(self, config: uvicorn.Config, app: AdmissionMiddleware, on_start: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(config)
        self._on_start = on_start
        self._middleware, self._engine_thread = app, app.service.engine_thread
        self._gives_up_at = 0.0
        self.has_started, self.has_ended = threading.Event(), threading.Event()

    @property
    def exit_status(self) -> int:
        """0 where every request was answered to its end and the engine has ended as it was told."""
        if self._engine_thread.has_failed:
            return ENGINE_FAILED
        return REQUESTS_CUT if self._middleware.num_cut else 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start(self.url)
        self.has_started.set()

    @property
    def url(self) -> str:
        """Where it listens."""
        return url_of(self.config.host, self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, _sig: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._engine_thread.is_draining:
            logger.info("a second signal: running requests are cut")
            self.should_exit, self._gives_up_at, self._engine_thread.leaves_at = True, now, now + LAST_SECONDS
            return
        self._drain()
        logger.info("shutting down: %d sequences are finished first", self._engine_thread.num_in_flight)

    def _drain(self) -> None:
        self._engine_thread.is_draining = True  # first of all: a signal may come in the middle of this
        self._gives_up_at = time.monotonic() + self._middleware.service.config.drain_timeout

    async def on_tick(self, counter: int) -> bool:
        if self._engine_thread.has_died and not self._engine_thread.is_draining:
            logger.critical("the engine has died: the server ends, once all requests have been told")
            self._drain()
        if self._engine_thread.is_draining and not self.should_exit:
            self.should_exit = self._engine_thread.num_in_flight == 0 or time.monotonic() > self._gives_up_at
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listeners, let answers be sent, and cut those that take too long; no task is left for uvicorn to cancel."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        self._middleware.cut(unread_alone=True)
        if not await self._is_idle_by(lambda: self._gives_up_at):
            self._middleware.cut()
            until = time.monotonic() + LAST_SECONDS
            if not await self._is_idle_by(lambda: min(until, self._engine_thread.leaves_at)):
                for connection in list(self.server_state.connections):
                    connection.transport.abort()
                await self._is_idle_by(lambda: until + LAST_SECONDS)
        if self._middleware.num_cut:
            logger.warning("%d requests were cut", self._middleware.num_cut)
        await super().shutdown(sockets)
        if self._engine_thread.has_failed:
            logger.error("the engine had died, or hung: its requests were not answered")
        self.has_ended.set()

    async def _is_idle_by(self, limit: Callable[[], float]) -> bool:
        """Wait until nothing is being answered or sent, or until `limit()` (`time.monotonic`), which a signal may bring nearer."""
        while self.server_state.tasks or self.server_state.connections:
            if time.monotonic() >= limit():
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True


def check_address(config: ServerConfig) -> None:
    """See whether a server could listen there, before a model is read for it.

    Raises
    ------
    ConfigError  another program listens there, or it is no address of this machine
    """
    with socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            remedy = "give another --host" if isinstance(error, socket.gaierror) else "give another --port, or 0 for a free one"
            raise ConfigError(f"nothing can listen on {config.host}, port {config.port}: {error.strerror}; {remedy}") from error


def build_server(app: AdmissionMiddleware, config: ServerConfig, on_start: Callable[[str], None] = lambda _: None) -> Server:
    """A server of an application with the bounds of `config`; it calls `on_start` with its URL, and installs no log configuration."""
    settings = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http=protocol_class(config, app.service.metrics),
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
    return Server(settings, app, on_start)


def serve_until_signal(llm: LLM, config: ServerConfig, on_start: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT, or the engine's death, and until the requests of that moment are answered; the exit status of the
    process. `on_start` is called with the URL.
    """
    server = build_server(create_app(llm, config), config, on_start)
    server.run()
    return server.exit_status


@contextmanager
def serving_in_thread(app: AdmissionMiddleware, config: ServerConfig) -> Iterator[tuple[str, Server]]:
    """URL and server of `app`, in a thread of this process until the end of the block."""
    server = build_server(app, config)
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        if not server.has_started.wait(THREAD_SECONDS):
            raise RuntimeError(f"the server has not started within {THREAD_SECONDS:.0f} s")
        yield server.url, server
    finally:
        server.should_exit = True
        thread.join(THREAD_SECONDS)
    if thread.is_alive():
        raise RuntimeError(f"the server has not ended within {THREAD_SECONDS:.0f} s")
