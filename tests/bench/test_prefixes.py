"""What a kept prefix saves and costs, measured in small."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.prefixes import Lengths, as_markdown, cells, mann_whitney
from benchmarks.workloads import SMALL, Models

LENGTHS = Lengths(conversation=60, turn=9, prompt=64, cold_prompts=2, cold_prompt=20, rounds=2, conversations=2, answer=4, pairs=3)


@pytest.fixture(scope="module")
def models() -> Models:
    return Models(SMALL)


@pytest.mark.parametrize("name", ["turn_plain", "turn_draft_model", "hashing", "cold", "mt_bench_draft_model", "another_key"])
def test_a_cell_in_small(models: Models, name: str, tmp_path: Path) -> None:
    asked = [{"turns": ["def add(a, b):", "And backwards?"]}, {"turns": ["One turn."]}, {"turns": ["import os", "import sys"]}]
    (questions := tmp_path / "question.jsonl").write_text("\n".join(map(json.dumps, asked)), "utf-8")
    (cell,) = [c for c in cells(models, LENGTHS, questions) if c.name == name]
    record = cell.measure()
    assert name in as_markdown({name: record})
    if name.startswith("turn"):
        assert (record["cached"], record["new"]) == (48, 21)
    if name.startswith("mt_bench"):
        assert record["conversations"] == 2
    if name == "cold":
        assert record["hits"] == 0


def test_ranks_that_lie_apart_are_told_apart() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=80).tolist(), rng.normal(size=80).tolist()
    assert 0.05 < mann_whitney(a, b) <= 1.0
    assert mann_whitney(a, [x + 2 for x in b]) < 1e-6
    assert mann_whitney([1.0, 2.0, 3.0], [1.5, 2.5, 3.5]) > 0.3
