"""Heads on disk: what published layouts say.

layout                                  | known by                                          | becomes
----------------------------------------|---------------------------------------------------|----------------
ours: `config.json` names method, sizes | `echelon_head`                                    | any
vLLM `speculators`                      | `speculators_model_type`                          | eagle3
Clover-2                                | `clover`                                          | clover2
Medusa (`echelon convert`)              | tensors `0.0.linear.weight`                       | medusa
EAGLE-3, SpecForge                      | tensors `midlayer.*` or `d2t`                     | eagle3
EAGLE-1 and 2                           | tensor `fc.weight` [d, 2d]                        | eagle

Counts are read off the tensors, never off a configuration: published ones are known to be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from echelon.errors import ModelLoadError, UnknownHeadError
from echelon.heads.eagle3 import default_depths
from echelon.heads.parts import head_config
from echelon.inputs import first_line, shown
from echelon.methods import head_class, method_names

ONCE_LLAMA = ("rope_theta", "rope_scaling")
Tensors = dict[str, Tensor]
Parsed = tuple[str, LlamaConfig, dict[str, Any], Tensors]  # method, its layer, its options, its tensors by our names


def parse(name: str, raw: dict[str, Any], tensors: Tensors, target: PreTrainedModel) -> Parsed:
    """Recognise the layout of a checkpoint and read it.

    Raises
    ------
    UnknownHeadError  none that is known
    ModelLoadError    one that contradicts itself
    """
    for is_it, read in LAYOUTS:
        if is_it(raw, tensors):
            return read(name, raw, tensors, target)
    raise UnknownHeadError(
        f"{name!r} is no head that is known: config.json has {shown(', '.join(list(raw)[:5]), quote=False)}…, "
        f"tensors are {shown(', '.join(sorted(tensors)[:5]), quote=False)}…; "
        "known are Medusa, Clover-2, EAGLE-1 to 3, `speculators` of kind eagle3, and what `echelon train` writes"
    )


def _own(name: str, raw: dict[str, Any], tensors: Tensors, _: PreTrainedModel) -> Parsed:
    method = raw["echelon_head"]
    if method not in (heads := method_names(needs="head")):
        raise ModelLoadError(f"{name!r} holds a head {shown(str(method))}; known: {', '.join(heads)}")
    known = head_class(method).options_class.__dataclass_fields__
    options = raw.get("options") or {}
    if surplus := sorted(set(options) - set(known)):
        raise ModelLoadError(
            f"config.json of {name!r} sets {shown(', '.join(surplus), quote=False)}, which {method} does not know; "
            f"it has {', '.join(known)}"
        )
    return method, _llama(name, raw.get("transformer_layer_config") or {}), options, tensors


def _speculators_layout(name: str, raw: dict[str, Any], tensors: Tensors, target: PreTrainedModel) -> Parsed:
    kind = raw["speculators_model_type"]
    if kind != "eagle3":
        raise ModelLoadError(f"{name!r} is a speculators head of kind {shown(str(kind))}; of that layout only eagle3 is known")
    # vLLM takes a missing `norm_before_residual` for true in this layout
    depths = raw.get("eagle_aux_hidden_state_layer_ids")
    config = _llama(name, raw.get("transformer_layer_config") or {})
    return _eagle3(name, raw, config, depths, bool(raw.get("norm_before_residual", True)), tensors, target)


def _eagle3_layout(name: str, raw: dict[str, Any], tensors: Tensors, target: PreTrainedModel) -> Parsed:
    nested = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    # Here a layer's id means its output where the first is 1, and its input elsewhere, as above: SGLang's rule (its pull request 25454)
    depths = [i + (nested[0] == 1) for i in nested] if nested else raw.get("eagle_aux_hidden_state_layer_ids")
    return _eagle3(name, raw, _llama(name, raw), depths, bool(raw.get("norm_before_residual", False)), tensors, target)


def _eagle3(
    name: str, raw: dict[str, Any], config: LlamaConfig, depths: list[int] | None, residual: bool, tensors: Tensors, target: PreTrainedModel
) -> Parsed:
    for key in ("fc_norm", "norm_output", "norm_before_fc", "embed_requires_grad", "parallel_drafting"):
        if raw.get(key):
            raise ModelLoadError(
                f"config.json of {name!r} sets {key} = {shown(str(raw[key]), quote=False)}, "
                "which this EAGLE-3 head does not have; use a head without it"
            )
    num_layers = target.config.get_text_config().num_hidden_layers
    chosen = tuple(depths or default_depths(num_layers))
    if len(chosen) != 3 or any(not 0 <= i < num_layers for i in chosen):
        raise ModelLoadError(
            f"{name!r} reads the inputs of layers {shown(str(list(chosen)), quote=False)}; it needs three of the target's {num_layers}"
        )
    tensors = _with_vocabulary(name, config, tensors)
    options = {"depths": chosen, "draft_vocab_size": len(tensors["d2t"]), "norm_before_residual": residual}
    return "eagle3", config, options, tensors


def _with_vocabulary(name: str, config: LlamaConfig, tensors: Tensors) -> Tensors:
    """`d2t` and `t2d` filled in where they follow from the rest."""
    if "lm_head.weight" not in tensors:
        raise ModelLoadError(f"the head {name!r} lacks tensors: lm_head.weight")
    tensors = dict(tensors)
    if "d2t" not in tensors:
        if len(tensors["lm_head.weight"]) != config.vocab_size:
            raise ModelLoadError(f"the head {name!r} lacks tensors: d2t; its output layer has {len(tensors['lm_head.weight']):,} tokens")
        tensors["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
    if "t2d" not in tensors:
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        tensors["t2d"] = torch.isin(torch.arange(config.vocab_size), ids)
    return tensors


def _clover2_layout(name: str, raw: dict[str, Any], tensors: Tensors, _: PreTrainedModel) -> Parsed:
    layers = {int(m[1]) for k in tensors if (m := re.match(r"layers\.(\d+)\.", k))}
    options = {"num_layers": len(layers), "own_rows": "clover_embed_tokens.weight" in tensors}
    return "clover2", _llama(name, raw), options, {k: t for k, t in tensors.items() if k != "lm_head.weight"}


def _medusa_layout(_: str, __: dict[str, Any], tensors: Tensors, target: PreTrainedModel) -> Parsed:
    """`{i}.{j}.linear.*` are blocks, `{i}.{number of blocks}.weight` an output layer."""
    heads = {int(k.split(".")[0]) for k in tensors if re.match(r"\d+\.", k)}
    blocks = {int(k.split(".")[1]) for k in tensors if re.match(r"\d+\.\d+\.linear\.weight", k)}
    options = {"num_heads": len(heads), "num_layers": len(blocks), "own_output": any(re.fullmatch(r"\d+\.\d+\.weight", k) for k in tensors)}
    renamed = {re.sub(r"^(\d+)\.\d+\.weight$", r"outputs.\1.weight", k): t for k, t in tensors.items()}
    renamed = {re.sub(r"^(\d+\.\d+\.linear\.)", r"blocks.\1", k): t for k, t in renamed.items()}
    return "medusa", head_config(target.config), options, renamed


def _eagle_layout(name: str, raw: dict[str, Any], tensors: Tensors, _: PreTrainedModel) -> Parsed:
    """The authors' layer may have biases on query, key and value alone (`qkv_bias`)."""
    config, queries, output = _llama(name, raw), "layers.0.self_attn.q_proj.bias", "layers.0.self_attn.o_proj.bias"
    if queries in tensors and output not in tensors:
        config.attention_bias = True
        tensors = tensors | {output: tensors[queries].new_zeros(config.hidden_size)}
    return "eagle", config, {"bias": "fc.bias" in tensors}, tensors


