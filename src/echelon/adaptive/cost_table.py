"""What a step costs: milliseconds measured once for a model on a machine, corrected by the steps that follow.

A step's time is read from a table by the tokens that the target reads, and grows with the keys that attention reads and with the places at
which a token is drawn by noise; drafting has a table by the tokens of a pass. Machines change their speed under load, so measured steps are
compared with the table: one factor for a plain step and one for what drafted tokens add to it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import cached_property

import numpy as np
from pydantic import Field, model_validator

from echelon.draft import Float64, Int64
from echelon.settings import Settings
from echelon.stats import StepRecord
from echelon.step_costs import PIECE, SMALLEST_PIECE

NOISE = 0.1  # relative standard deviation of a step's time
UNSURE = 0.3  # of both factors together at first
UNSURE_OF_STEPS, UNSURE_OF_DRAFTING = (0.1, 1.0), (1.0, 1.0)  # of each by itself: without what drafts add, and of that
DRIFT, DRIFT_OWN = 0.01, 0.02  # what a step adds to that, of the second as a share of what there was at first
OUTLIER = 3.0  # standard deviations of a step's time, and no more, are learned from
LEAST, MOST = 0.3, 4.0  # factors that are believed


class CostCurve(Settings):
    """Milliseconds of a pass by its tokens: measured points, straight lines between them, and the last slope beyond."""

    tokens: tuple[int, ...] = Field(min_length=1)
    milliseconds: tuple[float, ...]

    @model_validator(mode="after")
    def _is_a_curve(self) -> CostCurve:
        if len(self.tokens) != len(self.milliseconds) or list(self.tokens) != sorted(set(self.tokens)) or self.tokens[0] < 1:
            raise ValueError("a cost curve needs one time for each of rising numbers of tokens")
        if not all(np.isfinite(self.milliseconds)) or min(self.milliseconds) <= 0.0:
            raise ValueError("the times of a cost curve are above 0 milliseconds")
        return self

    def at(self, tokens: Int64) -> Float64:
        """Milliseconds float64[...] of passes over so many tokens int64[...]; 0 where there are none. More tokens never cost less."""
        last, (times, slope) = self.tokens[-1], self._dense
        within = np.minimum(tokens, last)
        return np.asarray(times[within] + (tokens - within) * slope)

    @cached_property
    def _dense(self) -> tuple[Float64, float]:
        """Milliseconds float64[last + 1] by tokens, and of a token beyond the last."""
        times = np.maximum.accumulate(np.asarray(self.milliseconds))
        found = np.interp(np.arange(self.tokens[-1] + 1), self.tokens, times)
        found[0] = 0.0
        return found, float(times[-1] - times[-2]) / (self.tokens[-1] - self.tokens[-2]) if len(times) > 1 else 0.0


class CostTable(Settings):
    """Costs of one model with its drafter, on one machine.

    step       of the target's passes, with few keys to read
    key_ms     milliseconds that a key of a row adds, whatever the number of the row's new tokens
    place_ms   milliseconds that a token drawn by noise adds
    drafting   of the drafter's passes, one a level; None: drafting costs nothing worth counting
    start_ms   milliseconds that the first level of a draft takes besides: the step before has left nothing of the drafter in the caches
    """

    step: CostCurve
    key_ms: float = Field(default=0.0, ge=0.0)
    place_ms: float = Field(default=0.0, ge=0.0)
    drafting: CostCurve | None = None
    start_ms: float = Field(default=0.0, ge=0.0)

    def described(self) -> str:
        """What a user reads of it."""
        step = ", ".join(f"{n}: {ms:.4g}" for n, ms in zip(self.step.tokens, self.step.milliseconds, strict=True))
        lines = [
            f"a step, ms by its tokens: {step}",
            f"a key read: {1e6 * self.key_ms:.3g} ns; a token drawn: {1e3 * self.place_ms:.3g} µs",
        ]
        if self.drafting is not None:
            levels = ", ".join(f"{n}: {ms:.3g}" for n, ms in zip(self.drafting.tokens, self.drafting.milliseconds, strict=True))
            lines.append(f"a level of drafting, ms by rows: {levels}; the first one {self.start_ms:.3g} more")
        return "\n".join(lines)

    def step_ms(self, tokens: Int64, num_keys: int, num_drawn: Int64 | Float64) -> Float64:
        """Milliseconds float64[...] of steps over `tokens` int64[...] that read `num_keys` keys in all and draw at int64[...] places."""
        return np.asarray(self.step.at(tokens) + self.key_ms * num_keys + self.place_ms * num_drawn)

    def level_ms(self, tokens: Int64) -> Float64:
        """Milliseconds float64[...] of drafting passes over so many tokens int64[...]."""
        return self.drafting.at(tokens) if self.drafting is not None else np.zeros(np.shape(tokens))

    def drafting_ms(self, num_rows: int, num_levels: Int64) -> Float64:
        """Milliseconds float64[...] of drafts of so many levels int64[...] for so many rows."""
        return np.asarray(self.start_ms * (num_levels > 0) + num_levels * float(self.level_ms(np.array(num_rows))))


class Correction:
    """Two factors by which steps take longer than the table says: `plain` of a step without drafts, `extra` of what drafts add to it; or
    drafting, of its first level's own time, and of its levels.

    A Kalman filter. A machine that slows down slows both, which is learned within some ten steps from steps of any kind; how the factors
    differ is told apart only by steps with more and with fewer drafts, and stays known much longer.
    """

    def __init__(self, unsure: tuple[float, float] = UNSURE_OF_STEPS) -> None:
        self.plain = self.extra = 1.0
        self._drift = np.square(DRIFT_OWN * np.array(unsure))
        self._variance = UNSURE**2 + np.diag(np.square(unsure))  # [2, 2] of both

    def observe(self, plain_ms: float, extra_ms: float, measured_ms: float) -> None:
        """Learn from a step: what the table says of it without drafts, what these add, and what it took."""
        whole_ms = plain_ms + extra_ms
        factors, parts = np.array([self.plain, self.extra]), np.array([plain_ms, extra_ms]) / whole_ms
        self._variance += DRIFT**2 * np.outer(factors, factors) + np.diag(self._drift * factors**2)
        expected, learned = float(factors @ parts), self._variance @ parts
        variance = float(parts @ learned) + (NOISE * expected) ** 2
        bound = OUTLIER * variance**0.5
        factors += learned / variance * min(max(measured_ms / whole_ms - expected, -bound), bound)
        self._variance -= np.outer(learned, learned) / variance
        self.plain, self.extra = np.clip(factors, LEAST, MOST).tolist()

    def predicted(self, plain_ms: float, step_ms: Float64) -> Float64:
        """Milliseconds float64[...] of steps for which the table says `step_ms`, and `plain_ms` without their drafts."""
        return np.asarray(self.plain * plain_ms + self.extra * (step_ms - plain_ms))


class TablePieces:
    """Sizes of prompts' pieces by a cost table, `correction` included. Where that stays, the same requests are read in the same pieces."""

    def __init__(self, table: CostTable, correction: Correction) -> None:
        self._curve, self._correction = table.step, correction

    def observe(self, record: StepRecord) -> None:
        """The correction learns elsewhere."""

    def largest_piece(self, limit: int, num_decoding: int) -> int:
        """A piece costs at most PIECE steps of the rows beside it."""
        decoding = float(self._curve.at(np.array(num_decoding)))
        times = self._correction.predicted(decoding, self._curve.at(num_decoding + np.arange(limit + 1)))
        return min(limit, max(SMALLEST_PIECE, int((times[1:] <= (1.0 + PIECE) * times[0]).sum())))


def monotone(tokens: SequenceOf[int], milliseconds: SequenceOf[float]) -> CostCurve:
    """The rising curve that lies closest to these points: neighbours that fall share their mean (isotonic regression)."""
    pools: list[tuple[float, int]] = []  # mean, points
    for time in milliseconds:
        pools.append((float(time), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (high, m), (low, n) = pools[-2:]
            pools[-2:] = [((high * m + low * n) / (m + n), m + n)]
    return CostCurve(tokens=tuple(tokens), milliseconds=tuple(mean for mean, count in pools for _ in range(count)))
