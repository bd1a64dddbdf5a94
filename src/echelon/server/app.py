"""The routes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, asynccontextmanager
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from echelon.errors import EchelonError, RequestError
from echelon.llm import LLM
from echelon.server.answers import RETRY, Answers, Plan, Stream, api_error
from echelon.server.bridge import Bridge
from echelon.server.config import ServerConfig
from echelon.server.metrics import Metrics
from echelon.server.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    validation_error,
)
from echelon.server.request_state import State, Ticket
from echelon.server.responses import (
    Chat,
    Completion,
    Detokenized,
    ErrorBody,
    ModelCard,
    ModelList,
    Tokens,
    Version,
)
from echelon.server.streaming import EventStream, known_error, until_gone
from echelon.server.wall import Wall

logger = logging.getLogger("echelon.server")
T = TypeVar("T")
NUM_TEXT_THREADS = 2
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 500, 503)
}


class Service:
    """One model behind the routes."""

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.llm, self.config = llm, config
        self.model = config.served_model_name or llm.target.name
        self.metrics = Metrics(llm, config.metrics_prefix, self.model)
        self.bridge = Bridge(llm, config, self.metrics)
        self.answers = Answers(llm)
        self.card = ModelCard(id=self.model, created=int(time.time()), owned_by="echelon", max_model_len=llm.max_len)
        self._threads = ThreadPoolExecutor(NUM_TEXT_THREADS, "echelon-text")

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """What may take long runs beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def close(self) -> None:
        await self.bridge.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check_model(self, asked: str | None) -> None:
        if asked is not None and asked != self.model:
            raise ApiError(
                404, f"the model {asked[:200]!r} does not exist here; this server has {self.model!r}", "model_not_found", "model"
            )

    def plan_completion(self, asked: CompletionRequest) -> Plan:
        encoded = [self.llm.inputs.encode(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompts]
        all_params = [asked.sampling_params(self.llm.inputs.room_after(len(tokens))) for tokens in encoded]
        prompts = [self.llm.inputs.samples(tokens, params, watch_text=True) for tokens, params in zip(encoded, all_params, strict=True)]
        return Plan(
            self.model,
            prompts,
            asked.n or 1,
            is_chat=False,
            stream=bool(asked.stream),
            include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
            continuous_usage=bool(asked.stream_options and asked.stream_options.continuous_usage_stats),
            echo=[self._text_of(p) for p in asked.prompts] if asked.echo else None,
            only_echo=asked.max_tokens == 0,
            has_logprobs=asked.logprobs is not None,
        )

    def _text_of(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.decode(prompt)

    def plan_chat(self, asked: ChatRequest) -> Plan:
        tokens = self.llm.inputs.encode_chat([m.for_template() for m in asked.messages])
        params = asked.sampling_params(self.llm.inputs.room_after(len(tokens)))
        return Plan(
            self.model,
            [self.llm.inputs.samples(tokens, params, watch_text=True)],
            asked.n or 1,
            is_chat=True,
            stream=bool(asked.stream),
            include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
            continuous_usage=bool(asked.stream_options and asked.stream_options.continuous_usage_stats),
            has_logprobs=bool(asked.logprobs),
        )

    def decode(self, tokens: list[int]) -> str:
        if self.llm.target.tokenizer is None:
            raise RequestError(f"{self.model!r} has no tokenizer")
        if len(tokens) > self.llm.max_len:
            raise RequestError(f"{len(tokens)} tokens are more than the context of {self.llm.max_len}; send them in parts")
        if bad := [t for t in tokens if t >= self.llm.target.vocab_size]:
            raise RequestError(f"token id {bad[0]} is outside the vocabulary of {self.llm.target.vocab_size}")
        text: str = self.llm.target.tokenizer.decode(tokens)
        return text

    def tokenize(self, asked: TokenizeRequest) -> Tokens:
        special = asked.add_special_tokens is not False
        if asked.messages is not None:
            tokens = self.llm.inputs.encode_chat([m.for_template() for m in asked.messages])
        else:
            tokens = self.llm.inputs.encode(asked.prompt or "", add_special_tokens=special)
        pieces = [self.answers.piece(t) for t in tokens] if asked.return_token_strs else None
        return Tokens(count=len(tokens), max_model_len=self.llm.max_len, tokens=tokens, token_strs=pieces)

    async def respond(self, request: Request, num_sequences: int, plan_of: Callable[[Any], Plan], asked: Any) -> Response:
        """The answer to a request for `num_sequences` sequences, whole or as a stream; its places are taken before anything is done."""
        arrived_at = time.monotonic()
        self.check_model(asked.model)
        if num_sequences > self.bridge.capacity:
            raise ApiError(400, f"prompts × samples = {num_sequences}, this server takes {self.bridge.capacity}; send fewer in one request")
        with ExitStack() as places:
            self.bridge.take(num_sequences)
            places.callback(self.bridge.give, num_sequences)
            plan = await self.in_thread(plan_of, asked)
            updates = self.bridge.updates(plan.sequences, arrived_at)
            if plan.stream:
                return EventStream(self._events(plan, updates), places.pop_all())
            states = await until_gone(self._finished(updates), request.receive)
            if states is None:
                return Response(status_code=499)  # nobody reads it
            return Response(self.answers.whole(plan, states).model_dump_json(), media_type="application/json")

    async def _finished(self, updates: AsyncIterator[Ticket]) -> list[State]:
        """The last states of all rows; the first failure of any is raised."""
        states: list[State] = []
        async with aclosing(updates):  # type: ignore[type-var]
            async for ticket in updates:
                states = _checked(ticket.states)
        return states

    async def _events(self, plan: Plan, updates: AsyncIterator[Ticket]) -> AsyncIterator[bytes]:
        stream = Stream(self.answers, plan)
        states: list[State] = []
        async with aclosing(updates):  # type: ignore[type-var]
            async for ticket in updates:
                states = _checked(ticket.states)
                if chunks := b"".join(stream.next(states)):
                    yield chunks
        yield b"".join(stream.last(states))


def _checked(states: list[State]) -> list[State]:
    error = next((s.error for s in states if s.error is not None), None)
    if error is not None:
        raise error
    return states


def create_app(llm: LLM, config: ServerConfig) -> Wall:
    """The server's ASGI application; its engine thread runs between the lifespan's start and end. `Wall.service` is what serves."""
    service = Service(llm, config)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.bridge.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="echelon",
        version=version("echelon"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        responses=ERRORS,
    )
    _add_generation(app, service)
    _add_text(app, service)
    _add_state(app, service)
    _add_errors(app)
    _describe(app)
    return Wall(app, config, service)


def _add_generation(app: FastAPI, service: Service) -> None:
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    stream: dict[str, Any] = {"content": {"text/event-stream": {"schema": event}}}

    @app.post("/v1/completions", response_model=Completion, responses={200: stream})
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        num_sequences = len(asked.prompts) * (asked.best_of or asked.n or 1)
        return await service.respond(request, num_sequences, service.plan_completion, asked)

    @app.post("/v1/chat/completions", response_model=Chat, responses={200: stream})
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        return await service.respond(request, asked.n or 1, service.plan_chat, asked)


def _add_text(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> Tokens:
        service.check_model(asked.model)
        return await service.in_thread(service.tokenize, asked)

    @app.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest) -> Detokenized:
        service.check_model(asked.model)
        return Detokenized(prompt=await service.in_thread(service.decode, asked.tokens))


def _add_state(app: FastAPI, service: Service) -> None:
    bridge = service.bridge

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[service.card])

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str) -> ModelCard:
        service.check_model(model)
        return service.card

    @app.get("/health", response_class=Response)
    async def health() -> Response:
        """200 while the engine makes progress, or has none to make."""
        return _alive(bridge.is_healthy)

    @app.get("/livez", response_class=Response)
    async def livez() -> Response:
        """200 while the process answers."""
        return Response()

    @app.get("/readyz", response_class=Response)
    async def readyz() -> Response:
        """200 while new requests are taken."""
        return _alive(bridge.is_healthy and not bridge.is_draining)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def show_version() -> Version:
        return Version(version=version("echelon"))


def _alive(is_alive: bool) -> Response:
    if is_alive:
        return Response()
    raise ApiError(503, "not now", "unavailable", headers=RETRY)


def _add_errors(app: FastAPI) -> None:
    """Every error leaves in OpenAI's form."""

    def answer(error: ApiError) -> Response:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        return answer(validation_error(error.errors(), error.body))

    @app.exception_handler(HTTPException)
    async def http(_request: Request, error: HTTPException) -> Response:
        return answer(ApiError(error.status_code, str(error.detail), headers=error.headers))

    @app.exception_handler(ApiError)
    async def api(_request: Request, error: ApiError) -> Response:
        return answer(error)

    @app.exception_handler(EchelonError)
    async def ours(_request: Request, error: EchelonError) -> Response:
        return answer(known_error(error))

    @app.exception_handler(Exception)
    async def unknown(_request: Request, error: Exception) -> Response:
        return answer(api_error(error))


def _describe(app: FastAPI) -> None:
    """The OpenAPI document says 400 where the framework would answer 422."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        document = describe()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