def _is_wide(tensors: Tensors) -> bool:
    fc = tensors.get("fc.weight")
    return fc is not None and fc.ndim == 2 and fc.shape[1] == 2 * fc.shape[0]


LAYOUTS: list[tuple[Callable[[dict[str, Any], Tensors], bool], Callable[[str, dict[str, Any], Tensors, PreTrainedModel], Parsed]]] = [
    (lambda raw, _: "echelon_head" in raw, _own),
    (lambda raw, _: "speculators_model_type" in raw, _speculators_layout),
    (lambda raw, _: "clover" in raw, _clover2_layout),
    (lambda _, tensors: "0.0.linear.weight" in tensors, _medusa_layout),
    (lambda _, tensors: "d2t" in tensors or "layers.0.hidden_norm.weight" in tensors, _eagle3_layout),
    (lambda _, tensors: _is_wide(tensors), _eagle_layout),
]


def _llama(name: str, raw: dict[str, Any]) -> LlamaConfig:
    """Read one decoder layer's configuration; keys that Llama lacks are left to the layout."""
    known = {*LlamaConfig().to_dict(), *ONCE_LLAMA} - {"architectures", "model_type", "transformers_version", "dtype"}
    values = {k: v for k, v in raw.items() if k in known and v is not None}
    for key in ("hidden_size", "vocab_size", "num_attention_heads"):
        if key not in values:
            raise ModelLoadError(f"config.json of {name!r} does not say {key}; it needs the shape of the head's layer")
    if "rope_parameters" in values:
        values = {k: v for k, v in values.items() if k not in ONCE_LLAMA}
    try:
        return LlamaConfig(**{**values, "num_hidden_layers": 1})
    except (TypeError, ValueError, KeyError) as error:
        raise ModelLoadError(f"config.json of {name!r} does not describe a layer of Llama: {first_line(error)}") from error
