"""What scripts/plateau.py says of a run's losses."""

from __future__ import annotations

import runpy
from pathlib import Path

plateau = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "plateau.py"))["plateau"]


def test_a_run_is_there_when_its_loss_stays_near_its_end() -> None:
    level = [5.0] * 30 + [1.0] * 70
    assert plateau(level) == (35, 1.0)  # the first five batches that are all near
    assert plateau([*level[:60], *[1.5] * 5, *level[65:]]) == (70, 1.0), "what leaves again was not there"
    reached, last = plateau([2.0 - 0.01 * i for i in range(100)])
    assert reached >= 98 and abs(last - 1.03) < 1e-9, "a loss that still falls has no plateau before its end"
    assert plateau([3.0]) == (1, 3.0)
