"""Acceptance on chains and trees."""

from __future__ import annotations

import numpy as np
import torch

from echelon import SamplingParams
from echelon.acceptance import Exact, Rule, Typical, accepted_path, verify
from echelon.draft import Draft, Verdict, indptr_of
from echelon.sampling import Sampler
from echelon.sequence import PlannedRow, Sequence


def planned(num_rows: int, sampled: tuple[bool, ...] = ()) -> list[PlannedRow]:
    rows = []
    for i in range(num_rows):
        sequence = Sequence(i, [1, 2, 3], 3, Sampler(SamplingParams(temperature=0), 0), frozenset(), 50)
        is_sampled = sampled[i] if sampled else True
        rows.append(PlannedRow(sequence, 0, 3 if is_sampled else 2, 4, 4))
    return rows


def logits_for(own: list[int], width: int = 20) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(own), width).float()


def verdict_of(draft: Draft, logits: torch.Tensor, rows: list[PlannedRow], rule: Rule | None = None) -> Verdict:
    counts = [len(draft.row(i)) + 1 if row.is_sampled else 0 for i, row in enumerate(rows)]
    return verify(draft, logits, torch.from_numpy(indptr_of(counts)), rows, rule or Exact())


def test_chain_stops_at_the_first_difference() -> None:
    draft = Draft.chains([[5, 6, 7], [], [8, 9], [4]])
    own = [5, 6, 1, 9, 3, 8, 9, 2, 7, 11]
    verdict = verdict_of(draft, logits_for(own), planned(4))
    assert [kept.accepted for kept in verdict] == [[5, 6], [], [8, 9], []]
    assert [kept.next_token for kept in verdict] == [1, 3, 2, 7]  # recovered, plain, bonus, recovered
    assert [kept.num_draft_tokens for kept in verdict] == [3, 0, 2, 1]


def test_rows_that_are_not_sampled_take_no_logits() -> None:
    draft = Draft.chains([[], [5]])
    verdict = verdict_of(draft, logits_for([5, 6]), planned(2, (False, True)))
    assert [kept.accepted for kept in verdict] == [[], [5]]
    assert [kept.next_token for kept in verdict] == [-1, 6]


def test_a_later_match_after_a_difference_does_not_count() -> None:
    assert accepted_path([5, 6, 7], [-1, 0, 1], [4, 6, 7, 8]) == []


def test_tree_follows_the_target() -> None:
    # two roots 5 and 6; 6 has children 7 and 8; 8 has the child 9
    tokens, parents = [5, 6, 7, 8, 9], [-1, -1, 1, 1, 3]
    assert accepted_path(tokens, parents, target=[6, 0, 8, 0, 9, 1]) == [1, 3, 4]
    assert accepted_path(tokens, parents, target=[5, 0, 8, 0, 9, 1]) == [0]
    assert accepted_path(tokens, parents, target=[1, 0, 8, 0, 9, 1]) == []
    # 7 below 5 is what the target says after 6, but it is another branch
    assert accepted_path([5, 6, 7], [-1, -1, 0], target=[6, 0, 7, 9]) == [1]


def test_a_chain_is_a_tree_whose_parents_precede() -> None:
    draft = Draft.chains([[1, 2, 3], [], [4]])
    assert draft.parents.tolist() == [-1, 0, 1, -1]
    assert draft.indptr.tolist() == [0, 3, 3, 4]
    assert draft.tokens.dtype == draft.parents.dtype == draft.indptr.dtype == np.int32
    assert [draft.row(i) for i in range(3)] == [[1, 2, 3], [], [4]]


def typical(shares: list[list[float]], tokens: list[int], parents: list[int], rule: Typical) -> list[int]:
    """Nodes kept of one row's tree, where the target gives these probabilities after the last known token and after every node."""
    sequence = Sequence(0, [1, 2, 3], 3, Sampler(SamplingParams(temperature=1.0), 5), frozenset(), 50)
    draft = Draft.trees([(tokens, parents)])
    logits = torch.tensor(shares).clamp_min(1e-12).log()
    return verdict_of(draft, logits, [PlannedRow(sequence, 0, 3, 9, 9)], rule)[0].path


def test_typical_acceptance_is_medusas() -> None:
    """p > min(ε, δ · exp(−H)): a sure place (H = 0.394, bound .202 → .09) and a flat one (H = ln 4, bound .075)."""
    rule = Typical(0.09, 0.3)
    sure, flat = [0.9, 0.08, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25]
    assert typical([sure, flat], [0], [-1], rule) == [0]
    assert typical([sure, flat], [1], [-1], rule) == []  # .08 < .09
    assert typical([[0.02, 0.08, 0.4, 0.5], flat], [1], [-1], rule) == []
    assert typical([flat, sure, flat], [3, 1], [-1, 0], rule) == [0]
    assert typical([flat, sure, flat], [3, 1], [-1, 0], Typical(0.07, 0.3)) == [0, 1]
    wide = [1 / 40] * 40
    assert typical([wide, wide], [7], [-1], rule) == [0], "1/40 exceeds 0.3 / 40"


def test_a_place_without_probabilities_ends_the_paths_that_come_to_it() -> None:
    """0 and 1 are typical; 2 follows 0, whose place holds NaN, and 2 and 0 follow 1."""
    rule, even, broken = Typical(0.09, 0.3), [0.4, 0.3, 0.2, 0.1], [float("nan")] * 4
    places = [even, broken, even, even, even, even]
    assert typical(places, [0, 1, 2, 2, 0], [-1, -1, 0, 1, 3], rule) == [1, 3, 4]
    sequence = Sequence(0, [1, 2, 3], 3, Sampler(SamplingParams(temperature=1.0), 5), frozenset(), 50)
    logits = torch.tensor([even, broken, even]).log()
    (kept,) = verdict_of(Draft.trees([([0, 1], [-1, 0])]), logits, [PlannedRow(sequence, 0, 3, 9, 9)], rule)
    assert (kept.path, kept.next_token) == ([0], -1) and kept.error is not None


def test_typical_acceptance_takes_the_longest_path_then_the_likeliest() -> None:
    rule, even = Typical(0.09, 0.3), [0.4, 0.3, 0.2, 0.1]
    places = [even] * 6
    assert typical(places, [0, 1, 2], [-1, -1, 1], rule) == [1, 2]
    assert typical(places, [1, 0, 2, 1, 0], [-1, -1, 0, 1, 1], rule) == [1, 4]  # .3 · .2, .4 · .3, .4 · .4
    assert typical([even, [0.99, 0.01, 0.0, 0.0], even], [0, 1], [-1, 0], rule) == [0]
