"""What benchmarks.plateau says of a run's losses, and what it keeps of earlier ones."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.plateau import Learnt, as_markdown, others, plateau


def test_a_run_is_there_when_its_loss_stays_near_its_end() -> None:
    level = [5.0] * 30 + [1.0] * 70
    assert plateau(level) == (35, 1.0)  # the first five batches that are all near
    assert plateau([*level[:60], *[1.5] * 5, *level[65:]]) == (70, 1.0), "what leaves again was not there"
    reached, last = plateau([2.0 - 0.01 * i for i in range(100)])
    assert reached >= 98 and abs(last - 1.03) < 1e-9, "a loss that still falls has no plateau before its end"
    assert plateau([0.5] * 40 + level[40:], 40) == (45, 1.0), "batches that look less far are not compared"
    assert plateau([3.0]) == (1, 3.0)


def test_what_is_not_measured_again_stays(tmp_path: Path) -> None:
    """A row has the commit it was measured at; one that says none is of its file's."""
    file = tmp_path / "training.json"
    assert others(file, ["eagle"]) == []
    runs = [asdict(Learnt(name, 9, 8, 60.0, 10**9, 1.0, [0.5], 1.5, "old")) for name in ("medusa", "clover", "eagle")]
    del runs[0]["commit"]
    file.write_text(json.dumps({"environment": {"commit": "new"}, "runs": runs}))
    kept = others(file, ["eagle"])
    assert [(f.method, f.commit, f.minutes, f.holds) for f in kept] == [("medusa", "new", 8.0, True), ("clover", "old", 8.0, True)]
    where = {"cpu": "a processor", "threads": "2", "torch": "2", "transformers": "5", "commit": "newest"}
    rows = as_markdown(kept, where).splitlines()
    assert [row.split(" | ")[-1] for row in rows if row.startswith("| ")] == ["commit |", "--- |", "new |", "old |"]
