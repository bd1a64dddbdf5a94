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

from echelon.draft import node_depths


@dataclass(frozen=True)
class Span:
    """New tokens of one row: they take positions `start`, `start + 1`, …; the last `num_logits` of them want logits.

    `text_len` counts the row's known tokens, whatever of them is fed now; the last `num_drafted` tokens fed may be taken back. With
    `parents`, as in `Draft`, these are a tree: each takes the position after its parent's. Nodes that were fed in earlier passes, and are
    cached but not known, come first in `parents`; `start` counts them. `prompt_len` of the known tokens were given, not generated.
    """

    row: int
    start: int
    tokens: Sequence[int]
    num_logits: int
    text_len: int
    num_drafted: int = 0
    parents: Sequence[int] | None = None
    prompt_len: int = 0


@dataclass(frozen=True)
class PassInputs:
    """What a model is fed, in the batch of any strategy.

    tokens       int32[T]
    positions    int32[T]    absolute, from the start of each row's own text
    logit_rows   int64[R]    tokens whose logits are wanted, in order
    logit_indptr int32[B+1]  row i owns the rows of logits `logit_indptr[i]:logit_indptr[i + 1]`
    """

    tokens: Tensor
    positions: Tensor
    logit_rows: Tensor
    logit_indptr: Tensor

    @property
    def num_tokens(self) -> int:
        """T, without padding."""
        return len(self.tokens)


@dataclass(frozen=True)
class RaggedBatch(PassInputs):
    """Packed new tokens of B rows; row i owns tokens `indptr[i]:indptr[i + 1]`. Nothing is padded.

    indptr      int32[B+1]
    slots       int64[T]    KV slot that token t's key and value are written to
    kv_lens     int32[B]    tokens of the row that have keys and values once this batch is written
    text_lens   int32[B]    known tokens of the row's text, fed or not, drafts left out
    prompt_lens int32[B]    those of them that were given, not generated
    block_table int32[B, M] the row's KV blocks in order; entries past its own are arbitrary
    parents     int32[P]    in trees, the parent of every drafted node of a row, cached before or new, among them; −1: the last known
                            token. Node j of a row has place text_len + j in it. None: in every row the next follows the last
    node_indptr int32[B+1]  which of them are each row's, with `parents`; a chain may have none
    plans       what attention has worked out about this batch, shared by all layers
    """

    indptr: Tensor
    slots: Tensor
    kv_lens: Tensor
    text_lens: Tensor
    prompt_lens: Tensor
    block_table: Tensor
    block_size: int
    parents: Tensor | None = None
    node_indptr: Tensor | None = None
    plans: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """B"""
        return len(self.kv_lens)

    @property
    def text_len_of(self) -> Tensor:
        """int32[T]: known tokens of the text that each token belongs to."""
        return self.text_lens.repeat_interleave(self.indptr.diff().long())

    @property
    def prompt_len_of(self) -> Tensor:
        """int32[T]: given tokens of the text that each token belongs to."""
        return self.prompt_lens.repeat_interleave(self.indptr.diff().long())

    def row_parents(self) -> list[list[int]]:
        """Of every row, the parents of its nodes; nothing where all rows are chains."""
        if self.parents is None or self.node_indptr is None:
            return []
        return [nodes.tolist() for nodes in self.parents.tensor_split(self.node_indptr[1:-1].long())]

    def rows(self, first: int, last: int) -> RaggedBatch:
        """Rows first … last − 1 as a batch of their own, without logits."""
        begin, end = self.indptr[[first, last]].tolist()
        trees: dict[str, Any] = {}
        if self.parents is not None and self.node_indptr is not None:
            nodes = self.node_indptr[first : last + 1]
            trees = {"parents": self.parents[nodes[0] : nodes[-1]], "node_indptr": nodes - nodes[0]}
        return RaggedBatch(
            tokens=self.tokens[begin:end],
            positions=self.positions[begin:end],
            logit_rows=self.logit_rows[:0],
            logit_indptr=torch.zeros(last - first + 1, dtype=torch.int32),
            indptr=self.indptr[first : last + 1] - begin,
            slots=self.slots[begin:end],
            kv_lens=self.kv_lens[first:last],
            text_lens=self.text_lens[first:last],
            prompt_lens=self.prompt_lens[first:last],
            block_table=self.block_table[first:last],
            block_size=self.block_size,
            **trees,
        )

    def check(self) -> None:
        """In a row positions count up to its length; in a tree, from each token's parent."""
        starts, ends = self.indptr[:-1].long(), self.indptr[1:].long()
        counts = ends - starts
        assert self.indptr[0] == 0 and self.indptr[-1] == self.num_tokens and bool((counts > 0).all())
        expected = torch.repeat_interleave(self.kv_lens.long() - ends, counts) + torch.arange(self.num_tokens)
        for row, nodes in enumerate(self.row_parents()):
            depths = node_depths(nodes)
            assert all(-1 <= parent < node for node, parent in enumerate(nodes)), "a child stands before its parent"
            num_new = min(len(nodes), int(counts[row]))
            expected[ends[row] - num_new : ends[row]] = self.text_lens[row] + torch.tensor(depths[len(nodes) - num_new :])
        assert torch.equal(self.positions.long(), expected)
        assert len(set(self.slots.tolist())) == self.num_tokens, "two tokens share a slot"
