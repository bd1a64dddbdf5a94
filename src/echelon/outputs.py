"""What a request gives back, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from echelon.errors import EchelonError, row_error
from echelon.inputs import Prompt
from echelon.sampling import Logprobs
from echelon.sequence import FinishReason, RowState, Sequence, state_of
from echelon.text import Decoder, decode_output, num_shown


@dataclass(frozen=True)
class Logprob:
    """Raw log-probability of a token at its place, its rank there (1 is the likeliest), and its text."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True)
class RequestMetrics:
    """How a request ran, all its samples together. `tokens_per_step` counts the extra token, `acceptance_rate` does not. `acceptance` is
    the rule by which drafted tokens were kept; one that changes the text says so.
    """

    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    tokens_per_step: float
    acceptance_rate: float
    acceptance: str = "exact"


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation; `is_accepted[i]` says whether token i came from the draft. `finish_reason` is None while it goes on, and "error"
    where the row's work failed: `error` says why, and what was emitted before stays. `stop_reason` is the stop string or token id, of those
    that the request names, which ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    seed: int
    is_accepted: list[bool]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its continuations. `num_cached_tokens` of the prompt had keys and values from earlier texts; None before it runs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(o.finish_reason is not None for o in self.outputs)


class OutputBuilder:
    """Build the outputs of one request while it grows; each token of its log-probabilities is decoded once.

    samples     the request's sequences
    acceptance  name of the rule by which drafted tokens are kept
    name        of the request; the number of its first sequence without
    """

    def __init__(self, samples: list[Sequence], prompt: Prompt, decoder: Decoder | None, acceptance: str, name: str | None = None) -> None:
        self._name = str(samples[0].id) if name is None else name
        self.samples, self._prompt = (
            samples,
            prompt.get("prompt") if isinstance(prompt, Mapping) else prompt if isinstance(prompt, str) else None,
        )
        self._prompt_token_ids = samples[0].tokens[: samples[0].num_prompt_tokens]  # of all outputs: it stays as it is
        self._decoder, self._acceptance = decoder, acceptance
        self._prompt_logprobs: list[dict[int, Logprob]] = []
        self._logprobs: list[list[dict[int, Logprob]]] = [[] for _ in samples]

    def output(self, states: SequenceOf[RowState] | None = None) -> RequestOutput:
        """The request as it is now, finished or not; or as it was in `states`, one a sample, while the engine goes on in another thread."""
        samples, first = self.samples, self.samples[0]
        steps = sum(s.num_steps for s in samples)
        drafted, accepted = sum(s.num_draft_tokens for s in samples), sum(s.num_accepted_tokens for s in samples)
        emitted = sum(s.num_output_tokens for s in samples) if states is None else sum(s.num_tokens for s in states)
        rates = emitted / steps if steps else 0.0, accepted / drafted if drafted else 0.0
        self._decode_new(self._prompt_logprobs, first.prompt_logprobs)
        return RequestOutput(
            self._name,
            self._prompt,
            self._prompt_token_ids,
            [self._completion(s, self._logprobs[i], None if states is None else states[i]) for i, s in enumerate(samples)],
            RequestMetrics(steps, drafted, accepted, *rates, self._acceptance),
            None if first.params.prompt_logprobs is None else [None, *self._prompt_logprobs],
            first.num_cached_tokens,
        )

    def _completion(self, sequence: Sequence, decoded: list[dict[int, Logprob]], state: RowState | None) -> CompletionOutput:
        has_logprobs = sequence.params.logprobs is not None
        count, text, reason, error = state or state_of(sequence)
        shown = num_shown(text, sequence.params.stop, reason is not None)
        text = text[:shown]
        if sequence.watcher is None:
            text, failure = _decoded(sequence, self._decoder)
            reason, error = (reason, error) if failure is None else (FinishReason.ERROR, error or failure)
        logprobs = sequence.logprobs[:count]
        self._decode_new(decoded, logprobs)
        return CompletionOutput(
            sequence.sampler.index,
            text,
            sequence.tokens[sequence.num_prompt_tokens : sequence.num_prompt_tokens + count],
            reason.value if reason else None,
            sequence.sampler.seed,
            sequence.is_accepted[:count],
            sum(p.logprob for p in logprobs) if has_logprobs else None,
            list(decoded) if has_logprobs else None,
            str(error) if error else None,
            sequence.stop_reason if reason is FinishReason.STOP else None,
        )

    def _decode_new(self, decoded: list[dict[int, Logprob]], logprobs: SequenceOf[Logprobs]) -> None:
        """Extend `decoded` to all of `logprobs`: the token itself first, then the likeliest ones in order of rank."""
        for new in logprobs[len(decoded) :]:
            values = {new.token: (new.logprob, new.rank)}
            for rank, (token, logprob) in enumerate(new.top.items(), 1):
                values.setdefault(token, (logprob, rank))
            decoded.append({t: Logprob(p, rank, self._piece(t)) for t, (p, rank) in values.items()})

    def _piece(self, token: int) -> str | None:
        """Text of one token; None where there is no tokenizer, or it has none for it."""
        try:
            return self._decoder.decode([token]) if self._decoder else None
        except Exception:
            return None


def _decoded(sequence: Sequence, decoder: Decoder | None) -> tuple[str, EchelonError | None]:
    """The text of a row that nobody watches, made as a watcher would, or why it cannot be had."""
    if decoder is None:
        return "", None
    prompt = sequence.tokens[: sequence.num_prompt_tokens]
    try:
        return decode_output(decoder, prompt, sequence.shown_tokens, sequence.params.skip_special_tokens), None
    except Exception as failure:
        return "", row_error(failure)
