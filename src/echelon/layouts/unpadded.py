"""Concatenated rows, each with its own start in the KV cache (EMS-SD, Ni et al. 2024: unpad input tokens, unpad KV cache)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from echelon.batch import RaggedBatch, Span
from echelon.kv.blocks import BlockTables


def pack(spans: Sequence[Span], tables: BlockTables) -> RaggedBatch:
    """One batch of all spans. Blocks for every position must have been reserved."""
    counts = np.fromiter((len(s.tokens) for s in spans), np.int64, len(spans))
    starts = np.fromiter((s.start for s in spans), np.int64, len(spans))
    wanted = np.fromiter((s.num_logits for s in spans), np.int64, len(spans))
    indptr = np.zeros(len(spans) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    num_tokens = int(indptr[-1])
    rows = np.repeat(np.arange(len(spans)), counts)
    positions = np.arange(num_tokens) + np.repeat(starts - indptr[:-1], counts)
    table = tables.gather([s.row for s in spans])
    size = tables.block_size
    slots = table[rows, positions // size].astype(np.int64) * size + positions % size
    is_wanted = np.arange(num_tokens) >= np.repeat(indptr[1:] - wanted, counts)
    return RaggedBatch(
        tokens=torch.from_numpy(np.fromiter(chain.from_iterable(s.tokens for s in spans), np.int32, num_tokens)),
        positions=torch.from_numpy(positions.astype(np.int32)),
        indptr=torch.from_numpy(indptr),
        slots=torch.from_numpy(slots),
        kv_lens=torch.from_numpy((starts + counts).astype(np.int32)),
        text_lens=torch.tensor([s.text_len for s in spans], dtype=torch.int32),
        block_table=torch.from_numpy(table),
        logit_rows=torch.from_numpy(np.flatnonzero(is_wanted)),
        block_size=size,
    )
