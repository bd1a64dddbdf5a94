"""Grow a trained checkpoint to serving size without changing its function.

Width: with every activation repeated `width` times side by side, each linear layer becomes `width × width` copies of its weight divided
by `width`; RMSNorm and LayerNorm see the same statistics, heads are repeated and keep their size, and the factor that tied output
embeddings gain is taken out of the last norm. Depth: appended layers are copies whose two output projections are zero, so they add
nothing to the residual. The text, and with it acceptance, is that of the trained model; a step costs what a large model costs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from echelon.errors import ConfigError, UnsupportedModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt")
LARGEST_HIDDEN = 2048  # `plan_growth` widens up to here, then deepens
WIDENED = ("hidden_size", "intermediate_size", "ffn_dim", "num_attention_heads", "num_key_value_heads")
RESIDUAL_OUTPUTS = ("o_proj", "down_proj", "out_proj", "fc2")


@dataclass(frozen=True)
class Growth:
    """Repeat activations `width` times (a power of two, so that division is exact) and have `num_layers` layers."""

    width: int
    num_layers: int


def plan_growth(model: PreTrainedModel, num_parameters: int) -> Growth:
    """The growth that reaches `num_parameters`: width first, up to a hidden size of 2,048, then layers."""
    config = model.config
    width = 1
    while 2 * width * config.hidden_size <= LARGEST_HIDDEN:
        width *= 2
    layer = sum(p.numel() for n, p in model.named_parameters() if _layer_of(n) == 0 and p.ndim == 2) * width**2
    outside = sum(p.numel() for n, p in model.named_parameters() if _layer_of(n) is None) * width
    missing = max(0, num_parameters - outside)
    return Growth(width, max(config.num_hidden_layers, -(-missing // layer)))


def inflate(model: PreTrainedModel, growth: Growth) -> PreTrainedModel:
    """A new model with the function of `model`, in its dtype.

    Raises
    ------
    UnsupportedModelError   the family is not one of `FAMILIES`, or has no identity layer (OPT with norms after the residual)
    ConfigError             the growth shrinks the model, or its width is no power of two
    """
    _check(model, growth)
    config = copy.deepcopy(model.config)
    for key in WIDENED:
        if key in config.to_dict():
            setattr(config, key, getattr(config, key) * growth.width)
    config.num_hidden_layers = growth.num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i % model.config.num_hidden_layers] for i in range(growth.num_layers)]
    if "head_dim" in config.to_dict():
        config.head_dim = model.config.hidden_size // model.config.num_attention_heads if config.head_dim is None else config.head_dim
    if model.config.model_type == "opt":  # the embedding width is a choice of its own there
        config.word_embed_proj_dim = model.config.word_embed_proj_dim * (1 if _is_projected(model) else growth.width)
    grown: PreTrainedModel = type(model).from_pretrained(None, config=config, state_dict=_grown_state(model, growth), dtype=model.dtype)
    grown.generation_config = copy.deepcopy(model.generation_config)
    return grown.eval()


def _check(model: PreTrainedModel, growth: Growth) -> None:
    kind, num_layers = model.config.model_type, model.config.num_hidden_layers
    if kind not in FAMILIES:
        raise UnsupportedModelError(f"inflate knows the families {', '.join(FAMILIES)}, not {kind!r}")
    if growth.width < 1 or growth.width & (growth.width - 1):
        raise ConfigError(f"width = {growth.width} is no power of two; dividing the weights by it would round")
    if growth.num_layers < num_layers:
        raise ConfigError(f"num_layers = {growth.num_layers} is less than the model's {num_layers}; inflate only adds")
    if growth.num_layers > num_layers and getattr(model.config, "do_layer_norm_before", True) is False:
        raise UnsupportedModelError("OPT with norms after the residual has no identity layer; grow its width only")


def _is_projected(model: PreTrainedModel) -> bool:
    return any("project_in" in name for name, _ in model.named_parameters())


def _layer_of(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else None


def _grown_state(model: PreTrainedModel, growth: Growth) -> dict[str, Tensor]:
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    state: dict[str, Tensor] = {}
    appended: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        grown = _grown(model, name, tensor, growth.width, tied)
        state[name] = grown
        layer = _layer_of(name)
        if layer is not None:
            appended.setdefault(layer, []).append((name, grown))
    for i in range(model.config.num_hidden_layers, growth.num_layers):
        source = i % model.config.num_hidden_layers
        for name, tensor in appended[source]:
            is_output = any(f".{part}." in name for part in RESIDUAL_OUTPUTS)
            state[name.replace(f"layers.{source}.", f"layers.{i}.")] = torch.zeros_like(tensor) if is_output else tensor.clone()
    return state


def _grown(model: PreTrainedModel, name: str, tensor: Tensor, width: int, tied: bool) -> Tensor:
    """One tensor of the wide model."""
    layer = _layer_of(name)
    if "embed_tokens" in name:
        return tensor if _is_projected(model) else tensor.repeat(1, width)
    if "embed_positions" in name:
        return tensor.repeat(1, width)
    if "lm_head" in name or "project_out" in name:
        return tensor.repeat(1, width) / width
    if "project_in" in name:
        return tensor.repeat(width, 1)
    if layer is None and tied:  # the last norm; the tied output embedding then sums `width` equal copies
        return tensor.repeat(width) / width
    if ".q_norm." in name or ".k_norm." in name:  # per head, and heads keep their size
        return tensor
    return tensor.repeat(width, width) / width if tensor.ndim == 2 else tensor.repeat(width)


def describe(model: Any) -> str:
    config = model.config
    count = sum(p.numel() for p in model.parameters())
    shape = f"hidden {config.hidden_size}, {config.num_hidden_layers} layers, {config.num_attention_heads} heads"
    return f"{count / 1e6:,.1f} M parameters, {shape}"
