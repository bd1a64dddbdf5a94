"""`AsyncLLM`: the engine for programs that run an event loop of their own."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from itertools import count
from math import inf
from types import TracebackType
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from echelon.aio.engine_thread import EngineThread
from echelon.aio.limits import Limits, RequestObserver
from echelon.aio.request_handle import RequestHandle
from echelon.errors import ClosedError, RequestError, UnavailableError
from echelon.heads.base import Head
from echelon.inputs import Prompt, check_kind
from echelon.llm import LLM
from echelon.model.load.loading import LoadedModel
from echelon.outputs import OutputBuilder, RequestOutput
from echelon.sampling import Parameters, one_each
from echelon.sequence import FinishReason, RowState
from echelon.speculative_config import SpeculativeConfig


class AsyncLLM:
    """A model that many coroutines ask at once, with vLLM's names. `close` ends it, as does leaving `async with AsyncLLM(...) as llm`.

    Steps run in a thread of their own; requests enter and leave between steps. Of `max_num_seqs` + `max_queue` requests each begins at
    once, and whoever asks beyond that waits, in order, until one has ended. A reader that is slow gets the latest output and no backlog.
    It belongs to one event loop, the one that first asks.

    Parameters
    ----------
    max_queue  requests that may wait inside the engine for a row; above them `generate` waits itself
    others     those of `LLM`

    Raises
    ------
    ConfigError, ModelLoadError, UnsupportedModelError  as `LLM`
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        draft_model: LoadedModel | None = None,
        draft_head: Head | None = None,
        *,
        max_queue: int = 256,
        **settings: Any,
    ) -> None:
        limits = Limits(max_queue=max_queue, queue_timeout=inf, total_timeout=inf, max_unread_bytes=2**62)
        self.llm = LLM(model, speculative_config, draft_model, draft_head, **settings)
        self._thread = EngineThread(self.llm, limits, RequestObserver())
        self._places = asyncio.Semaphore(self._thread.capacity)
        self._names = count()
        self._asked: dict[str, asyncio.Event] = {}  # every request that has not ended; set where it is aborted
        self._running: dict[str, RequestHandle] = {}  # those of them that have a place
        self._is_closed = False
        self._thread.start()

    async def generate(
        self, prompt: Prompt, sampling_params: Parameters | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt; yields the output so far whenever it has grown, and the whole one last, with the same text as `LLM.generate`.

        Closing the iterator, or cancelling whoever reads it, takes the request out of the engine.

        Parameters
        ----------
        prompt           a string, a list of token ids, or a mapping with `prompt` or `prompt_token_ids`
        sampling_params  `SamplingParams`, or a mapping with the same keys; without, `LLM.get_default_sampling_params`
        request_id       what `abort` and the outputs call it, unlike that of any request that runs or waits; one is made without

        Raises
        ------
        RequestError      the prompt or the parameters cannot be served, or a running request has this name
        UnavailableError  the engine has died, or made no step for a minute; where it dies later, the last output has the finish reason
                          "error"
        ClosedError       it has been closed
        """
        name = request_id if request_id is not None else next(n for i in self._names if (n := f"request-{i}") not in self._asked)
        check_kind("request_id", name, str, RequestError)
        (params,) = one_each(self.llm.get_default_sampling_params() if sampling_params is None else sampling_params, 1)
        if name in self._asked:
            raise RequestError(f"a request with the id {name[:100]!r} is running; give another")
        aborted = self._asked[name] = asyncio.Event()
        try:
            async with self._place(aborted):
                self._check_open()
                arrived_at = time.monotonic()
                samples = await asyncio.to_thread(self.llm.inputs.samples, prompt, params, True)
                self._check_open()  # from here on to the entry in `_running` nobody else has a turn
                builder = OutputBuilder(samples, prompt, self.llm.target.tokenizer, self.llm.acceptance_name, name)
                handle = self._running[name] = RequestHandle.of(samples, arrived_at)
                if not aborted.is_set():
                    async with aclosing(self._thread.updates(handle)) as updates:  # type: ignore[type-var]
                        async for now in updates:
                            yield builder.output(now.states)
                if aborted.is_set() and not handle.is_finished:
                    states = handle.states or [RowState()] * len(samples)
                    yield builder.output([s if s.reason is not None else s._replace(reason=FinishReason.ABORT) for s in states])
        finally:
            del self._asked[name]
            self._running.pop(name, None)

    @asynccontextmanager
    async def _place(self, aborted: asyncio.Event) -> AsyncIterator[None]:
        """A place among those whose requests begin; without one where the request is aborted before it has its turn."""
        place, end = asyncio.ensure_future(self._places.acquire()), asyncio.ensure_future(aborted.wait())
        try:
            await asyncio.wait((place, end), return_when=asyncio.FIRST_COMPLETED)
            yield
        finally:
            end.cancel()
            if not place.cancel():
                self._places.release()

    async def abort(self, request_id: str) -> None:
        """End a request: its iterator yields what there is, with the `finish_reason` "abort", and stops. Unknown ids are fine."""
        if (aborted := self._asked.get(request_id)) is not None:
            aborted.set()
        if (handle := self._running.get(request_id)) is not None:
            self._thread.abort(handle)

    async def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer; `ConfigError` where it has none."""
        return self.llm.get_tokenizer()

    async def check_health(self) -> None:
        """Raise `UnavailableError` where the engine has died, or has made no step for a minute while it had work."""
        if not self._thread.is_healthy:
            raise UnavailableError("the engine has stopped or makes no progress; make a new AsyncLLM")

    @property
    def is_running(self) -> bool:
        """Whether requests can be served."""
        return not self._is_closed and self._thread.is_healthy

    async def close(self) -> None:
        """End running requests, each with the `finish_reason` "abort", stop the thread and free the memory; those that wait for a place
        raise `ClosedError`. Closing again does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for name in list(self._asked):
            await self.abort(name)
        await self._thread.stop()
        if self._thread.has_died or not self._thread.has_failed:  # of one that hangs nothing can be taken away
            await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this AsyncLLM has been closed; make a new one")
