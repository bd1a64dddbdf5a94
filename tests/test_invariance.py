"""A row's logits, keys and values are bitwise those of the row alone: whole, in pieces, token by token, beside others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tr
from torch import Tensor

import toys
from echelon.batch import Span
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache
from echelon.ops import cpu
from echelon.target.attention import record_layers
from echelon.target.layers import framework_layers
from echelon.target.loading import adopt_model
from echelon.target.runner import ModelRunner

COMMON = {"vocab_size": 80, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "max_position_embeddings": 512}
GATED = COMMON | {"intermediate_size": 72, "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
OPT = COMMON | {"ffn_dim": 72, "word_embed_proj_dim": 48, "pad_token_id": 1}
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (tr.LlamaForCausalLM, tr.LlamaConfig(**GATED)),
    "qwen2": (tr.Qwen2ForCausalLM, tr.Qwen2Config(**GATED)),
    "qwen3": (tr.Qwen3ForCausalLM, tr.Qwen3Config(**GATED, head_dim=16)),
    "glm4": (tr.Glm4ForCausalLM, tr.Glm4Config(**GATED, head_dim=16)),
    "opt": (tr.OPTForCausalLM, tr.OPTConfig(**OPT)),
    "opt-350m": (tr.OPTForCausalLM, tr.OPTConfig(**(OPT | {"word_embed_proj_dim": 24}), do_layer_norm_before=False)),
}
SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 80, "max_position_embeddings": 512}
MODELS |= {
    "mistral": (tr.MistralForCausalLM, tr.MistralConfig(**GATED, sliding_window=90)),
    "gemma2": (tr.Gemma2ForCausalLM, tr.Gemma2Config(**GATED, head_dim=16, sliding_window=90, query_pre_attn_scalar=16)),
    "gemma3": (tr.Gemma3ForCausalLM, tr.Gemma3TextConfig(**GATED, head_dim=16, sliding_window=90, query_pre_attn_scalar=16)),
    "phi3": (tr.Phi3ForCausalLM, tr.Phi3Config(**GATED)),
    "olmo2": (tr.Olmo2ForCausalLM, tr.Olmo2Config(**GATED)),
    "starcoder2": (tr.Starcoder2ForCausalLM, tr.Starcoder2Config(**GATED, sliding_window=90)),
    "gpt-neox": (tr.GPTNeoXForCausalLM, tr.GPTNeoXConfig(**SMALL, intermediate_size=72)),
    "gpt2": (tr.GPT2LMHeadModel, tr.GPT2Config(vocab_size=80, n_embd=48, n_layer=2, n_head=6, n_positions=512)),
}
EXPERTS = GATED | {"num_experts_per_tok": 2}
MODELS |= {
    "qwen3-moe": (tr.Qwen3MoeForCausalLM, tr.Qwen3MoeConfig(**EXPERTS, head_dim=16, num_experts=6, moe_intermediate_size=40)),
    "mixtral": (tr.MixtralForCausalLM, tr.MixtralConfig(**EXPERTS, num_local_experts=4, sliding_window=None)),
    "gpt-oss": (tr.GptOssForCausalLM, tr.GptOssConfig(**EXPERTS, head_dim=16, num_local_experts=4, sliding_window=90)),
}
COMPILED_ONLY = {"qwen3-moe", "mixtral", "gpt-oss"}  # the fallback leaves experts with the framework
LENGTH = 300  # more than two key tiles
BLOCK = 16


def runner(name: str, dtype: torch.dtype) -> ModelRunner:
    if name in COMPILED_ONLY and not cpu.is_built():
        pytest.skip("the compiled kernels are not built")
    cls, config = MODELS[name]
    loaded = adopt_model(toys.randomised(cls, config, seed=2, spread=0.15).to(dtype), None, name)
    tables = BlockTables(160, BLOCK, 32)
    cache = KVCache(record_layers(loaded.model), tables, dtype, torch.device("cpu"))
    for storage in (*cache.keys, *cache.values):
        storage.fill_(torch.nan)
    return ModelRunner(loaded, cache)


def feed(run: ModelRunner, pieces: dict[int, list[int]]) -> dict[int, Tensor]:
    """One step: new tokens of each row; logits of all of them, by row."""
    spans = [Span(row, run.num_cached(row), tokens, len(tokens)) for row, tokens in pieces.items()]
    for span in spans:
        assert run.cache.tables.reserve(span.row, span.start + len(span.tokens))
    batch = run.pack(spans)
    batch.check()
    logits = run.run(batch)
    for span in spans:
        run.commit(span.row, span.start + len(span.tokens))
    return dict(zip(pieces, logits.split([len(t) for t in pieces.values()]), strict=True))


def cached(run: ModelRunner, row: int) -> list[Tensor]:
    """Keys and values of a row, layer by layer, in logical order."""
    slots = torch.tensor([b * BLOCK + i for b in run.cache.tables.blocks(row) for i in range(BLOCK)])[: run.num_cached(row)]
    return [storage[slots].clone() for storage in (*run.cache.keys, *run.cache.values)]


def in_pieces(run: ModelRunner, row: int, tokens: list[int], sizes: list[int], neighbours: int, seed: int) -> Tensor:
    """Feed a row in pieces of the given sizes, each beside other rows of random lengths."""
    rng = np.random.default_rng(seed)
    parts, start = [], 0
    for step, size in enumerate(sizes):
        others = {1000 + 100 * step + i: rng.integers(3, 80, rng.integers(1, 40)).tolist() for i in range(neighbours)}
        order = [*list(others)[: neighbours // 2], row, *list(others)[neighbours // 2 :]]
        pieces = {**others, row: tokens[start : start + size]}
        parts.append(feed(run, {r: pieces[r] for r in order})[row])
        for other in others:
            run.cache.tables.release(other)
        start += size
    assert start == len(tokens)
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_cache_depend_on_the_row_alone(name: str, dtype: torch.dtype, threads: int) -> None:
    assert threads == torch.get_num_threads()
    tokens = np.random.default_rng(9).integers(3, 80, LENGTH).tolist()
    run = runner(name, dtype)
    whole = feed(run, {1: tokens})[1]
    assert bool(torch.isfinite(whole).all())
    expected = cached(run, 1)
    run.cache.tables.release(1)
    ways = {
        "token by token": [200] + [1] * 100,
        "in blocks of a draft": [150, 5, 1, 8, 3, 60, 2, 71],
        "in pieces": [7, 121, 128, 44],
    }
    for row, (way, sizes) in enumerate(ways.items(), start=2):
        for neighbours in (0, 3):
            got = in_pieces(run, row, tokens, sizes, neighbours if len(sizes) < 50 else 0, seed=row)
            assert torch.equal(whole, got), f"{way}, {neighbours} neighbours"
            assert all(torch.equal(a, b) for a, b in zip(expected, cached(run, row), strict=True)), way
            run.cache.tables.release(row)
    run.cache.check()


@pytest.mark.parametrize("name", MODELS)
def test_no_layer_stays_with_the_framework(name: str) -> None:
    assert framework_layers(runner(name, torch.float32).loaded.model) == []


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_framework(name: str) -> None:
    cls, config = MODELS[name]
    tokens = np.random.default_rng(9).integers(3, 80, 200).tolist()
    model = toys.randomised(cls, config, seed=2, spread=0.15)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
    got = feed(runner(name, torch.float32), {1: tokens})[1]
    assert torch.allclose(expected, got, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
