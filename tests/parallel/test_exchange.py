"""The memory that ranks share, with a thread in the place of each process."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest
import torch
from rank_threads import ranks, together
from torch import Tensor

from echelon.errors import RankError
from echelon.model.patches.split import Part, parts_of
from echelon.parallel import exchange as room
from echelon.parallel.exchange import SharedExchange
from echelon.parallel.rank_memory import ARRIVED, HASH, shared_memory

ROUNDS = 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("slot", [room.SLOT, 4096])
def test_every_rank_gets_what_all_have(size: int, dtype: torch.dtype, slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece or several, of even shares and others, in many rounds that follow one another at once."""
    monkeypatch.setattr(room, "SLOT", slot)
    generator = torch.Generator().manual_seed(size)
    wholes = [torch.randn(1, 1 + i % 7, 90 + i, generator=generator).to(dtype) for i in range(ROUNDS)]

    def work(rank: SharedExchange) -> list[Tensor]:
        got = []
        with rank.connected(7):
            for whole in wholes:
                parts = parts_of(whole.shape[-1], size)
                first, last, _ = parts[rank.rank]
                got.append(rank.gathered(whole[..., first:last], parts).clone())
        return got

    for got in together(ranks(SharedExchange, size), work):
        assert all(torch.equal(a, b) for a, b in zip(got, wholes, strict=True))


def test_only_the_first_rank_waits_for_what_is_its_own() -> None:
    group, whole = ranks(SharedExchange, 2), torch.arange(12.0).view(3, 4)
    for rank, first in ((group[1], 2), (group[0], 0)):  # the second is done before the first has begun
        with rank.connected(1):
            got = rank.gathered_by_first(whole[:, first : first + 2], (Part(0, 2, 4), Part(2, 4, 4)))
    assert torch.equal(got, whole)


def test_what_is_the_first_ranks_own_may_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "SLOT", 4096)
    whole = torch.randn(1, 70, 96, generator=torch.Generator().manual_seed(0))

    def work(rank: SharedExchange) -> list[Tensor]:
        parts = parts_of(96, 2)
        first, last, _ = parts[rank.rank]
        got = []
        with rank.connected(1):
            for rows in (70, 3, 0, 21):
                got.append(rank.gathered_by_first(whole[:, :rows, first:last], parts).clone())
                rank.gathered(whole[:, :1, first:last], parts)  # as a pass has many before it comes to logits again
        return got

    got, _ = together(ranks(SharedExchange, 2), work)
    assert all(torch.equal(a, whole[:, :rows]) for a, rows in zip(got, (70, 3, 0, 21), strict=True))


def test_a_rank_with_another_plan_is_told_from_the_others() -> None:
    group = ranks(SharedExchange, 2)

    def work(rank: SharedExchange) -> str:
        with pytest.raises(RankError) as told, rank.connected(rank.rank):
            rank.gathered(torch.zeros(1, 1), parts_of(2, 2))
        return str(told.value)

    assert all("runs another plan" in message for message in together(group, work))


def test_a_rank_that_has_gone_on_alone_is_noticed() -> None:
    first, second = ranks(SharedExchange, 2)
    for rank in (first, second):
        rank.note(HASH, 1)
    second.note(ARRIVED, 3)
    with pytest.raises(RankError, match="runs another plan"), first.connected(1):
        first.gathered(torch.zeros(1, 1), parts_of(2, 2))


def test_who_waits_looks_whether_the_others_live() -> None:
    def look() -> None:
        raise RankError("rank 1 is gone")

    first, _ = ranks(SharedExchange, 2, look)
    with pytest.raises(RankError, match="rank 1 is gone"), first.connected(1):
        first.gathered(torch.zeros(1, 1), parts_of(2, 2))


def test_the_memory_has_no_name() -> None:
    before = set(Path("/dev/shm").iterdir())
    group = ranks(SharedExchange, 2)
    assert set(Path("/dev/shm").iterdir()) == before
    assert len(group) == 2


def test_there_may_be_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    gc.collect()  # what other tests have left would be closed at any time
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="No space"):
        shared_memory()
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def test_ranks_that_gather_unlike_amounts_are_told() -> None:
    """As when one runs a layer part by part, for a hook within, and the others in one call, which cuts a long prompt."""
    group = ranks(SharedExchange, 2)

    def work(rank: SharedExchange) -> str:
        with pytest.raises(RankError) as told, rank.connected(1):
            rank.gathered(torch.zeros(1 + rank.rank, 1), parts_of(2, 2))
        return str(told.value)

    assert all("runs another plan" in message for message in together(group, work))
