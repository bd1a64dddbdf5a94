"""Which drafted tokens survive: by default those that equal the target's own token, along a path from the last known token.

The target's own token after a prefix is a function of its logits there and of the request (`sampling.Sampler`), so what is emitted
is what plain decoding emits, whatever was drafted. A rule decides for all rows of a step at once, and for each row apart from the others.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.draft import Draft, Float64, Int64, RowVerdict, Verdict
from echelon.errors import EchelonError, RowError, row_error
from echelon.ops.devices import on_host
from echelon.ops.sample import SampleRow, choose, raw_rows
from echelon.sampling import Logprobs, logprobs_of
from echelon.sequence import PlannedRow

ARGMAX_TILE = 128


class DraftedRow(NamedTuple):
    """A sampled row with its draft, and the target's logits on it.

    tokens, parents  of its nodes, as in `Draft`
    probs            float64[nodes, V] or None, as in `Draft`
    step_logits      [R, V], of all rows
    first_logit      which of them is the first of this row's
    """

    row: PlannedRow
    tokens: list[int]
    parents: list[int]
    probs: Float64 | None
    step_logits: Tensor
    first_logit: int

    @property
    def num_logits(self) -> int:
        """Rows of logits: after the last known token and after every node."""
        return 1 + len(self.tokens)

    @property
    def logits(self) -> Tensor:
        """[num_logits, V]"""
        return self.step_logits[self.first_logit : self.first_logit + self.num_logits]


class Decision(NamedTuple):
    """The accepted nodes of a row, root first; the extra token, −1 where there is none; why there is none."""

    path: list[int]
    next_token: int
    error: EchelonError | None = None


class Rule(Protocol):
    """Decides what of a draft is kept."""

    def decide(self, rows: SequenceOf[DraftedRow], logits: Tensor) -> list[Decision]:
        """One decision a row, from `logits` [R, V] of the step; what fails in one row's work stays in its decision."""


class Exact:
    """Keep drafted tokens that equal the target's own: the text is that of plain decoding."""

    def decide(self, rows: SequenceOf[DraftedRow], logits: Tensor) -> list[Decision]:
        tokens, problems = target_tokens(rows, logits)
        return [self._decision(row, tokens[row.first_logit : row.first_logit + row.num_logits], problems) for row in rows]

    def _decision(self, row: DraftedRow, target: list[int], problems: dict[int, EchelonError]) -> Decision:
        try:
            path = self.path(row, target)
        except Exception as error:
            return Decision([], -1, row_error(error))
        last = path[-1] + 1 if path else 0  # node n has the row of logits after n's
        return Decision(path, target[last], None if target[last] >= 0 else problems.get(row.first_logit + last))

    def path(self, row: DraftedRow, target: list[int]) -> list[int]:
        """The nodes to keep; `target` holds the target's own token after the last known token and after every node."""
        return accepted_path(row.tokens, row.parents, target)


@dataclass(frozen=True)
class Typical(Exact):
    """Medusa's rule (Cai et al. 2024), LOSSY: a drafted token stays if p > min(threshold, alpha · exp(−entropy)), p being the target's
    distribution there. At temperature 0 it is the exact rule.
    """

    threshold: float
    alpha: float

    def accepts(self, probabilities: Float64, token: int) -> bool:
        """Is the token typical of these probabilities float64[V]?"""
        positive = probabilities[probabilities > 0]
        entropy = -float((positive * np.log(positive)).sum())
        return bool(probabilities[token] > min(self.threshold, self.alpha * np.exp(-entropy)))

    def path(self, row: DraftedRow, target: list[int]) -> list[int]:
        """The longest path of typical tokens, of several the most probable. It ends where a place gives no probabilities."""
        sequence, tokens = row.row.sequence, row.tokens
        if sequence.params.is_greedy:
            return super().path(row, target)
        paths: dict[int, list[int]] = {-1: []}  # of typical nodes
        scores = {-1: 0.0}
        probabilities: dict[int, Float64 | None] = {}  # after a node; None: there are none
        for node, (token, parent) in enumerate(zip(tokens, row.parents, strict=True)):
            if parent not in paths:
                continue
            if parent not in probabilities:
                probabilities[parent] = _probabilities(row, parent, [tokens[n] for n in paths[parent]])
            own = probabilities[parent]
            if own is not None and self.accepts(own, token):
                paths[node] = [*paths[parent], node]
                scores[node] = scores[parent] + float(np.log(own[token]))
        return paths[max(paths, key=lambda node: (len(paths[node]), scores[node]))]


