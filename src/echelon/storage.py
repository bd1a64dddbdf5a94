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
from echelon.memory import MemoryPlan, plan_kv
from echelon.model.attention import record_layers
from echelon.model.load.loading import LoadedModel
from echelon.model.runner import ModelRunner, Runner
from echelon.prefix_cache import CachedTables
from echelon.scheduler import Selector


@dataclass(frozen=True)
class Storage:
    """Runners, one a model, on pools of equally many blocks; the head that drafts and its cache; which rows step (None: all); tables whose
    blocks are kept for texts that begin alike.
    """

    plan: MemoryPlan
    runners: SequenceOf[Runner[Any]]
    head: AttachedHead | None = None
    head_cache: KVCache | None = None
    selector: Selector | None = None
    cached_tables: SequenceOf[CachedTables] = ()

    def free(self) -> None:
        """Let go of all keys and values, and of what was captured on them; nothing can run any more."""
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


# (settings, target and draft model, longest text, num_speculative_tokens, head) → storage
BuildStorage = Callable[[EngineConfig, SequenceOf[LoadedModel], int, int, AttachedHead | None], Storage]


def build_unpadded(
    config: EngineConfig,
    models: SequenceOf[LoadedModel],
    max_len: int,
    num_speculative_tokens: int,
    head: AttachedHead | None,
) -> Storage:
    """Build runners over blocks, for batches without padding (EMS-SD)."""
    layers, device = [record_layers(m.model) for m in models], models[0].device
    captures = not config.enforce_eager and device.type == "cuda" and torch.cuda.is_available()  # steps become CUDA graphs
    is_rounded = config.kv_cache_dtype == "int8"
    per_token = bytes_per_token(models, layers, is_rounded) + (head.bytes_per_token if head else 0)
    longest = max_len + num_speculative_tokens  # a tree may take more slots than the text has left
    limit, is_kept = config.kv_cache_memory_bytes, config.enable_prefix_caching
    boundary_bytes = head.boundary_bytes if head is not None and is_kept else 0
    plan = plan_kv(per_token, config.block_size, config.max_num_seqs, longest, limit, device, captures, boundary_bytes)

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


def _capture(runners: SequenceOf[ModelRunner]) -> None:
    """Run passes as CUDA graphs."""
    from echelon.model.graphs.programs import captured  # imports Triton

    for runner in runners:
        runner.captured = captured(runner.loaded, runner.cache)


def _cached(runners: SequenceOf[ModelRunner], head_cache: KVCache | None) -> list[CachedTables]:
    heads = [] if head_cache is None else [CachedTables(head_cache.tables, reads_next=True)]
    return [*(CachedTables(runner.cache.tables) for runner in runners), *heads]


def bytes_per_token(models: SequenceOf[LoadedModel], layers: SequenceOf[SequenceOf[LayerShape]], is_rounded: bool = False) -> int:
    """Bytes of keys and values of one token in all layers of all models."""
    return sum(s.bytes_per_token(m.model.dtype, is_rounded) for m, shapes in zip(models, layers, strict=True) for s in shapes)
