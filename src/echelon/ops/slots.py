"""Storage of keys or values by slot. A block holds its slots head by head, [num_blocks, Hkv, block_size, D]: attention reads one head of
many slots at a time, and so finds them side by side. Slot s is place s mod block_size of block s div block_size.
"""

from __future__ import annotations

from torch import Tensor


def by_slot(storage: Tensor) -> Tensor:
    """[num_blocks, Hkv, block_size, D] → a view [num_blocks, block_size, Hkv, D]."""
    return storage.transpose(1, 2)


def gather_slots(storage: Tensor, slots: Tensor) -> Tensor:
    """slots int64 [...] → [..., Hkv, D]."""
    size = storage.shape[2]
    return by_slot(storage)[slots // size, slots % size]


def scatter_slots(storage: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [T, Hkv, D] to slots int64 [T]; no slot twice."""
    size = storage.shape[2]
    by_slot(storage)[slots // size, slots % size] = rows
