"""What a draft model hands on besides tokens."""

from __future__ import annotations

import numpy as np

from echelon import SamplingParams
from echelon.drafters import draft_model
from echelon.sampling import Sampler
from echelon.sequence import PlannedRow, Sequence


def test_probabilities_are_taken_from_the_chains_in_order_and_left_nowhere_else() -> None:
    """Rows that were not drafted for stand before, between and after the others."""
    rng, vocabulary = np.random.default_rng(0), 7
    row = PlannedRow(Sequence(0, [1], 1, Sampler(SamplingParams(), 0), frozenset(), 100), 0, 1, 3, 3)
    drawn = [[rng.random(vocabulary) for _ in range(count)] for count in (0, 2, 0, 3, 0)]
    chains = [draft_model._Chain(row, place, probs=list(probs)) for place, probs in enumerate(drawn)]
    taken = draft_model._taken_probs(chains, vocabulary)
    assert taken is not None
    assert np.array_equal(taken, np.array([probs for own in drawn for probs in own]))
    assert not any(chain.probs for chain in chains)
    assert draft_model._taken_probs(chains, vocabulary) is None
