"""One request on its way through the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from echelon.draft import RowVerdict
from echelon.errors import EchelonError, RequestError, row_error
from echelon.inputs import check_kind
from echelon.sampling import Logprobs, Sampler, SamplingParams


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context limit
    ERROR = "error"  # its work failed; `Sequence.error` says why
    ABORT = "abort"  # it was taken out before its end


class Watcher(Protocol):
    """Sees every committed token and says when the text is complete; see `text.Detokenizer`."""

    text: str
    stopped_by: str | None  # the stop string that completed the text

    def push(self, token: int) -> bool:
        """Take the next token; is the text complete?"""

    def finish(self) -> str:
        """Return the whole text."""


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
    salt: bytes = b""  # keys and values are shared only with texts of the same
    finish_reason: FinishReason | None = None
    error: EchelonError | None = None  # a `RequestError` where the request itself is at fault
    is_accepted: list[bool] = field(default_factory=list)  # per output token: was it drafted?
    num_accepted_tokens: int = 0  # how many of them were
    num_steps: int = 0
    num_draft_tokens: int = 0
    acceptance: Counter[tuple[int, int]] = field(default_factory=Counter)  # (num_draft_tokens, num_accepted) → steps
    logprobs: list[Logprobs] = field(default_factory=list)  # one an output token, where asked for
    num_cached_tokens: int | None = None  # of the prompt that had keys and values when the row first ran
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # from the second prompt token on, where asked for

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def params(self) -> SamplingParams:
        """How its tokens are chosen, and when it ends."""
        return self.sampler.params

    @property
    def is_finished(self) -> bool:
        """Has it ended, for whatever reason?"""
        return self.finish_reason is not None

    @property
    def output_tokens(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def shown_tokens(self) -> list[int]:
        """Output tokens that the text is made of: not the stop token or EOS that ended it, unless the request includes it."""
        is_hidden = self.finish_reason is FinishReason.STOP and self._ends(self.tokens[-1]) and not self.params.include_stop_str_in_output
        return self.tokens[self.num_prompt_tokens : len(self.tokens) - is_hidden]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens it has emitted."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_tokens_left(self) -> int:
        """How many tokens this request may still emit."""
        return min(self.params.most_tokens - self.num_output_tokens, self.max_len - len(self.tokens))

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or token of its parameters that ended it; None where EOS or a limit did."""
        if self.finish_reason is not FinishReason.STOP:
            return None
        last = self.tokens[-1]
        if last in self.params.stop_token_ids and self._ends(last):
            return last
        return self.watcher.stopped_by if self.watcher is not None else None

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Are logprobs of prompt tokens requested that no step has passed yet? Of several samples only the first has them."""
        return self.parent is None and self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def settle(self, kept: RowVerdict, is_sampled: bool) -> None:
        """Take what a step has brought: logprobs of the prompt and, where it `is_sampled`, tokens, one at a time as in plain decoding. What
        follows the last is dropped, and what the watcher raises ends the text.
        """
        self.prompt_logprobs += kept.prompt_logprobs
        if is_sampled:
            self.num_steps += 1
            self.num_draft_tokens += kept.num_draft_tokens
            self.acceptance[kept.num_draft_tokens, len(kept.accepted)] += 1
            self._take(kept)
        if kept.error is not None and not self.is_finished:
            self.fail(kept.error)

    def _take(self, kept: RowVerdict) -> None:
        extra = [kept.next_token] if kept.next_token >= 0 else []
        for i, token in enumerate((*kept.accepted, *extra)):
            try:
                self.append(token, i < len(kept.accepted), kept.logprobs[i] if kept.logprobs else None)
            except Exception as error:
                self.fail(error)
            if self.is_finished:
                return

    def append(self, token: int, is_accepted: bool, logprobs: Logprobs | None = None) -> None:
        """Commit one token and settle whether it was the last; the order of tests is that of plain decoding."""
        assert not self.is_finished
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.tokens.append(token)
        self.is_accepted.append(is_accepted)
        self.num_accepted_tokens += is_accepted
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
        """Assert that lengths and limits agree."""
        assert 0 < self.num_prompt_tokens <= len(self.tokens) <= self.max_len
        assert len(self.is_accepted) == self.num_output_tokens <= self.params.most_tokens
        assert sum(self.is_accepted) == self.num_accepted_tokens
        assert self.is_finished or self.num_tokens_left > 0


class RowState(NamedTuple):
    """Output of a row so far; an immutable value, so that another thread may read it while the engine goes on."""

    num_tokens: int = 0
    text: str = ""
    reason: FinishReason | None = None
    error: EchelonError | None = None


def state_of(sequence: Sequence) -> RowState:
    """A row's state; where its text cannot be had, the row has failed."""
    watcher, error = sequence.watcher, sequence.error
    try:
        text = "" if watcher is None else watcher.finish() if sequence.is_finished and error is None else watcher.text
        return RowState(sequence.num_output_tokens, text, sequence.finish_reason, error)
    except Exception as failure:
        return RowState(sequence.num_output_tokens, "", FinishReason.ERROR, row_error(failure))


