"""A row's logits, keys and values are bitwise those of the row alone: whole, in pieces, token by token, beside others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import toys
from decoders import MIXTURES, decoders
from torch import Tensor

from echelon.batch import Span
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache
from echelon.model.attention import record_layers
from echelon.model.load.loading import adopt_model
from echelon.model.patches.linear import framework_layers
from echelon.model.runner import ModelRunner
from echelon.ops import compiled
from echelon.ops.slots import gather_slots

LENGTH = 300  # more than two key tiles
MODELS = decoders(window=90, original_context=256)
BLOCK = 16


def runner(name: str, dtype: torch.dtype) -> ModelRunner:
    if name in MIXTURES and not compiled.is_built():
        pytest.skip("the compiled kernels are not built")
    cls, config = MODELS[name]
    loaded = adopt_model(toys.randomised(cls, config, seed=2, spread=0.15).to(dtype), None, name)
    tables = BlockTables(240, BLOCK, 32)
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
    logits, _ = run.run(batch)
    for span in spans:
        run.commit(span.row, span.start + len(span.tokens))
    return dict(zip(pieces, logits.split([len(t) for t in pieces.values()]), strict=True))


def cached(run: ModelRunner, row: int) -> list[Tensor]:
    """Keys and values of a row, layer by layer, in logical order."""
    slots = torch.tensor([b * BLOCK + i for b in run.cache.tables.blocks(row) for i in range(BLOCK)])[: run.num_cached(row)]
    return [gather_slots(storage, slots) for storage in (*run.cache.keys, *run.cache.values)]


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
    ways = {  # sizes of the pieces, numbers of neighbours
        "token by token": ([200] + [1] * 100, (0,)),
        "in blocks of a draft": ([150, 5, 1, 8, 3, 60, 2, 71], (0, 3)),
        "in pieces": ([7, 121, 128, 44], (0, 3, 63)),
    }
    for row, (way, (sizes, numbers)) in enumerate(ways.items(), start=2):
        for neighbours in numbers:
            got = in_pieces(run, row, tokens, sizes, neighbours, seed=row)
            assert torch.equal(whole, got), f"{way}, {neighbours} neighbours"
            assert all(torch.equal(a, b) for a, b in zip(expected, cached(run, row), strict=True)), way
            run.cache.tables.release(row)
    run.cache.check()


def tree_around(rng: np.random.Generator, true: list[int]) -> tuple[list[int], list[int], list[int]]:
    """A random tree that holds `true` as one path: tokens, parents, the nodes of the path."""
    tokens: list[int] = []
    parents: list[int] = []
    path: list[int] = []
    while len(path) < len(true):
        if rng.random() < 0.4:
            parents.append(path[-1] if path else -1)
            path.append(len(tokens))
            tokens.append(true[len(path) - 1])
        else:
            parents.append(int(rng.integers(-1, len(tokens))) if tokens else -1)
            tokens.append(int(rng.integers(3, 80)))
    return tokens, parents, path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_path_of_a_tree_is_a_chain(name: str, dtype: torch.dtype, threads: int) -> None:
    """The text verified as paths of random trees, rejected nodes in the cache between its tokens, accepted ones moved: the same bits."""
    assert threads == torch.get_num_threads()
    rng = np.random.default_rng(4)
    text = rng.integers(3, 80, 250).tolist()  # on one side of LongRoPE's limit
    run = runner(name, dtype)
    whole = feed(run, {1001: text})[1001]
    expected = cached(run, 1001)
    run.cache.tables.release(1001)
    for row, first in ((1002, 1), (1003, 110)):
        feed(run, {row: text[:first]})
        start = first
        while start + 8 < min(len(text), first + 150):
            others = {2000 + i: rng.integers(3, 80, rng.integers(1, 40)).tolist() for i in range(2)}
            accepted = int(rng.integers(0, 8))
            tokens, parents, path = tree_around(rng, text[start + 1 : start + 1 + accepted])
            spans = [Span(r, 0, t, 0, len(t)) for r, t in others.items()]
            spans.insert(1, Span(row, start, [text[start], *tokens], 1 + len(tokens), start + 1, len(tokens), parents))
            for span in spans:
                assert run.cache.tables.reserve(span.row, span.start + len(span.tokens))
            batch = run.pack(spans)
            batch.check()
            logits, _ = run.run(batch)
            assert torch.equal(logits[[0, *(n + 1 for n in path)]], whole[start : start + 1 + accepted])
            run.commit(row, start + 1, path)
            run.cache.apply_copies()
            start += 1 + accepted
            for other in others:
                run.cache.tables.release(other)
        assert all(torch.equal(a[:start], b) for a, b in zip(expected, cached(run, row), strict=True))
        run.cache.tables.release(row)


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
