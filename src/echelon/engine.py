"""The step: plan, launch, settle.

On the host a step is drafted, run and verified at once. Where the device can do all that by itself (`model.graphs.ahead`), a step is
launched before the last one is settled, so that the device never waits for the host. A row that turns out to have ended costs one step,
whose verdict on it is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from echelon.acceptance import Exact, Rule, verify
from echelon.adaptive.controller import Controller
from echelon.batch import Span
from echelon.draft import Draft, RowVerdict, Verdict
from echelon.drafters.base import Drafter
from echelon.model.runner import Runner
from echelon.scheduler import Scheduler
from echelon.sequence import Plan, PlannedRow, Sequence
from echelon.stats import Stats, StepObserver, StepRecord, StepTimer

if TYPE_CHECKING:
    from echelon.model.graphs.ahead import Ahead  # imports Triton


def spans_of(rows: SequenceOf[PlannedRow], draft: Draft) -> list[Span]:
    """What the target is fed: each row's new tokens and its draft; logits after the last known token and every drafted one."""
    spans = []
    for i, row in enumerate(rows):
        sequence, drafted = row.sequence, draft.row(i)
        fed = sequence.tokens[row.start : row.start + row.num_new] + drafted
        num_logits = row.num_prompt_logits + (1 + len(drafted) if row.is_sampled else 0)
        parents = draft.row_parents(i) if draft.has_branches else None
        spans.append(Span(sequence.id, row.start, fed, num_logits, len(sequence), len(drafted), parents, sequence.num_prompt_tokens))
    return spans


class LaunchedStep(Protocol):
    """A step that runs, or has run, and is not settled."""

    @property
    def plan(self) -> Plan:
        """What was launched."""

    def verdict(self) -> Verdict:
        """Wait for the verdict on every row, awaited or not."""

    def commit(self, row: PlannedRow, kept: RowVerdict, is_followed: bool) -> None:
        """Keep keys and values of fed tokens and accepted drafts; give the rest back, unless the row `is_followed` by one in flight."""

    def observe(self, rows: SequenceOf[PlannedRow], verdict: Verdict) -> None:
        """Tell the drafter, if it drafted on the host."""

    def discard(self) -> None:
        """Count what was fed as padding: nobody waits for the verdict."""


@dataclass(frozen=True)
class HostStep:
    """A step that the host has drafted, run and verified. `hidden_states` [T, F] of all tokens fed, where the drafter wants them."""

    plan: Plan
    target: Runner[Any]
    drafter: Drafter
    found: Verdict
    hidden_states: Tensor | None

    def verdict(self) -> Verdict:
        return self.found

    def commit(self, row: PlannedRow, kept: RowVerdict, is_followed: bool) -> None:  # noqa: ARG002
        self.target.commit(row.sequence.id, row.start + row.num_new, kept.path)

    def observe(self, rows: SequenceOf[PlannedRow], verdict: Verdict) -> None:
        self.drafter.observe(rows, verdict, self.hidden_states)

    def discard(self) -> None: ...


