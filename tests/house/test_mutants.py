"""The list of mutants is fresh; `python scripts/mutants.py` runs them."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "mutants.py"


def test_every_patch_still_applies() -> None:
    names = runpy.run_path(str(SCRIPT))
    assert names["stale"]() == []
    assert len(names["MUTANTS"]) >= 20
