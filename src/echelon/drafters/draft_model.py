"""A small model with the target's vocabulary proposes a chain (Leviathan et al. 2023; Chen et al. 2023), one token a pass, or a tree, one
level a pass (Miao et al. 2024, SpecInfer).

Its vocabulary may be padded to another width than the target's. A row whose text outgrows the draft model's context goes on without it:
the scheduler grants it no draft.

The draft model draws with the target's own noise, so where the two distributions are close they draw the same token. Its cache
follows the same rule as the target's: each pass feeds whatever known tokens lack keys and values. The prompt, the row that accepted
everything (two tokens behind), a step without a draft and a row that comes back after preemption are one case. Of a chain it keeps what
was accepted; of a tree nothing, and reads the accepted path again together with the next known token.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.acceptance import largest_rows
from echelon.batch import Span
from echelon.draft import Draft, Float64, Int64, Verdict
from echelon.drafters.base import Drafter, Pace, every
from echelon.drafters.frontier import Frontier, grow
from echelon.model.runner import Draws, Runner
from echelon.ops.devices import on_host
from echelon.ops.sample import SampleRow, choose, likeliest, processed, raw_rows
from echelon.sampling import Sampler, SamplingParams, noise_key
from echelon.sequence import PlannedRow, Sequence
from echelon.trees import Forest, Growth


@dataclass
class _Chain:
    """What is drafted of a row, at `place` among those proposed for: `tokens`, the distribution that each was drawn from where rejection
    asks, their log-probabilities.
    """

    row: PlannedRow
    place: int
    tokens: list[int] = field(default_factory=list)
    probs: list[Float64] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    @property
    def text(self) -> SequenceOf[int]:
        return self.row.sequence.tokens

    @property
    def sampler(self) -> Sampler:
        return self.row.sequence.sampler


def _taken_probs(chains: SequenceOf[_Chain], vocab_size: int) -> Float64 | None:
    """float64 [tokens, V], taken from the chains one after the other, so that none is held twice; None where there are none."""
    count = sum(len(c.probs) for c in chains)
    if not count:
        return None
    taken, at = np.empty((count, vocab_size)), 0
    for chain in chains:
        for probs in chain.probs:
            taken[at] = probs
            at += 1
        chain.probs.clear()
    return taken


class DraftModelDrafter(Drafter):
    """`runner` is the draft model's own; the scheduler reserves slots in its cache."""

    def __init__(
        self,
        runner: Runner[Any],
        max_num_batched_tokens: int,
        vocab_size: int,
        keeps_probs: bool = False,
        min_score: float = -np.inf,
        growth: Growth | None = None,
        scores: bool = False,
    ) -> None:
        self._runner, self.usage = runner, runner.usage
        self._vocab_size = vocab_size  # the target's
        self._keeps_probs = keeps_probs  # rejection compares distributions
        self._min_score = min_score  # of a draft, its joint log-probability
        self.growth = growth  # of trees; None: chains
        self._has_scores = scores or min_score > -np.inf  # chains whose tokens have probabilities
        self._max_num_batched_tokens = max_num_batched_tokens
        self.pace: Pace = every

    @property
    def breadth(self) -> int:
        return self.growth.breadth if self.growth is not None else 1

    def propose(self, rows: SequenceOf[PlannedRow]) -> Draft:
        chains = [_Chain(row, i) for i, row in enumerate(rows)]
        active = [c for c in chains if c.row.max_draft_tokens > 0]
        self._catch_up([c.row for c in active])
        if self.growth is not None:
            return self._grown(self.growth, rows, active)
        if active and not self._draft_at_once(active):
            self._draft_by_passes(active)
        probs = _taken_probs(chains, self._vocab_size)
        scores = np.array([s for c in chains for s in c.scores[: len(c.tokens)]]) if self._has_scores else None
        return Draft.chains([c.tokens for c in chains], probs, scores)

    def _draft_by_passes(self, active: list[_Chain]) -> None:
        """Draft a token a pass for every chain that is not done."""
        while active:
            logits = self._feed(active)
            chosen = self._choose_likely(active, logits) if self._has_scores else self._choose(active, logits)
            for chain, token in zip(active, chosen, strict=True):
                chain.tokens += [token] if token >= 0 else []
            active = self._going_on([c for c, token in zip(active, chosen, strict=True) if token >= 0])

    def _going_on(self, chains: list[_Chain]) -> list[_Chain]:
        """Those that get another token; all are of one length."""
        if self._has_scores and chains:
            goes_on = self.pace(np.array([c.place for c in chains]), np.array([c.scores for c in chains]))
            chains = [c for c, is_worth_it in zip(chains, goes_on.tolist(), strict=True) if is_worth_it]
        return [c for c in chains if len(c.tokens) < c.row.max_draft_tokens]

    def _draft_at_once(self, chains: list[_Chain]) -> bool:
        """All passes as one, none of which waits for the host; false where they cannot be, and then nothing has changed.

        Rows with longer drafts come first, so that each pass feeds the first of those of the pass before. Slots and positions of a draft
        are known before its tokens are.
        """
        is_plain = not self._keeps_probs and not self._has_scores
        if self._runner.captured is None or not is_plain or any(c.sampler.changes_logits for c in chains):
            return False
        chains = sorted(chains, key=lambda c: -c.row.max_draft_tokens)
        depth = chains[0].row.max_draft_tokens
        passes = [self._readable_spans([self._span(c) for c in chains])]
        passes += [  # of tokens that are not known yet
            [_span(c.row.sequence, len(c.text) + place, (0,), 1) for c in chains if c.row.max_draft_tokens > place + 1]
            for place in range(depth - 1)
        ]
        found = self._runner.chain([self._runner.pack(spans) for spans in passes], self._vocab_size, _draws(chains, depth))
        if found is None:
            return False
        for chain, tokens in zip(chains, found.cpu().T.tolist(), strict=True):
            row, drafted = chain.row, tokens[: chain.row.max_draft_tokens]
            chain.tokens += drafted[: drafted.index(-1)] if -1 in drafted else drafted
            self._runner.cache.tables.advance(row.sequence.id, len(row.sequence) + row.max_draft_tokens - 1)
        return True

    def _grown(self, growth: Growth, rows: SequenceOf[PlannedRow], active: list[_Chain]) -> Draft:
        forest = Forest([r.max_draft_tokens for r in rows], [r.max_draft_depth for r in rows], self._min_score)
        if not active:
            return forest.draft(growth.kept(forest))
        roots = forest.plant([i for i, row in enumerate(rows) if row.max_draft_tokens > 0])
        return grow(growth, _ModelFrontier(self, forest, rows, roots, self._feed(active)), self.pace)

    def feed(self, spans: SequenceOf[Span]) -> Tensor:
        """Logits [R, V] over the target's vocabulary: ids that only one of the two has are never drafted."""
        logits, size = self._runner.feed(self._readable_spans(spans)), self._vocab_size
        if logits.shape[-1] == size:
            return logits
        return F.pad(logits, (0, size - logits.shape[-1]), value=-torch.inf)  # a negative width cuts

    def _readable_spans(self, spans: SequenceOf[Span]) -> SequenceOf[Span]:
        if self._runner.loaded.vocab_size >= self._vocab_size:
            return spans
        return [replace(s, tokens=self._readable(list(s.tokens))) for s in spans]

    def _choose(self, chains: SequenceOf[_Chain], logits: Tensor) -> list[int]:
        """The next token of every chain, with the target's noise; logits [len(chains), V]. −1 where the logits are no finite numbers, or a
        request's own parameters or processors fail: its draft ends there, and the target settles it.
        """
        largest, values = largest_rows(logits)
        tokens: list[int] = np.where(np.isfinite(values), largest, -1).tolist()
        drawn = [n for n, c in enumerate(chains) if not c.sampler.is_argmax]
        places = [SampleRow(chains[n].sampler, raw_rows(logits[n]), chains[n].text, chains[n].tokens) for n in drawn]
        for n, token in zip(drawn, choose(places, {}), strict=True):
            tokens[n] = token
        if self._keeps_probs:
            for c, token, row in zip(chains, tokens, on_host(logits), strict=True):
                if token >= 0:
                    c.probs.append(c.sampler.probabilities(row, c.text, c.tokens))
        return tokens

    def _choose_likely(self, chains: SequenceOf[_Chain], logits: Tensor) -> list[int]:
        """The same with probabilities, and where drafts end for want of confidence: −1 there too, and at tokens that are not among those
        that `likeliest` sees.
        """
        chosen, samplers = self._choose(chains, logits), [c.sampler for c in chains]
        logits = processed(logits, samplers, [c.text for c in chains], [c.tokens for c in chains])
        tokens, scores = likeliest(logits, samplers, [len(c.text) + len(c.tokens) for c in chains], 1)
        for chain, score in zip(chains, scores[:, 0].tolist(), strict=True):
            chain.scores.append(min(score, 0.0))
        likely = [sum(c.scores) >= self._min_score for c in chains]
        return [t if t == first and ok else -1 for t, first, ok in zip(chosen, tokens[:, 0].tolist(), likely, strict=True)]

    def _catch_up(self, rows: SequenceOf[PlannedRow]) -> None:
        """Feed prompts in pieces until every row lacks no more than one batch holds; the last pass belongs to `_feed`."""
        limit = max(1, self._max_num_batched_tokens // max(1, len(rows)))
        starts = [(row.sequence, self._runner.num_cached(row.sequence.id)) for row in rows]
        while starts := [(s, start) for s, start in starts if len(s) - start > limit]:
            self._runner.feed([_span(s, start, self._readable(s.tokens[start : start + limit]), 0) for s, start in starts])
            starts = [(s, start + limit) for s, start in starts]

    def _feed(self, chains: SequenceOf[_Chain]) -> Tensor:
        """One pass: logits [len(chains), V] after each chain's last known or drafted token."""
        return self.feed([self._span(chain) for chain in chains])

    def _span(self, chain: _Chain) -> Span:
        """What is known of the row, or drafted, and not cached."""
        sequence, start = chain.row.sequence, self._runner.num_cached(chain.row.sequence.id)
        known = sequence.tokens[start:] + chain.tokens[max(0, start - len(sequence)) :]
        return _span(sequence, start, known, 1)

    def _readable(self, tokens: list[int]) -> list[int]:
        """A target padded further than the draft model may emit an id that the draft model lacks; any other will do in its place."""
        size = self._runner.loaded.vocab_size
        return tokens if size >= self._vocab_size else [t if t < size else 0 for t in tokens]

    def rehearse(self, num_rows: int) -> None:
        """A pass over a level of each row, and the choice of the next."""
        tables, width = self._runner.cache.tables, self.breadth
        for row in range(num_rows):
            tables.reserve(row, width)
        logits = self.feed([Span(row, 0, [0] * width, width, width) for row in range(num_rows)])
        likeliest(logits, [Sampler(SamplingParams(temperature=0.0), 0)] * len(logits), [1] * len(logits), width)
        for row in range(num_rows):
            tables.release(row)

    def observe(self, rows: SequenceOf[PlannedRow], verdict: Verdict, hidden_states: Tensor | None) -> None:  # noqa: ARG002
        """Shorten every row to its known tokens and the accepted part of a chain; what is not read yet has its room."""
        for row, kept in zip(rows, verdict, strict=True):
            cached, num_kept = self._runner.num_cached(row.sequence.id), len(kept.path) if self.growth is None else 0
            num_known = len(row.sequence) + len(kept.path)
            self._runner.commit(row.sequence.id, min(cached, len(row.sequence) + num_kept), num_held=num_known)

    def forget(self, row: int) -> None:
        """The scheduler has released the row's blocks already, or the row is read anew."""
        if row in self._runner.cache.tables:
            self._runner.commit(row, 0)


def _span(sequence: Sequence, start: int, tokens: SequenceOf[int], num_logits: int) -> Span:
    return Span(sequence.id, start, tokens, num_logits, len(sequence), prompt_len=sequence.num_prompt_tokens)


def _draws(chains: SequenceOf[_Chain], depth: int) -> Draws | None:
    """How `depth` tokens of every chain are drawn; None where all are the likeliest."""
    if all(c.sampler.is_argmax for c in chains):
        return None
    keys = [[noise_key(c.sampler.seed, c.sampler.index, len(c.text) + place) for c in chains] for place in range(depth)]
    return Draws([c.sampler.params for c in chains], keys)


class _ModelFrontier(Frontier):
    """Every node's state is the draft model's logits after it."""

    def __init__(self, drafter: DraftModelDrafter, forest: Forest, rows: SequenceOf[PlannedRow], roots: Int64, logits: Tensor) -> None:
        super().__init__(forest, rows, roots)
        self._drafter, self._logits = drafter, logits

    def logits(self, depth: int) -> Tensor:  # noqa: ARG002
        return self._logits

    def advance(self, nodes: Int64, at: Int64, depth: int) -> Int64:  # noqa: ARG002
        self._logits = self._drafter.feed(self.spans(nodes, self.text_lens, wants_logits=True))
        return np.arange(len(nodes))
