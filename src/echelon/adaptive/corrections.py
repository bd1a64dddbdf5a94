"""By what factors steps and drafting take longer than a cost table says, learned from the steps that follow its measurement.

A Kalman filter. Machines change their speed under load, which moves all factors of a kind together and is learned within some ten steps;
how they differ from each other is told apart only by steps that differ, and stays known for hundreds. What is not seen goes back to the
table, so that nothing is thought dear for good because it once was.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from echelon.draft import Float64, Int64

NOISE = 0.1  # relative standard deviation of a step's time
UNSURE = 0.25  # of all factors together at first
UNSURE_OF_WIDTHS, ALIKE = 0.27, 2.0  # of each by itself; doublings of the tokens after which two of these have little in common
UNSURE_OF_DRAFTING = 1.0
FADE = 0.5 ** (1 / 700)  # of what is known in a step
BELIEVED = 0.25  # of what was expected, and no more, is a single step believed to be off
LEAST, MOST = 0.3, 4.0  # factors that are believed


class Factors:
    """Factors `values` float64[K] of the parts of a sum of which only the whole is measured; 1 at first, with this `variance` [K, K], and
    again when nothing has been learned for long.
    """

    def __init__(self, variance: Float64) -> None:
        self.values = np.ones(len(variance))
        self._variance, self._at_first = variance.copy(), variance

    def fade(self, num_steps: int = 1) -> None:
        """So many steps have passed."""
        fade = FADE**num_steps
        self.values = 1.0 + fade * (self.values - 1.0)
        self._variance = fade**2 * self._variance + (1.0 - fade**2) * self._at_first * np.outer(self.values, self.values)

    def observe(self, parts_ms: Float64, measured_ms: float) -> None:
        """Learn from what took `measured_ms`, of which the table says that its parts take `parts_ms` float64[K]."""
        self.fade()
        whole_ms = float(parts_ms.sum())
        parts = parts_ms / whole_ms
        expected, learned = float(self.values @ parts), self._variance @ parts
        variance = float(parts @ learned) + (NOISE * expected) ** 2
        bound = BELIEVED * expected
        self.values = self.values + learned / variance * min(max(measured_ms / whole_ms - expected, -bound), bound)
        np.clip(self.values, LEAST, MOST, out=self.values)
        self._variance -= np.outer(learned, learned) / variance


class StepFactors:
    """Factors of steps by their tokens: one at each number of `tokens` that was measured, straight lines by the logarithm between them."""

    def __init__(self, tokens: SequenceOf[int]) -> None:
        self._tokens = np.log2(np.array(tokens))
        apart = np.abs(self._tokens[:, None] - self._tokens)
        self._factors = Factors(UNSURE**2 + UNSURE_OF_WIDTHS**2 * np.exp(-apart / ALIKE))

    def at(self, tokens: Int64) -> Float64:
        """float64[...] of steps over so many tokens int64[...], 1 at least."""
        return np.asarray(np.interp(np.log2(tokens), self._tokens, self._factors.values))

    def observe(self, num_tokens: int, said_ms: float, measured_ms: float) -> None:
        """Learn from a step over so many tokens: what the table says of it, and what it took."""
        place = float(np.interp(np.log2(num_tokens), self._tokens, np.arange(len(self._tokens))))
        shares = np.maximum(0.0, 1.0 - np.abs(place - np.arange(len(self._tokens))))
        self._factors.observe(said_ms * shares, measured_ms)

    def as_metrics(self) -> dict[str, float]:
        """By tokens."""
        return {f"{2**tokens:.0f}": float(factor) for tokens, factor in zip(self._tokens, self._factors.values, strict=True)}


class DraftingFactors:
    """Factors of what the first level of a draft takes besides, and of levels."""

    def __init__(self) -> None:
        self._factors = Factors(UNSURE**2 + np.diag([UNSURE_OF_DRAFTING**2] * 2))

    @property
    def start(self) -> float:
        return float(self._factors.values[0])

    @property
    def level(self) -> float:
        return float(self._factors.values[1])

    def rest(self, num_steps: int) -> None:
        """Nothing was drafted in so many steps."""
        self._factors.fade(num_steps)

    def observe(self, start_ms: float, levels_ms: float, measured_ms: float) -> None:
        """Learn from a draft: what the table says of its beginning and of its levels, and what both took."""
        self._factors.observe(np.array([start_ms, levels_ms]), measured_ms)
