"""How trees grow: the published examples, and what holds for any of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon import SpeculativeConfig, trees
from echelon.build import growth_of
from echelon.draft import Draft, node_depths
from echelon.trees import EAGLE_25, MEDUSA_63, BestFirst, Forest, Growth, LevelByLevel, StaticTree, best_paths, chain, expected_tokens

GROWTHS = [
    chain(5), StaticTree(EAGLE_25), StaticTree(MEDUSA_63), BestFirst(1, 4), BestFirst(3, 4), BestFirst(10, 6), LevelByLevel(0.8, 4, 4),
    LevelByLevel(1.0, 8, 3),
]  # fmt: skip


def grown(
    growth: Growth, budgets: list[tuple[int, int]], seed: int, width: int | None = None, peak: float = 3.0
) -> tuple[Draft, Forest, int]:
    """A draft for rows of (max_tokens, max_depth), from random distributions; the draft, the forest, and the most nodes a row was fed."""
    rng = np.random.default_rng(seed)
    forest = Forest([t for t, _ in budgets], [d for _, d in budgets])
    active = [i for i, budget in enumerate(budgets) if min(budget) > 0]
    nodes, fed = forest.plant(active), np.zeros(len(budgets), np.int64)
    for _ in range(growth.depth):
        width = width or growth.width
        logits = rng.standard_normal((len(nodes), max(width, 12))) * peak
        scores = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        order = np.argsort(-scores, 1)[:, :width]
        nodes = growth.grow(forest, nodes, order, np.take_along_axis(scores, order, 1))
        np.add.at(fed, forest.rows[nodes], 1)
        if not len(nodes):
            break
    return forest.draft(growth.kept(forest)), forest, int((fed - forest.max_tokens).max(initial=-1))


def check(draft: Draft, budgets: list[tuple[int, int]]) -> None:
    for i, (most, deepest) in enumerate(budgets):
        tokens, parents = draft.row(i), draft.row_parents(i)
        assert len(tokens) <= most
        assert all(-1 <= parent < node for node, parent in enumerate(parents)), "a parent stands after its child"
        assert max(node_depths(parents), default=-1) < deepest
        assert len(set(zip(parents, tokens, strict=True))) == len(tokens), "siblings share a token"


@given(
    st.integers(0, len(GROWTHS) - 1),
    st.lists(st.tuples(st.integers(0, 70), st.integers(0, 8)), min_size=1, max_size=6),
    st.integers(0, 2**32 - 1),
    st.sampled_from([None, 1, 2, 12]),
)
def test_every_tree_is_one(which: int, budgets: list[tuple[int, int]], seed: int, width: int | None) -> None:
    """Connected, within budget and depth, no sibling twice; and no row is fed more than its room."""
    draft, _, excess = grown(GROWTHS[which], budgets, seed, width)
    check(draft, budgets)
    assert excess <= 0
    for i, budget in enumerate(budgets):
        assert bool(draft.row(i)) == (min(budget) > 0)


@pytest.mark.parametrize("growth", GROWTHS)
def test_a_row_grows_alone_as_beside_others(growth: Growth) -> None:
    distribution: dict[tuple[int, ...], np.ndarray[Any, Any]] = {}

    def of(path: tuple[int, ...]) -> np.ndarray[Any, Any]:
        logits = distribution.setdefault(path, np.random.default_rng(len(path) + 7 * sum(path)).standard_normal(12) * 3)
        return np.asarray(logits - np.log(np.exp(logits).sum()))

    def tree(budgets: list[tuple[int, int]]) -> Draft:
        forest = Forest([t for t, _ in budgets], [d for _, d in budgets])
        nodes = forest.plant(range(len(budgets)))
        for _ in range(growth.depth):
            scores = np.array([of(tuple(forest.path(n))) for n in nodes.tolist()]).reshape(len(nodes), 12)
            order = np.argsort(-scores, 1, kind="stable")[:, : growth.width]
            nodes = growth.grow(forest, nodes, order, np.take_along_axis(scores, order, 1))
        return forest.draft(growth.kept(forest))

    budgets = [(7, 3), (20, 8), (1, 1), (64, 5)]
    together = tree(budgets)
    for i, budget in enumerate(budgets):
        alone = tree([budget])
        assert (alone.row(0), alone.row_parents(0)) == (together.row(i), together.row_parents(i))


def run(growth: Growth, budget: int, levels: list[dict[tuple[int, ...], list[float]]], depth: int = 9) -> set[tuple[int, ...]]:
    """The paths of a row's tree; `levels` give the probabilities of tokens 0, 1, … after each path that goes on."""
    forest = Forest([budget], [depth])
    nodes = forest.plant([0])
    for level in levels:
        shares = np.zeros((len(nodes), 12))
        for i, node in enumerate(nodes.tolist()):
            given = level[tuple(forest.path(node))]
            shares[i, : len(given)] = given
        with np.errstate(divide="ignore"):
            scores = np.log(shares)
        order = np.argsort(-shares, 1, kind="stable")[:, : growth.width]
        nodes = growth.grow(forest, nodes, order, np.take_along_axis(scores, order, 1))
    kept = growth.kept(forest)
    return {tuple(forest.path(n)) for n in range(len(forest)) if kept[n] and forest.parents[n] >= 0}


