"""Decides in every step for which rows how much is drafted, and which drafted tokens of all rows are verified.

With exact acceptance no text depends on any of it, and all rows share one price: `BatchController` makes tokens a millisecond as many as it
can, from chances that are learned (`survival`) and costs that are measured (`cost_table`), its own time among them. Under the other rules
each row decides for itself (`row_controller`).

Where nothing pays the step is a plain one; now and then a token is verified all the same, to notice when it would pay again. Once chances
are known and while the rows stay, one decision is made for several steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np

from echelon.adaptive.corrections import DraftingFactors, StepFactors
from echelon.adaptive.cost_table import CostTable, TablePieces
from echelon.adaptive.hindsight import LONGEST, ChainFates, Hindsight
from echelon.adaptive.planning import Bool, Underway, admitted, drafted_further, survivals
from echelon.adaptive.prices import StepPrices, StepShape
from echelon.adaptive.standing import HELD, MOST_HELD, RESTED, Standing
from echelon.adaptive.survival import Survival
from echelon.draft import Draft, Float64, Int32, Int64
from echelon.sequence import PlannedRow, Sequence
from echelon.stats import StepRecord
from echelon.step_costs import PieceSizes

PROBE = 64  # steps in which nothing pays, after which the next decision has a token verified all the same; fewer, down to RESTED,
PROBED = 0.0025  # where that takes less than this share of the time
KNOWN = 4  # steps with drafts before chances are believed
CAUTION = 1.25  # times a plain step, the longest step until then; each row may have a token all the same
AHEAD = 3  # levels looked ahead at while drafting
SETTLED, IDLE = 16, 4  # steps with drafts, and plain ones in a row, after which one decision stands for several steps
COMPARED = 0.01  # share of the time for plain steps where drafts would pay: they tell what drafts add to a step
SELDOM = 8  # steps at least between two of these
REMEMBERED = 15  # latest steps with drafts, of whose deciding the median time is taken
NOTHING = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)  # is drafted


class Controller(Protocol):
    """What the engine asks in a step, in this order, and a drafter between the first two, level by level."""

    table: CostTable
    piece_sizes: PieceSizes  # of prompts, at the same costs

    def rests(self, running: SequenceOf[Sequence]) -> bool:
        """Whether a step of these rows is a plain one by an earlier decision, so that none of its rows needs room for drafts."""

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


class _Tried(NamedTuple):
    """Drafted tokens that were verified, their parents kept: rows and depths int64[N], scores float64[N], bool[N]: were they right?"""

    rows: Int64
    depths: Int64
    scores: Float64 | None
    was_right: Bool


class _OwnTime:
    """Milliseconds that deciding and learning take, measured inside `with`.

    latest     of the last measurement
    of_drafts  what a step with drafts costs beyond its tokens: the median of the latest such steps, so that one that was held up does not
               end all drafting; 0 before there are KNOWN
    """

    def __init__(self) -> None:
        self.of_drafts = self.latest = self._ms = self._start = 0.0
        self._latest: deque[float] = deque(maxlen=REMEMBERED)

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *error: object) -> None:
        self.latest = 1e3 * (perf_counter() - self._start)
        self._ms += self.latest

    def take(self) -> float:
        """Those since the last call."""
        taken, self._ms = self._ms, 0.0
        return taken

    def observe(self, of_drafts: float) -> None:
        """Learn from a step with drafts."""
        self._latest.append(of_drafts)
        if len(self._latest) >= KNOWN:
            self.of_drafts = sorted(self._latest)[(len(self._latest) - 1) // 2]


class Learned:
    """What is known of rows and costs by now, and how well it was foretold."""

    def __init__(self, table: CostTable) -> None:
        self.survival, self.hindsight = Survival(), Hindsight()
        self.step_factors, self.drafting_factors = StepFactors(table.step.tokens), DraftingFactors()


class BatchController:
    """One price for the drafted tokens of all rows, tokens a millisecond; for exact acceptance.

    corrects  costs follow what steps take. Without, the same requests give the same plan
    learned   shared with other controllers, of rows whose steps are under way at the same time
    """

    def __init__(self, table: CostTable, corrects: bool = True, learned: Learned | None = None) -> None:
        learned = learned or Learned(table)
        self.table, self.survival, self.hindsight = table, learned.survival, learned.hindsight
        self.step_factors, self.drafting_factors = learned.step_factors, learned.drafting_factors
        self.piece_sizes: PieceSizes = TablePieces(table, self.step_factors)
        self._corrects = corrects
        self._has_drafted = False  # did the step before, all rows? Else a drafter has to catch up, which is no cost of a level
        self._own = _OwnTime()
        self._is_probe = False  # is a token verified whatever it is worth?
        self._num_levels = 0  # of drafting so far in this step
        self._num_learned = 0  # steps that something was learned from
        self._num_idle = self._probed_at = 0  # steps in a row in which nothing was verified that pays, and those before the latest probe
        self._num_probes = 0  # whose turn it is
        self._standing = Standing()  # the latest decision
        self._deciding_ms = self._charged_ms = 0.0  # what that took, and what of it falls into this step;
        self._learning_ms = 0.0  # and what the latest step that was learned from did
        self._are_priced = True  # are the rows of this step those that it was made for?
        self._num_compared = int(1.0 / COMPARED)  # steps since the last one that was plain only to be compared with; the first is soon
        self._is_resting = False  # is this a plain step by an earlier decision, from which nothing is learned?
        self._unlearned: list[_Tried] = []  # what was verified since the last decision
        self._rows: list[PlannedRow] = []
        self._odds: Float64 = np.ones(0)  # [B] of these rows, as `Survival.odds`
        self._costs = StepPrices(StepShape(), table, self.step_factors, self.drafting_factors, 0.0)
        self._step = Underway(0)
        self._draft = Draft.none(0)  # what is verified in this step,
        self._is_likeliest: Bool = np.ones(0, np.bool_)  # of each of its tokens, at its depth
        self._available: Int64 = np.zeros(0, np.int64)  # tokens that the drafter has for each row at most,
        self._share: Float64 = np.ones(0)  # and how likely it has any
        self._likeliest: tuple[Int64, Int64, Float64] = NOTHING  # rows, depths and chances of what was drafted, the best of each depth

    def rests(self, running: SequenceOf[Sequence]) -> bool:
        return self._standing.is_plain and self._standing.covers(len(running), len(self._rows), False)

    def planned(self, rows: SequenceOf[PlannedRow]) -> list[PlannedRow]:
        with self._own:
            return self._planned(rows)

    def _planned(self, rows: SequenceOf[PlannedRow]) -> list[PlannedRow]:
        are_same, self._charged_ms = _are_same(rows, self._rows), 0.0
        self.hindsight.num_row_steps += len(rows)
        is_decided = self._standing.covers(len(rows), len(self._rows), are_same)
        self._are_priced = not is_decided or (self._are_priced and are_same)
        self._is_resting = is_decided and (self._standing.passes() or not self._are_priced)
        if is_decided:
            self._num_idle += self._standing.is_plain
            self._rows = self._standing.limited(rows)
            if not self._is_resting:  # else nothing more is asked in it
                self._begins(len(rows))
                self._step = Underway(self._costs.shape.num_sampled)
        else:
            start = perf_counter()
            self._begins(len(rows))
            self._rows = self._decided(rows)
            self._charged_ms = 1e3 * (perf_counter() - start)
            self._deciding_ms = self._charged_ms if self._corrects else 0.0
        return self._rows

    def _begins(self, num_rows: int) -> None:
        """Nothing is drafted yet in a step of so many rows."""
        self._is_probe, self._num_levels, self._likeliest = False, 0, NOTHING
        self._verifies(Draft.none(num_rows), np.ones(0, np.bool_))
        self._available, self._share = np.full(num_rows, LONGEST), np.full(num_rows, self.hindsight.share_found)

    def _decided(self, rows: SequenceOf[PlannedRow]) -> list[PlannedRow]:
        """The rows by a decision of this step, and for how many more it holds."""
        self._digest()
        shape, found, num_steps = StepShape.of(rows), list(rows), 1 + self._standing.num_passed
        self._standing.begins()
        deciding = self._own.of_drafts if self._corrects else 0.0
        self._costs = StepPrices(shape, self.table, self.step_factors, self.drafting_factors, deciding)
        self._step, self._odds = Underway(shape.num_sampled), self.survival.odds([row.sequence.id for row in rows])
        limits = np.array([row.max_draft_depth for row in rows], np.int64)
        if not limits.any():
            self._standing.num_passed = num_steps - 1  # which the next decision counts
            return found
        if self._num_learned < KNOWN:
            found = self._cautious(rows, limits)
            limits = np.array([row.max_draft_depth for row in found], np.int64)
        costs = self._costs.upto(0, len(limits), int(limits.max()))
        may_draft, rate = drafted_further(self._step, self._further(self._odds, 0, limits), *costs, self._costs.start_ms)
        self._num_compared += num_steps
        if may_draft.any() and self._compares(rate * float(costs[0][0])):
            self._num_compared = 0
            return [row.drafting(0, 0) for row in rows]
        self._standing.may_draft, is_plain = may_draft.tolist(), not may_draft.any()
        for i, may in enumerate(self._standing.may_draft):
            if not may:
                found[i] = rows[i].drafting(0, 0)
        self._num_idle += is_plain
        self._is_probe = self._num_idle >= self._probed_at + self._probes_after()
        if self._is_probe and is_plain:
            found = self._probing(rows, limits)
        if not shape.num_read and (is_plain or self._num_learned >= KNOWN):  # until then drafts are shorter, in every step
            is_settled = self._num_idle > IDLE if is_plain else self._num_learned >= SETTLED
            learning_ms = HELD * self._learning_ms if is_plain else 0.0  # of so many of the steps that it stands for
            self._standing.stands(self._deciding_ms + learning_ms, float(costs[0][0]), is_settled)
        self.survival.passed_over([rows[i].sequence.id for i in np.flatnonzero(~may_draft & (limits > 0)).tolist()], num_steps)
        if is_plain:
            self.survival.rest(num_steps)
            self.drafting_factors.rest(num_steps)
        return found

    def _probes_after(self) -> int:
        """Plain steps after which a token is verified that does not seem to pay."""
        step_ms, level_ms = self._costs.upto(0, 1, 1)
        dearer = (step_ms[1] - step_ms[0] + level_ms[1] + self._costs.start_ms) / step_ms[0]
        return int(np.clip(dearer / PROBED, RESTED, PROBE))

    def _probing(self, rows: SequenceOf[PlannedRow], limits: Int64) -> list[PlannedRow]:
        """The rows, of which those draft a token that have room, and the likeliest is verified; one in turn where drafting takes time."""
        may_draft = limits > 0
        if self.table.drafting is not None:
            able = np.flatnonzero(may_draft & np.array([row.num_new == 1 for row in rows]))  # who reads a prompt cannot draft yet
            may_draft = np.arange(len(rows)) == (able[self._num_probes % len(able)] if len(able) else -1)
            self._num_probes += 1
        return [row.drafting(int(may), int(may)) for row, may in zip(rows, may_draft, strict=True)]

    def _compares(self, num_expected: float) -> bool:
        """Whether this step is a plain one although drafts would pay; of these `num_expected` tokens come in the time of a plain step."""
        shape = self._costs.shape
        if not self._corrects or shape.num_read or not shape.num_sampled or self._num_learned < KNOWN:
            return False
        lost = 1.0 - shape.num_sampled / num_expected
        return self._num_compared >= max(SELDOM, lost / COMPARED)

    def _cautious(self, rows: SequenceOf[PlannedRow], limits: Int64) -> list[PlannedRow]:
        """The rows with as short drafts as little knowledge warrants: hope alone makes no step much longer than a plain one."""
        num_rows, longest = int((limits > 0).sum()), int(limits.max())
        step_ms = self._costs.upto(0, num_rows, longest)[0][num_rows * np.arange(longest + 1)]
        most = max(1, int((step_ms <= CAUTION * step_ms[0]).sum()) - 1)
        return [row.drafting(min(row.max_draft_tokens, most), min(row.max_draft_depth, most)) for row in rows]

    def goes_on(self, rows: Int64, scores: Float64) -> Bool:
        num_paths, depth = scores.shape
        costs, step = self._costs, self._step
        chances = self.survival.chances(np.repeat(self._odds[rows], depth), np.tile(np.arange(depth), num_paths), scores.ravel())
        survival = chances.reshape(scores.shape).prod(1)
        num_rows, num_drafted = len(np.unique(rows)), len(step.drafted) + num_paths
        level_ms = costs.upto(num_drafted, 0, 0)[1]
        spent, self._num_levels = (step.spent_ms or costs.start_ms) + float(level_ms[num_rows]), depth
        self._step = step = Underway(step.num_sampled, np.concatenate([step.drafted, survival]), spent)
        limits = np.minimum(np.array([self._rows[i].max_draft_depth for i in rows.tolist()]) - depth, AHEAD)
        if limits.max() <= 0:
            return np.zeros(num_paths, np.bool_)
        further = survival[:, None, None] * self._further(self._odds[rows], depth, limits)
        step_ms, level_ms = costs.upto(num_drafted, num_paths, int(limits.max()))
        of_paths = level_ms[-(-np.arange(num_paths + 1) * num_rows // num_paths)]  # a row's paths take one pass
        return drafted_further(step, further, step_ms, of_paths)[0]

    def _further(self, odds: Float64, depth: int, limits: Int64) -> Float64:
        """float64[B, D, CASES]: survivals of tokens after the first `depth` of drafts, at most `limits` int64[B] of each."""
        survival = self.survival.foreseen(odds, depth, int(limits.max()))
        return np.asarray(np.where(np.arange(survival.shape[1])[:, None] < limits[:, None, None], survival, 0.0))

    def chosen(self, rows: SequenceOf[PlannedRow], draft: Draft) -> Draft:
        if self._is_resting:
            return draft
        with self._own:
            if self.table.drafting is None:
                self._found(np.array([row.max_draft_depth for row in rows]), draft.num_draft_tokens)
            return self._chosen(draft) if len(draft.tokens) else draft

    def _found(self, limits: Int64, lengths: Int32) -> None:
        """Note what a drafter has that proposes all it has: so many tokens int32[B], of as many int64[B] as it may."""
        is_asked = limits > 0
        self._available, self._share = np.where(lengths < limits, lengths, LONGEST), np.where(is_asked, 1.0, self._share)
        self.hindsight.num_asked += int(is_asked.sum())
        self.hindsight.num_found += int((lengths > 0).sum())

    def _chosen(self, draft: Draft) -> Draft:
        depths, scores = draft.depths, draft.scores
        chances = self.survival.chances(self._odds[draft.rows], depths, scores)
        survival = survivals(_parents(draft), depths, chances) if draft.has_branches else _along(draft, chances)
        best = _best(draft, chances)
        self.survival.drafted(depths[best], None if scores is None else scores[best])
        near = best[depths[best] < LONGEST]
        self._likeliest = draft.rows[near], depths[near], chances[near]
        step_ms, level_ms = self._costs.upto(0, len(depths), 1)
        last = int(depths.max()) + 1
        if last > self._num_levels:  # nobody asks after the last level of a tree
            num_rows = len(np.unique(draft.rows[depths == last - 1]))
            spent = (self._step.spent_ms or self._costs.start_ms) + (last - self._num_levels) * float(level_ms[num_rows])
            self._step = Underway(self._step.num_sampled, self._step.drafted, spent)
        is_admitted = admitted(survival, depths, self._costs.shape.num_sampled, step_ms, self._step.spent_ms)
        if is_admitted.any():
            self._num_idle = self._probed_at = 0
            if self._standing.is_plain:  # a probe that pays: let the next step decide
                self._standing.falls()
        elif self._is_probe:
            self._probed_at = self._num_idle
            is_admitted[survival.argmax()] = True
        else:  # of what was hoped for nothing came true; nothing is verified, and so nothing learned, as in a plain step
            self._num_idle += 1
            self.survival.rest(1)
        is_likeliest = np.zeros(len(depths), np.bool_)
        is_likeliest[best] = True
        self._verifies(draft if is_admitted.all() else draft.only(is_admitted), is_likeliest[is_admitted])
        self.hindsight.num_proposed += len(depths)
        return self._draft

    def _verifies(self, draft: Draft, is_likeliest: Bool) -> None:
        self._draft, self._is_likeliest = draft, is_likeliest

    def observe(self, record: StepRecord) -> None:
        deciding = self._own.take()
        if not self._is_resting:
            with self._own:
                self._observe(record, deciding)
            self._learning_ms = self._own.latest if self._corrects else 0.0

    def _observe(self, record: StepRecord, deciding: float) -> None:
        draft, place = self._draft, {row.sequence.id: i for i, row in enumerate(self._rows)}
        if not place.keys() >= {row.sequence.id for row in record.rows}:
            return  # planned by somebody else
        kept = {place[r.sequence.id]: k for r, k in zip(record.rows, record.verdict, strict=True) if k.next_token >= 0}  # where emitted
        first, is_kept = draft.indptr.tolist(), np.zeros(len(draft.tokens), np.bool_)
        is_kept[[first[i] + node for i, own in kept.items() for node in own.path]] = True
        if len(draft.tokens):
            self._learn(draft, list(kept), is_kept)
        if not self._standing.is_held:
            self._digest()
        if record.rows and not any(row.num_new > 1 for row in record.rows):
            chances, (rows, depths, own) = np.tile(self.survival.means(), (draft.num_rows, 1)), self._likeliest
            chances[rows, depths] = own
            fates = ChainFates.of(draft, is_kept, self._is_likeliest, self._available, self._share, chances)
            self._measure(record, len(kept) + int(is_kept.sum()), fates.only(list(kept)), deciding)
        else:
            self._has_drafted = False

    def _measure(self, record: StepRecord, num_emitted: int, fates: ChainFates, deciding: float) -> None:
        """Compare what a step took with what was said of it; `deciding`: milliseconds of it that were this object's own."""
        costs, spent, lengths, num_drafted = self._costs, self._step.spent_ms, np.arange(LONGEST + 1), len(self._draft.tokens)
        num_rows, drafting = costs.shape.num_sampled, record.seconds["draft"] * 1e3
        measured = sum(record.seconds.values()) * 1e3 - drafting - deciding
        if num_drafted:
            own = deciding - self._charged_ms * (1.0 - 1.0 / MOST_HELD)  # a decision that is dear stands for as many steps
            self._own.observe(own + (drafting if self.table.drafting is None else 0.0))
        step_ms, level_ms = costs.upto(0, num_rows, max(LONGEST, -(-num_drafted // max(num_rows, 1))))
        drafted = fates.drafted()
        verifying = np.interp(drafted, np.arange(len(step_ms)), step_ms) - costs.deciding_ms * np.minimum(drafted, 1.0)
        fixed_ms = verifying + level_ms[num_rows] * lengths + costs.start_ms * (lengths > 0)
        predicted = spent + float(step_ms[num_drafted])
        self.hindsight.observe(predicted, deciding + drafting + measured, num_emitted, fates.emitted(), fixed_ms)
        if self._corrects:
            self.step_factors.observe(costs.shape.num_tokens + num_drafted, costs.said(num_drafted), measured)
            if spent > 0.0 and self._has_drafted:
                self.drafting_factors.observe(self.table.start_ms, (spent - costs.start_ms) / costs.level_factor, drafting)
        self._has_drafted = spent > 0.0 and not self._is_probe

    def forget(self, row: int) -> None:
        self._digest()
        self.survival.forget(row)

    def as_metrics(self) -> dict[str, Any]:
        factors = {"steps": self.step_factors.as_metrics(), "start": self.drafting_factors.start, "level": self.drafting_factors.level}
        return self.hindsight.as_metrics() | {"cost_factors": factors}

    def _learn(self, draft: Draft, emitted: SequenceOf[int], is_kept: Bool) -> None:
        """Note what there is to learn from the rows that emitted: their drafted tokens whose parents were kept."""
        is_known, parents = np.zeros(draft.num_rows, np.bool_), _parents(draft)
        is_known[emitted] = True
        reached = is_known[draft.rows] & ((parents < 0) | is_kept[np.maximum(parents, 0)])
        if reached.any():
            ids = np.array([row.sequence.id for row in self._rows])[draft.rows[reached]]
            scores = None if draft.scores is None else draft.scores[reached]
            self._num_learned += 1
            self._unlearned.append(_Tried(ids, draft.depths[reached], scores, is_kept[reached]))

    def _digest(self) -> None:
        """Learn from what was noted."""
        noted, self._unlearned = self._unlearned, []
        if noted:
            rows, depths, was_right = (np.concatenate(part) for part in zip(*((t.rows, t.depths, t.was_right) for t in noted), strict=True))
            scores = [t.scores for t in noted if t.scores is not None]
            self.survival.observe(rows, depths, np.concatenate(scores) if scores else None, was_right, len(noted))


def _are_same(rows: SequenceOf[PlannedRow], others: SequenceOf[PlannedRow]) -> bool:
    """Are they the same sequences, none of which is reading?"""
    return len(rows) == len(others) and all(
        row.num_new == 1 and row.sequence.id == other.sequence.id for row, other in zip(rows, others, strict=True)
    )


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
