"""What stands between a connection and the routes: who may send a request, and how large it may be; streams of events.

Decided on the raw request, before any routing: a path that a router would read differently cannot slip through.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import ExitStack, aclosing, contextmanager
from typing import Any

from fastapi import Response

from echelon.errors import location_of
from echelon.server.config import ServerConfig, names_loopback
from echelon.server.page import page
from echelon.server.protocol import ApiError, unavailable
from echelon.server.serializers import api_error, error_event

logger = logging.getLogger("echelon.server")
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = (b"/livez", b"/readyz")  # for whoever supervises the process; they tell nothing else
LONGEST_REQUEST_ID = 128
SHUTTING_DOWN = unavailable("the server shuts down before this request is finished; ask again elsewhere or later", "shutting_down")


class ClientDisconnectError(Exception):
    """The client went away while it sent its request."""


class ResponseSender:
    """Sends the response to one request, and knows how much of it has been sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = self.is_complete = self.is_stream = False

    async def send(self, message: Message) -> None:
        """Pass an ASGI message on."""
        await self._send(message)
        if message["type"] == "http.response.start":
            self.has_begun = True
            self.is_stream = any(name == b"content-type" and b"event-stream" in value for name, value in message.get("headers", ()))
        else:
            self.is_complete = not message.get("more_body", False)

    async def end(self, error: ApiError) -> None:
        """End the response early with an error: as a status if nothing has been sent, as an event in a stream."""
        if not self.has_begun:
            await send_error(error, self.send, close=True)
        elif self.is_stream:
            await self.send({"type": "http.response.body", "body": error_event(error), "more_body": False})


