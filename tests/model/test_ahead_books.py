"""Steps in flight under any sequence of events, against a device that keeps of every slot what was written there. No tensors, no model.

A slot's keys and values are a function of the text up to it, so its hash stands for them. A step must find those of every token before the
ones that it feeds, in whatever blocks the rows have by then.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import rule

pytest.importorskip("triton")

import test_scheduler
import toys
from test_scheduler import continuation, verdict_for

from echelon import SamplingParams
from echelon.draft import RowVerdict, Verdict
from echelon.drafters.base import NoDrafter
from echelon.engine import Engine
from echelon.kv.blocks import BlockTables
from echelon.model.graphs.ahead import KNOWN, DeviceStep
from echelon.sampling import Sampler
from echelon.scheduler import DraftLimits, Scheduler
from echelon.sequence import Plan, PlannedRow, Sequence
from echelon.stats import StepTimer, Usage

WRONG = 50  # no token of any text


class Memory:
    """What stands in the slots of one cache."""

    def __init__(self, tables: BlockTables) -> None:
        self.tables = tables
        self._slots: dict[int, int] = {}

    def copy(self) -> None:
        for sources, targets in self.tables.copies:
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                self._slots[target] = self._slots.get(source, 0)
        self.tables.copies.clear()

    def feed(self, row: int, text: SequenceOf[int], start: int) -> None:
        """All tokens of the text from `start` on; those before must be there."""
        blocks, size = self.tables.blocks(row), self.tables.block_size
        places = [blocks[at // size] * size + at % size for at in range(len(text))]
        for at, slot in enumerate(places):
            if at < start:
                assert self._slots.get(slot) == hash(tuple(text[: at + 1])), f"row {row} lacks the token at {at}"
            else:
                self._slots[slot] = hash(tuple(text[: at + 1]))


@dataclass
class LaunchedStep:
    """Of the host, whose books are kept when it is run, or of the device."""

    plan: Plan
    found: Verdict
    machine: AheadMachine
    is_ahead: bool

    def verdict(self, timer: StepTimer) -> Verdict:
        return self.found

    def commit(self, row: PlannedRow, kept: RowVerdict, is_followed: bool) -> None:
        if self.is_ahead:
            target, draft = (SimpleNamespace(cache=SimpleNamespace(tables=tables)) for tables in self.machine.tables)
            DeviceStep.commit(SimpleNamespace(target=target, draft=draft), row, kept, is_followed)  # type: ignore[arg-type]

    def observe(self, rows: SequenceOf[PlannedRow], verdict: Verdict) -> None: ...

    def discard(self) -> None: ...


class _Engine(Engine):
    """Steps that are not ahead are those of the machine."""

    def __init__(self, machine: AheadMachine) -> None:
        target: Any = SimpleNamespace(usage=Usage(), num_lanes=lambda _: 1, loaded=SimpleNamespace(device=torch.device("cpu")))
        ahead: Any = machine
        super().__init__(target, NoDrafter(), machine.scheduler, ahead=ahead)
        self._machine = machine

    def _run(self, plan: Plan) -> LaunchedStep:
        return self._machine.run(plan)


class AheadMachine(test_scheduler.SchedulerMachine):
    """The scheduler's events, with steps in flight between them."""

    def __init__(self) -> None:
        super().__init__()
        self.memories = [Memory(tables) for tables in self.tables]
        self.engine = _Engine(self)
        self.texts: list[list[int]] = []  # of the rows in flight, as the device knows them
        self.fails = False
        self.num_following = 0

    def _step(self, drafter_fails: bool = False) -> None:
        self.fails = drafter_fails
        running = list(self.scheduler.running)
        for sequence in self.engine.step():
            assert sequence in running or sequence in self.scheduler.running or sequence.is_finished
            if sequence.is_finished:
                self.finished.append(self.alive.pop(sequence.id))

    def run(self, plan: Plan) -> LaunchedStep:
        for memory in self.memories:
            memory.copy()
        verdict = verdict_for(plan, self.rng, self.fails)
        for row, kept in zip(plan.rows, verdict, strict=True):
            sequence, accepted, end = row.sequence, kept.accepted, row.start + row.num_new
            self.memories[0].feed(sequence.id, self._drafted(sequence.tokens[:end], accepted, row.max_draft_tokens), row.start)
            self.tables[0].commit(sequence.id, end + len(accepted))
            if row.max_draft_tokens and not self.fails:
                self._draft(sequence, self._drafted(sequence.tokens, accepted, row.max_draft_tokens)[:-1], len(accepted))
        return LaunchedStep(plan, verdict, self, is_ahead=False)

    def _draft(self, sequence: Sequence, text: list[int], num_accepted: int) -> None:
        tables = self.tables[1]
        self.memories[1].feed(sequence.id, text, tables.num_cached(sequence.id))
        tables.commit(sequence.id, min(len(text), len(sequence) + num_accepted))

    def _drafted(self, text: list[int], accepted: list[int], count: int) -> list[int]:
        return [*text, *accepted, *[WRONG] * count][: len(text) + count]

    def launch(self, plan: Plan) -> LaunchedStep | None:
        """What the device does at once, and the host learns of when the step is settled; sometimes it refuses."""
        if self.rng.random() < 0.1:
            return None
        assert len(self.scheduler.running) == 5 or not self.scheduler.waiting, "rows that may enter are kept waiting"
        for memory in self.memories:
            memory.copy()
        texts, found = [], []
        for row in plan.rows:
            count = row.max_draft_tokens
            assert row.longest + count <= test_scheduler.MAX_LEN
            text = list(row.sequence.tokens) if row.pending_row < 0 else list(self.texts[row.pending_row])
            assert row.shortest <= len(text) <= row.longest
            self.num_following += row.pending_row >= 0
            right = self.rng.randint(0, count)
            own = continuation(text, right + 1)
            fed = self._drafted(text, own[:right], count)
            self.memories[0].feed(row.sequence.id, fed, len(text) - 1)
            if count:
                self.memories[1].feed(row.sequence.id, fed[:-1], len(text) - KNOWN)
            if is_stuck := self.rng.random() < 0.03:
                own[right] = -1
            texts.append([*text, *own] if not is_stuck else [*text, *own[:right], WRONG])
            found.append(RowVerdict(count, list(range(right)), own[:right], own[right]))
        self.texts = texts
        return LaunchedStep(plan, found, self, is_ahead=True)

    def _abort(self, sequence: Sequence) -> None:
        self.engine.abort(sequence)
        del self.alive[sequence.id]

    @rule(place=st.integers(0, 20))
    def abort_and_add_again(self, place: int) -> None:
        if self.scheduler.running:
            sequence = self.scheduler.running[place % len(self.scheduler.running)]
            self.engine.abort(sequence)
            self.engine.add(sequence)


