"""The step: plan, draft, one forward pass over every row, verify, keep, settle.

Where the device can do all that by itself (`model.graphs.ahead`), a step is launched before the last one is settled, so that it never
waits for the host. A row that turns out to have ended costs one step, whose verdict on it is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from echelon.acceptance import Exact, Rule, verify
from echelon.batch import Span
from echelon.draft import Draft, RowVerdict, Verdict
from echelon.drafters.base import Drafter
from echelon.model.runner import ModelRunner
from echelon.scheduler import Plan, Scheduler
from echelon.sequence import AheadRow, PlannedRow, Sequence
from echelon.stats import Stats

if TYPE_CHECKING:
    from echelon.model.graphs.ahead import Ahead, Landing  # imports Triton


def spans_of(rows: SequenceOf[PlannedRow], draft: Draft) -> list[Span]:
    """What the target is fed: each row's new tokens and its draft; logits after the last known token and every drafted one."""
    spans = []
    for i, row in enumerate(rows):
        known = row.sequence.tokens[row.start : row.start + row.num_new]
        drafted = draft.row(i)
        num_logits = row.num_prompt_logits + (1 + len(drafted) if row.is_sampled else 0)
        parents = draft.row_parents(i) if draft.has_branches else None
        sequence = row.sequence
        lengths = num_logits, len(sequence), len(drafted)
        spans.append(Span(sequence.id, row.start, known + drafted, *lengths, parents, sequence.num_prompt_tokens))
    return spans


@dataclass
class Flight:
    """A step that was launched and is not settled. `lost` rows, by their sequences' ids, have gone meanwhile."""

    rows: list[AheadRow]
    landing: Landing
    lost: set[int] = field(default_factory=set)

    @property
    def expected(self) -> dict[int, tuple[int, AheadRow]]:
        """By sequence: the row with its place."""
        return {row.sequence.id: (place, row) for place, row in enumerate(self.rows) if row.sequence.id not in self.lost}


