"""The lists of mutants are fresh; `python -m tools.mutants` and `python -m tools.kernel_mutants` run them."""

from __future__ import annotations

from tools import kernel_mutants, mutants


def test_every_patch_still_applies() -> None:
    assert mutants.stale() == []
    assert kernel_mutants.stale() == []
    assert min(len(mutants.MUTANTS), len(kernel_mutants.MUTANTS)) >= 20
