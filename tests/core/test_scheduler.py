"""Scheduler and block tables under any sequence of events, against a model that keeps only token counts. No tensors, no model."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import hypothesis.strategies as st
import pytest
import toys
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from echelon import LLM, RequestError, SamplingParams
from echelon.draft import RowVerdict, Verdict
from echelon.kv.blocks import BlockTables
from echelon.sampling import Sampler
from echelon.scheduler import PROMPT_LOGITS, DraftLimits, Scheduler
from echelon.sequence import Plan, PlannedRow, Sequence

MAX_LEN = 60


def token_after(text: list[int]) -> int:
    """The model: the next token is a function of the text before."""
    return (sum(text[-5:]) * 31 + len(text)) % 50


def continuation(prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(token_after(text))
    return text[len(prompt) :]


def verdict_for(plan: Plan, rng: random.Random, drafter_fails: bool) -> Verdict:
    """Each row drafts a random number within its budget, of which a random prefix is right."""
    verdict = []
    for row in plan.rows:
        size = 0 if drafter_fails else rng.randint(0, row.max_draft_tokens)
        right = rng.randint(0, min(size, row.max_draft_depth))
        true = continuation(row.sequence.tokens, right + 1)
        is_sampled = row.is_sampled
        verdict.append(RowVerdict(size, list(range(right)), true[:right] if is_sampled else [], true[right] if is_sampled else -1))
    return verdict


class SchedulerMachine(RuleBasedStateMachine):
    """Ten kinds of events; the oracle is the text each request must end with."""

    grows_trees = False

    def __init__(self) -> None:
        super().__init__()
        self.tables = [BlockTables(24, 4, 16), BlockTables(24, 4, 16)]
        self.scheduler = Scheduler(
            self.tables, max_num_seqs=5, max_num_batched_tokens=20, drafts=DraftLimits(4, grows_trees=self.grows_trees, are_shed=True)
        )
        self.rng = random.Random(0)
        self.alive: dict[int, Sequence] = {}
        self.finished: list[Sequence] = []
        self.count = 0
        self.hoard: list[int] = []

    def _new(self, length: int, max_tokens: int, parent: Sequence | None = None) -> Sequence:
        self.count += 1
        prompt = list(parent.tokens[: parent.num_prompt_tokens]) if parent else [self.rng.randrange(50) for _ in range(length)]
        params = SamplingParams(max_tokens=max_tokens, temperature=0, num_speculative_tokens=self.rng.choice([None, 0, 2]))
        index = parent.sampler.index + 1 if parent else 0
        sequence = Sequence(self.count, prompt, len(prompt), Sampler(params, 0, index, len(prompt)), frozenset(), MAX_LEN, parent=parent)
        self.alive[sequence.id] = sequence
        self.scheduler.add(sequence)
        return sequence

    @rule(length=st.integers(1, 40), max_tokens=st.integers(1, 20))
    def add(self, length: int, max_tokens: int) -> None:
        self._new(length, max_tokens)

    @rule(max_tokens=st.integers(1, 12))
    def add_one_token_prompt(self, max_tokens: int) -> None:
        self._new(1, max_tokens)

    @rule(length=st.integers(2, 30), n=st.integers(2, 4))
    def add_samples_of_one_prompt(self, length: int, n: int) -> None:
        first = self._new(length, 6)
        for _ in range(n - 1):
            self._new(length, 6, first)

    @rule()
    def add_too_long(self) -> None:
        sequence = Sequence(999_999, [1] * 50, 50, Sampler(SamplingParams(max_tokens=200), 0), frozenset(), 400)
        with pytest.raises(RequestError):
            self.scheduler.add(sequence)

    def _step(self, drafter_fails: bool = False) -> None:
        plan = self.scheduler.next_step()
        self._check(plan)
        self._land(plan, drafter_fails)

    def _check(self, plan: Plan) -> None:
        assert len({r.sequence.id for r in plan.rows}) == len(plan.rows)
        assert sum(r.num_new for r in plan.rows) <= 20
        for tables in self.tables:
            tables.copies.clear()
            for row in plan.rows:
                assert len(tables.blocks(row.sequence.id)) * 4 >= row.start + row.num_new + row.max_draft_tokens

    def _land(self, plan: Plan, drafter_fails: bool) -> None:
        plan = Plan([row for row in plan.rows if plan.awaits(row)])
        verdict = verdict_for(plan, self.rng, drafter_fails)
        for row, kept in zip(plan.rows, verdict, strict=True):
            self.tables[0].commit(row.sequence.id, row.start + row.num_new + len(kept.accepted))
            if row.max_draft_tokens and not drafter_fails:  # the draft model has read what is known
                self.tables[1].commit(row.sequence.id, len(row.sequence))
        for sequence in self.scheduler.settle(plan.rows, verdict):
            self.finished.append(self.alive.pop(sequence.id))

    @rule()
    def step(self) -> None:
        self._step()

    @rule(count=st.integers(2, 8))
    def several_steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @rule()
    def step_without_a_working_drafter(self) -> None:
        self._step(drafter_fails=True)

    @rule(place=st.integers(0, 20))
    def abort_running(self, place: int) -> None:
        if self.scheduler.running:
            self._abort(self.scheduler.running[place % len(self.scheduler.running)])

    @rule(place=st.integers(0, 20))
    def abort_waiting(self, place: int) -> None:
        if self.scheduler.waiting:
            self._abort(self.scheduler.waiting[place % len(self.scheduler.waiting)])

    def _abort(self, sequence: Sequence) -> None:
        self.scheduler.abort(sequence)
        del self.alive[sequence.id]
        assert sequence.id not in self.tables[0]

    @rule(count=st.integers(1, 6))
    def shrink_the_pool(self, count: int) -> None:
        """Somebody else takes blocks, as long as the longest request can still run alone."""
        for _ in range(min(count, self.tables[0].pool.num_free, 8 - len(self.hoard))):
            self.hoard.append(self.tables[0].pool.allocate())

    @rule()
    def give_the_pool_back(self) -> None:
        while self.hoard:
            self.tables[0].pool.release(self.hoard.pop())

    @invariant()
    def books_are_in_order(self) -> None:
        hoard, self.hoard = self.hoard, []
        for block in hoard:
            self.tables[0].pool.release(block)
        self.scheduler.check()
        self.hoard = [self.tables[0].pool.allocate() for _ in hoard]
        ids = [s.id for s in (*self.scheduler.running, *self.scheduler.waiting)]
        assert sorted(ids) == sorted(self.alive)

    @invariant()
    def texts_are_those_of_plain_decoding(self) -> None:
        for sequence in (*self.alive.values(), *self.finished):
            prompt = sequence.tokens[: sequence.num_prompt_tokens]
            assert sequence.output_tokens == continuation(prompt, sequence.num_output_tokens)
        for sequence in self.finished:
            assert sequence.num_output_tokens == min(sequence.params.max_tokens, MAX_LEN - sequence.num_prompt_tokens)

    def teardown(self) -> None:
        self.give_the_pool_back()
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            self._step()
        assert not self.scheduler.has_work, "every request ends"
        self.texts_are_those_of_plain_decoding()
        assert all(t.pool.num_free == t.pool.num_blocks for t in self.tables)


class TreeSchedulerMachine(SchedulerMachine):
    """Drafts that take more places than the row has room for."""

    grows_trees = True


class LaneSchedulerMachine(SchedulerMachine):
    """Up to three steps under way, each of other rows; how many may be changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.in_flight: deque[Plan] = deque()

    def _step(self, drafter_fails: bool = False) -> None:
        num_lanes = self.rng.randint(1, 3)
        plan = self.scheduler.next_step(list(self.in_flight), num_lanes=num_lanes)
        under_way = {number for other in self.in_flight for number in other.pending}
        assert under_way.isdisjoint(row.sequence.id for row in plan.rows)
        assert not (plan.preempted and under_way)
        assert plan.rows or self.in_flight or not self.scheduler.has_work
        if plan.rows:
            self._check(plan)
            self.in_flight.append(plan)
            if len(self.in_flight) < num_lanes:
                return
        if self.in_flight:
            self._land(self.in_flight.popleft(), drafter_fails)

    def _abort(self, sequence: Sequence) -> None:
        super()._abort(sequence)
        for plan in self.in_flight:
            plan.gone.add(sequence.id)
        self.in_flight = deque(plan for plan in self.in_flight if plan.pending)


