"""Blocks of KV memory and the rows that hold them. Host side only: no tensors, so that scheduling is testable in milliseconds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.errors import OutOfBlocksError


@dataclass(frozen=True)
class BlockContent:
    """What a whole block holds, for other rows to find: the chained key of its text up to its end, its own tokens, and the token that
    follows them where the last state depends on it (heads that draft; elsewhere NO_TOKEN).
    """

    key: bytes
    tokens: bytes
    next_token: int


NO_TOKEN = -1
SlotCopy = tuple[NDArray[np.int64], NDArray[np.int64]]


class BlockPool:
    """Block ids 0 … num_blocks − 1 with reference counts; a block is free when its count is 0.

    A block may have its content published: it is found by that, also once it is free, until it is allocated for something else. Blocks
    without content are allocated first, then those that have been free for longest. What is published never changes: such a block is
    copied before it is written.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._unused: OrderedDict[int, None] = OrderedDict()  # free blocks with content, free for longest first
        self._contents: dict[int, BlockContent] = {}
        self._published: dict[bytes, dict[int, int]] = {}  # key → next token → block

    @property
    def num_free(self) -> int:
        """Number of free blocks, those with content among them."""
        return len(self._free) + len(self._unused)

    @property
    def num_unused(self) -> int:
        """Number of free blocks with content."""
        return len(self._unused)

    @property
    def published(self) -> list[int]:
        """Blocks with content, free or not."""
        return list(self._contents)

    def allocate(self) -> int:
        """Take a free block, or raise `OutOfBlocksError`."""
        if not self.num_free:
            raise OutOfBlocksError(f"all {self.num_blocks} KV blocks are in use; raise kv_cache_memory_bytes or lower max_num_seqs")
        if not self._free:
            self._drop_unused(1)
        block = self._free.pop()
        self._counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Count one holder more, of a block that is held or has content."""
        assert self._counts[block] > 0 or block in self._unused, f"block {block} is free"
        self._unused.pop(block, None)
        self._counts[block] += 1

    def is_writable(self, block: int) -> bool:
        """Whether one holder has it, and nobody else could find it."""
        return self._counts[block] == 1 and block not in self._contents

    def release(self, block: int) -> None:
        """Count one holder less; without any the block is free."""
        assert self._counts[block] > 0, f"block {block} is free already"
        self._counts[block] -= 1
        if self._counts[block] == 0 and block in self._contents:
            self._unused[block] = None
        elif self._counts[block] == 0:
            self._free.append(block)

    def publish(self, block: int, content: BlockContent) -> None:
        """Let a held block be found by its content; nothing changes where that has been published already."""
        assert self._counts[block] > 0, f"block {block} is free"
        blocks = self._published.setdefault(content.key, {})
        if block not in self._contents and content.next_token not in blocks:
            self._contents[block], blocks[content.next_token] = content, block

    def find(self, content: BlockContent) -> tuple[int, bool] | None:
        """A block that holds these tokens after the same text, and whether the same token follows them, preferably."""
        blocks = self._published.get(content.key)
        if not blocks:
            return None
        is_same = content.next_token in blocks
        block = blocks[content.next_token] if is_same else next(iter(blocks.values()))
        return (block, is_same) if self._contents[block].tokens == content.tokens else None

    def _drop_unused(self, count: int) -> None:
        """Forget the content of `count` free blocks, those free for longest first."""
        for _ in range(count):
            block, _ = self._unused.popitem(last=False)
            self._withdraw(block)
            self._free.append(block)

    def drop_all(self) -> None:
        """Forget all content; blocks stay with those who hold them."""
        self._drop_unused(len(self._unused))
        for block in self.published:
            self._withdraw(block)

    def _withdraw(self, block: int) -> None:
        content = self._contents.pop(block)
        blocks = self._published[content.key]
        del blocks[content.next_token]
        if not blocks:
            del self._published[content.key]

    def counts(self) -> list[int]:
        """References of every block."""
        return list(self._counts)

    def check(self) -> None:
        """Assert that free, referenced and published blocks are what they should be."""
        free = [*self._free, *self._unused]
        assert len(set(free)) == len(free), "a block is twice in the free lists"
        assert set(free) == {b for b, n in enumerate(self._counts) if n == 0}, "free lists and reference counts differ"
        assert all(n >= 0 for n in self._counts)
        assert set(self._unused) <= set(self._contents), "a block without content is kept for its content"
        assert not set(self._free) & set(self._contents), "a block with content is with those that have none"
        found = {block: (key, token) for key, blocks in self._published.items() for token, block in blocks.items()}
        assert found == {b: (c.key, c.next_token) for b, c in self._contents.items()}, "contents and what is found by them differ"


@dataclass
class RowTable:
    """A row's line in the table, its number of blocks, and how many of its tokens have keys and values. `resumes_at`: so many has the row
    started with, in the middle of a block of others'; −1 once that is past.
    """

    line: int
    num_blocks: int = 0
    num_cached: int = 0
    resumes_at: int = -1


class BlockTables:
    """The rows of one cache: row id → blocks, in one rectangle of int32 so that a batch's tables are one gather.

    Writing into a block that others hold, or could find, is preceded by a copy (`reserve` reports it in `copies`): rows forked from one
    prompt share its blocks until they differ.
    """

    def __init__(self, num_blocks: int, block_size: int, max_blocks_per_row: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_tokens_per_row, self.capacity = max_blocks_per_row * block_size, num_blocks * block_size
        self.pool = BlockPool(num_blocks)
        self.copies: list[SlotCopy] = []  # (from, to) slots that the storage has yet to copy, in order
        self._rows: dict[int, RowTable] = {}
        self._table: NDArray[np.int32] = np.zeros((8, max_blocks_per_row), np.int32)
        self._free_lines = list(range(7, -1, -1))

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def row_ids(self) -> list[int]:
        return list(self._rows)

    def num_cached(self, row: int) -> int:
        """Tokens of the row that have keys and values; 0 for a row never seen."""
        table = self._rows.get(row)
        return table.num_cached if table else 0

    def blocks(self, row: int) -> list[int]:
        """Blocks of the row, in order of position."""
        table = self._rows[row]
        blocks: list[int] = self._table[table.line, : table.num_blocks].tolist()
        return blocks

    def gather(self, rows: list[int]) -> NDArray[np.int32]:
        """int32 [len(rows), most blocks of any of them]; entries past a row's own blocks are arbitrary."""
        tables = [self._rows[r] for r in rows]
        width = max((t.num_blocks for t in tables), default=0)
        return np.ascontiguousarray(self._table[[t.line for t in tables], :width])

    def num_missing(self, row: int, num_tokens: int) -> int:
        """Free blocks that `reserve(row, num_tokens)` would take."""
        needed = -(-num_tokens // self.block_size)
        table = self._rows.get(row)
        if table is None:
            return needed
        first = min(table.num_cached // self.block_size, table.num_blocks)
        held = self._table[table.line, first : min(needed, table.num_blocks)].tolist()
        return max(needed - table.num_blocks, 0) + sum(not self.pool.is_writable(b) for b in held)

    def reserve(self, row: int, num_tokens: int) -> bool:
        """Make positions `num_cached … num_tokens − 1` of a row writable; false, and nothing changed, if blocks are lacking."""
        if self.num_missing(row, num_tokens) > self.pool.num_free:
            return False
        table = self._rows.get(row) or self._new_row(row)
        needed = -(-num_tokens // self.block_size)
        assert needed <= self._table.shape[1], f"row {row} asks for {num_tokens} tokens, more than a row can hold"
        for index in range(table.num_cached // self.block_size, min(needed, table.num_blocks)):
            self._unshare(table, index)
        for index in range(table.num_blocks, needed):
            self._table[table.line, index] = self.pool.allocate()
            table.num_blocks = index + 1  # at once: an interrupt loses no block
        return True

    def _new_row(self, row: int) -> RowTable:
        if not self._free_lines:
            height = len(self._table)
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._free_lines = list(range(2 * height - 1, height - 1, -1))
        table = self._rows[row] = RowTable(self._free_lines.pop())
        return table

    def _unshare(self, table: RowTable, index: int) -> None:
        block = int(self._table[table.line, index])
        if not self.pool.is_writable(block):
            fresh = self.pool.allocate()
            offsets = np.arange(self.block_size)
            self.copies.append((block * self.block_size + offsets, fresh * self.block_size + offsets))
            self._table[table.line, index] = fresh
            self.pool.release(block)  # not before: who is interrupted gives back what the table holds

    def advance(self, row: int, num_cached: int) -> None:
        """Count the first `num_cached` tokens of the row as cached; its reservation stays."""
        table = self._rows[row]
        assert table.num_cached <= num_cached <= table.num_blocks * self.block_size
        self._count(table, num_cached)

    def commit(self, row: int, num_cached: int, num_held: int = 0) -> None:
        """Count the first `num_cached` tokens of the row as cached; blocks beyond them, and beyond the first `num_held` tokens, which are
        to be read later, are given back.
        """
        table = self._rows[row]
        assert 0 <= num_cached <= table.num_blocks * self.block_size
        self._count(table, num_cached)
        keep = min(-(-max(num_cached, num_held) // self.block_size), table.num_blocks)
        self._shorten(table, keep)

    def _shorten(self, table: RowTable, keep: int) -> None:
        """Give back all blocks but the first `keep`."""
        while table.num_blocks > keep:
            table.num_blocks -= 1  # before its block goes: who is interrupted gives none back twice
            self.pool.release(int(self._table[table.line, table.num_blocks]))

    def _count(self, table: RowTable, num_cached: int) -> None:
        table.num_cached = num_cached
        if num_cached != table.resumes_at:
            table.resumes_at = -1

    def move(self, row: int, sources: SequenceOf[int], first: int) -> None:
        """Copy the keys and values at the row's positions `sources` to those from `first` on: the accepted path of a tree closes up."""
        line = self._table[self._rows[row].line]
        positions = np.array([sources, range(first, first + len(sources))], np.int64)
        slots = line[positions // self.block_size].astype(np.int64) * self.block_size + positions % self.block_size
        self.copies.append((slots[0], slots[1]))

    def fork(self, row: int, child: int) -> None:
        """Start `child` with the cached tokens of `row`, sharing every block."""
        parent, table = self._rows[row], self._new_row(child)
        self._table[table.line] = self._table[parent.line]
        self._share(table, parent.num_blocks)
        table.num_cached, table.resumes_at = parent.num_cached, parent.resumes_at

    def publish(self, row: int, index: int, content: BlockContent) -> None:
        """Let other rows find the row's block `index`, all of whose tokens are cached."""
        table = self._rows[row]
        assert (index + 1) * self.block_size <= table.num_cached, f"block {index} of row {row} is not whole"
        self.pool.publish(int(self._table[table.line, index]), content)

    def adopt(self, row: int, blocks: SequenceOf[int], num_cached: int) -> None:
        """Start a row with blocks that hold its first `num_cached` tokens."""
        table = self._new_row(row)
        self._table[table.line, : len(blocks)] = blocks
        self._share(table, len(blocks))
        table.num_cached, table.resumes_at = num_cached, num_cached if num_cached < len(blocks) * self.block_size else -1

    def _share(self, table: RowTable, count: int) -> None:
        """Hold the first `count` blocks of its line with those that hold them already."""
        for block in self._table[table.line, :count].tolist():
            self.pool.share(block)
            table.num_blocks += 1  # at once: who is interrupted gives back what was shared

    def resumes(self, row: int) -> bool:
        """Whether the row has not gone on yet since it was started in the middle of a block."""
        return self._rows[row].resumes_at >= 0

    def release(self, row: int) -> None:
        """Forget a row and give its blocks back; a row never seen is fine."""
        table = self._rows.get(row)
        if table is None:
            return
        self._shorten(table, 0)  # a text's end goes before its beginning
        del self._rows[row]
        self._free_lines.append(table.line)

    def check(self) -> None:
        self.pool.check()
        held = [0] * self.pool.num_blocks
        for row, table in self._rows.items():
            blocks = self.blocks(row)
            assert len(set(blocks)) == len(blocks), f"row {row} holds a block twice"
            assert table.num_cached <= len(blocks) * self.block_size, f"row {row} has cached tokens without blocks"
            for block in blocks:
                held[block] += 1
        assert held == self.pool.counts(), "reference counts and block tables differ"
        lines = [t.line for t in self._rows.values()] + self._free_lines
        assert sorted(lines) == list(range(len(self._table))), "a table line is lost or used twice"
