"""Replayed acceptance: measures what a drafter of known quality brings on weights that were never trained.

Random weights accept nothing that any drafter proposes, so the speed of a large model's *shape* cannot be measured with one. Here
(num_draft_tokens, num_accepted) of every row and step are drawn from a joint histogram, and that many of arbitrary tokens, or of those of
a real draft model, are kept: the work is that of a real run, the text is meaningless.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from echelon.acceptance import DraftedRow, Exact
from echelon.draft import Draft, Verdict
from echelon.drafters.base import Drafter
from echelon.errors import ConfigError
from echelon.llm import LLM
from echelon.sampling import uniform_noise
from echelon.sequence import PlannedRow, Sequence

PURPOSE = 3  # of the noise, besides those of `sampling`
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


@dataclass(frozen=True, eq=False)
class AcceptanceHistogram:
    """How often a row's step drafted and accepted how many tokens; (0, 0) is a miss.

    pairs  int64[P, 2]   num_draft_tokens, num_accepted
    mass   float64[P]    cumulative share, the last 1
    """

    pairs: NDArray[np.int64]
    mass: NDArray[np.float64]

    @classmethod
    def from_counts(cls, entries: Histogram, source: str) -> Self:
        """The histogram of these entries, which errors call `source`; `echelon bench throughput` writes one a method as `acceptance`."""
        table = np.asarray(entries, np.float64)
        if table.ndim != 2 or table.shape[1:] != (3,) or not np.isfinite(table).all() or (table < 0).any() or table[:, 2].sum() <= 0:
            raise ConfigError(f"{source} is no list of [num_draft_tokens, num_accepted, count] with a count above 0")
        pairs = table[:, :2].astype(np.int64)
        if (pairs != table[:, :2]).any() or (pairs[:, 1] > pairs[:, 0]).any():
            raise ConfigError(f"{source} holds a pair that is fractional or accepts more tokens than were drafted")
        return cls(pairs, np.cumsum(table[:, 2]) / table[:, 2].sum())

    @classmethod
    def from_tokens_per_step(cls, tokens_per_step: float, num_draft_tokens: int) -> Self:
        """Every token accepted with the same probability while all before it were: a truncated geometric law (Leviathan et al. 2023).

        Its mean 1 + a + a² + … + a^k is `tokens_per_step`; a is found by bisection.
        """
        limit = num_draft_tokens + 1
        if not 1.0 <= tokens_per_step <= limit:
            raise ConfigError(f"tokens_per_step = {tokens_per_step} must lie between 1 and num_speculative_tokens + 1 = {limit}")
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if math.fsum(middle**i for i in range(limit)) < tokens_per_step else (low, middle)
        shares = [high**n * (1 - high if n < num_draft_tokens else 1) for n in range(limit)]
        return cls.from_counts([[num_draft_tokens, n, share] for n, share in enumerate(shares)], "tokens_per_step")

    def draw(self, uniform: float) -> tuple[int, int]:
        """The pair at this quantile."""
        drafted, accepted = self.pairs[min(int(np.searchsorted(self.mass, uniform, side="right")), len(self.pairs) - 1)].tolist()
        return drafted, accepted

    def draw_for(self, sequence: Sequence) -> tuple[int, int]:
        """The pair of a row's step, keyed by its number and length: a run can be repeated, and no row depends on its neighbours."""
        return self.draw(float(_noise(sequence, np.zeros(1, np.int64))[0]))


def _noise(sequence: Sequence, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    return uniform_noise(0, sequence.id, len(sequence), ids, PURPOSE)


class ReplayDrafter(Drafter):
    """Proposes arbitrary tokens, as many as the law says."""

    hidden_state_names: tuple[str, ...] = ()

    def __init__(self, law: AcceptanceHistogram, vocab_size: int) -> None:
        self._law, self._vocab_size = law, vocab_size

    def propose(self, rows: SequenceOf[PlannedRow]) -> Draft:
        return Draft.chains([self._tokens(row.sequence, min(self._law.draw_for(row.sequence)[0], row.max_draft_tokens)) for row in rows])

    def _tokens(self, sequence: Sequence, count: int) -> list[int]:
        return list((_noise(sequence, np.arange(1, count + 1)) * self._vocab_size).astype(np.int64).tolist())

    def observe(self, rows: SequenceOf[PlannedRow], verdict: Verdict, hidden_states: Tensor | None) -> None: ...

    def forget(self, row: int) -> None: ...


@dataclass(frozen=True)
class Replayed(Exact):
    """Keep as many tokens as the law says, whatever the target says; the extra token is the target's."""

    law: AcceptanceHistogram

    def path(self, row: DraftedRow, target: list[int]) -> list[int]:  # noqa: ARG002
        return list(range(min(self.law.draw_for(row.row.sequence)[1], len(row.tokens))))


def replay(llm: LLM, law: AcceptanceHistogram) -> None:
    """From now on this engine's drafts are kept as the law says: those of its draft model, or arbitrary ones."""
    engine, config = llm.engine, llm.speculative_config
    if config is None or config.method != "draft_model":
        engine.drafter = ReplayDrafter(law, llm.target.vocab_size)
    engine.rule = Replayed(law)
    engine.ahead = None  # the device keeps what the target says
