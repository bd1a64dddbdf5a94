"""What one forward pass eats.

Legend used everywhere: B rows, T packed tokens, N draft nodes, R rows of logits, V vocabulary, H query heads, G query heads per
key/value head, D head size, L layers. Row offsets are `indptr`: B + 1 entries, the first 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """New tokens of one row: they take positions `start`, `start + 1`, …; the last `num_logits` of them want logits.

    `text_len` counts the row's known tokens, whatever of them is fed now.
    """

    row: int
    start: int
    tokens: Sequence[int]
    num_logits: int
    text_len: int


@dataclass(frozen=True)
class RaggedBatch:
    """Packed new tokens of B rows; row i owns tokens `indptr[i]:indptr[i + 1]`. Nothing is padded.

    tokens      int32[T]
    positions   int32[T]    absolute, from the start of each row's own text
    indptr      int32[B+1]
    slots       int64[T]    KV slot that token t's key and value are written to
    kv_lens     int32[B]    tokens of the row that have keys and values once this batch is written
    text_lens   int32[B]    known tokens of the row's text, fed or not, drafts left out
    block_table int32[B, M] the row's KV blocks in order; entries past its own are arbitrary
    logit_rows  int64[R]    packed tokens whose logits are wanted, in order
    plans       what attention has worked out about this batch, shared by all layers
    """

    tokens: Tensor
    positions: Tensor
    indptr: Tensor
    slots: Tensor
    kv_lens: Tensor
    text_lens: Tensor
    block_table: Tensor
    logit_rows: Tensor
    block_size: int
    plans: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_rows(self) -> int:
        return len(self.kv_lens)

    def check(self) -> None:
        """The invariants of a chain batch: positions count up inside a row and end at its length."""
        starts, ends = self.indptr[:-1].long(), self.indptr[1:].long()
        counts = ends - starts
        assert self.indptr[0] == 0 and self.indptr[-1] == self.num_tokens and bool((counts > 0).all())
        expected = torch.repeat_interleave(self.kv_lens.long() - ends, counts) + torch.arange(self.num_tokens)
        assert torch.equal(self.positions.long(), expected)
        assert len(set(self.slots.tolist())) == self.num_tokens, "two tokens share a slot"
