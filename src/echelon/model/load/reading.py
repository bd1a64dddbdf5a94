"""From the folder of a checkpoint to a model of transformers: safetensors only, no code from it, each file checked before it is used."""

from __future__ import annotations

import copy
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from echelon.checkpoint.build import without_memory
from echelon.checkpoint.folder import Folder, refusing
from echelon.checkpoint.quantization import Scheme
from echelon.checkpoint.schemas import GenerationSettings, ModelConfig, check_counts, refuse_own_code
from echelon.checkpoint.tensors import Weights, open_weights, weight_files
from echelon.errors import ModelLoadError, UnsupportedModelError
from echelon.inputs import shown
from echelon.model.load.published import check_published, with_published, without_empty_biases
from echelon.model.load.rounding import rounded_as_read
from echelon.model.patches.linear import routers_of
from echelon.model.patches.packing import Packing
from echelon.model.patches.split import Cutter, Share
from echelon.model.patches.stages import Stage

Params = ParamSpec("Params")
Loaded = TypeVar("Loaded")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
GENERATION = "generation_config.json"
TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template", "additional_chat_templates")
NO_ASYNC_LOAD = "HF_DEACTIVATE_ASYNC_LOAD"
_LOADING = threading.RLock()


def in_turn(load: Callable[Params, Loaded]) -> Callable[Params, Loaded]:
    """One load at a time: `transformers` sets the default dtype of the whole process meanwhile, and twins are drawn with a seed."""

    @functools.wraps(load)
    def loading(*args: Params.args, **keywords: Params.kwargs) -> Loaded:
        with _LOADING:
            return load(*args, **keywords)

    return loading


def settings_of(folder: Folder) -> dict[str, Any]:
    """Read config.json, refusing what could not be served in any form."""
    if not folder.has("config.json"):
        raise ModelLoadError(f"{folder.shown} holds no config.json; point to the folder that `save_pretrained` wrote")
    raw = folder.read_json("config.json")
    refuse_own_code(folder.shown, raw)
    folder.read_as("config.json", ModelConfig)
    return raw


