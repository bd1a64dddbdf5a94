"""The plan of a pass: what arrives is what was sent, and nothing else is taken for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from echelon.batch import RaggedBatch, Span
from echelon.errors import RankError
from echelon.kv.blocks import BlockTables
from echelon.model.pack import pack
from echelon.parallel import pass_plan
from echelon.parallel.pass_plan import Copies, PlanReader, PlanWriter

TREE = [-1, 0, 0, 1]


def batch(has_trees: bool) -> RaggedBatch:
    """A prompt, a piece of one and a row that has drafted."""
    tables = BlockTables(32, 4, 16)
    spans = [Span(3, 0, range(10), 0, 10), Span(1, 0, [7], 1, 1), Span(8, 5, [1, 2, 3, 4, 5], 5, 6, 4, TREE if has_trees else None, 2)]
    for span in spans:
        tables.reserve(span.row, span.start + len(span.tokens))
    return pack(spans, tables)


def copies(*lengths: int) -> Copies:
    return [(np.arange(n) + 100 * i, np.arange(n) + 100 * i + 50) for i, n in enumerate(lengths)]


def fields(batch: RaggedBatch) -> dict[str, Any]:
    return {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name != "plans"}


@pytest.mark.parametrize("moved", [(), (4,), (4, 1, 3)])
@pytest.mark.parametrize("has_trees", [False, True])
def test_a_plan_arrives_as_it_was_sent(has_trees: bool, moved: tuple[int, ...]) -> None:
    sent, writer, reader = batch(has_trees), PlanWriter(), PlanReader()
    for number in (1, 2):
        ends = [1, 3][:number]
        plan = reader.read(writer.packed(sent, copies(*moved), ends))
        assert (plan.number, plan.hash, plan.ends) == (number, writer.hash, ends)
        for name, value in fields(sent).items():
            got = getattr(plan.batch, name)
            assert (value is None and got is None) or torch.equal(torch.as_tensor(got), torch.as_tensor(value)), name
            assert not isinstance(value, torch.Tensor) or got.dtype == value.dtype, name
        assert [len(s) for s, _ in plan.copies] == list(moved)
        for got_pair, pair in zip(plan.copies, copies(*moved), strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(got_pair, pair, strict=True))


def test_plans_of_equal_counts_share_memory_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few memories are kept, and large ones are not."""
    monkeypatch.setattr(pass_plan, "MOST_KEPT", 2)
    writer, reader, sent = PlanWriter(), PlanReader(), batch(True)
    first = reader.read(writer.packed(sent, copies(3, 2), [3]))
    for shift in range(1, 3):
        moved = dataclasses.replace(sent, tokens=sent.tokens + shift, slots=sent.slots + shift)
        plan = reader.read(writer.packed(moved, [(a + shift, b) for a, b in copies(3, 2)], [3 - shift]))
        assert plan.batch.tokens.data_ptr() == first.batch.tokens.data_ptr() and plan.batch.plans is not first.batch.plans
        assert torch.equal(plan.batch.tokens, moved.tokens) and torch.equal(plan.batch.slots, moved.slots) and plan.ends == [3 - shift]
        assert [a.tolist() for a, _ in plan.copies] == [(a + shift).tolist() for a, _ in copies(3, 2)]
    for i in range(4):
        reader.read(writer.packed(sent, copies(i), []))
        assert len(reader._kept) <= 2
    before, large = dict(reader._kept), dataclasses.replace(sent, block_table=torch.zeros(3, 2**14, dtype=torch.int32))
    assert reader.read(writer.packed(large, [])).batch.block_table.shape == (3, 2**14)
    assert before and reader._kept == before


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_plan_of_another_size_than_its_header_says_is_refused(is_kept: bool) -> None:
    """However well its hash agrees."""
    writer, reader, sent = PlanWriter(), PlanReader(), batch(False)
    if is_kept:
        reader.read(writer.packed(sent, []))
    with pytest.raises(RankError, match=r"a plan holds \d+ bytes of numbers, and its header says \d+"):
        reader.read(writer.packed(dataclasses.replace(sent, positions=sent.positions.long()), []))


def test_a_plan_that_was_missed_repeated_or_swapped_is_refused() -> None:
    writer = PlanWriter()
    first, second, third = (writer.packed(batch(False), []) for _ in range(3))
    for order in ([second], [first, first], [first, third], [first, second, first]):
        reader = PlanReader()
        for message in order[:-1]:
            reader.read(message)
        with pytest.raises(RankError, match=f"does not follow plan {len(order) - 1}"):
            reader.read(order[-1])


def test_another_past_is_refused() -> None:
    mine, other, reader = PlanWriter(), PlanWriter(), PlanReader()
    reader.read(mine.packed(batch(False), []))
    other.packed(batch(True), [])
    with pytest.raises(RankError, match="plan 2 does not follow plan 1"):
        reader.read(other.packed(batch(False), []))


def test_no_damage_goes_unnoticed() -> None:
    message = PlanWriter().packed(batch(True), copies(2))
    for place in range(len(message)):
        damaged = bytearray(message)
        damaged[place] ^= 1
        with pytest.raises(RankError):
            PlanReader().read(bytes(damaged))
    for length in (0, 3, 40, len(message) - 4):
        with pytest.raises(RankError):
            PlanReader().read(message[:length])
