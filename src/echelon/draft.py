"""What a drafter proposes, a ragged forest of tokens, and what of it survives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from echelon.errors import EchelonError
from echelon.sampling import Logprobs

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


def indptr_of(counts: Sequence[int] | Int64) -> Int32:
    """int32[B+1]: where each row's items begin, and the end of the last, from how many every row has."""
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr


@dataclass(frozen=True)
class Draft:
    """Proposed tokens of B rows, N nodes in all; row i owns nodes `indptr[i]:indptr[i + 1]`.

    tokens  int32[N]
    parents int32[N]    index of the parent among the row's own nodes; −1: child of the row's last known token
    indptr  int32[B+1]  starts at 0
    probs   float64[N, V] or None  the distribution each token was drawn from, where rejection asks; None: proposed with certainty
    scores  float64[N] or None  logarithm of the probability that the drafter gives each token after its parent; None: it gives none
    """

    tokens: Int32
    parents: Int32
    indptr: Int32
    probs: Float64 | None = None
    scores: Float64 | None = None

    @classmethod
    def none(cls, num_rows: int) -> Draft:
        """Nothing, for so many rows."""
        return cls(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(num_rows + 1, np.int32))

    @classmethod
    def chains(cls, proposals: Sequence[Sequence[int]], probs: Float64 | None = None, scores: Float64 | None = None) -> Draft:
        """One chain per row; an empty proposal is a row that is not drafted for."""
        lengths = [len(p) for p in proposals]
        indptr = indptr_of(lengths)
        tokens = np.fromiter((t for p in proposals for t in p), np.int32, int(indptr[-1]))
        parents = np.arange(len(tokens), dtype=np.int32) - np.repeat(indptr[:-1], lengths) - 1
        return cls(tokens, parents.astype(np.int32), indptr, probs, scores)

    @classmethod
    def trees(cls, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Draft:
        """One tree per row as (tokens, parents), parents before their children; two siblings never share a token."""
        chains = cls.chains([tokens for tokens, _ in rows])
        parents = np.fromiter((p for _, parents in rows for p in parents), np.int32, len(chains.tokens))
        return cls(chains.tokens, parents, chains.indptr)

    @cached_property
    def has_branches(self) -> bool:
        """Is any row more than a chain?"""
        chain = np.arange(len(self.parents)) - np.repeat(self.indptr[:-1], self.num_draft_tokens) - 1
        return not np.array_equal(self.parents, chain)

    @cached_property
    def rows(self) -> Int64:
        """int64[N]: the row of every node."""
        return np.repeat(np.arange(self.num_rows), self.num_draft_tokens)

    @cached_property
    def depths(self) -> Int64:
        """int64[N]: of every node; the root's children have depth 0."""
        if not self.has_branches:
            return np.arange(len(self.tokens)) - self.indptr[self.rows]
        return np.array([d for i in range(self.num_rows) for d in node_depths(self.row_parents(i))], np.int64)

    def only(self, is_kept: NDArray[np.bool_]) -> Draft:
        """The nodes that bool[N] keeps, each of which has its parent kept."""
        places = np.cumsum(is_kept) - 1
        rows = self.rows[is_kept]
        indptr = indptr_of(np.bincount(rows, minlength=self.num_rows))
        parents = self.parents[is_kept]
        above = places[np.maximum(parents, 0) + self.indptr[rows]] - indptr[rows]
        chosen = [None if values is None else values[is_kept] for values in (self.probs, self.scores)]
        return Draft(self.tokens[is_kept], np.where(parents < 0, -1, above).astype(np.int32), indptr, *chosen)

    @property
    def num_rows(self) -> int:
        """B"""
        return len(self.indptr) - 1

    @property
    def num_draft_tokens(self) -> Int32:
        """int32[B]"""
        return np.diff(self.indptr)

    def row(self, i: int) -> list[int]:
        """Tokens of row i."""
        tokens: list[int] = self.tokens[self.indptr[i] : self.indptr[i + 1]].tolist()
        return tokens

    def row_parents(self, i: int) -> list[int]:
        """Parents of row i's nodes."""
        parents: list[int] = self.parents[self.indptr[i] : self.indptr[i + 1]].tolist()
        return parents


@dataclass(frozen=True)
class RowVerdict:
    """What survived of one row of a step.

    path             accepted nodes, root first, as indices among the row's own nodes
    accepted         their tokens
    next_token       the extra token: recovered after a rejection, bonus after full acceptance; −1 where nothing was sampled or could be
    logprobs         of accepted and extra token, where requested
    prompt_logprobs  of the prompt tokens that this step passed, where requested
    error            why the row cannot go on after what it accepted; its neighbours know nothing of it
    """

    num_draft_tokens: int
    path: list[int]
    accepted: list[int]
    next_token: int
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    error: EchelonError | None = None


Verdict = list[RowVerdict]  # one a row


def node_depths(parents: Sequence[int]) -> list[int]:
    """Of nodes whose parents come before them; the root's children have depth 0."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths
