"""Decides in every step for which rows how much is drafted, and which drafted tokens of all rows are verified.

With exact acceptance no text depends on any of it, and all rows share one price: `BatchController` makes tokens a millisecond as many as it
can, from chances that are learned (`survival`) and costs that are measured (`cost_table`). Under the other rules a text depends on how much
was drafted, and a row's own past alone decides (`RowController`), so that no neighbour changes its text, and nothing that was drawn decides
whether it is verified, so that the distribution stays.

Where nothing pays the step is a plain one; now and then a row drafts all the same, to notice when it would pay again.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from echelon.adaptive.cost_table import Correction, CostTable, TablePieces
from echelon.adaptive.hindsight import LONGEST, Hindsight
from echelon.adaptive.planning import Bool, Underway, admitted, draft_lengths, survivals
from echelon.adaptive.survival import Survival
from echelon.draft import Draft, Float64, Int64
from echelon.sequence import PlannedRow
from echelon.stats import StepRecord
from echelon.step_costs import PieceSizes

PROBE = 64  # plain steps after which one row drafts a token
KNOWN = 4  # steps with drafts after which chances are believed; before,
CAUTION = 1.25  # times a plain step is as long as a step may be, while each row has a token at least
REST = 4  # of plain steps with as many rows every fourth is decided
NEWEST = 0.1  # of the newest step in the mean of what drafting takes over what the table says
MOST_EXCESS = 4.0  # times what the table says, and no more, is believed of one step's drafting
OWN_PRIOR, OWN_HOPE = 4.0, 0.8  # a row's chances before anything of it was verified, and counts that these weigh
OWN_HALF_LIFE = 64.0  # steps until a row's count is worth half


class Controller(Protocol):
    """What the engine asks in a step, in this order, and a drafter between the first two, level by level."""

    table: CostTable
    piece_sizes: PieceSizes  # of prompts, at the same costs

    def planned(self, rows: SequenceOf[PlannedRow]) -> list[PlannedRow]:
        """The rows, of which those that shall draft have room for it."""

    def goes_on(self, rows: Int64, scores: Float64) -> Bool:
        """bool[M]: whether drafts grow by another level. `rows` int64[M] are places among those planned, of drafted paths with the
        logarithms of the drafter's probabilities `scores` float64[M, d].
        """

    def chosen(self, rows: SequenceOf[PlannedRow], draft: Draft) -> Draft:
        """What of the draft of these rows is verified."""

    def observe(self, record: StepRecord) -> None:
        """Learn from a settled step."""

    def forget(self, row: int) -> None:
        """The row finished or was aborted; one that was never seen is fine."""

    def as_metrics(self) -> dict[str, Any]:
        """Counters and gauges by name."""


@dataclass(frozen=True)
class _Shape:
    """What a step costs apart from drafts: tokens fed, of them those of prompts, keys read, rows that emit, those that draw by noise."""

    num_tokens: int = 0
    num_read: int = 0
    num_keys: int = 0
    num_sampled: int = 0
    num_drawn: int = 0

    @classmethod
    def of(cls, rows: SequenceOf[PlannedRow]) -> _Shape:
        sampled = [row for row in rows if row.is_sampled]
        drawn = sum(not row.sequence.sampler.is_argmax for row in sampled)
        num_tokens = sum(r.num_new for r in rows)
        return cls(num_tokens, num_tokens - len(sampled), sum(r.start + r.num_new for r in rows), len(sampled), drawn)


class BatchController:
    """One price for the drafted tokens of all rows, tokens a millisecond; for exact acceptance.

    `corrects`: costs follow what steps take. Without, the same requests give the same plan.
    """

    def __init__(self, table: CostTable, corrects: bool = True) -> None:
        self.table, self.survival, self.correction, self.hindsight = table, Survival(), Correction(), Hindsight()
        self.piece_sizes: PieceSizes = TablePieces(table, self.correction)
        self._corrects = corrects
        self._drafting = 1.0  # milliseconds that drafting takes over what the table says
        self._has_drafted = False  # did the step before? After plain ones a drafter has to catch up, which is no cost of a level
        self._probed = -1  # the row that drafts only to be noticed
        self._num_levels = 0  # of drafting so far in this step
        self._num_learned = 0  # steps that something was learned from
        self._num_idle = 0  # plain steps in a row
        self._is_resting = False  # is this step as plain as the one before, without another thought?
        self._rows: SequenceOf[PlannedRow] = ()
        self._odds: Float64 = np.ones(0)  # [B] of these rows, as `Survival.odds`
        self._costs = _StepCosts(_Shape(), table, self.correction, self._drafting)
        self._step = Underway(0.0)
        self._draft: Draft | None = None  # what is verified in this step

    def planned(self, rows: SequenceOf[PlannedRow]) -> list[PlannedRow]:
        is_as_before = len(rows) == len(self._rows) and all(row.num_new == 1 for row in rows)
        self._is_resting = is_as_before and self._num_idle > REST and self._num_idle % REST > 0
        if self._is_resting:
            self._num_idle += 1
            self._rows = found = [row.drafting(0, 0) for row in rows]
            return found
        shape, found, self._probed, self._num_levels = _Shape.of(rows), list(rows), -1, 0
        self._costs, self._draft = _StepCosts(shape, self.table, self.correction, self._drafting), None
        self._step, self._odds = Underway(float(shape.num_sampled)), self.survival.odds([row.sequence.id for row in rows])
        limits = np.array([row.max_draft_depth for row in rows], np.int64)
        if limits.any():
            if self._num_learned < KNOWN:
                found = self._cautious(rows, limits)
                limits = np.array([row.max_draft_depth for row in found], np.int64)
            lengths = self._lengths(self._odds, limits)
            plain = np.flatnonzero((lengths == 0) & (limits > 0)).tolist()
            for i in plain:
                found[i] = found[i].drafting(0, 0)
            num_steps = REST if self._num_idle > REST else 1
            self.survival.passed_over([rows[i].sequence.id for i in plain], num_steps)
            if not lengths.any():
                self.survival.rest(num_steps)
            self._probe(found, rows, limits, is_plain=not lengths.any())
        self._rows = found
        return found

    def _cautious(self, rows: SequenceOf[PlannedRow], limits: Int64) -> list[PlannedRow]:
        """The rows with as short drafts as little knowledge warrants: hope alone makes no step much longer than a plain one."""
        num_rows, longest = int((limits > 0).sum()), int(limits.max())
        step_ms = self._costs.upto(0, num_rows, longest)[0][num_rows * np.arange(longest + 1)]
        most = max(1, int((step_ms <= CAUTION * step_ms[0]).sum()) - 1)
        return [row.drafting(min(row.max_draft_tokens, most), min(row.max_draft_depth, most)) for row in rows]

    def _lengths(self, odds: Float64, limits: Int64) -> Int64:
        """Tokens int64[B] to draft of each row, from the start."""
        chances = self.survival.expected(odds, int(limits.max()))
        return draft_lengths(self._step, np.ones(len(odds)), chances, limits, *self._costs.upto(0, *chances.shape))[0]

    def _probe(self, found: list[PlannedRow], rows: SequenceOf[PlannedRow], limits: Int64, is_plain: bool) -> None:
        """After PROBE plain steps one of the rows that may draft does."""
        self._num_idle = self._num_idle + 1 if is_plain else 0
        if self._num_idle >= PROBE:
            self._probed, self._num_idle = int(limits.argmax()), 0
            found[self._probed] = rows[self._probed].drafting(1, 1)

    def goes_on(self, rows: Int64, scores: Float64) -> Bool:
        num_paths, depth = scores.shape
        odds, costs, step = self._odds[rows], self._costs, self._step
        chances = self.survival.chances(np.repeat(odds, depth), np.tile(np.arange(depth), num_paths), scores.ravel())
        survival = chances.reshape(scores.shape).prod(1)
        num_rows = len(np.unique(rows))
        level_ms = costs.upto(step.num_drafted, num_paths, 1)[1]
        spent, self._num_levels = step.spent_ms + float(level_ms[num_rows]), depth
        self._step = step = Underway(step.emitted + float(survival.sum()), step.num_drafted + num_paths, spent)
        limits = np.array([self._rows[i].max_draft_depth for i in rows.tolist()]) - depth
        most = int(limits.max())
        if most <= 0:
            return np.zeros(num_paths, np.bool_)
        expected = self.survival.expected(odds, depth + most)[:, depth:]
        step_ms, level_ms = costs.upto(step.num_drafted, num_paths, most)
        of_paths = level_ms[-(-np.arange(num_paths + 1) * num_rows // num_paths)]  # a row's paths take one pass
        return np.asarray(draft_lengths(step, survival, expected, limits, step_ms, of_paths)[0] > 0)

    def chosen(self, rows: SequenceOf[PlannedRow], draft: Draft) -> Draft:  # noqa: ARG002
        if not len(draft.tokens):
            return draft
        depths, scores = draft.depths, draft.scores
        chances = self.survival.chances(self._odds[draft.rows], depths, scores)
        survival = survivals(_parents(draft), depths, chances) if draft.has_branches else _along(draft, chances)
        best = _best(draft, chances)
        self.survival.drafted(depths[best], None if scores is None else scores[best])
        step_ms, level_ms = self._costs.upto(0, len(depths), 1)
        last = int(depths.max()) + 1
        if last > self._num_levels:  # nobody asks after the last level of a tree
            spent = self._step.spent_ms + (last - self._num_levels) * float(level_ms[len(np.unique(draft.rows[depths == last - 1]))])
            self._step = Underway(self._step.emitted, self._step.num_drafted, spent)
        is_admitted = admitted(survival, depths, self._costs.shape.num_sampled, step_ms, self._step.spent_ms)
        is_admitted |= draft.rows == self._probed
        self._draft = draft if is_admitted.all() else draft.only(is_admitted)
        self.hindsight.num_proposed += len(depths)
        return self._draft

    def observe(self, record: StepRecord) -> None:
        if self._is_resting:
            return
        draft, self._draft = self._draft, None
        if draft is not None and len(draft.tokens):
            self._learn(draft, record)
        if record.rows and not any(row.num_new > 1 for row in record.rows):
            self._measure(record, 0 if draft is None else len(draft.tokens))

    def _measure(self, record: StepRecord, num_drafted: int) -> None:
        """Compare what a step took with what was said of it."""
        costs, spent, lengths = self._costs, self._step.spent_ms, np.arange(LONGEST + 1)
        num_rows, drafting = costs.shape.num_sampled, record.seconds["draft"] * 1e3
        measured = sum(record.seconds.values()) * 1e3 - drafting
        step_ms, level_ms = costs.upto(0, num_rows, max(LONGEST, -(-num_drafted // max(num_rows, 1))))
        accepted = np.array([len(kept.path) for kept in record.verdict if kept.next_token >= 0], np.int64)
        fixed_ms = step_ms[num_rows * lengths] + level_ms[num_rows] * lengths
        self.hindsight.observe(spent + float(step_ms[num_drafted]), drafting + measured, accepted, fixed_ms)
        if self._corrects:
            plain, whole = costs.said(0), costs.said(num_drafted)
            self.correction.observe(plain, whole - plain, measured)
            if spent > 0.0 and self._has_drafted:
                excess = min(drafting / (spent / self._drafting), MOST_EXCESS)
                self._drafting += NEWEST * (excess - self._drafting)
        self._has_drafted = spent > 0.0

    def forget(self, row: int) -> None:
        self.survival.forget(row)

    def as_metrics(self) -> dict[str, Any]:
        factors = {"plain": self.correction.plain, "drafted": self.correction.extra, "drafting": self._drafting}
        return self.hindsight.as_metrics() | {"cost_factors": factors}

    def _learn(self, draft: Draft, record: StepRecord) -> None:
        """Learn from the rows that emitted: their drafted tokens whose parents were kept."""
        place = {row.sequence.id: i for i, row in enumerate(self._rows)}
        verdict = {place[row.sequence.id]: kept for row, kept in zip(record.rows, record.verdict, strict=True) if kept.next_token >= 0}
        is_kept, is_known = np.zeros(len(draft.tokens), np.bool_), np.zeros(draft.num_rows, np.bool_)
        first = draft.indptr.tolist()
        is_known[list(verdict)] = True
        is_kept[[first[i] + node for i, kept in verdict.items() for node in kept.path]] = True
        parents = _parents(draft)
        reached = is_known[draft.rows] & ((parents < 0) | is_kept[np.maximum(parents, 0)])
        if reached.any():
            ids = np.array([row.sequence.id for row in self._rows])[draft.rows[reached]]
            scores = None if draft.scores is None else draft.scores[reached]
            self._num_learned += 1
            self.survival.observe(ids, draft.depths[reached], scores, is_kept[reached])


class _StepCosts:
    """What a step of this shape costs, by drafted tokens in it, as corrected now; worked out as far as it is asked for."""

    def __init__(self, shape: _Shape, table: CostTable, correction: Correction, drafting: float) -> None:
        self.shape = shape
        self._table, self._correction, self._drafting = table, correction, drafting
        self._said = self._step_ms = self._level_ms = np.zeros(0)

    def upto(self, num_drafted: int, num_paths: int, depth: int) -> tuple[Float64, Float64]:
        """Milliseconds of the step, reading of prompts left out, by drafted tokens: float64[> num_drafted + num_paths · depth]; and of
        drafting a level, by paths: float64[> num_paths].

        Prompts have to be read, which makes no drafted token cheaper.
        """
        if len(self._step_ms) <= (most := num_drafted + num_paths * depth):
            shape, table, drafted = self.shape, self._table, np.arange(most + 1)
            drawn = np.asarray(shape.num_drawn + drafted * (shape.num_drawn / max(shape.num_sampled, 1)), np.float64)
            self._said = table.step_ms(shape.num_tokens + drafted, shape.num_keys, drawn)
            without = table.step_ms(np.array([max(shape.num_sampled, 1)]), shape.num_keys, np.array([shape.num_drawn]))
            reading = float(self._said[0] - without[0]) if shape.num_read else 0.0
            self._step_ms = self._correction.predicted(float(self._said[0]), self._said) - self._correction.plain * reading
            self._level_ms = self._drafting * table.level_ms(drafted)
        return self._step_ms, self._level_ms

    def said(self, num_drafted: int) -> float:
        """Milliseconds by the table, uncorrected, reading of prompts included; not further than `upto` has been asked for."""
        return float(self._said[num_drafted])


@dataclass
class _OwnPast:
    """Fading counts of what became of a row's drafts, float64[D] by place, and its plain steps in a row."""

    right: Float64
    tried: Float64
    num_idle: int = 0
    drafted: int = field(default=0)  # the longest path drafted for it in this step

    def chances(self) -> Float64:
        """float64[D]: of a token at each place, if those before it are kept."""
        return np.asarray((self.right + OWN_PRIOR * OWN_HOPE) / (self.tried + OWN_PRIOR))

    def count(self, num_kept: int) -> None:
        """Of the path that was drafted so many tokens were kept."""
        fade = 0.5 ** (1.0 / OWN_HALF_LIFE)
        self.right, self.tried = self.right * fade, self.tried * fade
        self.right[:num_kept] += 1.0
        self.tried[: min(num_kept + 1, self.drafted)] += 1.0


