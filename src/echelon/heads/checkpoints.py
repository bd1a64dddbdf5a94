"""Heads on disk: published layouts in, `speculators` and our own out; safetensors only."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedModel

from echelon.checkpoint.build import without_memory
from echelon.checkpoint.folder import PICKLED, Folder, refusing
from echelon.checkpoint.schemas import check_counts, refuse_quantised
from echelon.checkpoint.tensors import open_weights
from echelon.errors import ConfigError, ModelLoadError, UnknownHeadError, UnsupportedModelError
from echelon.heads.base import Head
from echelon.heads.eagle import EagleHead
from echelon.heads.eagle3 import Eagle3Head
from echelon.heads.layouts import Tensors, parse
from echelon.heads.parts import Output, Shared, head_config
from echelon.inputs import check_kind, name_of, shown
from echelon.methods import head_class, method_names

# copies of the target's own weights, and what its authors' modules happened to save besides
NOT_OF_THE_HEAD = {"embed_tokens.weight", "rotary_emb.inv_freq"}
LAYER_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
)


def shared_parts(target: PreTrainedModel) -> Shared:
    """Borrow from the target what a head calls; works for a served model whose weights are packed.

    Raises
    ------
    UnsupportedModelError  the target's embedding is narrower than its layers
    """
    embed, hidden = target.get_input_embeddings(), target.config.get_text_config().hidden_size
    if getattr(embed, "embedding_dim", hidden) != hidden:
        raise UnsupportedModelError(
            f"the embedding of {type(target).__name__} has {embed.embedding_dim} entries a token and its layers {hidden}; "
            "heads need one width"
        )
    text = target.config.get_text_config()
    scaling = getattr(text, "logits_scaling", None) or 1.0
    factor = getattr(text, "logit_scale", None) or (scaling if text.model_type == "hyperclovax" else 1.0 / scaling)
    return Shared(embed, Output(target.get_output_embeddings(), factor, getattr(text, "final_logit_softcapping", None)))


def build_head(method: str, target: PreTrainedModel, **options: Any) -> Head:
    """Build a head for `target` as its paper begins training, float32.

    Raises
    ------
    ConfigError            no such method, or no such option of it
    UnsupportedModelError  no head fits this target
    """
    if method not in (heads := method_names(needs="head")):
        raise ConfigError(f"there is no head {method!r}; known: {', '.join(heads)}")
    cls, config = head_class(method), head_config(target.config)
    options = cls.default_options(target) | options
    try:
        chosen = cls.options_class(**options)
    except TypeError:
        known = ", ".join(cls.options_class.__dataclass_fields__)
        raise ConfigError(f"{method} knows the options {known}, not all of {', '.join(options)}") from None
    head: Head = cls(config, shared_parts(target), chosen)
    return head


def load_head(name: str | os.PathLike[str], target: PreTrainedModel, dtype: torch.dtype | None = None) -> Head:
    """Load the head in `name`, a folder or a hub name, for `target`, in `dtype` or the target's.

    Raises
    ------
    ModelLoadError  files are missing or pickled, the layout is unknown, tensors are missing, surplus or mis-shaped, or the head belongs to
                    another target
    ConfigError     `name` is no name, `target` no model, `dtype` none of PyTorch's
    """
    name = name_of(name, "head")
    check_kind("target", target, PreTrainedModel)
    check_kind("dtype", dtype, (torch.dtype, type(None)))
    folder = Folder.locate(name, "head", needs_owner=True)
    dtype = dtype or target.dtype
    raw, tensors = folder.read_json("config.json"), _read_tensors(folder, dtype)
    numel, dimension = sum(t.numel() for t in tensors.values()), max((max(t.shape, default=1) for t in tensors.values()), default=1)
    check_counts(folder.shown, raw, len(tensors), dimension)
    with refusing(f"cannot read the head {folder.shown}", "its config.json does not fit its tensors: copy the checkpoint again"):
        try:
            method, config, options, tensors = parse(name, raw, tensors, target)
        except UnknownHeadError:
            raise  # a draft model may be in integers
        except ModelLoadError:
            refuse_quantised(folder.shown, raw)
            raise
        refuse_quantised(folder.shown, raw)
        _check_target(name, config, tensors, target)
        chosen = TypeAdapter(head_class(method).options_class).validate_python(options)
        with without_memory(len(tensors), numel):
            head: Head = head_class(method)(config, shared_parts(target), chosen)
        _fill(name, head, {k: t for k, t in tensors.items() if k not in NOT_OF_THE_HEAD})
        head.check(name)
    return head.to(target.device, dtype).eval().requires_grad_(False)


def save_head(head: Any, folder: Path, target: PreTrainedModel, num_speculative_tokens: int = 5) -> None:
    """Write `head`, made for `target`, to `folder` in the target's dtype: EAGLE-3 as `speculators`, EAGLE as its authors have it, others in
    our layout.
    """
    config = WRITERS.get(head.method, _own_layout)(head, _layer_dict(head.config), target, num_speculative_tokens)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_tensors(head, target.dtype), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _tensors(head: Any, dtype: torch.dtype) -> Tensors:
    """Tensors to save, in `dtype`. `d2t` and `t2d` of a head that drafts every token are left out, since vLLM refuses them."""
    drafts_all = head.draft_ids is not None and len(head.draft_ids) == head.config.vocab_size
    tensors = {k: t.detach() for k, t in head.state_dict().items() if not (drafts_all and k in ("d2t", "t2d"))}
    return {k: (t.to(dtype) if t.is_floating_point() else t).contiguous() for k, t in tensors.items()}


def _layer_dict(config: LlamaConfig) -> dict[str, Any]:
    """The layer's configuration, with `rope_theta` where older readers look for it."""
    values = {key: getattr(config, key) for key in LAYER_KEYS}
    return {**values, "model_type": "llama", "rope_theta": config.rope_parameters["rope_theta"]}


