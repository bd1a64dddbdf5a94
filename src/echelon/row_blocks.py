"""Blocks of keys and values that rows hold, in the caches of the target and of what drafts, and what is kept of their texts. Sees no
tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from echelon.kv.tables import KVTables
from echelon.prefix_cache import PrefixCache
from echelon.sequence import PlannedRow, Sequence


class RowBlocks:
    """The books of all caches: a row has slots in every one of them, or in none.

    tables        of each cache, the target's first
    prefix_cache  what is kept of texts in them, for others that begin alike
    """

    def __init__(self, tables: SequenceOf[KVTables], prefix_cache: PrefixCache | None = None) -> None:
        self.tables, self.prefix_cache = tables, prefix_cache

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds of one row."""
        return min(tables.capacity for tables in self.tables)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self.tables[0]

    def num_cached(self, sequence: Sequence) -> int:
        """Tokens of a text that have keys and values in the target's cache."""
        return self.tables[0].num_cached(sequence.id)

    def num_lacking(self, sequence: Sequence) -> list[int]:
        """Tokens that have none, by cache."""
        return [len(sequence) - tables.num_cached(sequence.id) for tables in self.tables]

    def fit(self, *rows: tuple[Sequence, int]) -> bool:
        """Whether there are blocks for all of these rows, so many tokens each."""
        return all(
            sum(tables.num_missing(s.id, min(count, tables.max_tokens_per_row)) for s, count in rows) <= tables.num_free
            for tables in self.tables
        )

    def reserve(self, row: PlannedRow) -> bool:
        """Slots for all that a step may add to a row; false where blocks are lacking: then it has none more."""
        number, end = row.sequence.id, row.longest + row.max_draft_tokens
        wanted = [(tables, min(end, tables.max_tokens_per_row)) for tables in self.tables]
        missing = [tables.num_missing(number, num_tokens) for tables, num_tokens in wanted]
        if any(count > tables.num_free for (tables, _), count in zip(wanted, missing, strict=True)):
            return False
        return all(tables.reserve(number, num_tokens) for (tables, num_tokens), count in zip(wanted, missing, strict=True) if count)

    def reserve_line(self, sequence: Sequence) -> None:
        """Of a rectangle a line, which holds a whole row."""
        for tables in self.tables:
            tables.reserve(sequence.id, 1)

    def without_draft(self, row: PlannedRow) -> PlannedRow:
        """The row without a draft; what was reserved for one goes back."""
        plain = row.drafting(0, 0)
        for tables in self.tables:
            tables.commit(row.sequence.id, tables.num_cached(row.sequence.id))
        has_room = self.reserve(plain)
        assert has_room, f"row {row.sequence.id} lacks what it had"
        return plain

    def fork(self, parent: Sequence, sequence: Sequence) -> None:
        """Let a further sample of a prompt start from the blocks of the first; its last token is fed again, for its logits."""
        for tables in self.tables:
            if parent.id in tables:
                tables.fork(parent.id, sequence.id)
                tables.commit(sequence.id, min(sequence.num_prompt_tokens - 1, tables.num_cached(sequence.id)))

    def adopt(self, sequence: Sequence) -> None:
        """Let a text start behind what is kept of it."""
        if self.prefix_cache is not None:
            self.prefix_cache.adopt(sequence)

    def count_hits(self, sequence: Sequence, num_cached: int) -> None:
        """Note that a text was looked up, and how many tokens were found."""
        if self.prefix_cache is not None:
            self.prefix_cache.count(len(sequence), num_cached)

    def refuse(self, sequence: Sequence) -> None:
        """A row that cannot enter holds nothing, neither what it shares with another sample; what is kept of its text it publishes anew."""
        for tables in self.tables:
            tables.release(sequence.id)
        if self.prefix_cache is not None:
            self.prefix_cache.begins_anew(sequence)

    def recompute(self, sequence: Sequence) -> None:
        """Have all of a row's keys and values computed once more."""
        for tables in self.tables:
            tables.commit(sequence.id, 0)

    def publish(self, sequences: Iterable[Sequence]) -> None:
        """Let others find what settled steps have written."""
        if self.prefix_cache is not None:
            for sequence in sequences:
                self.prefix_cache.publish(sequence)

    def release(self, sequence: Sequence) -> None:
        """Give back all that a row has; harmless where it has nothing."""
        for tables in self.tables:
            tables.release(sequence.id)
        if self.prefix_cache is not None:
            self.prefix_cache.forget(sequence)

    def check(self, running: Iterable[Sequence]) -> None:
        """Assert that books and blocks agree, and that nobody else holds any."""
        numbers = {sequence.id for sequence in running}
        for tables in self.tables:
            tables.check()
            assert set(tables.row_ids) <= numbers, "a row that does not run holds blocks"
