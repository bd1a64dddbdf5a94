"""Sampling parameters, and the one rule that turns a row of logits into a token.

Sampling is greedy over perturbed logits: the token is the argmax of processed float32 logits plus Gumbel noise, and the noise is a
pure function of (seed, index among n, position, token id). Whoever computes the same logits for the same place in the same request
therefore draws the same token, whatever else is in the batch, and with or without speculation. A draft model that draws with the
same noise agrees with its target about as often as the two distributions allow (Daliri, Musco, Suresh 2024, "Coupling without
Communication and Drafter-Invariant Speculative Decoding").
"""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from echelon.config import Settings
from echelon.errors import EchelonError, RequestError

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class SamplingParams(Settings):
    """Names, meanings and defaults of vLLM's `SamplingParams`; `temperature=0` is greedy."""

    error: ClassVar[type[EchelonError]] = RequestError

    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=-1)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=0, lt=1 << 64)
    max_tokens: int = Field(default=16, ge=1)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @model_validator(mode="before")
    @classmethod
    def _one_stop_string(cls, values: dict[str, object]) -> dict[str, object]:
        if isinstance(values.get("stop"), str):
            return {**values, "stop": (values["stop"],)}
        return values

    @model_validator(mode="after")
    def _no_empty_stop(self) -> Self:
        if any(not s for s in self.stop):
            raise ValueError("stop holds an empty string, which would end every request at once; remove it")
        return self

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) on one 64-bit integer."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_mix` of every entry; uint64 products wrap."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def gumbel_noise(seed: int, index: int, position: int, token_ids: Int64) -> NDArray[np.float64]:
    """Standard Gumbel noise, float64, one value per token id; a pure function of its arguments.

    `position` is the absolute position that the token will have in its sequence.
    """
    key = _mix((seed + _GOLDEN) & _MASK)
    key = _mix(key ^ _mix((index * _GOLDEN + 1) & _MASK))
    key = _mix(key ^ _mix((position * _GOLDEN + 2) & _MASK))
    bits = _mix_array(np.uint64(key) + (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.asarray(-np.log(-np.log(uniform)))


def kept_tokens(scaled: Float32, params: SamplingParams) -> Int64:
    """Ids that min_p, top_k and top_p leave, in this order (vLLM's); `scaled` float32 [V] is divided by the temperature already.

    Each filter is a threshold on the value, so equal logits share their fate and the result does not depend on a sort order.
    """
    threshold = np.float32(-np.inf)
    if params.min_p > 0.0:
        threshold = np.float32(scaled.max() + np.log(np.float32(params.min_p)))
    if 0 < params.top_k < len(scaled):
        threshold = max(threshold, np.partition(scaled, len(scaled) - params.top_k)[len(scaled) - params.top_k])
    ids = np.flatnonzero(scaled >= threshold)
    if params.top_p < 1.0:
        descending = -np.sort(-scaled[ids])
        weights = np.exp((descending - descending[0]).astype(np.float64))
        before = np.cumsum(weights) - weights  # mass of all that are larger
        last = int(np.searchsorted(before, params.top_p * weights.sum(), side="left")) - 1
        ids = ids[scaled[ids] >= descending[max(last, 0)]]
    return ids


def choose_token(logits: Float32, params: SamplingParams, seed: int, index: int, position: int) -> int:
    """The token of one row: argmax of processed logits plus keyed noise. `logits` float32 [V], raw."""
    if params.is_greedy:
        return int(logits.argmax())
    scaled = logits / np.float32(params.temperature)
    ids = kept_tokens(scaled, params)
    return int(ids[np.argmax(scaled[ids] + gumbel_noise(seed, index, position, ids))])
