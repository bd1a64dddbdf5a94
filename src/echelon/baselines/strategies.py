"""The table of batching strategies: the engine's own, and those of the field, on the framework's attention or on ours."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager

from echelon.baselines import layout
from echelon.baselines.lines import LineTables
from echelon.baselines.masked import MaskedRunner, Pack, refuse_softcap_and_sinks
from echelon.baselines.padded_blocks import PADDINGS, PaddedBlocksRunner, PaddedTables
from echelon.baselines.rectangle import RectangleCache
from echelon.baselines.selection import SameLength, prompts_apart
from echelon.config import EngineConfig
from echelon.drafters.heads import AttachedHead
from echelon.errors import UnsupportedModelError
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache
from echelon.memory.footprint import footprint_of
from echelon.memory.pool import num_blocks_for, plan_kv
from echelon.model.attention import record_layers
from echelon.model.load.loading import LoadedModel
from echelon.speculative_config import SpeculativeConfig, most_drafted
from echelon.storage import BuildStorage, Storage, build_unpadded

logger = logging.getLogger("echelon")
# (strategy, pad, grouping) → how spans become a batch
PACKS: dict[tuple[str, str, str], Pack] = {
    ("padded", "both", "none"): layout.pack,
    ("padded", "kv", "none"): layout.pack_kv,
    ("padded", "inputs", "none"): layout.pack_inputs,
    ("realign", "both", "none"): layout.pack_realigned,
    ("realign", "both", "same_length"): layout.pack_group,
}


def build_rectangles(
    config: EngineConfig,
    models: SequenceOf[LoadedModel],
    max_len: int,
    spec: SpeculativeConfig | None,
    head: AttachedHead | None,
) -> Storage:
    """A rectangle of lines and slots a model, each line a whole row; a draft may reach beyond the longest row.

    Raises
    ------
    UnsupportedModelError  a model has LongRoPE, or attention that a mask cannot express
    """
    assert head is None, "a head needs blocks"
    for loaded in models:
        if loaded.original_context is not None:
            raise UnsupportedModelError(
                f"{loaded.name!r} has LongRoPE, whose frequencies change when a row outgrows {loaded.original_context.length} tokens; "
                "under rectangular strategies the text was seen to change there: use strategy='unpadded'"
            )
    layers, device = [record_layers(m.model, refuse_softcap_and_sinks) for m in models], models[0].device
    num_speculative_tokens = most_drafted(spec)
    num_slots = max_len + num_speculative_tokens
    per_token = sum(s.bytes_per_token(m.model.dtype) for m, shapes in zip(models, layers, strict=True) for s in shapes)
    plan = plan_kv(per_token, num_slots, config.num_rows_held, num_slots, config.kv_cache_memory_bytes, device)
    runners: list[MaskedRunner] = []
    for loaded, shapes in zip(models, layers, strict=True):
        tables = LineTables(min(plan.num_blocks, config.num_rows_held), num_slots, num_speculative_tokens)
        cache = RectangleCache(shapes, tables, loaded.model.dtype, device)
        runners.append(MaskedRunner(loaded, cache, PACKS[config.strategy, config.pad, config.grouping]))
    selector = prompts_apart if config.grouping == "none" else SameLength(config.max_num_seqs, runners[0].usage)
    return Storage(plan, runners, selector=selector)


def build_padded_blocks(
    config: EngineConfig,
    models: SequenceOf[LoadedModel],
    max_len: int,
    spec: SpeculativeConfig | None,
    head: AttachedHead | None,
) -> Storage:
    """Blocks for every row and for the dead slots that it would have in a rectangle, and one that takes what pads write. A head's own
    passes are not padded. As many rows run as there are blocks for at their longest: none is preempted here.
    """
    layers, device = [list(footprint_of(m).layers) for m in models], models[0].device
    longest = max_len + most_drafted(spec)
    per_token = sum(s.bytes_per_token(m.model.dtype) for m, shapes in zip(models, layers, strict=True) for s in shapes)
    per_token += head.bytes_per_token if head is not None else 0
    most_blocks = num_blocks_for(longest, config.block_size)
    # its slots and its dead ones are no more than the rectangle is wide; both end in a block of their own, and the next step is reserved
    of_row = most_blocks + 1 + num_blocks_for(1 + most_drafted(spec), config.block_size)
    rows, size = config.num_rows_held, config.block_size
    plan = plan_kv(per_token, size, rows, of_row * size, config.kv_cache_memory_bytes, device, 1)
    runners: list[PaddedBlocksRunner] = []
    for loaded, shapes in zip(models, layers, strict=True):
        tables = PaddedTables(plan.num_blocks, plan.block_size, most_blocks, longest)
        cache = KVCache(shapes, tables, loaded.model.dtype, device, has_null_block=True)
        padding = PADDINGS[config.strategy, config.pad, config.grouping]
        runners.append(PaddedBlocksRunner(loaded, cache, padding, queries_of(loaded)))
    head_cache = None
    if head is not None:
        runners[0].hidden_state_reader = head.reader
        if head.shapes:
            head_cache = KVCache(head.shapes, BlockTables(plan.num_blocks, plan.block_size, most_blocks), head.head.dtype, device)
    selector = prompts_apart if config.grouping == "none" else SameLength(config.max_num_seqs, runners[0].usage)
    most_rows = max(1, plan.num_blocks // of_row)
    if most_rows < rows:
        logger.warning(
            "strategy %r runs %d rows at once instead of %d: %d KV blocks hold no more of their longest; lower max_model_len, or raise "
            "kv_cache_memory_bytes", config.strategy, most_rows, rows, plan.num_blocks,
        )  # fmt: skip
    return Storage(plan, runners, head, head_cache, selector=selector, most_rows=most_rows)


def queries_of(loaded: LoadedModel) -> list[tuple[int, int]]:
    """Heads of every layer's queries, and their size."""
    found: list[tuple[int, int]] = []
    record_layers(loaded.model, lambda call: found.append((call.query.shape[1], call.query.shape[2])))
    return found


def build_padded(
    config: EngineConfig,
    models: SequenceOf[LoadedModel],
    max_len: int,
    spec: SpeculativeConfig | None,
    head: AttachedHead | None,
) -> Storage:
    """Rectangles for chains; trees and heads, which need blocks, on ours."""
    builds = build_padded_blocks if spec is not None and (spec.is_head or spec.grows_trees) else build_rectangles
    return builds(config, models, max_len, spec, head)


STRATEGIES: dict[str, BuildStorage] = {"unpadded": build_unpadded, "padded": build_padded, "realign": build_padded}


@contextmanager
def on_our_attention() -> Iterator[None]:
    """While inside, engines of the field's strategies are built on our attention, chains too, so that padding alone tells them apart."""
    before = dict(STRATEGIES)
    STRATEGIES.update(dict.fromkeys(("padded", "realign"), build_padded_blocks))
    try:
        yield
    finally:
        STRATEGIES.update(before)
