"""Every architecture that is served, small: two layers of random weights, windows and original contexts shorter than the texts of tests."""

from __future__ import annotations

from typing import Any

import transformers as tr

COMMON = {"vocab_size": 80, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "max_position_embeddings": 512}
GATED = COMMON | {"intermediate_size": 72, "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
UNTIED = GATED | {"tie_word_embeddings": False}  # a tied output layer, random, repeats its input for ever
OPT = COMMON | {"ffn_dim": 72, "word_embed_proj_dim": 48, "pad_token_id": 1}
EXPERTS = GATED | {"moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2, "head_dim": 16}


def decoders(window: int, original_context: int) -> dict[str, tuple[Any, Any]]:
    """Name → class and configuration."""
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": original_context,
    }
    return {
        "llama": (tr.LlamaForCausalLM, tr.LlamaConfig(**GATED)),
        "qwen2": (tr.Qwen2ForCausalLM, tr.Qwen2Config(**GATED)),
        "qwen3": (tr.Qwen3ForCausalLM, tr.Qwen3Config(**GATED, head_dim=16)),
        "glm4": (tr.Glm4ForCausalLM, tr.Glm4Config(**GATED, head_dim=16)),
        "opt": (tr.OPTForCausalLM, tr.OPTConfig(**OPT)),
        "opt-350m": (tr.OPTForCausalLM, tr.OPTConfig(**(OPT | {"word_embed_proj_dim": 24}), do_layer_norm_before=False)),
        "mistral": (tr.MistralForCausalLM, tr.MistralConfig(**GATED, sliding_window=window)),
        "gemma2": (tr.Gemma2ForCausalLM, tr.Gemma2Config(**UNTIED, head_dim=16, sliding_window=window, query_pre_attn_scalar=16)),
        "gemma3": (tr.Gemma3ForCausalLM, tr.Gemma3TextConfig(**UNTIED, head_dim=16, sliding_window=window, query_pre_attn_scalar=16)),
        "phi3": (tr.Phi3ForCausalLM, tr.Phi3Config(**GATED)),
        "phi3-longrope": (
            tr.Phi3ForCausalLM,
            tr.Phi3Config(**GATED, rope_parameters=longrope, original_max_position_embeddings=original_context),
        ),
        "olmo2": (tr.Olmo2ForCausalLM, tr.Olmo2Config(**GATED)),
        "starcoder2": (tr.Starcoder2ForCausalLM, tr.Starcoder2Config(**GATED, sliding_window=window)),
        "gpt-neox": (tr.GPTNeoXForCausalLM, tr.GPTNeoXConfig(**COMMON, intermediate_size=72)),
        "gpt2": (tr.GPT2LMHeadModel, tr.GPT2Config(vocab_size=80, n_embd=48, n_layer=2, n_head=6, n_positions=512)),
        "qwen3-moe": (tr.Qwen3MoeForCausalLM, tr.Qwen3MoeConfig(**EXPERTS)),
        "mixtral": (tr.MixtralForCausalLM, tr.MixtralConfig(**GATED, num_local_experts=4, num_experts_per_tok=2)),
        "gpt-oss": (
            tr.GptOssForCausalLM,
            tr.GptOssConfig(**GATED, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=window),
        ),
    }


MIXTURES = ("qwen3-moe", "mixtral", "gpt-oss")  # without compiled kernels their experts run the framework's code
