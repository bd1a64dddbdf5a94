"""How trees of drafted tokens grow: which children a node gets, which nodes go on, which are proposed.

A node's score is the logarithm of the joint probability, as the drafter sees it, of the path to it. All rows of a batch grow together,
level by level, each within its own budget; nothing of a row's tree is a function of its neighbours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from echelon.draft import Draft, Float64, Int64, indptr_of

Bool = NDArray[np.bool_]
Path = tuple[int, ...]  # of ranks: (0, 2) is the third child of the likeliest first token

# The 25 nodes of EAGLE-1 (Li et al. 2024), which its code calls mc_sim_7b_63, and which Clover-2 uses too
EAGLE_25: tuple[Path, ...] = (
    (0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0),
    (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip

# The 63 nodes of Medusa (Cai et al. 2024) for Vicuna 7B, mc_sim_7b_63 in its code, in the order in which they were found worth while
MEDUSA_63: tuple[Path, ...] = (
    (0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 2), (3,), (0, 3), (4,), (0, 4), (2, 0), (0, 5), (0, 0, 1), (5,), (0, 6), (6,),
    (0, 7), (0, 1, 0), (1, 1), (7,), (0, 8), (0, 0, 2), (3, 0), (0, 9), (8,), (9,), (1, 0, 0), (0, 2, 0), (1, 2), (0, 0, 3), (4, 0), (2, 1),
    (0, 0, 4), (0, 0, 5), (0, 0, 0, 0), (0, 1, 1), (0, 0, 6), (0, 3, 0), (5, 0), (1, 3), (0, 0, 7), (0, 0, 8), (0, 0, 9), (6, 0), (0, 4, 0),
    (1, 4), (7, 0), (0, 1, 2), (2, 0, 0), (3, 1), (2, 2), (8, 0), (0, 5, 0), (1, 5), (1, 0, 1), (0, 2, 1), (9, 0), (0, 6, 0), (0, 0, 0, 1),
    (1, 6), (0, 7, 0),
)  # fmt: skip

# For drafters that know what they have drafted; between 1.4 and 2 trees of a draft model and of EAGLE emitted most on the embedded pair.
# Medusa's heads know only the text: a product of their probabilities promises too much already.
SHARPNESS = 1.5


class Forest:
    """Trees of B rows, growing. Nodes stand in the order in which they were found; a root is the last known token of its row.

    rows, tokens, parents, depths int64[C], scores float64[C]; a root has depth 0, score 0 and no parent (−1)
    max_tokens, max_depth         int64[B]: drafted nodes a row may have, and drafted tokens on one path
    min_score                     no path with a lower one
    kinds                         int64[C]: for the growth to note what a node is
    """

    def __init__(self, max_tokens: Sequence[int], max_depth: Sequence[int], min_score: float = -np.inf) -> None:
        self.min_score = min_score
        self.max_tokens, self.max_depth = np.asarray(max_tokens, np.int64), np.asarray(max_depth, np.int64)
        self.rows = self.tokens = self.parents = self.depths = self.kinds = np.zeros(0, np.int64)
        self.scores = np.zeros(0)

    def __len__(self) -> int:
        return len(self.rows)

    def plant(self, rows: Sequence[int]) -> Int64:
        """A root for each of `rows`."""
        zeros = np.zeros(len(rows), np.int64)
        return self._append(np.asarray(rows, np.int64), zeros, zeros - 1, zeros, np.zeros(len(rows)), zeros)

    def add(self, parents: Int64, tokens: Int64, scores: Float64, kinds: Int64 | None = None) -> Int64:
        """Children of nodes `parents`; `scores` are of the whole paths. Returns their indices."""
        kinds = np.zeros(len(parents), np.int64) if kinds is None else kinds
        return self._append(self.rows[parents], tokens, parents, self.depths[parents] + 1, scores, kinds)

    def _append(self, rows: Int64, tokens: Int64, parents: Int64, depths: Int64, scores: Float64, kinds: Int64) -> Int64:
        first = len(self)
        new = {"rows": rows, "tokens": tokens, "parents": parents, "depths": depths, "scores": scores, "kinds": kinds}
        for name, values in new.items():
            setattr(self, name, np.concatenate([getattr(self, name), values]))
        return np.arange(first, len(self))

    def counts(self) -> Int64:
        """int64[B]: drafted nodes of every row."""
        return np.bincount(self.rows[self.parents >= 0], minlength=len(self.max_tokens)).astype(np.int64)

    def path(self, node: int) -> list[int]:
        """Drafted tokens from the root to `node`, itself included."""
        tokens: list[int] = []
        while self.parents[node] >= 0:
            tokens.append(int(self.tokens[node]))
            node = int(self.parents[node])
        return tokens[::-1]

    def scores_along(self, nodes: Int64) -> Float64:
        """float64[M, d]: of `nodes` of one depth d, the logarithm of the probability of each token on the path, given those before it."""
        along = []
        while len(nodes) and self.parents[nodes[0]] >= 0:
            above = self.parents[nodes]
            along.append(self.scores[nodes] - self.scores[above])
            nodes = above
        return np.stack(along[::-1], 1) if along else np.zeros((len(nodes), 0))

    def draft(self, is_kept: Bool, has_scores: bool = False) -> Draft:
        """The kept nodes, whose parents must be kept too; `has_scores`: scores are logarithms of probabilities."""
        kept = np.flatnonzero(is_kept & (self.parents >= 0))
        kept = kept[np.argsort(self.rows[kept], kind="stable")]
        indptr = indptr_of(np.bincount(self.rows[kept], minlength=len(self.max_tokens)))
        places = np.full(len(self), -1, np.int64)
        places[kept] = np.arange(len(kept)) - indptr[self.rows[kept]]
        parents = self.parents[kept]
        scores = self.scores[kept] - self.scores[parents] if has_scores else None
        return Draft(self.tokens[kept].astype(np.int32), places[parents].astype(np.int32), indptr, scores=scores)


class Growth(ABC):
    """`width`: most children of a node; `breadth`: nodes of a level that go on, as many as drafting a level is timed with; `depth`: longest
    path; `only_ranks`: of scores only their order matters, and which are −∞; `sharpness`: what logits are multiplied by before they become
    scores.
    """

    width: int
    breadth: int
    depth: int
    only_ranks = False
    sharpness = 1.0

    @property
    def widest(self) -> int:
        """Most nodes of a level that go on, whatever the row's budget."""
        return self.breadth

    @abstractmethod
    def grow(self, forest: Forest, nodes: Int64, tokens: Int64, scores: Float64) -> Int64:
        """Give `nodes` [M] children: tokens [M, width], the likeliest first, with log-probabilities scores [M, width] ≤ 0, −∞ where there
        is none. Returns which of the new nodes to go on from.
        """

    def kept(self, forest: Forest) -> Bool:
        """Which nodes are proposed, roots aside: at most the budget, each with its parent. By default all that have grown."""
        return np.ones(len(forest), np.bool_)


