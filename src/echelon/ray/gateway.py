"""What stands before the replicas: it chooses one by how a request begins, and asks another where one dies."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any

import ray.exceptions
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from echelon.errors import RequestTimeoutError, UnavailableError
from echelon.ray.affinity import affinity_of
from echelon.ray.resumption import ResumableAnswer
from echelon.server.config import ServerConfig
from echelon.server.middleware import AdmissionMiddleware, App, Message, Receive, ResponseSender, Scope, Send, until_disconnect
from echelon.server.serializers import api_error

logger = logging.getLogger("ray.serve")
LOST = (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError, ray.exceptions.ObjectLostError, ReplicaUnavailableError)
MOST_ATTEMPTS = 4  # a request that ends every replica it meets ends no more than so many
REQUEST_ID = b"x-request-id"
STATE_SECONDS = 10.0  # for what asks how a replica does
ALIVE: tuple[Message, ...] = ({"type": "http.response.start", "status": 200, "headers": []}, {"type": "http.response.body", "body": b""})
PASSED_ON = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "client", "server")


class Gateway:
    """The one application that clients reach. It checks keys and sizes as the server does, and passes requests on to `replicas`.

    Requests of one conversation go to one replica, whose prefix cache has its keys and values: the router keeps requests of one session
    together, and a session is what `affinity_of` says.
    """

    def __init__(self, replicas: DeploymentHandle[Any], config: ServerConfig) -> None:
        self._replicas, self._config = replicas, config

    def __serve_build_asgi_app__(self) -> App:
        """The application, as Ray Serve asks for it once the object is made."""
        walls, lifespan = AdmissionMiddleware(self._pass_on, self._config, None), Starlette()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await (lifespan if scope["type"] == "lifespan" else walls)(scope, receive, _without_request_id(send))

        return app

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["raw_path"] == b"/livez":
            for message in ALIVE:
                await send(message)
            return
        body = (await receive())["body"]
        name = scope["state"]["request_id"] or secrets.token_hex(16)
        headers = [(key, value) for key, value in scope["headers"] if key != REQUEST_ID]
        asked = {key: scope[key] for key in PASSED_ON if key in scope} | {"headers": [*headers, (REQUEST_ID, name.encode())]}
        limit = self._config.queue_timeout + self._config.total_timeout if scope["method"] == "POST" else STATE_SECONDS
        sender = ResponseSender(send)
        try:
            async with asyncio.timeout(limit):
                await until_disconnect(self._answer(asked, body, sender), receive)
        except Exception as error:
            late = isinstance(error, TimeoutError)
            await sender.end(api_error(RequestTimeoutError(f"no replica answered within {limit:.0f} s; ask later") if late else error))

    async def _answer(self, asked: Scope, body: bytes, sender: ResponseSender) -> None:
        """Ask the replica that the request's session belongs to, and where it ends on the way, the next one."""
        answer, session = ResumableAnswer(sender), affinity_of(asked, body)
        for attempt in range(1, MOST_ATTEMPTS + 1):
            messages = self._replicas.options(stream=True, session_id=session).answer.remote(asked, body)
            try:
                async for message in messages:
                    await answer.take(message)
                return
            except LOST as error:
                logger.warning("a replica ended while it answered (attempt %d of %d): %s", attempt, MOST_ATTEMPTS, type(error).__name__)
                answer.restart()
            finally:
                messages.cancel()
        raise UnavailableError(f"{MOST_ATTEMPTS} replicas ended while they answered this request; ask again later")


def _without_request_id(send: Send) -> Send:
    """Ray Serve names the request in what it sends, so nobody else need."""

    async def unnamed(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [(key, value) for key, value in message["headers"] if key != REQUEST_ID]}
        await send(message)

    return unnamed
