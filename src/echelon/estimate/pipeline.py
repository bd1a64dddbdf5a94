"""Stages as they run: a discrete-event simulation of micro-batches that visit devices one after the other, again and again.

A device does one thing at a time, in the order in which things become ready. While one micro-batch is drafted for or verified, others are
under way on other devices.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

WARM_UP = 4  # rounds of every micro-batch that are not counted
ROUNDS = 16  # that are


class Visit(NamedTuple):
    """A micro-batch on a device: seconds that it keeps it, and seconds afterwards until it has come to the next."""

    device: int
    seconds: float
    travel: float = 0.0


@dataclass(frozen=True)
class Rounds:
    """What a run came to: seconds of a round of all micro-batches, and the share of the time that each device was kept."""

    seconds: float
    busy: tuple[float, ...]


def run_rounds(batches: Sequence[Sequence[Visit]], rounds: int = ROUNDS, warm_up: int = WARM_UP) -> Rounds:
    """Let every micro-batch make its visits `warm_up` + `rounds` times, none waiting for the others; the last `rounds` are measured."""
    free = [0.0] * (1 + max(visit.device for visits in batches for visit in visits))
    kept = [0.0] * len(free)
    ends: list[list[float]] = [[] for _ in batches]
    ready = [(0.0, number, 0) for number in range(len(batches))]  # when, which micro-batch, its next visit
    while ready:
        now, number, place = heapq.heappop(ready)
        visits = batches[number]
        visit = visits[place % len(visits)]
        free[visit.device] = max(now, free[visit.device]) + visit.seconds
        kept[visit.device] += visit.seconds
        end = free[visit.device] + visit.travel
        if (place + 1) % len(visits) == 0:
            ends[number].append(end)
        if len(ends[number]) < warm_up + rounds:
            heapq.heappush(ready, (end, number, place + 1))
    first = max(own[warm_up - 1] for own in ends) if warm_up else 0.0
    last = max(own[-1] for own in ends)
    return Rounds((last - first) / rounds, tuple(k / last for k in kept))
