"""A batch one token a step, all rows at the same position: processors and criteria are called as `generate` calls them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from echelon.batch import Span
from echelon.errors import RequestError
from echelon.hf.batch import Batch, Decoded
from echelon.hf.processors import processed
from echelon.llm import LLM
from echelon.model.runner import Runner
from echelon.ops.devices import on_host
from echelon.ops.sample import SampleRow, choose

PIECE = 2048  # prompt tokens of a pass


class Texts:
    """The rows' texts without padding, and their keys and values."""

    def __init__(self, runner: Runner[Any], prompts: list[list[int]]) -> None:
        self.tokens, self._prompt_lens = [list(prompt) for prompt in prompts], [len(prompt) for prompt in prompts]
        self._runner, self._tables = runner, runner.cache.tables

    def logits(self, rows: list[int]) -> Tensor:
        """Logits of the next token, float32 [len(rows), V] on the host; what has not been read of these texts is read."""
        for spans in _passes([self._unread(row) for row in rows]):
            self._feed(spans)
        last = [self._span(row, len(self.tokens[row]) - 1, self.tokens[row][-1:], 1) for row in rows]
        return torch.from_numpy(on_host(self._feed(last)))

    def append(self, row: int, token: int) -> None:
        """Append a token to a row; where a longer context begins, the row is read anew."""
        self.tokens[row].append(token)
        original = self._runner.loaded.original_context
        if original is not None and original.is_read_anew and len(self.tokens[row]) == original.length + 1:
            self._tables.commit(row, 0)

    def release(self) -> None:
        """Free all keys and values."""
        for row in range(len(self.tokens)):
            self._tables.release(row)

    def _unread(self, row: int) -> Span:
        """All but the last token."""
        text, start = self.tokens[row], self._tables.num_cached(row)
        return self._span(row, start, text[start:-1], 0)

    def _span(self, row: int, start: int, tokens: list[int], num_logits: int) -> Span:
        return Span(row, start, tokens, num_logits, len(self.tokens[row]), prompt_len=self._prompt_lens[row])

    def _feed(self, spans: list[Span]) -> Tensor:
        for span in spans:
            if not self._tables.reserve(span.row, span.start + len(span.tokens)):
                raise RequestError(
                    f"the KV pool of {self._tables.capacity} tokens cannot hold all {len(self.tokens)} rows at once, which processors that "
                    "keep state need; pass fewer rows, or lower max_new_tokens"
                )
        return self._runner.feed(spans)


def _passes(spans: list[Span]) -> Iterator[list[Span]]:
    """Pieces of the spans, at most PIECE tokens at once."""
    group: list[Span] = []
    room = PIECE
    for span in spans:
        start = 0
        while start < len(span.tokens):
            tokens = span.tokens[start : start + room]
            group.append(replace(span, start=span.start + start, tokens=tokens))
            start, room = start + len(tokens), room - len(tokens)
            if room == 0:
                yield group
                group, room = [], PIECE
    if group:
        yield group


def decode_in_order(llm: LLM, batch: Batch) -> Decoded:
    """Continue every row to its end, one token a step for all that have not ended, whatever drafts.

    Raises
    ------
    EchelonError   a row cannot be served
    Exception      what a processor or a criterion raised
    """
    for i, prompt in enumerate(batch.prompts):
        llm.inputs.check_prompt(prompt, batch.sampler(0).params, f"input_ids[{i}]")
    with llm.exclusive() as engine:
        texts = Texts(engine.target, batch.prompts)
        try:
            return _decode(texts, batch)
        finally:
            texts.release()


def _decode(texts: Texts, batch: Batch) -> Decoded:
    ids, device = batch.input_ids, batch.input_ids.device
    scores: list[Tensor] = []
    logits: list[Tensor] = []
    new: list[list[int]] = [[] for _ in range(batch.num_rows)]
    is_going = torch.ones(batch.num_rows, dtype=torch.bool, device=device)
    while bool(is_going.any()):
        live = is_going.nonzero().flatten().tolist() if batch.has_end_token else list(range(batch.num_rows))
        found = texts.logits(live)
        raw = torch.zeros(batch.num_rows, found.shape[1], device=device)
        raw[live] = found.to(device)
        after = processed(batch.processors, ids, raw)
        if batch.keeps_scores:
            scores.append(_only(live, after))
        if batch.keeps_logits:
            logits.append(raw)
        tokens = _chosen(texts, batch, after, live)
        for row in live:
            texts.append(row, tokens[row])
            new[row].append(tokens[row])
        ids = torch.cat([ids, torch.tensor(tokens, device=device)[:, None]], dim=1)
        is_going &= ~batch.criteria(ids, tuple(scores) if batch.keeps_scores else None)
        if batch.stream is not None:
            batch.stream.show(new, (~is_going & batch.has_end_token).tolist(), batch.pad)
    return Decoded(new, ids.shape[1] - batch.input_ids.shape[1], scores, logits)


def _only(rows: list[int], scores: Tensor) -> Tensor:
    """Scores [B, V] with 0 in all other rows, which have ended."""
    out = torch.zeros_like(scores)
    out[rows] = scores[rows]
    return out


def _chosen(texts: Texts, batch: Batch, scores: Tensor, rows: list[int]) -> list[int]:
    """A token for every row of the batch: a pad for those that have ended."""
    places = [SampleRow(batch.sampler(row), scores[row].float().cpu().numpy(), texts.tokens[row]) for row in rows]
    chosen = dict(zip(rows, choose(places), strict=True))
    return [chosen.get(row, batch.pad) for row in range(batch.num_rows)]