SIZES = {"deadline": None, "derandomize": True, "stateful_step_count": 100 if toys.PROVE else 40}
SchedulerMachine.TestCase.settings = settings(max_examples=10_000 if toys.PROVE else 60, **SIZES)
TreeSchedulerMachine.TestCase.settings = settings(max_examples=2_000 if toys.PROVE else 30, **SIZES)
TestSchedulerMachine = SchedulerMachine.TestCase
TestTreeSchedulerMachine = TreeSchedulerMachine.TestCase
LaneSchedulerMachine.TestCase.settings = settings(max_examples=2_000 if toys.PROVE else 30, **SIZES)
TestLaneSchedulerMachine = LaneSchedulerMachine.TestCase


def test_a_request_that_fills_the_pool_leaves_no_room_for_a_tree() -> None:
    """48 places: a text of 44 tokens and a tree of 4 fit, a text of 45 would preempt itself for ever."""
    for max_tokens, fits in ((34, True), (35, False)):
        scheduler = Scheduler([BlockTables(12, 4, 30)], 1, 100, DraftLimits(4, grows_trees=True))
        sequence = Sequence(1, list(range(10)), 10, Sampler(SamplingParams(temperature=0, max_tokens=max_tokens), 0), frozenset(), 100)
        if not fits:
            with pytest.raises(RequestError, match="KV pool"):
                scheduler.add(sequence)
            continue
        scheduler.add(sequence)
        while scheduler.has_work:
            plan = scheduler.next_step()
            assert plan.rows[0].max_draft_tokens in (0, 4), "a tree does not shrink with the room left"
            verdict = verdict_for(plan, random.Random(0), drafter_fails=False)
            scheduler.blocks.tables[0].commit(1, plan.rows[0].start + plan.rows[0].num_new + len(verdict[0].accepted))
            scheduler.settle(plan.rows, verdict)
        assert sequence.num_output_tokens == max_tokens


