"""What a head has yet to read of its rows: nothing of it is lost by a pass that fails, and no pass takes more than it may."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

import heads
from echelon import SamplingParams
from echelon.draft import RowVerdict
from echelon.drafters.heads import AttachedHead, HeadDrafter, attach_head
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache
from echelon.sampling import Sampler
from echelon.sequence import PlannedRow, Sequence
from echelon.trees import chain

DEPTH = 3


@cache
def attached() -> AttachedHead:
    return attach_head(heads.Autoregressive(toys.llama()).eval(), toys.adopted(toys.llama()))


class Rows:
    """Rows that begin with a token each, and the drafter that keeps what the target makes of them."""

    def __init__(self, count: int) -> None:
        self.tables = BlockTables(64, 4, 16)
        own = KVCache(attached().shapes, self.tables, torch.float32, torch.device("cpu"))
        self.drafter = HeadDrafter(attached(), chain(DEPTH), own)
        sampler = Sampler(SamplingParams(temperature=0.0, max_tokens=40), 0)
        self.sequences = [Sequence(i, [i], 1, sampler, frozenset(), 60) for i in range(count)]
        self._generator, self._width = torch.Generator().manual_seed(0), attached().num_features

    def step(self) -> None:
        """Each emits a token, and nothing was drafted."""
        for sequence in self.sequences:
            assert self.tables.reserve(sequence.id, len(sequence))
        rows = [PlannedRow(sequence, len(sequence) - 1, 1, 0, 0) for sequence in self.sequences]
        states = torch.randn(len(rows), self._width, generator=self._generator)
        self.drafter.observe(rows, [RowVerdict(0, [], [], 7) for _ in rows], states)
        for sequence in self.sequences:
            sequence.append(7, False)

    def drafted(self) -> list[int]:
        """How many tokens are proposed for each."""
        for sequence in self.sequences:
            assert self.tables.reserve(sequence.id, len(sequence) + DEPTH)
        rows = [PlannedRow(sequence, len(sequence) - 1, 1, DEPTH, DEPTH) for sequence in self.sequences]
        counts: list[int] = self.drafter.propose(rows).num_draft_tokens.tolist()
        return counts


def noted_passes(patch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every pass that reads."""
    head, found = attached().head, list[int]()
    encode = head.encode

    def noted(features: Tensor, *others: Any, **context: Any) -> Tensor:
        found.append(len(features))
        return encode(features, *others, **context)

    patch.setattr(head, "encode", noted)
    return found


def test_a_pass_that_fails_leaves_its_rows_what_they_have_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are drafted for in the next step."""

    def failing(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("out of luck")

    rows = Rows(2)
    rows.step()
    rows.step()
    with monkeypatch.context() as patch:
        patch.setattr(attached().head, "encode", failing)
        with pytest.raises(RuntimeError, match="out of luck"):
            rows.drafted()
    rows.step()
    assert rows.drafted() == [DEPTH] * 2


def test_rows_whose_reading_fails_twice_are_left_out_until_they_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold up no others for good."""

    def failing(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("out of luck")

    rows = Rows(2)
    rows.step()
    with monkeypatch.context() as patch:
        patch.setattr(attached().head, "encode", failing)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of luck"):
                rows.drafted()
    assert rows.drafted() == [0] * 2


def test_rows_that_have_waited_are_read_in_passes_of_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.drafters.heads.MOST_AT_ONCE", 8)
    passes, rows = noted_passes(monkeypatch), Rows(5)
    for _ in range(3):
        rows.step()
    assert not passes
    assert rows.drafted() == [DEPTH] * 5
    assert passes == [6, 6, 3]


def test_rows_that_can_wait_no_longer_are_not_all_read_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One a step, each with what it has by then, so soon that the last has no more than it may."""
    monkeypatch.setattr("echelon.drafters.heads.MOST_UNREAD", 16)
    passes, rows, by_step = noted_passes(monkeypatch), Rows(5), list[list[int]]()
    for _ in range(16):
        rows.step()
        by_step.append(passes.copy())
        passes.clear()
    assert by_step == [[]] * 10 + [[11], [12], [13], [14], [15], []]
    assert rows.drafted() == [DEPTH] * 5


@pytest.mark.parametrize("count", [1, 5, 7])
def test_no_row_waits_with_more_than_it_may(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: some in each step then."""
    monkeypatch.setattr("echelon.drafters.heads.MOST_UNREAD", 4)
    noted_passes(monkeypatch)
    rows = Rows(count)
    for _ in range(12):
        rows.step()
        assert all(len(unread.tokens) <= 4 for unread in rows.drafter._unread.values())


def test_a_row_that_is_forgotten_before_it_was_read_keeps_its_room() -> None:
    """It may enter in this very step; one that was read gives everything back."""
    rows = Rows(0)
    for row in (0, 1):
        rows.tables.reserve(row, 10)
    rows.tables.advance(1, 5)
    for row in (0, 1):
        rows.drafter.forget(row)
    assert [len(rows.tables.blocks(row)) for row in (0, 1)] == [3, 0]
    assert rows.tables.num_cached(1) == 0


def test_a_head_for_which_there_is_no_memory_is_not_said_to_be_of_another_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    head = heads.Independent(toys.llama())
    monkeypatch.setattr(head, "encode", starved)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        attach_head(head, toys.adopted(toys.llama()))
