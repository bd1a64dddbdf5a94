"""What configurations of models say under names that not all of them have."""

from __future__ import annotations

from typing import Any

DEFAULT_CONTEXT = 2048  # tokens, where a configuration names none


def context_of(config: Any) -> int:
    """Tokens of the longest text that a model with this configuration reads."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or DEFAULT_CONTEXT)


def num_heads_of(config: Any) -> tuple[int, int]:
    """Attention heads, and those of keys and values."""
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    return heads, int(getattr(text, "num_key_value_heads", None) or heads)