def best(rows: Int64, scores: Float64, depths: Int64, limits: Int64) -> Bool:
    """Of each row's entries the `limits[row]` with the highest score; ties go to the shallower, then to the earlier."""
    order = np.lexsort((depths, -scores, rows))
    starts = np.searchsorted(rows[order], np.arange(len(limits)))
    place = np.arange(len(order)) - starts[rows[order]]
    chosen = np.zeros(len(rows), np.bool_)
    chosen[order[place < limits[rows[order]]]] = True
    return chosen


def _joint(forest: Forest, nodes: Int64, tokens: Int64, scores: Float64) -> tuple[Int64, Int64, Float64]:
    """Every possible child as (parent, token, score of the path), flat and in order; those that may not be have the score −∞."""
    joint = forest.scores[nodes][:, None] + np.minimum(np.nan_to_num(scores, nan=-np.inf, neginf=-np.inf), 0.0)
    joint[joint < forest.min_score] = -np.inf
    return np.repeat(nodes, tokens.shape[1]), tokens.ravel(), joint.ravel()


def _growing(forest: Forest, nodes: Int64, depth: int) -> Int64:
    """Those that may have children."""
    return nodes[forest.depths[nodes] < np.minimum(depth, forest.max_depth[forest.rows[nodes]])]


def _checked_paths(paths: Sequence[Sequence[int]]) -> list[Path]:
    """Paths of ranks in which every path comes after the one that it goes on from; `ValueError` where they are none."""
    checked: list[Path] = []
    for path in (tuple(map(int, path)) for path in paths):
        if not path or min(path) < 0:
            raise ValueError(f"tree path {path} is empty or holds a negative rank")
        if len(path) > 1 and path[:-1] not in checked:
            raise ValueError(f"tree path {path} does not come after {path[:-1]}, from which it goes on")
        checked.append(path)
    if len(set(checked)) != len(checked) or not checked:
        raise ValueError("a tree needs paths, each of them once")
    return checked


