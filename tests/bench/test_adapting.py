"""What adapting costs, measured in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import adapting
from benchmarks.adapting import NEW_TOKENS, Lengths, as_markdown, cells
from benchmarks.workloads import SMALL, Models
from echelon.adaptive import controller
from echelon.adaptive.controller import BatchController
from echelon.adaptive.cost_files import CostRecord, write_costs
from echelon.adaptive.cost_table import CostCurve, CostTable
from echelon.stats import StepRecord

CHEAP = CostTable(step=CostCurve(tokens=(1, 64), milliseconds=(10.0, 11.0)), drafting=CostCurve(tokens=(1,), milliseconds=(0.1,)))
LENGTHS = Lengths(steps=6, pairs=2, settling=18, tokens=24, rounds=1, phases=(1, 3, 2), phase_tokens=6, arrivals=3, loads=(1.0,))


@pytest.fixture(scope="module")
def models() -> Models:
    return Models(SMALL, ["eagle"])


@pytest.mark.parametrize(
    "name", ["idle_draft_model_b8", "idle_eagle_b1", "deciding_b32", "wrong_b1", "starting_ngram_b8", "arriving", "moving", "slowed_b8"]
)
def test_a_cell_in_small(models: Models, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "wrong_b1":  # whether drafts pay is not this machine's to say
        costs = write_costs(tmp_path / "costs.json", CostRecord(key={}, table=CHEAP))
        monkeypatch.setattr(adapting, "DRAFT_MODEL", adapting.DRAFT_MODEL | {"cost_table": str(costs)})
    (cell,) = [c for c in cells(models, LENGTHS) if c.name == name]
    record = cell.measure()
    assert name in as_markdown({name: record})
    if name == "wrong_b1":
        assert record["drafted"] > 0 == record["accepted"]
    if name == "starting_ngram_b8":
        (steps,) = record["rounds"]
        assert 8 * (NEW_TOKENS - 4) < sum(emitted for _, emitted, *_ in steps) < 8 * NEW_TOKENS  # some came while prompts were read
        assert steps[0][0] == 8 >= steps[-1][0] > 0
    if name == "moving":
        assert [len(rounds) for rounds in record["speeds"]["auto"]] == [1, 1, 1]
        assert [len(plain) for plain in record["plain_ms"]] == [24, 8, 12], "plain steps of all rows emit a token each, four rows' at least"


def test_rows_that_end_before_enough_steps_are_compared(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of plain steps by an earlier decision few are: the cell ends with those that there were."""
    observe, num_seen = BatchController.observe, 0

    def seldom(self: BatchController, record: StepRecord) -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen % 7 == 0:
            observe(self, record)

    monkeypatch.setattr(BatchController, "observe", seldom)
    monkeypatch.setattr(controller, "perf_counter", lambda: 0.0)  # decisions stand as short as they may
    (cell,) = [c for c in cells(models, LENGTHS) if c.name == "slowed_b8"]
    record = cell.measure()
    assert record["alone"] > 0.0 < record["later"]


def test_a_phase_is_judged_round_by_round_and_by_the_spread_of_plain_steps() -> None:
    """The second round is twice as slow for all: of the best setting "auto" has 0.9 in both."""
    speeds = {"plain": [[10.0, 5.0]], "auto": [[18.0, 9.0]], "1": [[20.0, 10.0]], "2": [[12.0, 6.0]]}
    steady = as_markdown({"moving": {"phases": [4], "speeds": speeds, "plain_ms": [[100.0] * 3]}})
    assert "0.90 (0.90 to 0.90) of the best (1), 1.80 of plain | ≥ 0.95" in steady
    noisy = as_markdown({"moving": {"phases": [4], "speeds": speeds, "plain_ms": [[80.0, 100.0, 120.0]]}})
    assert "≥ 0.70" in noisy


def test_the_parts_of_a_start() -> None:
    """Sixteen steps as plain ones, four that emit twice as much in the same time, and two of half of the rows."""
    steps = [(2, 2, 1.0, 1.0)] * 16 + [(2, 4, 1.0, 1.0)] * 4 + [(1, 1, 1.0, 1.0)] * 2
    said = as_markdown({"starting_ngram_b2": {"batch": 2, "rounds": [steps]}})
    for part in ("all 1.14 (1.14 to 1.14)", "first 16 steps 1.00", "later, all rows 2.00", "some rows 0.50"):
        assert part in said
