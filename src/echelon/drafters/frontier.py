"""Trees of a drafter that scores tokens grow level by level, in all rows of a step together: one pass a level."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from echelon.batch import Span
from echelon.draft import Draft, Float64, Int64
from echelon.drafters.base import Pace, every
from echelon.ops.sample import likeliest, processed
from echelon.sequence import PlannedRow
from echelon.trees import Forest, Growth


class Frontier(ABC):
    """The nodes that trees grow on from, at first the `roots` that were planted for some of `rows`. Each has one of S states, which the
    drafter keeps; several nodes may share one.
    """

    def __init__(self, forest: Forest, rows: SequenceOf[PlannedRow], roots: Int64) -> None:
        self.forest, self.rows, self.roots = forest, rows, roots
        self.text_lens = np.array([len(row.sequence) for row in rows])
        self.at: Int64 = np.arange(len(roots))  # of every node of the frontier, its state
        self._index = {node: i for i, node in enumerate(roots.tolist())}  # node → its place in the frontier
        self._fed: dict[int, int] = {}  # node → its place among those of its row that were fed
        self._parents: dict[int, list[int]] = {}  # row → parents of these

    @abstractmethod
    def logits(self, depth: int) -> Tensor:
        """[S, V] of the token at `depth` of the draft, 0 first; −∞ for tokens that are never drafted."""

    @abstractmethod
    def advance(self, nodes: Int64, at: Int64, depth: int) -> Int64:
        """Read `nodes`, whose parents' states are `at`; they stand at depth ≥ 1. Returns the state of each of them."""

    def children(self, nodes: Int64, depth: int, growth: Growth) -> tuple[Int64, Float64]:
        """Tokens and scores of every node, as `Growth.grow` wants them."""
        logits = self.logits(depth)
        width, sharpness = growth.width, growth.sharpness
        samplers = [self.rows[r].sequence.sampler for r in self.forest.rows[nodes]]
        positions = (self.text_lens[self.forest.rows[nodes]] + depth).tolist()
        if any(s.changes_logits for s in samplers):
            texts = [self.rows[r].sequence.tokens for r in self.forest.rows[nodes]]
            logits = processed(logits[torch.from_numpy(self.at)], samplers, texts, [self.forest.path(node) for node in nodes])
            return likeliest(logits, samplers, positions, width, sharpness=sharpness)
        _, first = np.unique(self.at, return_index=True)  # one node of every state; all of its nodes have one row and depth
        samplers, positions = [samplers[i] for i in first], [positions[i] for i in first]
        tokens, scores = likeliest(logits, samplers, positions, width, growth.only_ranks, sharpness)
        return tokens[self.at], scores[self.at]

    def extend(self, nodes: Int64, depth: int) -> None:
        """Go on from `nodes`, children of the frontier's, rows together."""
        parents = [self._index[p] for p in self.forest.parents[nodes].tolist()]
        self.at = self.advance(nodes, self.at[parents], depth)
        self._index = {node: i for i, node in enumerate(nodes.tolist())}

    def spans(self, nodes: Int64, text_lens: Int64, wants_logits: bool = False) -> list[Span]:
        """The nodes as spans of their rows, after the first `text_lens` places and the nodes fed before."""
        forest, spans = self.forest, []
        for r in dict.fromkeys(forest.rows[nodes].tolist()):
            own = nodes[forest.rows[nodes] == r].tolist()
            parents, text_len = self._parents.setdefault(r, []), int(text_lens[r])
            start = text_len + len(parents)
            for node in own:
                self._fed[node] = len(parents)
                parents.append(self._fed.get(int(forest.parents[node]), -1))
            tree = None if parents == list(range(-1, len(parents) - 1)) else list(parents)
            num_logits = len(own) if wants_logits else 0
            sequence, tokens = self.rows[r].sequence, forest.tokens[own].tolist()
            spans.append(Span(sequence.id, start, tokens, num_logits, text_len, len(own), tree, sequence.num_prompt_tokens))
        return spans


def grow(growth: Growth, frontier: Frontier, pace: Pace = every) -> Draft:
    """What `growth` makes of the trees that grow from the frontier's roots, at this `pace`."""
    forest, nodes = frontier.forest, frontier.roots
    for depth in range(growth.depth):
        nodes = growth.grow(forest, nodes, *frontier.children(nodes, depth, growth))
        nodes = nodes[np.argsort(forest.rows[nodes], kind="stable")]
        if len(nodes) and pace is not every:
            nodes = nodes[pace(forest.rows[nodes], forest.scores_along(nodes))]
        if not len(nodes):
            break
        frontier.extend(nodes, depth + 1)
    return forest.draft(growth.kept(forest), not growth.only_ranks)
