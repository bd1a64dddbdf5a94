"""What all ranks are told of a pass: one packed message, numbered and hashed, without pickles.

    header   little-endian: mark, format, flags; number and hash of the plan, hash of the one before it; how long each array is
    arrays   int32, one after the other, in the order of `_ARRAYS`

The hash is over the message without its own field, the hash of the plan before it included: a rank that has missed a plan, or got another,
cannot go on.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from echelon.batch import RaggedBatch
from echelon.errors import RankError

MARK, FORMAT, HAS_TREES = b"ECHP", 2, 1
_HEADER = struct.Struct("<4sHHQQQ9I")
_HASH_AT = 16  # bytes before the plan's own hash
_ARRAYS = ("tokens", "positions", "slots", "logit_rows", "logit_indptr", "indptr", "kv_lens", "text_lens", "prompt_lens", "block_table")
_TREES = ("parents", "node_indptr")
_LONG = ("slots", "logit_rows")  # int64 in a batch

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
        nodes = [] if batch.parents is None or batch.node_indptr is None else [batch.parents, batch.node_indptr]
        moved = [np.cumsum([len(sources) for sources, _ in copies]), *map(np.concatenate, zip(*copies, strict=True))] if copies else []
        arrays = [getattr(batch, name).numpy() for name in _ARRAYS] + [n.numpy() for n in nodes] + moved
        body = b"".join([a.astype("<i4", copy=False).tobytes() for a in arrays]) + struct.pack(f"<{len(ends)}i", *ends)
        counts = (batch.num_tokens, batch.num_rows, len(batch.logit_rows), batch.block_table.shape[1], batch.block_size)
        lengths = (*counts, len(nodes[0]) if nodes else 0, len(copies), len(moved[1]) if copies else 0, len(ends))
        head = (MARK, FORMAT, HAS_TREES if nodes else 0, self.number)
        before, self.hash = self.hash, _hash_of(_HEADER.pack(*head, 0, self.hash, *lengths), body)
        return _HEADER.pack(*head, self.hash, before, *lengths) + body


class PlanReader:
    """Reads what a worker gets, in order."""

    def __init__(self) -> None:
        self.number = self.hash = 0

    def read(self, message: bytes) -> PassPlan:
        """The next plan.

        Raises
        ------
        RankError  it is not the one that follows, or is damaged
        """
        if len(message) < _HEADER.size:
            raise RankError(f"a plan of {len(message)} bytes is shorter than its header")
        mark, form, flags, number, own, before, *lengths = _HEADER.unpack_from(message)
        blank = message[:_HASH_AT] + bytes(8) + message[_HASH_AT + 8 : _HEADER.size]
        if (mark, form, number, before) != (MARK, FORMAT, self.number + 1, self.hash):
            raise RankError(f"plan {number} does not follow plan {self.number}")
        if _hash_of(blank, message[_HEADER.size :]) != own:
            raise RankError(f"plan {number} is damaged: it has another hash than it says")
        self.number, self.hash = number, own
        return PassPlan(number, own, *_unpacked(message[_HEADER.size :], lengths, bool(flags & HAS_TREES)))


def _hash_of(*parts: bytes) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


def _unpacked(body: bytes, lengths: Sequence[int], has_trees: bool) -> tuple[RaggedBatch, Copies, list[int]]:
    num_tokens, num_rows, num_logits, width, block_size, num_nodes, num_copies, num_copied, num_ends = lengths
    sizes = [num_tokens, num_tokens, num_tokens, num_logits, num_rows + 1, num_rows + 1, num_rows, num_rows, num_rows, num_rows * width]
    sizes += [num_nodes, num_rows + 1] if has_trees else []
    sizes += [num_copies, num_copied, num_copied, num_ends]
    whole = np.frombuffer(body, "<i4").astype(np.int32)
    if len(whole) != sum(sizes):
        raise RankError(f"a plan holds {len(whole)} numbers, and its header says {sum(sizes)}")
    *pieces, copy_ends, sources, targets, ends = (whole[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True))
    arrays: dict[str, Any] = dict(zip((*_ARRAYS, *_TREES), pieces, strict=False))
    arrays |= {name: arrays[name].astype(np.int64) for name in _LONG} | {"block_table": arrays["block_table"].reshape(num_rows, width)}
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    copies = _divided(copy_ends, sources, targets) if num_copies else []
    return RaggedBatch(block_size=block_size, **tensors), copies, ends.tolist()


def _divided(ends: NDArray[np.int32], sources: NDArray[np.int32], targets: NDArray[np.int32]) -> Copies:
    """Slots of all copies, each cut behind the copies' ends."""
    return list(zip(*(np.split(slots.astype(np.int64), ends[:-1]) for slots in (sources, targets)), strict=True))