@pytest.mark.parametrize("num_speculative_tokens", range(1, 9))
def test_room_at_the_context_limit_and_at_max_tokens(num_speculative_tokens: int) -> None:
    """Room left 1 … k + 2, by either limit, everything right: never a token too many, never a slot too few. No room: see below."""
    k = num_speculative_tokens
    for room in range(1, k + 3):
        for limited_by in ("context", "max_tokens"):
            prompt = list(range(10))
            max_len = 10 + room if limited_by == "context" else 100
            params = SamplingParams(temperature=0, max_tokens=room if limited_by == "max_tokens" else 100)
            tables = BlockTables(-(-max_len // 4), 4, 30)
            scheduler = Scheduler([tables], 1, 100, DraftLimits(k))
            if limited_by == "max_tokens":
                tables = BlockTables(-(-(10 + room) // 4), 4, 30)
                scheduler = Scheduler([tables], 1, 100, DraftLimits(k))
            sequence = Sequence(1, prompt, 10, Sampler(params, 0, 0, 10), frozenset(), max_len)
            if limited_by == "context":
                tables.pool.check()
            scheduler.add(sequence)
            while scheduler.has_work:
                plan = scheduler.next_step()
                assert len(plan.rows) == 1
                row = plan.rows[0]
                true = continuation(sequence.tokens, row.max_draft_tokens + 1)
                tables.commit(1, row.start + row.num_new + row.max_draft_tokens)
                verdict = [RowVerdict(row.max_draft_tokens, list(range(row.max_draft_tokens)), true[:-1], true[-1])]
                scheduler.settle(plan.rows, verdict)
            assert sequence.output_tokens == continuation(list(range(10)), room)
            assert sequence.finish_reason == "length"
            assert tables.pool.num_free == tables.pool.num_blocks


def test_no_room_is_refused_at_the_door() -> None:
    """Room 0, by either limit: a prompt that fills the context, and a limit of no token."""
    llm = LLM(toys.adopted(toys.llama()))
    with pytest.raises(RequestError, match="shorten it"):
        llm.generate([[1] * llm.max_len])
    with pytest.raises(RequestError, match="max_tokens"):
        SamplingParams(max_tokens=0)


def test_rows_share_the_logits_of_prompts() -> None:
    """Five prompts whose log-probabilities are wanted: in no step more logits of them than one alone may have, and one a row besides."""
    scheduler, params = Scheduler([BlockTables(500, 4, 100)], 5, 2048), SamplingParams(max_tokens=2, prompt_logprobs=0)
    for i in range(5):
        scheduler.add(Sequence(i, list(range(200)), 200, Sampler(params, 0), frozenset(), 300))
    most = 0
    while scheduler.has_work:
        plan = scheduler.next_step()
        most = max(most, sum(row.num_prompt_logits for row in plan.rows))
        for row in plan.rows:
            scheduler.blocks.tables[0].commit(row.sequence.id, row.start + row.num_new)
        verdict = [RowVerdict(0, [], [], 1 if row.is_sampled else -1, [], [{}] * row.num_prompt_logits) for row in plan.rows]
        scheduler.settle(plan.rows, verdict)
    assert PROMPT_LOGITS <= most <= PROMPT_LOGITS + 5


def test_samples_of_one_prompt_leave_its_logprobs_to_the_first() -> None:
    """While seven further samples decode, another prompt has as many logits as one alone; and they may be looked up, and run ahead."""
    scheduler, params = Scheduler([BlockTables(500, 4, 100)], 9, 2048), SamplingParams(max_tokens=20, prompt_logprobs=0)
    scheduler.piece_sizes = toys.WholePrompts()
    first = Sequence(0, list(range(10)), 10, Sampler(params, 0), frozenset(), 300)
    samples = [Sequence(i, list(range(10)), 10, Sampler(params, 0, i), frozenset(), 300, parent=first) for i in range(1, 8)]

    def step() -> list[tuple[int, int]]:
        """New tokens and logits of the prompt, a row each."""
        plan = scheduler.next_step()
        counts = [(row.num_new, row.num_prompt_logits) for row in plan.rows]
        for row in plan.rows:
            scheduler.blocks.tables[0].commit(row.sequence.id, row.start + row.num_new)
        verdict = [RowVerdict(0, [], [], 1 if row.is_sampled else -1, [], [{}] * row.num_prompt_logits) for row in plan.rows]
        scheduler.settle(plan.rows, verdict)
        return counts

    for sequence in (first, *samples):
        scheduler.add(sequence)
    assert step() == [(10, 9)]
    assert step() == [(1, 0)] * 8
    assert not any(sequence.lacks_prompt_logprobs for sequence in (first, *samples))
    scheduler.add(Sequence(9, list(range(200)), 200, Sampler(params, 0), frozenset(), 300))
    assert step() == [(1, 0)] * 8 + [(PROMPT_LOGITS, PROMPT_LOGITS)]


def samples_of(length: int, count: int, number: int = 0) -> list[Sequence]:
    """Samples of a prompt of so many tokens; the first has this number."""
    samples: list[Sequence] = []
    for i in range(count):
        sampler = Sampler(SamplingParams(max_tokens=4, temperature=0), 0, i, length)
        parent = samples[0] if samples else None
        samples.append(Sequence(number + i, [1] * length, length, sampler, frozenset(), 100, parent=parent))
    return samples


def read_on(scheduler: Scheduler) -> list[tuple[int, int]]:
    """A step in which nothing is drafted: number and new tokens of each row."""
    plan = scheduler.next_step()
    for row in plan.rows:
        scheduler.blocks.tables[0].commit(row.sequence.id, row.start + row.num_new)
    verdict = [RowVerdict(0, [], [], 1 if row.is_sampled else -1, [], [{}] * row.num_prompt_logits) for row in plan.rows]
    scheduler.settle(plan.rows, verdict)
    return [(row.sequence.id, row.num_new) for row in plan.rows]


def test_a_prompt_that_is_read_holds_up_no_other_request() -> None:
    """Its further samples wait for it and keep their places in the queue; what stands behind them enters."""
    scheduler = Scheduler([BlockTables(100, 4, 25)], 9, 16, piece_sizes=toys.WholePrompts())
    for sequence in (*samples_of(40, 3), *samples_of(3, 1, number=7)):
        scheduler.add(sequence)
    assert read_on(scheduler) == [(0, 8), (7, 3)]
    assert [sequence.id for sequence in scheduler.waiting] == [1, 2]
    assert [read_on(scheduler) for _ in range(3)] == [[(7, 1), (0, 15)], [(7, 1), (0, 15)], [(7, 1), (0, 2)]]
    assert read_on(scheduler) == [(0, 1), (1, 1), (2, 1)]
    scheduler.check()


def test_samples_that_wait_for_their_prompt_are_not_overtaken() -> None:
    """Places are theirs: whoever came later takes what is left besides."""
    scheduler = Scheduler([BlockTables(100, 4, 25)], 4, 64, piece_sizes=toys.WholePrompts())
    for sequence in (*samples_of(8, 3), *samples_of(3, 1, number=7), *samples_of(3, 1, number=8)):
        scheduler.add(sequence)
    assert read_on(scheduler) == [(0, 8), (7, 3)]
    assert read_on(scheduler) == [(0, 1), (7, 1), (1, 1), (2, 1)], "from the blocks of the first"
    scheduler.check()


def test_a_lane_looks_at_no_more_waiting_rows_than_may_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, seen = Scheduler([BlockTables(100, 4, 25)], 4, 64), list[int]()
    for sequence in (s for i in range(50) for s in samples_of(3, 1, number=i)):
        scheduler.add(sequence)
    waits = scheduler._waits_for_prompt
    monkeypatch.setattr(scheduler, "_waits_for_prompt", lambda sequence: seen.append(sequence.id) or waits(sequence))
    assert len(scheduler.next_step(num_lanes=2).rows) == 2
    assert len(seen) < 12


def test_a_prompt_is_not_read_in_halves_for_rows_that_lack_blocks() -> None:
    """There are places, and no blocks for the one that waits; one for whom there are some takes its half."""
    for length, expected in ((60, 16), (3, 8)):
        scheduler = Scheduler([BlockTables(20, 4, 20)], 9, 16, piece_sizes=toys.WholePrompts())
        for sequence in (*samples_of(40, 1), *samples_of(length, 1, number=7)):
            scheduler.add(sequence)
        assert read_on(scheduler)[0] == (0, expected)


def test_a_prompt_is_not_read_in_halves_for_rows_behind_its_own_samples() -> None:
    """Places are theirs; one more place, and the row behind them may enter."""
    for num_places, expected in ((3, 16), (4, 8)):
        scheduler = Scheduler([BlockTables(100, 4, 25)], num_places, 16, piece_sizes=toys.WholePrompts())
        for sequence in (*samples_of(40, 3), *samples_of(30, 1, number=7)):
            scheduler.add(sequence)
        assert read_on(scheduler)[0] == (0, expected)


def test_a_prompt_is_not_read_in_halves_for_samples_of_another_that_is_read() -> None:
    """They wait for their own."""
    scheduler = Scheduler([BlockTables(100, 4, 25)], 9, 16, piece_sizes=toys.WholePrompts())
    for sequence in (*samples_of(40, 1, number=7), *samples_of(40, 2)):
        scheduler.add(sequence)
    assert [read_on(scheduler) for _ in range(2)] == [[(7, 8), (0, 8)], [(7, 16)]]


def test_an_interrupt_while_rows_are_settled_leaves_none_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has its last token, and the second's watcher is interrupted."""
    scheduler = Scheduler([BlockTables(100, 4, 25)], 4, 64, piece_sizes=toys.WholePrompts())
    for number in (0, 1):
        sampler = Sampler(SamplingParams(max_tokens=1 + number, temperature=0), 0, 0, 3)
        scheduler.add(Sequence(number, [1] * 3, 3, sampler, frozenset(), 100))
    settle_row = scheduler._settle_row

    def interrupted(row: PlannedRow, kept: RowVerdict) -> None:
        settle_row(row, kept)
        if row.sequence.id == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(scheduler, "_settle_row", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read_on(scheduler)
    assert [sequence.id for sequence in scheduler.running] == [1]
    assert 0 not in scheduler.blocks.tables[0]
    scheduler.check()


def test_samples_that_wait_for_their_prompt_are_kept_where_another_row_fails_to_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler([BlockTables(100, 4, 25)], 9, 16, piece_sizes=toys.WholePrompts())
    for sequence in (*samples_of(40, 3), *samples_of(3, 1, number=7)):
        scheduler.add(sequence)
    plan_row = scheduler._plan_row

    def failing(sequence: Sequence, *others: Any) -> PlannedRow:
        if sequence.id == 7:
            raise RuntimeError("no luck")
        return plan_row(sequence, *others)

    monkeypatch.setattr(scheduler, "_plan_row", failing)
    with pytest.raises(RuntimeError, match="no luck"):
        scheduler.next_step()
    assert [sequence.id for sequence in scheduler.waiting] == [7, 1, 2]


def test_a_prompt_leaves_no_tokens_of_a_step_to_samples_that_wait_for_it() -> None:
    scheduler = Scheduler([BlockTables(100, 4, 25)], 9, 16, piece_sizes=toys.WholePrompts())
    for sequence in samples_of(40, 3):
        scheduler.add(sequence)
    assert [read_on(scheduler) for _ in range(4)] == [[(0, 16)], [(0, 16)], [(0, 8)], [(0, 1), (1, 1), (2, 1)]]


def test_a_row_that_is_planned_twice_pays_once_for_its_logits() -> None:
    """Where blocks are lacking drafts go, and the row that lacked them is planned again: all 36 tokens that are left, not 64 less 35."""
    tables = BlockTables(40, 4, 30)
    scheduler = Scheduler([tables], 2, 200, DraftLimits(8, are_shed=True), piece_sizes=toys.WholePrompts())
    decoding, reading = SamplingParams(max_tokens=20, temperature=0), SamplingParams(max_tokens=20, temperature=0, prompt_logprobs=0)
    scheduler.add(Sequence(0, [1] * 4, 4, Sampler(decoding, 0), frozenset(), 120))
    scheduler.add(Sequence(1, [1] * 100, 100, Sampler(reading, 0), frozenset(), 120))
    assert read_on(scheduler) == [(0, 4), (1, PROMPT_LOGITS)]
    while tables.num_free > 12:  # enough for both rows, and not for the drafts of both
        tables.pool.allocate()
    rows = scheduler.next_step().rows
    assert [(row.num_new, row.max_draft_tokens) for row in rows] == [(1, 0), (36, 0)]


def test_a_pool_that_is_smaller_than_a_tree_holds_no_text() -> None:
    assert Scheduler([BlockTables(2, 4, 30)], 1, 100, DraftLimits(16, grows_trees=True)).capacity == 0
