"""What goes from stage to stage through shared memory, with a thread in the place of each process."""

from __future__ import annotations

import threading

import pytest
import torch
from rank_threads import ranks, together
from torch import Tensor

from echelon.errors import RankError
from echelon.parallel import handover as room
from echelon.parallel.handover import Handover
from echelon.parallel.rank_memory import ARRIVED

PASSES = 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("slot", [None, 1024])
def test_what_goes_round_comes_back(size: int, dtype: torch.dtype, slot: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece or several, in passes of more or fewer micro-batches than stages, as rank 0 sends and takes them."""
    if slot is not None:
        monkeypatch.setattr(room, "ROOM", slot * room.NUM_SENT * size)
    generator = torch.Generator().manual_seed(size)
    passes = [[torch.randn(1 + (5 * i + k) % 23, 24, generator=generator).to(dtype) for k in range(1 + i * 2)] for i in range(PASSES)]

    told = threading.Barrier(size, timeout=60.0)  # no rank is told of a pass before rank 0 has all of the last one

    def first(rank: Handover) -> list[Tensor]:
        got: list[Tensor] = []
        for number, parts in enumerate(passes):
            told.wait()
            with rank.connected(number):
                awaited = iter([torch.empty_like(part) for part in parts])
                for count, part in enumerate(parts, 1):
                    if count >= size:
                        got.append(rank.receive(next(awaited), number))
                    rank.send(part, number)
                got += [rank.receive(rest, number) for rest in awaited]
        return got

    def other(rank: Handover) -> list[Tensor]:
        for number, parts in enumerate(passes):
            told.wait()
            with rank.connected(number):
                for part in parts:
                    rank.send(rank.receive(torch.empty_like(part), number) + 1, number)
        return []

    got, *_ = together(ranks(Handover, size), lambda rank: other(rank) if rank.rank else first(rank))
    expected = [part for parts in passes for part in parts]
    for _ in range(size - 1):
        expected = [part + 1 for part in expected]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_stage_with_another_plan_is_told_from_the_others() -> None:
    def work(rank: Handover) -> str:
        with rank.connected(rank.rank):
            rank.send(torch.zeros(1, 1), rank.rank)
            with pytest.raises(RankError) as told:
                rank.receive(torch.empty(1, 1), rank.rank)
        return str(told.value)

    assert all("runs another plan" in message for message in together(ranks(Handover, 2), work))


def test_a_stage_that_has_gone_on_alone_is_noticed() -> None:
    first, second = ranks(Handover, 2)
    second.send(torch.zeros(1, 1), 1)
    second.note(ARRIVED, room.NUM_SENT + 1)
    with pytest.raises(RankError, match="runs another plan"), first.connected(1):
        first.receive(torch.empty(1, 1), 1)


def test_who_waits_looks_whether_the_others_live() -> None:
    def look() -> None:
        raise RankError("rank 1 is gone")

    first, _ = ranks(Handover, 2, look)
    with first.connected(1):
        for _ in range(room.NUM_SENT):
            first.send(torch.zeros(1, 1), 1)
        for wait in (lambda: first.send(torch.zeros(1, 1), 1), lambda: first.receive(torch.empty(1, 1), 1)):
            with pytest.raises(RankError, match="rank 1 is gone"):
                wait()
