"""KV storage and runners of an engine's models, as a batching strategy builds them; the engine's own strategy, `unpadded`."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch

from echelon.config import EngineConfig
from echelon.drafters.heads import AttachedHead
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache, LayerShape
from echelon.kv.tables import KVTables
from echelon.memory.footprint import footprint_of
from echelon.memory.plan import Residents, are_captured, bytes_kept, footprint_of_head, working_bytes
from echelon.memory.pool import PoolPlan, plan_kv
from echelon.model.load.loading import LoadedModel
from echelon.model.runner import ModelRunner, Runner
from echelon.prefix_cache import CachedTables
from echelon.scheduler import Selector
from echelon.speculative_config import SpeculativeConfig, most_drafted


@dataclass(frozen=True)
class Storage:
    """Models on the memory that was planned for them.

    plan           sizes of all pools; each has as many blocks
    runners        one a model, the target's first, a draft model's second
    head           the head that drafts, and `head_cache`, its keys and values where it has attention layers
    selector       which rows step together; None: all
    most_rows      that may run at once; None: as many as the configuration says
    cached_tables  those whose blocks are kept for texts that begin alike
    check_ranks    raises `RankError` where a worker of a target on several ranks has failed
    close_ranks    ends the workers
    """

    plan: PoolPlan
    runners: SequenceOf[Runner[Any]]
    head: AttachedHead | None = None
    head_cache: KVCache | None = None
    selector: Selector | None = None
    most_rows: int | None = None
    cached_tables: SequenceOf[CachedTables] = ()
    check_ranks: Callable[[], object] = lambda: None
    close_ranks: Callable[[], object] = lambda: None

    def free(self) -> None:
        """Let go of all keys and values, and of what was captured on them; nothing can run any more."""
        self.close_ranks()
        for runner in self.runners:
            runner.captured = None
        for cache in (*(r.cache for r in self.runners), *([self.head_cache] if self.head_cache else [])):
            cache.keys.clear()
            cache.values.clear()
        if self.head_cache is not None:
            self.head_cache.boundaries = torch.empty(0)

    @property
    def tables(self) -> list[KVTables]:
        """Tables in all of which a row has its slots reserved, the target's first."""
        heads: list[KVTables] = [] if self.head_cache is None else [self.head_cache.tables]
        return [*(r.cache.tables for r in self.runners), *heads]


# (settings, target and draft model, longest text, what drafts, head) → storage
BuildStorage = Callable[[EngineConfig, SequenceOf[LoadedModel], int, SpeculativeConfig | None, AttachedHead | None], Storage]


def build_unpadded(
    config: EngineConfig,
    models: SequenceOf[LoadedModel],
    max_len: int,
    spec: SpeculativeConfig | None,
    head: AttachedHead | None,
) -> Storage:
    """Build runners over blocks, for batches without padding (EMS-SD)."""
    device = models[0].device
    captures = are_captured(config, device)
    residents = _residents(models, head, captures)
    layers = [list(m.layers) for m in (residents.target, residents.draft) if m is not None]
    if models[0].stage is not None:
        layers[0] = layers[0][: len(models[0].stage.layers)]  # the others' are elsewhere
    longest = max_len + most_drafted(spec)  # a tree may take more slots than the text has left
    limit, is_kept, is_rounded = config.kv_cache_memory_bytes, config.enable_prefix_caching, config.kv_cache_dtype == "int8"
    per_token, boundary = bytes_kept(config, residents)
    working = working_bytes(config, spec, residents, max_len)
    plan = plan_kv(per_token, config.block_size, config.max_num_seqs, longest, limit, device, captures, boundary, working)

    def cache(shapes: list[LayerShape], dtype: torch.dtype, num_features: int = 0, is_rounded: bool = False) -> KVCache:
        tables = BlockTables(plan.num_blocks, plan.block_size, -(-longest // plan.block_size))
        return KVCache(shapes, tables, dtype, device, captures, num_features, is_rounded)

    caches = [cache(shapes, m.model.dtype, is_rounded=is_rounded) for m, shapes in zip(models, layers, strict=True)]
    runners = [ModelRunner(loaded, own) for loaded, own in zip(models, caches, strict=True)]
    if head is not None:
        runners[0].hidden_state_reader = head.reader
    if captures:
        _capture(runners)
    head_cache = cache(head.shapes, head.head.dtype, head.num_features if is_kept else 0) if head and head.shapes else None
    return Storage(plan, runners, head, head_cache, cached_tables=_cached(runners, head_cache) if is_kept else ())


def _residents(models: SequenceOf[LoadedModel], head: AttachedHead | None, captures: bool) -> Residents:
    """What is loaded."""
    target, *drafts = map(footprint_of, models)
    of_head = footprint_of_head(head) if head is not None else None
    return Residents(target, drafts[0] if drafts else None, of_head, captures=captures)


def _capture(runners: SequenceOf[ModelRunner]) -> None:
    """Run passes as CUDA graphs."""
    from echelon.model.graphs.programs import captured  # imports Triton

    for runner in runners:
        runner.captured = captured(runner.loaded, runner.cache)


def _cached(runners: SequenceOf[ModelRunner], head_cache: KVCache | None) -> list[CachedTables]:
    heads = [] if head_cache is None else [CachedTables(head_cache.tables, reads_next=True)]
    return [*(CachedTables(runner.cache.tables) for runner in runners), *heads]
