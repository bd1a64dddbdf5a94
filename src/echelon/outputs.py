"""What a request gives back, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from echelon.inputs import Prompt
from echelon.sampling import Logprobs
from echelon.sequence import Sequence
from echelon.text import Decoder, decode_output, num_held_back


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
    where the row's work failed: `error` says why, and what was emitted before stays.
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
    """

    def __init__(self, samples: list[Sequence], prompt: Prompt, decoder: Decoder | None, acceptance: str) -> None:
        self.samples, self._prompt = samples, prompt if isinstance(prompt, str) else None
        self._decoder, self._acceptance = decoder, acceptance
        self._prompt_logprobs: list[dict[int, Logprob]] = []
        self._logprobs: list[list[dict[int, Logprob]]] = [[] for _ in samples]

    def output(self) -> RequestOutput:
        """The request as it is now, finished or not."""
        samples, first = self.samples, self.samples[0]
        steps = sum(s.num_steps for s in samples)
        drafted, accepted = sum(s.num_draft_tokens for s in samples), sum(s.num_accepted_tokens for s in samples)
        emitted = sum(s.num_output_tokens for s in samples)
        rates = emitted / steps if steps else 0.0, accepted / drafted if drafted else 0.0
        self._decode_new(self._prompt_logprobs, first.prompt_logprobs)
        return RequestOutput(
            str(first.id),
            self._prompt,
            first.tokens[: first.num_prompt_tokens],
            [self._completion(s, decoded) for s, decoded in zip(samples, self._logprobs, strict=True)],
            RequestMetrics(steps, drafted, accepted, *rates, self._acceptance),
            None if first.params.prompt_logprobs is None else [None, *self._prompt_logprobs],
            first.num_cached_tokens,
        )

    def _completion(self, sequence: Sequence, decoded: list[dict[int, Logprob]]) -> CompletionOutput:
        has_logprobs = sequence.params.logprobs is not None
        self._decode_new(decoded, sequence.logprobs)
        return CompletionOutput(
            sequence.sampler.index,
            _text(sequence, self._decoder),
            sequence.output_tokens,
            sequence.finish_reason.value if sequence.finish_reason else None,
            sequence.sampler.seed,
            list(sequence.is_accepted),
            sum(p.logprob for p in sequence.logprobs) if has_logprobs else None,
            list(decoded) if has_logprobs else None,
            str(sequence.error) if sequence.error else None,
        )

    def _decode_new(self, decoded: list[dict[int, Logprob]], logprobs: SequenceOf[Logprobs]) -> None:
        """Extend `decoded` to all of `logprobs`: the token itself first, then the likeliest ones in order of rank."""
        for new in logprobs[len(decoded) :]:
            values = {new.token: (new.logprob, new.rank)}
            for rank, (token, logprob) in enumerate(new.top.items(), 1):
                values.setdefault(token, (logprob, rank))
            decode = self._decoder.decode if self._decoder else None
            decoded.append({t: Logprob(p, rank, decode([t]) if decode else None) for t, (p, rank) in values.items()})


def _text(sequence: Sequence, decoder: Decoder | None) -> str:
    """The text, so far as it is sure to stay; a watcher has made it already, or it is made here in the same way."""
    watcher, params = sequence.watcher, sequence.params
    if watcher is not None:
        if sequence.error is not None:  # its decoder may be what failed
            return watcher.text
        if sequence.is_finished:
            return watcher.finish()
        return watcher.text[: len(watcher.text) - num_held_back(watcher.text, params.stop)]
    if decoder is None or sequence.error is not None:
        return ""
    prompt = sequence.tokens[: sequence.num_prompt_tokens]
    return decode_output(decoder, prompt, sequence.shown_tokens, params.skip_special_tokens)