class Engine:
    """One target, one drafter, one scheduler. `step` until nothing `has_work`. With `ahead`, steps are launched early where they can be;
    with a `controller`, it decides how much is drafted and verified.

    timer      measures the parts of steps
    observers  called with a record of every step once it is settled; `stats` is the first
    """

    def __init__(
        self,
        target: Runner[Any],
        drafter: Drafter,
        scheduler: Scheduler,
        rule: Rule | None = None,
        ahead: Ahead | None = None,
        stats: Stats | None = None,
        controller: Controller | None = None,
    ) -> None:
        self.target, self.drafter, self.scheduler = target, drafter, scheduler
        self.rule, self.ahead, self.controller = rule or Exact(), ahead, controller
        self.in_flight: LaunchedStep | None = None
        self.stats, self.timer = stats or Stats(target=target.usage), StepTimer()
        self.observers: list[StepObserver] = [self.stats.count, scheduler.piece_sizes.observe]

    @property
    def has_work(self) -> bool:
        """Is any request waiting or running?"""
        return self.scheduler.has_work

    def add(self, sequence: Sequence) -> None:
        """Queue a request; see `Scheduler.add`."""
        self.scheduler.add(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Take a request out, wherever it is; a verdict on it that is still awaited is dropped."""
        self.scheduler.abort(sequence)
        self._forget(sequence)
        if self.in_flight is not None:
            self.in_flight.plan.gone.add(sequence.id)
            self._drop_unawaited()

    @contextmanager
    def observed(self, observer: StepObserver) -> Iterator[None]:
        """Inside, `observer` is called with a record of every step."""
        self.observers.append(observer)
        try:
            yield
        finally:
            self.observers.remove(observer)

    def step(self) -> list[Sequence]:
        """One step of every running row; returns the sequences that grew in it or finished. Where it is launched and not settled yet, these
        are those of the step before: at first none.
        """
        before, launched = self.in_flight, None
        with self.timer("schedule", is_overlapped=before is not None):
            plan = self.scheduler.next_step(before.plan if before else None, self.ahead is not None)
        for sequence in plan.preempted:
            self.drafter.forget(sequence.id)
        if plan.runs_ahead and self.ahead is not None:
            with self.timer("layout", is_overlapped=True):
                launched = self.ahead.launch(plan)
            plan.runs_ahead = launched is not None
        if before is None and launched is None:
            before = self._run(plan)
        self.in_flight = launched
        return self._settle(before) if before is not None else []

    def _run(self, plan: Plan) -> LaunchedStep:
        """Carry out a step on the host."""
        if self.controller is not None:
            with self.timer("schedule"):
                plan.rows = self.controller.planned(plan.rows)
        with self.timer("draft"):
            draft = self.drafter.propose(plan.rows)
        if self.controller is not None:
            with self.timer("schedule"):
                draft = self.controller.chosen(plan.rows, draft)
        with self.timer("layout"):
            batch = self.target.pack(spans_of(plan.rows, draft))
        with self.timer("forward"):
            logits, hidden_states = self.target.run(batch)
        with self.timer("verify"):
            verdict = verify(draft, logits, batch.logit_indptr, plan.rows, self.rule)
        return HostStep(plan, self.target, self.drafter, verdict, hidden_states)

    def _settle(self, step: LaunchedStep) -> list[Sequence]:
        """Keep, observe and append what survived of the rows that are still awaited."""
        ahead = step.plan.runs_ahead
        with self.timer("forward", ahead):
            found = step.verdict()
        awaited = [(row, kept) for row, kept in zip(step.plan.rows, found, strict=True) if step.plan.awaits(row)]
        rows, verdict = [row for row, _ in awaited], [kept for _, kept in awaited]
        following = self.in_flight.plan if self.in_flight else Plan([])
        pending = following.pending
        with self.timer("settle", ahead):
            for row, kept in zip(rows, verdict, strict=True):
                if kept.next_token < 0:
                    following.gone.add(row.sequence.id)  # what is in flight of the row began with no token
                step.commit(row, kept, row.sequence.id in pending and kept.next_token >= 0)
        with self.timer("draft", ahead):
            step.observe(rows, verdict)
        with self.timer("settle", ahead):
            lengths = [len(row.sequence) for row in rows]
            finished = self.scheduler.settle(rows, verdict, self.drafter.conclude)
            for sequence in finished:
                self.drafter.forget(sequence.id)
            self._drop_unawaited()
        emitted = [len(row.sequence) - before for row, before in zip(rows, lengths, strict=True)]
        record = StepRecord(rows, verdict, emitted, len(step.plan.preempted), self.timer.take())
        self._learn(record, finished)
        for observer in list(self.observers):
            observer(record)
        return [row.sequence for row, count in zip(rows, emitted, strict=True) if count or row.sequence.is_finished]

    def _learn(self, record: StepRecord, finished: SequenceOf[Sequence]) -> None:
        """Let the controller learn from a step, also of rows that have ended with it."""
        if self.controller is not None:
            with self.timer("schedule", is_overlapped=True):  # of the next step, since this one's record is made
                self.controller.observe(record)
                for sequence in finished:
                    self.controller.forget(sequence.id)

    def _forget(self, sequence: Sequence) -> None:
        """A sequence has left."""
        self.drafter.forget(sequence.id)
        if self.controller is not None:
            self.controller.forget(sequence.id)

    def _drop_unawaited(self) -> None:
        """Forget the step in flight once none of its rows is awaited."""
        if self.in_flight is not None and not self.in_flight.plan.pending:
            self.in_flight.discard()
            self.in_flight = None

    def check(self) -> None:
        """Every invariant of the state; run after each step in tests."""
        self.scheduler.check()
        self.target.cache.check()
        for sequence in self.scheduler.running:
            cached = self.target.num_cached(sequence.id)
            assert cached < len(sequence), f"row {sequence.id}: all {cached} tokens cached, so none is left to feed"
