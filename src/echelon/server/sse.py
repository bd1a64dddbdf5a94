"""Server-sent events, and the end of a request's work when its client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing
from typing import Any

from fastapi import Response

from echelon.errors import location_of
from echelon.server.middleware import Receive, Scope, Send, send_error
from echelon.server.protocol import ApiError
from echelon.server.serializers import api_error, error_event

logger = logging.getLogger("echelon.server")


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
                problem = logged_api_error(error)
                if not has_begun:
                    await send_error(problem, send)
                    return
                await send({"type": "http.response.body", "body": error_event(problem), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def logged_api_error(error: Exception) -> ApiError:
    """The error response for an exception; one that nobody expected is logged."""
    response = api_error(error)
    if response.status == 500:
        logger.error("a request failed: %s", location_of(error))
    return response


async def until_disconnect(work: Any, receive: Receive) -> Any:
    """The result of `work`, which is cancelled if the client leaves first; then `None`."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (message := await receive())["type"] != "http.disconnect":
        assert message["type"] == "http.request"
