"""Models of serving size with random weights, made on the spot: speed depends on a model's shape, not on what it knows."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PretrainedConfig, PreTrainedModel

from echelon.errors import ConfigError
from echelon.model.load.loading import LoadedModel, adopt_model
from echelon.ops.devices import chosen_device


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32_000,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )


def opt(hidden: int, layers: int, heads: int, vocab_size: int = 50_272) -> OPTConfig:
    return OPTConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        ffn_dim=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        word_embed_proj_dim=hidden,
    )


SHAPES = {
    "llama-1.1b": lambda: llama(2048, 5632, 22, 32, 4),
    "opt-125m": lambda: opt(768, 12, 12),
    "opt-1.3b": lambda: opt(2048, 24, 32),
    "opt-2.7b": lambda: opt(2560, 32, 32),
    "opt-6.7b": lambda: opt(4096, 32, 32),
}


def random_model(
    shape: str,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "auto",
    numerics: str = "invariant",
    quantization: str | None = None,
) -> LoadedModel:
    """A model of one of `SHAPES`, served like any other; device, numerics and quantization as in `EngineConfig`."""
    if shape not in SHAPES:
        raise ConfigError(f"{shape!r} is neither a shape ({', '.join(SHAPES)}) nor a folder; choose one of these")
    return with_random_weights(SHAPES[shape](), shape, dtype, device, numerics, quantization)


def with_random_weights(
    config: PretrainedConfig,
    name: str,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    numerics: str = "invariant",
    quantization: str | None = None,
) -> LoadedModel:
    """`plain_with_random_weights`, served."""
    plain = plain_with_random_weights(config, dtype, device)
    return adopt_model(plain, None, name, keep_weights=False, numerics=numerics, quantization=quantization)


def plain_with_random_weights(config: PretrainedConfig, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A model of this configuration; weights are uniform, with the spread that keeps activations near 1."""
    chosen = chosen_device(device)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to_empty(device=chosen)
    generator = torch.Generator(chosen).manual_seed(0)
    with torch.no_grad():
        for parameter, tensor in model.named_parameters():
            if tensor.ndim == 2:
                tensor.uniform_(-1.0, 1.0, generator=generator).mul_((3.0 / tensor.shape[1]) ** 0.5)
            else:
                tensor.fill_(0.0 if parameter.endswith("bias") else 1.0)
    for module in model.modules():  # what the configuration says is computed anew: a model on no device has no values
        if hasattr(module, "inv_freq"):
            module.__init__(module.config)
            module.to(chosen)
    return model
