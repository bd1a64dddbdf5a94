"""The step: plan, draft, one forward pass over every row, verify, keep, settle."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from itertools import pairwise

from echelon.batch import Span
from echelon.draft import Draft
from echelon.drafters.base import Drafter
from echelon.scheduler import Scheduler
from echelon.sequence import PlannedRow, Sequence
from echelon.stats import Stats
from echelon.target.runner import ModelRunner
from echelon.verify import Acceptance, Verdict, verify


def spans_of(rows: SequenceOf[PlannedRow], draft: Draft) -> list[Span]:
    """What the target is fed: each row's new tokens and its draft; logits after the last known token and every drafted one."""
    spans = []
    for i, row in enumerate(rows):
        known = row.sequence.tokens[row.start : row.start + row.num_new]
        drafted = draft.row(i)
        num_logits = row.num_prompt_logits + (1 + len(drafted) if row.is_sampled else 0)
        parents = draft.row_parents(i) if draft.has_branches else None
        spans.append(Span(row.sequence.id, row.start, known + drafted, num_logits, len(row.sequence), len(drafted), parents))
    return spans


class Engine:
    """One target, one drafter, one scheduler. `step` until nothing `has_work`."""

    def __init__(self, target: ModelRunner, drafter: Drafter, scheduler: Scheduler, acceptance: Acceptance = "exact") -> None:
        self.target, self.drafter, self.scheduler, self.acceptance = target, drafter, scheduler, acceptance
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

    def step(self) -> list[Sequence]:
        """One step of every running row; returns the sequences that grew in it or finished."""
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
        verdict = verify(draft, logits, plan.rows, self.acceptance)
        clock.append(self.clock())
        self._commit(plan.rows, verdict)
        start = self.clock()
        self.drafter.observe(plan.rows, verdict, taps)
        observing = self.clock() - start
        lengths = [len(row.sequence) for row in plan.rows]
        finished = self.scheduler.settle(plan, verdict)
        for sequence in finished:
            self.drafter.forget(sequence.id)
        clock.append(self.clock())
        self._count(plan.rows, lengths, verdict, batch.num_tokens, clock)
        self.stats.seconds["draft"] += observing
        self.stats.seconds["settle"] -= observing
        self.stats.num_preemptions += len(plan.preempted)
        self.stats.num_group_choices += plan.is_group is not None
        self.stats.num_group_hits += bool(plan.is_group)
        changed = zip(plan.rows, lengths, strict=True)
        return [row.sequence for row, before in changed if len(row.sequence) > before or row.sequence.is_finished]

    def _commit(self, rows: SequenceOf[PlannedRow], verdict: Verdict) -> None:
        """Keep the keys and values of fed tokens and accepted drafts, give the rest back."""
        for row, path in zip(rows, verdict.paths, strict=True):
            self.target.commit(row.sequence.id, row.start + row.num_new, path)

    def _count(self, rows: SequenceOf[PlannedRow], lengths: list[int], verdict: Verdict, num_input_tokens: int, clock: list[float]) -> None:
        stats = self.stats
        stats.num_steps += 1
        stats.num_input_tokens += num_input_tokens
        for part, (start, end) in zip(stats.seconds, pairwise(clock), strict=True):
            stats.seconds[part] += end - start
        for row, before, drafted, path in zip(rows, lengths, verdict.num_draft_tokens, verdict.paths, strict=True):
            emitted = len(row.sequence) - before
            if emitted:
                stats.count_row(drafted, len(path), emitted)

    def check(self) -> None:
        """Every invariant of the state; run after each step in tests."""
        self.scheduler.check()
        self.target.cache.check()
        for sequence in self.scheduler.running:
            cached = self.target.num_cached(sequence.id)
            assert cached < len(sequence), f"row {sequence.id}: all {cached} tokens cached, so none is left to feed"