def test_clovers_worked_example() -> None:
    """Budget 4: a (.5) and b (.3) of the first head, then two are left: a.1 (.40) and b.1 (.09), and the third head gets nothing."""
    first = {(): [0.5, 0.3, 0.13, 0.07]}
    second = {(0,): [0.8, 0.1, 0.1], (1,): [0.3, 0.29, 0.05]}
    assert run(LevelByLevel(0.8, 4, 3), 4, [first, second, {}]) == {(0,), (1,), (0, 0), (1, 0)}


def test_clovers_quarter_rule() -> None:
    assert run(LevelByLevel(1.0, 4, 1), 9, [{(): [0.6, 0.2, 0.14, 0.06]}]) == {(0,), (1,)}


def test_eagle2_expands_and_reranks_by_joint_probability() -> None:
    """Two go on at each level; of all found the best by the product along the path, a tie to the shallower."""
    first = {(): [0.6, 0.3, 0.1]}
    second = {(0,): [0.9, 0.1, 0.0], (1,): [0.5, 0.5, 0.0]}  # .54 and .06; .15 and .15
    third = {(0, 0): [0.5, 0.5, 0.0], (1, 0): [0.9, 0.1, 0.0]}  # .27 twice; .135
    growth = BestFirst(2, 3)
    assert run(growth, 4, [first, second, third]) == {(0,), (0, 0), (1,), (0, 0, 0)}
    assert run(growth, 6, [first, second, third]) == {(0,), (0, 0), (1,), (0, 0, 0), (0, 0, 1), (1, 0)}
    tied = {(0,): [1.0, 0.0, 0.0], (1,): [1.0, 0.0, 0.0]}
    assert run(BestFirst(2, 2), 2, [{(): [0.5, 0.5, 0.0]}, tied]) == {(0,), (1,)}


def test_eagle2_is_never_short_of_room_with_the_published_settings() -> None:
    """60 nodes, 10 a level, depth 6: the ten most probable of every level go on."""
    growth, rng = BestFirst(10, 6), np.random.default_rng(0)
    forest = Forest([60], [9])
    nodes = forest.plant([0])
    for level in range(6):
        logits = rng.standard_normal((len(nodes), 50)) * 0.1  # flat: every level's nodes could be among the 60
        scores = np.minimum(logits - logits.max(), -1e-9) * 1e-3
        order = np.argsort(-scores, 1)[:, :10]
        before = len(forest)
        nodes = growth.grow(forest, nodes, order, np.take_along_axis(scores, order, 1))
        best = np.sort(forest.scores[before:])[::-1][:10]
        if level < 5:
            assert set(forest.scores[nodes]) <= set(best)


