"""Configurations of the same kind as another, small enough that a model of them runs in milliseconds.

Sizes keep their ratios: numbers of heads are divided by one factor, sizes of heads by another, widths by both, so that what a model
derives from them still fits. Of the layers one of each kind is kept. Whatever is counted in tokens becomes so short that it shows within
two dozen of them. What an attribute counts is read from its name.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import cycle, islice
from math import gcd
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 64
NUM_EXPERTS = 8
MAX_LAYERS = 12
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a small model, in tokens: the vocabulary, the context, that after which rotary embeddings may change, windows and chunks."""

    vocabulary: int = VOCABULARY
    context: int = 64
    original_context: int = 8
    window: int = 4


HEADS = re.compile(r"(^|_)heads?($|_per_layer)|groups$")
HEAD_SIZE = re.compile(r"head_(dim|size)|(^|_)d_head|headdim|dim_head|kv_channels|^rotary_dim$|^d_kv$|mrope_section")
WIDTH = re.compile(
    r"hidden_size|^d_model$|^n_embd$|emb(edding)?_(dim|size)$|^dim$|intermediate|ffn_dim|ffn_hidden|feed_forward_size|^(d_ff|dff|dim_ff|d_inner|n_inner)$"
    r"|_rank$|lru_width|d_ssm|embed_proj_dim|_latent_size|hidden_size_per_layer|embed_dim$|embds_dim"
)
CONTEXTS = re.compile(r"position_embeddings|positions$|seq_len|sequence_length|context_length|model_max_length|^n_ctx$|max_length")
WINDOWS = re.compile(
    r"window(_size|_len)?$|attention_chunk_size|index_topk|window_size|rel_extent|floor_scale|log_scaling_n_floor|index_block_size"
)
EXPERTS = re.compile(r"^(moe_)?(n|num)_(routed_|local_)?experts$|zero_expert_num")
CHOSEN = re.compile(r"experts_per_tok|moe_topk|^moe_k$|top_k_experts")
LAYERS = re.compile(r"^((n|num)_(hidden_|encoder_|decoder_)?layers?|(en|de)coder_layers|num_blocks)$")
BOUNDARY = re.compile(r"^first_k|^num_dense_layers$|^num_kv_shared_layers$|^max_window_layers$|^moe_layer_end_index$")


def shrunken(config: Any, is_narrow: bool = True, sizes: Sizes | None = None) -> Any:
    """A small configuration of the same kind; `config` stays as it is. Not `is_narrow`: heads and widths keep their sizes."""
    small = copy.deepcopy(config)
    _shrink(small, sizes or Sizes(), None if is_narrow else (Fraction(1), 1))
    return small


def _shrink(part: Any, sizes: Sizes, factors: tuple[Fraction, int] | None) -> None:
    """Shrink a configuration and those within, in place: those without attention share the factors of what they are in."""
    shrink = _Shrink(part, sizes, factors)
    within = [v for v in vars(part).values() if isinstance(v, PreTrainedConfig)]
    shrink()
    for inner in within:
        has_own = factors is None and _get(inner, "num_attention_heads") is not None
        _shrink(inner, sizes, None if has_own else shrink.factors)


def part_for(cls: Any, config: Any) -> Any:
    """The part of a configuration that a model class is built from: its decoder's, for a class that is only the decoder."""
    return next((part for part in _parts(config) if isinstance(part, cls.config_class)), config)


