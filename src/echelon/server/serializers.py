"""Responses from rows of the engine: whole ones and the chunks of a stream, for completions and chat."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from echelon.errors import OverloadedError, RequestError, RequestTimeoutError, SlowReaderError, UnavailableError, location_of
from echelon.llm import LLM
from echelon.sampling import Logprobs
from echelon.sequence import RowState, Sequence
from echelon.server.protocol import RETRY, ApiError, ChatRequest, CompletionRequest, StreamOptions, unavailable, validation_error
from echelon.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatLogprobs,
    ChatResponse,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    PromptTokensDetails,
    ResponseMetrics,
    SpeculativeDecoding,
    TokenLogprob,
    TokenPiece,
    TokenUsage,
    TopLogprob,
)
from echelon.text import Detokenizer, num_shown, pieces_by_token, text_offsets

logger = logging.getLogger("echelon.server")
LOWEST_LOGPROB = -9999.0  # JSON has no infinity
SENT = Logprobs(-1, 0.0, 0, {})  # stands for what a stream has sent
DONE = b"data: [DONE]\n\n"
NO_ROUTE = {  # the framework's own errors, by status
    404: "there is no such route; GET /openapi.json lists those that there are",
    405: "this route takes another method; GET /openapi.json says which",
}


@dataclass
class GenerationJob:
    """A validated request: its sequences (all samples of a prompt together), and what its response shows of them."""

    model: str
    prompts: list[list[Sequence]]
    body: CompletionRequest | ChatRequest
    echo: list[str] | None = None  # texts of the prompts
    prompt_offsets: dict[int, list[int]] = field(
        default_factory=dict
    )  # where their tokens' texts begin, by their first sample; as asked for
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def sequences(self) -> list[Sequence]:
        """The samples of all prompts, in order."""
        return [s for samples in self.prompts for s in samples]

    @property
    def num_shown(self) -> int:
        """Samples that are shown of a prompt."""
        return self.body.n or 1

    @property
    def is_chat(self) -> bool:
        """Whether this is a turn of a conversation."""
        return isinstance(self.body, ChatRequest)

    @property
    def only_echo(self) -> bool:
        """Whether nothing but the prompt is wanted."""
        return self.body.max_tokens == 0

    @property
    def has_logprobs(self) -> bool:
        """Whether each token is told with its log-probability; of completions 0 asks for no other tokens."""
        return self.body.logprobs is not None and self.body.logprobs is not False

    @property
    def options(self) -> StreamOptions:
        """What the chunks of a stream show besides text."""
        return self.body.stream_options or StreamOptions()

    def echo_of(self, i: int) -> str | None:
        """The prompt's text that stands before shown sample i, where asked for."""
        return None if self.echo is None else self.echo[i // self.num_shown]

    @property
    def name(self) -> str:
        """The response's `id`."""
        return f"chatcmpl-{self.id}" if self.is_chat else f"cmpl-{self.id}"


def api_error(error: Exception, is_logged: bool = True) -> ApiError:
    """The error response for an exception while a request ran; nothing of the inside is told, but to the log."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return validation_error(error.errors(), error.body)
        case HTTPException():
            return ApiError(error.status_code, NO_ROUTE.get(error.status_code, str(error.detail)), headers=error.headers)
        case RequestError():
            return ApiError(400, str(error))
        case OverloadedError():
            return ApiError(429, str(error), "overloaded", headers=RETRY)
        case RequestTimeoutError():
            return unavailable(str(error), "timeout")
        case UnavailableError():
            return unavailable(str(error))
        case SlowReaderError():
            return ApiError(408, str(error), "slow_reader")
    if is_logged:
        logger.error("a request failed: %s", location_of(error))
    return ApiError(500, "this request failed inside the server; others are not affected", "internal_error")


@dataclass(frozen=True)
class Serializer:
    """Builds the responses of one model."""

    llm: LLM
    _pieces: dict[int, str] = field(default_factory=dict, init=False, repr=False)

    def piece(self, token: int) -> str:
        """Text of one token id."""
        tokenizer = self.llm.target.tokenizer
        if tokenizer is not None and token not in self._pieces:
            self._pieces[token] = tokenizer.decode([token], skip_special_tokens=False)
        return self._pieces.get(token, "")

    def response(self, job: GenerationJob, states: SequenceOf[RowState]) -> CompletionResponse | ChatResponse:
        """The whole response, once every row is done."""
        kind, choice = (ChatResponse, self._chat_choice) if job.is_chat else (CompletionResponse, self._completion_choice)
        choices: list[Any] = [choice(job, i, sequence, state) for i, (sequence, state) in enumerate(self._chosen(job, states))]
        usage, metrics = self.usage(job, states), self.metrics(job)
        return kind(id=job.name, created=job.created, model=job.model, choices=choices, usage=usage, metrics=metrics)

    def _chosen(self, job: GenerationJob, states: SequenceOf[RowState]) -> list[tuple[Sequence, RowState]]:
        """The samples to show of every prompt: all, or the likeliest by mean logprob (`best_of`)."""
        by_id = {s.id: state for s, state in zip(job.sequences, states, strict=True)}
        ranked = (p if len(p) == job.num_shown else sorted(p, key=_mean_logprob, reverse=True) for p in job.prompts)
        return [(s, by_id[s.id]) for samples in ranked for s in samples[: job.num_shown]]

    def _chat_choice(self, job: GenerationJob, i: int, sequence: Sequence, state: RowState) -> ChatChoice:
        logprobs = self.chat_logprobs(job, sequence, 0, state.num_tokens)
        message, tokens = AssistantMessage(content=state.text), _tokens(job, sequence, state, 0, len(state.text))
        return ChatChoice(
            index=i, message=message, logprobs=logprobs, finish_reason=state.reason, stop_reason=sequence.stop_reason, tokens=tokens
        )

    def _completion_choice(self, job: GenerationJob, i: int, sequence: Sequence, state: RowState) -> CompletionChoice:
        echo = job.echo_of(i)
        text, count, reason = ("", 0, "length") if job.only_echo else (state.text, state.num_tokens, state.reason)
        logprobs = self.completion_logprobs(job, sequence, 0, count, len(echo or ""), echo)
        tokens = _tokens(job, sequence, state, 0, len(text))
        stop = None if job.only_echo else sequence.stop_reason
        return CompletionChoice(index=i, text=(echo or "") + text, logprobs=logprobs, finish_reason=reason, stop_reason=stop, tokens=tokens)

    def usage(self, job: GenerationJob, states: SequenceOf[RowState]) -> TokenUsage:
        """Count tokens: a prompt once, whatever the number of its samples."""
        prompt = sum(samples[0].num_prompt_tokens for samples in job.prompts)
        completion = 0 if job.only_echo else sum(s.num_tokens for s in states)
        cached = PromptTokensDetails(cached_tokens=sum(samples[0].num_cached_tokens or 0 for samples in job.prompts))
        return TokenUsage(
            prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion, prompt_tokens_details=cached
        )

    def metrics(self, job: GenerationJob) -> ResponseMetrics | None:
        """Speculation statistics of a request of one sequence, and the rule of acceptance; `None` where nothing drafts."""
        config = self.llm.speculative_config
        if config is None:
            return None
        speculation = speculation_of(job.sequences[0], config.most_tokens) if len(job.sequences) == 1 else None
        return ResponseMetrics(acceptance=config.acceptance_name, speculative_decoding=speculation)

    def completion_logprobs(
        self, job: GenerationJob, sequence: Sequence, start: int, end: int, offset: int, echo: str | None = None
    ) -> CompletionLogprobs | None:
        """Log-probabilities of output tokens `start … end − 1`, where the output begins at character `offset`; before them those of
        the prompt, whose text is `echo`.
        """
        if job.body.logprobs is None:
            return None
        entries: list[Logprobs | None] = [*sequence.logprobs[start:end]]
        tokens = sequence.output_tokens[start:end]
        offsets = [offset + character for character in _offsets(sequence, start, start + len(tokens))]
        if echo is not None:
            prompt = sequence.tokens[: sequence.num_prompt_tokens]
            entries = [None, *_prompt_logprobs(job, sequence), *entries]
            offsets = self._prompt_offsets(job, sequence, echo) + offsets
            tokens = prompt + tokens
        return CompletionLogprobs(
            tokens=[self.piece(token) for token, _ in zip(tokens, entries, strict=True)],
            token_logprobs=[None if entry is None else _finite(entry.logprob) for entry in entries],
            top_logprobs=[None if entry is None else self._top(entry) for entry in entries],
            text_offset=offsets,
        )

    def _prompt_offsets(self, job: GenerationJob, sequence: Sequence, text: str) -> list[int]:
        """Found once for all samples of a prompt."""
        first, tokenizer = _samples(job, sequence)[0], self.llm.target.tokenizer
        if first.id not in job.prompt_offsets:
            tokens = sequence.tokens[: sequence.num_prompt_tokens]
            job.prompt_offsets[first.id] = text_offsets(tokenizer, tokens, text) if tokenizer is not None else [0] * len(tokens)
        return job.prompt_offsets[first.id]

    def _top(self, entry: Logprobs) -> dict[str, float]:
        """By text; of tokens with the same text the one that the entry is of, or the likeliest."""
        top: dict[str, float] = {}
        for token, logprob in ((entry.token, entry.logprob), *entry.top.items()):
            top.setdefault(self.piece(token), _finite(logprob))
        return top

    def chat_logprobs(self, job: GenerationJob, sequence: Sequence, start: int, end: int) -> ChatLogprobs | None:
        """Log-probabilities of output tokens `start … end − 1`, where asked for."""
        if not job.body.logprobs:
            return None
        return ChatLogprobs(
            content=[
                TokenLogprob(**self._described(e.token, e.logprob), top_logprobs=[TopLogprob(**self._described(*t)) for t in e.top.items()])
                for e in sequence.logprobs[start:end]
            ]
        )

    def _described(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.piece(token)
        return {"token": piece, "logprob": _finite(logprob), "bytes": list(piece.encode("utf-8", "replace"))}


class StreamSerializer:
    """The chunks of one streamed response. What may be the beginning of a stop string is held back until it is known."""

    def __init__(self, serializer: Serializer, job: GenerationJob) -> None:
        self._serializer, self._job = serializer, job
        count = len(job.sequences)
        self._num_characters, self._num_tokens, self._is_over = [0] * count, [0] * count, [False] * count
        self._has_begun = [False] * count

    def _head(self, i: int, sequence: Sequence) -> Iterator[bytes]:
        """The first chunk of a sample: a role, or the echoed prompt, whose logprobs are known once it has been read."""
        self._has_begun[i] = True
        if self._job.is_chat:
            yield self._event(i, {"delta": {"role": "assistant", "content": ""}}, None, None)
        elif (text := self._job.echo_of(i)) is not None:
            logprobs = self._serializer.completion_logprobs(self._job, sequence, 0, 0, len(text), text)
            yield self._event(i, {"text": text}, logprobs, None)

    @property
    def takes_time(self) -> bool:
        """Whether the next chunks may have the log-probabilities of a whole prompt."""
        return self._tells_prompts and not all(self._has_begun)

    @property
    def _tells_prompts(self) -> bool:
        """Whether an echo has its prompt's log-probabilities."""
        return self._job.echo is not None and self._job.has_logprobs

    def _is_prompt_told(self, sequence: Sequence) -> bool:
        """Whether all of a prompt's log-probabilities are known that its echo shows."""
        return not self._tells_prompts or len(_prompt_logprobs(self._job, sequence)) == sequence.num_prompt_tokens - 1

    def new(self, states: SequenceOf[RowState]) -> bytes:
        """What is new since the last call, as bytes."""
        return b"".join(self.chunks(states))

    def chunks(self, states: SequenceOf[RowState]) -> Iterator[bytes]:
        """Chunks of what is new since the last call."""
        for i, (sequence, state) in enumerate(zip(self._job.sequences, states, strict=True)):
            if self._is_over[i] or state.error is not None:
                continue
            is_last = state.reason is not None
            if not self._has_begun[i] and (state.num_tokens or is_last):
                if not self._is_prompt_told(sequence):
                    continue  # the sample that reads it has not come to its end
                yield from self._head(i, sequence)
            end = num_shown(state.text, sequence.params.stop, is_last)
            begin = self._num_characters[i]
            if end <= begin and not is_last and not self._has_bare_tokens(i, state):
                continue
            self._num_characters[i] = max(end, begin)
            self._is_over[i] = is_last
            sent, self._num_tokens[i] = self._num_tokens[i], state.num_tokens
            yield self._chunk(i, sequence, state, begin, end, sent)
            if sequence.logprobs:  # those that have been sent are freed; the engine goes on appending to their list
                sequence.logprobs[sent : state.num_tokens] = [SENT] * (state.num_tokens - sent)

    def _has_bare_tokens(self, i: int, state: RowState) -> bool:
        """Whether there are new tokens without a text, such as special ones, that the client is told of all the same."""
        is_told = self._job.has_logprobs or bool(self._job.options.continuous_usage_stats)
        return is_told and state.num_tokens > self._num_tokens[i] and len(state.text) <= self._num_characters[i]

    def _chunk(self, i: int, sequence: Sequence, state: RowState, begin: int, end: int, sent: int) -> bytes:
        """What is new of a sample: characters `begin … end − 1`, and the tokens after the first `sent`."""
        job, text, known = self._job, state.text[begin:end], (sent, state.num_tokens)
        if job.only_echo:
            return self._event(i, {"text": ""}, None, "length")
        tokens = _tokens(job, sequence, state, begin, end)
        more = {} if tokens is None else {"tokens": [token.model_dump() for token in tokens]}
        if job.is_chat:
            logprobs: Any = self._serializer.chat_logprobs(job, sequence, *known)
            return self._event(i, {"delta": {"content": text}} | more, logprobs, state.reason, sequence)
        logprobs = self._serializer.completion_logprobs(job, sequence, *known, len(job.echo_of(i) or ""))
        return self._event(i, {"text": text} | more, logprobs, state.reason, sequence)

    def end(self, states: SequenceOf[RowState]) -> Iterator[bytes]:
        """Usage, where asked for, and the end."""
        if self._job.options.include_usage:
            metrics = self._serializer.metrics(self._job)
            more = {} if metrics is None else {"metrics": metrics.model_dump()}
            yield self._wrap([], usage=self._serializer.usage(self._job, states).model_dump(), **more)
        yield DONE

    def _event(
        self,
        i: int,
        content: dict[str, Any],
        logprobs: CompletionLogprobs | ChatLogprobs | None,
        reason: str | None,
        sequence: Sequence | None = None,
    ) -> bytes:
        """One choice; `sequence`: of a text that may have ended, to say at what."""
        dumped = None if logprobs is None else logprobs.model_dump()
        stop = None if reason is None or sequence is None else sequence.stop_reason
        return self._wrap([{"index": i, **content, "logprobs": dumped, "finish_reason": reason, "stop_reason": stop}])

    def _wrap(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        job = self._job
        kind = "chat.completion.chunk" if job.is_chat else "text_completion"
        chunk = {"id": job.name, "object": kind, "created": job.created, "model": job.model, "choices": choices, **more}
        if job.options.continuous_usage_stats:
            chunk.setdefault("usage", self._serializer.usage(job, [RowState(n) for n in self._num_tokens]).model_dump())
        return event(chunk)


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """An error in the middle of a stream: one event, then the end."""
    return event(error.body) + DONE


def speculation_of(sequence: Sequence, num_spec_tokens: int) -> SpeculativeDecoding:
    """vLLM's object. Steps that drafted nothing do not count."""
    steps = {pair: count for pair, count in sequence.acceptance.items() if pair[0]}
    num_steps = sum(steps.values())
    drafted = sum(d * count for (d, _), count in steps.items())
    accepted = sum(a * count for (_, a), count in steps.items())
    by_length: dict[str, list[int]] = {}
    histogram = [0] * (num_spec_tokens + 1)
    for (d, a), count in sorted(steps.items()):
        histogram[a] += count
        by_length.setdefault(str(d), [0] * (d + 1))[a] += count
    return SpeculativeDecoding(
        mean_acceptance_length=1 + accepted / num_steps if num_steps else None,
        draft_acceptance_rate=accepted / drafted if drafted else None,
        acceptance_histogram=histogram,
        acceptance_histogram_by_draft_length=by_length,
        num_spec_steps=num_steps,
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=drafted,
        num_spec_tokens=num_spec_tokens,
    )


def _tokens(job: GenerationJob, sequence: Sequence, state: RowState, begin: int, end: int) -> list[TokenPiece] | None:
    """Characters `begin … end − 1` of an output by token, where asked for."""
    if not job.body.return_tokens:
        return None
    offsets = sequence.watcher.offsets[: state.num_tokens] if isinstance(sequence.watcher, Detokenizer) else []
    pieces = pieces_by_token(state.text, offsets, begin, end)
    return [TokenPiece(text=piece, is_accepted=sequence.is_accepted[i]) for i, piece in pieces]


def _offsets(sequence: Sequence, start: int, end: int) -> list[int]:
    """Character of the output's text at which each of its tokens `start … end − 1` begins; a stop token without text stands at its end."""
    if not isinstance(sequence.watcher, Detokenizer):
        return [0] * (end - start)
    offsets = sequence.watcher.offsets[start:end]
    return offsets + [len(sequence.watcher.text)] * (end - start - len(offsets))


def _prompt_logprobs(job: GenerationJob, sequence: Sequence) -> list[Logprobs]:
    """Samples share their prompt's keys and values: only the one that read the prompt has its logprobs."""
    return max((s.prompt_logprobs for s in _samples(job, sequence)), key=len)


def _samples(job: GenerationJob, sequence: Sequence) -> list[Sequence]:
    """All samples of a sample's prompt."""
    return next(samples for samples in job.prompts if any(s is sequence for s in samples))


def _mean_logprob(sequence: Sequence) -> float:
    return sum(entry.logprob for entry in sequence.logprobs) / max(1, len(sequence.logprobs))


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
