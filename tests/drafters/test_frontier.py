"""What trees that a drafter's scores shape owe to these scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from echelon import SamplingParams
from echelon.build import growth_of
from echelon.drafters.frontier import Frontier, grow
from echelon.sampling import Sampler
from echelon.sequence import PlannedRow, Sequence
from echelon.speculative_config import SpeculativeConfig
from echelon.trees import BestFirst, Forest, Int64


class SameEverywhere(Frontier):
    """A drafter that gives the first tokens the same probabilities after every path."""

    probabilities = (0.6, 0.3, 0.1)

    def logits(self, depth: int) -> Tensor:
        return torch.tensor([self.probabilities]).log()

    def advance(self, nodes: Int64, at: Int64, depth: int) -> Int64:
        return nodes * 0


def tree_of(sharpness: float, **asked: Any) -> set[tuple[int, ...]]:
    """Paths of the three nodes that are proposed."""
    sampler = Sampler(SamplingParams(**asked), seed=5, index=0)
    row = PlannedRow(Sequence(0, [1, 2], 2, sampler, frozenset(), 100), 1, 1, 3, 3)
    forest = Forest([3], [3])
    draft = grow(BestFirst(3, 3, sharpness), SameEverywhere(forest, [row], forest.plant([0])))
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.row(0), draft.row_parents(0), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


@pytest.mark.parametrize("asked", [{}, {"logit_bias": {0: 0.0}}], ids=["plain", "logits changed"])
def test_what_is_surest_goes_deepest_for_a_greedy_target(asked: dict[str, Any]) -> None:
    """0.6³ < 0.3, but of probabilities in proportion to 0.6^1.5 and 0.3^1.5, 0.70³ > 0.25."""
    assert tree_of(1.0, temperature=0.0, **asked) == {(0,), (0, 0), (1,)}
    assert tree_of(1.5, temperature=0.0, **asked) == {(0,), (0, 0), (0, 0, 0)}


def test_a_draw_is_as_likely_as_it_is() -> None:
    for seed in range(20):
        assert tree_of(1.0, temperature=1.0, seed=seed) == tree_of(1.5, temperature=1.0, seed=seed)


@pytest.mark.parametrize(("method", "is_sharp"), [("eagle", True), ("eagle3", True), ("draft_model", True), ("medusa", False)])
def test_a_drafter_that_knows_its_draft_is_sharpened(method: Any, is_sharp: bool) -> None:
    growth = growth_of(SpeculativeConfig(method=method, model="somewhere", tree="dynamic"), None)
    assert (growth.sharpness > 1) == is_sharp