@dataclass(frozen=True)
class PlannedRow:
    """One row of a step: feed tokens `start … start + num_new − 1` of the sequence, draft at most `max_draft_tokens`, no path of them
    longer than `max_draft_depth`. With `wants_prompt_logprobs` the logits after every new token are kept, not only those after the last.

    Where the step before is still in flight, `pending_row` is the row's index in it (−1: the row is not in it), and `num_pending` says at
    least and at most how many tokens that step will add; this one feeds the last of them.
    """

    sequence: Sequence
    start: int
    num_new: int
    max_draft_tokens: int
    max_draft_depth: int
    wants_prompt_logprobs: bool = False
    num_pending: tuple[int, int] = (0, 0)
    pending_row: int = -1

    def drafting(self, num_tokens: int, depth: int) -> PlannedRow:
        """The same with at most so many drafted tokens, and so many on a path."""
        pending = self.wants_prompt_logprobs, self.num_pending, self.pending_row
        return PlannedRow(self.sequence, self.start, self.num_new, num_tokens, depth, *pending)

    @property
    def is_sampled(self) -> bool:
        """False for a piece of a prompt that does not reach the sequence's end: it emits nothing."""
        return self.pending_row >= 0 or self.start + self.num_new == len(self.sequence)

    @property
    def num_prompt_logits(self) -> int:
        """Rows of logits before the one after the last known token."""
        if not self.wants_prompt_logprobs:
            return 0
        return self.num_new - 1 if self.is_sampled else self.num_new

    @property
    def shortest(self) -> int:
        """Tokens read when the step is done, drafts left out, at least."""
        return self.start + self.num_new + self.num_pending[0]

    @property
    def longest(self) -> int:
        """Tokens read when the step is done, drafts left out, at most."""
        return self.start + self.num_new + self.num_pending[1]


@dataclass
class Plan:
    """A step to run.

    runs_ahead  the device can carry the step out without the host; rows with longer drafts come first
    gone        sequences, by id, that have left or started anew while the step was in flight
    """

    rows: list[PlannedRow]
    preempted: list[Sequence] = field(default_factory=list)
    runs_ahead: bool = False
    gone: set[int] = field(default_factory=set)

    def awaits(self, row: PlannedRow) -> bool:
        """Is the verdict on this row still of use?"""
        return not row.sequence.is_finished and row.sequence.id not in self.gone

    @property
    def pending(self) -> dict[int, tuple[int, PlannedRow]]:
        """By sequence: index and row of all that are awaited."""
        return {row.sequence.id: (i, row) for i, row in enumerate(self.rows) if self.awaits(row)}


def check_requests(requests: Any) -> None:
    """Raise `RequestError` for what is no list of requests, each a list of samples."""
    check_kind("requests", requests, (list, tuple), RequestError)
    for i, samples in enumerate(requests):
        check_kind(f"requests[{i}]", samples, list, RequestError)
        for j, sequence in enumerate(samples):
            check_kind(f"requests[{i}][{j}]", sequence, Sequence, RequestError)
