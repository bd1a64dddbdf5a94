"""Stages as they run: a discrete-event simulation of lanes that visit devices one after the other, again and again.

A device does one thing at a time, in the order in which things become ready. While one lane is drafted for or verified, others are
under way on other devices.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

WARM_UP = 4  # rounds of every lane that are not counted
ROUNDS = 32  # that are


class Visit(NamedTuple):
    """A lane on a device: seconds that it keeps it, and seconds afterwards until it has come to the next."""

    device: int
    seconds: float
    travel: float = 0.0


@dataclass(frozen=True)
class Rounds:
    """What a run came to: seconds of a round of all lanes, and the share of the time that each device was kept."""

    seconds: float
    busy: tuple[float, ...]


class _Devices:
    """Devices that are kept by lanes; `ends`: of each lane, when its rounds were over."""

    def __init__(self, batches: Sequence[Sequence[Visit]]) -> None:
        self._batches = batches
        self.free = [0.0] * (1 + max(visit.device for visits in batches for visit in visits))
        self.kept = [0.0] * len(self.free)
        self.ends: list[list[float]] = [[] for _ in batches]
        self._ready = [(0.0, number, 0) for number in range(len(batches))]  # when, which lane, its next visit

    def run(self, rounds: int, is_ending: bool) -> None:
        """Until all have made so many rounds; who has leaves then (`is_ending`), or goes on as long as others have not."""
        while min(map(len, self.ends)) < rounds:
            now, number, place = heapq.heappop(self._ready)
            visits = self._batches[number]
            device, seconds, travel = visits[place % len(visits)]
            self.free[device] = max(now, self.free[device]) + seconds
            self.kept[device] += seconds
            end = self.free[device] + travel
            if (place + 1) % len(visits) == 0:
                self.ends[number].append(end)
            if not is_ending or len(self.ends[number]) < rounds:
                heapq.heappush(self._ready, (end, number, place + 1))


def run_once(batches: Sequence[Sequence[Visit]]) -> Rounds:
    """Let every lane make its visits once, all of them ready at first: seconds until the last has."""
    devices = _Devices(batches)
    devices.run(1, is_ending=True)
    seconds = max(own[0] for own in devices.ends)
    return Rounds(seconds, tuple(kept / seconds for kept in devices.kept))


def run_on(batches: Sequence[Sequence[Visit]]) -> Rounds:
    """Let every lane make its visits again and again, none waiting for the others: seconds of a round, once they are under way."""
    devices = _Devices(batches)
    devices.run(WARM_UP + ROUNDS, is_ending=False)
    seconds = sum(own[WARM_UP + ROUNDS - 1] - own[WARM_UP - 1] for own in devices.ends) / len(batches) / ROUNDS
    return Rounds(seconds, tuple(kept / max(devices.free) for kept in devices.kept))
