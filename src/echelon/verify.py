"""Which drafted tokens survive: those that equal the target's own token, along a path from the last known token.

The target's own token at a place is a function of its logits there and of the request (`sampling.Sampler`), so what is emitted
is what plain decoding emits, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.draft import Draft
from echelon.errors import EchelonError, RowError, row_error
from echelon.ops.devices import on_host
from echelon.ops.sample import Place, choose, raw_rows
from echelon.sampling import Logprobs, logprobs_of
from echelon.sequence import PlannedRow


@dataclass(frozen=True)
class Typical:
    """Medusa's rule (Cai et al. 2024), LOSSY: a drafted token stays if p > min(threshold, alpha · exp(−entropy)), p being the target's
    distribution there. At temperature 0 it is the exact rule.
    """

    threshold: float
    alpha: float

    def accepts(self, probabilities: NDArray[np.float64], token: int) -> bool:
        positive = probabilities[probabilities > 0]
        entropy = -float((positive * np.log(positive)).sum())
        return bool(probabilities[token] > min(self.threshold, self.alpha * np.exp(-entropy)))


Acceptance = Literal["exact", "rejection", "replayed"] | Typical  # replayed: as many tokens as the draft says, whatever the target says
ARGMAX_TILE = 128


@dataclass(frozen=True)
class Verdict:
    """What survived of B rows, one entry per row in every list.

    num_draft_tokens  how many tokens were drafted
    paths             accepted nodes, root first, as indices among the row's own nodes
    accepted          their tokens
    next_tokens       the extra token: recovered after a rejection, bonus after full acceptance; −1 where nothing was sampled or could be
    logprobs          of accepted and extra token, where asked for
    prompt_logprobs   of the prompt tokens that this step passed, where asked for
    errors            why a row cannot go on after what it accepted, by row; its neighbours know nothing of it
    """

    num_draft_tokens: list[int]
    paths: list[list[int]]
    accepted: list[list[int]]
    next_tokens: list[int]
    logprobs: list[list[Logprobs]]
    prompt_logprobs: list[list[Logprobs]]
    errors: dict[int, EchelonError] = field(default_factory=dict)

    @property
    def num_accepted(self) -> list[int]:
        return [len(path) for path in self.paths]


def argmax_rows(logits: Tensor) -> NDArray[np.int64]:
    """int64 [R]: the first largest entry of every row of [R, V]."""
    return largest_rows(logits)[0]


def largest_rows(logits: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The first largest entry of every row of [R, V]: its place int64 [R] and its value float32 [R].

    A row that holds NaN anywhere has the value NaN, and then its place means nothing. `torch.argmax` tracks an index per element; the
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


def own_tokens(logits: Tensor, rows: SequenceOf[PlannedRow], draft: Draft, problems: dict[int, EchelonError]) -> list[int]:
    """The target's own token after every verified place: for each sampled row its last known token, then its draft nodes.

    logits [R, V] in this order, prompt logits left out → R tokens; −1 where there is none, with the reason in `problems`. No draft
    equals −1, so a row fails where plain decoding would, and not for a place that its text never reaches.
    """
    largest, values = largest_rows(logits)
    own: list[int] = largest.tolist()
    for at in np.flatnonzero(~np.isfinite(values)).tolist():
        own[at] = -1
        problems[at] = RowError(f"the largest of the model's logits is {values[at]}; the model overflowed, so this row ends")
    places: list[tuple[int, Place]] = []
    start = 0
    for i, row in enumerate(rows):
        if not row.is_sampled:
            continue
        drafted, sequence = draft.row(i), row.sequence
        if not sequence.sampler.is_argmax:
            lines = raw_rows(logits[start : start + 1 + len(drafted)])
            for node, path in enumerate(_paths(drafted, draft.row_parents(i))):
                places.append((start + node, Place(sequence.sampler, lines[node], sequence.tokens, path)))
        start += 1 + len(drafted)
    failed: dict[int, EchelonError] = {}
    for (at, _), token in zip(places, choose([place for _, place in places], failed), strict=True):
        own[at] = token
    problems |= {places[n][0]: error for n, error in failed.items()}
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


def kept_path(draft: Draft, i: int, own: list[int], acceptance: Acceptance) -> list[int]:
    """What row i keeps of its draft: what equals the target's own tokens, unless the configuration has acceptance replayed."""
    if acceptance == "replayed" and draft.replayed is not None:
        return list(range(int(draft.replayed[i])))
    return accepted_path(draft.row(i), draft.row_parents(i), own)


