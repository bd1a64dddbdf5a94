"""A grown model is a larger model with the same function."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
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

from echelon import LLM, SamplingParams
from echelon.bench.inflate import Inflation, inflate, inflate_head, plan_growth, untied
from echelon.draft import Draft
from echelon.errors import ConfigError, UnsupportedModelError
from echelon.heads.checkpoints import build_head, load_head, save_head
from echelon.model.load.loading import adopt_model
from echelon.sequence import PlannedRow

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
            inflate(model, Inflation(width, num_layers))
        return
    grown = inflate(model, Inflation(width, num_layers))
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
        inflate(model, Inflation(3, 2))
    with pytest.raises(ConfigError, match="only adds"):
        inflate(model, Inflation(2, 1))


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {"own_output": True}),
    "medusa with the target's output": ("medusa", {"num_layers": 2}),
    "clover": ("clover", {"own_rows": False}),
    "clover with rows of its own": ("clover", {"own_rows": True}),
    "clover without attention": ("clover", {"own_rows": False, "attention_decoder": False}),
    "clover without blocks": ("clover", {"augmenting": False, "regressive": False, "attention_decoder": False}),
    "clover2": ("clover2", {"own_rows": False}),
    "clover2 with rows of its own": ("clover2", {"own_rows": True}),
    "eagle": ("eagle", {"bias": True}),
    "eagle3": ("eagle3", {"draft_vocab_size": 40}),
    "eagle3 with the norm before": ("eagle3", {"draft_vocab_size": 64, "norm_before_residual": True}),
}


def a_head(name: str, target: Any) -> Any:
    """A head with random weights everywhere."""
    method, options = HEADS[name]
    built: Any = build_head(method, target, **options).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for tensor in [*built.parameters(), *(b for n, b in built.named_buffers() if n == "rows")]:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3 + (tensor.ndim == 1))
    return built


def drafts(target: Any, own: Any) -> list[tuple[list[int], list[int]]]:
    """Every draft of every row while `target` generates greedily with this head."""
    config = {"method": own.method, "tree": "dynamic", "num_speculative_tokens": 9, "tree_top_k": 3, "tree_depth": 3}
    llm = LLM(adopt_model(target, None, "toy"), config, draft_head=own, max_num_seqs=3, kv_cache_memory_bytes=1 << 22)
    propose = llm.engine.drafter.propose
    found: list[tuple[list[int], list[int]]] = []

    def noted(rows: list[PlannedRow]) -> Draft:
        draft = propose(rows)
        found.extend((draft.row(i), draft.row_parents(i)) for i in range(draft.num_rows))
        return draft

    llm.engine.drafter.propose = noted  # type: ignore[method-assign]
    llm.generate([[5, 6, 7], [8], [9, 10, 11, 12, 13]], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    return found


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("name", HEADS)
def test_a_grown_head_drafts_the_same_also_once_saved(name: str, width: int, tmp_path: Path) -> None:
    model = untied(build("llama-tied"))
    own = a_head(name, model)
    grown = inflate(model, Inflation(width, 3))
    save_head(inflate_head(own, grown, width), tmp_path, grown)
    wide = load_head(str(tmp_path), grown)
    expected = drafts(copy.deepcopy(model), own)
    assert sum(len(tokens) for tokens, _ in expected) > 50
    assert drafts(grown, wide) == expected


def test_a_head_does_not_grow_beside_a_tied_target() -> None:
    model = build("llama-tied")
    with pytest.raises(ConfigError, match="untie it"):
        inflate_head(a_head("eagle", model), inflate(model, Inflation(2, 2)), 2)


def test_an_untied_copy_says_the_same() -> None:
    model = build("llama-tied")
    tokens = torch.arange(9)[None]
    copied = untied(model)
    assert torch.equal(copied(tokens).logits, model(tokens).logits)
    assert copied.get_output_embeddings().weight is not copied.get_input_embeddings().weight
