"""What was decided beside what happened: predicted and measured milliseconds, and the best single draft length in hindsight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from echelon.draft import Float64, Int64

LONGEST = 8  # draft lengths that are compared
MOST_REMEMBERED = 1024  # steps whose errors are


@dataclass
class Hindsight:
    """Sums over the steps that read no prompt, of plain ones in a row over some; `num_proposed` of all: tokens drafted, verified or not.

    predicted_ms  of these steps, and what they took
    tokens, ms    float64[LONGEST + 1]: what drafts of 0, 1, 2 … tokens for every row would have emitted, of tokens whose fate is known, and
                  what they would have taken by the costs as corrected
    errors        |predicted ÷ measured − 1| of the latest steps, the newest last
    """

    num_steps: int = 0
    num_proposed: int = 0
    num_emitted: int = 0
    predicted_ms: float = 0.0
    measured_ms: float = 0.0
    tokens: Float64 = field(default_factory=lambda: np.zeros(LONGEST + 1))
    ms: Float64 = field(default_factory=lambda: np.zeros(LONGEST + 1))
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_REMEMBERED))

    def observe(self, predicted_ms: float, measured_ms: float, accepted: Int64, ms: Float64) -> None:
        """Add a step: `accepted` int64[B] drafted tokens of the rows that emitted, and what steps of every length would take `ms`."""
        self.num_steps += 1
        self.num_emitted += len(accepted) + int(accepted.sum())
        self.predicted_ms += predicted_ms
        self.measured_ms += measured_ms
        self.tokens += len(accepted) + np.minimum(accepted[:, None], np.arange(LONGEST + 1)).sum(0)
        self.ms += ms
        if measured_ms > 0.0:
            self.errors.append(abs(predicted_ms / measured_ms - 1.0))

    @property
    def regret(self) -> float:
        """Share by which the best single length would have emitted more tokens a millisecond; below 0 where it would not have."""
        if not self.predicted_ms:
            return 0.0
        best = float((self.tokens / self.ms).max())
        return 1.0 - self.num_emitted / self.predicted_ms / best if best else 0.0

    @property
    def error(self) -> float:
        """The median of |predicted ÷ measured − 1| over the latest steps."""
        return float(np.median(self.errors)) if self.errors else 0.0

    def as_metrics(self) -> dict[str, Any]:
        """Counters and gauges by name; those that drift with the machine are of the latest steps."""
        return {
            "num_steps": self.num_steps,
            "num_proposed_tokens": self.num_proposed,
            "predicted_ms": self.predicted_ms,
            "measured_ms": self.measured_ms,
            "prediction_error": self.error,
            "regret": self.regret,
            "best_length": int((self.tokens / self.ms).argmax()) if self.predicted_ms else 0,
        }
