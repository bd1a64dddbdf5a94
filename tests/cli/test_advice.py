"""What a head is worth, by costs and by what it gets right."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.adaptive.cost_table import CostCurve, CostTable
from echelon.cli.advice import advice, best_lengths, tokens_a_decade

# 10 ms up to 8 tokens, then 1 ms a token; a level of drafting takes 1 ms
TABLE = CostTable(
    step=CostCurve(tokens=(1, 8, 9, 10), milliseconds=(10.0, 10.0, 11.0, 12.0)), drafting=CostCurve(tokens=(1,), milliseconds=(1.0,))
)
RIGHT = [0.8, 0.8, 0.5, 0.1]


def brute(batch: int, level: float = 1.0) -> tuple[int, float]:
    kept, speeds = np.cumprod(RIGHT), []
    for length in range(len(RIGHT) + 1):
        tokens = batch * (1 + length)
        speeds.append((1 + kept[:length].sum()) / (max(10.0, tokens + 2.0) + level * length))
    return int(np.argmax(speeds)), max(speeds) / speeds[0]


def test_the_best_length_is_that_of_every_length_tried() -> None:
    for worth in best_lengths(TABLE, RIGHT):
        assert (worth.length, worth.speedup) == (brute(worth.batch_size)[0], pytest.approx(brute(worth.batch_size)[1]))
    for worth in best_lengths(TABLE, RIGHT, 3.0):
        assert (worth.length, worth.speedup) == (brute(worth.batch_size, 3.0)[0], pytest.approx(brute(worth.batch_size, 3.0)[1]))
    assert best_lengths(TABLE, RIGHT)[0].length == 3
    assert str(best_lengths(TABLE, RIGHT)[2]) == "batch 32: no chain pays"


def test_a_law_of_steps_is_fitted_to_evaluations_before_the_rate_falls() -> None:
    log = [{"step": s, "tokens_per_step": 2.0 + 0.5 * np.log10(s), "top1": RIGHT} for s in (10, 20, 40, 80)]
    log += [{"step": 80, "loss": 1.0}, {"step": 100, "tokens_per_step": 9.0, "top1": RIGHT}]
    assert tokens_a_decade(log, 80) == (pytest.approx(0.5), pytest.approx(1.0))
    assert tokens_a_decade(log, 40) is None
    lines = list(advice(TABLE, log, 80, 2))
    assert "  ten times the steps: about +0.50 tokens a step (log10 fitted to this run, R² 1.00)" in lines
    assert sum("layers, by the published law" in line for line in lines) == 2
    assert len(list(advice(TABLE, log, 40, None))) == 4
