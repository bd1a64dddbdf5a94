"""Replayed acceptance: measures what a drafter of known quality brings on weights that were never trained.

Random weights accept nothing that any drafter proposes, so the speed of a large model's *shape* cannot be measured with one. This
drafter draws (num_draft_tokens, num_accepted) of every row and step from a joint histogram and has verification keep that many of its
arbitrary tokens: the work is that of a real run, the text is meaningless.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from echelon.config import SpeculativeConfig
from echelon.draft import Draft
from echelon.errors import ConfigError
from echelon.sampling import REPLAY, uniform_noise
from echelon.sequence import PlannedRow, Sequence
from echelon.verify import Verdict


@dataclass(frozen=True)
class AcceptanceHistogram:
    """How often a row's step drafted and accepted how many tokens; (0, 0) is a miss.

    pairs  int64[P, 2]   num_draft_tokens, num_accepted
    mass   float64[P]    cumulative share, the last 1
    """

    pairs: NDArray[np.int64]
    mass: NDArray[np.float64]

    @classmethod
    def from_counts(cls, entries: SequenceOf[SequenceOf[float]], source: str) -> Self:
        """Entries are [num_draft_tokens, num_accepted, count]."""
        table = np.asarray(entries, np.float64)
        if table.ndim != 2 or table.shape[1:] != (3,) or not np.isfinite(table).all() or (table < 0).any() or table[:, 2].sum() <= 0:
            raise ConfigError(f"{source} is no list of [num_draft_tokens, num_accepted, count] with a count above 0")
        pairs = table[:, :2].astype(np.int64)
        if (pairs != table[:, :2]).any() or (pairs[:, 1] > pairs[:, 0]).any():
            raise ConfigError(f"{source} holds a pair that is fractional or accepts more tokens than were drafted")
        return cls(pairs, np.cumsum(table[:, 2]) / table[:, 2].sum())

    @classmethod
    def from_file(cls, path: str) -> Self:
        """A JSON list as `from_counts` takes it; `echelon bench throughput` writes one per method as `acceptance`."""
        try:
            entries = json.loads(Path(path).read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read replay_histogram {path!r}: {error.strerror}; check the path") from error
        except ValueError as error:
            raise ConfigError(f"replay_histogram {path!r} is not JSON ({error})") from error
        return cls.from_counts(entries, f"replay_histogram {path!r}")

    @classmethod
    def from_tokens_per_step(cls, tokens_per_step: float, num_draft_tokens: int) -> Self:
        """Every token accepted with the same probability while all before it were: a truncated geometric law (Leviathan et al. 2023).

        Its mean 1 + a + a² + … + a^k is `tokens_per_step`; a is found by bisection.
        """
        limit = num_draft_tokens + 1
        if not 1.0 <= tokens_per_step <= limit:
            raise ConfigError(f"replay_tokens_per_step = {tokens_per_step} must lie between 1 and num_speculative_tokens + 1 = {limit}")
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if math.fsum(middle**i for i in range(limit)) < tokens_per_step else (low, middle)
        shares = [high**n * (1 - high if n < num_draft_tokens else 1) for n in range(limit)]
        return cls.from_counts([[num_draft_tokens, n, share] for n, share in enumerate(shares)], "replay_tokens_per_step")

    def draw(self, uniform: float) -> tuple[int, int]:
        """The pair at this quantile."""
        drafted, accepted = self.pairs[min(int(np.searchsorted(self.mass, uniform, side="right")), len(self.pairs) - 1)].tolist()
        return drafted, accepted


def histogram_of(config: SpeculativeConfig) -> AcceptanceHistogram:
    """What the configuration states, by file or by its mean."""
    if config.replay_histogram is not None:
        return AcceptanceHistogram.from_file(config.replay_histogram)
    assert config.replay_tokens_per_step is not None
    return AcceptanceHistogram.from_tokens_per_step(config.replay_tokens_per_step, config.num_speculative_tokens)


class ReplayDrafter:
    """Draws are keyed by (`replay_seed`, the row's number, position): a run can be repeated, and no row depends on its neighbours."""

    hidden_state_names: tuple[str, ...] = ()

    def __init__(self, config: SpeculativeConfig, vocab_size: int) -> None:
        self._histogram, self._seed, self._vocab_size = histogram_of(config), config.replay_seed, vocab_size

    def propose(self, rows: SequenceOf[PlannedRow]) -> Draft:
        drawn = [self._draw(row.sequence, row.max_draft_tokens) for row in rows]
        proposals = [self._tokens(row.sequence, count) for row, (count, _) in zip(rows, drawn, strict=True)]
        return Draft.chains(proposals, replayed=np.array([accepted for _, accepted in drawn], np.int32))

    def _draw(self, sequence: Sequence, limit: int) -> tuple[int, int]:
        uniform = uniform_noise(self._seed, sequence.id, len(sequence), np.zeros(1, np.int64), REPLAY)[0]
        drafted, accepted = self._histogram.draw(float(uniform))
        return min(drafted, limit), min(accepted, limit)

    def _tokens(self, sequence: Sequence, count: int) -> list[int]:
        uniform = uniform_noise(self._seed, sequence.id, len(sequence), np.arange(1, count + 1), REPLAY)
        tokens: list[int] = (uniform * self._vocab_size).astype(np.int64).tolist()
        return tokens

    def observe(self, rows: SequenceOf[PlannedRow], verdict: Verdict, hidden_states: Tensor | None) -> None:
        """Nothing to learn."""

    def forget(self, row: int) -> None:
        """Nothing is kept by row."""
