"""Whatever a drafter does wrong costs speed, never output: it raises, proposes what is no proposal, or takes too long.

Its drafts are checked before the target sees them, and a bad one is replaced by none. After three failures it is cut off for a while and
then tried again. It hears of every verdict meanwhile, so that what it keeps of a row is current when it comes back. A proposal that failed
is to it one of which nothing was accepted; where it fails in hearing of a verdict, it starts on those rows anew.

No call can be interrupted. What bounds the waiting is that a drafter is cut off as soon as its calls have taken 2 seconds too long, in one
call or in many.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from echelon.draft import Draft, Float64, Int32, Verdict, node_depths
from echelon.drafters.base import Drafter
from echelon.errors import EchelonError, location_of
from echelon.sequence import PlannedRow
from echelon.sequence import Sequence as TextRow
from echelon.stats import DrafterFault

logger = logging.getLogger("echelon")
T = TypeVar("T")
MOST_FAILURES = 3
NUM_GOOD = 100  # proposals in a row that make up for earlier failures
NUM_STEPS = 20  # a call may take as long as so many steps of the target,
SHORTEST_LIMIT = 0.5  # at least so many seconds
LONGEST_WAIT = 2.0  # and at most these, which are as long as a stream should ever wait
LONGEST_CATCHING_UP = 10.0  # seconds for a text that grew while it was left out
NEWEST_SHARE = 0.1  # of the newest step in the mean of what steps take
FIRST_PAUSE = 30.0  # seconds without a drafter that has failed
MOST_DOUBLED = 10  # times that a pause is doubled
LONGEST_PAUSE = 1800.0  # seconds without a drafter that fails whenever it is tried again


class BadDraftError(EchelonError):
    """A proposal that the target must not be fed."""


class CallTimer:
    """What a drafter's calls may take, by what the target's steps take: NUM_STEPS of them, within SHORTEST_LIMIT and LONGEST_WAIT. Where
    one step takes longer, that; and where the drafter has a prompt to read, or a text that grew while it was left out, as long as the
    target took for that, of the latter at most LONGEST_CATCHING_UP.

    fixed   seconds that a call may take, whatever steps take; None: as above
    excess  seconds that calls took beyond that number of steps, all together; what a step does not use of it is paid back
    """

    def __init__(self, reads: bool = True) -> None:
        self._reads = reads
        self.fixed: float | None = None
        self.excess = 0.0
        self._step: float | None = None  # seconds, on average
        self._reading: dict[int, float] = {}  # row → seconds of the steps in which the target read it, since it was last drafted for

    def end_step(self, seconds: float | None, rows: Sequence[PlannedRow], is_left_out: bool = False) -> None:
        """The target took so long for a step with these rows; None: nobody knows. A drafter that was left out has to read all of them, and
        one that was not asked for a row that row, if it `reads` texts at all.
        """
        if seconds is not None:
            self._step = seconds if self._step is None else self._step + NEWEST_SHARE * (seconds - self._step)
            for row in rows:
                reading = self._reading.get(row.sequence.id, 0.0)
                if row.num_new > 1:
                    self._reading[row.sequence.id] = reading + seconds
                elif is_left_out or (self._reads and not row.max_draft_tokens):
                    self._reading[row.sequence.id] = max(reading, min(reading + seconds, LONGEST_CATCHING_UP))
        self.excess = max(0.0, self.excess) - max(NUM_STEPS * (self._step or 0.0), self._reading_seconds(rows))

    def end_reading(self, rows: Sequence[PlannedRow]) -> None:
        """The drafter has read those of the rows that it was asked to draft for."""
        if self._reading:
            for row in rows:
                if row.max_draft_tokens > 0:
                    self.forget(row.sequence.id)

    def forget(self, row: int) -> None:
        self._reading.pop(row, None)

    def limit(self, rows: Sequence[PlannedRow]) -> float:
        """How many seconds a call about `rows` may take."""
        if self.fixed is not None:
            return self.fixed
        if self._step is None:
            return LONGEST_WAIT
        return max(SHORTEST_LIMIT, min(NUM_STEPS * self._step, LONGEST_WAIT), self._step, self._reading_seconds(rows))

    def is_too_slow(self, seconds: float, rows: Sequence[PlannedRow]) -> bool:
        """Has a call kept streams waiting too long, by itself or after others?"""
        if self.fixed is None:
            self.excess += seconds
        return seconds > max(self.limit(rows), LONGEST_WAIT) or self.excess > LONGEST_WAIT

    def _reading_seconds(self, rows: Sequence[PlannedRow]) -> float:
        """Of what it may have to read at once: rows that it is asked for, and prompts."""
        if not self._reading:
            return 0.0
        return max((self._reading.get(row.sequence.id, 0.0) for row in rows if row.max_draft_tokens or row.num_new > 1), default=0.0)


class GuardedDrafter(Drafter):
    """A drafter behind a wall.

    vocab_size   width of the target's logits: ids lie below it
    grows_trees  may drafts branch? Elsewhere neither acceptance nor layout need know of it
    faults       failures by kind, and `cut off`: steps without it
    timer        what its calls may take; a slower proposal is used, and counts as a failure

    Once it has failed MOST_FAILURES times, or taken LONGEST_WAIT too long, it is left out for FIRST_PAUSE; then one failure more cuts it
    off again, for twice as long each time.
    """

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        grows_trees: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.drafter = drafter
        self.hidden_state_names, self.usage = drafter.hidden_state_names, drafter.usage
        self.faults: Counter[DrafterFault] = Counter()
        self._vocab_size, self._grows_trees = vocab_size, grows_trees
        self._clock, self.timer = clock, CallTimer(reads=drafter.usage is not None)
        self._num_failures = self._num_good = self._num_cuts = 0
        self._resumes_at = -np.inf
        self._proposed: dict[int, tuple[float, float | None]] = {}  # row → when the last proposal for it came, and the seconds it took;
        # None: the drafter was left out
        self._is_deaf = False  # left out for being slow to hear: it hears nothing until it is tried again
        self._unheard: dict[int, None] = {}  # rows of which it has missed something

    @property
    def unguarded(self) -> Drafter:
        return self.drafter

    def propose(self, rows: Sequence[PlannedRow]) -> Draft:
        for row in rows:
            self._proposed.pop(row.sequence.id, None)
        start = self._clock()
        if self._is_deaf or start < self._resumes_at:
            self.faults[DrafterFault.CUT_OFF] += 1
            self._proposed |= dict.fromkeys((row.sequence.id for row in rows), (start, None))
            return Draft.none(len(rows))
        is_asked = any(row.max_draft_tokens for row in rows)
        self._num_good += is_asked  # unless it fails
        draft = self._call(lambda: self._checked(rows)) if is_asked else None
        end = self._clock()
        self._proposed |= dict.fromkeys((row.sequence.id for row in rows), (end, end - start))
        if self._num_good >= NUM_GOOD:
            self._num_failures = self._num_cuts = 0
        return Draft.none(len(rows)) if draft is None else draft

    def observe(self, rows: Sequence[PlannedRow], verdict: Verdict, hidden_states: Tensor | None) -> None:
        was_asked = self._judge_proposal(rows)
        if self._is_deaf and self._clock() >= self._resumes_at:
            self._hear_again()
        if self._is_deaf:
            self._unheard.update(dict.fromkeys(row.sequence.id for row in rows))
            return

        def hear() -> bool:
            self.drafter.observe(rows, verdict, hidden_states)
            return True

        has_heard = self._call(hear, rows, is_hearing=True)
        if was_asked:
            self.timer.end_reading(rows)
        if not has_heard:
            for row in rows:
                self.forget(row.sequence.id)

    def conclude(self, rows: Sequence[TextRow]) -> None:
        if not self._is_deaf:
            self._call(lambda: self.drafter.conclude(rows), is_hearing=True)

    def forget(self, row: int) -> None:
        self.timer.forget(row)
        self._proposed.pop(row, None)
        if self._is_deaf:
            self._unheard[row] = None
        else:
            self._call(lambda: self.drafter.forget(row), is_hearing=True)

    def _checked(self, rows: Sequence[PlannedRow]) -> Draft:
        """The drafter's proposal, in arrays of its own fields and types.

        Raises
        ------
        BadDraftError  something is wrong with it
        """
        given = self.drafter.propose(rows)
        draft = Draft(given.tokens, given.parents, given.indptr, given.probs, given.scores)
        problem = problem_of(draft, rows, self._vocab_size, self._grows_trees)
        if problem is not None:
            raise BadDraftError(problem)
        return replace(draft, probs=None, scores=None) if not len(draft.tokens) else draft

    def _call(self, work: Callable[[], T], rows: Sequence[PlannedRow] = (), is_hearing: bool = False) -> T | None:
        """What `work` returns, or None where it raises. A proposal's time is judged later, when that of the step is known."""
        start = self._clock()
        try:
            result = work()
        except KeyboardInterrupt:
            raise
        except BadDraftError as error:
            self._fail(DrafterFault.GARBAGE, str(error))
            return None
        except BaseException as error:
            self._fail(DrafterFault.RAISED, _named(error))
            return None
        if is_hearing:
            self._judge(self._clock() - start, rows, is_hearing)
        return result

    def _judge_proposal(self, rows: Sequence[PlannedRow]) -> bool:
        """The target has done its step, which began when the proposal came, if one did; was the drafter asked for it?"""
        found = [self._proposed.pop(row.sequence.id, None) for row in rows]
        began_at, seconds = (found[0] if found else None) or (None, None)
        is_left_out = began_at is not None and seconds is None
        self.timer.end_step(None if began_at is None else self._clock() - began_at, rows, is_left_out)
        if seconds is not None:
            self._judge(seconds, rows, is_hearing=False)
        return not is_left_out

    def _judge(self, seconds: float, rows: Sequence[PlannedRow], is_hearing: bool) -> None:
        is_enough, limit = self.timer.is_too_slow(seconds, rows), self.timer.limit(rows)
        if is_enough or seconds > limit:
            reason = f"a call took {seconds:.2f} s, the limit is {limit:.2f} s, and {LONGEST_WAIT} s in excess"
            self._fail(DrafterFault.TOO_SLOW, reason, is_enough)
            self._is_deaf |= is_hearing and self._clock() < self._resumes_at

    def _hear_again(self) -> None:
        """Start anew on the rows of which it has missed something, and keep the time that their reading is allowed. Not in `propose`: there
        their blocks are reserved for the step.
        """
        missed, self._unheard, self._is_deaf = self._unheard, {}, False
        for row in missed:
            if self._is_deaf:  # again, in the midst of it
                self._unheard[row] = None
            else:
                self._call(partial(self.drafter.forget, row), is_hearing=True)

    def _fail(self, kind: DrafterFault, reason: str, is_enough: bool = False) -> None:
        """Count a failure; MOST_FAILURES of them, or one that `is_enough`, cut the drafter off."""
        self.faults[kind] += 1
        self._num_good = 0
        self._num_failures += 1
        logger.warning("the drafter failed (%s): %s", kind, reason)
        if self._clock() < self._resumes_at:  # it is left out already, and only hears
            self.timer.excess = 0.0
            return
        if is_enough or self._num_failures >= MOST_FAILURES:
            pause = min(FIRST_PAUSE * 2.0 ** min(self._num_cuts, MOST_DOUBLED), LONGEST_PAUSE)
            self._num_failures, self._num_cuts, self.timer.excess = MOST_FAILURES - 1, self._num_cuts + 1, 0.0
            self._resumes_at = self._clock() + pause
            logger.warning("the drafter is left out for %.0f s", pause)


