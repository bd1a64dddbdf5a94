"""The tensors behind the block tables."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from echelon.errors import UnsupportedModelError
from echelon.kv.blocks import BlockTables, SlotCopy
from echelon.kv.tables import KVTables
from echelon.ops import devices
from echelon.ops.slots import gather_slots, scatter_slots

LARGEST_HEAD = 1024  # numbers in a key or value; as `largest_head` of csrc/attention/attention.h
SCALE_BYTES = 4  # of the float32 that the integers of a head are multiplied by; they lie before it


@dataclass(frozen=True)
class LayerShape:
    """Keys and values that one attention layer stores per token: keys [num_kv_heads, key_size], values [num_kv_heads, value_size].

    Raises
    ------
    UnsupportedModelError  heads are larger than attention serves
    """

    num_kv_heads: int
    key_size: int
    value_size: int

    def __post_init__(self) -> None:
        if not 1 <= min(self.key_size, self.value_size) <= max(self.key_size, self.value_size) <= LARGEST_HEAD:
            raise UnsupportedModelError(
                f"attention heads of {self.key_size} (keys) and {self.value_size} (values) numbers; served are 1 to {LARGEST_HEAD}"
            )

    def bytes_per_token(self, dtype: torch.dtype, is_rounded: bool = False) -> int:
        """Bytes that the layer stores per token, as numbers of `dtype` or rounded to 8 bits."""
        if is_rounded:
            return self.num_kv_heads * (self.key_size + self.value_size + 2 * SCALE_BYTES)
        return self.num_kv_heads * (self.key_size + self.value_size) * dtype.itemsize


class KVStorage(ABC):
    """Keys and values of every layer, in the cache's dtype, and the tables that say whose they are.

    seconds         spent moving keys and values about, by `clock`
    bytes_per_slot  bytes of one token's keys and values in all layers
    """

    tables: KVTables

    def __init__(self, shapes: list[LayerShape], dtype: torch.dtype, device: torch.device, is_rounded: bool = False) -> None:
        self.device, self.seconds = device, 0.0
        self.clock: Callable[[], float] = time.perf_counter
        self.bytes_per_slot = sum(s.bytes_per_token(dtype, is_rounded) for s in shapes)
        self.keys = [self._allocate(s.num_kv_heads, s.key_size, dtype) for s in shapes]
        self.values = [self._allocate(s.num_kv_heads, s.value_size, dtype) for s in shapes]

    @abstractmethod
    def _allocate(self, num_heads: int, size: int, dtype: torch.dtype) -> Tensor:
        """Return room for one layer's keys or values, `size` numbers a head."""

    @abstractmethod
    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store keys and values [T, num_kv_heads, size] in `slots` int64 [T]."""

    @abstractmethod
    def apply_copies(self) -> None:
        """Move what the tables ask to be moved."""

    def check(self) -> None:
        """Assert every invariant."""
        self.tables.check()


class KVCache(KVStorage):
    """Keys and values of every layer in blocks of `block_size` slots; slot = block · block_size + offset.

    keys[layer], values[layer]: [num_blocks, num_kv_heads, block_size, size], in the cache's dtype (`ops.slots`). Slots that no row holds
    may contain anything, NaN included: nothing ever multiplies them. With `has_null_block` there is one block more, which no row ever gets:
    it takes what padding would write. With `is_rounded` every head of a key or value is `size` integers of 8 bits and their float32 scale,
    int8 [num_blocks, num_kv_heads, block_size, size + 4] (`Backend.write_slots`).

    boundaries  [num_blocks, num_features]: of every block, what the state in its last slot was made of besides the text; kept where a row
                may start behind that slot and need it (`drafters.heads`)
    """

    tables: BlockTables

    def __init__(
        self,
        shapes: list[LayerShape],
        tables: BlockTables,
        dtype: torch.dtype,
        device: torch.device,
        has_null_block: bool = False,
        num_features: int = 0,
        is_rounded: bool = False,
    ) -> None:
        self.tables, self.is_rounded = tables, is_rounded
        self.num_blocks = tables.pool.num_blocks + has_null_block
        super().__init__(shapes, dtype, device, is_rounded)
        self.boundaries = torch.empty(self.num_blocks, num_features, dtype=dtype, device=device)

    def _allocate(self, num_heads: int, size: int, dtype: torch.dtype) -> Tensor:
        if self.is_rounded:
            size, dtype = size + SCALE_BYTES, torch.int8
        return torch.empty(self.num_blocks, num_heads, self.block_size, size, dtype=dtype, device=self.device)

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self.tables.block_size

    @property
    def null_slots(self) -> range:
        """Slots of the null block; none where there is no such block."""
        return range(self.tables.pool.num_blocks * self.block_size, self.num_blocks * self.block_size)

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        storages = (self.keys[layer], self.values[layer])
        if not self.is_rounded:
            keys, values = (x.to(storage.dtype) for x, storage in zip((keys, values), storages, strict=True))
        devices.backend_of(keys).write_slots(keys, values, *storages, slots)

    def apply_copies(self) -> None:
        """Carry out the copies in `tables.copies`: shared blocks before they are written (copy-on-write), accepted paths of trees.

        One after the other would do; several are read together and then written while they do not touch what an earlier one writes.
        """
        copies = self.tables.copies
        if not copies:
            return
        start = self.clock()
        try:
            self._copy_all(copies)
        except KeyboardInterrupt:  # which ends all rows; what is kept for others may have moved in some storages and not in all
            copies.clear()
            self.tables.pool.drop_all()
            raise
        self.seconds += self.clock() - start

    def _copy_all(self, copies: list[SlotCopy]) -> None:
        while copies:
            written: set[int] = set()
            count = 0
            while count < len(copies) and written.isdisjoint(np.concatenate(copies[count]).tolist()):
                written.update(copies[count][1].tolist())
                count += 1
            sources, targets = (torch.from_numpy(np.concatenate([c[i] for c in copies[:count]])).to(self.device) for i in (0, 1))
            for storage in (*self.keys, *self.values):
                scatter_slots(storage, targets, gather_slots(storage, sources))
            self._copy_boundaries(sources, targets)
            del copies[:count]

    def keep_boundaries(self, slots: Tensor, features: Tensor) -> None:
        """Keep, of features [T, num_features] of what is written to `slots` int64 [T], those of last slots."""
        if not self.boundaries.shape[1]:
            return
        last = (slots % self.block_size == self.block_size - 1).nonzero()[:, 0]
        if len(last):
            blocks = (slots[last] // self.block_size).to(self.device)
            self.boundaries[blocks] = features[last.to(features.device)].to(self.boundaries.dtype)

    def _copy_boundaries(self, sources: Tensor, targets: Tensor) -> None:
        is_last = (sources % self.block_size == self.block_size - 1) & (targets % self.block_size == self.block_size - 1)
        self.boundaries[targets[is_last] // self.block_size] = self.boundaries[sources[is_last] // self.block_size]

    def held_slots(self) -> Tensor:
        """bool [num_blocks, block_size]: slots that hold a cached token of some row, or could be found by another; all others may contain
        anything.
        """
        held = torch.zeros(self.num_blocks * self.block_size, dtype=torch.bool)
        for row in self.tables.row_ids:
            blocks = torch.tensor(self.tables.blocks(row), dtype=torch.int64)
            slots = (blocks[:, None] * self.block_size + torch.arange(self.block_size)).flatten()
            held[slots[: self.tables.num_cached(row)]] = True
        held = held.view(-1, self.block_size)
        held[self.tables.pool.published] = True
        return held


def cache_for_rows(
    shapes: list[LayerShape], num_rows: int, length: int, dtype: torch.dtype, device: torch.device, block_size: int = 16
) -> KVCache:
    """A cache for rows 0 … num_rows − 1 of `length` tokens at most, whose room is theirs already."""
    blocks = -(-length // block_size)
    tables = BlockTables(num_rows * blocks, block_size, blocks)
    for row in range(num_rows):
        tables.reserve(row, length)
    return KVCache(shapes, tables, dtype, device)
