"""Sending what is still being made, and stopping when nobody reads it any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing
from typing import Any

from fastapi import Response

from echelon.errors import place_of
from echelon.server.answers import api_error, error_event
from echelon.server.protocol import ApiError
from echelon.server.wall import Receive, Scope, Send, send_error

logger = logging.getLogger("echelon.server")


class EventStream(Response):
    """Server-sent events, made as they are sent. Until the first is there an error is still an error status; afterwards it is an event.

    A client that leaves ends the making of events. `places` are given back at the end.
    """

    def __init__(self, events: AsyncIterator[bytes], places: ExitStack) -> None:
        super().__init__()
        self._events, self._places = events, places

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        with self._places:
            await until_gone(self._send_all(send), receive)

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
                problem = known_error(error)
                if not has_begun:
                    await send_error(problem, send)
                    return
                await send({"type": "http.response.body", "body": error_event(problem), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def known_error(error: Exception) -> ApiError:
    """The answer for an exception; one that nobody expected is logged."""
    answer = api_error(error)
    if answer.status == 500:
        logger.error("a request failed: %s", place_of(error))
    return answer


async def until_gone(work: Any, receive: Receive) -> Any:
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
