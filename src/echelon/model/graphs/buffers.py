"""The memory that captured passes read what a batch is from: it stays where it is, and is filled before each replay by one copy.

What the host writes lies in pinned memory that PyTorch keeps until the copy is done, so that the host need not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from echelon.model.graphs.buckets import Bucket, PlanSize
from echelon.ops.triton.plan import FIELDS, SPLIT, DevicePlan, PlanKey, Tables

T = TypeVar("T")

ALIGNMENT = 4  # int32 words; Triton compiles a kernel anew for an address that is no multiple of 16 bytes
Words = NDArray[np.int32]
NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32, torch.float64: np.float64}


@dataclass(frozen=True)
class PassValues(Generic[T]):
    """What one pass reads: on the host, without padding, or the fields that hold it.

    columns     each with an entry a token, in the order of its fields
    logit_rows  int64[R]  tokens whose logits are wanted
    tables      its plans, in the order of their keys
    """

    columns: tuple[T, ...]
    logit_rows: T
    tables: tuple[Tables[T], ...]


@dataclass(frozen=True)
class Field:
    """A tensor in a run of int32 words, from word `start` on."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_words(self) -> int:
        """Words that it takes."""
        return prod(self.shape) * self.dtype.itemsize // 4

    def view(self, memory: Tensor) -> Tensor:
        """The field's tensor, of its dtype and shape, in a memory of int32 words."""
        return memory[self.start : self.start + self.num_words].view(self.dtype).view(self.shape)

    def put(self, words: Words, value: NDArray[Any]) -> None:
        """Write the first of the field's entries; in two dimensions, those of a corner."""
        own = words[self.start : self.start + self.num_words].view(NUMPY[self.dtype]).reshape(self.shape)
        own[tuple(slice(0, n) for n in value.shape)] = value

    def pad(self, words: Words, first: int, value: ArrayLike) -> None:
        """Write a number into a column's entries from `first` on, or several numbers in turn."""
        own = words[self.start : self.start + self.num_words].view(NUMPY[self.dtype])[first:]
        own[:] = value if np.ndim(value) == 0 else np.resize(value, len(own))


class Layout:
    """Places fields one after another."""

    def __init__(self) -> None:
        self.num_words = 0

    def add(self, *shape: int, dtype: torch.dtype = torch.int32) -> Field:
        """Append a field; its offset is the end so far."""
        field = Field(self.num_words, shape, dtype)
        self.num_words += -(-field.num_words // ALIGNMENT) * ALIGNMENT
        return field


def plan_fields(layout: Layout, size: PlanSize, num_tokens: int) -> Tables[Field]:
    """Fields for the tables of one plan; there are no more paths than items on them."""
    items, late, paths = layout.add(size.items, FIELDS), layout.add(size.late, FIELDS), layout.add(size.late, size.depth)
    return Tables(items, late, paths, layout.add(num_tokens if size.states else 0, 3), layout.add(num_tokens), size.states)


def pass_fields(layout: Layout, bucket: Bucket, dtypes: Sequence[torch.dtype]) -> PassValues[Field]:
    """Fields of one pass: columns of these types, rows of logits, plans."""
    columns = tuple(layout.add(bucket.num_tokens, dtype=dtype) for dtype in dtypes)
    logit_rows = layout.add(bucket.num_logits, dtype=torch.int64)
    return PassValues(columns, logit_rows, tuple(plan_fields(layout, size, bucket.num_tokens) for size in bucket.plans))


def _put_pass(words: Words, fields: PassValues[Field], values: PassValues[NDArray[Any]], pads: Sequence[ArrayLike]) -> None:
    """Write a pass; `pads` stand in the entries of each column that belong to no token, in turn. Padding has no attention."""
    for field, column, pad in zip(fields.columns, values.columns, pads, strict=True):
        field.put(words, column)
        field.pad(words, len(column), pad)
    fields.logit_rows.put(words, values.logit_rows)
    for own, tables in zip(fields.tables, values.tables, strict=True):
        for field, part in zip(own.parts, tables.parts, strict=True):
            field.put(words, part)


@dataclass(frozen=True)
class Inputs:
    """One pass on the device without its tokens: int32 positions [T] as the model is given them, int64 slots [T], logit_rows [R]; plans."""

    positions: Tensor
    slots: Tensor
    logit_rows: Tensor
    plans: dict[PlanKey, DevicePlan]


class Buffers:
    """The memory that a program reads: passes, `columns` of other shapes and types, and block tables of these shapes.

    A block table comes last, so that of it only rows in use are copied.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        dtypes: Sequence[torch.dtype],
        columns: Sequence[tuple[tuple[int, ...], torch.dtype]],
        block_tables: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> None:
        layout = Layout()
        self._passes = [pass_fields(layout, bucket, dtypes) for bucket in buckets]
        self._columns = [layout.add(*shape, dtype=dtype) for shape, dtype in columns]
        self._tables = [layout.add(*shape) for shape in block_tables]
        self._memory = torch.zeros(layout.num_words, dtype=torch.int32, device=device)
        self.columns, self.block_tables = ([field.view(self._memory) for field in fields] for fields in (self._columns, self._tables))

    def columns_of(self, index: int) -> list[Tensor]:
        """The columns of a pass, each [T]."""
        return [field.view(self._memory) for field in self._passes[index].columns]

    def inputs(self, index: int, keys: Sequence[PlanKey], table: Tensor, positions: Tensor, coded: Tensor, slots: Tensor) -> Inputs:
        """A pass at `positions` int32 [T] with this block table; `coded` are the positions that the model is given."""
        one = self._passes[index]
        plans = {}
        for key, fields in zip(keys, one.tables, strict=True):
            items, late, paths, merges, bases = (field.view(self._memory) for field in fields.parts)
            plans[key] = DevicePlan(items, late, paths, merges, bases, fields.num_states, table, positions, has_pads=True)
        return Inputs(coded, slots, one.logit_rows.view(self._memory), plans)

    def fill(
        self,
        passes: Sequence[PassValues[NDArray[Any]]],
        pads: Sequence[Sequence[ArrayLike]],
        columns: Sequence[NDArray[Any]],
        block_tables: Sequence[NDArray[np.int32]],
    ) -> None:
        """Copy everything to the device at once, in the order of its stream."""
        last = self._tables[-1]
        used = Field(last.start, (len(block_tables[-1]), last.shape[1]), torch.int32)
        host = torch.zeros(used.start + used.num_words, dtype=torch.int32, pin_memory=True)
        words = host.numpy()
        for fields, values, pad in zip(self._passes, passes, pads, strict=True):
            _put_pass(words, fields, values, pad)
        for field, column in zip(self._columns, columns, strict=True):
            field.put(words, column)
        for field, table in zip((*self._tables[:-1], used), block_tables, strict=True):
            field.put(words, table[:, : field.shape[1]])
        self._memory[: len(host)].copy_(host, non_blocking=True)


def table_width(buckets: Sequence[Bucket], block_size: int) -> int:
    """Blocks of the longest row in any of these passes."""
    return -(-max(bucket.num_splits for bucket in buckets) * SPLIT // block_size)
