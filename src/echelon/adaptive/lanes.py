"""Decides for steps of which several are under way, each of other rows (`Runner.num_lanes`)."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from echelon.adaptive.controller import BatchController, Learned
from echelon.adaptive.cost_table import CostTable
from echelon.adaptive.planning import Bool
from echelon.draft import Draft, Float64, Int64
from echelon.sequence import PlannedRow, Sequence
from echelon.stats import StepRecord


class LaneController:
    """As many `BatchController`s as steps are under way, all of which learn together. A step's seconds are those since the one before was
    settled: what a lane costs beside the others.
    """

    def __init__(self, table: CostTable, corrects: bool = True) -> None:
        self.table, self._corrects, self._learned = table, corrects, Learned(table)
        self._deciding = BatchController(table, corrects, self._learned)
        self._all, self._idle = [self._deciding], [self._deciding]
        self._under_way: list[tuple[set[int], BatchController]] = []  # rows of a step that are awaited, and who has decided on it
        self.piece_sizes = self._deciding.piece_sizes

    def rests(self, running: SequenceOf[Sequence]) -> bool:
        return not self._under_way and self._idle[-1].rests(running)

    def planned(self, rows: SequenceOf[PlannedRow]) -> list[PlannedRow]:
        numbers = {row.sequence.id for row in rows}
        failed = [step for step in self._under_way if not numbers.isdisjoint(step[0])]  # as their rows are planned again
        self._end(failed)
        if not self._idle:
            self._all.append(BatchController(self.table, self._corrects, self._learned))
            self._idle.append(self._all[-1])
        self._deciding = self._idle.pop()
        self._under_way.append((numbers, self._deciding))
        return self._deciding.planned(rows)

    def goes_on(self, rows: Int64, scores: Float64) -> Bool:
        return self._deciding.goes_on(rows, scores)

    def chosen(self, rows: SequenceOf[PlannedRow], draft: Draft) -> Draft:
        return self._deciding.chosen(rows, draft)

    def observe(self, record: StepRecord) -> None:
        numbers = {row.sequence.id for row in record.rows}
        settled = [step for step in self._under_way if step[0] == numbers]
        for _, controller in settled:
            controller.observe(record)
        self._end(settled)

    def forget(self, row: int) -> None:
        for numbers, _ in self._under_way:
            numbers.discard(row)
        self._end([step for step in self._under_way if not step[0]])
        for controller in self._all:
            controller.forget(row)

    def as_metrics(self) -> dict[str, Any]:
        return self._deciding.as_metrics()

    def _end(self, steps: SequenceOf[tuple[set[int], BatchController]]) -> None:
        """These steps are no longer under way."""
        for step in steps:
            self._under_way.remove(step)
            self._idle.append(step[1])
