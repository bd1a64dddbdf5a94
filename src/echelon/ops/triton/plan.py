"""Which program of the attention kernel reads which keys for which new tokens: planned on the host once a step, shared by all layers.

Keys are read in tiles of KEY_TILE positions, and softmax runs online over the tiles of a split of SPLIT positions; both lie at multiples
from position 0. The states of splits are merged in order of position. So one program may walk all splits, or many may take one each:
the result is the same bits, and a row with few new tokens over many keys keeps the whole device busy.

In a tree, keys up to `tail`, the last multiple of KEY_TILE that the text fills, are read once for all new tokens of the row. Beyond it
the same position is another key for every node; there each token has a program of its own, which takes up the state where the shared
programs left it, and finds every key in the tile and lane that it would have in a chain.

A plan may be made before positions are known, for the highest that they may be: the kernels leave out what the true ones do not see.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from echelon.batch import RaggedBatch
from echelon.draft import Int32

KEY_TILE = 64
SPLIT = 256
WALKERS = 4  # a row with more items than this has parallel work enough; its programs walk all splits and need no merging
FIELDS = 8  # row, first and end token, first and end key, row of `paths` or −1, position from which it holds, mode
WHOLE, FRESH, RESUMED = range(3)  # writes the output; writes the state of a split; begins with the state of its split, and writes it
FAR = 2**31 - 1


@dataclass(frozen=True)
class PlanKey:
    """Layers that share a plan: tokens of a row to an item, and the sliding window."""

    tokens_per_item: int
    window: int | None


T = TypeVar("T")


@dataclass(frozen=True)
class Tables(Generic[T]):
    """What programs are to do; in tables with room left over, entries of zeros follow: programs that they are for do nothing.

    items      int32[I, FIELDS]  programs of the first launch
    late       int32[J, FIELDS]  those that take up states of the first
    paths      int32[Q, depth]   places in the row of a node's ancestors and its own, from the root
    merges     int32[C, 3]       tokens whose splits are merged: token, first split, end split
    bases      int32[T]          the state of split s of token t stands in place bases[t] + s of `num_states`
    """

    items: T
    late: T
    paths: T
    merges: T
    bases: T
    num_states: int

    @property
    def parts(self) -> tuple[T, ...]:
        """All tables, in this order."""
        return self.items, self.late, self.paths, self.merges, self.bases


@dataclass(frozen=True)
class DevicePlan(Tables[Tensor]):
    """All on the device of the keys.

    table      int32[B, M]       block table of the batch
    positions  int32[T]
    has_pads   some tokens have no program; their output is zero
    """

    table: Tensor
    positions: Tensor
    has_pads: bool = False


def plan_tables(batch: RaggedBatch, key: PlanKey, slack: Int32 | None = None) -> Tables[Int32]:
    """The plan of all layers with this key, on the host; in chains, positions may turn out lower by up to `slack` int32[T]."""
    positions = batch.positions.cpu().numpy()
    work = _Work(positions, positions if slack is None else positions - slack, key.tokens_per_item, key.window)
    trees = batch.row_parents() or [[]] * batch.num_rows
    text_lens = batch.text_lens.tolist()
    for row, ((start, end), parents) in enumerate(zip(pairwise(batch.indptr.tolist()), trees, strict=True)):
        if parents:
            work.add_tree(row, start, end, text_lens[row], parents)
        else:
            work.add_chain(row, start, end)
    return Tables(_table(work.items, FIELDS), _table(work.late, FIELDS), _paths(work.paths), *work.merges())


def plan_attention(batch: RaggedBatch, key: PlanKey, device: torch.device) -> DevicePlan:
    """`plan_tables` on a device."""
    tables = plan_tables(batch, key)
    items, late, paths, merges, bases = (torch.from_numpy(part).to(device, non_blocking=True) for part in tables.parts)
    return DevicePlan(items, late, paths, merges, bases, tables.num_states, batch.block_table.to(device), batch.positions.to(device))


class _Work:
    """Collects items row by row; positions int32[T] of all new tokens, the highest and the lowest that they may be."""

    def __init__(self, positions: Int32, at_least: Int32, tokens_per_item: int, window: int | None) -> None:
        self._positions, self._tokens_per_item = positions, tokens_per_item
        self._lowest = np.maximum(at_least - (FAR if window is None else window) + 1, 0)  # first key that each token sees
        self._is_merged = np.zeros(len(positions), np.bool_)
        self.items: list[tuple[int, ...]] = []
        self.late: list[tuple[int, ...]] = []
        self.paths: list[list[int]] = []

    def add_chain(self, row: int, start: int, end: int) -> None:
        firsts = range(start, end, self._tokens_per_item)
        for first in firsts:
            last = min(first + self._tokens_per_item, end)
            low, high = self._keys(first, last)
            if len(firsts) > WALKERS or low // SPLIT == (high - 1) // SPLIT:
                self.items.append((row, first, last, low, high, -1, FAR, WHOLE))
            else:
                self._add_splits(row, first, last, low, high)

    def add_tree(self, row: int, start: int, end: int, text_len: int, parents: list[int]) -> None:
        tail = text_len // KEY_TILE * KEY_TILE
        for first in range(start, end, self._tokens_per_item):
            last = min(first + self._tokens_per_item, end)
            low, high = self._keys(first, last)
            self._add_splits(row, first, last, low, min(high, tail))
        paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else []), text_len + node])
        for token in range(start, end):
            node = token - end + len(parents)
            self._add_tail(row, token, tail, text_len, paths[node] if node >= 0 else None)

    def _keys(self, first: int, last: int) -> tuple[int, int]:
        """The tiles [low, high) that some token of an item sees keys in; `high` itself is the end of the keys."""
        low = int(self._lowest[first:last].min()) // KEY_TILE * KEY_TILE
        return low, int(self._positions[first:last].max()) + 1

    def _add_splits(self, row: int, first: int, last: int, low: int, high: int) -> None:
        self._is_merged[first:last] = True
        for split in range(low // SPLIT * SPLIT, high, SPLIT):
            self.items.append((row, first, last, max(low, split), min(high, split + SPLIT), -1, FAR, FRESH))

    def _add_tail(self, row: int, token: int, tail: int, text_len: int, path: list[int] | None) -> None:
        """What one token sees at `tail` and beyond."""
        low, high = self._keys(token, token + 1)
        begin, is_shared = max(tail, low), low < tail
        if begin >= high:
            return
        where = (-1, FAR)
        if path is not None:
            where = (len(self.paths), text_len)
            self.paths.append(path)
        for split in range(begin // SPLIT * SPLIT, high, SPLIT):
            mode = RESUMED if is_shared and split < tail else FRESH
            self.late.append((row, token, token + 1, max(begin, split), min(high, split + SPLIT), *where, mode))

    def merges(self) -> tuple[Int32, Int32, int]:
        """`merges`, `bases` and `num_states` of the plan."""
        first, end = self._lowest // SPLIT, self._positions // SPLIT + 1
        counts = np.where(self._is_merged, end - first, 0)
        bases = np.cumsum(counts) - counts - first
        tokens = np.flatnonzero(self._is_merged)
        merges = np.stack([tokens, first[tokens], end[tokens]], 1)
        return merges.astype(np.int32), bases.astype(np.int32), int(counts.sum())


def _table(rows: list[tuple[int, ...]], width: int) -> Int32:
    return np.array(rows, np.int32).reshape(-1, width)


def _paths(paths: list[list[int]]) -> Int32:
    out = np.zeros((len(paths), max((len(p) for p in paths), default=0)), np.int32)
    for row, path in zip(out, paths, strict=True):
        row[: len(path)] = path
    return out
