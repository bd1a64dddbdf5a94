"""What adapting costs, measured in small."""

from __future__ import annotations

import pytest

from benchmarks.adapting import Lengths, as_markdown, cells
from benchmarks.workloads import SMALL, Models

LENGTHS = Lengths(steps=6, tokens=24, rounds=1, phases=(1, 3, 2), arrivals=3, loads=(1.0,))


@pytest.fixture(scope="module")
def models() -> Models:
    return Models(SMALL, ["eagle"])


@pytest.mark.parametrize("name", ["idle_draft_model_b8", "idle_eagle_b1", "deciding_b32", "wrong_b1", "arriving", "moving", "slowed_b8"])
def test_a_cell_in_small(models: Models, name: str) -> None:
    (cell,) = [c for c in cells(models, LENGTHS) if c.name == name]
    record = cell.measure()
    assert name in as_markdown({name: record})
    if name == "wrong_b1":
        assert record["drafted"] > 0 == record["accepted"]
    if name == "moving":
        assert [len(rounds) for rounds in record["speeds"]["auto"]] == [1, 1, 1]
