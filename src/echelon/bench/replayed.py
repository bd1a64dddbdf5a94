"""Replayed acceptance for measurements: histograms moved to another mean, and a draft model whose work is real and acceptance replayed."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
from torch import Tensor

from echelon.config import SpeculativeConfig
from echelon.draft import Draft
from echelon.drafters.base import Drafter
from echelon.drafters.replay import ReplayDrafter
from echelon.errors import ConfigError
from echelon.sequence import PlannedRow
from echelon.verify import Verdict

Histogram = SequenceOf[SequenceOf[float]]  # [num_draft_tokens, num_accepted, count]


def mean_tokens_per_step(histogram: Histogram) -> float:
    """Accepted + 1, averaged."""
    total = math.fsum(count for *_, count in histogram)
    return 1.0 + math.fsum(accepted * count for _, accepted, count in histogram) / total


def rescaled(histogram: Histogram, tokens_per_step: float) -> list[list[float]]:
    """The joint histogram tilted to another mean: every count times exp(t · num_accepted), t by bisection.

    Of all histograms with that mean this is the one nearest to what was measured (in relative entropy), misses included.

    Raises
    ------
    ConfigError  no histogram over these pairs has that mean
    """
    accepted = [a for _, a, count in histogram if count > 0]
    if not min(accepted) + 1 < tokens_per_step < max(accepted) + 1:
        raise ConfigError(f"tokens_per_step = {tokens_per_step} lies outside what was measured, {min(accepted) + 1} to {max(accepted) + 1}")

    def tilted(t: float) -> list[list[float]]:
        return [[drafted, a, count * math.exp(t * (a - max(accepted)))] for drafted, a, count in histogram]

    low, high = -20.0, 20.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_tokens_per_step(tilted(middle)) < tokens_per_step else (low, middle)
    return tilted(high)


class ReplayedDraftModel:
    """Proposes with a real draft model, so that its time is spent, and has as many tokens kept as the replayed law says.

    Random weights accept nothing of each other's, and a draft model is not free as a lookup is.
    """

    def __init__(self, draft_model: Drafter, law: SpeculativeConfig, vocab_size: int) -> None:
        self.hidden_state_names = draft_model.hidden_state_names
        self._draft_model, self._law = draft_model, ReplayDrafter(law, vocab_size)

    def propose(self, rows: SequenceOf[PlannedRow]) -> Draft:
        draft, drawn = self._draft_model.propose(rows), self._law.propose(rows)
        assert drawn.replayed is not None
        return replace(draft, replayed=np.minimum(drawn.replayed, draft.num_draft_tokens).astype(np.int32))

    def observe(self, rows: SequenceOf[PlannedRow], verdict: Verdict, hidden_states: Tensor | None) -> None:
        self._draft_model.observe(rows, verdict, hidden_states)

    def forget(self, row: int) -> None:
        self._draft_model.forget(row)
