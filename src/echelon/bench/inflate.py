"""Grow a trained checkpoint to serving size without changing its function.

Width: with every activation repeated `width` times side by side, each linear layer becomes `width × width` copies of its weight divided
by `width`; RMSNorm and LayerNorm see the same statistics, heads are repeated and keep their size, and the factor that tied output
embeddings gain is taken out of the last norm. Depth: appended layers are copies whose two output projections are zero, so they add
nothing to the residual. The text, and with it acceptance, is that of the trained model; a step costs what a large model costs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from echelon.errors import ConfigError, UnsupportedModelError
from echelon.heads.base import Head
from echelon.heads.checkpoints import load_head, save_head, shared_parts
from echelon.heads.clover import CloverHead

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt")
LARGEST_HIDDEN = 2048  # `plan_growth` widens up to here, then deepens
WIDENED = {"hidden_size", "intermediate_size", "ffn_dim", "num_attention_heads", "num_key_value_heads"}
TABLES = ("rows", "clover_embed_tokens.weight")  # of a head: a row a token
HEAD_OUTPUTS = ("lm_head.", "outputs.")  # of a head: logits
RESIDUAL_OUTPUTS = ("o_proj", "down_proj", "out_proj", "fc2")


@dataclass(frozen=True)
class Inflation:
    """Repeat activations `width` times (a power of two, so that division is exact) and have `num_layers` layers."""

    width: int
    num_layers: int


def plan_growth(model: PreTrainedModel, num_parameters: int) -> Inflation:
    """The growth that reaches `num_parameters`: width first, up to a hidden size of 2,048, then layers.

    Raises
    ------
    UnsupportedModelError  the family is not one of `FAMILIES`
    """
    _check_family(model)
    config = model.config
    width = 1
    while 2 * width * config.hidden_size <= LARGEST_HIDDEN:
        width *= 2
    layer = sum(p.numel() for n, p in model.named_parameters() if _layer_of(n) == 0 and p.ndim == 2) * width**2
    outside = sum(p.numel() for n, p in model.named_parameters() if _layer_of(n) is None) * width
    missing = max(0, num_parameters - outside)
    return Inflation(width, max(config.num_hidden_layers, -(-missing // layer)))


def inflate(model: PreTrainedModel, growth: Inflation) -> PreTrainedModel:
    """A new model with the function of `model`, in its dtype.

    Raises
    ------
    UnsupportedModelError   the family is not one of `FAMILIES`, or has no identity layer (OPT with norms after the residual)
    ConfigError             the growth shrinks the model, or its width is no power of two
    """
    _check(model, growth)
    config = _widened(model.config, growth.width)
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


def _widened(config: Any, width: int) -> Any:
    config = copy.deepcopy(config)
    for key in WIDENED & config.to_dict().keys():
        setattr(config, key, getattr(config, key) * width)
    return config


def _check_family(model: PreTrainedModel) -> None:
    if model.config.model_type not in FAMILIES:
        raise UnsupportedModelError(f"inflate knows the families {', '.join(FAMILIES)}, not {model.config.model_type!r}")


def _check(model: PreTrainedModel, growth: Inflation) -> None:
    _check_family(model)
    num_layers = model.config.num_hidden_layers
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


def _grown_state(model: PreTrainedModel, growth: Inflation) -> dict[str, Tensor]:
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    own = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    state = {name: _grown(model, name, tensor, growth.width, tied) for name, tensor in own.items()}
    for i in range(model.config.num_hidden_layers, growth.num_layers):
        source = i % model.config.num_hidden_layers
        for name in own:
            if _layer_of(name) == source:
                is_output = any(f".{part}." in name for part in RESIDUAL_OUTPUTS)
                copied = torch.zeros_like(state[name]) if is_output else state[name].clone()
                state[name.replace(f"layers.{source}.", f"layers.{i}.")] = copied
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


def untied(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose output layer holds weights of its own: grown, its last hidden state is that of the original, repeated."""
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    state = model.state_dict() | {"lm_head.weight": model.get_output_embeddings().weight.detach().clone()}
    out: PreTrainedModel = type(model).from_pretrained(None, config=config, state_dict=state, dtype=model.dtype)
    out.generation_config = copy.deepcopy(model.generation_config)
    return out.eval()


def inflate_head(head: Any, target: PreTrainedModel, width: int) -> Head:
    """A new head with the function of `head`, which was made for a model whose growth by `width` is `target`, an untied one.

    Raises
    ------
    ConfigError   the target ties its output layer to its embedding, so its last hidden state is scaled
    """
    if target.config.tie_word_embeddings:
        raise ConfigError("heads grow beside a target with an output layer of its own; untie it before it is grown")
    grown: Head = type(head)(_widened(head.config, width), shared_parts(target), head.options)
    state = {name: _grown_head(name, tensor, width, head.config.hidden_size) for name, tensor in head.state_dict().items()}
    if isinstance(head, CloverHead) and head.options.regressive:
        _undo_normalisation(state, width)
    grown.load_state_dict(state)
    return grown.to(next(head.parameters()).dtype).eval().requires_grad_(False)


def inflate_with_heads(
    model: PreTrainedModel, num_parameters: int, heads: Mapping[str, str], folder: Path
) -> tuple[PreTrainedModel, dict[str, str]]:
    """`model`, untied and grown to this size (0: as it is), and where below `folder` its heads lie that were grown beside it, by name.

    `heads`: the folder of each, trained for `model`.
    """
    own = untied(model)
    growth = plan_growth(own, num_parameters) if num_parameters else Inflation(1, own.config.num_hidden_layers)
    grown = inflate(own, growth)
    folders = {name: folder / name for name in heads}
    for name, trained in heads.items():
        save_head(inflate_head(load_head(trained, own), grown, growth.width), folders[name], grown)
    return grown, {name: str(path) for name, path in folders.items()}


def _grown_head(name: str, tensor: Tensor, width: int, hidden: int) -> Tensor:
    """One tensor of a wide head; an input that is several hidden states side by side has each of them repeated."""
    if name in ("d2t", "t2d"):
        return tensor
    if tensor.ndim == 1:
        return tensor.repeat(width)
    if name in TABLES:
        return tensor.repeat(1, width)
    joined = tensor.shape[1] // hidden if not any(f".{part}." in name for part in RESIDUAL_OUTPUTS) else 1
    columns = torch.cat([part.repeat(1, width) for part in tensor.chunk(joined, 1)], 1) / width
    return columns if name.startswith(HEAD_OUTPUTS) else columns.repeat(width, 1)


def _undo_normalisation(state: dict[str, Tensor], width: int) -> None:
    """Clover's cell reads rows of length 1; repeated and then normalised they are shorter by the root of `width`."""
    for name in ("cell.k.weight", "cell.v.weight"):
        if name in state:
            state[name] *= width**0.5
    if "cell.linear.weight" in state:
        state["cell.linear.weight"].chunk(2, 1)[1].mul_(width**0.5)


def describe(model: Any) -> str:
    config = model.config
    count = sum(p.numel() for p in model.parameters())
    shape = f"hidden {config.hidden_size}, {config.num_hidden_layers} layers, {config.num_attention_heads} heads"
    return f"{count / 1e6:,.1f} M parameters, {shape}"
