"""Lines and slots of a rectangular cache, and the rows that hold them. Host side only: no tensors.

One table says everything about such a cache: `positions[line, slot]` is the position, in the row's own text, of the token whose key and
value lie there, or −1 where the slot is dead. Attention masks follow from it (a query sees the slots of its line whose position is not
−1 and not beyond its own), whatever the strategy did to get there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echelon.draft import Int32, Int64


@dataclass(frozen=True)
class Move:
    """Slot `first + j` of line `targets[m]` takes what slot `slots[m, j]` of line `sources[m]` holds; all read before any is written.

    sources, targets int64[M], slots int64[M, W]
    """

    sources: Int64
    targets: Int64
    slots: Int64
    first: int


class LineTables:
    """The rows of one rectangular cache of `num_lines` lines of `num_slots` slots; the last `num_tail` of them are for drafts only.

    A row's cached tokens stand in its line in order of position, not necessarily without gaps.
    """

    def __init__(self, num_lines: int, num_slots: int, num_tail: int) -> None:
        self.num_blocks, self.num_slots, self.max_tokens_per_row, self.capacity = num_lines, num_slots, num_slots, num_slots - num_tail
        self.positions: Int32 = np.full((num_lines, num_slots), -1, np.int32)
        self.moves: list[Move] = []  # what the storage still has to carry out, in order
        self.num_moved_lines = 0
        self.ends: Int64 = np.zeros(num_lines, np.int64)  # one past each line's last slot that is not dead; 0 where all are
        self._cached = np.zeros(num_lines, np.int64)
        self._lines: dict[int, int] = {}  # row → line

    def __contains__(self, row: int) -> bool:
        return row in self._lines

    @property
    def num_free(self) -> int:
        return len(self.positions) - len(self._lines)

    @property
    def row_ids(self) -> list[int]:
        return list(self._lines)

    def num_cached(self, row: int) -> int:
        """Tokens of the row that have keys and values; 0 for a row never seen."""
        return int(self._cached[self._lines[row]]) if row in self._lines else 0

    def lines(self, rows: list[int]) -> Int64:
        """Line of each row, int64 [len(rows)]."""
        return np.fromiter((self._lines[row] for row in rows), np.int64, len(rows))

    def num_missing(self, row: int, num_tokens: int) -> int:
        """Free lines that `reserve(row, num_tokens)` would take."""
        assert num_tokens <= self.num_slots, f"row {row} asks for {num_tokens} tokens, more than a line can hold"
        return 0 if row in self._lines else 1

    def reserve(self, row: int, num_tokens: int) -> bool:
        """Give the row a line, the lowest free one; false, and nothing changed, if none is left."""
        if self.num_missing(row, num_tokens) > self.num_free:
            return False
        if row not in self._lines:
            self._lines[row] = self._lowest_free()
        return True

    def _lowest_free(self) -> int:
        used = set(self._lines.values())
        return next(line for line in range(len(self.positions)) if line not in used)

    def write(self, lines: Int64, slots: Int64, positions: Int64) -> None:
        """Enter tokens at these lines, slots and positions, int64 [T] each; they count as cached once committed."""
        self.positions[lines, slots] = positions
        np.maximum.at(self.ends, lines, slots + 1)

    def advance(self, row: int, num_cached: int) -> None:
        """Count the first `num_cached` tokens of the row as cached."""
        self._cached[self._lines[row]] = num_cached

    def commit(self, row: int, num_cached: int, num_held: int = 0) -> None:  # noqa: ARG002
        """Count the first `num_cached` tokens of the row as cached; the slots of those after them are dead."""
        line = self._lines[row]
        self._cached[line] = num_cached
        positions = self.positions[line, : self.ends[line]]
        positions[positions >= num_cached] = -1
        held = np.flatnonzero(positions >= 0)
        self.ends[line] = held[-1] + 1 if len(held) else 0

    def fork(self, row: int, child: int) -> None:
        raise NotImplementedError(f"row {child} cannot start with the keys and values of row {row}: lines share nothing")

    def release(self, row: int) -> None:
        """Forget a row; a row never seen is fine."""
        line = self._lines.pop(row, None)
        if line is not None:
            self._clear(line)

    def _clear(self, line: int) -> None:
        self._cached[line] = self.ends[line] = 0
        self.positions[line] = -1

    def compact(self) -> None:
        """Move the highest lines into the holes that finished rows left, so that a batch is a slice of the storage and not a copy."""
        for row, line in sorted(self._lines.items(), key=lambda item: -item[1]):
            hole = self._lowest_free() if len(self._lines) < len(self.positions) else line
            if hole > line:
                return
            if hole == line:
                continue
            held = np.flatnonzero(self.positions[line] >= 0)
            if len(held):
                self._push(Move(np.array([line]), np.array([hole]), np.arange(held[0], held[-1] + 1)[None], int(held[0])))
            for table in (self.positions, self._cached, self.ends):
                table[hole] = table[line]
            self._clear(line)
            self._lines[row] = hole

    def align(self, num_known: Int64) -> None:
        """Shift every line so that its cached tokens and the `num_known` [num_lines] that follow end at one slot for all: EQSPEC's realign.

        Lines that end together already stay where they are, whatever lies to their left (Corollary B.3 of the paper).
        """
        used = np.array(sorted(self._lines.values()))
        cached = self._cached[used]
        holding = cached > 0
        if not holding.any():
            return
        totals = cached + num_known[used]
        ends = self.ends[used]
        is_held = self.positions[used, : ends.max()] >= 0
        is_dense = ends - is_held.argmax(1) == cached
        reached = (ends + num_known[used])[holding]
        if is_dense[holding].all() and (reached == reached[0]).all() and totals.max() <= reached[0] <= self.capacity:
            return
        starts = totals.max() - totals  # the slot of position 0
        moved = holding & ~(is_dense & (starts == ends - cached))
        lines = used[moved]
        row, slot = np.nonzero(is_held[moved])
        positions = self.positions[lines][row, slot]
        goals = starts[moved][row] + positions
        slots = np.broadcast_to(np.arange(totals.max()), (len(lines), totals.max())).copy()
        slots[row, goals] = slot
        first = int(starts[moved].min())
        self._push(Move(lines, lines, slots[:, first:], first))
        self.positions[lines] = -1
        self.positions[lines[row], goals] = positions
        self.ends[lines] = (starts + cached)[moved]

    def _push(self, move: Move) -> None:
        self.moves.append(move)
        self.num_moved_lines += len(move.targets)

    def check(self) -> None:
        lines = list(self._lines.values())
        assert len(set(lines)) == len(lines), "two rows share a line"
        for row, line in self._lines.items():
            positions = self.positions[line]
            held = positions[positions >= 0]
            expected = np.arange(self._cached[line])
            assert np.array_equal(held, expected), f"row {row}: positions of its slots are not 0 … {self._cached[line] - 1} in order"
            assert self._cached[line] <= self.capacity
            assert self.ends[line] == (np.flatnonzero(positions >= 0)[-1] + 1 if len(held) else 0)
        free = np.setdiff1d(np.arange(len(self.positions)), lines)
        assert (self.positions[free] == -1).all() and not self._cached[free].any() and not self.ends[free].any(), (
            "a line without a row holds tokens"
        )
