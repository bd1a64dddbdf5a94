"""What a step of given rows costs, by the tokens drafted for them, and what drafting these does."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from echelon.adaptive.corrections import DraftingFactors, StepFactors
from echelon.adaptive.cost_table import CostTable
from echelon.draft import Float64
from echelon.sequence import PlannedRow


@dataclass(frozen=True)
class StepShape:
    """What a step costs apart from drafts: tokens fed, of them those of prompts, keys read, rows that emit, those that draw by noise."""

    num_tokens: int = 0
    num_read: int = 0
    num_keys: int = 0
    num_sampled: int = 0
    num_drawn: int = 0

    @classmethod
    def of(cls, rows: SequenceOf[PlannedRow]) -> StepShape:
        sampled = [row for row in rows if row.is_sampled]
        drawn = sum(not row.sequence.sampler.is_argmax for row in sampled)
        num_tokens = sum(r.num_new for r in rows)
        return cls(num_tokens, num_tokens - len(sampled), sum(r.start + r.num_new for r in rows), len(sampled), drawn)


class StepPrices:
    """What a step of this shape costs, by drafted tokens in it, as corrected now; worked out as far as it is asked for."""

    def __init__(self, shape: StepShape, table: CostTable, steps: StepFactors, drafting: DraftingFactors, deciding: float) -> None:
        self.shape, self.start_ms, self.level_factor = shape, drafting.start * table.start_ms, drafting.level
        self.deciding_ms, self._table, self._factors = deciding, table, steps
        self._said = self._step_ms = self._level_ms = np.zeros(0)

    def upto(self, num_drafted: int, num_paths: int, depth: int) -> tuple[Float64, Float64]:
        """Milliseconds of the step, reading of prompts left out, by drafted tokens: float64[> num_drafted + num_paths · depth]; and of
        drafting a level, by paths: float64[> num_paths].

        Prompts have to be read, which makes no drafted token cheaper.
        """
        if len(self._step_ms) <= (most := num_drafted + num_paths * depth):
            shape, table, drafted = self.shape, self._table, np.arange(most + 1)
            factors = self._factors.at(np.maximum(shape.num_tokens + drafted, 1))
            drawn = np.asarray(shape.num_drawn + drafted * (shape.num_drawn / max(shape.num_sampled, 1)), np.float64)
            self._said = table.step_ms(shape.num_tokens + drafted, shape.num_keys, drawn)
            without = table.step_ms(np.array([max(shape.num_sampled, 1)]), shape.num_keys, np.array([shape.num_drawn]))
            reading = float(self._said[0] - without[0]) if shape.num_read else 0.0
            self._step_ms = np.maximum.accumulate(factors * self._said) - factors[0] * reading
            self._step_ms[1:] += self.deciding_ms
            self._level_ms = self.level_factor * table.level_ms(drafted)
        return self._step_ms, self._level_ms

    def said(self, num_drafted: int) -> float:
        """Milliseconds by the table, uncorrected, reading of prompts included; not further than `upto` has been asked for."""
        return float(self._said[num_drafted])
