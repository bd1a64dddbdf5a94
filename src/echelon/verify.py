"""Which drafted tokens survive: those that equal the target's own token, along a path from the last known token.

The target's own token at a place is a function of its logits there and of the request (`sampling.Sampler`), so what is emitted
is what plain decoding emits, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.draft import Draft
from echelon.sampling import Logprobs, logprobs_of
from echelon.sequence import PlannedRow

Acceptance = Literal["exact", "rejection"]
ARGMAX_TILE = 128


@dataclass(frozen=True)
class Verdict:
    """What survived of B rows, one entry per row in every list.

    num_draft_tokens  how many tokens were drafted
    paths             accepted nodes, root first, as indices among the row's own nodes
    accepted          their tokens
    next_tokens       the extra token: recovered after a rejection, bonus after full acceptance; −1 where nothing was sampled
    logprobs          of accepted and extra token, where asked for
    prompt_logprobs   of the prompt tokens that this step passed, where asked for
    """

    num_draft_tokens: list[int]
    paths: list[list[int]]
    accepted: list[list[int]]
    next_tokens: list[int]
    logprobs: list[list[Logprobs]]
    prompt_logprobs: list[list[Logprobs]]

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


def own_tokens(logits: Tensor, rows: SequenceOf[PlannedRow], draft: Draft) -> list[int]:
    """The target's own token after every verified place: for each sampled row its last known token, then its draft nodes.

    logits [R, V] in this order, prompt logits left out → R tokens.
    """
    own: list[int] = argmax_rows(logits).tolist()
    start = 0
    for i, row in enumerate(rows):
        if not row.is_sampled:
            continue
        drafted = draft.row(i)
        sampler = row.sequence.sampler
        if not sampler.is_argmax:
            values = logits[start : start + 1 + len(drafted)].float().numpy()
            for place, path in enumerate(_paths(drafted, draft.row_parents(i))):
                own[start + place] = sampler.choose(values[place], row.sequence.tokens, path)
        start += 1 + len(drafted)
    return own


def _paths(tokens: list[int], parents: list[int]) -> list[list[int]]:
    """Drafted tokens from the root to each place: none for the last known token, then one path a node."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*paths[parent + 1], token])
    return paths


def accepted_path(tokens: list[int], parents: list[int], own: list[int]) -> list[int]:
    """Follow the target's own tokens down one row's tree. own[0] belongs to the root, own[j + 1] to node j."""
    path: list[int] = []
    at = -1
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == at and token == own[at + 1]:
            path.append(node)
            at = node
    return path


def kept_path(draft: Draft, i: int, own: list[int]) -> list[int]:
    """What row i keeps of its draft."""
    if draft.replayed is not None:
        return list(range(int(draft.replayed[i])))
    return accepted_path(draft.row(i), draft.row_parents(i), own)


def verify(draft: Draft, logits: Tensor, rows: SequenceOf[PlannedRow], acceptance: Acceptance = "exact") -> Verdict:
    """Decide what of a draft is kept, and the extra token of every row.

    logits [R, V]: for each row its prompt logits, if wanted, then (sampled rows) one after the last known token and one a draft node;
    nodes of a row are ordered parents first.
    """
    verdict = Verdict([], [], [], [], [], [])
    logits = _take_prompt_logits(logits, rows, draft, verdict)
    own = own_tokens(logits, rows, draft) if acceptance == "exact" else []
    start = 0
    for i, row in enumerate(rows):
        tokens = draft.row(i)
        path: list[int] = []
        extra = -1
        logprobs: list[Logprobs] = []
        if row.is_sampled:
            end = start + 1 + len(tokens)
            if acceptance == "exact":
                path = kept_path(draft, i, own[start:end])
            else:
                path, extra = rejection_path(draft, i, logits[start:end].float().numpy(), row)
            places = [0, *(node + 1 for node in path)]  # the row of logits that each emitted token came from
            if acceptance == "exact":
                extra = own[start + places[-1]]
            count = row.sequence.params.logprobs
            if count is not None:
                emitted = [*(tokens[node] for node in path), extra]
                values = logits[[start + p for p in places]].float().numpy()
                logprobs = [logprobs_of(v, t, count) for v, t in zip(values, emitted, strict=True)]
            start = end
        verdict.num_draft_tokens.append(len(tokens))
        verdict.paths.append(path)
        verdict.accepted.append([tokens[node] for node in path])
        verdict.next_tokens.append(extra)
        verdict.logprobs.append(logprobs)
    return verdict


def rejection_path(draft: Draft, i: int, logits: NDArray[np.float32], row: PlannedRow) -> tuple[list[int], int]:
    """Algorithm 1 of Leviathan et al. 2023 on the chain of one row: accepted nodes and the extra token.

    logits float32 [1 + nodes, V]. A token drafted with certainty (no `draft.probs`) has draft probability 1. Coins and residual draws
    are keyed by (seed, index, position), so a row's text depends on no neighbour.
    """
    sampler, known = row.sequence.sampler, row.sequence.tokens
    tokens, first = draft.row(i), int(draft.indptr[i])
    assert draft.row_parents(i) == list(range(-1, len(tokens) - 1)), "rejection is defined on chains"
    for node, token in enumerate(tokens):
        target = sampler.probabilities(logits[node], known, tokens[:node])
        certain = np.zeros_like(target)
        certain[token] = 1.0
        drafted = certain if draft.probs is None else draft.probs[first + node]
        position = len(known) + node
        if not sampler.accepts(float(target[token]), float(drafted[token]), position):
            return list(range(node)), sampler.draw(np.maximum(target - drafted, 0.0), position)
    return list(range(len(tokens))), sampler.choose(logits[len(tokens)], known, tokens)


def _take_prompt_logits(logits: Tensor, rows: SequenceOf[PlannedRow], draft: Draft, verdict: Verdict) -> Tensor:
    """Turn prompt logits into logprobs; returns the other rows of logits."""
    if not any(row.num_prompt_logits for row in rows):
        verdict.prompt_logprobs.extend([] for _ in rows)
        return logits
    kept = []
    start = 0
    for i, row in enumerate(rows):
        sequence = row.sequence
        found: list[Logprobs] = []
        values = logits[start : start + row.num_prompt_logits].float().numpy()
        for place, line in enumerate(values, row.start + 1):
            if len(sequence.prompt_logprobs) + len(found) < place < sequence.num_prompt_tokens:
                found.append(logprobs_of(line, sequence.tokens[place], sequence.params.prompt_logprobs or 0))
        verdict.prompt_logprobs.append(found)
        start += row.num_prompt_logits
        count = 1 + int(draft.num_draft_tokens[i]) if row.is_sampled else 0
        kept.append(logits[start : start + count])
        start += count
    return torch.cat(kept)