def test_published_trees() -> None:
    assert np.bincount([len(p) for p in EAGLE_25]).tolist() == [0, 4, 8, 8, 3, 2]
    assert np.bincount([len(p) for p in MEDUSA_63]).tolist() == [0, 10, 28, 23, 2]
    assert sum(not any(q[:-1] == p for q in MEDUSA_63) for p in MEDUSA_63) == 42, "leaves"
    for paths in (EAGLE_25, MEDUSA_63):
        draft, *_ = grown(StaticTree(paths), [(64, 9)], 0)
        assert len(draft.tokens) == len(paths)
        assert sorted(node_depths(draft.row_parents(0))) == sorted(len(p) - 1 for p in paths)


def test_no_level_that_goes_on_is_wider_than_it_is_said_to_be() -> None:
    """Where all children of a node are equally likely."""
    for growth in GROWTHS:
        forest = Forest([64], [9])
        nodes = forest.plant([0])
        for _ in range(growth.depth):
            tokens = np.tile(np.arange(growth.width), (len(nodes), 1))
            nodes = growth.grow(forest, nodes, tokens, np.full(tokens.shape, -np.log(growth.width)))
            assert len(nodes) <= growth.widest, type(growth).__name__
            if not len(nodes):
                break


def test_a_level_of_clovers_is_as_wide_as_all_children_of_the_one_before() -> None:
    """While the budget lasts; of EAGLE-2's as many nodes go on as a node has children."""
    for method, budget, widest in (("clover", 60, 16), ("clover", 9, 9), ("eagle", 60, 4)):
        spec = SpeculativeConfig(
            method=method, model="somewhere", tree="dynamic", tree_top_k=4, tree_depth=3, num_speculative_tokens=budget
        )
        assert spec.widest_level == widest and growth_of(spec, None).breadth == spec.usual_level == 4


@pytest.mark.parametrize(
    ("asked", "most"),
    [({}, 25), ({"num_speculative_tokens": 40}, 25), ({"num_speculative_tokens": 9, "speculative_token_tree": [(0,), (1,)]}, 2)],
)
def test_of_a_static_tree_no_more_is_drafted_than_it_has_paths(asked: dict[str, Any], most: int) -> None:
    assert SpeculativeConfig(method="eagle", model="somewhere", tree="static", **asked).most_tokens == most


@pytest.mark.parametrize("paths", [[], [()], [(0, 0)], [(0,), (0,)], [(0, 0), (0,)], [(-1,)], [(0,), (0, 1, 0)]])
def test_what_is_no_tree_is_refused(paths: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="path"):
        StaticTree(paths)


def test_best_paths_are_found_greedily() -> None:
    accuracies = [[0.6, 0.2, 0.1], [0.5, 0.3], [0.4]]
    paths = best_paths(accuracies, 6)
    assert paths == [(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (2,)]  # .6 .3 .2 .18 .12 .1, and (1, 0) ties with (2,)
    assert expected_tokens(accuracies, paths) == pytest.approx(0.6 + 0.3 + 0.2 + 0.18 + 0.12 + 0.1)
    StaticTree(paths)


@given(st.lists(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4), min_size=1, max_size=3), st.integers(1, 8))
def test_no_tree_of_the_size_is_expected_to_accept_more(accuracies: list[list[float]], count: int) -> None:
    """Against every connected tree, found by trying."""
    chosen = best_paths(accuracies, count)
    StaticTree(chosen)
    level: set[frozenset[trees.Path]] = {frozenset()}
    for _ in range(len(chosen)):
        level = set(
            sorted((t | {p} for t in level for p in _next(t, accuracies)), key=lambda t: -expected_tokens(accuracies, sorted(t)))[:200]
        )
    most = max(expected_tokens(accuracies, sorted(t)) for t in level)
    assert expected_tokens(accuracies, chosen) >= most - 1e-9


def _next(tree: frozenset[trees.Path], accuracies: list[list[float]]) -> set[trees.Path]:
    return {(*p, r) for p in {(), *tree} if len(p) < len(accuracies) for r in range(len(accuracies[len(p)]))} - tree
