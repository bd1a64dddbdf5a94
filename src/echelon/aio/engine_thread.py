"""The thread that runs the engine: it steps, and requests enter and leave between steps.

The loop's side puts commands into a queue; the engine's side publishes, after each step, how far every changed row has come. A slow
reader finds the latest state and never a backlog of them; log-probabilities that wait for it are counted, and end its request at a limit.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from functools import partial

from echelon.aio.limits import Limits, RequestObserver
from echelon.aio.request_handle import RequestHandle, RequestRow
from echelon.engine import Engine
from echelon.errors import OverloadedError, RankError, RequestTimeoutError, RowError, SlowReaderError, UnavailableError, location_of
from echelon.llm import LLM
from echelon.sequence import FinishReason, RowState, Sequence, state_of

logger = logging.getLogger("echelon.engine")
GATHER_SECONDS = 0.005  # that a step waits for who comes in the place of a request that has just ended, and
GATHER_SHARE = 0.05  # no longer than this share of the step before: missing the step would cost all of it
STALLED = "the engine makes no progress; ask again later"
STOPPED = "the engine has stopped; ask again elsewhere or later"
IDLE_SECONDS = 1.0  # at most between the ticks of an engine that has nothing to do
POLL_SECONDS = 0.02  # between looks at a thread that is about to end


class EngineThread:
    """The engine's thread and its interface for the event loop, from which every public method but `start` and `stop` is called."""

    def __init__(self, llm: LLM, limits: Limits, observer: RequestObserver) -> None:
        self.llm, self.limits, self._observer = llm, limits, observer
        self.capacity = llm.config.max_num_seqs + limits.max_queue
        self.num_in_flight = 0  # sequences of requests that have not been answered to the end
        self.is_draining = False
        self._commands: queue.SimpleQueue[Callable[[Engine], None]] = queue.SimpleQueue()
        self._rows: dict[int, tuple[RequestRow, RequestHandle]] = {}  # by sequence id; the engine's side alone
        self._unstarted: dict[int, RequestRow] = {}
        self.leaves_at = math.inf  # `time.monotonic` from which nothing is waited for any more
        self.has_died = False  # of an error, which nothing mends
        self._is_stopping = False
        self._gathers_until = 0.0
        self._progress_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="echelon-engine", daemon=True)

    # The loop's side

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the step it is in; what still runs ends with an error. An engine that hangs is not waited for."""
        self._commands.put(self._stop)
        while self.is_healthy and time.monotonic() < self.leaves_at:
            await asyncio.sleep(POLL_SECONDS)

    @property
    def is_healthy(self) -> bool:
        """The engine's thread lives, and has made a step, or had none to make, within the stall timeout."""
        return self._thread.is_alive() and not self._is_stalled

    @property
    def has_failed(self) -> bool:
        """The engine's thread has died of an error, or hangs."""
        return self.has_died or (self._thread.is_alive() and self._is_stalled)

    @property
    def _is_stalled(self) -> bool:
        return time.monotonic() - self._progress_at >= self.limits.stall_timeout

    def _check_health(self) -> None:
        if not self.is_healthy:
            raise UnavailableError(STOPPED if self._is_stopping else STALLED)

    def reserve(self, count: int) -> None:
        """Reserve slots for `count` sequences, from before their prompts are read until they are answered.

        Raises
        ------
        OverloadedError   there are none
        UnavailableError  the engine shuts down, or makes no progress
        """
        self._check_health()
        if self.is_draining:
            raise UnavailableError("the server is shutting down; ask again elsewhere or later")
        if self.num_in_flight + count > self.capacity:
            raise OverloadedError(f"the server is full: {self.num_in_flight} of {self.capacity} places are taken; ask again later")
        self.num_in_flight += count

    def release(self, count: int) -> None:
        """Give slots back."""
        self.num_in_flight -= count

    async def updates(self, handle: RequestHandle) -> AsyncIterator[RequestHandle]:
        """Run the sequences of a request; yields it whenever some have grown, until all are done or it is aborted. Closing the iterator
        takes them out of the engine.

        Raises
        ------
        RequestTimeoutError  they waited or ran too long
        UnavailableError     the engine has died, or made no step for too long
        SlowReaderError      nobody reads what they say
        """
        self._commands.put(partial(self._add, handle))
        is_last = False
        try:
            while not is_last:
                await self._wait_for_change(handle)
                if handle.is_aborted and not handle.is_finished:
                    return
                is_last = handle.is_finished  # of the states that are yielded: later ones may come while they are sent
                handle.num_sent = handle.num_tokens
                yield handle
                handle.num_sent = None
                if handle.is_dropped:
                    unread = f"more than {self.limits.max_unread_bytes} bytes waited for a client that did not read"
                    raise SlowReaderError(f"{unread}; read faster, or ask for fewer logprobs")
        finally:
            if not handle.is_finished:
                self._commands.put(partial(self._abort, handle))

    def abort(self, handle: RequestHandle) -> None:
        """End a request; the engine lets go of it whether or not its reader comes back."""
        handle.abort()
        self._commands.put(partial(self._abort, handle))

    async def _wait_for_change(self, handle: RequestHandle) -> None:
        """Wait for the next state, no longer than the request may wait or run."""
        limits = self.limits
        while not handle.changed.is_set():
            has_started = handle.has_started
            limit = limits.total_timeout if has_started else min(limits.queue_timeout, limits.total_timeout)
            remaining = handle.arrived_at + limit - time.monotonic()
            if remaining <= 0.0:
                what = f"the request {'ran' if has_started else 'waited'} longer than {limit:.0f} s and was given up"
                raise RequestTimeoutError(f"{what}; ask for fewer tokens, or later")
            self._check_health()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(remaining, IDLE_SECONDS)):
                    await handle.changed.wait()
        handle.changed.clear()

    def _store_states(self, changes: list[tuple[RequestHandle, list[RowState]]]) -> None:
        for handle, states in changes:
            handle.states = states
            handle.changed.set()
            if handle.num_unread_bytes > self.limits.max_unread_bytes and not handle.is_dropped:
                handle.is_dropped = True
                logger.warning("a stream ends: its client does not read, and %d bytes wait for it", handle.num_unread_bytes)
                self._observer.cut()
                self._commands.put(partial(self._drop, handle))

    # The engine's side

    def _run(self) -> None:
        try:
            with self.llm.exclusive() as engine:
                while not self._is_stopping:
                    self._tick(engine)
        except BaseException as error:
            self.has_died = True
            logger.critical("the engine's thread ends: %s", location_of(error))
        finally:
            self._is_stopping = True
            self._fail_all()

    def _tick(self, engine: Engine) -> None:
        """Execute the commands that have come meanwhile, then make a step."""
        if not engine.has_work:
            self._progress_at = time.monotonic()
            self.llm.storage.check_ranks()
            with suppress(queue.Empty):
                self._execute(self._commands.get(timeout=min(IDLE_SECONDS, self.limits.stall_timeout / 4)), engine)
        with suppress(queue.Empty):
            while (wait := self._gathers_until - time.monotonic()) > 0.0:
                self._execute(self._commands.get(timeout=wait), engine)
            while True:
                self._execute(self._commands.get_nowait(), engine)
        if engine.has_work and not self._is_stopping:
            before, started_at = engine.stats.num_input_tokens, time.monotonic()
            changed = self._step(engine)
            if changed or engine.stats.num_input_tokens > before:
                self._progress_at = time.monotonic()
            self._publish(changed, engine, started_at)
            if any(s.is_finished for s in changed):
                ended_at = time.monotonic()
                self._gathers_until = ended_at + min(GATHER_SECONDS, GATHER_SHARE * (ended_at - started_at))

    def _execute(self, command: Callable[[Engine], None], engine: Engine) -> None:
        try:
            command(engine)
        except Exception as error:
            logger.error("a command failed: %s", location_of(error))

    def _add(self, handle: RequestHandle, engine: Engine) -> None:
        for row in handle.rows:
            sequence = row.sequence
            self._rows[sequence.id] = (row, handle)
            self._unstarted[sequence.id] = row
            try:
                engine.add(sequence)
            except Exception as error:
                sequence.fail(error)
        self._publish([row.sequence for row in handle.rows if row.sequence.is_finished], engine)

    def _abort(self, handle: RequestHandle, engine: Engine) -> None:
        for row in handle.rows:
            if self._rows.pop(row.sequence.id, None) is not None:
                self._unstarted.pop(row.sequence.id, None)
                engine.abort(row.sequence)
                with suppress(Exception):
                    self._observer.finished(row, time.monotonic(), FinishReason.ABORT)

    def _drop(self, handle: RequestHandle, engine: Engine) -> None:
        """Abort a request whose client does not read, and free the log-probabilities that wait for it."""
        self._abort(handle, engine)
        for row in handle.rows:
            row.sequence.logprobs.clear()

    def _stop(self, _engine: Engine) -> None:
        self._is_stopping = True

    def _step(self, engine: Engine) -> list[Sequence]:
        """Make a step; the sequences that changed."""
        running = list(engine.scheduler.running)
        try:
            return engine.step()
        except RankError:  # no row is at fault, and none can go on
            raise
        except Exception as error:
            logger.error("a step failed, its rows are tried one by one: %s", location_of(error))
            return self._try_alone(engine, running, error)

    def _try_alone(self, engine: Engine, running: list[Sequence], error: Exception) -> list[Sequence]:
        """Run every row of a step that failed alone until its next token, so that only those at fault end.

        A row keeps its tokens and loses its keys and values, as in preemption: its text stays the same.
        """
        rows = list(dict.fromkeys([*running, *engine.scheduler.running, *engine.scheduler.waiting]))
        suspects = list(dict.fromkeys([*running, *engine.scheduler.running, *list(engine.scheduler.waiting)[:1]]))
        for sequence in rows:
            engine.abort(sequence)
        for sequence in suspects:
            if not sequence.is_finished:
                self._run_alone(engine, sequence, error)
        for sequence in rows:
            if not sequence.is_finished:
                engine.add(sequence)
        return suspects

    def _run_alone(self, engine: Engine, sequence: Sequence, error: Exception) -> None:
        before = len(sequence)
        try:
            engine.add(sequence)
            for _ in range(before):  # at least one token of it is fed in a step
                engine.step()
                self._progress_at = time.monotonic()
                if sequence.is_finished or len(sequence) > before:
                    return
            raise RowError("no step brought this request further") from error
        except Exception as failure:
            if not sequence.is_finished:
                sequence.fail(failure)
        finally:
            engine.abort(sequence)

    def _publish(self, changed: SequenceOf[Sequence], engine: Engine, started_at: float | None = None) -> None:
        """Notify the event loop of all that has changed, in one call, since `started_at`, when a step began."""
        now = time.monotonic()
        if self._unstarted:
            for sequence in (*engine.scheduler.running, *changed):
                if row := self._unstarted.pop(sequence.id, None):
                    row.started_at = now if started_at is None else max(started_at, row.arrived_at)
                    with suppress(Exception):
                        self._observer.started(row)
        handles: dict[RequestHandle, None] = {}
        for sequence in changed:
            row, handle = self._rows.get(sequence.id, (None, None))
            if row is not None and handle is not None:
                self._record(row, now)
                handles[handle] = None
        self._notify([(handle, [row.state for row in handle.rows]) for handle in handles])

    def _record(self, row: RequestRow, now: float) -> None:
        sequence = row.sequence
        before, row.last_at = row.last_at, now
        row.first_at = row.first_at or now
        row.state = state_of(sequence)
        with suppress(Exception):  # what fails in measuring a request is no reason to end it
            if row.state.num_tokens:
                self._observer.grew(row, before, now)
        if row.state.reason is not None:
            del self._rows[sequence.id]
            with suppress(Exception):
                self._observer.finished(row, now, row.state.reason)

    def _notify(self, changes: list[tuple[RequestHandle, list[RowState]]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestHandle, list[RowState]]]] = {}
        for handle, states in changes:
            by_loop.setdefault(handle.loop, []).append((handle, states))
        for loop, part in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed, and nobody listens any more
                loop.call_soon_threadsafe(self._store_states, part)

    def _fail_all(self) -> None:
        """Fail all requests at the thread's end: whoever waits is told so, and whoever comes is refused."""
        changes = []
        for row, handle in self._rows.values():
            row.state = row.state._replace(reason=FinishReason.ERROR, error=UnavailableError(STOPPED))
            changes.append((handle, [r.state for r in handle.rows]))
        self._notify(changes)
