"""The definition of ragged attention against a few lines of float64, with NaN in every slot it must not touch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from echelon import ops
from echelon.batch import RaggedBatch, Span
from echelon.kv.blocks import BlockTables
from echelon.layouts import unpadded

CASES = {
    "plain": {},
    "window": {"window": 37},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.linspace(-1, 1, 6)},
    "window, softcap and sinks": {"window": 5, "softcap": 3.0, "sinks": torch.linspace(-2, 2, 6)},
}


def naive(query: Tensor, key: Tensor, value: Tensor, position: int, scale: float, **options: object) -> Tensor:
    """One query [H, D] over keys and values [L, Hkv, D] in float64."""
    window, softcap, sinks = options.get("window"), options.get("softcap"), options.get("sinks")
    first = max(0, position - int(window) + 1) if isinstance(window, int) else 0
    group = query.shape[0] // key.shape[1]
    k = key[first : position + 1].double().repeat_interleave(group, 1)
    v = value[first : position + 1].double().repeat_interleave(group, 1)
    scores = torch.einsum("hd,lhd->hl", query.double(), k) * scale
    if isinstance(softcap, float):
        scores = torch.tanh(scores / softcap) * softcap
    if isinstance(sinks, Tensor):
        weights = torch.cat([scores, sinks.double()[:, None]], 1).softmax(1)[:, :-1]
    else:
        weights = scores.softmax(1)
    return torch.einsum("hl,lhd->hd", weights, v)


def random_batch(rng: np.random.Generator, num_rows: int, block_size: int) -> tuple[RaggedBatch, BlockTables]:
    tables = BlockTables(1400, block_size, 300)
    spans = []
    for row in range(num_rows):
        start, count = int(rng.integers(0, 200)), int(rng.integers(1, 20))
        assert tables.reserve(row, start + count)
        spans.append(Span(row, start, [0] * count, 1, start + count))
    return unpadded.pack(spans, tables), tables


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_matches_the_naive_form(case: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    options = CASES[case]
    heads, kv_heads, size, block = 6, (1, 2, 3, 6)[seed], 16, (1, 4, 8, 16)[seed]
    batch, tables = random_batch(rng, 6, block)
    keys = torch.full((1400 * block, kv_heads, size), torch.nan)
    values = keys.clone()
    query = torch.randn(batch.num_tokens, heads, size)
    for row in range(6):
        blocks = torch.tensor(tables.blocks(row))
        slots = (blocks[:, None] * block + torch.arange(block)).flatten()[: int(batch.kv_lens[row])]
        keys[slots], values[slots] = torch.randn(len(slots), kv_heads, size), torch.randn(len(slots), kv_heads, size)
    got = ops.ragged_attention(query, keys, values, batch, 0.25, **options)
    for row in range(6):
        blocks = torch.tensor(tables.blocks(row))
        slots = (blocks[:, None] * block + torch.arange(block)).flatten()[: int(batch.kv_lens[row])]
        alone_keys, alone_values = torch.full_like(keys, torch.nan), torch.full_like(values, torch.nan)
        alone_keys[slots], alone_values[slots] = keys[slots], values[slots]
        neighbours_gone = ops.ragged_attention(query, alone_keys, alone_values, batch, 0.25, **options)
        for token in range(int(batch.indptr[row]), int(batch.indptr[row + 1])):
            expected = naive(query[token], keys[slots], values[slots], int(batch.positions[token]), 0.25, **options)
            assert torch.allclose(expected.float(), got[token], rtol=1e-5, atol=1e-5)
            assert torch.equal(neighbours_gone[token], got[token])
