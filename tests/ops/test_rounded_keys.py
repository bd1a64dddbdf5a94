"""Keys and values of 8 bits: what is written, and attention that reads them, by every family of instructions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_attention import filled, random_batch, random_tree
from torch import Tensor

from echelon.batch import Span
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import SCALE_BYTES, KVCache, LayerShape
from echelon.model import pack as unpadded
from echelon.ops import compiled, cpu
from echelon.ops.slots import by_slot

pytestmark = pytest.mark.skipif(not compiled.is_built(), reason="the compiled kernels are not built")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of [..., D], and scales [...], by definition; NaN for what is not finite."""
    largest = x.float().abs().amax(-1)
    inverse = torch.full_like(largest, 127) / largest  # a number over a tensor would be a product
    is_number = largest.isfinite() & (largest > 0)
    values = torch.where(is_number[..., None], (x.float() * inverse[..., None]).round(), 0.0)
    return values.to(torch.int8), torch.where(largest.isfinite(), largest / 127, torch.nan)


def parts(storage: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [..., D + 4] → integers [..., D] and scales float32 [...]."""
    return storage[..., :-SCALE_BYTES], storage[..., -SCALE_BYTES:].contiguous().view(torch.float32)[..., 0]


def as_numbers(storage: Tensor) -> Tensor:
    values, scales = parts(storage)
    return values.float() * scales[..., None]


def as_integers(numbers: Tensor) -> Tensor:
    """[blocks, H, block_size, D] in the layout of a rounded cache; bytes that make NaN of a scale where there is NaN."""
    values, scales = rounded(numbers)
    out = torch.full((*numbers.shape[:-1], numbers.shape[-1] + SCALE_BYTES), -1, dtype=torch.int8)
    is_there = scales.isfinite()
    out[..., :-SCALE_BYTES][is_there] = values[is_there]
    out[..., -SCALE_BYTES:][is_there] = scales[..., None].contiguous().view(torch.int8)[is_there]
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 64, 128, 129])
def test_what_is_written_is_each_heads_own_rounding(size: int, dtype: torch.dtype, family: str) -> None:
    tables = BlockTables(6, 8, 6)
    cache = KVCache([LayerShape(3, size, size + 2)], tables, dtype, torch.device("cpu"), is_rounded=True)
    generator = torch.Generator().manual_seed(size)
    keys, values = (torch.randn(20, 3, n, generator=generator).to(dtype) for n in (size, size + 2))
    keys[3, 1], keys[4, 2, -1], values[5, 0, 0] = 0, torch.nan, torch.inf
    slots = torch.randperm(48, generator=generator)[:20]
    for storage in (*cache.keys, *cache.values):
        storage.fill_(77)
    cache.write(0, keys, values, slots)
    for storage, given in ((cache.keys[0], keys), (cache.values[0], values)):
        integers, scales = parts(by_slot(storage)[slots // 8, slots % 8])
        expected, expected_scales = rounded(given)
        assert torch.equal(integers, expected)
        assert torch.equal(scales.nan_to_num(-1.0), expected_scales.nan_to_num(-1.0))
        untouched = torch.ones(48, dtype=torch.bool).index_fill(0, slots, False)
        assert bool((by_slot(storage).flatten(0, 1)[untouched] == 77).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_is_that_over_the_numbers_they_stand_for(dtype: torch.dtype, family: str) -> None:
    """Bit for bit as in float32, where the family has no products of pairs; chains and trees, windows, caps, sinks, odd heads."""
    rng = np.random.default_rng(3)
    for case in range(60):
        sizes = [(64, 64), (128, 64), (40, 24), (17, 33)][case % 4]
        kv_heads, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 5, 16]))
        batch, tables = random_batch(rng, 3, int(rng.integers(1, 20)))
        if case % 2:
            tables, spans = BlockTables(1400, 16, 300), []
            for row, text in enumerate((600, 65, 5)):
                tree = random_tree(rng, int(rng.integers(1, 12)))
                assert tables.reserve(row, text + len(tree))
                spans.append(Span(row, text - 1, [0] * (1 + len(tree)), 1, text, len(tree), tree))
            batch = unpadded.pack(spans, tables)
        storages = [as_integers(_blocks(s, tables.block_size)) for s in filled(tables, 3, kv_heads, sizes, torch.float32)]
        numbers = [as_numbers(s) for s in storages]
        query = torch.randn(batch.num_tokens, group * kv_heads, sizes[0], generator=torch.Generator().manual_seed(case)).to(dtype)
        options = (0.2, int(rng.integers(1, 90)) if case % 3 == 0 else None, 3.0 if case % 5 == 0 else None)
        sinks = torch.linspace(-1, 1, group * kv_heads) if case % 7 == 0 else None
        expected = cpu.ragged_attention(query.float(), *numbers, batch, *options, sinks).to(dtype)
        assert torch.equal(cpu.ragged_attention(query, *storages, batch, *options, sinks), expected), case


def _blocks(storage: Tensor, block_size: int) -> Tensor:
    """[slots, H, D] → [blocks, H, block_size, D]."""
    return storage.unflatten(0, (-1, block_size)).transpose(1, 2).contiguous()


def test_what_does_not_fit_is_refused() -> None:
    batch, _ = random_batch(np.random.default_rng(0), 1, 16)
    query, keys = torch.zeros(batch.num_tokens, 2, 8), torch.zeros(1400, 1, 16, 12, dtype=torch.int8)
    assert cpu.ragged_attention(query, keys, keys, batch, 1.0).shape == query.shape
    for key, value, message in (
        (keys[..., :10].contiguous(), keys, "one size"),
        (keys, torch.zeros(1400, 1, 16, 8), "one dtype"),
        (keys[..., :4].contiguous(), keys, "heads of 0 numbers"),
    ):
        with pytest.raises(RuntimeError, match=message):
            cpu.ragged_attention(query, key, value, batch, 1.0)
    rows = torch.zeros(1, 1, 9)
    with pytest.raises(RuntimeError, match="must fit the cache"):
        cpu.write_slots(rows, rows, keys, keys, torch.zeros(1, dtype=torch.int64))
