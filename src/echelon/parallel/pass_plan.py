"""What all ranks are told of a pass: one packed message, numbered and hashed, without pickles.

    hash     of all that follows, 8 bytes, little-endian as the header is
    header   mark, format, flags; number of the plan, hash of the one before it; counts, from which the length of each array follows
    arrays   one after the other, in the byte order that all ranks have: int64 in the order of `_LONG`, then int32 in that of `_SHORT`

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
MOST_KEPT, MOST_KEPT_BYTES = 128, 1 << 16  # a reader keeps at most so many memories, each of at most so many bytes

Copies = list[tuple[NDArray[np.int64], NDArray[np.int64]]]  # (from, to) slots, in order, as `BlockTables.copies`


@dataclass(frozen=True)
class PassPlan:
    """A batch and the copies of keys and values that go before it; `number` counts from 1. `ends`: where the rows of the batch are cut into
    micro-batches, for stages: the row after the last of each. The batch and the copies lie in memory that the next plan may overwrite.
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
        """The message for the next pass. Tensors of the batch and the slots of `copies` go as they are: contiguous, of the dtypes that
        `RaggedBatch` and `Copies` name.
        """
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


def _sizes(has_trees: bool, counts: Sequence[int]) -> list[tuple[str, Any, int]]:
    """Name, dtype and length of each array of a message."""
    num_tokens, num_rows, num_logits, width, _, num_nodes, num_copies, num_copied, num_ends = counts
    long = (num_tokens, num_logits, num_copies, num_copied, num_copied, num_ends)
    short = (num_tokens, num_tokens, num_rows + 1, num_rows + 1, num_rows, num_rows, num_rows, num_rows * width)
    trees = (num_nodes, num_rows + 1) if has_trees else ()
    names, sizes = (*_LONG, *_SHORT, *_TREES[: len(trees)]), (*long, *short, *trees)
    return [(name, np.int64 if name in _LONG else np.int32, size) for name, size in zip(names, sizes, strict=True)]


class _PlanMemory:
    """Arrays and the batch's tensors in one piece of memory, for plans of equal counts."""

    def __init__(self, has_trees: bool, counts: Sequence[int], num_bytes: int) -> None:
        self.bytes, self.block_size = np.empty(num_bytes, np.uint8), counts[4]
        self.arrays: dict[str, NDArray[Any]] = {}
        end = 0
        for name, dtype, size in _sizes(has_trees, counts):
            start, end = end, end + np.dtype(dtype).itemsize * size
            self.arrays[name] = self.bytes[start:end].view(dtype)
        self.arrays["block_table"] = self.arrays["block_table"].reshape(counts[1], counts[3])
        names = (*_LONG[:2], *_SHORT, *(_TREES if has_trees else ()))
        self._tensors: dict[str, Any] = {name: torch.from_numpy(self.arrays[name]) for name in names}

    def batch(self) -> RaggedBatch:
        """What the memory holds now."""
        return RaggedBatch(block_size=self.block_size, **self._tensors)

    def copies(self) -> Copies:
        """Slots of all copies, each cut behind the copies' ends."""
        ends, *moved = (self.arrays[name] for name in ("copy_ends", "sources", "targets"))
        return list(zip(*(np.split(slots, ends[:-1]) for slots in moved), strict=True)) if len(ends) else []


class PlanReader:
    """Reads what a worker gets, in order. It keeps the memory of plans, and reads the next of equal counts into it."""

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
        mark, form, flags, number, before, *counts = _HEADER.unpack_from(message, HASH_BYTES)
        if (mark, form, number, before) != (MARK, FORMAT, self.number + 1, self.hash):
            raise RankError(f"plan {number} does not follow plan {self.number}")
        digest = hashlib.blake2b(memoryview(message)[HASH_BYTES:], digest_size=HASH_BYTES).digest()
        if not message.startswith(digest):
            raise RankError(f"plan {number} is damaged: it has another hash than it says")
        memory = self._memory_for(bool(flags & HAS_TREES), tuple(counts), len(message) - _START)
        memory.bytes[:] = np.frombuffer(message, np.uint8, offset=_START)
        self.number, self.hash = number, int.from_bytes(digest, "little")
        return PassPlan(number, self.hash, memory.batch(), memory.copies(), memory.arrays["ends"].tolist())

    def _memory_for(self, has_trees: bool, counts: tuple[int, ...], num_bytes: int) -> _PlanMemory:
        memory = self._kept.get((has_trees, *counts))
        said = len(memory.bytes) if memory else sum(np.dtype(dtype).itemsize * size for _, dtype, size in _sizes(has_trees, counts))
        if num_bytes != said:
            raise RankError(f"a plan holds {num_bytes} bytes of numbers, and its header says {said}")
        if memory is None:
            memory = _PlanMemory(has_trees, counts, num_bytes)
            if num_bytes <= MOST_KEPT_BYTES:
                if len(self._kept) == MOST_KEPT:
                    self._kept.clear()
                self._kept[has_trees, *counts] = memory
        return memory