class AdmissionMiddleware:
    """Checks keys and host names, and reads bodies whole, within a size and a time.

    `num_cut` counts the requests that `cut` has ended: they were being worked on, and are not answered to the end.
    """

    def __init__(self, app: App, config: ServerConfig, service: Any) -> None:
        self._app, self._config, self.service = app, config, service
        self._secret = secrets.token_bytes(32)  # of this process: nobody else can make the salt of a key
        self._digests = [hashlib.sha256(key.get_secret_value().encode()).digest() for key in config.api_keys]
        self._being_read: set[asyncio.Task[Any]] = set()
        self._being_answered: set[asyncio.Task[Any]] = set()
        self._is_cutting = False
        self.num_cut = 0

    def cut(self, unread_alone: bool = False) -> None:
        """End requests that are not answered yet: each is told that the server shuts down. With `unread_alone` only those whose body is
        still coming, which would be refused anyway."""
        self._is_cutting = True
        for task in self._being_read if unread_alone else self._being_read | self._being_answered:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        name = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = name
        response = ResponseSender(_with_request_id(name, send) if name else send)
        try:
            with _listed(self._being_read):
                self._admit(scope)
                body = await self._read(scope, receive)
            with _listed(self._being_answered):
                await self._answer(scope, _replayed(body, receive), response)
        except ApiError as error:
            if error.status == 401 and scope["raw_path"] == b"/" and scope["method"] == "GET":  # a browser sends no key by itself
                await page(401, {**error.headers, "Connection": "close"})(scope, receive, response.send)
            else:
                await response.end(error)
        except ClientDisconnectError:
            pass
        except asyncio.CancelledError:
            if not self._is_cutting:
                raise
            await response.end(SHUTTING_DOWN)

    async def _answer(self, scope: Scope, receive: Receive, response: ResponseSender) -> None:
        try:
            await self._app(scope, receive, response.send)
        except Exception as error:  # answered by the application, which passes it on
            logger.error("a request failed: %s", location_of(error))
        except asyncio.CancelledError:
            self.num_cut += not response.is_complete
            raise

    def _admit(self, scope: Scope) -> None:
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._config.max_header_bytes:
            raise ApiError(
                431, f"the head of the request is larger than {self._config.max_header_bytes} bytes; send less", "head_too_large"
            )
        if scope["raw_path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            return
        digest = b""
        if not self._digests:
            self._check_host(scope)
        else:
            digest = self._digest_of_key(_values(scope, b"authorization"))
        scope.setdefault("state", {})["key_salt"] = hmac.digest(self._secret, digest, "sha256")

    def _digest_of_key(self, given: list[bytes]) -> bytes:
        """The digest of a valid key. Digests of equal length are compared, all of them, in constant time."""
        scheme, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        hits = [hmac.compare_digest(digest, known) for known in self._digests]
        if not (any(hits) and scheme.lower() == b"bearer"):
            raise ApiError(
                401, "a valid API key is needed: Authorization: Bearer KEY", "invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
        return digest

    def _check_host(self, scope: Scope) -> None:
        """Without a key only this machine may ask, and a browser may not be led here under another name (DNS rebinding)."""
        hosts = _values(scope, b"host")
        name = hosts[0].decode("latin-1").rpartition(":") if len(hosts) == 1 else ("", "", "")
        bare = name[0] if name[1] and name[2].isdigit() else "".join(name)
        if not names_loopback(bare):
            raise ApiError(403, "without an API key this server answers to localhost alone; start it with --api-key-file", "forbidden_host")

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        limit = self._config.max_body_bytes
        too_large = ApiError(413, f"the body is larger than {limit} bytes; send less", "body_too_large")
        if any(value.strip().lower() not in (b"", b"identity") for value in _values(scope, b"content-encoding")):
            raise ApiError(415, "compressed bodies are not read; send the body as it is", "unsupported_encoding")
        lengths = _values(scope, b"content-length")
        if lengths and _values(scope, b"transfer-encoding"):  # a proxy may see another end of the body, and another request after it
            raise ApiError(400, "Content-Length beside Transfer-Encoding is ambiguous; send one of them")
        if lengths and int(lengths[0]) > limit:  # the HTTP parser has seen that it is a number
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._config.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnectError
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body took longer than {self._config.body_timeout:.0f} s", "body_timeout") from None


@contextmanager
def _listed(tasks: set[asyncio.Task[Any]]) -> Iterator[None]:
    """The task that runs this stands in `tasks` until the end of the block."""
    task = asyncio.current_task()
    assert task is not None
    tasks.add(task)
    try:
        yield
    finally:
        tasks.remove(task)


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body in one message, then whatever comes: a disconnect."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message


def _request_id(scope: Scope) -> str:
    """The client's own name for a request; empty where it gives none, several, or no printable one."""
    given = _values(scope, b"x-request-id")
    name = given[0] if len(given) == 1 else b""
    return name.decode() if 0 < len(name) <= LONGEST_REQUEST_ID and all(33 <= c < 127 for c in name) else ""


def _with_request_id(name: str, send: Send) -> Send:
    """The client's own name for a request goes back to it."""

    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
        await send(message)

    return named


async def send_error(error: ApiError, send: Send, close: bool = False) -> None:
    """Send an error as a whole response; `close`: and end the connection after it."""
    body = json.dumps(error.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    headers += [(b"connection", b"close")] if close else []
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class EventStream(Response):
    """A response of server-sent events, made as they are sent. An error before the first is an error status, a later one is an event.

    A client that leaves ends the making of events. `slots` are released at the end.
    """

    def __init__(self, events: AsyncIterator[bytes], slots: ExitStack) -> None:
        super().__init__()
        self._events, self._slots = events, slots

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        with self._slots:
            await until_disconnect(self._send_all(send), receive)

    async def _send_all(self, send: Send) -> None:
        has_begun = False
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            try:
                async for event in events:
                    if not has_begun:
                        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        has_begun = True
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                problem = api_error(error)
                if not has_begun:
                    await send_error(problem, send)
                    return
                await send({"type": "http.response.body", "body": error_event(problem), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(work: Any, receive: Receive) -> Any:
    """The result of `work`, which is cancelled if the client leaves first; then `None`."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (message := await receive())["type"] != "http.disconnect":
        assert message["type"] == "http.request"