class RowController:
    """Each row's draft by its own past and by what a step of it alone would cost as the table says; for rules under which that matters.

    `most_depth`: most tokens on a path; `nodes_per_level`: drafted tokens of a tree by its depth, 1 for chains.
    """

    def __init__(self, table: CostTable, most_depth: int, nodes_per_level: float = 1.0) -> None:
        self.table, lengths = table, np.arange(most_depth + 1)
        self.piece_sizes: PieceSizes = TablePieces(table, Correction())
        tokens = 1 + np.ceil(lengths * nodes_per_level).astype(np.int64)
        self._ms = table.step_ms(tokens, 0, np.zeros(1)) + np.cumsum(np.where(lengths > 0, table.level_ms(np.ones(1, np.int64)), 0.0))
        self._rows: dict[int, _OwnPast] = {}
        self._most_depth, self._drafts_chains = most_depth, nodes_per_level == 1.0

    def planned(self, rows: SequenceOf[PlannedRow]) -> list[PlannedRow]:
        return [row if row.max_draft_depth == 0 else self._planned(row) for row in rows]

    def _planned(self, row: PlannedRow) -> PlannedRow:
        zeros = np.zeros(self._most_depth)
        past = self._rows.setdefault(row.sequence.id, _OwnPast(zeros, zeros))
        emitted = 1.0 + np.concatenate([[0.0], np.cumsum(np.cumprod(past.chances()))])
        length = min(int(np.argmax(emitted / self._ms)), row.max_draft_depth)
        past.num_idle = 0 if length else past.num_idle + 1
        if past.num_idle >= PROBE:
            length, past.num_idle = 1, 0
        tokens = length if self._drafts_chains or not length else row.max_draft_tokens
        return row.drafting(tokens, length)

    def goes_on(self, rows: Int64, scores: Float64) -> Bool:  # noqa: ARG002
        return np.ones(len(rows), np.bool_)

    def chosen(self, rows: SequenceOf[PlannedRow], draft: Draft) -> Draft:
        longest = np.zeros(draft.num_rows, np.int64)
        np.maximum.at(longest, draft.rows, draft.depths + 1)
        for row, length in zip(rows, longest.tolist(), strict=True):
            if (past := self._rows.get(row.sequence.id)) is not None:
                past.drafted = length
        return draft

    def observe(self, record: StepRecord) -> None:
        for row, kept in zip(record.rows, record.verdict, strict=True):
            past = self._rows.get(row.sequence.id)
            if past is not None and kept.num_draft_tokens:
                past.count(len(kept.path))

    def forget(self, row: int) -> None:
        self._rows.pop(row, None)

    def as_metrics(self) -> dict[str, Any]:
        return {}


def _parents(draft: Draft) -> Int64:
    """int64[N]: parents among all nodes, −1 for a root's child."""
    return np.where(draft.parents < 0, -1, draft.parents + draft.indptr[draft.rows]).astype(np.int64)


def _along(draft: Draft, chances: Float64) -> Float64:
    """float64[N]: products along chains."""
    grid = np.ones((draft.num_rows, int(draft.depths.max()) + 1))
    grid[draft.rows, draft.depths] = chances
    return np.asarray(np.cumprod(grid, 1)[draft.rows, draft.depths])


def _best(draft: Draft, chances: Float64) -> Int64:
    """Of every row and depth that was drafted the node with the best chance: what another level of a draft is worth."""
    if not draft.has_branches:
        return np.arange(len(chances))
    level = draft.rows * (int(draft.depths.max()) + 1) + draft.depths
    order = np.lexsort((-chances, level))
    return np.asarray(order[np.unique(level[order], return_index=True)[1]])