class StaticTree(Growth):
    """The same tree for every row, as paths of ranks. A chain is one. A row with a smaller budget gets the first nodes of the list.

    Published lists are sorted by length first; one that comes from `best_paths` is best cut anywhere.
    """

    def __init__(self, paths: Sequence[Sequence[int]], only_ranks: bool = True) -> None:
        self.only_ranks = only_ranks
        given = _checked_paths(paths)
        self.width, self.depth = 1 + max(path[-1] for path in given), max(map(len, given))
        inner = {path[:-1] for path in given if len(path) > 1}
        self.breadth = max(np.bincount([len(path) for path in inner]), default=1)
        # kind of a node: 0 the root, i + 1 path i; children by kind: their rank, and their kind (0: none)
        of_path = {(): 0} | {path: i + 1 for i, path in enumerate(given)}
        parents = [of_path[path[:-1]] for path in given]
        most = max(np.bincount(parents))
        self._ranks = np.zeros((len(given) + 1, most), np.int64)
        self._kinds = np.zeros((len(given) + 1, most), np.int64)
        for i, (parent, path) in enumerate(zip(parents, given, strict=True)):
            place = parents[:i].count(parent)
            self._ranks[parent, place], self._kinds[parent, place] = path[-1], i + 1

    def grow(self, forest: Forest, nodes: Int64, tokens: Int64, scores: Float64) -> Int64:
        nodes_kinds = forest.kinds[nodes]
        ranks, kinds = self._ranks[nodes_kinds], np.array(self._kinds[nodes_kinds])
        _, _, joint = _joint(forest, nodes, tokens, scores)
        joint = joint.reshape(tokens.shape)
        kinds[ranks >= tokens.shape[1]] = 0
        ranks = np.minimum(ranks, tokens.shape[1] - 1)
        chosen = np.take_along_axis(joint, ranks, 1)
        kinds[(kinds > forest.max_tokens[forest.rows[nodes]][:, None]) | ~np.isfinite(chosen)] = 0
        at = np.nonzero(kinds)
        new = forest.add(nodes[at[0]], np.take_along_axis(tokens, ranks, 1)[at], chosen[at], kinds[at])
        has_children = self._kinds[forest.kinds[new], 0] > 0
        has_children &= self._kinds[forest.kinds[new], 0] <= forest.max_tokens[forest.rows[new]]
        return _growing(forest, new[has_children], self.depth)


def chain(length: int, only_ranks: bool = True) -> StaticTree:
    """The tree that is one path of `length` tokens."""
    return StaticTree([(0,) * (i + 1) for i in range(length)], only_ranks)


