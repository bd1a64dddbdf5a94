"""The list of mutants is fresh; `python -m tools.mutants` runs them."""

from __future__ import annotations

from tools import mutants


def test_every_patch_still_applies() -> None:
    assert mutants.stale() == []
    assert len(mutants.MUTANTS) >= 20
