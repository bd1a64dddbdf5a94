"""One request on its way through the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from echelon.errors import EchelonError, RequestError, row_error
from echelon.inputs import check_kind
from echelon.sampling import Logprobs, Sampler, SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context limit
    ERROR = "error"  # its work failed; `Sequence.error` says why


class Watcher(Protocol):
    """Sees every committed token and says when the text is complete; see `text.Detokenizer`."""

    text: str

    def push(self, token: int) -> bool: ...

    def finish(self) -> str: ...


@dataclass(eq=False)
class Sequence:
    """A prompt and what has been generated so far. Tokens are appended one at a time, by `append` alone."""

    id: int
    tokens: list[int]
    num_prompt_tokens: int
    sampler: Sampler
    eos_token_ids: frozenset[int]
    max_len: int  # context limit, in tokens
    watcher: Watcher | None = None  # only where the text has to be watched
    parent: Sequence | None = None  # whose prompt this one shares (`n` samples of one prompt)
    finish_reason: FinishReason | None = None
    error: EchelonError | None = None  # a `RequestError` where the request itself is at fault
    is_accepted: list[bool] = field(default_factory=list)  # per output token: was it drafted?
    num_steps: int = 0
    num_draft_tokens: int = 0
    acceptance: Counter[tuple[int, int]] = field(default_factory=Counter)  # (num_draft_tokens, num_accepted) → steps
    logprobs: list[Logprobs] = field(default_factory=list)  # one an output token, where asked for
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # from the second prompt token on, where asked for

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def params(self) -> SamplingParams:
        return self.sampler.params

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def shown_tokens(self) -> list[int]:
        """Output tokens that the text is made of: not the stop token or EOS that ended it, unless the request includes it."""
        is_hidden = self.finish_reason is FinishReason.STOP and self._ends(self.tokens[-1]) and not self.params.include_stop_str_in_output
        return self.tokens[self.num_prompt_tokens : len(self.tokens) - is_hidden]

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.is_accepted)

    @property
    def num_tokens_left(self) -> int:
        """How many tokens this request may still emit."""
        return min(self.params.max_tokens - self.num_output_tokens, self.max_len - len(self.tokens))

    @property
    def lacks_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def append(self, token: int, is_accepted: bool, logprobs: Logprobs | None = None) -> None:
        """Commit one token and settle whether it was the last; the order of tests is that of plain decoding."""
        assert not self.is_finished
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.tokens.append(token)
        self.is_accepted.append(is_accepted)
        is_end = self._ends(token)
        is_shown = not is_end or self.params.include_stop_str_in_output
        has_stopped = is_shown and self.watcher is not None and self.watcher.push(token)
        if is_end or has_stopped:
            self.finish_reason = FinishReason.STOP
        elif self.num_tokens_left <= 0:
            self.finish_reason = FinishReason.LENGTH

    def fail(self, error: Exception) -> None:
        """End here; what was emitted so far stays."""
        assert not self.is_finished
        self.finish_reason = FinishReason.ERROR
        self.error = row_error(error)

    def _ends(self, token: int) -> bool:
        return token in self.params.stop_token_ids or (token in self.eos_token_ids and not self.params.ignore_eos)

    def check(self) -> None:
        assert 0 < self.num_prompt_tokens <= len(self.tokens) <= self.max_len
        assert len(self.is_accepted) == self.num_output_tokens <= self.params.max_tokens
        assert self.is_finished or self.num_tokens_left > 0


@dataclass(frozen=True)
class PlannedRow:
    """One row of a step: feed tokens `start … start + num_new − 1` of the sequence, draft at most `max_draft_tokens`, no path of them
    longer than `max_draft_depth`.

    `is_sampled` is false for a piece of a prompt that does not reach the sequence's end: it emits nothing. With `wants_prompt_logprobs`
    the logits after every new token are kept, not only those after the last.
    """

    sequence: Sequence
    start: int
    num_new: int
    max_draft_tokens: int
    max_draft_depth: int
    wants_prompt_logprobs: bool = False

    @property
    def is_sampled(self) -> bool:
        return self.start + self.num_new == len(self.sequence)

    @property
    def num_prompt_logits(self) -> int:
        """Rows of logits before the one after the last known token."""
        if not self.wants_prompt_logprobs:
            return 0
        return self.num_new - 1 if self.is_sampled else self.num_new


@dataclass(frozen=True)
class AheadRow:
    """One row of a step that is launched while another may be in flight, whose verdict only the device knows.

    source            its place in the step in flight; −1: none of its tokens is in flight
    shortest, longest tokens of its text by then
    num_drafted       tokens to draft
    """

    sequence: Sequence
    source: int
    shortest: int
    longest: int
    num_drafted: int


def check_requests(requests: Any) -> None:
    """Raise `RequestError` for what is no list of requests, each a list of samples."""
    check_kind("requests", requests, (list, tuple), RequestError)
    for i, samples in enumerate(requests):
        check_kind(f"requests[{i}]", samples, list, RequestError)
        for j, sequence in enumerate(samples):
            check_kind(f"requests[{i}][{j}]", sequence, Sequence, RequestError)
