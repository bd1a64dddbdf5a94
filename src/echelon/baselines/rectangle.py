"""The tensors behind line tables: one rectangle of lines and slots a layer."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from echelon.baselines.lines import LineTables, Move
from echelon.kv.cache import KVStorage, LayerShape


class RectangleCache(KVStorage):
    """keys[layer], values[layer]: [num_lines, num_slots, num_kv_heads, size], in the cache's dtype.

    Dead slots must be finite: the framework's masked attention gives them the weight 0 and multiplies, and 0 · NaN is NaN. So the storage
    starts as zeros, only real tokens are ever written, and what a dead slot holds is the key and value of some former token; after a token
    on which the model overflowed, `scrub` makes dead slots zeros again.
    """

    tables: LineTables

    def __init__(self, shapes: list[LayerShape], tables: LineTables, dtype: torch.dtype, device: torch.device) -> None:
        self.tables = tables
        self._are_finite = torch.ones((), dtype=torch.bool, device=device)
        super().__init__(shapes, dtype, device)

    def _allocate(self, num_heads: int, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*self.tables.positions.shape, num_heads, size, dtype=dtype, device=self.device)

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store keys and values [T, num_kv_heads, size] in `slots` int64 [T] = line · num_slots + slot, in the cache's dtype."""
        for storage, new in ((self.keys[layer], keys), (self.values[layer], values)):
            storage.flatten(0, 1).index_copy_(0, slots, new.to(storage.dtype))
            if layer == len(self.keys) - 1:  # what is no number in an earlier layer is none in this one, for hidden states add up
                self._are_finite = self._are_finite & torch.isfinite(new).all()

    def scrub(self) -> None:
        """Write zeros to all dead slots where a key or value that was written is no number: at every call while a row with such is cached.
        To be called between steps, when the device has nothing to do.
        """
        if self._are_finite:
            return
        dead = ~self.held_slots().to(self.device)
        storages = (*self.keys, *self.values)
        for storage in storages:
            storage[dead] = 0.0
        self._are_finite = torch.stack([torch.isfinite(storage).all() for storage in storages]).all()

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy keys and values of `slots` int64 [B, W] to new tensors [B, W, num_kv_heads, size]."""
        start = time.perf_counter()
        flat, shape = slots.flatten(), slots.shape
        keys, values = (s[layer].flatten(0, 1).index_select(0, flat).view(*shape, *s[layer].shape[2:]) for s in (self.keys, self.values))
        self.seconds += time.perf_counter() - start
        return keys, values

    def apply_copies(self) -> None:
        """Carry out `tables.moves`, each with one gather a tensor."""
        if not self.tables.moves:
            return
        start = self.clock()
        while self.tables.moves:
            self._apply(self.tables.moves.pop(0))
        self.seconds += self.clock() - start

    def _apply(self, move: Move) -> None:
        num_slots, width = self.tables.num_slots, move.slots.shape[1]
        sources = torch.from_numpy((move.sources[:, None] * num_slots + move.slots).ravel()).to(self.device)
        goals = move.targets[:, None] * num_slots + np.arange(move.first, move.first + width)
        targets = torch.from_numpy(goals.ravel()).to(self.device)
        for storage in (*self.keys, *self.values):
            flat = storage.flatten(0, 1)
            flat.index_copy_(0, targets, flat.index_select(0, sources))

    def held_slots(self) -> Tensor:
        """bool [num_lines, num_slots]: slots that hold a cached token of some row; all others are dead."""
        return torch.from_numpy(self.tables.positions >= 0)

    def check(self) -> None:
        super().check()
        assert not self.tables.moves, "a move was never carried out"
