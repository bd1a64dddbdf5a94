"""The interface of a cache's host-side tables: which rows hold which blocks. Sees no tensors."""

from __future__ import annotations

from typing import Protocol


class KVTables(Protocol):
    """The rows of one cache. A row is reserved for, written, and then committed; a row never seen has nothing cached. Blocks are of equal
    size; a strategy may take a block to be a whole row.

    capacity            tokens of the longest text that one row alone could have
    max_tokens_per_row  tokens that one row can have reserved
    """

    num_blocks: int
    capacity: int
    max_tokens_per_row: int

    @property
    def num_free(self) -> int:
        """Number of free blocks."""

    @property
    def row_ids(self) -> list[int]:
        """Ids of the rows that hold something."""

    def __contains__(self, row: int) -> bool: ...

    def num_cached(self, row: int) -> int:
        """Tokens of the row that have keys and values."""

    def num_missing(self, row: int, num_tokens: int) -> int:
        """Free blocks that `reserve(row, num_tokens)` would take."""

    def reserve(self, row: int, num_tokens: int) -> bool:
        """Make positions `num_cached … num_tokens − 1` of a row writable; false, and nothing changed, if blocks are lacking."""

    def advance(self, row: int, num_cached: int) -> None:
        """Count the first `num_cached` tokens of the row as cached; its reservation stays."""

    def commit(self, row: int, num_cached: int, num_held: int = 0) -> None:
        """Count the first `num_cached` tokens of the row as cached, and give back what is reserved beyond them, and beyond the first
        `num_held` tokens, which are to be read later.
        """

    def fork(self, row: int, child: int) -> None:
        """Start `child` with the cached tokens of `row`."""

    def release(self, row: int) -> None:
        """Forget a row; a row never seen is fine."""

    def check(self) -> None:
        """Assert every invariant."""
