"""A row's logits, keys and values are bitwise those of the row alone: whole, in pieces, token by token, beside others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import toys
from decoders import MIXTURES, decoders
from echelon.batch import Span
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache
from echelon.target.attention import record_layers
from echelon.target.layers import framework_layers
from echelon.target.loading import adopt_model
from echelon.target.runner import ModelRunner

LENGTH = 300  # more than two key tiles
MODELS = {name: entry for name, entry in decoders(window=90, original_context=256).items() if name not in MIXTURES}
BLOCK = 16


def runner(name: str, dtype: torch.dtype) -> ModelRunner:
    cls, config = MODELS[name]
    loaded = adopt_model(toys.randomised(cls, config, seed=2, spread=0.15).to(dtype), None, name)
    tables = BlockTables(160, BLOCK, 32)
    cache = KVCache(record_layers(loaded.model), tables, dtype, torch.device("cpu"))
    for storage in (*cache.keys, *cache.values):
        storage.fill_(torch.nan)
    return ModelRunner(loaded, cache)


def feed(run: ModelRunner, pieces: dict[int, list[int]]) -> dict[int, Tensor]:
    """One step: new tokens of each row; logits of all of them, by row. The text of a row below 1000 is LENGTH tokens long."""
    spans = [Span(row, run.num_cached(row), tokens, len(tokens), LENGTH if row < 1000 else len(tokens)) for row, tokens in pieces.items()]
    for span in spans:
        assert run.cache.tables.reserve(span.row, span.start + len(span.tokens))
    batch = run.pack(spans)
    batch.check()
    logits = run.run(batch)
    for span in spans:
        run.commit(span.row, span.start + len(span.tokens))
    return dict(zip(pieces, logits.split([len(t) for t in pieces.values()]), strict=True))


def cached(run: ModelRunner, row: int) -> list[Tensor]:
    """Keys and values of a row, layer by layer, in logical order."""
    slots = torch.tensor([b * BLOCK + i for b in run.cache.tables.blocks(row) for i in range(BLOCK)])[: run.num_cached(row)]
    return [storage[slots].clone() for storage in (*run.cache.keys, *run.cache.values)]


def in_pieces(run: ModelRunner, row: int, tokens: list[int], sizes: list[int], neighbours: int, seed: int) -> Tensor:
    """Feed a row in pieces of the given sizes, each beside other rows of random lengths."""
    rng = np.random.default_rng(seed)
    parts, start = [], 0
    for step, size in enumerate(sizes):
        others = {1000 + 100 * step + i: rng.integers(3, 80, rng.integers(1, 40)).tolist() for i in range(neighbours)}
        order = [*list(others)[: neighbours // 2], row, *list(others)[neighbours // 2 :]]
        pieces = {**others, row: tokens[start : start + size]}
        parts.append(feed(run, {r: pieces[r] for r in order})[row])
        for other in others:
            run.cache.tables.release(other)
        start += size
    assert start == len(tokens)
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_cache_depend_on_the_row_alone(name: str, dtype: torch.dtype, threads: int) -> None:
    assert threads == torch.get_num_threads()
    tokens = np.random.default_rng(9).integers(3, 80, LENGTH).tolist()
    run = runner(name, dtype)
    whole = feed(run, {1: tokens})[1]
    assert bool(torch.isfinite(whole).all())
    expected = cached(run, 1)
    run.cache.tables.release(1)
    ways = {
        "token by token": [200] + [1] * 100,
        "in blocks of a draft": [150, 5, 1, 8, 3, 60, 2, 71],
        "in pieces": [7, 121, 128, 44],
    }
    for row, (way, sizes) in enumerate(ways.items(), start=2):
        for neighbours in (0, 3):
            got = in_pieces(run, row, tokens, sizes, neighbours if len(sizes) < 50 else 0, seed=row)
            assert torch.equal(whole, got), f"{way}, {neighbours} neighbours"
            assert all(torch.equal(a, b) for a, b in zip(expected, cached(run, row), strict=True)), way
            run.cache.tables.release(row)
    run.cache.check()


@pytest.mark.parametrize("name", MODELS)
def test_no_layer_stays_with_the_framework(name: str) -> None:
    assert framework_layers(runner(name, torch.float32).loaded.model) == []


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_framework(name: str) -> None:
    cls, config = MODELS[name]
    tokens = np.random.default_rng(9).integers(3, 80, LENGTH).tolist()
    model = toys.randomised(cls, config, seed=2, spread=0.15)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
    got = feed(runner(name, torch.float32), {1: tokens})[1]
    assert torch.allclose(expected, got, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