def _probabilities(row: DraftedRow, node: int, drafted: list[int]) -> Float64 | None:
    """The target's float64[V] after a node, −1 the last known token, behind these drafted ones; None where the place gives none: what is
    wrong there is said if the text comes to it.
    """
    sequence = row.row.sequence
    try:
        return sequence.sampler.probabilities(on_host(row.logits[node + 1]), sequence.tokens, drafted)
    except Exception:
        return None


class Rejection:
    """Algorithm 1 of Leviathan et al. 2023 on chains: the text is distributed as that of plain decoding.

    A token drafted with certainty (no `probs`) has draft probability 1. Coins and residual draws are keyed by (seed, index, position), so a
    row's text depends on no neighbour. Where a place gives no token the path ends, and there is no extra token.
    """

    def decide(self, rows: SequenceOf[DraftedRow], logits: Tensor) -> list[Decision]:  # noqa: ARG002
        return [self._decision(row) for row in rows]

    def _decision(self, row: DraftedRow) -> Decision:
        sequence, tokens = row.row.sequence, row.tokens
        path: list[int] = []
        try:
            assert row.parents == list(range(-1, len(tokens) - 1)), "rejection is defined on chains"
            logits = on_host(row.logits)
            for node in range(len(tokens)):
                if (recovered := self._recovered(row, node, logits[node])) is not None:
                    return Decision(path, recovered)
                path.append(node)
            return Decision(path, sequence.sampler.choose(logits[-1], sequence.tokens, tokens))
        except Exception as error:
            return Decision(path, -1, row_error(error))

    def _recovered(self, row: DraftedRow, node: int, logits: NDArray[np.float32]) -> int | None:
        """The token in the place of a drafted one, or None where that is accepted; logits float32[V]."""
        sampler, known = row.row.sequence.sampler, row.row.sequence.tokens
        token, position = row.tokens[node], len(known) + node
        target = sampler.probabilities(logits, known, row.tokens[:node])
        drafted = np.eye(1, len(target), token)[0] if row.probs is None else row.probs[node]
        if sampler.accepts(float(target[token]), float(drafted[token]), position):
            return None
        return sampler.draw(np.maximum(target - drafted, 0.0), position)


def verify(draft: Draft, logits: Tensor, logit_indptr: Tensor, rows: SequenceOf[PlannedRow], rule: Rule) -> Verdict:
    """Decide what of a draft is kept, and the extra token of every row.

    logits [R, V], row i's from `logit_indptr[i]` to `logit_indptr[i + 1]` (int32[B+1]): its prompt logits, if wanted, then, where it is
    sampled, one after the last known token and one a draft node; nodes of a row are ordered parents first. What fails in one row's work
    ends that row alone.
    """
    bounds, starts = logit_indptr.tolist(), draft.indptr.tolist()
    drafted: dict[int, DraftedRow] = {}
    for i, row in enumerate(rows):
        if row.is_sampled:
            probs = None if draft.probs is None else draft.probs[starts[i] : starts[i + 1]]
            first = bounds[i] + row.num_prompt_logits
            drafted[i] = DraftedRow(row, draft.row(i), draft.row_parents(i), probs, logits, first)
    decisions = dict(zip(drafted, rule.decide(list(drafted.values()), logits), strict=True))
    verdict = []
    for i, row in enumerate(rows):
        prompt_logprobs, error = list[Logprobs](), None
        if row.num_prompt_logits:
            prompt_logprobs, error = _prompt_logprobs(row, logits[bounds[i] : bounds[i] + row.num_prompt_logits])
        if i in drafted:
            verdict.append(_row_verdict(drafted[i], decisions[i], prompt_logprobs, error))
        else:
            verdict.append(RowVerdict(starts[i + 1] - starts[i], [], [], -1, [], prompt_logprobs, error))
    return verdict


def _row_verdict(drafted: DraftedRow, decision: Decision, prompt_logprobs: list[Logprobs], error: EchelonError | None) -> RowVerdict:
    if error is not None:  # the row ends with it, and without a token
        return RowVerdict(len(drafted.tokens), [], [], -1, [], prompt_logprobs, error)
    path, token = decision.path, decision.next_token
    if token < 0:
        error = decision.error or RowError("no token could be chosen")
    accepted, logprobs = [drafted.tokens[node] for node in path], list[Logprobs]()
    try:
        logprobs = _logprobs(drafted, path, [*accepted, token])
    except Exception as failure:
        path, accepted, token, error = [], [], -1, row_error(failure)
    return RowVerdict(len(drafted.tokens), path, accepted, token, logprobs, prompt_logprobs, error)


