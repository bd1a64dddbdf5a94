"""Which rows run in a step, with how many new tokens and how large a draft. Sees no tensors.

A row with n new tokens is the only shape: a prompt, a piece of one, and a decoding row differ in n alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import islice

from echelon.draft import RowVerdict, Verdict
from echelon.errors import RequestError
from echelon.kv.tables import KVTables
from echelon.prefix_cache import PrefixCache
from echelon.row_blocks import RowBlocks
from echelon.sequence import Plan, PlannedRow, Sequence
from echelon.step_costs import PieceSizes, StepCosts

LONGEST_PATH = 64  # drafted tokens, whatever drafts
PROMPT_LOGITS = 64  # prompt tokens a step, of all rows whose prompt logprobs are wanted: bounds the logits held at once


# (running rows, how many tokens of a row are cached) → those that take part in a step, at least one
Selector = Callable[[SequenceOf[Sequence], Callable[[Sequence], int]], list[Sequence]]


@dataclass(frozen=True)
class DraftLimits:
    """How much may be drafted for a row in a step.

    num_tokens    most tokens; 0: nothing drafts
    longest_path  most of them on one path
    grows_trees   drafts may be trees: then the room left does not bound their number of tokens, only their depth
    longest_text  the draft model's context: a text is drafted for up to there
    are_shed      where blocks are lacking, rows go without drafts before any is preempted (no text depends on what is drafted)
    """

    num_tokens: int = 0
    longest_path: int = LONGEST_PATH
    grows_trees: bool = False
    longest_text: int | None = None
    are_shed: bool = False


NO_DRAFTS = DraftLimits()


class Scheduler:
    """Rows waiting and running. `tables` are the KV books of the target and of a draft model; slots are reserved in all of them.

    drafts            how much may be drafted for them
    context_switches  lengths past which a text has other keys and values from its first token on (LongRoPE of Phi-3): no step straddles
                      one, and a row that has passed one is computed anew
    selector          chooses which of the running rows take part in a step; then at most `max_num_seqs` run, and none is preempted: a
                      line of a rectangle holds a whole row
    refill            without it, waiting rows enter only when all that run are done
    piece_sizes       how prompts are read in pieces beside rows that decode; by default from what steps have cost so far
    prefix_cache      what is kept of texts in the tables, for others that begin alike
    """

    def __init__(
        self,
        tables: SequenceOf[KVTables],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        drafts: DraftLimits = NO_DRAFTS,
        *,
        context_switches: SequenceOf[int] = (),
        selector: Selector | None = None,
        refill: bool = True,
        piece_sizes: PieceSizes | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.blocks = RowBlocks(tables, prefix_cache)
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._drafts = drafts
        self._context_switches = context_switches
        self._selector = selector
        self._refill = refill
        self.piece_sizes = piece_sizes or StepCosts()
        self._is_open = True  # may rows enter?
        self._is_watched = False  # must the host see the next step's logits?
        self._may_draft = True  # may rows, in this step?
        self._is_short = False  # does nothing draft in this step, for lack of blocks?
        self._num_logits_left = 0  # prompt tokens of this step that may still have logits
        self._under_way: Set[int] = frozenset()  # sequences, by id, of other steps, which this one leaves out
        self._most_rows = max_num_seqs  # of this step
        self._is_blocked = False  # does this step lack blocks while others are under way? Then these are settled,
        self._runs_together = False  # and all rows run in one

    @property
    def has_work(self) -> bool:
        """Is any request waiting or running?"""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a request. Refused is only what could not run even alone in the whole pool."""
        self.check_size(len(sequence) + sequence.num_tokens_left)
        self.waiting.append(sequence)

    @property
    def capacity(self) -> int:
        """Tokens of the longest text that the whole pool holds."""
        return max(0, self.blocks.capacity - (self._drafts.num_tokens if self._drafts.grows_trees else 0))

    def check_size(self, num_tokens: int, instead: str = "lower max_tokens") -> None:
        """Raise `RequestError` for a text that the whole pool could not hold; `instead` of a larger one."""
        if num_tokens > self.capacity:
            raise RequestError(
                f"the request may grow to {num_tokens} tokens, but the KV pool holds {self.capacity}; "
                f"raise kv_cache_memory_bytes or {instead}"
            )

    def abort(self, sequence: Sequence) -> None:
        """Take a request out, wherever it is."""
        for rows in (self.running, self.waiting):
            if sequence in rows:
                rows.remove(sequence)
        self.blocks.release(sequence)

    def next_step(self, in_flight: SequenceOf[Plan] = (), may_run_ahead: bool = False, num_lanes: int = 1, may_draft: bool = True) -> Plan:
        """Reserve slots for every row of the next step; where blocks are lacking, the youngest row gives its own back and waits.

        Decoding rows come first, so that a long prompt fed in pieces never holds them up; nor does it those that may enter (`_share`).

        `may_run_ahead`: the device may carry out a step alone. It can where no row may enter and every row is known to emit what follows
        from its logits and noise; while a step is `in_flight`, slots are reserved for the most that it may add.

        `num_lanes`: so many steps may be under way, each of other rows, of which this one takes its share.

        `may_draft`: rows have room for drafts. Without, it is a plain step, and none is reserved.

        While steps are in flight, a plan without rows says that the first of them has to be settled before there can be another.
        """
        self._is_open, self._is_short, self._num_logits_left = self._is_open or not self.running, False, PROMPT_LOGITS
        self._under_way, self._most_rows, self._is_blocked = frozenset(), self._max_num_seqs, False
        self._may_draft = may_draft
        if self._selector is not None:
            return self._selected_step(self._selector)
        return self._step_of_lane(in_flight, num_lanes) if num_lanes > 1 else self._step_of_all(in_flight, may_run_ahead)

    def _step_of_all(self, in_flight: SequenceOf[Plan], may_run_ahead: bool) -> Plan:
        """A step of all rows; behind one in flight only where the device may carry out both."""
        plan, pending = Plan([]), {row: place for other in in_flight for row, place in other.pending.items()}
        plan.runs_ahead = may_run_ahead and self._can_run_ahead()
        if pending and not (plan.runs_ahead and pending.keys() >= {s.id for s in self.running}):
            return Plan([])
        budget = self._plan_running(plan, pending)
        # behind a step without drafts the draft model would lack more of a text than a step ahead reads
        plan.runs_ahead = plan.runs_ahead and bool(plan.rows) and not plan.preempted and not self._is_short
        if pending and not plan.runs_ahead:
            return Plan([])
        if plan.runs_ahead:
            plan.rows.sort(key=lambda row: -row.max_draft_tokens)
            return plan
        self._is_watched = False
        self._admit(plan, budget)
        return plan

    def _step_of_lane(self, in_flight: SequenceOf[Plan], num_lanes: int) -> Plan:
        """A step of rows that are not under way: their share, so that lanes become alike. Where blocks lack, what is under way is settled
        first, and then preempting is decided among all rows.
        """
        if len(in_flight) >= num_lanes or (self._runs_together and in_flight):
            return Plan([])
        self._under_way = frozenset(row for plan in in_flight for row in plan.pending)
        if not self._runs_together:
            num_rows = min(len(self.running) + self._num_entering(), self._max_num_seqs)
            num_free, num_open = num_rows - len(self._under_way), num_lanes - len(in_flight)
            self._most_rows = min(-(-num_free // num_open), -(-num_rows // num_lanes))
        plan, self._runs_together = Plan([]), False
        self._admit(plan, self._plan_running(plan, {}))
        self._runs_together = self._is_blocked
        return Plan([]) if self._is_blocked else plan

    def _num_entering(self) -> int:
        """Waiting rows that seem to have blocks, as many as there are places: all of them, or none where the first has not."""
        able = list(self._entering(self.waiting, self._max_num_seqs - len(self.running))) if self._is_open else []
        return len(able) if able and self.blocks.fit((able[0], len(able[0]))) else 0

    def _entering(self, sequences: Iterable[Sequence], num_places: int) -> Iterator[Sequence]:
        """Those that have one of so many places, and wait for no prompt; places of samples that do are theirs."""
        return (s for s in islice(sequences, num_places) if not self._waits_for_prompt(s))

    def _plan_running(self, plan: Plan, pending: Mapping[int, tuple[int, PlannedRow]]) -> int:
        """Plan all running rows, decoding ones first; returns what is left of the step's tokens. Behind a step in flight nothing is
        preempted: where a row lacks something, the plan does not run ahead.
        """
        budget = self._max_num_batched_tokens
        for is_reading in (False, True):
            sequences = [s for s in self.running if s.id not in self._under_way and self._is_reading(s) is is_reading]
            budget = self._left_for_prompts(plan, budget) if is_reading and (sequences or self.waiting) else budget
            for sequence in sequences:
                if len(plan.rows) >= self._most_rows or self._is_blocked:
                    return budget
                budget -= self._plan_sequence(plan, sequence, budget, pending)
                if pending and not plan.runs_ahead:
                    return budget
        return budget

    def _plan_sequence(self, plan: Plan, sequence: Sequence, budget: int, pending: Mapping[int, tuple[int, PlannedRow]]) -> int:
        """Plan a running row, and preempt others where blocks are lacking; returns how many tokens it reads."""
        if sequence.id in pending and sequence.num_tokens_left == 1:
            return 0  # it ends with the step in flight
        while sequence in self.running and budget > 0:
            num_places = self._max_num_seqs - len(self.running)
            share = self._share(budget, sequence, self.waiting, num_places) if self._is_reading(sequence) else budget
            row = self._plan_row(sequence, share, pending.get(sequence.id))
            plan.runs_ahead = plan.runs_ahead and self._is_ready(row)
            if pending and not plan.runs_ahead:
                return 0
            if self.blocks.reserve(row):
                self._let_in(plan, row)
                return row.num_new
            if pending:
                plan.runs_ahead = False
                return 0
            if self._shed_drafts(plan):
                continue
            if self._under_way:
                self._is_blocked = True
                return 0
            victim = self._preempt()
            plan.preempted.append(victim)
            plan.rows = [r for r in plan.rows if r.sequence is not victim]
        return 0

    def _shed_drafts(self, plan: Plan) -> bool:
        """Give back what is reserved for drafts, of all rows of this step; false where that is not done, or has been."""
        if self._is_short or not self._drafts.are_shed:
            return False
        self._is_short = True
        plan.rows = [self.blocks.without_draft(row) for row in plan.rows]
        return True

    def _left_for_prompts(self, plan: Plan, budget: int) -> int:
        """Of the tokens that a step has left, those that prompts may take: where rows decode in it, they cost a few steps at most."""
        num_decoding = sum(row.num_new == 1 for row in plan.rows)
        num_decoding += sum(s.id in self._under_way and not self._is_reading(s) for s in self.running)
        return self.piece_sizes.largest_piece(budget, num_decoding) if num_decoding else budget

    def _is_reading(self, sequence: Sequence) -> bool:
        """Whether more of its text than the last token is to be fed."""
        return len(sequence) - self.blocks.num_cached(sequence) > 1

    def _can_run_ahead(self) -> bool:
        """No row may enter, and the tokens of each follow from its logits and noise alone."""
        return not (self._is_watched or self._may_enter()) and not any(
            s.sampler.changes_logits or s.params.logprobs is not None or s.lacks_prompt_logprobs for s in self.running
        )

    def _is_ready(self, row: PlannedRow) -> bool:
        """Its text is read but for the last token (for two, in a draft model), and contexts hold the longest that it may become."""
        end, lacking = row.longest + row.max_draft_tokens, self.blocks.num_lacking(row.sequence)[: 2 if row.max_draft_tokens else 1]
        is_read = row.pending_row >= 0 or all(count <= 1 + i for i, count in enumerate(lacking))
        longest = self._drafts.longest_text
        is_in_draft = not row.max_draft_tokens or longest is None or end <= longest
        return is_read and is_in_draft and end <= row.sequence.max_len

    def _selected_step(self, selector: Selector) -> Plan:
        """The rows that the selector chooses; a rectangle of them holds at most `max_num_batched_tokens` tokens before drafts."""
        while self._may_enter() and self.blocks.fit((self.waiting[0], 1)):
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            self._count_cached(sequence, 0, is_looked_up=False)
            self.blocks.reserve_line(sequence)
        self._is_open = self._refill
        chosen = selector(self.running, self.blocks.num_cached)
        limit = max(1, self._max_num_batched_tokens // len(chosen))
        plan = Plan([])
        for sequence in chosen:
            row = self._plan_row(sequence, limit)
            has_line = self.blocks.reserve(row)
            assert has_line, f"row {row.sequence.id} runs without a line"
            self._let_in(plan, row)
        return plan

    def _may_enter(self) -> bool:
        return self._is_open and bool(self.waiting) and len(self.running) < self._max_num_seqs

    def _share(self, budget: int, sequence: Sequence, others: Iterable[Sequence], num_places: int) -> int:
        """Of the tokens that a step has left, those that one prompt may take: half, while others wait and could enter beside it."""
        entering = self._entering(others, num_places) if self._is_open else ()
        first = next((s for s in entering if s.parent is not sequence), None)
        may_enter = first is not None and self.blocks.fit((sequence, len(sequence)), (first, len(first)))
        return max(1, budget // 2) if may_enter else budget

    def _admit(self, plan: Plan, budget: int) -> None:
        """Waiting rows enter, in order, while a place, blocks for their whole text and token budget are left; none where blocks lack.
        Further samples whose prompt is still being read keep their turn, and hold nobody up for whom there is a place besides.
        """
        if plan.preempted or self._is_short or self._is_blocked:
            return
        held: list[Sequence] = []
        try:
            budget = self._let_in_all(plan, budget, held)
        except BaseException:
            self.waiting.extend(held)  # behind the one that could not enter, so that whoever looks for a culprit finds it first
            raise
        is_full = self._may_enter() and len(plan.rows) >= self._most_rows
        self.waiting.extendleft(reversed(held))
        if budget > 0 and not held and not is_full:  # what still waits has no place or no blocks
            self._is_open = self._refill

    def _let_in_all(self, plan: Plan, budget: int, held: list[Sequence]) -> int:
        """Let waiting rows in while there is room, and take those that wait on out of the queue, to `held`; what is left of `budget`."""
        while self._may_enter() and budget > 0 and len(plan.rows) < self._most_rows:
            num_places = self._max_num_seqs - len(self.running) - len(held)
            if num_places <= 0:
                break
            sequence = self.waiting[0]
            if self._waits_for_prompt(sequence):
                held.append(self.waiting.popleft())
                continue
            if (parent := self._first_sample(sequence)) is not None:
                self.blocks.fork(parent, sequence)
            others = islice(self.waiting, 1, None)
            row = self._entering_row(sequence, self._share(budget, sequence, others, num_places - 1))
            if row is None:
                break
            self.running.append(self.waiting.popleft())
            self._let_in(plan, row)
            budget -= row.num_new
        return budget

    def _waits_for_prompt(self, sequence: Sequence) -> bool:
        """Whether it is a further sample of a prompt that the first one is still reading."""
        parent = self._first_sample(sequence)
        return parent is not None and self.blocks.num_cached(parent) < sequence.num_prompt_tokens - 1

    def _first_sample(self, sequence: Sequence) -> Sequence | None:
        """The row whose blocks a further sample of its prompt begins with."""
        parent = sequence.parent
        if parent is None or parent not in self.running or sequence.num_output_tokens or sequence in self.blocks:
            return None
        return None if self._has_passed(len(sequence), len(parent)) else parent

    def _entering_row(self, sequence: Sequence, budget: int) -> PlannedRow | None:
        """The first row of a sequence, all reserved: with what is kept of its text, or, where the copy of a block that others may find is
        one too many, without. None where blocks lack; then it holds nothing, neither what it shares with another sample. One whose prompt
        logprobs are wanted is computed from its first token on.
        """
        is_looked_up = self.blocks.prefix_cache is not None and sequence not in self.blocks and not sequence.lacks_prompt_logprobs
        for adopts in (True, False) if is_looked_up else (False,):
            if adopts:
                self.blocks.adopt(sequence)
            row = self._plan_row(sequence, budget)
            if self.blocks.fit((sequence, len(sequence) + self._draft_limits(sequence)[0])) and self.blocks.reserve(row):
                self._count_cached(sequence, row.start, is_looked_up)
                return row
            self.blocks.refuse(sequence)
        return None

    def _count_cached(self, sequence: Sequence, num_cached: int, is_looked_up: bool) -> None:
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_cached
            if is_looked_up:
                self.blocks.count_hits(sequence, num_cached)

    def _draft_limits(self, sequence: Sequence, num_pending: int = 0) -> tuple[int, int]:
        """Most tokens of a draft, and most on one path of it: the extra token takes one of the tokens left, a path may take the others.

        Of those left a step in flight takes at least `num_pending`.
        """
        asked = sequence.params.num_speculative_tokens if self._may_draft and not self._is_short else 0
        drafts = self._drafts
        limit = drafts.num_tokens if asked is None else min(asked, drafts.num_tokens)
        rooms = [switch - len(sequence) for switch in self._context_switches if switch >= len(sequence)]
        if drafts.longest_text is not None:
            rooms.append(drafts.longest_text - len(sequence) + 1)  # the last drafted token is not fed to the draft model
        depth = max(0, min(limit, drafts.longest_path, sequence.num_tokens_left - num_pending - 1, *rooms))
        return limit if drafts.grows_trees and depth else depth, depth

    def _plan_row(self, sequence: Sequence, budget: int, pending: tuple[int, PlannedRow] | None = None) -> PlannedRow:
        """The next row of a sequence, which may be `pending`: its index and row in the step in flight."""
        start = self.blocks.num_cached(sequence)
        if pending is not None:
            index, row = pending
            limits = self._draft_limits(sequence, num_pending=1)
            return PlannedRow(sequence, start, len(sequence) - start, *limits, False, (1, row.max_draft_tokens + 1), index)
        wants_logprobs = sequence.lacks_prompt_logprobs
        num_new = min(len(sequence) - start, budget)
        if wants_logprobs:
            num_new = min(num_new, max(1, self._num_logits_left))
        reaches_end = start + num_new == len(sequence)
        return PlannedRow(sequence, start, num_new, *(self._draft_limits(sequence) if reaches_end else (0, 0)), wants_logprobs)

    def _let_in(self, plan: Plan, row: PlannedRow) -> None:
        """Let a row take part, with logits of its prompt where these are wanted."""
        plan.rows.append(row)
        self._num_logits_left -= row.num_prompt_logits

    def _has_passed(self, before: int, after: int) -> bool:
        return any(before <= switch < after for switch in self._context_switches)

    def _preempt(self) -> Sequence:
        """The youngest running row gives its blocks back and goes to the head of the queue; its text is computed again later."""
        sequence = self.running.pop()
        self.blocks.release(sequence)
        self.waiting.appendleft(sequence)
        return sequence

    def settle(
        self, rows: SequenceOf[PlannedRow], verdict: Verdict, conclude: Callable[[SequenceOf[Sequence]], None] | None = None
    ) -> list[Sequence]:
        """Append what survived, one token at a time, until a row stops or fails; finished rows leave at once and are returned. Where keys
        and values are kept for texts that begin alike, `conclude` is called with those rows before: the drafter may read the rest of them.
        """
        try:
            for row, kept in zip(rows, verdict, strict=True):
                self._settle_row(row, kept)
            if self.blocks.prefix_cache is not None:
                sound = [row.sequence for row in rows if row.sequence.error is None]
                if conclude is not None and any(row.sequence.is_finished for row in rows):
                    conclude([s for s in sound if s.is_finished])
                self.blocks.publish(sound)
        finally:  # an interrupt may come while a text is watched, or while the drafter reads
            finished = [row.sequence for row in rows if row.sequence.is_finished]
            for sequence in finished:
                self.running.remove(sequence)
                self.blocks.release(sequence)
        if finished:  # without refill, nobody takes their places
            self._is_open = self._refill
        return finished

    def _settle_row(self, row: PlannedRow, kept: RowVerdict) -> None:
        """Give a row what its step has brought; keys and values of a text that now has others are computed anew."""
        before, is_sampled = len(row.sequence), row.is_sampled
        row.sequence.settle(kept, is_sampled)
        if self._has_passed(before, len(row.sequence)):
            self.blocks.recompute(row.sequence)
        self._is_watched |= is_sampled and kept.next_token < 0 and kept.error is None  # the host shall see why there is none

    def check(self) -> None:
        """Assert that the books of rows and blocks agree."""
        self.blocks.check(self.running)
        assert len(self.running) <= self._max_num_seqs
        for sequence in self.running:
            sequence.check()