def read_model(
    folder: Folder,
    raw: dict[str, Any],
    dtype: str,
    attention: str | None,
    scheme: Scheme | None = None,
    packing: Packing | None = None,
    part: Share | Stage | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A model and its tokenizer, read into memory of their own; nothing of what they are made of changes with the files any more. Without
    `attention` it is what transformers chooses for the model.

    Weights that `scheme` describes are packed as they are published, and others as `packing` has it where it rounds them. With a share as
    `part` only a rank's own rows of linear layers are read, and the others hold anything; with a stage, its layers alone.
    """
    with open_weights(folder, weight_files(folder)) as stored:
        weights = stored if scheme is None else with_published(stored, scheme)
        check_counts(folder.shown, raw, len(weights.tensors), weights.largest_dimension)
        tokenizer = _read_tokenizer(folder)
        config = read_config(folder)
        built = built_without_memory(folder, config, weights)
        if scheme is not None:
            weights = without_empty_biases(weights, built)
        cls, wanted = type(built), served_dtype(folder, config, weights, dtype)
        if isinstance(part, Stage):
            config, weights = part.part(config, weights)
        elif part is not None:
            weights = _own_rows(weights, built, part)
        later = {config.get_text_config().vocab_size, *(router.weight.shape[0] for router in routers_of(built))}
        rounding = rounded_as_read(packing, frozenset(later)) if packing and packing.bits else nullcontext()
        with rounding:
            model = _read_weights(cls, config, wanted, attention, weights)
    if scheme is not None:
        check_published(model, folder.shown)
    return model, tokenizer


def served_dtype(folder: Folder, config: Any, weights: Weights, dtype: str) -> torch.dtype:
    """What a checkpoint is served in where `dtype` is asked for.

    Raises
    ------
    UnsupportedModelError  "auto" is, and it is stored in another
    """
    wanted = DTYPES.get(dtype) or getattr(config, "dtype", None) or weights.first_float()
    if wanted is None or wanted not in DTYPES.values():
        raise UnsupportedModelError(f"{folder.shown} is stored in {wanted}; served are {', '.join(DTYPES)}: pass dtype=")
    return wanted


def _own_rows(weights: Weights, model: PreTrainedModel, share: Share) -> Weights:
    """The same tensors, of which those that a rank has some rows of read these alone, where the file has them under the model's names."""
    cutter, prefix = Cutter.of(type(model), model.config, share), f"{model.base_model_prefix}."
    tensors = dict(weights.tensors)
    for key, tensor in weights.tensors.items():
        layer, _, _ = key.removeprefix(prefix).rpartition(".")
        if tensor.shape and (part := cutter.columns(layer, tensor.shape[0])) is not None:
            tensors[key] = replace(tensor, rows=(part.first, part.last))
    return Weights(weights.folder, tensors)


def _read_tokenizer(folder: Folder) -> PreTrainedTokenizerBase | None:
    files = [p.name for p in folder.path.iterdir() if p.name.startswith(TOKENIZER_FILES)]
    if not any(name.startswith(("tokenizer", "vocab")) for name in files):
        return None
    for name in files:
        if (folder.path / name).is_dir():
            continue
        if name.endswith(".json") and name != "tokenizer.json":  # its own reader bounds that
            folder.read_json(name)
        else:
            folder.file(name)
    with refusing(f"cannot read the tokenizer of {folder.shown}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder.path), trust_remote_code=False)
    return tokenizer


def read_config(folder: Folder) -> Any:
    """The configuration of transformers, without what it says of integers.

    Raises
    ------
    ModelLoadError         transformers makes nothing of it
    UnsupportedModelError  it wants to run code of its own
    """
    with refusing(f"cannot read the configuration of {folder.shown}"):
        config = AutoConfig.from_pretrained(str(folder.path), trust_remote_code=False)
    if hasattr(config, "auto_map"):
        raise UnsupportedModelError(f"{folder.shown} wants to run its own code (auto_map in config.json), which echelon never does")
    vars(config).pop("quantization_config", None)  # what it describes is packed by the time that transformers sees it
    return config


def built_without_memory(folder: Folder, config: Any, weights: Weights) -> PreTrainedModel:
    """The model that `config` describes, whose tensors have been seen to be those of the files.

    Raises
    ------
    ModelLoadError, UnsupportedModelError  there is no such model, or it has other tensors
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"{type(config).__name__} of {folder.shown} is no causal language model of transformers")
    with refusing(f"cannot build the model of {folder.shown}", "config.json does not fit it: copy the checkpoint again"):
        with _LOADING, without_memory(len(weights.tensors), weights.numel):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    misshapen = [
        f"{t.file.name}: tensor {shown(key, quote=False)} has shape {list(t.shape)}, and config.json asks for {list(expected[key])}"
        for key, t in weights.tensors.items()
        if key in expected and t.shape != expected[key]
    ]
    if misshapen:
        raise ModelLoadError(f"cannot load {folder.shown}: {'; '.join(misshapen[:5])}")
    return model


def _read_weights(cls: type[PreTrainedModel], config: Any, wanted: torch.dtype, attention: str | None, weights: Weights) -> PreTrainedModel:
    """A model of `cls` filled from `weights`, one tensor after the other."""
    folder = weights.folder
    text_only = not isinstance(config, cls.config_class) and isinstance(config.get_text_config(), cls.config_class)
    with refusing(f"cannot load {folder.shown}"), _one_at_a_time():
        model, info = cls.from_pretrained(
            None,
            config=config.get_text_config() if text_only else config,
            state_dict=weights.tensors,
            dtype=wanted,
            attn_implementation=attention,
            output_loading_info=True,
        )
    _check_weights(folder.shown, info, {key: t.file.name for key, t in weights.tensors.items()})
    _read_generation(folder, model)
    return model


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Tensors are read when they are wanted, so that those which a model merges are not all held beside what they become.

    `transformers` has this as a variable of the environment.
    """
    before = os.environ.get(NO_ASYNC_LOAD)
    os.environ[NO_ASYNC_LOAD] = "1"
    try:
        yield
    finally:
        os.environ.pop(NO_ASYNC_LOAD) if before is None else os.environ.update({NO_ASYNC_LOAD: before})


def _check_weights(name: str, info: dict[str, Any], files: dict[str, str]) -> None:
    """Refuse a checkpoint with missing or surplus tensors."""
    for key, what in (("missing_keys", "lacks"), ("unexpected_keys", "has surplus")):
        if names := sorted(str(n) for n in info.get(key) or ()):
            listed = ", ".join(f"{shown(n, quote=False)} ({files[n]})" if n in files else shown(n, quote=False) for n in names[:5])
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ModelLoadError(f"the checkpoint {name} {what} tensors: {listed}{more}; it does not fit its config.json")


def _read_generation(folder: Folder, model: PreTrainedModel) -> None:
    """Read the generation settings beside the model, as `from_pretrained` does."""
    if not model.can_generate():
        return
    beside = folder.has(GENERATION)
    if beside:
        folder.read_as(GENERATION, GenerationSettings)
    with refusing(f"cannot read the generation settings of {folder.shown}"):
        source = {} if beside else {"config_file_name": "config.json", "_from_model_config": True}
        model.generation_config = GenerationConfig.from_pretrained(str(folder.path), **source)
