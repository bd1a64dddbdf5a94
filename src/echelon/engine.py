"""The step: plan, launch, settle.

On the host a step is drafted, run and verified at once. In two cases the next one is launched before. Where the device can do all that by
itself (`model.graphs.ahead`), it follows the last one, so that the device never waits for the host; a row that turns out to have ended
costs one step, whose verdict on it is dropped. And where a pass goes through stages (`parallel.stages`), rows take turns: some are drafted
for and verified while passes of others are under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from echelon.acceptance import Exact, Rule, verify
from echelon.adaptive.controller import Controller
from echelon.batch import Span
from echelon.draft import Draft, RowVerdict, Verdict
from echelon.drafters.base import Drafter
from echelon.model.runner import Runner
from echelon.ops import devices
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

    def verdict(self, timer: StepTimer) -> Verdict:
        """Wait for the verdict on every row, awaited or not."""

    def commit(self, row: PlannedRow, kept: RowVerdict, is_followed: bool) -> None:
        """Keep keys and values of fed tokens and accepted drafts; give the rest back, unless the row `is_followed` by one in flight."""

    def observe(self, rows: SequenceOf[PlannedRow], verdict: Verdict) -> None:
        """Tell the drafter, if it drafted on the host."""

    def discard(self) -> None:
        """Count what was fed as padding: nobody waits for the verdict."""


@dataclass
class HostStep:
    """A step that the host has drafted and verifies. `finish` waits for logits [R, V], and hidden states [T, F] of all tokens fed where the
    drafter wants them.
    """

    plan: Plan
    target: Runner[Any]
    drafter: Drafter
    rule: Rule
    draft: Draft
    logit_indptr: Tensor
    finish: Callable[[], tuple[Tensor, Tensor | None]]
    hidden_states: Tensor | None = field(default=None, init=False)

    def verdict(self, timer: StepTimer) -> Verdict:
        with timer("forward"):
            logits, self.hidden_states = self.finish()
        with timer("verify"):
            return verify(self.draft, logits, self.logit_indptr, self.plan.rows, self.rule)

    def commit(self, row: PlannedRow, kept: RowVerdict, is_followed: bool) -> None:  # noqa: ARG002
        self.target.commit(row.sequence.id, row.start + row.num_new, kept.path)

    def observe(self, rows: SequenceOf[PlannedRow], verdict: Verdict) -> None:
        states = self.hidden_states
        if states is not None and len(rows) < len(self.plan.rows):  # some have left while the pass was under way
            awaited = {row.sequence.id for row in rows}
            counts = [row.num_new + count for row, count in zip(self.plan.rows, self.draft.num_draft_tokens.tolist(), strict=True)]
            parts = zip(self.plan.rows, torch.split(states, counts), strict=True)
            states = torch.cat([part for row, part in parts if row.sequence.id in awaited])
        self.drafter.observe(rows, verdict, states)

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
        self.in_flight: deque[LaunchedStep] = deque()  # steps that are not settled, the first of them first
        self._tokens_of_row = 1.0  # fed in the last step
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
        for step in self.in_flight:
            step.plan.gone.add(sequence.id)
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
        """One step of every running row, or of some in turn; returns the sequences that grew in it or finished. Where it is launched and
        not settled yet, these are those of an earlier step: at first none.
        """
        with devices.current(self.target.loaded.device):
            return self._step()

    def _step(self) -> list[Sequence]:
        num_lanes = self._num_lanes()
        with self.timer("schedule", is_overlapped=bool(self.in_flight)):
            may_draft = self.controller is None or not self.controller.rests(self.scheduler.running)
            plan = self.scheduler.next_step([step.plan for step in self.in_flight], self.ahead is not None, num_lanes, may_draft)
        for sequence in plan.preempted:
            self.drafter.forget(sequence.id)
        launched = self._launched(plan)
        if launched is not None:
            self.in_flight.append(launched)
            if len(self.in_flight) < (2 if plan.runs_ahead else num_lanes):
                return []
        return self._settle(self.in_flight.popleft())

    def _num_lanes(self) -> int:
        """How many steps may be under way, each of other rows."""
        num_rows = len(self.scheduler.running) + len(self.scheduler.waiting)
        return self.target.num_lanes(int(num_rows * self._tokens_of_row)) if num_rows > 1 else 1

    def _launched(self, plan: Plan) -> LaunchedStep | None:
        """Begin a step: on the device alone, or on the host; not at all where others have to be settled before."""
        if plan.runs_ahead and self.ahead is not None:
            with self.timer("layout", is_overlapped=True):
                launched = self.ahead.launch(plan)
            plan.runs_ahead = launched is not None
            if launched is not None or self.in_flight:
                return launched
        return self._run(plan) if plan.rows or not self.in_flight else None

    def _run(self, plan: Plan) -> LaunchedStep:
        """Draft on the host, and begin the pass."""
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
            finish = self.target.begin(batch)
        return HostStep(plan, self.target, self.drafter, self.rule, draft, batch.logit_indptr, finish)

    def _settle(self, step: LaunchedStep) -> list[Sequence]:
        """Keep, observe and append what survived of the rows that are still awaited."""
        ahead = step.plan.runs_ahead
        found = step.verdict(self.timer)
        awaited = [(row, kept) for row, kept in zip(step.plan.rows, found, strict=True) if step.plan.awaits(row)]
        rows, verdict = [row for row, _ in awaited], [kept for _, kept in awaited]
        with self.timer("settle", ahead):
            self._commit(step, rows, verdict)
        with self.timer("draft", ahead):
            step.observe(rows, verdict)
        with self.timer("settle", ahead):
            lengths = [len(row.sequence) for row in rows]
            finished = self.scheduler.settle(rows, verdict, self.drafter.conclude)
            for sequence in finished:
                self.drafter.forget(sequence.id)
            self._drop_unawaited()
        emitted = [len(row.sequence) - before for row, before in zip(rows, lengths, strict=True)]
        if rows:
            self._tokens_of_row = sum(row.num_new + kept.num_draft_tokens for row, kept in awaited) / len(rows)
        record = StepRecord(rows, verdict, emitted, len(step.plan.preempted), self.timer.take())
        self._learn(record, finished)
        for observer in list(self.observers):
            observer(record)
        return [row.sequence for row, count in zip(rows, emitted, strict=True) if count or row.sequence.is_finished]

    def _commit(self, step: LaunchedStep, rows: SequenceOf[PlannedRow], verdict: Verdict) -> None:
        """Keep the keys and values of what survived."""
        following = self.in_flight[-1].plan if self.in_flight else Plan([])
        pending = following.pending
        for row, kept in zip(rows, verdict, strict=True):
            if kept.next_token < 0:
                following.gone.add(row.sequence.id)  # what is in flight of the row began with no token
            step.commit(row, kept, row.sequence.id in pending and kept.next_token >= 0)

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
        """Forget steps in flight of which no row is awaited any more."""
        for step in self.in_flight:
            if not step.plan.pending:
                step.discard()
        self.in_flight = deque(step for step in self.in_flight if step.plan.pending)

    def check(self) -> None:
        """Every invariant of the state; run after each step in tests."""
        self.scheduler.check()
        self.target.cache.check()
        for sequence in self.scheduler.running:
            cached = self.target.num_cached(sequence.id)
            assert cached < len(sequence), f"row {sequence.id}: all {cached} tokens cached, so none is left to feed"
