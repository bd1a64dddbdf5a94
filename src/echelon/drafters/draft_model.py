"""A small model with the target's vocabulary proposes a chain (Leviathan et al. 2023; Chen et al. 2023), one token a pass.

Its vocabulary may be padded to another width than the target's. A row whose text outgrows the draft model's context goes on without it:
the scheduler grants it no draft.

The draft model draws with the target's own noise, so where the two distributions are close they draw the same token. Its cache
follows the same rule as the target's: each pass feeds whatever known tokens lack keys and values. The prompt, the row that accepted
everything (two tokens behind), a step without a draft and a row that comes back after preemption are one case.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from echelon.batch import Span
from echelon.draft import Draft
from echelon.ops.sample import Place, choose
from echelon.sequence import PlannedRow
from echelon.target.runner import ModelRunner
from echelon.verify import Verdict, argmax_rows


class DraftModelDrafter:
    """`runner` is the draft model's own; the scheduler reserves slots in its cache."""

    taps: tuple[str, ...] = ()

    def __init__(self, runner: ModelRunner, max_num_batched_tokens: int, vocab_size: int, keeps_probs: bool = False) -> None:
        self._runner = runner
        self._vocab_size = vocab_size  # the target's
        self._keeps_probs = keeps_probs  # rejection compares distributions
        self._max_num_batched_tokens = max_num_batched_tokens

    def propose(self, rows: SequenceOf[PlannedRow]) -> Draft:
        proposals: list[list[int]] = [[] for _ in rows]
        probs: list[list[NDArray[np.float64]]] = [[] for _ in rows]
        active = [i for i, row in enumerate(rows) if row.max_draft_tokens > 0]
        self._catch_up([rows[i] for i in active])
        while active:
            logits = self._feed(rows, proposals, active)
            chosen = list(zip(active, self._choose(rows, proposals, probs, active, logits), strict=True))
            for i, token in chosen:
                proposals[i] += [token] if token >= 0 else []
            active = [i for i, token in chosen if token >= 0 and len(proposals[i]) < rows[i].max_draft_tokens]
        flat = [p for row in probs for p in row]
        return Draft.chains(proposals, np.stack(flat) if flat else None)

    def _choose(
        self,
        rows: SequenceOf[PlannedRow],
        proposals: list[list[int]],
        probs: list[list[NDArray[np.float64]]],
        active: list[int],
        logits: Tensor,
    ) -> list[int]:
        """The next token of every active row, with the target's noise; logits [len(active), V]. −1 where a request's own parameters or
        processors fail: its draft ends there, and the target settles it.
        """
        samplers = [rows[i].sequence.sampler for i in active]
        tokens: list[int] = argmax_rows(logits).tolist()
        drawn = [n for n, sampler in enumerate(samplers) if not sampler.is_argmax]
        places = [Place(samplers[n], logits[n].float().numpy(), rows[active[n]].sequence.tokens, proposals[active[n]]) for n in drawn]
        for n, token in zip(drawn, choose(places, {}), strict=True):
            tokens[n] = token
        if self._keeps_probs:
            for n, (i, values) in enumerate(zip(active, logits.float().numpy(), strict=True)):
                if tokens[n] >= 0:
                    probs[i].append(samplers[n].probabilities(values, rows[i].sequence.tokens, proposals[i]))
        return tokens

    def _catch_up(self, rows: SequenceOf[PlannedRow]) -> None:
        """Feed prompts in pieces until every row lacks no more than one batch holds; the last pass belongs to `_feed`."""
        limit = max(1, self._max_num_batched_tokens // max(1, len(rows)))
        while spans := [s for row in rows if (s := self._piece(row, limit)) is not None]:
            self._runner.feed(spans)

    def _piece(self, row: PlannedRow, limit: int) -> Span | None:
        tokens, start = row.sequence.tokens, self._runner.num_cached(row.sequence.id)
        piece = self._readable(tokens[start : start + limit])
        return Span(row.sequence.id, start, piece, 0, len(tokens)) if len(tokens) - start > limit else None

    def _feed(self, rows: SequenceOf[PlannedRow], proposals: list[list[int]], active: list[int]) -> Tensor:
        """One pass over the active rows: logits [len(active), V] after each row's last known or drafted token."""
        spans = []
        for i in active:
            sequence, start = rows[i].sequence, self._runner.num_cached(rows[i].sequence.id)
            known = sequence.tokens[start:] + proposals[i][max(0, start - len(sequence)) :]
            spans.append(Span(sequence.id, start, self._readable(known), 1, len(sequence)))
        return self._widened(self._runner.feed(spans))

    def _readable(self, tokens: list[int]) -> list[int]:
        """A target padded further than the draft model may emit an id that the draft model lacks; any other will do in its place."""
        size = self._runner.loaded.vocab_size
        return tokens if size >= self._vocab_size else [t if t < size else 0 for t in tokens]

    def _widened(self, logits: Tensor) -> Tensor:
        """[…, V] of the target: ids that only one of the two has are never drafted."""
        return F.pad(logits, (0, self._vocab_size - logits.shape[-1]), value=-torch.inf)  # a negative width cuts

    def observe(self, rows: SequenceOf[PlannedRow], verdict: Verdict, taps: Tensor | None) -> None:  # noqa: ARG002
        """Shorten every row to its known tokens and the accepted part of the draft."""
        for row, path in zip(rows, verdict.paths, strict=True):
            cached = self._runner.num_cached(row.sequence.id)
            self._runner.commit(row.sequence.id, min(cached, len(row.sequence) + len(path)))

    def forget(self, row: int) -> None:
        """The scheduler has released the row's blocks already, or the row is read anew."""
        if row in self._runner.cache.tables:
            self._runner.commit(row, 0)
