"""Batches whose keys and values lie in a rectangle, from spans and the slots that a strategy chooses for them.

Padded rows are the vanilla way to batch speculation in a stack with aligned KV access, and EMS-SD has two ablations of it. `pack` pads
inputs and KV: every row feeds as many tokens as the longest, and all rows share one start in the KV cache, so that a row that accepted less
than the best of the batch is left with dead slots, masked but loaded. `pack_kv` keeps that cache and concatenates the inputs of the linear
layers; `pack_inputs` pads the inputs and gives every row its own start in the cache.

Realigned rows are those of Zhang et al. 2025, "Batch Speculative Decoding Done Right". EQSPEC (`pack_realigned`): before each step every
row's keys and values are shifted so that all rows end at the same slot; the padding is on the left alone. EXSPEC (`pack_group`): every
sequence keeps its keys and values for itself, and the rows that run together are copied into a rectangle for the step; rows of equal length
need no padding in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.baselines.lines import LineTables
from echelon.batch import PassInputs, Span
from echelon.draft import Int32, Int64, indptr_of


@dataclass(frozen=True)
class PaddedBatch(PassInputs):
    """New tokens of B rows whose keys and values lie in a rectangle, for masked attention of the framework. n: most new tokens of a row.

    tokens          int32[T']    rows padded to n tokens each (T' = B · n, pads are 0), or concatenated (T' = T)
    positions       int32[T']    as in any batch; a pad repeats its row's last
    written         int64[T]     indices into T' of the real tokens
    slots           int64[T]     line · num_slots + slot that each of them is written to
    lines           [first, end) of the lines that the rows are, and
    columns         [first, end) of their slots that attention loads
    gathered        int64[B, W]  instead of lines and columns: the slots to copy together before attention; or None
    key_positions   int32[B, W]  position of the token in each loaded slot; −1: dead
    query_positions int32[B, n]  position of each query; a pad repeats its row's last, so that it sees something
    queries         int64[B, n]  indices into T' of the queries; None where T' is the rectangle itself
    outputs         int64[T']    where concatenated tokens find their output in the rectangle, with `queries`
    num_live        slots that hold a token of their row
    num_reserved    slots that no other row can use while these run
    masks           what attention has worked out about this batch, shared by all layers
    """

    written: Tensor
    slots: Tensor
    lines: tuple[int, int]
    columns: tuple[int, int]
    gathered: Tensor | None
    key_positions: Tensor
    query_positions: Tensor
    queries: Tensor | None
    outputs: Tensor | None
    num_live: int
    num_reserved: int
    masks: dict[Any, Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.written)

    def for_attention(self, device: torch.device) -> PaddedBatch:
        """Copy what attention reads to this device, and share `masks`; what the model is fed stays where it is."""
        if self.slots.device == device:
            return self
        names = ("written", "slots", "gathered", "key_positions", "query_positions", "queries", "outputs")
        moved: dict[str, Any] = {name: None if (t := getattr(self, name)) is None else t.to(device) for name in names}
        return replace(self, **moved)

    def check(self) -> None:
        """Every query sees a key, and every new token its own slot once."""
        visible = (self.key_positions[:, None] >= 0) & (self.key_positions[:, None] <= self.query_positions[..., None])
        assert bool(visible.any(-1).all()), "a query sees nothing"
        assert len(set(self.slots.tolist())) == len(self.slots) == self.num_tokens


@dataclass(frozen=True)
class Rows:
    """Spans in order of their lines. Per row: index of its span, line, first new position, new tokens, drafted ones."""

    spans: list[Span]
    order: Int64
    lines: Int64
    starts: Int64
    counts: Int64
    drafted: Int64

    @property
    def row_of(self) -> Int64:
        """int64 [T]: the row of each new token"""
        return np.repeat(np.arange(len(self.spans)), self.counts)

    @property
    def offsets(self) -> Int64:
        """int64 [T]: how many new tokens of its row precede each new token"""
        return np.arange(self.counts.sum()) - np.repeat(self.counts.cumsum() - self.counts, self.counts)

    def num_known(self, num_lines: int) -> Int64:
        """int64 [num_lines]: new tokens that stay, 1 for lines that are not in the batch."""
        known = np.ones(num_lines, np.int64)
        known[self.lines] = self.counts - self.drafted
        return known


@dataclass(frozen=True)
class Keys:
    """Keys and values that attention loads: lines and columns, or a gather; see `PaddedBatch`."""

    lines: tuple[int, int]
    columns: tuple[int, int]
    gathered: Int64 | None
    positions: Int32
    num_reserved: int


def rows_by_line(spans: Sequence[Span], tables: LineTables) -> Rows:
    """Sort spans by the lines of their rows."""
    lines = tables.lines([s.row for s in spans])
    order = np.argsort(lines)
    ordered = [spans[i] for i in order]
    numbers = np.array([(s.start, len(s.tokens), s.num_drafted) for s in ordered], np.int64).reshape(-1, 3)
    return Rows(ordered, order, lines[order], numbers[:, 0], numbers[:, 1], numbers[:, 2])


def anchored_slots(rows: Rows, tables: LineTables) -> Int64:
    """int64 [T]: one start for all rows, as stacks with aligned KV need it: every row's last known token takes the same slot.

    That slot lies beyond every token of every row. What it leaves between a row's old tokens and its new ones is dead. When the end of
    the rectangle is reached, the lines are aligned, which frees what is dead.
    """
    for _ in range(2):
        ends, known = tables.ends, rows.counts - rows.drafted
        anchor = max(int(ends.max()), int((ends[rows.lines] + known - 1).max()))
        if anchor + int(rows.drafted.max()) < tables.num_slots:
            break
        tables.align(rows.num_known(len(ends)))
    return np.repeat(anchor + 1 - known, rows.counts) + rows.offsets


def own_slots(rows: Rows) -> Int64:
    """int64 [T]: each row has its own start: the slot is the position."""
    return np.repeat(rows.starts, rows.counts) + rows.offsets


def loaded_keys(rows: Rows, tables: LineTables) -> Keys:
    """The slots that attention loads once the new tokens are written: a slice where the rows' lines lie together, else a copy."""
    first_line, end_line = int(rows.lines[0]), int(rows.lines[-1]) + 1
    is_slice = end_line - first_line == len(rows.lines)
    widest = int(tables.ends.max())
    positions = tables.positions[first_line:end_line, :widest] if is_slice else tables.positions[rows.lines, :widest]
    is_used = np.flatnonzero((positions >= 0).any(0))
    first, end = int(is_used[0]), int(is_used[-1]) + 1
    gathered = None if is_slice else rows.lines[:, None] * tables.num_slots + np.arange(first, end)
    return Keys((first_line, end_line), (first, end), gathered, positions[:, first:end].copy(), len(tables.row_ids) * widest)


def padded_batch(rows: Rows, tables: LineTables, slots: Int64, keys: Keys, pads_inputs: bool) -> PaddedBatch:
    """Assemble the batch; `slots` int64 [T] are those of the rows' own lines, entered in `tables` already."""
    row_of, offsets, counts = rows.row_of, rows.offsets, rows.counts
    num_rows, widest = len(counts), int(counts.max())
    tokens = np.fromiter(chain.from_iterable(s.tokens for s in rows.spans), np.int32, len(offsets))
    in_row = np.minimum(np.arange(widest), counts[:, None] - 1)  # [B, n], pads repeat the last
    query_positions = (rows.starts[:, None] + in_row).astype(np.int32)
    rectangle = row_of * widest + offsets
    written = rectangle if pads_inputs else np.arange(len(offsets))
    inputs = np.zeros(num_rows * widest if pads_inputs else len(offsets), np.int32)
    inputs[written] = tokens
    queries = None if pads_inputs else torch.from_numpy((counts.cumsum() - counts)[:, None] + in_row)
    logit_rows, logit_indptr = _logit_rows(rows, written)
    return PaddedBatch(
        tokens=torch.from_numpy(inputs),
        positions=torch.from_numpy(query_positions.ravel() if pads_inputs else query_positions.ravel()[rectangle]),
        logit_rows=torch.from_numpy(logit_rows),
        logit_indptr=torch.from_numpy(logit_indptr),
        written=torch.from_numpy(written),
        slots=torch.from_numpy(rows.lines[row_of] * tables.num_slots + slots),
        lines=keys.lines,
        columns=keys.columns,
        gathered=None if keys.gathered is None else torch.from_numpy(keys.gathered),
        key_positions=torch.from_numpy(keys.positions),
        query_positions=torch.from_numpy(query_positions),
        queries=queries,
        outputs=None if pads_inputs else torch.from_numpy(rectangle),
        num_live=int((rows.starts + counts).sum()),
        num_reserved=keys.num_reserved,
    )


def _logit_rows(rows: Rows, written: Int64) -> tuple[Int64, Int32]:
    """Indices int64[R] of the tokens whose logits are wanted, and int32[B+1] whose they are; rows in the order of the spans."""
    wanted = np.fromiter((s.num_logits for s in rows.spans), np.int64, len(rows.spans))
    chosen = np.flatnonzero(rows.offsets >= np.repeat(rows.counts - wanted, rows.counts))
    by_span = np.argsort(rows.order[rows.row_of[chosen]], kind="stable")
    return written[chosen[by_span]], indptr_of(wanted[np.argsort(rows.order)])


def pack(
    spans: Sequence[Span], tables: LineTables, pads_inputs: bool = True, shares_start: bool = True, realigns: bool = False
) -> PaddedBatch:
    """Pack with KV padded where rows share their start, and inputs padded where asked: elsewhere the linear layers see real tokens alone.
    With starts of their own a token's slot is its position, and rejected tokens are overwritten. `realigns`: the lines are aligned first.
    """
    tables.compact()
    rows = rows_by_line(spans, tables)
    if realigns:
        tables.align(rows.num_known(len(tables.positions)))
    slots = anchored_slots(rows, tables) if shares_start else own_slots(rows)
    tables.write(rows.lines[rows.row_of], slots, own_slots(rows))
    return padded_batch(rows, tables, slots, loaded_keys(rows, tables), pads_inputs)


pack_kv = partial(pack, pads_inputs=False)
pack_inputs = partial(pack, shares_start=False)
pack_realigned = partial(pack, realigns=True)


def pack_group(spans: Sequence[Span], tables: LineTables) -> PaddedBatch:
    """Pack rows of a pool, copied together; a token's slot in the pool is its position."""
    rows = rows_by_line(spans, tables)
    slots = own_slots(rows)
    tables.write(rows.lines[rows.row_of], slots, slots)
    return padded_batch(rows, tables, slots, _copied_keys(rows, tables), pads_inputs=True)


def _copied_keys(rows: Rows, tables: LineTables) -> Keys:
    """Columns such that every row's last known token stands in the same one; equal lengths leave no padding on the left.

    Equal rows in neighbouring lines (a row alone, for one) are a rectangle as they lie, and nothing is copied.
    """
    num_known = rows.starts + rows.counts - rows.drafted
    shifts = num_known.max() - num_known
    lengths = rows.starts + rows.counts
    positions = np.arange(int((shifts + lengths).max())) - shifts[:, None]
    positions[(positions < 0) | (positions >= lengths[:, None])] = -1
    lines, num_held = (int(rows.lines[0]), int(rows.lines[-1]) + 1), int(tables.ends.sum())
    if lines[1] - lines[0] == len(rows.lines) and not shifts.any():
        return Keys(lines, (0, positions.shape[1]), None, positions.astype(np.int32), num_held)
    gathered = rows.lines[:, None] * tables.num_slots + np.maximum(positions, 0)
    return Keys(lines, (0, 0), gathered, positions.astype(np.int32), num_held + positions.size)