def verify(draft: Draft, logits: Tensor, rows: SequenceOf[PlannedRow], acceptance: Acceptance = "exact") -> Verdict:
    """Decide what of a draft is kept, and the extra token of every row.

    logits [R, V]: for each row its prompt logits, if wanted, then (sampled rows) one after the last known token and one a draft node;
    nodes of a row are ordered parents first. What fails in one row's work is entered in `Verdict.errors` and ends that row alone.
    """
    verdict = Verdict([], [], [], [], [], [])
    logits = _take_prompt_logits(logits, rows, draft, verdict)
    problems: dict[int, EchelonError] = {}
    own = own_tokens(logits, rows, draft, problems) if acceptance != "rejection" else []
    start = 0
    for i, row in enumerate(rows):
        tokens = draft.row(i)
        end = start + (1 + len(tokens) if row.is_sampled else 0)
        path: list[int] = []
        extra = -1
        logprobs: list[Logprobs] = []
        try:
            if row.is_sampled and acceptance == "rejection":
                failed: dict[int, EchelonError] = {}
                path, extra = rejection_path(draft, i, on_host(logits[start:end]), row, failed)
                problems |= {start + place: error for place, error in failed.items()}
            elif row.is_sampled:
                if isinstance(acceptance, Typical) and not row.sequence.params.is_greedy:
                    path = typical_path(draft, i, logits[start:end], row, acceptance)
                else:
                    path = kept_path(draft, i, own[start:end], acceptance)
                extra = own[start + _last_place(path)]
            logprobs = _logprobs(row, logits[start:end], path, [*(tokens[node] for node in path), extra])
        except Exception as error:
            path, extra = [], -1
            verdict.errors[i] = row_error(error)
        if row.is_sampled and extra < 0:
            verdict.errors.setdefault(i, problems.get(start + _last_place(path)) or RowError("no token could be chosen"))
        verdict.num_draft_tokens.append(len(tokens))
        verdict.paths.append(path)
        verdict.accepted.append([tokens[node] for node in path])
        verdict.next_tokens.append(extra)
        verdict.logprobs.append(logprobs)
        start = end
    return verdict


def _last_place(path: list[int]) -> int:
    """Row of logits, among those of a row, that the extra token comes from: node n has the one after n's."""
    return path[-1] + 1 if path else 0


def _logprobs(row: PlannedRow, logits: Tensor, path: list[int], emitted: list[int]) -> list[Logprobs]:
    """Of every emitted token, where the request asks, an extra −1 left out; logits [1 + nodes, V]."""
    count = row.sequence.params.logprobs
    if count is None or not row.is_sampled:
        return []
    values = on_host(logits[[0, *(node + 1 for node in path)]])
    return [logprobs_of(line, token, count) for line, token in zip(values, emitted, strict=True) if token >= 0]


def typical_path(draft: Draft, i: int, logits: Tensor, row: PlannedRow, rule: Typical) -> list[int]:
    """The longest path of typical tokens in row i's tree, of several the most probable; logits [1 + nodes, V]."""
    tokens, parents, sampler = draft.row(i), draft.row_parents(i), row.sequence.sampler
    paths: dict[int, list[int]] = {-1: []}  # of typical nodes
    scores = {-1: 0.0}
    places: dict[int, NDArray[np.float64]] = {}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent not in paths:
            continue
        if parent not in places:
            values = on_host(logits[parent + 1])
            places[parent] = sampler.probabilities(values, row.sequence.tokens, [tokens[n] for n in paths[parent]])
        if rule.accepts(places[parent], token):
            paths[node] = [*paths[parent], node]
            scores[node] = scores[parent] + float(np.log(places[parent][token]))
    return paths[max(paths, key=lambda node: (len(paths[node]), scores[node]))]


def rejection_path(
    draft: Draft, i: int, logits: NDArray[np.float32], row: PlannedRow, problems: dict[int, EchelonError]
) -> tuple[list[int], int]:
    """Algorithm 1 of Leviathan et al. 2023 on the chain of one row: accepted nodes and the extra token.

    logits float32 [1 + nodes, V]. A token drafted with certainty (no `draft.probs`) has draft probability 1. Coins and residual draws
    are keyed by (seed, index, position), so a row's text depends on no neighbour. Where a place gives no token the path ends, the extra
    token is −1 and the reason stands in `problems`, by place.
    """
    tokens = draft.row(i)
    assert draft.row_parents(i) == list(range(-1, len(tokens) - 1)), "rejection is defined on chains"
    for node in range(len(tokens)):
        try:
            extra = _rejected(draft, i, node, logits[node], row)
        except Exception as error:
            problems[node] = row_error(error)
            extra = -1
        if extra is not None:
            return list(range(node)), extra
    try:
        return list(range(len(tokens))), row.sequence.sampler.choose(logits[len(tokens)], row.sequence.tokens, tokens)
    except Exception as error:
        problems[len(tokens)] = row_error(error)
        return list(range(len(tokens))), -1


def _rejected(draft: Draft, i: int, node: int, logits: NDArray[np.float32], row: PlannedRow) -> int | None:
    """The token in the place of a drafted one, or `None` where that is accepted."""
    sampler, known, tokens = row.sequence.sampler, row.sequence.tokens, draft.row(i)
    token, position = tokens[node], len(known) + node
    target = sampler.probabilities(logits, known, tokens[:node])
    drafted = np.zeros_like(target)
    if draft.probs is None:
        drafted[token] = 1.0
    else:
        drafted = draft.probs[int(draft.indptr[i]) + node]
    if sampler.accepts(float(target[token]), float(drafted[token]), position):
        return None
    return sampler.draw(np.maximum(target - drafted, 0.0), position)


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
        values = on_host(logits[start : start + row.num_prompt_logits])
        for place, line in enumerate(values, row.start + 1):
            if len(sequence.prompt_logprobs) + len(found) < place < sequence.num_prompt_tokens:
                if not np.isfinite(highest := line.max()):
                    verdict.errors[i] = RowError(f"the largest logit at position {place} of the prompt is {highest}: the model overflowed")
                    break
                found.append(logprobs_of(line, sequence.tokens[place], sequence.params.prompt_logprobs or 0))
        verdict.prompt_logprobs.append(found)
        start += row.num_prompt_logits
        count = 1 + int(draft.num_draft_tokens[i]) if row.is_sampled else 0
        kept.append(logits[start : start + count])
        start += count
    return torch.cat(kept)