def _named(error: BaseException) -> str:
    """Kind and place of an exception. None of its own code is asked for what it says: that may fail, or hold pieces of a request."""
    try:
        return location_of(error)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return "an exception that cannot be named"


def problem_of(draft: Draft, rows: Sequence[PlannedRow], vocab_size: int, grows_trees: bool) -> str | None:
    """Why the target must not be fed a draft for `rows`; None where it is well formed."""
    problem = _problem_of_sizes(draft, rows)
    if problem is not None or not len(draft.tokens):
        return problem
    return _problem_of_nodes(draft, rows, vocab_size, grows_trees) or _problem_of_probs(draft, vocab_size) or _problem_of_scores(draft)


def _problem_of_sizes(draft: Draft, rows: Sequence[PlannedRow]) -> str | None:
    """Types and lengths of all that counts."""
    tokens, parents, indptr = draft.tokens, draft.parents, draft.indptr
    if not all(_is_int_vector(given) for given in (tokens, parents, indptr)):
        return "tokens, parents and indptr must be vectors of integers"
    if len(indptr) != len(rows) + 1 or indptr[0] != 0 or not indptr[-1] == len(tokens) == len(parents):
        return f"indptr, {len(tokens)} tokens and {len(parents)} parents do not describe {len(rows)} rows"
    counts = np.diff(indptr)
    limits = np.fromiter((row.max_draft_tokens for row in rows), np.int64, len(rows))
    if (counts < 0).any() or (counts > limits).any():
        return "a row has more tokens than it was granted, or fewer than none"
    return None


