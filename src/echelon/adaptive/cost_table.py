"""What a step costs: milliseconds measured once for a model on a machine.

A step's time is read from a table by the tokens that the target reads, and grows with the keys that attention reads and with the places at
which a token is drawn by noise; drafting has a table by the tokens of a pass, and what its first level takes besides.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import cached_property

import numpy as np
from pydantic import Field, model_validator

from echelon.adaptive.corrections import StepFactors
from echelon.draft import Float64, Int64
from echelon.settings import Settings
from echelon.stats import StepRecord
from echelon.step_costs import PIECE, SMALLEST_PIECE


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

    def without_drafting(self) -> CostTable:
        """The same for a drafter that takes no time."""
        return self.model_copy(update={"drafting": None, "start_ms": 0.0})

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


class TablePieces:
    """Sizes of prompts' pieces by a cost table, corrected by `factors`. Where these stay, the same requests are read in the same pieces."""

    def __init__(self, table: CostTable, factors: StepFactors) -> None:
        self._curve, self._factors = table.step, factors

    def observe(self, record: StepRecord) -> None:
        """The factors learn elsewhere."""

    def largest_piece(self, limit: int, num_decoding: int) -> int:
        """A piece costs at most PIECE steps of the rows beside it."""
        tokens = num_decoding + np.arange(limit + 1)
        times = np.maximum.accumulate(self._factors.at(np.maximum(tokens, 1)) * self._curve.at(tokens))
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
