"""The tensors behind the block tables."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.kv.blocks import BlockTables


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer stores per token: keys [num_kv_heads, key_size], values [num_kv_heads, value_size]."""

    num_kv_heads: int
    key_size: int
    value_size: int

    @property
    def num_entries(self) -> int:
        return self.num_kv_heads * (self.key_size + self.value_size)


class KVCache:
    """Keys and values of every layer in blocks of `block_size` slots; slot = block · block_size + offset.

    keys[layer], values[layer]: [num_blocks · block_size, num_kv_heads, size], in the cache's dtype. Slots that no row holds may
    contain anything, NaN included: nothing ever multiplies them.
    """

    def __init__(self, shapes: list[LayerShape], tables: BlockTables, dtype: torch.dtype, device: torch.device) -> None:
        self.tables = tables
        self.seconds = 0.0  # spent moving keys and values about
        num_slots = tables.pool.num_blocks * tables.block_size

        def storage(heads: int, size: int) -> Tensor:
            return torch.empty(num_slots, heads, size, dtype=dtype, device=device)

        self.keys = [storage(s.num_kv_heads, s.key_size) for s in shapes]
        self.values = [storage(s.num_kv_heads, s.value_size) for s in shapes]

    @property
    def block_size(self) -> int:
        return self.tables.block_size

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    @property
    def bytes_per_slot(self) -> int:
        return sum(t[0].numel() * t.element_size() for t in (*self.keys, *self.values))

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store keys and values [T, num_kv_heads, size] in `slots` int64 [T], in the cache's dtype."""
        self.keys[layer].index_copy_(0, slots, keys.to(self.keys[layer].dtype))
        self.values[layer].index_copy_(0, slots, values.to(self.values[layer].dtype))

    def apply_copies(self) -> None:
        """Carry out the block copies that reservations asked for (copy-on-write)."""
        start = time.perf_counter()
        while self.tables.copies:
            source, target = self.tables.copies.pop(0)
            size = self.block_size
            for storage in (*self.keys, *self.values):
                storage[target * size : (target + 1) * size] = storage[source * size : (source + 1) * size]
        self.seconds += time.perf_counter() - start

    def held_slots(self) -> Tensor:
        """bool [num_slots]: slots that hold a cached token of some row; all others may contain anything."""
        held = torch.zeros(self.tables.pool.num_blocks * self.block_size, dtype=torch.bool)
        for row in self.tables.row_ids:
            blocks = torch.tensor(self.tables.blocks(row), dtype=torch.int64)
            slots = (blocks[:, None] * self.block_size + torch.arange(self.block_size)).flatten()
            held[slots[: self.tables.num_cached(row)]] = True
        return held

    def check(self) -> None:
        self.tables.check()
        assert not self.tables.copies, "a block copy was reserved and never carried out"
