"""Prefix caching against a storage that remembers what was written to every slot: a row finds its own text there, whatever came before."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
import toys
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from test_scheduler import MAX_LEN, continuation

from echelon.draft import RowVerdict, Verdict
from echelon.kv.blocks import NO_TOKEN, BlockContent, BlockPool, BlockTables
from echelon.prefix_cache import CachedTables, PrefixCache
from echelon.sampling import Sampler, SamplingParams
from echelon.scheduler import DraftLimits, Scheduler
from echelon.sequence import PlannedRow, Sequence

BLOCK = 4
Slots = dict[int, tuple[int, ...]]


def root(sequence: Sequence) -> bytes:
    return b"root" + sequence.salt


def sequence(number: int, tokens: list[int], max_tokens: int = 1, **more: Any) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return Sequence(number, list(tokens), len(tokens), Sampler(params, 0, 0, len(tokens)), frozenset(), MAX_LEN, **more)


class PrefixMachine(RuleBasedStateMachine):
    """Target, draft model and head; what a slot holds is the text that it was computed from. A head's states know one token more."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [BlockTables(28, BLOCK, 16) for _ in range(3)]
        self.cache = PrefixCache([CachedTables(self.tables[0]), CachedTables(self.tables[1]), CachedTables(self.tables[2], True)], root)
        self.scheduler = Scheduler(
            self.tables, max_num_seqs=4, max_num_batched_tokens=24, drafts=DraftLimits(3, are_shed=True), prefix_cache=self.cache
        )
        self.memory: list[Slots] = [{}, {}, {}]
        self.rng, self.count = random.Random(0), 0
        self.texts: list[list[int]] = [[i] * 3 for i in range(3)]  # what prompts begin with
        self.salts: dict[int, bytes] = {}

    def _add(self, tokens: list[int], max_tokens: int, parent: Sequence | None = None, salt: bytes = b"") -> Sequence:
        self.count += 1
        added = sequence(self.count, tokens[: MAX_LEN - 1], max_tokens, parent=parent, salt=salt)
        added.eos_token_ids = frozenset({self.count % 50, (self.count * 7) % 50})  # a text may end among tokens that were accepted
        self.scheduler.add(added)
        return added

    @rule(which=st.integers(0, 99), cut=st.integers(0, 30), more=st.integers(0, 9), max_tokens=st.integers(1, 14), salted=st.booleans())
    def add(self, which: int, cut: int, more: int, max_tokens: int, salted: bool) -> None:
        """A text that begins like one of those before."""
        old = self.texts[which % len(self.texts)]
        tokens = old[: max(1, len(old) - cut)] + [self.rng.randrange(3) for _ in range(more)]
        self._add(tokens, max_tokens, salt=b"other" if salted else b"")

    @rule(which=st.integers(0, 99), n=st.integers(2, 3))
    def add_samples(self, which: int, n: int) -> None:
        tokens = self.texts[which % len(self.texts)]
        first = self._add(tokens, 5)
        for _ in range(n - 1):
            self._add(tokens, 5, first)

    @rule(count=st.integers(1, 6), fails=st.booleans())
    def steps(self, count: int, fails: bool) -> None:
        for _ in range(count):
            self._step(fails)

    @rule(place=st.integers(0, 9))
    def abort(self, place: int) -> None:
        rows = [*self.scheduler.running, *self.scheduler.waiting]
        if rows:
            self.scheduler.abort(rows[place % len(rows)])

    @rule(place=st.integers(0, 9))
    def start_the_head_anew(self, place: int) -> None:
        """What a drafter that failed does."""
        if self.scheduler.running and (row := self.scheduler.running[place % len(self.scheduler.running)].id) in self.tables[2]:
            self.tables[2].commit(row, 0)

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    def _step(self, fails: bool = False) -> None:
        plan = self.scheduler.next_step()
        for memory, tables in zip(self.memory, self.tables, strict=True):
            for sources, targets in tables.copies:
                for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                    memory[target] = memory.get(source, ())
            tables.copies.clear()
        verdict = [self._run(row, fails) for row in plan.rows]
        finished = self.scheduler.settle(plan.rows, verdict)
        self.texts += [s.tokens for s in finished]

    def _run(self, row: PlannedRow, fails: bool) -> RowVerdict:
        number, tokens = row.sequence.id, row.sequence.tokens
        right = self.rng.randint(0, min(row.max_draft_tokens, row.max_draft_depth)) if not fails else 0
        true = continuation(tokens, right + 1) if row.is_sampled else []
        kept = RowVerdict(right, list(range(right)), true[:right], true[right] if row.is_sampled else -1)
        text = tokens[: row.start + row.num_new] + true[:right]
        self._write(0, number, text, row.start, len(text))
        self.tables[0].commit(number, len(text))
        if row.max_draft_tokens and not fails:
            self._write(1, number, tokens, self.tables[1].num_cached(number), len(tokens))
            self.tables[1].commit(number, len(tokens))
        has_read = self.tables[2].num_cached(number)
        if has_read in (row.start, row.start - 1):  # the features of places before are gone
            known = tokens + true
            end = min(len(text), len(known) - 1)
            self._write(2, number, known, has_read, end, 1)
            self.tables[2].commit(number, end)
        return kept

    def _slots(self, which: int, row: int) -> list[int]:
        return [block * BLOCK + i for block in self.tables[which].blocks(row) for i in range(BLOCK)]

    def _write(self, which: int, row: int, text: list[int], start: int, end: int, ahead: int = 0) -> None:
        slots = self._slots(which, row)
        counts, published = self.tables[which].pool.counts(), self.tables[which].pool.published
        for place in range(start, end):
            assert counts[slots[place] // BLOCK] == 1, "a shared block is written"
            assert slots[place] // BLOCK not in published, "a block that others may find is written"
            self.memory[which][slots[place]] = tuple(text[: place + 1 + ahead])

    @invariant()
    def rows_find_their_own_text(self) -> None:
        self.scheduler.check()
        for row in self.scheduler.running:
            for which, ahead in ((0, 0), (1, 0), (2, 1)):
                if row.id not in self.tables[which]:
                    continue
                slots, pending = self._slots(which, row.id), self.tables[which].copies
                moved = dict(pair for s, t in pending for pair in zip(t.tolist(), s.tolist(), strict=True))
                for place in range(min(self.tables[which].num_cached(row.id), len(row) - ahead)):
                    slot = moved.get(slots[place], slots[place])
                    assert self.memory[which][slot] == tuple(row.tokens[: place + 1 + ahead]), (which, row.id, place)

    @invariant()
    def stale_slots_are_lost(self) -> None:
        for memory, tables in zip(self.memory, self.tables, strict=True):
            kept = set(tables.pool.published) | {b for b, count in enumerate(tables.pool.counts()) if count}
            for slot in [s for s in memory if s // BLOCK not in kept]:
                del memory[slot]

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            self._step()
        assert not self.scheduler.has_work, "every request ends"
        assert all(t.pool.num_free == t.pool.num_blocks for t in self.tables)
        self.cache.clear()
        assert all(t.pool.num_unused == 0 for t in self.tables)
        assert not self.cache._texts, "a text is remembered after its row"


PrefixMachine.TestCase.settings = settings(
    max_examples=10_000 if toys.PROVE else 80, deadline=None, derandomize=True, stateful_step_count=60 if toys.PROVE else 40
)
TestPrefixMachine = PrefixMachine.TestCase


class Shelf:
    """One cache of the target's, filled by hand."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.tables = BlockTables(num_blocks, BLOCK, num_blocks)
        self.cache = PrefixCache([CachedTables(self.tables)], root)
        self.count = 0

    def run(self, tokens: list[int], salt: bytes = b"") -> int:
        """Read a text, let it go, and say how much of it was there."""
        self.count += 1
        row = sequence(self.count, tokens, salt=salt)
        hits = self.cache.adopt(row)
        assert self.tables.reserve(row.id, len(tokens))
        self.tables.commit(row.id, len(tokens))
        self.cache.publish(row)
        self.tables.release(row.id)
        self.cache.forget(row)
        self.tables.check()
        return hits


def test_a_text_is_found_in_whole_blocks_and_one_token_is_left() -> None:
    shelf, text = Shelf(), list(range(10, 26))
    assert [shelf.run(text) for _ in range(2)] == [0, 12]
    assert shelf.run([*text, 1]) == 16
    assert shelf.run([*text[:9], 1, 1, 1, 1]) == 8
    assert shelf.run(text[:4]) == 0
    assert shelf.run([1, *text]) == 0


def test_another_salt_finds_nothing() -> None:
    shelf, text = Shelf(), list(range(9))
    assert [shelf.run(text, b"a"), shelf.run(text, b"b"), shelf.run(text), shelf.run(text, b"a")] == [0, 0, 0, 8]


def test_the_end_of_the_longest_unused_text_goes_first() -> None:
    shelf = Shelf(num_blocks=4)
    old, new = list(range(8)), list(range(50, 58))
    shelf.run([*old, 0])  # its third block is not whole, and free
    shelf.run(new[:5])
    assert shelf.tables.pool.num_unused == 3
    shelf.run(list(range(90, 97)))  # one block without content is left, and one is taken from the old text's end
    assert shelf.run([*old, 0]) == 4


def test_live_rows_are_never_refused_for_what_is_kept() -> None:
    shelf = Shelf(num_blocks=6)
    shelf.run(list(range(24)))
    assert shelf.tables.pool.num_unused == 6 == shelf.tables.num_free
    assert shelf.tables.reserve(99, 24)
    assert shelf.tables.pool.num_unused == 0


def test_it_can_be_told_to_forget() -> None:
    shelf = Shelf()
    shelf.run(list(range(16)))
    assert shelf.cache.num_unused == 4
    shelf.cache.clear()
    assert (shelf.cache.num_unused, shelf.run(list(range(16)))) == (0, 0)


def test_tokens_are_compared_where_keys_are_equal() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.publish(block, BlockContent(b"key", b"tokens", NO_TOKEN))
    assert pool.find(BlockContent(b"key", b"tokens", NO_TOKEN)) == (block, True)
    assert pool.find(BlockContent(b"key", b"others", NO_TOKEN)) is None


def test_a_head_starts_one_state_earlier_where_another_token_follows() -> None:
    target, head = BlockTables(12, BLOCK, 6), BlockTables(12, BLOCK, 6)
    cache = PrefixCache([CachedTables(target), CachedTables(head, reads_next=True)], root)
    for number, text in enumerate(([1] * 8 + [2, 2], [1] * 8 + [3, 3], [1] * 8 + [2, 3], [1] * 4 + [2])):
        row = sequence(number, text)
        hits = cache.adopt(row)
        found = (hits, target.num_cached(number), head.num_cached(number))
        assert found == [(0, 0, 0), (8, 8, 7), (8, 8, 8), (4, 4, 3)][number]
        for tables, end in ((target, len(text)), (head, len(text) - 1)):
            assert tables.reserve(number, len(text))
            tables.commit(number, end)
        cache.publish(row)
        for tables in (target, head):
            tables.release(number)
            tables.check()
        cache.forget(row)
    assert len(head.pool.published) == 4, "each block for both of the tokens that have followed it"


@pytest.mark.parametrize("spoilt", [False, True])
def test_what_a_failed_row_wrote_is_not_found(spoilt: bool) -> None:
    tables = BlockTables(8, BLOCK, 8)
    cache = PrefixCache([CachedTables(tables)], root)
    scheduler = Scheduler([tables], 2, 64, prefix_cache=cache)
    scheduler.add(sequence(1, list(range(9)), 2))
    plan = scheduler.next_step()
    tables.commit(1, 9)
    kept: Verdict = [RowVerdict(0, [], [], -1 if spoilt else 5, error=ValueError("spoilt") if spoilt else None)]
    scheduler.settle(plan.rows, kept)
    scheduler.add(sequence(2, list(range(9)), 2))
    starts = [row.start for row in scheduler.next_step().rows if row.sequence.id == 2]
    assert starts == [0 if spoilt else 8]


def test_a_row_resumes_behind_a_block_of_one_token_too() -> None:
    tables = BlockTables(4, 1, 4)
    assert tables.reserve(1, 2)
    tables.commit(1, 2)
    tables.adopt(2, tables.blocks(1), 1)
    assert tables.resumes(2)
    tables.adopt(3, tables.blocks(1), 2)
    assert not tables.resumes(3)


def test_a_text_that_fills_the_pool_enters_whatever_is_kept() -> None:
    """A head's last block would have to be copied, and there is no block for the copy: the text is read from its first token on, and found
    by the next.
    """
    target, head = BlockTables(4, BLOCK, 4), BlockTables(4, BLOCK, 4)
    cache = PrefixCache([CachedTables(target), CachedTables(head, reads_next=True)], root)
    scheduler = Scheduler([target, head], 1, 64, prefix_cache=cache)
    for number, text in enumerate(([1] * 8 + [2], [1] * 8 + [3] * 7, [1] * 8 + [3] * 7)):
        row = sequence(number, text)
        scheduler.add(row)
        plan = scheduler.next_step()
        assert [(r.sequence.id, r.start) for r in plan.rows] == [(number, (0, 0, 12)[number])]
        target.commit(number, len(text))
        head.commit(number, len(text) - 1)
        scheduler.settle(plan.rows, [RowVerdict(0, [], [], 5)])
        scheduler.check()
    assert not scheduler.has_work
    assert cache.num_hits == 12


def test_an_interrupt_while_the_drafter_concludes_leaves_nothing_behind() -> None:
    shelf = Shelf()
    scheduler = Scheduler([shelf.tables], 2, 64, prefix_cache=shelf.cache)
    scheduler.add(sequence(1, list(range(9))))
    plan = scheduler.next_step()
    shelf.tables.commit(1, 9)

    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scheduler.settle(plan.rows, [RowVerdict(0, [], [], 5)], interrupted)
    assert not scheduler.has_work
    assert shelf.tables.num_free == shelf.tables.num_blocks


def test_only_what_is_looked_up_is_counted() -> None:
    shelf = Shelf()
    scheduler = Scheduler([shelf.tables], 4, 64, prefix_cache=shelf.cache)
    first = sequence(1, list(range(9)), 3)
    for row in (first, sequence(2, list(range(9)), 3, parent=first)):
        scheduler.add(row)
    for _ in range(2):
        plan = scheduler.next_step()
        for row in plan.rows:
            shelf.tables.commit(row.sequence.id, row.start + row.num_new)
        scheduler.settle(plan.rows, [RowVerdict(0, [], [], 5) for _ in plan.rows])
    assert (shelf.cache.num_queries, shelf.cache.num_hits) == (9, 0)
    assert [row.num_cached_tokens for row in scheduler.running] == [0, 8], "the second shares the first one's prompt"
