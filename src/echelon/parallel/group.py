"""Rank 0's side of several ranks: tells the others what to load and to run, and ends them all when one fails.

After a failure nothing runs any more; whoever made the engine makes a new one.
"""

from __future__ import annotations

import json
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from echelon.batch import RaggedBatch
from echelon.errors import ModelLoadError, RankError
from echelon.parallel.pass_plan import Copies, PlanWriter

SILENT_SECONDS = 10.0  # without a sign of life, after which a rank hangs
ENDING_SECONDS = 2.0  # that a rank may take to end by itself
NUM_SENT = 8  # hidden states that a rank may have handed on before the next has taken any
AGAIN = "make a new LLM, or start the server again"


class RankGroup(ABC):
    """The other ranks of one engine.

    setting         which of the settings asks for them, and so how the model is split
    memory          this rank's way to them in a pass (`echelon.parallel.splits`)
    most_at_work    how many ranks can compute at a time, this one among them
    is_one_machine  do all ranks read their weights through the same memory?
    close           ends them
    """

    memory: Any
    most_at_work: int
    is_one_machine: bool
    close: weakref.finalize[..., Any]

    def __init__(self, setting: str, size: int) -> None:
        self.setting, self.size = setting, size
        self._writer, self._failure, self._planned_at = PlanWriter(), "", 0

    def tell(self, message: Mapping[str, Any]) -> None:
        """Ask all workers to load, or to make room for keys and values; `answers` waits until they have."""
        self._send(json.dumps(message).encode())

    def answers(self) -> None:
        """Wait for an answer of every worker.

        Raises
        ------
        ModelLoadError  one cannot do what it was asked
        RankError       one has ended, or hangs
        """
        for rank in range(1, self.size):
            answer = json.loads(self._answer(rank))
            if "error" in answer:
                raise ModelLoadError(f"rank {rank}: {answer['error']}")

    @contextmanager
    def running(self, batch: RaggedBatch, copies: Copies, ends: Sequence[int] = ()) -> Iterator[int]:
        """Inside, the workers run the pass over `batch` after `copies`, in stages cut behind the rows `ends`, and this process is to do so
        too; the plan's hash is given.

        Raises
        ------
        RankError  a worker has ended, hangs, or runs something else
        """
        with self.bound():
            self._planned_at = time.monotonic_ns()
            self._send(self._writer.packed(batch, copies, ends))
            with self.memory.connected(self._writer.hash):
                yield self._writer.hash

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Inside, the workers are in a pass, and what goes wrong ends them all.

        Raises
        ------
        RankError  a worker has ended, hangs, or runs something else
        """
        if self._failure or not self.close.alive:
            raise RankError(self._failure or f"the workers of this model have ended; {AGAIN}")
        try:
            yield
        except BaseException as error:  # the workers are in the middle of a pass that nobody ends
            self._give_up(str(error) if isinstance(error, RankError) else f"a pass failed on rank 0 ({type(error).__name__}); {AGAIN}")
            raise

    @abstractmethod
    def check(self) -> None:
        """Raise `RankError` where a worker has ended or hangs."""

    @abstractmethod
    def _send(self, message: bytes) -> None:
        """To all workers."""

    @abstractmethod
    def _answer(self, rank: int) -> bytes:
        """The next answer of a worker, awaited."""

    def _fail(self, what: str) -> NoReturn:
        self._give_up(f"{what}; {AGAIN}")
        raise RankError(self._failure)

    def _give_up(self, failure: str) -> None:
        self._failure = self._failure or failure
        self._end_at_once()
        self.close()

    @abstractmethod
    def _end_at_once(self) -> None:
        """Let no worker go on."""
