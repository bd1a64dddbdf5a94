"""Before a model is served: does it batch exactly? Asked of a shrunken random twin.

Every attention layer must call our function, and each row's logits in a ragged batch must equal the eager forward pass of that row
alone, in float32; what our operations then do in its modules is the matter of `servedtest`. The twin has every layer type of the
original, a window of 4 and an original maximum position of 8, so that windows and position-dependent rotary embeddings show within 24
tokens.
"""

from __future__ import annotations

import copy
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from echelon.batch import Span
from echelon.errors import UnsupportedModelError
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache
from echelon.layouts import unpadded
from echelon.ops import compiled
from echelon.target.attention import IMPLEMENTATION, STEP_KEYWORD, CachedStep, record_layers
from echelon.target.rope import coded_positions, replace_rope
from echelon.target.servedtest import check_rounding, check_served

LENGTHS = (24, 3)  # one long row, one short
VOCABULARY = 64
TOLERANCE = 1e-4  # relative to the largest logit


def shrunken(config: Any) -> Any:
    """A configuration of the same kind, small enough to run in milliseconds."""
    small = copy.deepcopy(config)
    heads = 4
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    ratio = max(1, config.num_attention_heads // kv_heads)
    types = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    num_layers = max(2, len(types))
    changes = {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * 16,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // ratio),
        "head_dim": 16,
        "intermediate_size": 48,
        "ffn_dim": 48,
        "num_hidden_layers": num_layers,
        "layer_types": (types * num_layers)[:num_layers] or None,
        "sliding_window": 4 if getattr(config, "sliding_window", None) else None,
        "attention_chunk_size": 4,
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 8,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if getattr(config, "word_embed_proj_dim", None) is not None:
        changes["word_embed_proj_dim"] = heads * 16 if config.word_embed_proj_dim == config.hidden_size else 32
    for key, value in changes.items():
        if hasattr(small, key) and getattr(small, key) is not None and key not in getattr(small, "attribute_map", {}):
            setattr(small, key, value)
    rope = getattr(small, "rope_parameters", None) or {}
    for entry in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        _shrink_rope(entry, small)
    return small


def _shrink_rope(rope: dict[str, Any], small: Any) -> None:
    """Let position-dependent rotary embeddings change within the long row."""
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = 8
    if rope.get("rope_type") == "dynamic":
        small.max_position_embeddings = 8
    for key in ("short_factor", "long_factor"):
        if key in rope:
            rope[key] = list(islice(cycle(rope[key]), int(16 * rope.get("partial_rotary_factor", 1.0)) // 2))


_passed: set[tuple[object, ...]] = set()


def self_test(cls: type[PreTrainedModel], config: Any, dtype: torch.dtype = torch.float32) -> None:
    """Raise `UnsupportedModelError`, with what differed, unless models of this class and configuration batch exactly, as they are and with
    our operations in them (`check_served`), also in `dtype`. What has passed is not tried again.
    """
    key = cls, config.to_json_string(use_diff=False), dtype, compiled.is_built() and compiled.isa()
    if key in _passed:
        return
    text = config.get_text_config()
    _check_batches(cls, text)
    row = _row(LENGTHS[0]).tolist()
    check_served(lambda: _twin(cls, shrunken(text)), row)
    if dtype != torch.float32:
        check_rounding(lambda: _twin(cls, shrunken(text)), row, dtype)
    _passed.add(key)


def _row(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.int64) * 7 % (VOCABULARY - 3) + 3


def _check_batches(cls: type[PreTrainedModel], text: Any) -> None:
    """A ragged batch through our attention alone, nothing else replaced, gives each row its own logits."""
    try:
        twin = _twin(cls, shrunken(text))
        rows = [_row(n) for n in LENGTHS]
        with torch.inference_mode():
            alone = [_eager(twin, row) for row in rows]
            together = _ragged(twin, rows)
    except UnsupportedModelError:
        raise
    except Exception as error:  # a model that fails inside is refused by name, whatever it raises
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnsupportedModelError(f"{cls.__name__} cannot run as a ragged batch: {reason}") from error
    for row, expected, got in zip(LENGTHS, alone, together, strict=True):
        difference = float((expected - got).abs().max() / expected.abs().max())
        if not difference < TOLERANCE:
            raise UnsupportedModelError(
                f"{cls.__name__} gives other logits in a ragged batch than alone (row of {row} tokens, "
                f"relative difference {difference:.1e}); its attention or its positions depend on the whole batch"
            )


def _twin(cls: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """A random float32 model whose weights are wide enough that wrong attention changes the logits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        twin = cls._from_config(config, attn_implementation="eager", dtype=torch.float32)
        for parameter in twin.parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=0.2)
    return twin.eval()


def _eager(twin: PreTrainedModel, tokens: Tensor) -> Tensor:
    positions = torch.arange(len(tokens))
    logits: Tensor = twin(input_ids=tokens[None], position_ids=positions[None], use_cache=False).logits[0]
    return logits


def _ragged(twin: PreTrainedModel, rows: list[Tensor]) -> list[Tensor]:
    """The rows in one batch through our attention; the long row in two steps, so that cached keys are read too."""
    twin.set_attn_implementation(IMPLEMENTATION)
    shapes = record_layers(twin)
    original = replace_rope(twin)
    cache = KVCache(shapes, BlockTables(8, 8, 4), torch.float32, torch.device("cpu"))
    for storage in (*cache.keys, *cache.values):
        storage.fill_(torch.nan)
    half = len(rows[0]) // 2
    steps = [{0: (0, rows[0][:half])}, {0: (half, rows[0][half:]), 1: (0, rows[1])}]
    parts: dict[int, list[Tensor]] = {0: [], 1: []}
    for step in steps:
        spans = [
            Span(row, start, tokens.tolist(), len(tokens), len(rows[row]), prompt_len=len(rows[row]))
            for row, (start, tokens) in step.items()
        ]
        for span in spans:
            cache.tables.reserve(span.row, span.start + len(span.tokens))
        batch = unpadded.pack(spans, cache.tables)
        inputs = {"input_ids": batch.tokens[None].long(), "position_ids": coded_positions(batch, original)[None].long()}
        logits = twin(**inputs, use_cache=False, **{STEP_KEYWORD: CachedStep(batch, cache)}).logits[0]
        for span, piece in zip(spans, logits.split([len(s.tokens) for s in spans]), strict=True):
            parts[span.row].append(piece)
            cache.tables.commit(span.row, span.start + len(span.tokens))
    return [torch.cat(parts[i]) for i in range(len(rows))]
