"""Decides for each row by itself how much is drafted, where a text depends on how much is drafted: by rejection and typical acceptance.

A row's own past and the costs as loaded decide, so that no neighbour changes its text; and nothing that was drawn decides whether it is
verified, so that the distribution stays.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np

from echelon.adaptive.controller import PROBE
from echelon.adaptive.corrections import StepFactors
from echelon.adaptive.cost_table import CostTable, TablePieces
from echelon.adaptive.planning import Bool
from echelon.draft import Draft, Float64, Int64
from echelon.sequence import PlannedRow, Sequence
from echelon.stats import StepRecord
from echelon.step_costs import PieceSizes

OWN_PRIOR, OWN_HOPE = 4.0, 0.8  # a row's chances before anything of it was verified, and counts that these weigh
OWN_HALF_LIFE = 64.0  # steps until a row's count is worth half


@dataclass
class _OwnPast:
    """Fading counts of what became of a row's drafts, float64[D] by place, its plain steps in a row, and parents in its latest draft."""

    right: Float64
    tried: Float64
    num_idle: int = 0
    parents: SequenceOf[int] = ()

    def chances(self) -> Float64:
        """float64[D]: of a token at each place, if those before it are kept."""
        return np.asarray((self.right + OWN_PRIOR * OWN_HOPE) / (self.tried + OWN_PRIOR))

    def count(self, path: SequenceOf[int]) -> None:
        """These nodes were kept, and of what follows the last, if anything did, nothing."""
        num_kept, was_tried_on = len(path), (path[-1] if path else -1) in self.parents
        fade = 0.5 ** (1.0 / OWN_HALF_LIFE)
        self.right, self.tried = self.right * fade, self.tried * fade
        self.right[:num_kept] += 1.0
        self.tried[: num_kept + was_tried_on] += 1.0


class RowController:
    """Each row's draft by its own past and by what a step of it alone would cost as the table says; for rules under which that matters.

    `most_depth`: most tokens on a path; `nodes_per_level`: drafted tokens of a tree by its depth, 1 for chains.
    """

    def __init__(self, table: CostTable, most_depth: int, nodes_per_level: float = 1.0) -> None:
        self.table, lengths = table, np.arange(most_depth + 1)
        self.piece_sizes: PieceSizes = TablePieces(table, StepFactors(table.step.tokens))
        tokens = 1 + np.ceil(lengths * nodes_per_level).astype(np.int64)
        self._ms = table.step_ms(tokens, 0, np.zeros(1)) + table.drafting_ms(1, lengths)
        self._rows: dict[int, _OwnPast] = {}
        self._most_depth, self._drafts_chains = most_depth, nodes_per_level == 1.0

    def rests(self, running: SequenceOf[Sequence]) -> bool:  # noqa: ARG002
        return False  # each row decides for itself

    def planned(self, rows: SequenceOf[PlannedRow]) -> list[PlannedRow]:
        return [row if row.max_draft_depth == 0 else self._planned(row) for row in rows]

    def _planned(self, row: PlannedRow) -> PlannedRow:
        zeros = np.zeros(self._most_depth)
        past = self._rows.setdefault(row.sequence.id, _OwnPast(zeros, zeros))
        emitted = 1.0 + np.concatenate([[0.0], np.cumsum(np.cumprod(past.chances()))])
        length = int(np.argmax((emitted / self._ms)[: row.max_draft_depth + 1]))
        past.num_idle = 0 if length else past.num_idle + 1
        if past.num_idle >= PROBE:
            length, past.num_idle = 1, 0
        tokens = length if self._drafts_chains or not length else row.max_draft_tokens
        return row.drafting(tokens, length)

    def goes_on(self, rows: Int64, scores: Float64) -> Bool:  # noqa: ARG002
        return np.ones(len(rows), np.bool_)

    def chosen(self, rows: SequenceOf[PlannedRow], draft: Draft) -> Draft:
        for i, row in enumerate(rows):
            if (past := self._rows.get(row.sequence.id)) is not None:
                past.parents = draft.row_parents(i)
        return draft

    def observe(self, record: StepRecord) -> None:
        for row, kept in zip(record.rows, record.verdict, strict=True):
            past = self._rows.get(row.sequence.id)
            if past is not None and kept.num_draft_tokens:
                past.count(kept.path)

    def forget(self, row: int) -> None:
        self._rows.pop(row, None)

    def as_metrics(self) -> dict[str, Any]:
        return {}
