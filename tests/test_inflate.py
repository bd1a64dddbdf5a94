"""A grown model is a larger model with the same function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import toys
from echelon.bench.inflate import Growth, inflate, plan_growth
from echelon.errors import ConfigError, UnsupportedModelError

COMMON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
LLAMA = COMMON | {"intermediate_size": 48, "num_key_value_heads": 2}
OPT = COMMON | {"ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1}
MODELS: dict[str, tuple[Any, Any]] = {
    "llama-tied": (LlamaForCausalLM, LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "llama-untied": (LlamaForCausalLM, LlamaConfig(**LLAMA, tie_word_embeddings=False, attention_bias=True)),
    "mistral": (MistralForCausalLM, MistralConfig(**LLAMA, head_dim=8)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**LLAMA)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**LLAMA, head_dim=16)),
    "opt": (OPTForCausalLM, OPTConfig(**OPT)),
    "opt-350m": (OPTForCausalLM, OPTConfig(**(OPT | {"word_embed_proj_dim": 16}), do_layer_norm_before=False)),
}


def build(name: str) -> Any:
    cls, config = MODELS[name]
    model = toys.randomised(cls, config, seed=3, spread=0.3)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data = parameter.data + torch.linspace(-0.1, 0.1, len(parameter))
    return model


@pytest.mark.parametrize("num_layers", [2, 5])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_equal(name: str, width: int, num_layers: int) -> None:
    model = build(name)
    if name == "opt-350m" and num_layers > 2:
        with pytest.raises(UnsupportedModelError, match="identity layer"):
            inflate(model, Growth(width, num_layers))
        return
    grown = inflate(model, Growth(width, num_layers))
    assert grown.config.hidden_size == 32 * width
    assert len(grown.get_decoder().layers) == num_layers
    ids = torch.arange(20)[None] * 5 % 64
    with torch.inference_mode():
        expected, got = model(input_ids=ids).logits, grown(input_ids=ids).logits
    assert torch.allclose(expected, got, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_planned_growth_reaches_the_size() -> None:
    model = build("llama-tied")
    growth = plan_growth(model, 300_000_000)
    assert growth.width == 64
    assert growth.num_layers > 2
    with torch.device("meta"):
        config = LlamaConfig(**{**LLAMA, "hidden_size": 2048, "intermediate_size": 3072, "num_attention_heads": 256, "head_dim": 8})
        config.num_hidden_layers, config.num_key_value_heads, config.tie_word_embeddings = growth.num_layers, 128, True
        count = sum(p.numel() for p in LlamaForCausalLM(config).parameters())
    assert 300_000_000 <= count < 1.1 * 300_000_000


def test_refusals_name_the_remedy() -> None:
    model = build("llama-tied")
    with pytest.raises(ConfigError, match="power of two"):
        inflate(model, Growth(3, 2))
    with pytest.raises(ConfigError, match="only adds"):
        inflate(model, Growth(2, 1))
