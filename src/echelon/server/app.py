"""The routes."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from echelon.aio.engine_thread import EngineThread
from echelon.aio.request_handle import RequestHandle
from echelon.errors import EchelonError, RequestError
from echelon.llm import LLM
from echelon.release import version
from echelon.sampling import seed_of
from echelon.sequence import RowState
from echelon.server.config import ServerConfig, id_of
from echelon.server.metrics import ServerMetrics
from echelon.server.middleware import AdmissionMiddleware, EventStream, until_disconnect
from echelon.server.page import page
from echelon.server.protocol import ApiError, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, unavailable
from echelon.server.responses import (
    ChatResponse,
    CompletionResponse,
    DetokenizeResponse,
    DrafterCard,
    ErrorResponse,
    ModelCard,
    ModelList,
    StatsResponse,
    TokenizeResponse,
    VersionResponse,
)
from echelon.server.serializers import GenerationJob, Serializer, StreamSerializer, api_error

T = TypeVar("T")
NUM_TEXT_THREADS = 2
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 500, 503)
}


class Service:
    """What the routes call: one model, its engine thread, its serializer and its metrics."""

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.llm, self.config = llm, config
        self.model = config.served_model_name or id_of(llm.target.name)
        self.metrics = ServerMetrics(llm, config.metrics_prefix, self.model)
        self.engine_thread = EngineThread(llm, config, self.metrics)
        self.serializer = Serializer(llm)
        self.started_at = time.monotonic()
        root = id_of(llm.target.name)
        self.card = ModelCard(id=self.model, created=int(time.time()), owned_by="echelon", root=root, max_model_len=llm.max_len)
        self._threads = ThreadPoolExecutor(NUM_TEXT_THREADS, "echelon-text")

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work that may take long beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def close(self) -> None:
        """Stop the engine's thread and those that read texts."""
        await self.engine_thread.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return self.engine_thread.is_healthy and not self.engine_thread.is_draining

    @property
    def drafter(self) -> DrafterCard | None:
        """What drafts, where something does."""
        config = self.llm.speculative_config
        if config is None:
            return None
        name = None if config.model is None else id_of(config.model)
        return DrafterCard(method=config.method, model=name, num_speculative_tokens=config.num_speculative_tokens)

    def stats(self) -> StatsResponse:
        """What runs, and the engine's counters as /metrics has them."""
        return StatsResponse(
            model=self.card,
            drafter=self.drafter,
            status="ready" if self.is_ready else "draining" if self.engine_thread.is_healthy else "unhealthy",
            uptime_seconds=time.monotonic() - self.started_at,
            max_num_seqs=self.llm.config.max_num_seqs,
            **self.llm.get_counters(),
        )

    def check_model(self, name: str | None) -> None:
        """Raise a 404 for the name of another model; `None` names none."""
        if name is not None and name != self.model:
            raise ApiError(404, f"the model {name[:200]!r} does not exist here; this server has {self.model!r}", "model_not_found", "model")

    def job(self, body: CompletionRequest | ChatRequest, key_salt: bytes, request_id: str = "") -> GenerationJob:
        """Render, tokenize and check a conversation, or the prompts of a completion. `key_salt` tells API keys apart; without a seed,
        `request_id` gives one, where there is any.
        """
        inputs, names = self.llm.inputs, body.prompt_names
        salt = key_salt if body.cache_salt is None else hmac.digest(key_salt, body.cache_salt.encode(), "sha256")
        if isinstance(body, ChatRequest):
            encoded = [inputs.encode_chat([m.for_template() for m in body.messages], variables=body.chat_template_kwargs)]
        else:
            encoded = [inputs.encode(p, name=n) if isinstance(p, str) else p for p, n in zip(body.prompts, names, strict=True)]
        defaults = inputs.generation_settings()
        all_params = [body.sampling_params(inputs.room_after(len(tokens)), defaults) for tokens in encoded]
        if request_id:
            seeds = [{"seed": seed_of(request_id, i)} if params.seed is None else {} for i, params in enumerate(all_params)]
            all_params = [params.model_copy(update=seed) for params, seed in zip(all_params, seeds, strict=True)]
        asked = zip(encoded, all_params, names, strict=True)
        prompts = [inputs.samples(tokens, params, watch_text=True, name=name, salt=salt) for tokens, params, name in asked]
        given = body.prompts if isinstance(body, CompletionRequest) and body.echo else None
        echo = None if given is None else [p if isinstance(p, str) else self.decode(p) for p in given]
        return GenerationJob(self.model, prompts, body, echo)

    def decode(self, tokens: list[int]) -> str:
        """Text of token ids; `RequestError` for more than the context holds, and for those outside the vocabulary."""
        if self.llm.target.tokenizer is None:
            raise RequestError(f"{self.model!r} has no tokenizer")
        if len(tokens) > self.llm.max_len:
            raise RequestError(f"{len(tokens)} tokens are more than the context of {self.llm.max_len}; send them in parts")
        if bad := [t for t in tokens if t >= self.llm.target.vocab_size]:
            raise RequestError(f"token id {bad[0]} is outside the vocabulary of {self.llm.target.vocab_size}")
        return str(self.llm.target.tokenizer.decode(tokens))

    def tokenize(self, body: TokenizeRequest) -> TokenizeResponse:
        """Token ids of a text or of a conversation."""
        if body.messages is not None:
            tokens = self.llm.inputs.encode_chat([m.for_template() for m in body.messages], variables=body.chat_template_kwargs)
        else:
            tokens = self.llm.inputs.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
        tokenizer = self.llm.target.tokenizer
        pieces = tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs and tokenizer is not None else None
        return TokenizeResponse(count=len(tokens), max_model_len=self.llm.max_len, tokens=tokens, token_strs=pieces)

    async def respond(self, request: Request, num_sequences: int, body: CompletionRequest | ChatRequest) -> Response:
        """Answer a request for `num_sequences` sequences, whole or as a stream; its slots are taken before anything is done."""
        arrived_at = time.monotonic()
        self.check_model(body.model)
        if num_sequences > self.engine_thread.capacity:
            raise ApiError(
                400, f"prompts × samples = {num_sequences}, this server takes {self.engine_thread.capacity}; send fewer in one request"
            )
        with ExitStack() as slots:
            self.engine_thread.reserve(num_sequences)
            slots.callback(self.engine_thread.release, num_sequences)
            job = await self.in_thread(self.job, body, request.state.key_salt, request.state.request_id)
            updates = self.engine_thread.updates(RequestHandle.of(job.sequences, arrived_at))
            if body.stream:
                return EventStream(self._events(job, updates), slots.pop_all())
            states = await until_disconnect(self._finished(updates), request.receive)
            if states is None:
                return Response(status_code=499)  # nobody reads it
            # where each token's text is to be found, it takes its time
            answer = await self.in_thread(self.answer, job, states) if job.has_logprobs else self.answer(job, states)
            return Response(answer, media_type="application/json")

    def answer(self, job: GenerationJob, states: list[RowState]) -> str:
        """The whole response as JSON."""
        return self.serializer.response(job, states).model_dump_json()

    async def _finished(self, updates: AsyncIterator[RequestHandle]) -> list[RowState]:
        """The last states of all rows; the first failure of any is raised."""
        states: list[RowState] = []
        async with aclosing(updates):  # type: ignore[type-var]
            async for handle in updates:
                states = _checked(handle.states)
        return states

    async def _events(self, job: GenerationJob, updates: AsyncIterator[RequestHandle]) -> AsyncIterator[bytes]:
        stream = StreamSerializer(self.serializer, job)
        states: list[RowState] = []
        async with aclosing(updates):  # type: ignore[type-var]
            async for handle in updates:
                states = _checked(handle.states)
                if stream.takes_time:
                    with handle.being_told():
                        chunks = await self.in_thread(stream.new, states)
                else:
                    chunks = stream.new(states)
                if chunks:
                    yield chunks
        yield b"".join(stream.end(states))


