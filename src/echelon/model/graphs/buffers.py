"""The memory that captured passes read what a batch is from: it stays where it is, and is filled before each replay by one copy.

What the host writes lies in pinned memory that PyTorch keeps until the copy is done, so that the host need not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.batch import RaggedBatch
from echelon.model.graphs.buckets import Bucket, PlanSize
from echelon.ops.triton.plan import FIELDS, SPLIT, Plan, PlanKey, Tables

ALIGNMENT = 4  # int32 words; Triton compiles a kernel anew for an address that is no multiple of 16 bytes
Words = NDArray[np.int32]
NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32, torch.float64: np.float64}


@dataclass(frozen=True)
class Pass:
    """A batch on the host; the positions that the model is given; its plans, in the order of their keys."""

    batch: RaggedBatch
    positions: Tensor
    tables: tuple[Tables, ...]


@dataclass(frozen=True)
class Field:
    """A tensor in a run of int32 words, from word `start` on."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_words(self) -> int:
        return prod(self.shape) * self.dtype.itemsize // 4

    def view(self, memory: Tensor) -> Tensor:
        return memory[self.start : self.start + self.num_words].view(self.dtype).view(self.shape)

    def put(self, words: Words, value: NDArray[Any]) -> None:
        """Write the first of the field's entries; in two dimensions, those of a corner."""
        own = words[self.start : self.start + self.num_words].view(NUMPY[self.dtype]).reshape(self.shape)
        own[tuple(slice(0, n) for n in value.shape)] = value


class Layout:
    """Places fields one after another."""

    def __init__(self) -> None:
        self.num_words = 0

    def add(self, *shape: int, dtype: torch.dtype = torch.int32) -> Field:
        field = Field(self.num_words, shape, dtype)
        self.num_words += -(-field.num_words // ALIGNMENT) * ALIGNMENT
        return field


class PlanFields:
    """The tables of one plan."""

    def __init__(self, layout: Layout, size: PlanSize, num_tokens: int) -> None:
        self.size = size
        self.items, self.late = layout.add(size.items, FIELDS), layout.add(size.late, FIELDS)
        self.paths = layout.add(size.late, size.depth)  # no more paths than items on them
        self.merges, self.bases = layout.add(num_tokens if size.states else 0, 3), layout.add(num_tokens)

    def fill(self, words: Words, tables: Tables) -> None:
        for name in ("items", "late", "paths", "merges", "bases"):
            getattr(self, name).put(words, getattr(tables, name))

    def plan(self, memory: Tensor, table: Tensor, positions: Tensor) -> Plan:
        items, late, paths, merges, bases = (f.view(memory) for f in (self.items, self.late, self.paths, self.merges, self.bases))
        return Plan(items, late, paths, merges, bases, self.size.states, table, positions, has_pads=True)


class Frame:
    """What one pass reads. Padding has token and position 0, and no attention; its keys and values go to the null slots."""

    def __init__(self, layout: Layout, bucket: Bucket) -> None:
        count = bucket.num_tokens
        self.tokens, self.positions, self.coded = layout.add(count), layout.add(count), layout.add(count)
        self.slots, self.logit_rows = layout.add(count, dtype=torch.int64), layout.add(bucket.num_logits, dtype=torch.int64)
        self.plans = [PlanFields(layout, size, count) for size in bucket.plans]

    def fill(self, words: Words, given: Pass, null_slots: range) -> None:
        batch = given.batch
        self.slots.put(words, np.resize(np.asarray(null_slots), self.slots.shape))
        columns = (batch.tokens, batch.positions, given.positions, batch.slots, batch.logit_rows)
        for field, column in zip((self.tokens, self.positions, self.coded, self.slots, self.logit_rows), columns, strict=True):
            field.put(words, column.numpy())
        for fields, tables in zip(self.plans, given.tables, strict=True):
            fields.fill(words, tables)


@dataclass(frozen=True)
class Inputs:
    """One pass on the device: int32 tokens [T], positions [T] as the model is given them, int64 slots [T] and logit_rows [R], and plans."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor
    plans: dict[PlanKey, Plan]


class Frames:
    """Memory of passes over the same rows, the first over all of them, and `columns`: what else a graph reads, by shape and dtype.

    The block table comes last, so that only rows in use are copied; the passes share it.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        keys: Sequence[PlanKey],
        block_size: int,
        device: torch.device,
        columns: Sequence[tuple[tuple[int, ...], torch.dtype]] = (),
    ) -> None:
        layout = Layout()
        self._frames = [Frame(layout, bucket) for bucket in buckets]
        self._columns = [layout.add(*shape, dtype=dtype) for shape, dtype in columns]
        width = -(-max(b.num_splits for b in buckets) * SPLIT // block_size)
        self._table = layout.add(buckets[0].num_tokens, width)
        self._memory = torch.zeros(layout.num_words, dtype=torch.int32, device=device)
        self.columns = [c.view(self._memory) for c in self._columns]
        self.passes = [self._inputs(frame, keys) for frame in self._frames]

    def _inputs(self, frame: Frame, keys: Sequence[PlanKey]) -> Inputs:
        table, positions = self._table.view(self._memory), frame.positions.view(self._memory)
        plans = {key: fields.plan(self._memory, table, positions) for key, fields in zip(keys, frame.plans, strict=True)}
        tokens, coded, slots, logit_rows = (f.view(self._memory) for f in (frame.tokens, frame.coded, frame.slots, frame.logit_rows))
        return Inputs(tokens, coded, slots, logit_rows, plans)

    def fill(self, passes: Sequence[Pass], null_slots: range, columns: Sequence[NDArray[Any]] = ()) -> None:
        """One copy to the device, in the order of its stream."""
        table, width = passes[0].batch.block_table.numpy(), self._table.shape[1]
        used = Field(self._table.start, (len(table), width), torch.int32)
        num_words = used.start + used.num_words
        host = torch.zeros(num_words, dtype=torch.int32, pin_memory=True)
        words = host.numpy()
        for frame, given in zip(self._frames, passes, strict=True):
            frame.fill(words, given, null_slots)
        for field, column in zip(self._columns, columns, strict=True):
            field.put(words, column)
        used.put(words, table[:, :width])
        self._memory[:num_words].copy_(host, non_blocking=True)
