"""Blocks of KV memory and the rows that hold them. Host side only: no tensors, so that scheduling is testable in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.errors import OutOfBlocksError


class BlockPool:
    """Block ids 0 … num_blocks − 1 with reference counts; a block is free when its count is 0."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def allocate(self) -> int:
        """Take a free block, or raise `OutOfBlocksError`."""
        if not self._free:
            raise OutOfBlocksError(f"all {self.num_blocks} KV blocks are in use; raise kv_cache_memory_bytes or lower max_num_seqs")
        block = self._free.pop()
        self._counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Count one holder more."""
        assert self._counts[block] > 0, f"block {block} is free"
        self._counts[block] += 1

    def is_shared(self, block: int) -> bool:
        """Whether a block is referenced more than once."""
        return self._counts[block] > 1

    def release(self, block: int) -> None:
        """Count one holder less; without any the block is free."""
        assert self._counts[block] > 0, f"block {block} is free already"
        self._counts[block] -= 1
        if self._counts[block] == 0:
            self._free.append(block)

    def counts(self) -> list[int]:
        """References of every block."""
        return list(self._counts)

    def check(self) -> None:
        """Assert that free and referenced blocks are what they should be."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert free == {b for b, n in enumerate(self._counts) if n == 0}, "free list and reference counts differ"
        assert all(n >= 0 for n in self._counts)


@dataclass
class RowTable:
    """A row's line in the table, its number of blocks, and how many of its tokens have keys and values."""

    line: int
    num_blocks: int = 0
    num_cached: int = 0


class BlockTables:
    """The rows of one cache: row id → blocks, in one rectangle of int32 so that a batch's tables are one gather.

    Writing into a shared block is preceded by a copy (`reserve` reports it in `copies`): rows forked from one prompt share its
    blocks until they differ.
    """

    def __init__(self, num_blocks: int, block_size: int, max_blocks_per_row: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_tokens_per_row, self.capacity = max_blocks_per_row * block_size, num_blocks * block_size
        self.pool = BlockPool(num_blocks)
        self.copies: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []  # (from, to) slots that the storage has yet to copy, in order
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
        return max(needed - table.num_blocks, 0) + sum(self.pool.is_shared(b) for b in held)

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
        table.num_blocks = max(table.num_blocks, needed)
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
        if self.pool.is_shared(block):
            fresh = self.pool.allocate()
            offsets = np.arange(self.block_size)
            self.copies.append((block * self.block_size + offsets, fresh * self.block_size + offsets))
            self.pool.release(block)
            self._table[table.line, index] = fresh

    def advance(self, row: int, num_cached: int) -> None:
        """Count the first `num_cached` tokens of the row as cached; its reservation stays."""
        table = self._rows[row]
        assert table.num_cached <= num_cached <= table.num_blocks * self.block_size
        table.num_cached = num_cached

    def commit(self, row: int, num_cached: int) -> None:
        """Count the first `num_cached` tokens of the row as cached; blocks beyond them are given back."""
        table = self._rows[row]
        assert 0 <= num_cached <= table.num_blocks * self.block_size
        table.num_cached = num_cached
        keep = -(-num_cached // self.block_size)
        for block in self._table[table.line, keep : table.num_blocks].tolist():
            self.pool.release(block)
        table.num_blocks = keep

    def move(self, row: int, sources: SequenceOf[int], first: int) -> None:
        """Copy the keys and values at the row's positions `sources` to those from `first` on: the accepted path of a tree closes up."""
        line = self._table[self._rows[row].line]
        positions = np.array([sources, range(first, first + len(sources))], np.int64)
        slots = line[positions // self.block_size].astype(np.int64) * self.block_size + positions % self.block_size
        self.copies.append((slots[0], slots[1]))

    def fork(self, row: int, child: int) -> None:
        """Start `child` with the cached tokens of `row`, sharing every block."""
        parent, table = self._rows[row], self._new_row(child)
        table.num_blocks, table.num_cached = parent.num_blocks, parent.num_cached
        self._table[table.line] = self._table[parent.line]
        for block in self.blocks(child):
            self.pool.share(block)

    def release(self, row: int) -> None:
        """Forget a row and give its blocks back; a row never seen is fine."""
        table = self._rows.pop(row, None)
        if table is None:
            return
        for block in self._table[table.line, : table.num_blocks].tolist():
            self.pool.release(block)
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
