"""A batch through the engine: rows run ahead of each other, each is shown alone to the processors and criteria."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from echelon.hf.batch import Batch, Decoded
from echelon.hf.processors import for_row, processed
from echelon.llm import LLM
from echelon.sequence import Sequence


class Ending:
    """When a batch is complete, in the terms of `generate`.

    With an end-of-text token a row ends where its criteria say so, and is filled up. Without one `generate` lets every row go on until
    the criteria have stopped them all, and cuts all rows at that length.
    """

    def __init__(self, criteria: StoppingCriteriaList, num_rows: int, has_end_token: bool) -> None:
        self._criteria, self._num_rows, self._has_end_token = criteria, num_rows, has_end_token
        self._stops: dict[int, int] = {}  # row → tokens it had when the criteria first stopped it

    def is_over(self, row: int, ids: Tensor, num_new: int, scores: tuple[Tensor, ...] | None) -> bool:
        """Ask after `num_new` new tokens of a row; ids int64 [1, n], padding included, and scores [1, V] of each new one, where kept."""
        if row not in self._stops and bool(self._criteria(ids, scores).all()):
            self._stops[row] = num_new
        if self._has_end_token:
            return row in self._stops
        return len(self._stops) == self._num_rows and num_new >= self.width

    @property
    def width(self) -> int:
        """New tokens of the longest row, once all have stopped."""
        return max(self._stops.values())


class RowWatcher:
    """Watches one row as it grows, as the `Watcher` of its sequence and as its logits processor.

    `kept`: for each new token the raw logits and the processed scores [V] that it was chosen from, where the batch keeps them.
    """

    def __init__(self, index: int, batch: Batch, ending: Ending) -> None:
        self.text = ""
        self.stopped_by: str | None = None
        self.kept: list[tuple[Tensor, Tensor]] = []
        self._index, self._ending = index, ending
        self._processors = for_row(batch.processors, index, batch.num_rows)
        self._keeps, self._shows_scores = batch.keeps_scores or batch.keeps_logits, batch.keeps_scores
        self._num_padded = batch.input_ids.shape[1]
        self._ids = batch.input_ids.new_full((1, self._num_padded + batch.num_new + 1), batch.pad)
        self._ids[0, : self._num_padded] = batch.input_ids[index]
        self._new: list[int] = []
        self._candidates: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # what `kept` is filled from, by the tokens since the last step
        self._num_before = 0  # new tokens at that step
        self.changes_logits = bool(self._processors) or self._keeps

    def process(self, output: list[int], logits: Any) -> Any:
        """Scores [V] after the new tokens `output`, of which the last may be drafted; logits float32 [V]."""
        known = len(self._new)
        if known != self._num_before:
            self._candidates.clear()
            self._num_before = known
        start, end = self._num_padded + known, self._num_padded + len(output)
        drafted = output[known:]
        self._ids[0, start:end] = torch.tensor(drafted, dtype=self._ids.dtype)
        raw = torch.from_numpy(logits)[None].to(self._ids.device)
        scores = processed(self._processors, self._ids[:, :end], raw)
        if self._keeps:
            self._candidates[tuple(drafted)] = (raw[0].clone(), scores[0])
        return scores[0].cpu().numpy()

    def push(self, token: int) -> bool:
        """Note a token that stays; whether the row is over."""
        if self._keeps:
            self.kept.append(self._candidates[tuple(self._new[self._num_before :])])
        self._new.append(token)
        end = self._num_padded + len(self._new)
        self._ids[0, end - 1] = token
        scores = tuple(own[None] for _, own in self.kept) if self._shows_scores else None
        return self._ending.is_over(self._index, self._ids[:, :end], len(self._new), scores)

    def finish(self) -> str:
        """The text, of which this watcher makes none."""
        return self.text


def decode_ahead(llm: LLM, batch: Batch) -> Decoded:
    """Continue every row to its end, by as many tokens a step as are drafted and kept.

    Raises
    ------
    RequestError   a row cannot be served
    Exception      what a processor or a criterion raised
    """
    ending = Ending(batch.criteria, batch.num_rows, batch.has_end_token)
    rows = [RowWatcher(i, batch, ending) for i in range(batch.num_rows)]
    sequences = [_sequence(i, row, batch) for i, row in enumerate(rows)]
    for i, (prompt, sequence) in enumerate(zip(batch.prompts, sequences, strict=True)):
        llm.inputs.check_prompt(prompt, sequence.params, f"input_ids[{i}]")
    for _ in llm.run([[sequence] for sequence in sequences]):
        _raise_error(sequences)
        if batch.stream is not None:
            _show(batch, sequences)
    width = max(s.num_output_tokens for s in sequences) if batch.has_end_token else ending.width
    kept = [row.kept for row in rows]
    scores = _columns(kept, width, 1) if batch.keeps_scores else []
    logits = _columns(kept, width, 0) if batch.keeps_logits else []
    return Decoded([s.output_tokens for s in sequences], width, scores, logits)


def _sequence(index: int, row: RowWatcher, batch: Batch) -> Sequence:
    prompt = batch.prompts[index]
    sampler = batch.sampler(index, *([row.process] if row.changes_logits else []))
    return Sequence(index, list(prompt), len(prompt), sampler, frozenset(), batch.max_len, row)


def _raise_error(sequences: list[Sequence]) -> None:
    for sequence in sequences:
        if sequence.error is not None:
            error = sequence.error.__cause__ or sequence.error
            error.add_note(f"raised in {sequence.error.location}")
            raise error


def _show(batch: Batch, sequences: list[Sequence]) -> None:
    """To the streamers. Without an end token no row is over before all are, and what a row has ahead of the others may be cut."""
    assert batch.stream is not None
    rows = [s.output_tokens for s in sequences]
    if not batch.has_end_token:
        rows = [row[: min(map(len, rows))] for row in rows]
    batch.stream.show(rows, [s.is_finished and batch.has_end_token for s in sequences], batch.pad)


def _columns(rows: list[list[tuple[Tensor, Tensor]]], width: int, which: int) -> list[Tensor]:
    """Logits (`which` = 0) or scores (1) [B, V] of each new token up to `width`; 0 in rows that have ended before."""
    blank = torch.zeros_like(rows[0][0][which])
    return [torch.stack([row[i][which] if i < len(row) else blank for row in rows]) for i in range(width)]
