"""The tensors behind the block tables."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from echelon.errors import UnsupportedModelError
from echelon.kv.blocks import BlockTables
from echelon.kv.tables import KVTables
from echelon.ops import devices
from echelon.ops.slots import gather_slots, scatter_slots

LARGEST_HEAD = 1024  # numbers in a key or value; as `largest_head` of csrc/attention/attention.h


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer stores per token: keys [num_kv_heads, key_size], values [num_kv_heads, value_size].

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

    @property
    def num_entries(self) -> int:
        return self.num_kv_heads * (self.key_size + self.value_size)


class KVStorage(Protocol):
    """Keys and values of every layer, and the tables that say whose they are.

    seconds  spent moving keys and values about, by `clock`
    """

    device: torch.device
    keys: list[Tensor]
    values: list[Tensor]
    seconds: float
    clock: Callable[[], float]

    @property
    def tables(self) -> KVTables: ...
    @property
    def bytes_per_slot(self) -> int: ...

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store keys and values [T, num_kv_heads, size] in `slots` int64 [T]."""

    def apply_copies(self) -> None:
        """Move what the tables ask to be moved."""

    def check(self) -> None:
        """Assert every invariant."""


class KVCache:
    """Keys and values of every layer in blocks of `block_size` slots; slot = block · block_size + offset.

    keys[layer], values[layer]: [num_blocks, num_kv_heads, block_size, size], in the cache's dtype (`ops.slots`). Slots that no row holds
    may contain anything, NaN included: nothing ever multiplies them. With `has_null_block` there is one block more, which no row ever gets:
    it takes what padding would write.
    """

    def __init__(
        self, shapes: list[LayerShape], tables: BlockTables, dtype: torch.dtype, device: torch.device, has_null_block: bool = False
    ) -> None:
        self.tables, self.device = tables, device
        self.num_blocks = tables.pool.num_blocks + has_null_block
        self.seconds = 0.0
        self.clock: Callable[[], float] = time.perf_counter

        def storage(heads: int, size: int) -> Tensor:
            return torch.empty(self.num_blocks, heads, tables.block_size, size, dtype=dtype, device=device)

        self.keys = [storage(s.num_kv_heads, s.key_size) for s in shapes]
        self.values = [storage(s.num_kv_heads, s.value_size) for s in shapes]

    @property
    def block_size(self) -> int:
        return self.tables.block_size

    @property
    def null_slots(self) -> range:
        """Those of the null block; none where there is no such block."""
        return range(self.tables.pool.num_blocks * self.block_size, self.num_blocks * self.block_size)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    @property
    def bytes_per_slot(self) -> int:
        return sum(t[0, :, 0].numel() * t.element_size() for t in (*self.keys, *self.values))

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store keys and values [T, num_kv_heads, size] in `slots` int64 [T], in the cache's dtype."""
        storages = (self.keys[layer], self.values[layer])
        key, value = (x.to(storage.dtype) for x, storage in zip((keys, values), storages, strict=True))
        devices.backend_of(key).write_slots(key, value, *storages, slots)

    def apply_copies(self) -> None:
        """Carry out the copies that the tables ask for: shared blocks before they are written (copy-on-write), accepted paths of trees.

        One after the other would do; several are read together and then written while they do not touch what an earlier one writes.
        """
        copies = self.tables.copies
        if not copies:
            return
        start = self.clock()
        while copies:
            written: set[int] = set()
            count = 0
            while count < len(copies) and written.isdisjoint(np.concatenate(copies[count]).tolist()):
                written.update(copies[count][1].tolist())
                count += 1
            sources, targets = (torch.from_numpy(np.concatenate([c[i] for c in copies[:count]])).to(self.device) for i in (0, 1))
            for storage in (*self.keys, *self.values):
                scatter_slots(storage, targets, gather_slots(storage, sources))
            del copies[:count]
        self.seconds += self.clock() - start

    def held_slots(self) -> Tensor:
        """bool [num_blocks, block_size]: slots that hold a cached token of some row; all others may contain anything."""
        held = torch.zeros(self.num_blocks * self.block_size, dtype=torch.bool)
        for row in self.tables.row_ids:
            blocks = torch.tensor(self.tables.blocks(row), dtype=torch.int64)
            slots = (blocks[:, None] * self.block_size + torch.arange(self.block_size)).flatten()
            held[slots[: self.tables.num_cached(row)]] = True
        return held.view(-1, self.block_size)

    def check(self) -> None:
        self.tables.check()
