"""Which drafted tokens of all rows are worth a place in the step: those that together emit most tokens a millisecond.

A drafted token is emitted if it and all before it on its path are what the target chooses; the product of their chances is its survival.
Candidates are taken by falling survival, which keeps parents before their children, and as many as make the rate of the whole step
highest (DSpark, arXiv 2607.05147, Alg. 1, with measured costs).
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """A step so far: tokens that it is expected to emit, drafted tokens in it, milliseconds that drafting them took."""

    emitted: float
    num_drafted: int = 0
    spent_ms: float = 0.0


def draft_lengths(
    step: Underway, survival: Float64, chances: Float64, limits: Int64, step_ms: Float64, level_ms: Float64
) -> tuple[Int64, float]:
    """How many further tokens int64[B] to draft of each chain, and the tokens a millisecond that are expected of the step then.

    survival  float64[B]: of what is drafted of each chain; 1 where nothing is
    chances   float64[B, D]: of each further token, if those before it are kept
    limits    int64[B]: most further tokens of each chain
    step_ms   float64[> num_drafted + B · D]: milliseconds of a step by drafted tokens in it
    level_ms  float64[> B]: milliseconds of drafting a token for so many chains
    """
    num_rows, depth = chances.shape
    lengths, rate_now = np.zeros(num_rows, np.int64), step.emitted / (step.spent_ms + float(step_ms[step.num_drafted]))
    places = np.arange(depth)
    survival = np.where(places < limits[:, None], survival[:, None] * np.cumprod(chances, 1), 0.0)
    by_place = survival.T.ravel()
    order = np.argsort(-by_place, kind="stable")[: np.count_nonzero(by_place)]
    if not len(order):
        return lengths, rate_now
    place, row = np.divmod(order, num_rows)
    # [N, D]: of the likeliest tokens so many, of drafts of at most 1, 2 … tokens
    is_at = place[:, None] == places
    at_place = np.cumsum(is_at, 0)
    gained = np.cumsum(np.cumsum(is_at * by_place[order, None], 0), 1)
    taken = np.cumsum(level_ms[at_place], 1) + step_ms[step.num_drafted + np.cumsum(at_place, 1)]
    rates = (step.emitted + gained) / (step.spent_ms + taken)
    best = int(np.argmax(rates))
    if rates.flat[best] <= rate_now:
        return lengths, rate_now
    last, longest = divmod(best, depth)
    chosen = row[: last + 1][place[: last + 1] <= longest]
    return np.bincount(chosen, minlength=num_rows).astype(np.int64), float(rates.flat[best])
