"""Whatever a drafter does wrong costs speed, never output: it raises, proposes what is no proposal, or takes too long.

Its drafts are checked before the target sees them, and a bad one is replaced by none. After three failures it is cut off for a while and
then tried again. It hears of every verdict meanwhile, so that what it keeps of a row is current when it comes back. A proposal that failed
is to it one of which nothing was accepted; where it fails in hearing of a verdict, it starts on those rows anew.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
from torch import Tensor

from echelon.draft import Draft, Int32, node_depths
from echelon.drafters.base import Drafter
from echelon.errors import place_of
from echelon.sequence import PlannedRow
from echelon.verify import Verdict

logger = logging.getLogger("echelon")
MOST_FAILURES = 3
NUM_GOOD = 100  # proposals in a row that make up for earlier failures


class GuardedDrafter:
    """A drafter behind a wall.

    vocab_size   width of the target's logits: ids lie below it
    grows_trees  may drafts branch? Elsewhere neither acceptance nor layout need know of it
    time_limit   seconds that one proposal may take; a slower one is used, and counts as a failure
    retry_after  seconds without the drafter, once it has failed MOST_FAILURES times; then one failure more cuts it off again
    faults       failures by kind, and `cut off`: steps without it
    """

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        grows_trees: bool = True,
        time_limit: float = 10.0,
        retry_after: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.drafter = drafter
        self.taps = drafter.taps
        self.faults: Counter[str] = Counter()
        self._vocab_size, self._grows_trees = vocab_size, grows_trees
        self._time_limit, self._retry_after, self._clock = time_limit, retry_after, clock
        self._num_failures = self._num_good = 0
        self._resumes_at = -np.inf

    def propose(self, rows: SequenceOf[PlannedRow]) -> Draft:
        none = Draft.chains([()] * len(rows))
        start = self._clock()
        if start < self._resumes_at:
            self.faults["cut off"] += 1
            return none
        try:
            draft = self.drafter.propose(rows)
            problem = problem_of(draft, rows, self._vocab_size, self._grows_trees)
        except Exception as error:
            self._fail("raised", place_of(error))
            return none
        if problem is not None:
            self._fail("garbage", problem)
            return none
        seconds = self._clock() - start
        if seconds > self._time_limit:
            self._fail("too slow", f"a proposal took {seconds:.1f} s, the limit is {self._time_limit} s")
        else:
            self._succeed()
        return draft

    def observe(self, rows: SequenceOf[PlannedRow], verdict: Verdict, taps: Tensor | None) -> None:
        try:
            self.drafter.observe(rows, verdict, taps)
        except Exception as error:
            self._fail("raised", place_of(error))
            for row in rows:
                self.forget(row.sequence.id)

    def forget(self, row: int) -> None:
        try:
            self.drafter.forget(row)
        except Exception as error:
            self._fail("raised", place_of(error))

    def _succeed(self) -> None:
        self._num_good += 1
        if self._num_good >= NUM_GOOD:
            self._num_failures = 0

    def _fail(self, kind: str, reason: str) -> None:
        self.faults[kind] += 1
        self._num_good = 0
        self._num_failures += 1
        logger.warning("the drafter failed (%s): %s", kind, reason)
        if self._num_failures >= MOST_FAILURES:
            self._num_failures = MOST_FAILURES - 1
            self._resumes_at = self._clock() + self._retry_after
            logger.warning("the drafter is left out for %.0f s", self._retry_after)


def problem_of(draft: Draft, rows: SequenceOf[PlannedRow], vocab_size: int, grows_trees: bool = True) -> str | None:
    """What is wrong with a draft for `rows`; the target may be fed one with which nothing is."""
    tokens, parents, indptr = draft.tokens, draft.parents, draft.indptr
    if any(a.ndim != 1 or a.dtype.kind != "i" for a in (tokens, parents, indptr)):
        return "tokens, parents and indptr must be vectors of integers"
    if len(indptr) != len(rows) + 1 or indptr[0] != 0 or not indptr[-1] == len(tokens) == len(parents):
        return f"indptr, {len(tokens)} tokens and {len(parents)} parents do not describe {len(rows)} rows"
    counts = np.diff(indptr)
    limits = np.fromiter((row.max_draft_tokens for row in rows), np.int64, len(rows))
    if (counts < 0).any() or (counts > limits).any():
        return "a row has more tokens than it was granted, or fewer than none"
    if draft.replayed is not None and not (
        len(draft.replayed) == len(rows) and bool(((draft.replayed >= 0) & (draft.replayed <= counts)).all())
    ):
        return "more tokens are to be kept than were drafted"
    if not len(tokens):
        return None
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        return f"token ids from {tokens.min()} to {tokens.max()} in a vocabulary of {vocab_size}"
    places = np.arange(len(tokens)) - np.repeat(indptr[:-1], counts)
    if (parents < -1).any() or (parents >= places).any():
        return "a parent does not stand before its child"
    if draft.has_branches and not grows_trees:
        return "a tree where only chains may be drafted"
    if (_lengths(draft) > [row.max_draft_depth for row in rows]).any():
        return "a path is longer than its row has room for"
    return _problem_of_probs(draft, vocab_size)


def _lengths(draft: Draft) -> Int32:
    """int32[B]: the longest path of every row."""
    if not draft.has_branches:
        return draft.num_draft_tokens
    return np.array([1 + max(node_depths(draft.row_parents(i)), default=-1) for i in range(draft.num_rows)], np.int32)


def _problem_of_probs(draft: Draft, vocab_size: int) -> str | None:
    probs = draft.probs
    if probs is None:
        return None
    if probs.shape != (len(draft.tokens), vocab_size):
        return f"probabilities of shape {probs.shape} for {len(draft.tokens)} tokens and a vocabulary of {vocab_size}"
    if not (np.abs(probs.sum(-1) - 1.0) < 1e-6).all() or probs.min() < 0.0:
        return "probabilities do not sum to 1, or are negative"
    return None if (probs[np.arange(len(probs)), draft.tokens] > 0.0).all() else "a drafted token has probability 0"
