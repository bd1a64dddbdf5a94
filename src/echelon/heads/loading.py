"""Heads on disk: published layouts in, `speculators` and our own out; safetensors only.

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

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from echelon.errors import ConfigError, ModelLoadError
from echelon.heads.base import Head
from echelon.heads.clover import CloverHead
from echelon.heads.clover2 import Clover2Head
from echelon.heads.eagle import EagleHead
from echelon.heads.eagle3 import Eagle3Head, default_depths
from echelon.heads.medusa import MedusaHead
from echelon.heads.parts import Shared, head_config

HEADS: dict[str, Any] = {head.method: head for head in (MedusaHead, CloverHead, Clover2Head, EagleHead, Eagle3Head)}
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
PREFIXES = ("model.", "medusa_heads.")
# copies of the target's own weights, and what its authors' modules happened to save besides
NOT_OF_THE_HEAD = {"embed_tokens.weight", "rotary_emb.inv_freq"}
ONCE_LLAMA = ("rope_theta", "rope_scaling")
Tensors = dict[str, Tensor]
Parsed = tuple[str, LlamaConfig, dict[str, Any], Tensors]


def shared_parts(target: PreTrainedModel) -> Shared:
    """What a head borrows, by call; works for a served model whose weights are packed."""
    return Shared(target.get_input_embeddings(), target.get_output_embeddings())


def build_head(method: str, target: PreTrainedModel, **options: Any) -> Head:
    """A head for `target` as its paper begins training, float32.

    Raises
    ------
    ConfigError  no such method, or no such option of it
    """
    if method not in HEADS:
        raise ConfigError(f"there is no head {method!r}; known: {', '.join(HEADS)}")
    cls, config = HEADS[method], head_config(target.config)
    text = target.config.get_text_config()
    if method == "eagle3":
        options = {"depths": default_depths(text.num_hidden_layers), "draft_vocab_size": min(config.vocab_size, 32000)} | options
    if method in ("clover", "clover2"):
        options = {"own_rows": not text.tie_word_embeddings} | options
    try:
        chosen = cls.options_class(**options)
    except TypeError:
        known = ", ".join(cls.options_class.__dataclass_fields__)
        raise ConfigError(f"{method} knows the options {known}, not all of {', '.join(options)}") from None
    head: Head = cls(config, shared_parts(target), chosen)
    return head


def load_head(name: str, target: PreTrainedModel, dtype: torch.dtype | None = None) -> Head:
    """The head in `name`, a folder or a hub name, for `target`; in the target's dtype unless another is given.

    Raises
    ------
    ModelLoadError  files are missing or pickled, the layout is unknown, tensors are missing, surplus or mis-shaped, or the head belongs to
                    another target
    """
    folder = _folder(name)
    raw, tensors = _read_config(folder), _read_tensors(folder)
    method, config, options, tensors = _parse(name, raw, tensors, target)
    _check_target(name, config, tensors, target)
    head: Head = HEADS[method](config, shared_parts(target), HEADS[method].options_class(**options))
    _fill(name, head, {k: t for k, t in tensors.items() if k not in NOT_OF_THE_HEAD})
    if isinstance(head, Eagle3Head):
        _check_vocabulary(name, head)
    return head.to(dtype or target.dtype).eval().requires_grad_(False)


def save_head(head: Any, folder: Path, target: PreTrainedModel, num_speculative_tokens: int = 5) -> None:
    """Write `head`, made for `target`, to `folder`: EAGLE-3 as `speculators`, EAGLE as its authors have it, others in our layout."""
    layer = _layer_dict(head.config)
    if isinstance(head, Eagle3Head):
        config = _speculators(head, layer, target, num_speculative_tokens)
    elif isinstance(head, EagleHead):
        config = layer | {"architectures": ["LlamaForCausalLM"], "bias": head.options.bias}
    else:
        config = {"echelon_head": head.method, "options": asdict(head.options), "transformer_layer_config": layer}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: t.detach().contiguous() for k, t in head.state_dict().items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _layer_dict(config: LlamaConfig) -> dict[str, Any]:
    """The layer's configuration, with `rope_theta` where older readers look for it."""
    values = {k: v for k, v in config.to_dict().items() if v is not None and k not in ("transformers_version", "architectures")}
    return {**values, "model_type": "llama", "rope_theta": config.rope_parameters["rope_theta"]}


def _speculators(head: Eagle3Head, layer: dict[str, Any], target: PreTrainedModel, num_tokens: int) -> dict[str, Any]:
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


def _folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ModelLoadError(f"head folder {name!r} does not exist; give a folder with config.json, or a hub name such as 'org/head'")
    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "*.safetensors"]))
    except Exception as error:  # the hub's own errors share no base
        raise ModelLoadError(f"cannot fetch the head {name!r}: {error}") from error


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        raw = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{folder}/config.json cannot be read ({error}); a head needs its configuration beside its weights") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{folder}/config.json holds no settings; copy the checkpoint again")
    return raw


