"""A padded batch as `generate` has prepared it, what it gives back, and who is shown tokens as soon as they are known to stay."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, MaxLengthCriteria

from echelon.errors import RequestError
from echelon.sampling import LogitsProcessor, Sampler, SamplingParams


class BatchStreamer(BaseStreamer):  # type: ignore[misc]
    """One streamer for the batch, which is given what `generate` gives it: the prompts [B, n], then a token of every row at a time [B]. Or
    a list of one a row, each of which is given its own prompt [1, n] and tokens [1] as the row gets them, and ended when that ends.
    """

    def __init__(self, streamers: Any) -> None:
        self._is_by_row = isinstance(streamers, (list, tuple))
        self._streamers: list[Any] = list(streamers) if self._is_by_row else [streamers]
        for streamer in self._streamers:
            if not callable(getattr(streamer, "put", None)) or not callable(getattr(streamer, "end", None)):
                raise RequestError(f"streamer is a {type(streamer).__name__}; it must have put and end, or be a list of such, one a row")
        self._num_shown = [0] * len(self._streamers)
        self._has_ended = [False] * len(self._streamers)

    def put(self, value: Tensor) -> None:
        """The prompts [B, n], from `generate`."""
        if self._is_by_row and len(value) != len(self._streamers):
            raise RequestError(f"streamer is a list of {len(self._streamers)}, and the batch has {len(value)} rows; give one for each")
        for streamer, prompt in zip(self._streamers, value[:, None] if self._is_by_row else [value], strict=True):
            streamer.put(prompt)

    def show(self, rows: SequenceOf[SequenceOf[int]], is_over: SequenceOf[bool], pad: int) -> None:
        """Hand on what the rows' new tokens `rows` have more than before. A row that is over is filled with `pad` for a common streamer."""
        if self._is_by_row:
            for i, (row, over) in enumerate(zip(rows, is_over, strict=True)):
                self._show_row(i, row, over)
            return
        longest = max(map(len, rows))
        while (at := self._num_shown[0]) < longest and all(len(row) > at or over for row, over in zip(rows, is_over, strict=True)):
            self._streamers[0].put(torch.tensor([row[at] if len(row) > at else pad for row in rows]))
            self._num_shown[0] += 1

    def _show_row(self, i: int, row: SequenceOf[int], is_over: bool) -> None:
        for token in row[self._num_shown[i] :]:
            self._streamers[i].put(torch.tensor([token]))
        self._num_shown[i] = len(row)
        if is_over:
            self._end(i)

    def end(self) -> None:
        """End those that have not been ended."""
        for i in range(len(self._streamers)):
            self._end(i)

    def _end(self, i: int) -> None:
        if not self._has_ended[i]:
            self._has_ended[i] = True
            self._streamers[i].end()


def longest(criteria: StoppingCriteriaList, generation: GenerationConfig) -> int:
    """Most ids of a row, padding included: a criterion of the caller's stands in the place of the configuration's."""
    return int(min((c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)), default=generation.max_length))


@dataclass(frozen=True)
class Batch:
    """B rows of n ids, padding included, and what they are continued by.

    input_ids int64 [B, n]; kept bool [B, n]: which of them are tokens of the text
    """

    input_ids: Tensor
    kept: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    generation: GenerationConfig
    stream: BatchStreamer | None

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Token ids of every row, without padding."""
        return [ids[keep].tolist() for ids, keep in zip(self.input_ids, self.kept, strict=True)]

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.input_ids)

    @property
    def num_new(self) -> int:
        """Most new tokens of a row: one at least, as criteria are asked behind a token."""
        return max(1, longest(self.criteria, self.generation) - self.input_ids.shape[1])

    @property
    def max_len(self) -> int:
        """Longest text of a row, without padding."""
        return max(map(len, self.prompts)) + self.num_new

    @cached_property
    def has_end_token(self) -> bool:
        """Rows end by themselves and are filled up; else all go on until the criteria have stopped every one of them."""
        return any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)

    @property
    def pad(self) -> int:
        """Token id that fills up rows that have ended."""
        token = self.generation._pad_token_tensor
        return 0 if token is None else int(token)

    @property
    def keeps_scores(self) -> bool:
        """Whether processed scores are returned."""
        return bool(self.generation.return_dict_in_generate and self.generation.output_scores)

    @property
    def keeps_logits(self) -> bool:
        """Whether raw logits are returned."""
        return bool(self.generation.return_dict_in_generate and self.generation.output_logits)

    @cached_property
    def seed(self) -> int:
        """Seed of all noise of this batch: drawn from the framework's generator, so that `torch.manual_seed` repeats a call."""
        return int(torch.randint(0, 2**62, ())) if self.generation.do_sample else 0

    def sampler(self, row: int, *processors: LogitsProcessor) -> Sampler:
        """The rule of a row after `processors`. Temperature and filters are among these, or among what has run before; so what is left is
        greedy, or sampling at temperature 1.
        """
        temperature = 1.0 if self.generation.do_sample else 0.0
        params = SamplingParams(temperature=temperature, max_tokens=self.num_new, logits_processors=processors)
        return Sampler(params, self.seed, row, len(self.prompts[row]))


class Decoded(NamedTuple):
    """New tokens of every row, to be cut or filled up to `width`; scores and logits [B, V] of each new place, where they were asked for."""

    rows: SequenceOf[SequenceOf[int]]
    width: int
    scores: SequenceOf[Tensor]
    logits: SequenceOf[Tensor]


def output_of(batch: Batch, decoded: Decoded) -> Tensor | GenerateDecoderOnlyOutput:
    """Assemble what `generate` returns."""
    new = torch.full((batch.num_rows, decoded.width), batch.pad)
    for line, row in zip(new, decoded.rows, strict=True):
        line[: len(row)] = torch.tensor(row[: decoded.width])
    sequences = torch.cat([batch.input_ids, new.to(batch.input_ids.device)], dim=1)
    if not batch.generation.return_dict_in_generate:
        return sequences
    scores = tuple(decoded.scores) if batch.keeps_scores else None
    logits = tuple(decoded.logits) if batch.keeps_logits else None
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits)
