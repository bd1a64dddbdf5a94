"""Blocks are held by exactly the rows that own them, shared ones are copied before they are written."""

from __future__ import annotations

from itertools import count

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from echelon.errors import OutOfBlocksError
from echelon.kv.blocks import BlockPool, BlockTables
from echelon.kv.cache import KVCache, LayerShape


def test_pool_hands_out_every_block_once() -> None:
    pool = BlockPool(5)
    blocks = [pool.allocate() for _ in range(5)]
    assert sorted(blocks) == list(range(5))
    with pytest.raises(OutOfBlocksError, match="kv_cache_memory_bytes"):
        pool.allocate()
    pool.share(blocks[0])
    pool.release(blocks[0])
    assert pool.num_free == 0
    pool.release(blocks[0])
    assert pool.num_free == 1
    with pytest.raises(AssertionError, match="free already"):
        pool.release(blocks[0])
    pool.check()


def test_room_of_tokens_that_are_read_later_stays() -> None:
    tables = BlockTables(8, 4, 8)
    assert tables.reserve(1, 26)
    held = tables.blocks(1)
    tables.commit(1, 3, num_held=14)
    assert tables.num_cached(1) == 3
    assert tables.blocks(1) == held[:4]
    assert tables.num_missing(1, 16) == 0
    tables.commit(1, 5, num_held=30)  # no more than there is
    assert tables.blocks(1) == held[:4]
    tables.commit(1, 5)
    assert tables.blocks(1) == held[:2]
    tables.check()


def test_reserve_takes_all_or_nothing() -> None:
    tables = BlockTables(4, 8, 4)
    assert tables.reserve(1, 17)
    assert not tables.reserve(2, 9)
    assert 2 not in tables
    assert tables.reserve(2, 8)
    tables.check()


def test_commit_gives_back_what_is_not_kept() -> None:
    tables = BlockTables(8, 4, 8)
    tables.reserve(1, 20)
    tables.commit(1, 9)
    assert len(tables.blocks(1)) == 3
    assert tables.pool.num_free == 5
    tables.commit(1, 0)
    assert tables.pool.num_free == 8
    tables.check()


def test_fork_copies_only_what_is_written() -> None:
    cache = KVCache([LayerShape(1, 2, 2)], BlockTables(8, 4, 8), torch.float32, torch.device("cpu"))
    tables = cache.tables
    tables.reserve(1, 6)
    slots = torch.tensor([b * 4 + i for b in tables.blocks(1) for i in range(4)])[:6]
    cache.write(0, torch.arange(12.0).view(6, 1, 2), torch.arange(12.0).view(6, 1, 2), slots)
    tables.commit(1, 6)
    tables.fork(1, 2)
    tables.check()
    assert tables.blocks(1) == tables.blocks(2)
    assert tables.num_missing(2, 7) == 1
    tables.reserve(2, 7)
    cache.apply_copies()
    cache.check()
    assert tables.blocks(1)[0] == tables.blocks(2)[0]
    assert tables.blocks(1)[1] != tables.blocks(2)[1]
    first, second = tables.blocks(1)[1], tables.blocks(2)[1]
    assert torch.equal(cache.keys[0][first, :, :2], cache.keys[0][second, :, :2])
    tables.release(1)
    tables.release(2)
    assert tables.pool.num_free == 8
    cache.check()