def _parts(config: Any) -> Iterator[Any]:
    """The configuration and those within."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


class _Shrink:
    """Shrinks one configuration, without those within."""

    def __init__(self, part: Any, sizes: Sizes, factors: tuple[Fraction, int] | None) -> None:
        self._part, self._sizes = part, sizes
        spec = vars(part).pop("_heterogeneity_spec", None)
        self._overrides: dict[int, dict[str, Any]] = spec.per_layer_overrides if spec else {}
        self._values: dict[str, Any] = {k: v for k, v in vars(part).items() if not k.startswith("_") and v is not None}
        self.factors = self._few, self._short = factors or self._factors()
        self._num_layers = _get(part, "num_hidden_layers") or 0
        self._kept = _kept_layers(self._values, self._overrides, self._num_layers)

    def __call__(self) -> None:
        for name, value in self._values.items():
            if not isinstance(value, PreTrainedConfig):
                new = self._layer_wise(name, value)
                if new != value:
                    setattr(self._part, name, new)
        for name, value in SPECIAL_TOKENS.items():
            if _get(self._part, name) is not None:
                setattr(self._part, name, value)
        self._rope()
        if self._overrides:
            kept = {self._kept.index(i): entry for i, entry in self._overrides.items() if i in self._kept}
            self._part.per_layer_config = {i: {k: self._resized(k, v) for k, v in entry.items()} for i, entry in kept.items()}

    def _factors(self) -> tuple[Fraction, int]:
        """Divisors of numbers of heads and of sizes of heads."""
        heads = _get(self._part, "num_attention_heads") or next(iter(_all(self._values, HEADS)), 1)
        heads = max(heads) if isinstance(heads, list) else heads
        hidden = _get(self._part, "hidden_size") or next(iter(_all(self._values, WIDTH)), 64)
        counts = [n for n in [*_all(self._values, HEADS), *_all(self._overrides, HEADS)] if n > 0]
        smaller = (Fraction(heads, n) for n in (4, 3, 5, 6, 2, 7, *range(8, heads)) if n < heads)
        few = next((few for few in smaller if all((c / few).denominator == 1 or c < few for c in counts)), Fraction(1))
        size = _get(self._part, "head_dim") or hidden // heads
        common = gcd(size, *_all(self._values, HEAD_SIZE), *_all(self._overrides, HEAD_SIZE))
        divisors = [d for d in range(1, common + 1) if common % d == 0 and size // d >= 16 and (common // d) % 2 == 0]
        return few, max((d for d in divisors if size // d % 8 == 0), default=max(divisors, default=1))

    def _layer_wise(self, name: str, value: Any) -> Any:
        """Reduced to the layers that are kept."""
        count, kept = self._num_layers, self._kept
        if _is_per_layer(name, value, count):
            return type(value)(self._resized(name, value[i]) for i in kept)
        if _is_index(name, value):
            return type(value)(kept.index(i) for i in value if i in kept)
        if BOUNDARY.search(name) and isinstance(value, int) and count and value > 0:
            return sum(i >= count - value for i in kept) if "shared" in name else sum(i < value for i in kept)
        if LAYERS.search(name) and isinstance(value, int):
            return len(kept) if value == count else min(value, 2)
        return self._resized(name, value)

    def _resized(self, name: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._resized(name, v) for v in value)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 1:
            return value
        if name == "vocab_size":
            return self._sizes.vocabulary
        if "vocab" in name:
            return min(value, self._sizes.vocabulary)
        if EXPERTS.search(name):
            return min(value, max(NUM_EXPERTS, 2 * (self._values.get("n_group") or self._values.get("num_expert_group") or 1)))
        if CHOSEN.search(name):
            return min(value, 2)
        if CONTEXTS.search(name):
            return min(value, self._sizes.original_context if "original" in name else self._sizes.context)
        if WINDOWS.search(name):
            return min(value, self._sizes.window)
        return self._scaled(name, value)

    def _scaled(self, name: str, value: int) -> int:
        """Sizes and numbers of heads, and widths."""
        if HEAD_SIZE.search(name):
            return value // self._short
        if HEADS.search(name):
            return max(1, int(value / self._few))
        if WIDTH.search(name):
            small = value / (self._few * self._short)
            return int(small) if small.denominator == 1 and small % 8 == 0 else min(value, 8 * max(1, round(small / 8)))
        return value

    def _rope(self) -> None:
        """Let position-dependent rotary embeddings change within the long row."""
        rope = self._values.get("rope_parameters") or {}
        size = _get(self._part, "head_dim") or (_get(self._part, "hidden_size") or 64) // (_get(self._part, "num_attention_heads") or 4)
        for entry in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
            if "original_max_position_embeddings" in entry:
                entry["original_max_position_embeddings"] = self._sizes.original_context
            if entry.get("rope_type") == "dynamic":
                self._part.max_position_embeddings = self._sizes.original_context
            if "mrope_section" in entry:
                entry["mrope_section"] = [n // self._short for n in entry["mrope_section"]]
            for key in ("short_factor", "long_factor"):
                if key in entry:
                    entry[key] = list(islice(cycle(entry[key]), int(size * entry.get("partial_rotary_factor", 1.0)) // 2))


def _kept_layers(values: dict[str, Any], overrides: dict[int, Any], num_layers: int) -> list[int]:
    """Two of each kind, as far as there are two; no more than MAX_LAYERS."""
    per_layer = [v for k, v in values.items() if _is_per_layer(k, v, num_layers)]
    indices = [v for k, v in values.items() if _is_index(k, v)]
    bounds = {k: v for k, v in values.items() if BOUNDARY.search(k) and isinstance(v, int)}
    firsts = [num_layers - v if "shared" in k else v for k, v in bounds.items()]
    kinds: dict[str, list[int]] = {}
    for i in range(num_layers):
        kind = ([v[i] for v in per_layer], [i in v for v in indices], [i < v for v in firsts], overrides.get(i))
        kinds.setdefault(str(kind), []).append(i)
    return sorted(i for layers in kinds.values() for i in layers[:2])[:MAX_LAYERS]


def _is_per_layer(name: str, value: Any, num_layers: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == num_layers > 0 and not _is_index(name, value)


def _is_index(name: str, value: Any) -> bool:
    """A list of layers by their numbers."""
    if not isinstance(value, list | tuple) or not ("layer" in name or "idx" in name) or not value:
        return False
    return all(isinstance(v, int) and not isinstance(v, bool) for v in value) and sorted(set(value)) == list(value)


def _get(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except NotImplementedError:
        return None


def _all(values: dict[Any, Any], names: re.Pattern[str]) -> list[int]:
    """The positive integers under such names, in lists and within too."""
    counts: list[int] = []
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(key, int):
            counts += _all(value, names)
        elif names.search(str(key)):
            counts += [n for n in (value if isinstance(value, list | tuple) else [value]) if isinstance(n, int) and n > 0 and n is not True]
    return counts