AheadMachine.TestCase.settings = settings(max_examples=5_000 if toys.PROVE else 60, **test_scheduler.SIZES)
TestAheadMachine = AheadMachine.TestCase


def test_the_machine_flies() -> None:
    """Most steps of rows that only decode begin where another ends."""
    machine = AheadMachine()
    for length in (3, 9, 1):
        machine.add(length, 20)
    machine.several_steps(30)
    machine.teardown()
    assert machine.num_following > 10


def test_no_text_outgrows_the_context_in_flight() -> None:
    """Rows that fill it to the last place, one after another."""
    machine = AheadMachine()
    for _ in range(6):
        machine.add(40, test_scheduler.MAX_LEN - 40)
        machine.several_steps(30)
    machine.teardown()
    assert machine.num_following > 10


def test_a_step_without_drafts_for_lack_of_blocks_is_the_hosts() -> None:
    """All of a draft was accepted, so that the draft model lacks two tokens, and blocks are lacking. Behind a step ahead it would lack
    three, of which one ahead reads two. When there are blocks again, rows are drafted for again, ahead too.
    """
    tables = [BlockTables(9, 4, 30), BlockTables(9, 4, 30)]
    scheduler = Scheduler(tables, 1, 100, DraftLimits(4, are_shed=True))
    params = SamplingParams(temperature=0, max_tokens=25)
    sequence = Sequence(1, list(range(10)), 10, Sampler(params, 0, 0, 10), frozenset(), 40)
    scheduler.add(sequence)

    def settle(plan: Plan, num_drafted: int) -> None:
        tables[0].commit(1, len(sequence))
        tables[1].commit(1, num_drafted)
        scheduler.settle(plan.rows, [RowVerdict(0, [], [], 10)])

    settle(scheduler.next_step(), 9)
    tables[0].reserve(99, 4 * tables[0].num_free)
    plan = scheduler.next_step((), may_run_ahead=True)
    assert not plan.runs_ahead and [row.max_draft_tokens for row in plan.rows] == [0]
    settle(plan, 9)
    tables[0].release(99)
    plan = scheduler.next_step((), may_run_ahead=True)
    assert not plan.runs_ahead and [row.max_draft_tokens for row in plan.rows] == [4], "the host lets the draft model catch up"
    settle(plan, len(sequence) - 1)
    plan = scheduler.next_step((), may_run_ahead=True)
    assert plan.runs_ahead and [row.max_draft_tokens for row in plan.rows] == [4]
    following = scheduler.next_step([plan], may_run_ahead=True)
    assert following.runs_ahead and [row.max_draft_tokens for row in following.rows] == [4]