def _is_int_vector(given: Any) -> bool:
    """Is it a plain array? Subclasses may compare as they like, and small integers overflow."""
    return type(given) is np.ndarray and given.ndim == 1 and given.dtype in (np.int32, np.int64)


def _problem_of_nodes(draft: Draft, rows: Sequence[PlannedRow], vocab_size: int, grows_trees: bool) -> str | None:
    """Ids, and the shape of every row's tree."""
    tokens, parents, indptr = draft.tokens, draft.parents, draft.indptr
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        return f"token ids from {tokens.min()} to {tokens.max()} in a vocabulary of {vocab_size}"
    places = np.arange(len(tokens)) - np.repeat(indptr[:-1], np.diff(indptr))
    if (parents < -1).any() or (parents >= places).any():
        return "a parent does not stand before its child"
    if draft.has_branches and not grows_trees:
        return "a tree where only chains may be drafted"
    if (_lengths(draft) > [row.max_draft_depth for row in rows]).any():
        return "a path is longer than its row has room for"
    return None


def _lengths(draft: Draft) -> Int32:
    """int32[B]: the longest path of every row."""
    if not draft.has_branches:
        return draft.num_draft_tokens
    return np.array([1 + max(node_depths(draft.row_parents(i)), default=-1) for i in range(draft.num_rows)], np.int32)


def _problem_of_scores(draft: Draft) -> str | None:
    scores: Float64 | None = draft.scores
    if scores is None:
        return None
    if type(scores) is not np.ndarray or scores.dtype != np.float64 or scores.shape != draft.tokens.shape:
        return "scores must be float64, one a drafted token"
    return "a score is no logarithm of a probability" if (scores > 1e-6).any() else None


def _problem_of_probs(draft: Draft, vocab_size: int) -> str | None:
    probs: Float64 | None = draft.probs
    if probs is None:
        return None
    if type(probs) is not np.ndarray or probs.dtype != np.float64:
        return "probabilities must be an array of float64"
    if probs.shape != (len(draft.tokens), vocab_size):
        return f"probabilities of shape {probs.shape} for {len(draft.tokens)} tokens and a vocabulary of {vocab_size}"
    if not (np.abs(probs.sum(-1) - 1.0) < 1e-6).all() or probs.min() < 0.0:
        return "probabilities do not sum to 1, or are negative"
    return None if (probs[np.arange(len(probs)), draft.tokens] > 0.0).all() else "a drafted token has probability 0"
