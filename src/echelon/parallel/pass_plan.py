"""What all ranks are told of a pass: one packed message, numbered and hashed, without pickles.

    hash     of all that follows, 8 bytes
    header   mark, format, flags; number of the plan, hash of the one before it; how long each array is
    arrays   one after the other, in the machine's byte order: int64 in the order of `_LONG`, then int32 in that of `_SHORT`

As the hash of the plan before it is hashed too, a rank that has missed a plan, or got another, cannot go on.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from echelon.batch import RaggedBatch
from echelon.errors import RankError

MARK, FORMAT, HAS_TREES = b"ECHP", 3, 1
HASH_BYTES = 8
_HEADER = struct.Struct("<4sHHQQ9I")
_START = HASH_BYTES + _HEADER.size  # of the arrays
_LONG = ("slots", "logit_rows", "copy_ends", "sources", "targets", "ends")  # the last four are not the batch's
_SHORT = ("tokens", "positions", "logit_indptr", "indptr", "kv_lens", "text_lens", "prompt_lens", "block_table")
_TREES = ("parents", "node_indptr")
MOST_KEPT, MOST_KEPT_BYTES = 128, 1 << 16  # plans' memory that a reader keeps, and of how large ones

Copies = list[tuple[NDArray[np.int64], NDArray[np.int64]]]  # (from, to) slots, in order, as `BlockTables.copies`


@dataclass(frozen=True)
class PassPlan:
    """A batch and the copies of keys and values that go before it; `number` counts from 1. `ends`: where the rows of the batch are cut into
    micro-batches, for stages: the row after the last of each.
    """

    number: int
    hash: int
    batch: RaggedBatch
    copies: Copies
    ends: list[int]


class PlanWriter:
    """Numbers and hashes what rank 0 sends."""

    def __init__(self) -> None:
        self.number = self.hash = 0

    def packed(self, batch: RaggedBatch, copies: Copies, ends: Sequence[int] = ()) -> bytes:
        """The message for the next pass."""
        self.number += 1
        has_trees = batch.parents is not None
        moved = [np.cumsum([len(sources) for sources, _ in copies]), *map(np.concatenate, zip(*copies, strict=True))] if copies else []
        arrays: list[Any] = [batch.slots.numpy(), batch.logit_rows.numpy(), *moved, np.asarray(ends, np.int64)]
        arrays += [getattr(batch, name).numpy() for name in (_SHORT + _TREES if has_trees else _SHORT)]
        counts = (batch.num_tokens, batch.num_rows, len(batch.logit_rows), batch.block_table.shape[1], batch.block_size)
        lengths = (*counts, len(arrays[-2]) if has_trees else 0, len(copies), len(moved[1]) if copies else 0, len(ends))
        header = _HEADER.pack(MARK, FORMAT, HAS_TREES if has_trees else 0, self.number, self.hash, *lengths)
        hashed = header + b"".join(arrays)
        digest = hashlib.blake2b(hashed, digest_size=HASH_BYTES).digest()
        self.hash = int.from_bytes(digest, "little")
        return digest + hashed


class _PlanMemory:
    """Arrays and the batch's tensors in one piece of memory, for plans whose arrays are equally long."""

    def __init__(self, lengths: Sequence[int], has_trees: bool) -> None:
        num_tokens, num_rows, num_logits, width, self.block_size, num_nodes, self.num_copies, num_copied, num_ends = lengths
        long = zip(_LONG, (num_tokens, num_logits, self.num_copies, num_copied, num_copied, num_ends), strict=True)
        per_row = (num_rows + 1, num_rows + 1, num_rows, num_rows, num_rows, num_rows * width)
        short = zip(_SHORT + _TREES, (num_tokens, num_tokens, *per_row, num_nodes, num_rows + 1 if has_trees else 0), strict=True)
        sizes = [(name, np.int64, size) for name, size in long] + [(name, np.int32, size) for name, size in short]
        self.bytes = np.empty(sum(np.dtype(dtype).itemsize * size for _, dtype, size in sizes), np.uint8)
        self.arrays: dict[str, NDArray[Any]] = {}
        end = 0
        for name, dtype, size in sizes:
            start, end = end, end + np.dtype(dtype).itemsize * size
            self.arrays[name] = self.bytes[start:end].view(dtype)
        self.arrays["block_table"] = self.arrays["block_table"].reshape(num_rows, width)
        names = (*_LONG[:2], *_SHORT, *(_TREES if has_trees else ()))
        self._tensors: dict[str, Any] = {name: torch.from_numpy(self.arrays[name]) for name in names}

    def batch(self) -> RaggedBatch:
        """What the memory holds now; the next plan of these lengths overwrites it."""
        return RaggedBatch(block_size=self.block_size, **self._tensors)

    def copies(self) -> Copies:
        """Slots of all copies, in memory of their own."""
        if not self.num_copies:
            return []
        ends, *moved = (self.arrays[name] for name in ("copy_ends", "sources", "targets"))
        return list(zip(*(np.split(slots.copy(), ends[:-1]) for slots in moved), strict=True))


class PlanReader:
    """Reads what a worker gets, in order. A plan's batch is good until the next is read: their memory is kept, and used again."""

    def __init__(self) -> None:
        self.number = self.hash = 0
        self._kept: dict[tuple[int, ...], _PlanMemory] = {}

    def read(self, message: bytes) -> PassPlan:
        """The next plan.

        Raises
        ------
        RankError  it is not the one that follows, or is damaged
        """
        if len(message) < _START:
            raise RankError(f"a plan of {len(message)} bytes is shorter than its header")
        mark, form, flags, number, before, *lengths = _HEADER.unpack_from(message, HASH_BYTES)
        if (mark, form, number, before) != (MARK, FORMAT, self.number + 1, self.hash):
            raise RankError(f"plan {number} does not follow plan {self.number}")
        digest = hashlib.blake2b(memoryview(message)[HASH_BYTES:], digest_size=HASH_BYTES).digest()
        if not message.startswith(digest):
            raise RankError(f"plan {number} is damaged: it has another hash than it says")
        memory = self._memory_for((flags, *lengths), len(message) - _START)
        memory.bytes[:] = np.frombuffer(message, np.uint8, offset=_START)
        self.number, self.hash = number, int.from_bytes(digest, "little")
        return PassPlan(number, self.hash, memory.batch(), memory.copies(), memory.arrays["ends"].tolist())

    def _memory_for(self, key: tuple[int, ...], num_bytes: int) -> _PlanMemory:
        """For a plan of these flags and lengths."""
        memory = self._kept.get(key)
        if memory is None:
            memory = _PlanMemory(key[1:], bool(key[0] & HAS_TREES))
            if len(memory.bytes) != num_bytes:
                raise RankError(f"a plan holds {num_bytes} bytes of numbers, and its header says {len(memory.bytes)}")
            if len(self._kept) == MOST_KEPT:
                self._kept.clear()
            if num_bytes <= MOST_KEPT_BYTES:
                self._kept[key] = memory
        return memory