class BestFirst(Growth):
    """EAGLE-2 (Li et al. 2024): of each level's new nodes the `top_k` with the highest joint probability go on, each with `top_k` children;
    of all nodes found the budget's number with the highest are proposed.

    The nodes that go on are never more than the budget, with one left for every deeper level: the drafter has no room for others. The
    published settings (60 nodes, 10 a level, depth 6) never meet that limit.

    `sharpness`: a drafter's probabilities are those of a draw, and a greedy target takes its likeliest token more often than it would
    draw it; so does one that draws, with noise that the drafter knows. With the published 1 the likeliest path looks less likely than it
    is, and trees get too broad for it.
    """

    def __init__(self, top_k: int, depth: int, sharpness: float = 1.0) -> None:
        self.width = self.breadth = top_k
        self.depth, self.sharpness = depth, sharpness

    def grow(self, forest: Forest, nodes: Int64, tokens: Int64, scores: Float64) -> Int64:
        parents, flat, joint = _joint(forest, nodes, tokens, scores)
        found = np.isfinite(joint)
        new = forest.add(parents[found], flat[found], joint[found])
        if not len(new):
            return new
        # a path below a node that would not be proposed would not be either
        eligible = _growing(forest, new[self.kept(forest)[new]], self.depth)
        rows = forest.rows[eligible]
        fed = np.bincount(forest.rows[forest.kinds == 1], minlength=len(forest.max_tokens))
        levels_after = np.minimum(self.depth, forest.max_depth) - 1 - int(forest.depths[new[0]])
        room = forest.max_tokens - fed
        limits = np.minimum(np.minimum(self.width, room), np.maximum(room - np.maximum(levels_after, 0), 1))
        going = eligible[best(rows, forest.scores[eligible], forest.depths[eligible], limits)]
        forest.kinds[going] = 1
        return going

    def kept(self, forest: Forest) -> Bool:
        is_kept = forest.parents < 0
        drafted = np.flatnonzero(~is_kept)
        chosen = best(forest.rows[drafted], forest.scores[drafted], forest.depths[drafted], forest.max_tokens)
        is_kept[drafted[chosen]] = True
        return is_kept


class LevelByLevel(Growth):
    """Clover (Xiao et al. 2024): of a node's children those until their probabilities add up to `top_p`, none below a quarter of the
    first's; of a level's the most probable jointly, as many as the row's budget has left.
    """

    QUARTER = 0.25

    def __init__(self, top_p: float, width: int, depth: int) -> None:
        self.width = self.breadth = width
        self.depth, self._top_p = depth, top_p

    @property
    def widest(self) -> int:
        return int(self.width ** max(1, self.depth - 1))

    def grow(self, forest: Forest, nodes: Int64, tokens: Int64, scores: Float64) -> Int64:
        share = np.exp(np.nan_to_num(scores, nan=-np.inf, neginf=-np.inf))
        before = np.cumsum(share, 1) - share
        is_possible = (before < self._top_p - 1e-9) & (share >= self.QUARTER * share[:, :1])
        parents, flat, joint = _joint(forest, nodes, tokens, scores)
        at = np.flatnonzero(is_possible.ravel() & np.isfinite(joint))
        left = forest.max_tokens - forest.counts()
        at = at[best(forest.rows[parents[at]], joint[at], forest.depths[parents[at]], left)]
        new = forest.add(parents[at], flat[at], joint[at])
        is_open = (forest.max_tokens - forest.counts())[forest.rows[new]] > 0
        return _growing(forest, new[is_open], self.depth)


def best_paths(accuracies: Sequence[Sequence[float]], count: int) -> list[Path]:
    """Medusa's sparse tree (Cai et al. 2024): node after node, the connected one with the highest probability of being accepted.

    `accuracies[d][r]` is how often the token of rank r is right at depth d while all before it were; a path's value is their product, and
    the expected number of accepted tokens the sum over nodes. Ties go to the shorter path, then to the smaller ranks.
    """
    values: dict[Path, float] = {(r,): float(a) for r, a in enumerate(accuracies[0])}
    chosen: list[Path] = []
    while values and len(chosen) < count:
        path = min(values, key=lambda p: (-values[p], len(p), p))
        value = values.pop(path)
        chosen.append(path)
        if len(path) < len(accuracies):
            values |= {(*path, r): value * float(a) for r, a in enumerate(accuracies[len(path)])}
    return chosen


def expected_tokens(accuracies: Sequence[Sequence[float]], paths: Sequence[Path]) -> float:
    """Tokens accepted per step, the target's own left out, if ranks are right independently with these `accuracies`."""
    return float(sum(np.prod([accuracies[d][r] for d, r in enumerate(path)]) for path in paths))