def _read_tensors(folder: Path) -> Tensors:
    """All tensors of the folder, without prefixes that say nothing."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(p.name for pattern in PICKLED for p in folder.glob(pattern))
        remedy = f"only pickled weights ({', '.join(pickled)}); run `echelon convert {folder} OUT` once" if pickled else "no weights"
        raise ModelLoadError(f"the head in {folder} holds {remedy}")
    tensors: Tensors = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file} is torn: {error}; copy it again") from error
    return {_bare(k): t for k, t in tensors.items()}


def _bare(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return re.sub(r"^midlayer\.", "layers.0.", name)


def _parse(name: str, raw: dict[str, Any], tensors: Tensors, target: PreTrainedModel) -> Parsed:
    """Which layout this is, and what it says."""
    for is_it, read in LAYOUTS:
        if is_it(raw, tensors):
            return read(name, raw, tensors, target)
    raise ModelLoadError(
        f"{name!r} is no head that is known: config.json has {', '.join(list(raw)[:5])}…, tensors are {', '.join(sorted(tensors)[:5])}…; "
        "known are Medusa, Clover-2, EAGLE-1 to 3, `speculators` of kind eagle3, and what `echelon train` writes"
    )


def _own(name: str, raw: dict[str, Any], tensors: Tensors, _: PreTrainedModel) -> Parsed:
    method = raw["echelon_head"]
    if method not in HEADS:
        raise ModelLoadError(f"{name!r} holds a head {method!r}; known: {', '.join(HEADS)}")
    known = HEADS[method].options_class.__dataclass_fields__
    options = raw.get("options") or {}
    if surplus := sorted(set(options) - set(known)):
        raise ModelLoadError(f"config.json of {name!r} sets {', '.join(surplus)}, which {method} does not know; it has {', '.join(known)}")
    return method, _llama(name, raw.get("transformer_layer_config") or {}), options, tensors


def _speculators_layout(name: str, raw: dict[str, Any], tensors: Tensors, target: PreTrainedModel) -> Parsed:
    kind = raw["speculators_model_type"]
    if kind != "eagle3":
        raise ModelLoadError(f"{name!r} is a speculators head of kind {kind!r}; of that layout only eagle3 is known")
    # vLLM takes a missing `norm_before_residual` for true in this layout
    depths = raw.get("eagle_aux_hidden_state_layer_ids")
    config = _llama(name, raw.get("transformer_layer_config") or {})
    return _eagle3(name, raw, config, depths, bool(raw.get("norm_before_residual", True)), tensors, target)


def _eagle3_layout(name: str, raw: dict[str, Any], tensors: Tensors, target: PreTrainedModel) -> Parsed:
    nested = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    # here a layer's id means its output, above it means its input
    depths = [i + 1 for i in nested] if nested else raw.get("eagle_aux_hidden_state_layer_ids")
    return _eagle3(name, raw, _llama(name, raw), depths, bool(raw.get("norm_before_residual", False)), tensors, target)


def _eagle3(
    name: str, raw: dict[str, Any], config: LlamaConfig, depths: list[int] | None, residual: bool, tensors: Tensors, target: PreTrainedModel
) -> Parsed:
    for key in ("fc_norm", "norm_output", "norm_before_fc", "embed_requires_grad", "parallel_drafting"):
        if raw.get(key):
            raise ModelLoadError(f"config.json of {name!r} sets {key} = {raw[key]!r}, which this EAGLE-3 head does not have")
    num_layers = target.config.get_text_config().num_hidden_layers
    chosen = tuple(depths or default_depths(num_layers))
    if len(chosen) != 3 or any(not 0 <= i < num_layers for i in chosen):
        raise ModelLoadError(f"{name!r} reads the inputs of layers {list(chosen)}; it needs three of the target's {num_layers}")
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
    return "eagle", _llama(name, raw), {"bias": "fc.bias" in tensors}, tensors


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
    """One decoder layer's configuration; what is not Llama's own is left to the layout."""
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
        raise ModelLoadError(f"config.json of {name!r} does not describe a layer of Llama: {error}") from error


def _check_target(name: str, config: LlamaConfig, tensors: Tensors, target: PreTrainedModel) -> None:
    """The head was made for this target: same sizes, and where it brings a copy of the embedding, the same rows."""
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
    ours = target.get_input_embeddings()(some[some < text.vocab_size].to(target.device)).cpu().float()
    if rows.shape != (text.vocab_size, text.hidden_size) or not torch.allclose(rows[some].float(), ours, rtol=0.02, atol=1e-3):
        raise ModelLoadError(
            f"embed_tokens.weight {list(rows.shape)} of the head {name!r} is not the target's embedding; use a head trained for this target"
        )


def _fill(name: str, head: Head, tensors: Tensors) -> None:
    """Every tensor of the architecture comes from the checkpoint, in its shape, and every one of the checkpoint has a place."""
    own = head.state_dict()
    for what, names in (("lacks tensors", own.keys() - tensors.keys()), ("has surplus tensors", tensors.keys() - own.keys())):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ModelLoadError(
                f"the {head.method} head {name!r} {what}: {', '.join(sorted(names)[:5])}{more}; it does not fit its config.json"
            )
    for key, tensor in tensors.items():
        if tensor.shape != own[key].shape:
            raise ModelLoadError(
                f"tensor {key} of the {head.method} head {name!r} has shape {list(tensor.shape)}; the target and config.json ask for "
                f"{list(own[key].shape)}"
            )
    with torch.no_grad():
        for key, tensor in tensors.items():
            own[key].copy_(tensor)


def _check_vocabulary(name: str, head: Eagle3Head) -> None:
    ids = head.draft_ids
    is_sound = bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < head.config.vocab_size
    if not is_sound or int(head.t2d.sum()) != len(ids) or not bool(head.t2d[ids].all()):
        raise ModelLoadError(
            f"d2t and t2d of the head {name!r} contradict each other: i + d2t[i] must rise, and t2d must mark the same tokens"
        )
