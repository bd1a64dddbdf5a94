"""Every argument of `generate` and every field of `GenerationConfig`: what this package makes of it.

Each name stands in exactly one of three tables: honoured, refused unless it has one of the values named, or irrelevant, with the reason.
A field that a later `transformers` adds is in none, and refused as soon as it is set.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from echelon.errors import ConfigError, RequestError, UnsupportedModelError


class Allowed(NamedTuple):
    """Values that ask for nothing, of an argument that is not served otherwise, and what to do instead."""

    values: tuple[Any, ...]
    remedy: str


BEAMS = "beams are searched by model.generate alone: leave it out"
DRAFTS = "what drafts is said by assistant_model, prompt_lookup_num_tokens or speculative_config: leave it out"
INSIDE = "the engine's passes keep neither: leave it out, or call model.generate"

HONOURED_ARGUMENTS = frozenset(
    [
        "inputs",
        "generation_config",
        "logits_processor",
        "stopping_criteria",
        "prefix_allowed_tokens_fn",
        "assistant_model",
        "streamer",
        "negative_prompt_ids",
        "negative_prompt_attention_mask",
        "tokenizer",
        "kwargs",
    ]
)
REFUSED_ARGUMENTS = {
    "synced_gpus": Allowed((None, False), "the engine runs on one device: leave it out"),
    "custom_generate": Allowed((None,), "echelon.hf is the custom method already: leave it out"),
    "assistant_tokenizer": Allowed((None,), "an assistant must share the model's vocabulary: leave it out"),
    "trust_remote_code": Allowed((None, False), "no code from a checkpoint is run: leave it out"),
}

HONOURED_INPUTS = frozenset(["input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "past_key_values"])

HONOURED_FIELDS = frozenset(
    [
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "max_time",
        "stop_strings",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "repetition_penalty",
        "encoder_repetition_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "renormalize_logits",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "sequence_bias",
        "guidance_scale",
        "watermarking_config",
        "num_return_sequences",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
        "num_assistant_tokens",
    ]
)
REFUSED_FIELDS = {
    "num_beams": Allowed((None, 1), BEAMS),
    "num_beam_groups": Allowed((None, 1), BEAMS),
    "constraints": Allowed((None,), BEAMS),
    "force_words_ids": Allowed((None,), BEAMS),
    "penalty_alpha": Allowed((None, 0.0), "there is no contrastive search here: leave it out"),
    "dola_layers": Allowed((None,), "there is no contrast of layers here: leave it out"),
    "output_attentions": Allowed((None, False), INSIDE),
    "output_hidden_states": Allowed((None, False), INSIDE),
    "token_healing": Allowed((None, False), "call model.heal_tokens on the prompts first, and leave it out"),
    "cache_implementation": Allowed(
        (None, "dynamic", "static", "sliding_window", "hybrid", "hybrid_chunked"),
        "keys and values lie in the engine's own blocks, whole and on the model's device: leave it out",
    ),
    "cache_config": Allowed((None,), "keys and values lie in the engine's own blocks: leave it out"),
    "use_mtp": Allowed((None, False), DRAFTS),
    "assistant_early_exit": Allowed((None,), DRAFTS),
    "speculation_type": Allowed((None,), DRAFTS),
    "is_assistant": Allowed((None, False), DRAFTS),
    "assistant_lookbehind": Allowed((None, 10), DRAFTS),
    "target_lookbehind": Allowed((None, 10), DRAFTS),
    "assistant_ensemble_weight": Allowed((None,), "it changes the text; speculative_config={'acceptance': 'typical'} is another such rule"),
    "num_assistant_tokens_schedule": Allowed((None, "constant"), "drafts have num_assistant_tokens tokens: leave it out"),
    "assistant_confidence_threshold": Allowed(
        (None, 0, 0.4), "confidence_threshold in speculative_config judges the whole draft instead: leave it out"
    ),
}
IRRELEVANT_FIELDS = {
    "early_stopping": "of beams alone, which are refused",
    "length_penalty": "of beams alone, which are refused",
    "diversity_penalty": "of groups of beams alone, which are refused",
    "low_memory": "of contrastive search alone, which is refused",
    "decoder_start_token_id": "of encoder-decoder models alone, which are refused",
    "use_cache": "the text is the same; keys and values are always kept",
    "max_cache_len": "the size of a static cache, and the engine has its own",
    "prefill_chunk_size": "the text is the same; prompts are always read in pieces",
    "compile_config": "the text is the same; the engine compiles no forward pass",
    "disable_compile": "the text is the same; the engine compiles no forward pass",
    "continuous_batching_config": "of generate_batch alone",
    "transformers_version": "who wrote the configuration",
    "_from_model_config": "who wrote the configuration",
}


def check_model(model: Any) -> None:
    """Raise `ConfigError` or `UnsupportedModelError` unless this is a decoder that is ready to generate."""
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"model is a {type(model).__name__}; echelon.hf takes a loaded transformers model")
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model, and echelon.hf serves decoders alone; call model.generate")
    if any(module.training for module in model.modules()):
        raise ConfigError(f"{name} is in training mode, where dropout changes the text; call model.eval() first")


def check_arguments(model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
    """Raise `RequestError` for an argument of `generate` that is refused, or has the wrong type, before `generate` acts on it."""
    config = arguments.get("generation_config")
    _check_type("generation_config", config, GenerationConfig)
    for name in ("logits_processor", "stopping_criteria"):
        _check_type(name, arguments.get(name), list)
    _refuse(arguments, REFUSED_ARGUMENTS)
    set_by_configs = [{name: value for name, value in vars(c).items() if value is not None} for c in (model.generation_config, config) if c]
    _refuse(dict(ChainMap(dict(arguments), *reversed(set_by_configs))), REFUSED_FIELDS)
    if arguments.get("past_key_values") is not None:
        raise RequestError("past_key_values would stay as they are, since keys and values lie in the engine's blocks; leave it out")
    ids, mask = arguments.get("inputs"), arguments.get("attention_mask")
    ids = arguments.get("input_ids") if ids is None else ids
    _check_matrix("input_ids", ids)
    _check_matrix("attention_mask", mask)
    if ids is not None and (ids.is_floating_point() or ids.dtype == torch.bool):
        raise RequestError(f"input_ids has dtype {ids.dtype}; token ids are integers")
    if ids is not None and mask is not None and ids.shape != mask.shape:
        raise RequestError(f"attention_mask {list(mask.shape)} must have 0 or 1 for each of input_ids {list(ids.shape)}")


def _check_type(name: str, value: Any, wanted: type) -> None:
    if value is not None and not isinstance(value, wanted):
        raise RequestError(f"{name} is a {type(value).__name__}; it must be a {wanted.__name__}")


def _check_matrix(name: str, value: Any) -> None:
    if value is not None and not (isinstance(value, Tensor) and value.ndim == 2 and value.numel() and not value.is_complex()):
        found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise RequestError(f"{name} has {found}; it must be a tensor [rows, tokens] that is not empty")


def check_fields(generation: GenerationConfig) -> None:
    """Raise `RequestError` for a field of `GenerationConfig` that is refused, or that no table knows."""
    values = {name: getattr(generation, name, None) for name in vars(GenerationConfig())}
    _refuse(values, REFUSED_FIELDS)
    known = HONOURED_FIELDS | REFUSED_FIELDS.keys() | IRRELEVANT_FIELDS.keys()
    if unknown := [name for name, value in values.items() if name not in known and value is not None]:
        raise RequestError(f"{unknown[0]} = {values[unknown[0]]!r} is a field that echelon.hf does not know; leave it out")


def _refuse(values: Mapping[str, Any], refusals: Mapping[str, Allowed]) -> None:
    for name, refusal in refusals.items():
        value = values.get(name)
        if not any(value is allowed or (type(value) is not Tensor and value == allowed) for allowed in refusal.values):
            raise RequestError(f"{name} = {value!r} is not available with echelon.hf: {refusal.remedy}")


def checked_mask(model: PreTrainedModel, input_ids: Tensor, inputs: Mapping[str, Any], width: int) -> Tensor:
    """bool [B, n]: which of `input_ids` are tokens of the text. `width`: the longest that a row may become, padding included.

    Raises
    ------
    RequestError  an input that the engine would not see: unknown, or positions that are not counted from the first token of each row
    """
    if unknown := [name for name, value in inputs.items() if value is not None and name not in HONOURED_INPUTS]:
        raise RequestError(f"{unknown[0]} is not available with echelon.hf, which feeds token ids alone; leave it out")
    cache = inputs.get("past_key_values")
    if cache is not None and (cache.get_seq_length() > 0 or getattr(cache, "_is_user_defined", False)):
        raise RequestError("past_key_values are not available with echelon.hf; pass the whole text as input_ids")
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    if mask.shape != input_ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
        raise RequestError(f"attention_mask {list(mask.shape)} must have 0 or 1 for each of input_ids {list(input_ids.shape)}")
    kept = mask.bool()
    _check_positions(inputs.get("position_ids"), kept)
    _check_holes(model, kept, width)
    return kept


def _check_positions(positions: Any, kept: Tensor) -> None:
    """[B, n], [1, n], or several of them one on another."""
    if positions is None:
        return
    counted, given = kept.long().cumsum(-1) - 1, None
    if isinstance(positions, Tensor) and positions.ndim >= 2 and positions.shape[-2:] in (kept.shape, (1, kept.shape[-1])):
        given = positions.to(kept.device).expand(*positions.shape[:-2], *kept.shape)
    if given is None or not bool((given == counted)[..., kept].all()):
        raise RequestError("position_ids that do not count each row's tokens from 0 are not available with echelon.hf; leave it out")


def _check_holes(model: PreTrainedModel, kept: Tensor, width: int) -> None:
    """The framework's windows count tokens that the mask takes out of the middle; ours are not fed with them."""
    config = model.config.get_text_config()
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    has_hole = bool((kept[:, 1:] < kept[:, :-1]).any())
    if has_hole and any(window is not None and window < width for window in windows):
        raise RequestError(
            f"attention_mask masks tokens after a row's first, which the windows of {type(model).__name__} count; pad on the left alone"
        )