def _checked(states: list[RowState]) -> list[RowState]:
    for state in states:
        if state.error is not None:
            raise state.error
    return states


def create_app(llm: LLM, config: ServerConfig) -> AdmissionMiddleware:
    """The server's ASGI application. Its engine thread runs between the lifespan's start and end; its attribute `service` serves."""
    service = Service(llm, config)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.engine_thread.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="echelon",
        version=version(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        responses=ERRORS,
    )
    _add_texts(app, service)
    _add_state(app, service)
    _add_errors(app)
    _describe(app)
    return AdmissionMiddleware(app, config, service)


def _add_texts(app: FastAPI, service: Service) -> None:
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    stream: dict[str, Any] = {"content": {"text/event-stream": {"schema": event}}}

    @app.post("/v1/completions", response_model=CompletionResponse, responses={200: stream})
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts, given as texts or token ids."""
        return await service.respond(request, len(body.prompts) * (body.best_of or body.n or 1), body)

    @app.post("/v1/chat/completions", response_model=ChatResponse, responses={200: stream})
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, in the model's own chat template."""
        return await service.respond(request, body.n or 1, body)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        """Token ids of a text or a conversation."""
        service.check_model(body.model)
        return await service.in_thread(service.tokenize, body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        """Text of token ids."""
        service.check_model(body.model)
        return DetokenizeResponse(prompt=await service.in_thread(service.decode, body.tokens))


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/", response_class=HTMLResponse)
    async def index() -> Response:
        """A page that shows what runs here and how it does, with a box to try a prompt."""
        return page()

    @app.get("/stats")
    async def stats() -> StatsResponse:
        """What runs here, and the engine's counters since its start."""
        return service.stats()

    @app.get("/v1/models")
    async def models() -> ModelList:
        """The one model that is served."""
        return ModelList(data=[service.card])

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str) -> ModelCard:
        """The model of this name, which is the one that is served."""
        service.check_model(model)
        return service.card

    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_class=Response)
    async def health() -> Response:
        """200 while the engine makes progress, or has none to make."""
        return _alive(service.engine_thread.is_healthy)

    @app.head("/livez", include_in_schema=False)
    @app.get("/livez", response_class=Response)
    async def livez() -> Response:
        """200 while the process answers."""
        return Response()

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", response_class=Response)
    async def readyz() -> Response:
        """200 while new requests are taken."""
        return _alive(service.is_ready)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def metrics() -> Response:
        """All metrics, in the text format of Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def show_version() -> VersionResponse:
        """The version of this server."""
        return VersionResponse(version=version())


def _alive(is_alive: bool) -> Response:
    if not is_alive:
        raise unavailable("not now")
    return Response()


def _add_errors(app: FastAPI) -> None:
    """Every error leaves in OpenAI's form."""

    async def answer(_request: Request, error: Exception) -> Response:
        found = api_error(error, is_logged=isinstance(error, EchelonError))  # the framework passes others on, to be logged
        return JSONResponse(found.body, found.status, found.headers)

    for kind in (RequestValidationError, HTTPException, EchelonError, Exception):
        app.add_exception_handler(kind, answer)


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
