"""One token for each of many places, by the rule of `sampling.Sampler`: compiled where the extension was built, else the rule itself.

The kernel finds the thresholds of top-k and top-p without a sort, and computes noise only for tokens that can still win. A place's token
depends on that place alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from echelon.errors import EchelonError
from echelon.ops.compiled import is_built, kernels
from echelon.sampling import Sampler


@dataclass(frozen=True)
class Place:
    """Raw logits float32 [V] after `tokens` and the drafted `path`, which counts as if it were committed."""

    sampler: Sampler
    logits: NDArray[np.float32]
    tokens: Sequence[int]
    path: Sequence[int] = ()

    @property
    def position(self) -> int:
        return len(self.tokens) + len(self.path)


def choose(places: Sequence[Place]) -> list[int]:
    """The sampler's own token at every place.

    Raises
    ------
    EchelonError  a place's logits hold NaN or infinity, or nothing but −infinity
    """
    processed = [p.sampler.processed(p.logits, p.tokens, p.path) for p in places]
    for place, logits in zip(places, processed, strict=True):
        if not np.isfinite(highest := logits.max()):
            raise EchelonError(
                f"the largest logit at position {place.position} is {highest}: the model overflowed, or its parameters forbid every token"
            )
    tokens = [int(logits.argmax()) if p.sampler.params.is_greedy else -1 for p, logits in zip(places, processed, strict=True)]
    drawn = [i for i, token in enumerate(tokens) if token < 0]
    for i, token in zip(drawn, _draw([places[i] for i in drawn], [processed[i] for i in drawn]), strict=True):
        tokens[i] = token
    return tokens


def _draw(places: list[Place], logits: list[NDArray[np.float32]]) -> list[int]:
    if not is_built():
        return [p.sampler.choose_processed(values, p.position) for p, values in zip(places, logits, strict=True)]
    params = [p.sampler.params for p in places]
    drawn: list[int] = kernels.sample_rows(
        [torch.from_numpy(values) for values in logits],
        [q.temperature for q in params],
        [q.top_k for q in params],
        [q.top_p for q in params],
        [q.min_p for q in params],
        [p.sampler.seed for p in places],
        [p.sampler.index for p in places],
        [p.position for p in places],
    )
    return drawn
