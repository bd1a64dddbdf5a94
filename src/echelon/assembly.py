"""An engine from its configuration: what drafts, what schedules, which drafted tokens are kept."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from echelon.acceptance import Exact, Rejection, Rule, Typical
from echelon.config import EngineConfig, SpeculativeConfig
from echelon.drafters.base import Drafter, NoDrafter
from echelon.drafters.draft_model import DraftModelDrafter
from echelon.drafters.guard import GuardedDrafter
from echelon.drafters.heads import HeadDrafter, TappedHead
from echelon.drafters.ngram import NgramDrafter
from echelon.engine import Engine
from echelon.scheduler import Scheduler
from echelon.strategies import Storage, selector
from echelon.trees import growth_of

if TYPE_CHECKING:
    from echelon.model.graphs.ahead import Ahead

logger = logging.getLogger("echelon")


def build_engine(config: EngineConfig, spec: SpeculativeConfig | None, storage: Storage, head: TappedHead | None) -> Engine:
    """The first runner of `storage` is the target's, the second a draft model's; a drafter stands behind its guard."""
    target = storage.runners[0]
    if head is not None:
        target.taps = head.taps
    scheduler = _scheduler(config, spec, storage)
    ahead = _ahead(spec, storage)
    if spec is None:
        return Engine(target, NoDrafter(), scheduler, ahead=ahead)
    drafter = _drafter(config, spec, storage, head)
    guard = GuardedDrafter(drafter, target.loaded.vocab_size, spec.grows_trees)
    engine = Engine(target, guard, scheduler, _rule(spec), ahead)
    engine.stats.drafter_faults = guard.faults
    if len(storage.runners) > 1:
        engine.stats.draft = storage.runners[1].usage
    if isinstance(drafter, HeadDrafter):
        engine.stats.draft = drafter.usage
    return engine


def _ahead(spec: SpeculativeConfig | None, storage: Storage) -> Ahead | None:
    """Steps are launched early where the device decides alone what is drafted and kept, and no text changes its keys as it grows."""
    is_drafted_there = spec is None or (spec.method == "draft_model" and not spec.grows_trees and spec.min_score == -math.inf)
    is_exact = spec is None or spec.acceptance == "exact"
    runners = storage.runners
    if any(r.captured is None or r.loaded.original_context is not None for r in runners) or not (is_drafted_there and is_exact):
        return None
    from echelon.model.graphs.ahead import Ahead  # imports Triton

    return Ahead(runners[0], runners[1] if len(runners) > 1 else None)


def _scheduler(config: EngineConfig, spec: SpeculativeConfig | None, storage: Storage) -> Scheduler:
    models = [r.loaded for r in storage.runners]
    return Scheduler(
        storage.tables,
        config.num_rows_held,
        config.max_num_batched_tokens,
        spec.num_speculative_tokens if spec else 0,
        models[1].max_len if len(models) > 1 else None,
        [m.original_context.length for m in models if m.original_context is not None and m.original_context.is_read_anew],
        selector(config),
        config.refill,
        spec is not None and spec.grows_trees,
    )


def _drafter(config: EngineConfig, spec: SpeculativeConfig, storage: Storage, head: TappedHead | None) -> Drafter:
    vocab_size = storage.runners[0].loaded.vocab_size
    if head is not None:
        return HeadDrafter(head, growth_of(spec, head.depth), storage.head_cache, spec.min_score)
    if spec.method == "ngram":
        return NgramDrafter(spec)
    keeps_probs = spec.acceptance == "rejection"
    growth = growth_of(spec, None) if spec.grows_trees else None
    return DraftModelDrafter(storage.runners[1], config.max_num_batched_tokens, vocab_size, keeps_probs, spec.min_score, growth)


def _rule(spec: SpeculativeConfig) -> Rule:
    if spec.acceptance != "typical":
        return Rejection() if spec.acceptance == "rejection" else Exact()
    logger.warning("acceptance 'typical' is LOSSY: above temperature 0 the text is not distributed as the target's own")
    return Typical(spec.posterior_threshold, spec.posterior_alpha)
