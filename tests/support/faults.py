"""The published faults of batch speculation, re-enacted one at a time, so that a check can show that it finds them.

Named after Zhang et al. 2025 (Table 3 and Appendix A), who found them in earlier systems: see docs/correctness.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import echelon.engine
from echelon.baselines.layout import PaddedBatch
from echelon.baselines.lines import LineTables, Move
from echelon.baselines.masked import MaskedRunner
from echelon.baselines.rectangle import RectangleCache
from echelon.batch import Span
from echelon.draft import Draft, Verdict

Patch = pytest.MonkeyPatch


def bonus_token_from_the_draft(patch: Patch) -> None:
    """After a rejection the row goes on with the draft's own next token, not with the target's (DSD)."""
    verify = echelon.engine.verify

    def faulty(draft: Draft, *args: Any) -> Verdict:
        return [
            replace(kept, next_token=tokens[len(kept.path)]) if len(kept.path) < len(tokens := draft.row(i)) else kept
            for i, kept in enumerate(verify(draft, *args))
        ]

    patch.setattr(echelon.engine, "verify", faulty)


def rejected_kv_kept_with_automatic_positions(patch: Patch) -> None:
    """Rejected tokens stay in the cache, masked, and a new token's position is the number of slots before it (BSP on a rotary model)."""
    commit, pack = LineTables.commit, MaskedRunner.pack

    def keep(tables: LineTables, row: int, num_cached: int, num_held: int = 0) -> None:
        line = tables.lines([row])[0]
        end = tables.ends[line]
        commit(tables, row, num_cached, num_held)
        tables.ends[line] = end

    def packed(runner: MaskedRunner, spans: Sequence[Span]) -> PaddedBatch:
        batch, tables = pack(runner, spans), runner.cache.tables
        lines, slots = np.divmod(batch.slots.numpy(), tables.num_slots)
        first = (tables.positions >= 0).argmax(1)
        return moved_to(batch, torch.from_numpy(slots - first[lines]))

    patch.setattr(LineTables, "commit", keep)
    patch.setattr(MaskedRunner, "pack", packed)


def kv_unaligned_across_rows(patch: Patch) -> None:
    """Rows are padded afresh after every step, and their keys and values stay where they were (DSD, BSP)."""
    apply = RectangleCache._apply

    def faulty(cache: RectangleCache, move: Move) -> None:
        if not np.array_equal(move.sources, move.targets):
            apply(cache, move)

    patch.setattr(RectangleCache, "_apply", faulty)


def position_drift(patch: Patch) -> None:
    """All rows' positions advance by what the best row of the batch accepted (BSP)."""
    pack = MaskedRunner.pack
    starts: dict[tuple[int, int], int] = {}
    drifts: dict[tuple[int, int], int] = {}

    def packed(runner: MaskedRunner, spans: Sequence[Span]) -> PaddedBatch:
        batch = pack(runner, spans)
        known = [s for s in spans if (id(runner), s.row) in starts]
        steps = {s.row: s.start - starts[id(runner), s.row] for s in known}
        for span in spans:
            key = (id(runner), span.row)
            drifts[key] = drifts.get(key, 0) + max(steps.values()) - steps[span.row] if span.row in steps else 0
            starts[key] = span.start
        by_line = sorted(spans, key=lambda s: int(runner.cache.tables.lines([s.row])[0]))
        drift = torch.tensor([d for s in by_line for d in [drifts[id(runner), s.row]] * len(s.tokens)])
        return moved_to(batch, batch.positions[batch.written] + drift)

    patch.setattr(MaskedRunner, "pack", packed)


def moved_to(batch: PaddedBatch, positions: torch.Tensor) -> PaddedBatch:
    """The same batch, its real tokens fed with these positions; masks stay right."""
    fed = batch.positions.clone()
    fed[batch.written] = positions.to(fed.dtype)
    return replace(batch, positions=fed)


# fault → strategy that can have it
FAULTS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "bonus token from the draft": (bonus_token_from_the_draft, "unpadded"),
    "rejected KV kept with automatic positions": (rejected_kv_kept_with_automatic_positions, "padded"),
    "KV unaligned across rows": (kv_unaligned_across_rows, "realign"),
    "position drift": (position_drift, "realign"),
}


@contextmanager
def enacted(name: str | None) -> Iterator[None]:
    """While inside, the engine has this fault; `None`: it has none."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            FAULTS[name][0](patch)
        yield
