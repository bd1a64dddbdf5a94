"""One connection: uvicorn's HTTP/1.1 protocol, with bounds on what a client may send in pieces, leave unsent, or leave unread."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from echelon.server.config import ServerConfig
from echelon.server.metrics import ServerMetrics
from echelon.server.protocol import ApiError

SEND_BYTES = 2**17  # that the system holds for a client that does not read; as much again waits in this process
READ_BYTES = 2**13  # of one read: its chunks are parsed at once (15 ms at worst), while nothing else is served
logger = logging.getLogger("echelon.server")


class TooManyPiecesError(h11.RemoteProtocolError):
    """A body arrives in so many pieces that reading it costs too much."""


class CountingConnection(h11.Connection):
    """HTTP/1.1 parsing that refuses a body in more than `max_pieces` chunks and reads."""

    def __init__(self, max_head_bytes: int, max_pieces: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._max_pieces, self._num_pieces = max_pieces, 0

    def receive_data(self, data: bytes) -> None:
        self._num_pieces += self.their_state is h11.SEND_BODY
        super().receive_data(data)

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_pieces = 0
        elif isinstance(event, h11.Data):
            self._num_pieces += 1
            if self._num_pieces > self._max_pieces:
                raise TooManyPiecesError(f"the body arrives in more than {self._max_pieces} pieces; send larger ones")
        return event


class UnreadBuffers:
    """Connections whose clients read less than they are sent, the one that has been waiting longest first."""

    def __init__(self, max_bytes: int, metrics: ServerMetrics) -> None:
        self._max_bytes, self._metrics = max_bytes, metrics
        self._waiting: dict[BoundedProtocol, None] = {}

    def add(self, connection: BoundedProtocol) -> None:
        """A client has begun not to read. Where too much waits for all together, others are cut, however large its own answer is."""
        while self._waiting and self._num_bytes + connection.num_unread_bytes > self._max_bytes:
            self.cut(next(iter(self._waiting)), "buffers")
        self._waiting[connection] = None

    def remove(self, connection: BoundedProtocol) -> None:
        """Forget a connection that is read again, or closed."""
        self._waiting.pop(connection, None)

    def cut(self, connection: BoundedProtocol, limit: str) -> None:
        """Close a connection at once, and drop what waits for it; `limit` is a label of the metric."""
        self.remove(connection)
        logger.warning("a connection is cut: its client does not read, and %d bytes wait for it", connection.num_unread_bytes)
        self._metrics.unread_cut[limit].inc()
        connection.transport.abort()

    @property
    def _num_bytes(self) -> int:
        return sum(c.num_unread_bytes for c in self._waiting)


class BoundedProtocol(H11Protocol):
    """A connection that is cut when its client takes too long to send a request's head, or to read what it asked for."""

    bounds: ServerConfig
    unread: UnreadBuffers
    _head: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    def __init__(self, config: uvicorn.Config, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self.conn = CountingConnection(self.bounds.max_header_bytes, self.bounds.max_body_pieces)

    @property
    def num_unread_bytes(self) -> int:
        """Bytes that wait in this process, beside SEND_BYTES in the system."""
        return self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # of asyncio's selector transports: most bytes of a read
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP with an error like all others, unless a response is on its way already."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = _answer_to(sys.exception(), msg)
            body = json.dumps(error.body).encode()
            headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
            for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:  # whoever waits for the rest of the request
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head)
        self._head = None
        self._reads_again()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self._stuck or self.loop.call_later(self.bounds.write_timeout, self.unread.cut, self, "time")
        self.unread.add(self)

    def resume_writing(self) -> None:
        self._reads_again()
        super().resume_writing()

    def _reads_again(self) -> None:
        _cancel(self._stuck)
        self._stuck = None
        self.unread.remove(self)

    def _watch_head(self) -> None:
        """The clock runs from the connection, or the first byte of a further request, until the head is complete."""
        is_new = self.cycle is None
        is_half_read = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if self.conn.their_state is h11.IDLE and (is_new or is_half_read):
            self._head = self._head or self.loop.call_later(self.bounds.header_timeout, self.transport.abort)
        else:
            _cancel(self._head)
            self._head = None


def _answer_to(error: BaseException | None, msg: str) -> ApiError:
    """The error response to bytes that the parser has refused."""
    if isinstance(error, TooManyPiecesError):
        return ApiError(413, str(error), "too_many_pieces")
    if getattr(error, "error_status_hint", 400) == 431:
        return ApiError(431, "the head of the request is too large; send less", "head_too_large")
    return ApiError(400, msg)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def protocol_class(config: ServerConfig, metrics: ServerMetrics) -> type[BoundedProtocol]:
    """Connections of one server, with the bounds of `config`."""
    return type("Protocol", (BoundedProtocol,), {"bounds": config, "unread": UnreadBuffers(config.max_buffer_bytes, metrics)})
