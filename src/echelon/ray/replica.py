"""A replica: an engine and the server's own application, asked by messages of ASGI in the place of a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import transformers

from echelon.errors import UnavailableError
from echelon.llm import LLM
from echelon.server.app import create_app
from echelon.server.config import ServerConfig
from echelon.server.middleware import Message, Scope


class Replica:
    """What `echelon serve` runs, in an actor of Ray Serve. Parameters are those of `LLM`, and the server's configuration."""

    def __init__(self, model: str, speculative_config: Mapping[str, Any] | None, engine: Mapping[str, Any], config: ServerConfig) -> None:
        transformers.logging.disable_progress_bar()  # many actors, one log
        self._app = create_app(LLM(model, speculative_config, **engine), config)
        self._app.service.engine_thread.start()

    async def answer(self, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """The messages of ASGI that answer a request whose body has been read. Closing the iterator ends the request's work."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        coming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return coming.pop() if coming else await asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                await self._app(scope, receive, messages.put)
            finally:
                messages.put_nowait(None)

        work = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    def check_health(self) -> None:
        """Raise where /readyz would answer 503: Ray Serve then sends no more requests here, and starts another replica."""
        if not self._app.service.is_ready:
            raise UnavailableError("the engine has stopped or makes no progress")

    def metrics_text(self) -> str:
        """What /metrics says."""
        return self._app.service.metrics.text().decode()  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Stop the engine, once the last request has been answered; where it could not be made, there is none."""
        if hasattr(self, "_app"):
            await self._app.service.close()
