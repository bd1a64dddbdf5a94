"""Ranks that others have started, on one machine or several: rank 0 tells the rest by gloo, and each watches whether the others live."""

from __future__ import annotations

import json
import os
import time
import weakref
from typing import Any

import torch
from torch import Tensor

from echelon.errors import ConfigError, RankError
from echelon.parallel.group import ENDING_SECONDS, RankGroup
from echelon.parallel.meeting import TICK, Meeting
from echelon.parallel.messages import Told
from echelon.parallel.serving import serve
from echelon.parallel.splits import SPLITS, Split
from echelon.parallel.summons import UNSET, Summons, summoned

_has_met = False  # the ranks beside this process serve one engine, and end with it


class JoinedRanks(RankGroup):
    """The workers of one engine, in processes that this one has not started."""

    def __init__(self, setting: str, summons: Summons) -> None:
        super().__init__(setting, summons.size)
        self.most_at_work, self.is_one_machine = summons.size, False
        self._meeting = meeting = _met(setting, summons)
        told = self._told = Told(meeting)
        self._lives = [meeting.group(f"life {rank}", 0, rank).broadcast(_nothing(), 1) for rank in range(1, self.size)]
        self._num_asked = 0
        self.memory = SPLITS[setting].link(meeting)
        self.close = weakref.finalize(self, _end, os.getpid(), meeting, told, self._lives)

    def tell(self, message: dict[str, Any]) -> None:  # type: ignore[override]
        """Ask all workers to load, or to make room for keys and values."""
        self._num_asked += 1
        super().tell(message)

    def check(self) -> None:
        """Raise `RankError` where a worker has ended or hangs."""
        for rank, life in enumerate(self._lives, 1):
            if life.is_completed():
                self._fail(self._meeting.reason() or f"rank {rank} has ended; see its own error")
        try:
            self._meeting.check()
        except RankError as error:
            self._give_up(str(error))
            raise

    def _send(self, message: bytes) -> None:
        self._told.tell(message)

    def _answer(self, rank: int) -> bytes:
        return self._meeting.read(f"done/{rank}/{self._num_asked}", self.check)

    def _end_at_once(self) -> None:
        self._meeting.say_why(self._failure)
        self._meeting.leave(has_failed=True)


class JoinedWay:
    """A worker's way to a rank 0 that has not started it."""

    def __init__(self, setting: str, summons: Summons) -> None:
        self.meeting = _met(setting, summons)
        self._told, self._num_answers = Told(self.meeting), 0
        self._life = self.meeting.group(f"life {self.meeting.rank}", 0, self.meeting.rank)
        self._link = SPLITS[setting].link(self.meeting)

    def link(self, split: Split) -> Any:
        """As gloo has it."""
        assert isinstance(self._link, split.link)
        return self._link

    def message(self) -> bytes:
        """The next one; empty when rank 0 is done."""
        return self._told.next()

    def answer(self, value: dict[str, Any]) -> None:
        """As JSON, signed."""
        self._num_answers += 1
        self.meeting.post(f"done/{self.meeting.rank}/{self._num_answers}", json.dumps(value).encode())

    def end(self) -> None:
        """Let rank 0 know that this rank has done all that it was told."""
        self.meeting.wait(self._life.broadcast(_nothing(), 1))
        self.meeting.leave(has_failed=False)


def serve_summoned(setting: str, summons: Summons) -> None:
    """Be a worker, until rank 0 is done.

    Raises
    ------
    EchelonError  another rank has ended, or hangs, or is none of ours
    """
    way = JoinedWay(setting, summons)
    try:
        serve(way)
        way.end()
    except BaseException as error:
        way.meeting.say_why(str(error) if isinstance(error, RankError) else type(error).__name__)
        way.meeting.leave(has_failed=True)
        raise


def summons_for(asked: str, size: int) -> Summons | None:
    """What this process was started for, where it was as one of `size` ranks.

    Raises
    ------
    ConfigError  it was started as one of another number
    """
    summons = summoned()
    if summons is not None and summons.size != size:
        raise ConfigError(f"{asked}, and WORLD_SIZE is {summons.size}: this process is one of so many; choose the same, or {UNSET}")
    return summons


def _met(setting: str, summons: Summons) -> Meeting:
    global _has_met
    if _has_met:
        raise ConfigError("the ranks that were started beside this process serve one LLM, and have served it; start all of them again")
    _has_met = True
    return Meeting(setting, summons)


def _nothing() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8)


def _end(owner: int, meeting: Meeting, told: Told, lives: list[Any]) -> None:
    """Tell the workers that there is nothing more, and wait for a moment until they have read it."""
    if os.getpid() != owner or meeting.has_left:
        return
    until = time.monotonic() + ENDING_SECONDS
    try:
        told.tell(b"")
        while not all(life.is_completed() for life in lives) and time.monotonic() < until:
            time.sleep(TICK.total_seconds() / 10)
    except RankError as error:
        meeting.say_why(str(error))
    meeting.leave(has_failed=not all(life.is_completed() for life in lives))
