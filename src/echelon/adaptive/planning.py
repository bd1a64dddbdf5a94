"""Which drafted tokens of all rows are worth a place in the step: those that together emit most tokens a millisecond.

A drafted token is emitted if it and all before it on its path are what the target chooses; the product of their chances is its survival.
Candidates are taken by falling survival, which keeps parents before their children, and as many as make the rate of the whole step
highest (DSpark, arXiv 2607.05147, Alg. 1, with measured costs). Tokens that are not drafted yet are candidates in several equally likely
cases each: of a draft that is sure of itself half of the time the good half is verified, which its mean would not be worth.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from echelon.draft import Float64, Int64

Bool = NDArray[np.bool_]


def survivals(parents: Int64, depths: Int64, chances: Float64) -> Float64:
    """float64[N]: products of `chances` float64[N] along paths; `parents` int64[N] are indices among the same nodes, −1 a root's child,
    `depths` int64[N] theirs, 0 that of a root's child.
    """
    found = np.array(chances, np.float64)
    for depth in range(1, int(depths.max(initial=0)) + 1):
        level = np.flatnonzero(depths == depth)
        found[level] *= found[parents[level]]
    return found


def admitted(survival: Float64, depths: Int64, num_sampled: int, step_ms: Float64, spent_ms: float) -> Bool:
    """bool[N]: which of the drafted tokens to verify.

    survival     float64[N] of the tokens, `depths` int64[N] of them (0 first)
    num_sampled  rows that emit a token of their own besides
    step_ms      float64[> N]: milliseconds of a step by drafted tokens in it
    spent_ms     what drafting has taken already
    """
    order = np.lexsort((depths, -survival))
    emitted = np.full(len(order) + 1, float(num_sampled))
    emitted[1:] += np.cumsum(survival[order])
    rates = emitted / (spent_ms + step_ms[: len(order) + 1])
    is_admitted = np.zeros(len(survival), np.bool_)
    is_admitted[order[: int(np.argmax(rates))]] = True
    return is_admitted


@dataclass(frozen=True)
class Underway:
    """A step so far: rows that emit a token of their own, survivals float64[N] of what is drafted, milliseconds that drafting it took."""

    num_sampled: int
    drafted: Float64 = field(default_factory=lambda: np.zeros(0))
    spent_ms: float = 0.0


def drafted_further(step: Underway, further: Float64, step_ms: Float64, level_ms: Float64, start_ms: float = 0.0) -> tuple[Bool, float]:
    """Which drafted paths bool[B] to draft further, and the tokens a millisecond that are expected of the step then.

    further   float64[B, D, W]: survivals of each further token of each path, falling along both: W equally likely cases, as nobody knows
              before it is drafted how good a token will be, and only the good ones are verified; 0 where there shall be no token
    step_ms   float64[> N + B · D]: milliseconds of a step by drafted tokens in it
    level_ms  float64[> B]: milliseconds of drafting a token for so many paths
    start_ms  what the first of these takes besides
    """
    (num_paths, depth, num_cases), num_drafted = further.shape, len(step.drafted)
    by_place = further.transpose(1, 0, 2).ravel()  # a stable order has a path's best case first
    values = np.concatenate([step.drafted, by_place])
    order = np.argsort(-values, kind="stable")[: np.count_nonzero(values)]
    index = order - num_drafted
    place = np.where(index < 0, -1, index // max(num_paths * num_cases, 1))
    # [N, D + 1]: of the likeliest tokens so many, of at most 0, 1 … further places; tokens are counted in shares of 1 / W
    shares = np.where(index < 0, num_cases, 1)
    is_in = place[:, None] < np.arange(depth + 1)
    gained = np.cumsum(is_in * (values[order] * shares / num_cases)[:, None], 0)
    num_shares = np.cumsum(is_in * shares[:, None], 0)
    at_place = -(-np.cumsum(place[:, None] == np.arange(depth), 0) // num_cases)
    at_place[:, :1] = np.cumsum((place == 0) & (index % num_cases == 0))[:, None]  # whatever comes of it
    taken = np.interp(np.arange(len(step_ms) * num_cases) / num_cases, np.arange(len(step_ms)), step_ms)[num_shares]
    taken[:, 1:] += start_ms + np.cumsum(level_ms[at_place], 1)
    rates = (step.num_sampled + gained) / (step.spent_ms + taken)
    goes_on = np.zeros(num_paths, np.bool_)
    rate_now = max([step.num_sampled / (step.spent_ms + float(step_ms[0])), *rates[:, 0].tolist()])
    if not rates.size or float(rates.max()) <= rate_now:
        return goes_on, rate_now
    last, longest = divmod(int(np.argmax(rates)), depth + 1)
    chosen = index[: last + 1][(place[: last + 1] >= 0) & (place[: last + 1] < longest)]
    goes_on[chosen // num_cases % num_paths] = True
    return goes_on, float(rates.max())