def _logprobs(drafted: DraftedRow, path: list[int], emitted: list[int]) -> list[Logprobs]:
    """Of every emitted token, where the request wants them, an extra −1 left out."""
    count = drafted.row.sequence.params.logprobs
    if count is None:
        return []
    values = on_host(drafted.logits[[0, *(node + 1 for node in path)]])
    return [logprobs_of(line, token, count) for line, token in zip(values, emitted, strict=True) if token >= 0]


def _prompt_logprobs(row: PlannedRow, logits: Tensor) -> tuple[list[Logprobs], EchelonError | None]:
    """Of the prompt tokens that the step passed, from logits [n, V] of those before them; and what ended them early."""
    sequence, logprobs = row.sequence, list[Logprobs]()
    for position, line in enumerate(on_host(logits), row.start + 1):
        if len(sequence.prompt_logprobs) + len(logprobs) < position < sequence.num_prompt_tokens:
            if not np.isfinite(highest := line.max()):
                return logprobs, RowError(f"the largest logit at position {position} of the prompt is {highest}: the model overflowed")
            logprobs.append(logprobs_of(line, sequence.tokens[position], sequence.params.prompt_logprobs or 0))
    return logprobs, None


def target_tokens(rows: SequenceOf[DraftedRow], logits: Tensor) -> tuple[list[int], dict[int, EchelonError]]:
    """The target's own token for each of logits [R, V], of which each row has some; −1 where there is none, and why, by row of logits.

    No draft equals −1, so a row fails where plain decoding would, and not for a place that its text never reaches.
    """
    largest, values = largest_rows(logits)
    tokens: list[int] = largest.tolist()
    problems: dict[int, EchelonError] = {}
    for at in np.flatnonzero(~np.isfinite(values)).tolist():
        tokens[at] = -1
        problems[at] = RowError(f"the largest of the model's logits is {values[at]}; the model overflowed, so this row ends")
    places = [
        (row.first_logit + node, SampleRow(row.row.sequence.sampler, line, row.row.sequence.tokens, path))
        for row in rows
        if not row.row.sequence.sampler.is_argmax
        for node, (line, path) in enumerate(zip(raw_rows(row.logits), _paths(row.tokens, row.parents), strict=True))
    ]
    failed: dict[int, EchelonError] = {}
    for (at, _), token in zip(places, choose([place for _, place in places], failed), strict=True):
        tokens[at] = token
    return tokens, problems | {places[n][0]: error for n, error in failed.items()}


def _paths(tokens: list[int], parents: list[int]) -> list[list[int]]:
    """Drafted tokens from the root to each place: none for the last known token, then one path a node."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*paths[parent + 1], token])
    return paths


def accepted_path(tokens: list[int], parents: list[int], target: list[int]) -> list[int]:
    """Follow the target's own tokens down one row's tree. target[0] belongs to the root, target[j + 1] to node j."""
    path: list[int] = []
    at = -1
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == at and token == target[at + 1]:
            path.append(node)
            at = node
    return path


def largest_rows(logits: Tensor) -> tuple[Int64, NDArray[np.float32]]:
    """The first largest entry of every row of [R, V]: its index int64 [R] and its value float32 [R].

    A row that holds NaN anywhere has the value NaN, and then its index means nothing. `torch.argmax` tracks an index per element; the
    maximum of tiles is vectorised, and only the winning tile is searched.
    """
    num_rows, width = logits.shape
    whole = width - width % ARGMAX_TILE
    if num_rows == 0 or whole == 0:
        values = on_host(logits)
        return np.asarray(values.argmax(-1)), np.asarray(values.max(-1, initial=-np.inf))
    tiles = logits[:, :whole].view(num_rows, -1, ARGMAX_TILE)
    best = on_host(tiles.amax(-1))
    tile = best.argmax(-1)
    inside = on_host(tiles[torch.arange(num_rows), torch.from_numpy(tile)]).argmax(-1)
    winners, highest = tile * ARGMAX_TILE + inside, best.max(-1)
    if whole < width:
        rest = on_host(logits[:, whole:])
        is_rest = rest.max(-1) > best.max(-1)
        winners = np.where(is_rest, whole + rest.argmax(-1), winners)
        highest = np.maximum(highest, rest.max(-1))
    return np.asarray(winners), highest
