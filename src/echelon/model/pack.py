"""Concatenated rows, each with its own start in the KV cache (EMS-SD, Ni et al. 2024: unpad input tokens, unpad KV cache)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from echelon.batch import RaggedBatch, Span
from echelon.draft import Int32, Int64, indptr_of, node_depths
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache
from echelon.stats import Occupancy


def pack(spans: Sequence[Span], tables: BlockTables) -> RaggedBatch:
    """Pack all spans into one batch. Blocks for every position must have been reserved."""
    counts = np.fromiter((len(s.tokens) for s in spans), np.int64, len(spans))
    starts = np.fromiter((s.start for s in spans), np.int64, len(spans))
    wanted = np.fromiter((s.num_logits for s in spans), np.int64, len(spans))
    indptr = indptr_of(counts)
    num_tokens = int(indptr[-1])
    rows = np.repeat(np.arange(len(spans)), counts)
    in_chain = np.arange(num_tokens) + np.repeat(starts - indptr[:-1], counts)
    positions, parents, node_indptr = grow_trees(spans, indptr, in_chain)
    table = tables.gather([s.row for s in spans])
    size = tables.block_size
    slots = table[rows, in_chain // size].astype(np.int64) * size + in_chain % size
    is_wanted = np.arange(num_tokens) >= np.repeat(indptr[1:] - wanted, counts)
    return RaggedBatch(
        tokens=torch.from_numpy(np.fromiter(chain.from_iterable(s.tokens for s in spans), np.int32, num_tokens)),
        positions=torch.from_numpy(positions.astype(np.int32)),
        indptr=torch.from_numpy(indptr),
        slots=torch.from_numpy(slots),
        kv_lens=torch.from_numpy((starts + counts).astype(np.int32)),
        text_lens=torch.from_numpy(np.fromiter((s.text_len for s in spans), np.int32, len(spans))),
        prompt_lens=torch.from_numpy(np.fromiter((s.prompt_len for s in spans), np.int32, len(spans))),
        block_table=torch.from_numpy(table),
        logit_rows=torch.from_numpy(np.flatnonzero(is_wanted)),
        logit_indptr=torch.from_numpy(indptr_of(wanted)),
        block_size=size,
        parents=parents,
        node_indptr=node_indptr,
    )


def occupancy(batch: RaggedBatch, cache: KVCache) -> Occupancy:
    """Count what a pass over `batch` holds and loads."""
    pool, num_live = cache.tables.pool, int(batch.kv_lens.numpy().sum())
    index_bytes = sum(t.nbytes for t in (batch.indptr, batch.slots, batch.kv_lens, batch.block_table))
    return Occupancy(batch.num_tokens, (pool.num_blocks - pool.num_free) * cache.block_size, num_live, num_live, index_bytes)


def grow_trees(spans: Sequence[Span], indptr: Int32, in_chain: Int64) -> tuple[Int64, Tensor | None, Tensor | None]:
    """Compute int64[T] positions, int32[P] parents, int32[B+1] their rows; `in_chain` int64[T] is what positions would be in chains."""
    if all(s.parents is None for s in spans):
        return in_chain, None, None
    positions, node_indptr = in_chain.copy(), np.zeros(len(spans) + 1, np.int32)
    for i, (span, end) in enumerate(zip(spans, indptr[1:].tolist(), strict=True)):
        nodes = span.parents or ()
        node_indptr[i + 1] = node_indptr[i] + len(nodes)
        depths = node_depths(nodes)[len(nodes) - span.num_drafted :]
        positions[end - len(depths) : end] = span.text_len + np.asarray(depths, np.int64)
    parents = np.fromiter(chain.from_iterable(s.parents or () for s in spans), np.int32, int(node_indptr[-1]))
    return positions, torch.from_numpy(parents), torch.from_numpy(node_indptr)
