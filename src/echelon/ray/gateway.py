"""What stands before the replicas: it chooses one by how a request begins, and asks another where one dies."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any

import ray.exceptions
from prometheus_client import CONTENT_TYPE_LATEST
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.responses import Response

from echelon.errors import RequestTimeoutError, UnavailableError
from echelon.ray.affinity import affinity_of
from echelon.ray.cluster import listen_on_node_alone
from echelon.ray.merged_metrics import merged
from echelon.ray.resumption import ResumableAnswer
from echelon.server.config import ServerConfig
from echelon.server.middleware import AdmissionMiddleware, App, Message, Receive, ResponseSender, Scope, Send, until_disconnect
from echelon.server.serializers import api_error

logger = logging.getLogger("ray.serve")
LOST = (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError, ray.exceptions.ObjectLostError, ReplicaUnavailableError)
MOST_ATTEMPTS = 4  # a request that ends every replica it meets ends no more than so many
REQUEST_ID = b"x-request-id"
STATE_SECONDS = 10.0  # for what asks how a replica does
PASSED_ON = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "client", "server")


class Gateway:
    """The one application that clients reach. It checks keys and sizes as the server does, and passes requests on to `replicas`.

    Requests of one conversation go to one replica, whose prefix cache has its keys and values: the router keeps requests of one session
    together, and a session is what `affinity_of` says.
    """

    def __init__(self, replicas: DeploymentHandle[Any], config: ServerConfig) -> None:
        listen_on_node_alone()
        self._replicas, self._config = replicas, config

    def __serve_build_asgi_app__(self) -> App:
        """The application, as Ray Serve asks for it once the object is made."""
        walls, lifespan = AdmissionMiddleware(self._pass_on, self._config, None), Starlette()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await (lifespan if scope["type"] == "lifespan" else walls)(scope, receive, _without_request_id(send))

        return app

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["raw_path"] == b"/livez":
            await Response()(scope, receive, send)
            return
        body, sender = (await receive())["body"], ResponseSender(send)
        is_metrics = scope["raw_path"] == b"/metrics" and scope["method"] == "GET"
        work = self._metrics(scope, receive, sender.send) if is_metrics else self._answer(_asked(scope), body, sender)
        limit = self._config.queue_timeout + self._config.total_timeout if scope["method"] == "POST" else STATE_SECONDS
        try:
            async with asyncio.timeout(limit):
                await until_disconnect(work, receive)
        except Exception as error:
            late = isinstance(error, TimeoutError)
            await sender.end(api_error(RequestTimeoutError(f"no replica answered within {limit:.0f} s; ask later") if late else error))

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the figures of all replicas."""
        found = await self._replicas.broadcast("metrics").results_async(return_exceptions=True)
        page = merged(dict(each for each in found if not isinstance(each, BaseException)))
        await Response(page, media_type=CONTENT_TYPE_LATEST)(scope, receive, send)

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


def _asked(scope: Scope) -> Scope:
    """What a replica is told of a request, which has an id now if it had none."""
    name = scope["state"]["request_id"] or secrets.token_hex(16)
    headers = [(key, value) for key, value in scope["headers"] if key != REQUEST_ID]
    return {key: scope[key] for key in PASSED_ON if key in scope} | {"headers": [*headers, (REQUEST_ID, name.encode())]}


def _without_request_id(send: Send) -> Send:
    """Ray Serve names the request in what it sends, so nobody else need."""

    async def unnamed(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [(key, value) for key, value in message["headers"] if key != REQUEST_ID]}
        await send(message)

    return unnamed
