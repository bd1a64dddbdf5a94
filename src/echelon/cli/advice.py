"""What a trained head is worth: what it gets right on held-out text, at the costs of steps that are measured on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np

from echelon.adaptive.cost_table import CostTable

BATCHES = (1, 8, 32)
DEPTHS, TOKENS_A_DECADE_OF_LAYERS = (1, 2, 5), 0.74  # Scylla (arXiv 2505.07858), theorem 1.2: tokens a step by log10 of a head's layers
FEWEST_EVALUATIONS = 4  # that a law is fitted to
PAYS = 1.03  # times plain decoding, from which a drafter is worth its memory


@dataclass(frozen=True)
class Worth:
    """The best length of chains at a batch, and its speed over plain decoding; length 0 where none is faster."""

    batch_size: int
    length: int
    speedup: float

    def __str__(self) -> str:
        if self.speedup < PAYS:
            return f"batch {self.batch_size}: no chain pays"
        return f"batch {self.batch_size}: chains of {self.length}, {self.speedup:.2f} × plain decoding"


def best_lengths(table: CostTable, right: SequenceOf[float], num_layers_over: float = 1.0, more: float = 0.0) -> list[Worth]:
    """Of each batch the best length, from the shares `right` of tokens that are right at each depth.

    num_layers_over  layers over those that the table was measured with; a level's cost is proportional to them
    more             tokens a step that the longest chain emits besides, shared out over depths as the others are
    """
    kept = np.cumprod(np.asarray(right, np.float64))
    kept = kept * (1.0 + more / max(kept.sum(), 1e-9))
    lengths, found = np.arange(len(kept) + 1), []
    emitted = 1.0 + np.concatenate([[0.0], np.cumsum(kept)])
    for batch in BATCHES:
        drafting = num_layers_over * table.drafting_ms(batch, lengths)
        speeds = emitted / (table.step_ms(batch * (1 + lengths), 0, np.zeros(1)) + drafting)
        best = int(np.argmax(speeds))
        found.append(Worth(batch, best, float(speeds[best] / speeds[0])))
    return found


def tokens_a_decade(log: SequenceOf[Mapping[str, Any]], last_step: int) -> tuple[float, float] | None:
    """By least squares over the evaluations up to `last_step`: tokens a step that ten times the steps bring, and R²; None where there are
    too few.
    """
    points = [(line["step"], line["tokens_per_step"]) for line in log if "tokens_per_step" in line and line["step"] <= last_step]
    if len(points) < FEWEST_EVALUATIONS:
        return None
    x, y = np.log10([p[0] for p in points]), np.array([p[1] for p in points])
    slope, start = np.polyfit(x, y, 1)
    spread = float(((y - y.mean()) ** 2).sum())
    return float(slope), 1.0 - float(((y - slope * x - start) ** 2).sum()) / spread if spread else 0.0


def advice(table: CostTable, log: SequenceOf[Mapping[str, Any]], last_step: int, num_layers: int | None) -> Iterator[str]:
    """Lines for the user: the best lengths, what more text would bring, and, of heads with layers, what another depth would."""
    right = [line["top1"] for line in log if "top1" in line][-1]
    yield "worth here, by measured costs of steps and what is right on held-out text:"
    yield from (f"  {worth}" for worth in best_lengths(table, right))
    if (law := tokens_a_decade(log, last_step)) is not None:
        yield f"  ten times the steps: about {law[0]:+.2f} tokens a step (log10 fitted to this run, R² {law[1]:.2f})"
    for depth in DEPTHS:
        if num_layers is not None and depth != num_layers:
            more = TOKENS_A_DECADE_OF_LAYERS * np.log10(depth / num_layers)
            other = "; ".join(map(str, best_lengths(table, right, depth / num_layers, more)))
            yield f"  {depth} layers, by the published law of depth (0.74 tokens a decade): {other}"
