"""Controllers for tests: plans that nobody would make."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import numpy as np
import toys

from echelon import LLM
from echelon.adaptive.cost_table import CostCurve, CostTable
from echelon.draft import Draft
from echelon.drafters.base import LevelDrafter
from echelon.sequence import PlannedRow
from echelon.stats import StepRecord


class RandomController:
    """Rests in any step, drafts for any rows to any depth, stops after any level, and verifies any of it that hangs together."""

    def __init__(self, seed: int) -> None:
        self.table, self.piece_sizes = CostTable(step=CostCurve(tokens=(1,), milliseconds=(1.0,))), toys.CostsByTokens()
        self._rng = np.random.default_rng(seed)
        self.num_cut = 0  # drafted tokens that were not verified

    def rests(self, running: Any) -> bool:
        return bool(self._rng.random() < 0.2)

    def planned(self, rows: SequenceOf[PlannedRow]) -> list[PlannedRow]:
        return [self._planned(row) for row in rows]

    def _planned(self, row: PlannedRow) -> PlannedRow:
        depth = int(self._rng.integers(0, row.max_draft_depth + 1))
        is_chain = row.max_draft_tokens == row.max_draft_depth
        return replace(row, max_draft_depth=depth, max_draft_tokens=depth if is_chain else min(row.max_draft_tokens, 4 * depth))

    def goes_on(self, rows: Any, scores: Any) -> Any:
        assert len(scores) == len(rows)
        assert (scores <= 1e-6).all()
        return self._rng.random(len(rows)) < 0.8

    def chosen(self, rows: SequenceOf[PlannedRow], draft: Draft) -> Draft:
        assert draft.num_rows == len(rows)
        is_kept = self._rng.random(len(draft.tokens)) < 0.8
        for node, (parent, row) in enumerate(zip(draft.parents.tolist(), draft.rows.tolist(), strict=True)):
            is_kept[node] &= parent < 0 or is_kept[parent + draft.indptr[row]]
        self.num_cut += int((~is_kept).sum())
        return draft.only(is_kept)

    def observe(self, record: StepRecord) -> None:
        self.piece_sizes.observe(record)

    def forget(self, row: int) -> None: ...

    def as_metrics(self) -> dict[str, Any]:
        return {}


def at_random(llm: LLM, seed: int) -> RandomController:
    """From now on the engine's plans are random."""
    controller = llm.engine.controller = RandomController(seed)
    llm.engine.scheduler.piece_sizes = controller.piece_sizes
    drafter = llm.engine.drafter.unguarded
    if isinstance(drafter, LevelDrafter):
        drafter.pace = controller.goes_on
    return controller


def without_drafts(rows: SequenceOf[PlannedRow]) -> list[PlannedRow]:
    """Rows that draft nothing."""
    return [replace(row, max_draft_depth=0, max_draft_tokens=0) for row in rows]