def interrupt(patch: pytest.MonkeyPatch, pool: BlockPool, call: int) -> None:
    """An interrupt comes as the pool has taken back the block of this call, the first being 1."""
    release, calls = pool.release, count(1)

    def interrupted(block: int) -> None:
        release(block)
        if next(calls) == call:
            raise KeyboardInterrupt

    patch.setattr(pool, "release", interrupted)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_interrupted_commit_loses_no_block_and_gives_none_back_twice(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = BlockTables(8, 4, 8)
    tables.reserve(1, 20)
    with monkeypatch.context() as patch:
        interrupt(patch, tables.pool, call)
        with pytest.raises(KeyboardInterrupt):
            tables.commit(1, 6)
    tables.check()
    tables.release(1)
    assert tables.num_free == 8
    tables.check()


def test_a_copy_of_a_shared_block_that_is_interrupted_loses_no_block_and_gives_none_back_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = BlockTables(8, 4, 8)
    tables.reserve(1, 6)
    tables.commit(1, 6)
    tables.fork(1, 2)
    with monkeypatch.context() as patch:
        interrupt(patch, tables.pool, 1)
        with pytest.raises(KeyboardInterrupt):
            tables.reserve(2, 7)
    tables.check()
    tables.release(2)
    tables.check()
    assert len(tables.blocks(1)) == 2 == tables.num_blocks - tables.num_free, "what the other row holds is its own still"
    tables.release(1)
    assert tables.num_free == 8


def test_a_fork_that_is_interrupted_gives_nothing_back_that_it_has_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = BlockTables(8, 4, 8)
    tables.reserve(1, 12)
    tables.commit(1, 12)
    share, calls = tables.pool.share, list[int]()

    def share_once(block: int) -> None:
        calls.append(block)
        if len(calls) == 2:
            raise KeyboardInterrupt
        share(block)

    with monkeypatch.context() as patch:
        patch.setattr(tables.pool, "share", share_once)
        with pytest.raises(KeyboardInterrupt):
            tables.fork(1, 2)
    tables.release(2)
    tables.check()
    assert len(tables.blocks(1)) == 3 == tables.num_blocks - tables.num_free
    tables.release(1)
    assert tables.num_free == 8


@given(st.lists(st.tuples(st.lists(st.integers(0, 19), min_size=1, max_size=4, unique=True), st.integers(0, 16)), max_size=12))
def test_copies_are_as_if_made_one_after_the_other(copies: list[tuple[list[int], int]]) -> None:
    """Sources and targets that overlap at random."""
    cache = KVCache([LayerShape(1, 1, 1)], BlockTables(5, 4, 5), torch.float32, torch.device("cpu"))
    expected = list(range(20))
    for storage in (*cache.keys, *cache.values):
        storage[:, 0, :, 0] = torch.arange(20.0).view(5, 4)
    for sources, first in copies:
        targets = range(first, first + len(sources))
        cache.tables.copies.append((np.array(sources), np.array(targets)))
        for target, value in zip(targets, [expected[s] for s in sources], strict=True):
            expected[target] = value
    cache.apply_copies()
    assert cache.keys[0].flatten().tolist() == cache.values[0].flatten().tolist() == expected


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["reserve", "commit", "fork", "release"]), st.integers(0, 4), st.integers(0, 40)), max_size=60
)


@given(OPERATIONS)
@settings(max_examples=300)
def test_any_sequence_of_operations_keeps_the_books(operations: list[tuple[str, int, int]]) -> None:
    """The oracle: each row's cached length, and the number of distinct blocks never exceeds what is not free."""
    tables = BlockTables(12, 4, 12)
    lengths: dict[int, int] = {}
    for name, row, amount in operations:
        if name == "reserve" and tables.reserve(row, max(amount, lengths.get(row, 0))):
            lengths.setdefault(row, 0)
        elif name == "commit" and row in lengths:
            lengths[row] = min(amount, len(tables.blocks(row)) * 4)
            tables.commit(row, lengths[row])
        elif name == "fork" and row in lengths and row + 10 not in lengths:
            tables.fork(row, row + 10)
            lengths[row + 10] = lengths[row]
        elif name == "release":
            tables.release(row)
            lengths.pop(row, None)
        tables.copies.clear()
        tables.check()
        assert {r: tables.num_cached(r) for r in tables.row_ids} == lengths
        held = {b for r in lengths for b in tables.blocks(r)}
        assert len(held) == 12 - tables.pool.num_free
    for row in list(lengths):
        tables.release(row)
    assert tables.pool.num_free == 12
