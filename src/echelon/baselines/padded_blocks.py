"""The field's strategies on our attention: rows are padded, but their keys and values lie in blocks, so that padding is all that differs.

What `layout` pads on the framework's attention is padded here in the same amount, on the kernels and the cache of `unpadded`:

inputs  every row feeds as many tokens as the longest. Pads stand before a row's tokens, go through all layers, attend to what the row's
        first new token sees, and are written to a block that no row ever gets.
keys    a row of a rectangle has dead slots: before its first token, and where it accepted less than the best row. They are held in blocks
        of the row's own and attended to by all of its queries; what comes of that is dropped, as a mask would have it.
shifts  realigned rows are read and written anew as often as a rectangle would shift them.

Trees and the states that heads read pass through unchanged, because pads come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.batch import RaggedBatch, Span
from echelon.draft import Int64
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache
from echelon.model.load.loading import LoadedModel
from echelon.model.runner import ModelRunner
from echelon.ops import devices
from echelon.stats import Occupancy

DEAD_ROWS = 1 << 40  # dead slots of row r are held by the row of number DEAD_ROWS + r


@dataclass(frozen=True)
class Padding:
    """What a strategy pads: inputs; keys, where all rows share their start; whether rows are realigned first, or copied together."""

    inputs: bool
    keys: bool
    realigns: bool = False
    copies: bool = False


PADDINGS: dict[tuple[str, str, str], Padding] = {  # (strategy, pad, grouping), as in `strategies.PACKS`
    ("padded", "both", "none"): Padding(inputs=True, keys=True),
    ("padded", "kv", "none"): Padding(inputs=False, keys=True),
    ("padded", "inputs", "none"): Padding(inputs=True, keys=False),
    ("realign", "both", "none"): Padding(inputs=True, keys=True, realigns=True),
    ("realign", "both", "same_length"): Padding(inputs=True, keys=True, copies=True),
}


class PaddedTables(BlockTables):
    """Blocks of rows, and of the dead slots that each would have in a rectangle of lines with `num_slots` slots.

    shifts  of a row: dead slots before its last cached token
    lefts   of a row: those before its first
    moved   rows that the rectangle would shift before the next pass
    """

    def __init__(self, num_blocks: int, block_size: int, max_blocks_per_row: int, num_slots: int) -> None:
        super().__init__(num_blocks, block_size, max_blocks_per_row)
        self.num_slots = num_slots
        self.shifts: dict[int, int] = {}
        self.lefts: dict[int, int] = {}
        self.moved: list[int] = []

    @property
    def row_ids(self) -> list[int]:
        return [row for row in super().row_ids if row < DEAD_ROWS]

    def release(self, row: int) -> None:
        super().release(row)
        super().release(DEAD_ROWS + row)
        self.shifts.pop(row, None)
        self.lefts.pop(row, None)

    def anchor(self, spans: Sequence[Span], realigns: bool) -> list[int]:
        """Give all rows one start, as `layout.anchored_slots` does; the dead slots that each row's keys lie between, by span."""
        known = {s.row: len(s.tokens) - s.num_drafted for s in spans}
        drafted = max(s.num_drafted for s in spans)
        if realigns:
            self._align(known)
        anchor = self._last_slot(spans, known)
        if anchor + drafted >= self.num_slots:
            self._align(known)
            anchor = self._last_slot(spans, known)
        for span in spans:
            self.shifts[span.row] = anchor + 1 - span.start - known[span.row]
            if span.start == 0 or span.row not in self.lefts:  # such as begin with keys, in a measurement
                self.lefts[span.row] = self.shifts[span.row]
        width = anchor + 1 + drafted - min(self.lefts[s.row] for s in spans)
        return [width - s.start - len(s.tokens) for s in spans]

    def together(self, spans: Sequence[Span]) -> list[int]:
        """Copy the rows into a rectangle of their own, as `layout.pack_group` does; their dead slots in it."""
        known = [s.start + len(s.tokens) - s.num_drafted for s in spans]
        width = max(max(known) - k + s.start + len(s.tokens) for k, s in zip(known, spans, strict=True))
        self.moved = [s.row for s in spans if s.start] if len(spans) > 1 else []
        return [width - s.start - len(s.tokens) for s in spans]

    def _last_slot(self, spans: Sequence[Span], known: dict[int, int]) -> int:
        """The slot that the last known token of every row takes: beyond every token of every row."""
        ends = {row: self.num_cached(row) + shift for row, shift in self.shifts.items() if self.num_cached(row)}
        return max(max(ends.values(), default=0), *(ends.get(s.row, 0) + known[s.row] - 1 for s in spans))

    def _align(self, known: dict[int, int]) -> None:
        """Shift rows so that all end together; those that do already stay where they are (`LineTables.align`)."""
        held = [row for row in self.shifts if self.num_cached(row)]
        totals = {row: self.num_cached(row) + known.get(row, 1) for row in {*held, *known}}
        longest = max(totals.values())
        reached = {self.shifts[row] + totals[row] for row in held}
        if not held or (len(reached) == 1 and longest <= reached.pop() < self.num_slots):
            return
        self.moved = [row for row in held if self.shifts[row] != longest - totals[row]]
        for row in held:
            self.shifts[row] = self.lefts[row] = longest - totals[row]

    def hold_dead(self, row: int, count: int) -> int:
        """Hold `count` dead slots of a row, and no others; how many it holds: none where blocks are lacking."""
        number = DEAD_ROWS + row
        if not self.reserve(number, count):
            super().release(number)
            return 0
        self.commit(number, count)
        return count

    def live_slots(self, row: int) -> Int64:
        """int64 [num_cached]: the slots of the row's cached tokens."""
        places = np.arange(self.num_cached(row))
        blocks = np.array(self.blocks(row), np.int64)
        return blocks[places // self.block_size] * self.block_size + places % self.block_size


@dataclass(frozen=True)
class PaddedRows(RaggedBatch):
    """A batch whose rows have these numbers, and dead slots int64[B]; once inputs are padded, how many of them are pads, and where the real
    ones stand, `written` int64[T].
    """

    numbers: tuple[int, ...] = ()
    dead: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    num_pads: int = 0
    written: Tensor | None = None


class PaddedBlocksRunner(ModelRunner):
    """Runs ragged batches over blocks as a strategy pads them. `query`: heads and their size in every layer's attention."""

    def __init__(self, loaded: LoadedModel, cache: KVCache, padding: Padding, query: Sequence[tuple[int, int]]) -> None:
        super().__init__(loaded, cache)
        assert isinstance(cache.tables, PaddedTables)
        self.tables, self._padding, self._query = cache.tables, padding, query

    def pack(self, spans: Sequence[Span]) -> PaddedRows:
        batch = super().pack(spans)
        counts = [0] * len(spans)
        if self._padding.copies:
            counts = self.tables.together(spans)
        elif self._padding.keys:
            counts = self.tables.anchor(spans, self._padding.realigns)
        held = [self.tables.hold_dead(s.row, n) for s, n in zip(spans, counts, strict=True)]
        given = {f.name: getattr(batch, f.name) for f in fields(RaggedBatch)}
        return PaddedRows(**given, numbers=tuple(s.row for s in spans), dead=torch.tensor(held))

    @torch.inference_mode()
    def run(self, batch: RaggedBatch) -> tuple[Tensor, Tensor | None]:
        """As in any runner; logits and hidden states are those of real tokens."""
        assert isinstance(batch, PaddedRows)
        moved, self.tables.moved = self.tables.moved, []
        if moved:
            slots = np.concatenate([self.tables.live_slots(row) for row in moved if row in self.tables])
            self.tables.copies.append((slots, slots))
        fed = self._padded(batch) if self._padding.inputs else batch
        logits, states = super().run(fed)
        self._attend_to_the_dead(fed)
        return logits, states if states is None or fed.written is None else states[fed.written.to(states.device)]

    def _padded(self, batch: PaddedRows) -> PaddedRows:
        """The batch with as many tokens in every row."""
        counts, starts = batch.indptr.diff().long(), batch.indptr[:-1].long()
        widest, num_rows = int(counts.max()), batch.num_rows
        ends = torch.arange(1, num_rows + 1) * widest
        written = torch.arange(batch.num_tokens) + (ends - starts - counts).repeat_interleave(counts)
        tokens = torch.zeros(num_rows * widest, dtype=torch.int32)
        positions = batch.positions[starts].repeat_interleave(widest)
        slots = torch.full((num_rows * widest,), self.cache.null_slots.start)
        for padded, real in ((tokens, batch.tokens), (positions, batch.positions), (slots, batch.slots)):
            padded[written] = real
        indptr = torch.arange(num_rows + 1, dtype=torch.int32) * widest
        padding: dict[str, Any] = {"num_pads": num_rows * widest - batch.num_tokens, "written": written}
        logit_rows = written[batch.logit_rows]
        return replace(batch, tokens=tokens, positions=positions, slots=slots, indptr=indptr, logit_rows=logit_rows, plans={}, **padding)

    def _attend_to_the_dead(self, batch: PaddedRows) -> None:
        """All queries of every row over its dead slots, layer by layer; nothing is made of it."""
        if not batch.dead.any():
            return
        rows = [i for i, n in enumerate(batch.dead.tolist()) if n]
        counts = batch.indptr.diff()[rows]
        num_tokens = int(counts.sum())
        dead = RaggedBatch(
            tokens=batch.tokens[:num_tokens],
            positions=(batch.dead[rows] - 1).to(torch.int32).repeat_interleave(counts.long()),
            logit_rows=batch.logit_rows[:0],
            logit_indptr=batch.logit_indptr[:1],
            indptr=torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32),
            slots=batch.slots[:num_tokens],
            kv_lens=batch.dead[rows].to(torch.int32),
            text_lens=batch.dead[rows].to(torch.int32),
            prompt_lens=batch.prompt_lens[rows],
            block_table=torch.from_numpy(self.tables.gather([DEAD_ROWS + batch.numbers[i] for i in rows])),
            block_size=self.cache.block_size,
        )
        for layer, (heads, size) in enumerate(self._query):
            keys, values = self.cache.keys[layer], self.cache.values[layer]
            query = torch.zeros(num_tokens, heads, size, dtype=keys.dtype, device=keys.device)
            devices.backend_of(query).ragged_attention(query, keys, values, dead, size**-0.5)

    def count(self, batch: RaggedBatch, num_tokens: int, num_replayed: int | None = None) -> None:
        assert isinstance(batch, PaddedRows)
        super().count(batch, num_tokens - batch.num_pads, num_replayed)

    def occupancy(self, batch: RaggedBatch) -> Occupancy:
        assert isinstance(batch, PaddedRows)
        own = super().occupancy(batch)
        return replace(own, num_touched=own.num_live + int(batch.dead.sum()))