class Engine:
    """One target, one drafter, one scheduler. `step` until nothing `has_work`. With `ahead`, steps are launched early where they can be."""

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter,
        scheduler: Scheduler,
        rule: Rule | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        self.target, self.drafter, self.scheduler, self.rule, self.ahead = target, drafter, scheduler, rule or Exact(), ahead
        self.flight: Flight | None = None
        self._is_watched = False  # the next step is not launched ahead: the host must see some row's logits
        self.stats = Stats(target=target.usage)
        self.clock: Callable[[], float] = time.perf_counter  # what the parts of a step are timed by

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)

    def abort(self, sequence: Sequence) -> None:
        self.scheduler.abort(sequence)
        self.drafter.forget(sequence.id)
        if self.flight is not None:
            self.flight.lost.add(sequence.id)

    def step(self) -> list[Sequence]:
        """One step of every running row; returns the sequences that grew in it or finished. Where it is launched and not settled yet, these
        are those of the step before: at first none.
        """
        launched = self._launched()
        if launched is None and self.flight is None:
            return self._step()
        flight, self.flight = self.flight, launched
        return [] if flight is None else self._land(flight)

    def _launched(self) -> Flight | None:
        """The next step, in flight; None where it has to be planned once all is known."""
        if self.ahead is None or self._is_watched:
            return None
        start = time.perf_counter()
        rows = self.scheduler.next_ahead(self.flight.expected if self.flight else {})
        planned = time.perf_counter()
        landing = self.ahead.launch(rows) if rows else None
        self._spend(schedule=planned - start, layout=time.perf_counter() - planned)
        return None if landing is None else Flight(rows, landing)

    def _land(self, flight: Flight) -> list[Sequence]:
        """Settle what was in flight. A row for which no token could be chosen is in the next step, where the host sees why."""
        start = time.perf_counter()
        found = flight.landing.verdict()
        landed = time.perf_counter()
        flight.lost |= {row.sequence.id for row in flight.rows if row.sequence.is_finished}
        flight.landing.count([None if row.sequence.id in flight.lost else len(row.sequence) for row in flight.rows])
        expected = [(row, *found[place]) for place, row in flight.expected.values()]
        following = self.flight.expected if self.flight else {}
        for row, own, accepted in expected:
            is_stuck = own[accepted] < 0
            if is_stuck and self.flight is not None:
                self.flight.lost.add(row.sequence.id)
            self._is_watched |= is_stuck
            assert self.ahead is not None
            self.ahead.keep(row, len(row.sequence) + accepted - is_stuck, is_followed=row.sequence.id in following and not is_stuck)
        rows = [PlannedRow(row.sequence, len(row.sequence) - 1, 1, row.num_drafted, row.num_drafted) for row, _, _ in expected]
        verdict = [RowVerdict(row.num_drafted, list(range(n)), own[:n], own[n]) for row, own, n in expected]
        grown = self._settle(Plan(rows), verdict, sum(row.num_new + row.max_draft_tokens for row in rows))
        if self.flight is not None and all(row.sequence.is_finished for _, row in self.flight.expected.values()):
            self.flight.landing.count([None] * len(self.flight.rows))  # nobody waits for it
            self.flight = None
        self._spend(forward=landed - start, settle=time.perf_counter() - landed)
        return grown

    def _step(self) -> list[Sequence]:
        """All of a step at once."""
        self._is_watched = False
        clock = [self.clock()]
        plan = self.scheduler.next_step()
        for sequence in plan.preempted:
            self.drafter.forget(sequence.id)
        clock.append(self.clock())
        draft = self.drafter.propose(plan.rows)
        clock.append(self.clock())
        batch = self.target.pack(spans_of(plan.rows, draft))
        clock.append(self.clock())
        logits, taps = self.target.run(batch)
        clock.append(self.clock())
        verdict = verify(draft, logits, batch.logit_indptr, plan.rows, self.rule)
        clock.append(self.clock())
        self._commit(plan.rows, verdict)
        start = self.clock()
        self.drafter.observe(plan.rows, verdict, taps)
        observing = self.clock() - start
        grown = self._settle(plan, verdict, batch.num_tokens)
        clock.append(self.clock())
        parts = dict(zip(self.stats.seconds, (end - start for start, end in pairwise(clock)), strict=True))
        self._spend(**parts)
        self._spend(draft=observing, settle=-observing)
        return grown

    def _commit(self, rows: SequenceOf[PlannedRow], verdict: Verdict) -> None:
        """Keep the keys and values of fed tokens and accepted drafts, give the rest back."""
        for row, kept in zip(rows, verdict, strict=True):
            self.target.commit(row.sequence.id, row.start + row.num_new, kept.path)

    def _settle(self, plan: Plan, verdict: Verdict, num_input_tokens: int) -> list[Sequence]:
        """Append what survived, and count it; the sequences that grew or finished."""
        lengths = [len(row.sequence) for row in plan.rows]
        for sequence in self.scheduler.settle(plan, verdict):
            self.drafter.forget(sequence.id)
        stats = self.stats
        stats.num_steps += 1
        stats.num_input_tokens += num_input_tokens
        stats.num_preemptions += len(plan.preempted)
        stats.num_group_choices += plan.is_group is not None
        stats.num_group_hits += bool(plan.is_group)
        grown = []
        for row, before, kept in zip(plan.rows, lengths, verdict, strict=True):
            if emitted := len(row.sequence) - before:
                stats.count_row(kept.num_draft_tokens, len(kept.path), emitted)
            if emitted or row.sequence.is_finished:
                grown.append(row.sequence)
        return grown

    def _spend(self, **seconds: float) -> None:
        for part, more in seconds.items():
            self.stats.seconds[part] += more

    def check(self) -> None:
        """Every invariant of the state; run after each step in tests."""
        self.scheduler.check()
        self.target.cache.check()
        for sequence in self.scheduler.running:
            cached = self.target.num_cached(sequence.id)
            assert cached < len(sequence), f"row {sequence.id}: all {cached} tokens cached, so none is left to feed"
