"""The table of batching strategies: the engine's own, and those of the field on the framework's attention."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from echelon.baselines import layout
from echelon.baselines.lines import LineTables
from echelon.baselines.masked import MaskedRunner, Pack, refuse_softcap_and_sinks
from echelon.baselines.rectangle import RectangleCache
from echelon.baselines.selection import SameLength, prompts_apart
from echelon.config import EngineConfig, SpeculativeConfig
from echelon.drafters.heads import AttachedHead
from echelon.errors import UnsupportedModelError
from echelon.memory.pool import plan_kv
from echelon.model.attention import record_layers
from echelon.model.load.loading import LoadedModel
from echelon.storage import BuildStorage, Storage, build_unpadded

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
    num_speculative_tokens = spec.most_tokens if spec else 0
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


STRATEGIES: dict[str, BuildStorage] = {"unpadded": build_unpadded, "padded": build_rectangles, "realign": build_rectangles}
