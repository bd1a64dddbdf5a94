"""Which drafted tokens survive: those that equal the target's own token, along a path from the last known token.

The target's own token at a place is a function of its logits there and of the request (`sampling.choose_token`), so what is emitted
is what plain decoding emits, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.draft import Draft
from echelon.sampling import choose_token
from echelon.sequence import PlannedRow

ARGMAX_TILE = 128


@dataclass(frozen=True)
class Verdict:
    """What survived of B rows, one entry per row in every list.

    num_draft_tokens  how many tokens were drafted
    paths             accepted nodes, root first, as indices among the row's own nodes
    accepted          their tokens
    next_tokens       the extra token: recovered after a rejection, bonus after full acceptance; −1 where nothing was sampled
    """

    num_draft_tokens: list[int]
    paths: list[list[int]]
    accepted: list[list[int]]
    next_tokens: list[int]

    @property
    def num_accepted(self) -> list[int]:
        return [len(path) for path in self.paths]


def argmax_rows(logits: Tensor) -> NDArray[np.int64]:
    """int64 [R]: the first largest entry of every row of [R, V].

    `torch.argmax` tracks an index per element; the maximum of tiles is vectorised, and only the winning tile is searched.
    """
    num_rows, width = logits.shape
    whole = width - width % ARGMAX_TILE
    if num_rows == 0 or whole == 0:
        return np.asarray(logits.float().numpy().argmax(-1))
    tiles = logits[:, :whole].view(num_rows, -1, ARGMAX_TILE)
    best = tiles.amax(-1).float().numpy()
    tile = best.argmax(-1)
    inside = tiles[torch.arange(num_rows), torch.from_numpy(tile)].float().numpy().argmax(-1)
    winners = tile * ARGMAX_TILE + inside
    if whole < width:
        rest = logits[:, whole:].float().numpy()
        is_rest = rest.max(-1) > best.max(-1)
        winners = np.where(is_rest, whole + rest.argmax(-1), winners)
    return np.asarray(winners)


def own_tokens(logits: Tensor, rows: SequenceOf[PlannedRow], draft: Draft) -> NDArray[np.int64]:
    """The target's own token after every verified place: for each sampled row its last known token, then its draft nodes.

    logits [R, V] in this order → int64 [R].
    """
    own = argmax_rows(logits)
    start = 0
    for i, row in enumerate(rows):
        if not row.is_sampled:
            continue
        count = 1 + int(draft.num_draft_tokens[i])
        sequence = row.sequence
        if not sequence.params.is_greedy:
            depths = _depths(draft, i)
            for place in range(count):
                values = logits[start + place].float().numpy()
                position = len(sequence) + depths[place]
                own[start + place] = choose_token(values, sequence.params, sequence.seed, sequence.index, position)
        start += count
    return own


def _depths(draft: Draft, i: int) -> list[int]:
    """Depth of the last known token (0) and of each node of row i (1 for its children)."""
    depths = [0]
    for parent in draft.parents[draft.indptr[i] : draft.indptr[i + 1]].tolist():
        depths.append(depths[parent + 1] + 1)
    return depths


def accepted_path(tokens: list[int], parents: list[int], own: list[int]) -> list[int]:
    """Follow the target's own tokens down one row's tree. own[0] belongs to the root, own[j + 1] to node j."""
    path: list[int] = []
    at = -1
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == at and token == own[at + 1]:
            path.append(node)
            at = node
    return path


def verify(draft: Draft, logits: Tensor, rows: SequenceOf[PlannedRow]) -> Verdict:
    """Compare every drafted token with the target's own. logits [R, V]: see `own_tokens`; nodes of a row are ordered parents first."""
    own = own_tokens(logits, rows, draft).tolist()
    tokens, parents, indptr = draft.tokens.tolist(), draft.parents.tolist(), draft.indptr.tolist()
    verdict = Verdict([], [], [], [])
    start = 0
    for row, (first, last) in zip(rows, pairwise(indptr), strict=True):
        path: list[int] = []
        extra = -1
        if row.is_sampled:
            mine = own[start : start + 1 + last - first]
            path = accepted_path(tokens[first:last], parents[first:last], mine)
            extra = mine[path[-1] + 1 if path else 0]
            start += len(mine)
        verdict.num_draft_tokens.append(last - first)
        verdict.paths.append(path)
        verdict.accepted.append([tokens[first + node] for node in path])
        verdict.next_tokens.append(extra)
    return verdict
