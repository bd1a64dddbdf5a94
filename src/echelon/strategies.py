"""What a strategy is made of: KV storage, layout, and which rows take part in a step. Everything else is the same code for all."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from echelon.baselines import padded, realign
from echelon.baselines.lines import LineTables
from echelon.baselines.masked import MaskedRunner, Pack, record_maskable_layers
from echelon.baselines.rectangle import RectangleCache
from echelon.baselines.selection import PromptsApart, SameLength, Selector
from echelon.config import EngineConfig
from echelon.drafters.heads import TappedHead
from echelon.errors import UnsupportedModelError
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache, LayerShape
from echelon.memory import MemoryPlan, plan_kv
from echelon.model.attention import record_layers
from echelon.model.load.loading import LoadedModel
from echelon.model.runner import ModelRunner

PADDED: dict[str, Pack] = {"both": padded.pack, "kv": padded.pack_kv, "inputs": padded.pack_inputs}
REALIGN: dict[str, Pack] = {"none": realign.pack, "same_length": realign.pack_group}


@dataclass(frozen=True)
class Storage:
    """One runner a model, all with the same strategy, on pools of equally many blocks or lines; the head that drafts, and its cache."""

    plan: MemoryPlan
    runners: list[ModelRunner]
    head: TappedHead | None = None
    head_cache: KVCache | None = None

    def free(self) -> None:
        """Let go of all keys and values, and of what was captured on them; nothing can run any more."""
        for runner in self.runners:
            runner.captured = None
        for cache in (*(r.cache for r in self.runners), *([self.head_cache] if self.head_cache else [])):
            cache.keys.clear()
            cache.values.clear()

    @property
    def tables(self) -> list[BlockTables | LineTables]:
        heads = [] if self.head_cache is None else [self.head_cache.tables]
        return [*(r.cache.tables for r in self.runners), *heads]


def build_storage(
    config: EngineConfig,
    models: SequenceOf[LoadedModel],
    max_len: int,
    num_speculative_tokens: int,
    head: TappedHead | None = None,
) -> Storage:
    """With a head the strategy must be `unpadded`."""
    if config.strategy == "unpadded":
        return _unpadded(config, models, max_len, num_speculative_tokens, head)
    assert head is None, "a head needs blocks"
    for loaded in models:
        if loaded.original_context is not None:
            raise UnsupportedModelError(
                f"{loaded.name!r} has LongRoPE, whose frequencies change when a row outgrows {loaded.original_context.length} tokens; "
                "under rectangular strategies the text was seen to change there: use strategy='unpadded'"
            )
    pack = PADDED[config.pad] if config.strategy == "padded" else REALIGN[config.grouping]
    layers = [record_maskable_layers(m.model) for m in models]
    device = models[0].device
    num_slots = max_len + num_speculative_tokens  # a draft may reach beyond the longest row of a rectangle
    plan = plan_kv(_bytes_per_token(models, layers), num_slots, config.num_rows_held, num_slots, config.kv_cache_memory_bytes, device)
    runners: list[ModelRunner] = []
    for loaded, shapes in zip(models, layers, strict=True):
        tables = LineTables(min(plan.num_blocks, config.num_rows_held), num_slots, num_speculative_tokens)
        runners.append(MaskedRunner(loaded, RectangleCache(shapes, tables, loaded.model.dtype, device), pack))
    return Storage(plan, runners)


def _unpadded(
    config: EngineConfig,
    models: SequenceOf[LoadedModel],
    max_len: int,
    num_speculative_tokens: int,
    head: TappedHead | None,
) -> Storage:
    layers, device = [record_layers(m.model) for m in models], models[0].device
    captures = captures_steps(config, device)
    per_token = _bytes_per_token(models, layers) + (head.bytes_per_token if head else 0)
    longest = max_len + num_speculative_tokens  # a tree may take more places than the text has left
    plan = plan_kv(per_token, config.block_size, config.max_num_seqs, longest, config.kv_cache_memory_bytes, device, captures)

    def cache(shapes: list[LayerShape], dtype: torch.dtype) -> KVCache:
        tables = BlockTables(plan.num_blocks, plan.block_size, -(-longest // plan.block_size))
        return KVCache(shapes, tables, dtype, device, captures)

    runners = [ModelRunner(loaded, cache(shapes, loaded.model.dtype)) for loaded, shapes in zip(models, layers, strict=True)]
    if head is not None:
        runners[0].taps = head.taps
    if captures:
        for runner in runners:
            runner.capture()
    return Storage(plan, runners, head, cache(head.shapes, head.dtype) if head and head.shapes else None)


def captures_steps(config: EngineConfig, device: torch.device) -> bool:
    """Steps become CUDA graphs."""
    return not config.enforce_eager and device.type == "cuda" and torch.cuda.is_available()


def _bytes_per_token(models: SequenceOf[LoadedModel], layers: SequenceOf[SequenceOf[LayerShape]]) -> int:
    return sum(s.num_entries * m.model.dtype.itemsize for m, shapes in zip(models, layers, strict=True) for s in shapes)


def selector(config: EngineConfig) -> Selector | None:
    """Which running rows take part in a step; `None`: all, prompts beside decoding rows."""
    if config.grouping == "same_length":
        return SameLength(config.max_num_seqs)
    return None if config.strategy == "unpadded" else PromptsApart()