def _own_layout(head: Any, layer: dict[str, Any], _: PreTrainedModel, __: int) -> dict[str, Any]:
    return {"echelon_head": head.method, "options": asdict(head.options), "transformer_layer_config": layer}


def _eagle_layout(head: EagleHead, layer: dict[str, Any], _: PreTrainedModel, __: int) -> dict[str, Any]:
    return layer | {"architectures": ["LlamaForCausalLM"], "bias": head.options.bias}


def _speculators_layout(head: Eagle3Head, layer: dict[str, Any], target: PreTrainedModel, num_tokens: int) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": target.config._name_or_path, "architectures": [type(target).__name__]}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": head.options.draft_vocab_size,
        "norm_before_residual": head.options.norm_before_residual,
        "target_hidden_size": head.config.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(head.options.depths),
        "embed_requires_grad": False,
    }


# method → config.json of a head, from its layer's configuration, the target and num_speculative_tokens; others have our own layout
WRITERS: dict[str, Callable[[Any, dict[str, Any], PreTrainedModel, int], dict[str, Any]]] = {
    "eagle": _eagle_layout,
    "eagle3": _speculators_layout,
}


def _read_tensors(folder: Folder, dtype: torch.dtype) -> Tensors:
    """Read all tensors of the folder, those of floating point in `dtype`, without prefixes that say nothing."""
    folder.fetch_weights(["*.safetensors"])
    files = sorted(path.name for path in folder.path.glob("*.safetensors"))
    if not files:
        pickled = sorted(p.name for pattern in PICKLED for p in folder.path.glob(pattern))
        remedy = (
            f"only pickled weights ({', '.join(pickled)}); run `echelon convert {folder.path} OUT` once"
            if pickled
            else "no weights; copy model.safetensors there"
        )
        raise ModelLoadError(f"the head in {folder.path} holds {remedy}")
    with open_weights(folder, files) as weights:
        return {bare_name(k): t.read(dtype if t.dtype.is_floating_point else None) for k, t in weights.tensors.items()}


def bare_name(name: str) -> str:
    """A tensor's name without what authors put before it."""
    return re.sub(r"^midlayer\.", "layers.0.", re.sub(r"^(model\.)?(medusa_heads\.)?", "", name))


def _check_target(name: str, config: LlamaConfig, tensors: Tensors, target: PreTrainedModel) -> None:
    """Refuse a head that was made for another target: same sizes, and where it brings a copy of the embedding, the same rows."""
    text = target.config.get_text_config()
    for key, what in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary")):
        if getattr(config, key) != getattr(text, key):
            raise ModelLoadError(
                f"the head {name!r} has {what} {getattr(config, key):,} and the target {getattr(text, key):,}; "
                "use a head trained for this target"
            )
    if (rows := tensors.get("embed_tokens.weight")) is None:
        return
    some = torch.linspace(0, len(rows) - 1, min(64, len(rows))).long()
    embed: Any = target.get_input_embeddings()
    ours = embed(some[some < text.vocab_size].to(target.device)).cpu().float() / float(getattr(embed, "embed_scale", 1.0))
    if rows.shape != (text.vocab_size, text.hidden_size) or not torch.allclose(rows[some].float(), ours, rtol=0.02, atol=1e-3):
        raise ModelLoadError(
            f"embed_tokens.weight {list(rows.shape)} of the head {name!r} is not the target's embedding; use a head trained for this target"
        )


def _fill(name: str, head: Head, tensors: Tensors) -> None:
    """Fill `head` with `tensors`; refuse those that are missing, surplus or mis-shaped."""
    own = head.state_dict()
    for what, names in (("lacks tensors", own.keys() - tensors.keys()), ("has surplus tensors", tensors.keys() - own.keys())):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ModelLoadError(
                f"the {head.method} head {name!r} {what}: {shown(', '.join(sorted(names)[:5]), quote=False)}{more}; "
                "it does not fit its config.json"
            )
    for key, tensor in tensors.items():
        if tensor.shape != own[key].shape:
            raise ModelLoadError(
                f"tensor {key} of the {head.method} head {name!r} has shape {list(tensor.shape)}; the target and config.json ask for "
                f"{list(own[key].shape)}"
            )
        if tensor.is_floating_point() != own[key].is_floating_point():
            raise ModelLoadError(
                f"tensor {key} of the {head.method} head {name!r} is stored in {str(tensor.dtype).removeprefix('torch.')}, and the head "
                f"has {str(own[key].dtype).removeprefix('torch.')} there; use the checkpoint in the form it was trained in"
            )
    whole = {k: t if t.is_floating_point() else t.to(own[k].dtype) for k, t in tensors.items()}
    head.load_state_dict(whole, assign=True)
