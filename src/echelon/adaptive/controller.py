"""Decides in every step how much is drafted for each row, and which drafted tokens of all rows are verified.

Both maximise tokens a millisecond, from chances that are learned (`survival`) and costs that are measured (`cost_table`). Where nothing
pays the step is a plain one; now and then one row drafts all the same, to notice when it would pay again. With exact acceptance no text
depends on any of it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np

from echelon.adaptive.cost_table import Correction, CostTable
from echelon.adaptive.planning import admitted, draft_lengths, survivals
from echelon.adaptive.survival import Survival
from echelon.draft import Draft, Float64, Int64
from echelon.sequence import PlannedRow
from echelon.stats import StepRecord

PROBE = 64  # plain steps after which one row drafts a token
NEWEST = 0.1  # of the newest step in the mean of what drafting takes over what the table says


@dataclass(frozen=True)
class _Shape:
    """What a step costs apart from drafts: tokens fed, keys read, rows that emit, and those of them that draw by noise."""

    num_tokens: int
    num_keys: int
    num_sampled: int
    num_drawn: int

    @classmethod
    def of(cls, rows: SequenceOf[PlannedRow]) -> _Shape:
        sampled = [row for row in rows if row.is_sampled]
        drawn = sum(not row.sequence.sampler.is_argmax for row in sampled)
        return cls(sum(r.num_new for r in rows), sum(r.start + r.num_new for r in rows), len(sampled), drawn)


class Controller:
    """Plans drafts and learns from steps. `corrects`: costs follow what steps take; otherwise the same requests give the same plan."""

    def __init__(self, table: CostTable, corrects: bool = True) -> None:
        self.table, self.survival, self.correction = table, Survival(), Correction()
        self._corrects = corrects
        self._drafting = 1.0  # milliseconds that drafting takes over what the table says
        self._shape = _Shape(0, 0, 0, 0)
        self._draft: Draft | None = None  # what is verified in this step,
        self._rows: dict[int, int] = {}  # of these rows, by sequence: their places in it
        self._drafting_ms = 0.0  # what the table says of drafting it
        self._num_idle = 0

    def planned(self, rows: SequenceOf[PlannedRow]) -> list[PlannedRow]:
        """The rows, each with at most as long a draft as is worth its time."""
        self._shape, self._draft = _Shape.of(rows), None
        drafting = [i for i, row in enumerate(rows) if row.max_draft_depth > 0]
        if not drafting:
            return list(rows)
        limits = np.array([rows[i].max_draft_depth for i in drafting])
        chances = self.survival.expected(np.array([rows[i].sequence.id for i in drafting]), int(limits.max()))
        lengths, _ = draft_lengths(chances, limits, self._shape.num_sampled, self._step_ms, self._level_ms)
        self._num_idle = 0 if lengths.any() else self._num_idle + 1
        if self._num_idle >= PROBE:
            lengths[0], self._num_idle = 1, 0
        found = list(rows)
        for i, length in zip(drafting, lengths.tolist(), strict=True):
            row = rows[i]
            found[i] = replace(row, max_draft_tokens=row.max_draft_tokens if length else 0, max_draft_depth=length)
            if row.max_draft_tokens == row.max_draft_depth:  # a chain
                found[i] = replace(row, max_draft_tokens=length, max_draft_depth=length)
        return found

    def chosen(self, rows: SequenceOf[PlannedRow], draft: Draft) -> Draft:
        """What of the draft of these rows is worth verifying."""
        if not len(draft.tokens):
            return draft
        ids = np.array([row.sequence.id for row in rows])[draft.rows]
        chances = self.survival.chances(ids, draft.depths, _scores(draft))
        survival = survivals(np.where(draft.parents < 0, -1, draft.parents + draft.indptr[draft.rows]), chances)
        self._note(draft, chances)
        at_depth = np.bincount(draft.depths)
        self._drafting_ms = float(self.table.level_ms(at_depth).sum())
        spent = self._drafting * self._drafting_ms
        self._draft = draft.only(admitted(survival, draft.depths, self._shape.num_sampled, self._step_ms, spent))
        self._rows = {row.sequence.id: i for i, row in enumerate(rows)}
        return self._draft

    def observe(self, record: StepRecord) -> None:
        """Learn what was kept, and what the step took."""
        draft, self._draft = self._draft, None
        if draft is not None and len(draft.tokens):
            self._learn(draft, record)
        if not self._corrects or any(row.num_new > 1 for row in record.rows):
            return
        seconds = dict(record.seconds)
        drafting = seconds.pop("draft", 0.0) * 1e3
        plain, whole = self._table_ms(np.array([0, 0 if draft is None else len(draft.tokens)]))
        if plain > 0.0:
            self.correction.observe(float(plain), float(whole - plain), sum(seconds.values()) * 1e3)
        if draft is not None and self._drafting_ms > 0.0:
            self._drafting += NEWEST * (drafting / self._drafting_ms - self._drafting)

    def forget(self, row: int) -> None:
        """The row finished or was aborted; one that was never seen is fine."""
        self.survival.forget(row)

    def _learn(self, draft: Draft, record: StepRecord) -> None:
        is_kept = np.zeros(len(draft.tokens), np.bool_)
        is_known = np.zeros(draft.num_rows, np.bool_)
        ids = np.zeros(draft.num_rows, np.int64)
        for row, kept in zip(record.rows, record.verdict, strict=True):
            place = self._rows.get(row.sequence.id, -1)
            if place >= 0 and kept.next_token >= 0:
                is_known[place], ids[place] = True, row.sequence.id
                is_kept[draft.indptr[place] + np.asarray(kept.path, np.int64)] = True
        parents = draft.parents + draft.indptr[draft.rows]
        reached = is_known[draft.rows] & ((draft.parents < 0) | is_kept[np.maximum(parents, 0)])
        if reached.any():
            scores = _scores(draft)
            self.survival.observe(ids[draft.rows[reached]], draft.depths[reached], scores[reached], is_kept[reached])

    def _note(self, draft: Draft, chances: Float64) -> None:
        """Of every row and depth the best chance, which is what the next level of a draft is worth."""
        width = int(draft.depths.max()) + 1
        best = np.zeros(draft.num_rows * width)
        np.maximum.at(best, draft.rows * width + draft.depths, chances)
        found = np.flatnonzero(best)
        self.survival.drafted(found % width, best[found])

    def _table_ms(self, num_drafted: Int64) -> Float64:
        """What the table says of steps with so many drafted tokens."""
        shape = self._shape
        drawn = shape.num_drawn + num_drafted * (shape.num_drawn / max(shape.num_sampled, 1))
        return self.table.step_ms(shape.num_tokens + num_drafted, shape.num_keys, np.asarray(drawn, np.float64))

    def _step_ms(self, num_drafted: Int64) -> Float64:
        plain = float(self._table_ms(np.zeros(1, np.int64))[0])
        return self.correction.predicted(plain, self._table_ms(num_drafted))

    def _level_ms(self, num_rows: Int64) -> Float64:
        return self._drafting * self.table.level_ms(num_rows)


def _scores(draft: Draft) -> Float64:
    return np.full(len(draft.tokens), np.nan) if draft.scores is None else draft.scores
