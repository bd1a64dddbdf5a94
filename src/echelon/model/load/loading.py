"""Reading a causal language model from a folder or the hub: safetensors only, no code from the checkpoint, self-tested."""

from __future__ import annotations

import copy
import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
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
from echelon.checkpoint.quantization import Scheme, scheme_of
from echelon.checkpoint.schemas import GenerationSettings, ModelConfig, check_counts, refuse_own_code, refuse_quantised
from echelon.checkpoint.tensors import Weights, open_weights, weight_files
from echelon.config import check_settings
from echelon.errors import ConfigError, ModelLoadError, UnsupportedModelError
from echelon.inputs import check_kind, first_line, name_of, shown
from echelon.model.attention import IMPLEMENTATION
from echelon.model.load.published import check_published, with_published
from echelon.model.load.rounding import rounded_as_read
from echelon.model.load.selftest import self_test
from echelon.model.patches import PatchedForward
from echelon.model.patches.apply import patch_model
from echelon.model.patches.elementwise import patch_elementwise
from echelon.model.patches.linear import LINEAR, patch_linear
from echelon.model.patches.packing import Packing, check_integers, packing_of
from echelon.model.patches.rope import OriginalContext
from echelon.ops import devices

Params = ParamSpec("Params")
Loaded = TypeVar("Loaded")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
GENERATION = "generation_config.json"
TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template", "additional_chat_templates")
IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"
_LOADING = threading.RLock()


@dataclass(frozen=True)
class LoadedModel:
    """A self-tested model, its tokenizer if it has one, and where they came from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    replaced: dict[str, int]  # class → number of modules that run our operations
    original_context: OriginalContext | None  # where longer texts have rotary frequencies of their own
    is_fast: bool = False  # linear layers may round by the batch (`EngineConfig.numerics`)
    quantization: str | None = None  # the integers that linear layers have, rounded at load or published so

    @property
    def device(self) -> torch.device:
        """Device of its weights, and so of its cache and its logits."""
        return torch.device(self.model.device)

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def max_len(self) -> int:
        """The context, in tokens."""
        config = self.model.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or 2048)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a text, from the generation settings or the configuration."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        if ids is None:
            ids = getattr(self.model.config.get_text_config(), "eos_token_id", None)
        return frozenset([ids] if isinstance(ids, int) else ids or [])


def _in_turn(load: Callable[Params, Loaded]) -> Callable[Params, Loaded]:
    """One load at a time: `transformers` sets the default dtype of the whole process meanwhile, and twins are drawn with a seed."""

    @functools.wraps(load)
    def loading(*args: Params.args, **keywords: Params.kwargs) -> Loaded:
        with _LOADING:
            return load(*args, **keywords)

    return loading


@_in_turn
def load_model(
    name: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    device: str = "auto",
    numerics: str = "invariant",
    quantization: str | None = None,
) -> LoadedModel:
    """Load a causal language model once, for any number of engines: `LLM` takes the result in place of a name, as target or draft model,
    and all that are given it share one copy of the weights.

    Parameters
    ----------
    name          folder (also as a path) or hub name of a checkpoint in safetensors; no code from it runs
    dtype         "bfloat16", "float16" or "float32"; "auto": as stored
    device        "cpu" or "cuda"; "auto": CUDA where PyTorch sees a device
    numerics      "invariant": a row has the same bits in any batch; "fast": the vendor's linear layers on CUDA, for engines that are "fast"
    quantization  "int8" or "int4": linear layers and experts in integers, on the CPU, rounded one by one as they are read; None: as they
                  are, in integers too where the checkpoint has them so (compressed-tensors, GPTQ, AWQ)

    Raises
    ------
    ModelLoadError          the files are missing, unsafe, torn or do not fit the architecture
    UnsupportedModelError   the architecture cannot be batched exactly
    ConfigError             there is no such device, dtype, numerics or quantization, or no kernel for it
    """
    name = name_of(name)
    check_settings(dtype=dtype, device=device, numerics=numerics, quantization=quantization)
    chosen = devices.chosen_device(device)
    folder = Folder.locate(name, "model")
    raw = settings_of(folder)
    scheme = scheme_of(folder.shown, raw)
    if scheme is not None:
        _check_published(folder.shown, scheme, quantization, chosen)
    packing = packing_of(quantization if scheme is None else None, False, chosen)
    model, tokenizer = _read(folder, raw, dtype, IMPLEMENTATION, scheme, packing)
    model.config.name_or_path = name
    self_test(type(model), model.config, model.dtype)
    model.to(chosen).eval().requires_grad_(False)
    packing = replace(packing, is_fast=_is_fast(model, numerics))
    return _served(model, tokenizer, name, False, packing, True, scheme.quantization if scheme else quantization)


@_in_turn
def load_plain(name: str | os.PathLike[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """The model as transformers would run it, nothing replaced, and its tokenizer; the same refusals as `load_model`."""
    folder = Folder.locate(name_of(name), "model")
    raw = settings_of(folder)
    refuse_quantised(folder.shown, raw)
    model, tokenizer = _read(folder, raw, "auto", "sdpa")
    model.config.name_or_path = name_of(name)
    return model.eval().requires_grad_(False), tokenizer


@_in_turn
def adopt_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    name: str,
    keep_weights: bool = True,
    numerics: str = "invariant",
    quantization: str | None = None,
) -> LoadedModel:
    """Serve a model built in memory: self-tested and patched; `keep_weights` keeps its weights beside the packed ones. Settings as of
    `load_model`.
    """
    check_kind("model", model, PreTrainedModel)
    check_settings(numerics=numerics, quantization=quantization)
    _check_unpatched(model)
    self_test(type(model), model.config, model.dtype)
    model.set_attn_implementation(IMPLEMENTATION)
    model.eval().requires_grad_(False)
    packing = packing_of(quantization, _is_fast(model, numerics), next(model.parameters()).device)
    return _served(model, tokenizer, name, keep_weights, packing, False, quantization)


@_in_turn
def served_copy(model: PreTrainedModel) -> LoadedModel:
    """Copy a caller's model as the engine serves it; the copy shares its weights. The model itself stays as it is, at any time; linear
    layers of the copy read packed weights, which take as much memory again on a processor.

    Raises
    ------
    UnsupportedModelError  the architecture cannot be batched exactly, or the model cannot be copied
    """
    name = type(model).__name__
    _check_unpatched(model)
    self_test(type(model), model.config, model.dtype)
    try:
        copied = copy.deepcopy(model, _shared(model))
    except Exception as error:  # whatever a module holds
        raise UnsupportedModelError(f"{name} cannot be copied ({first_line(error)}); pass the model unpatched") from error
    copied.set_attn_implementation(IMPLEMENTATION)
    return _served(copied, None, name, True, Packing(), False, None)


def _shared(model: PreTrainedModel) -> dict[int, Any]:
    """What `deepcopy` shares, by identity: weights are shared, and forward hooks are called for the caller's own modules."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    for module in model.modules():
        for name, hooks in vars(module).items():
            if name in ("_forward_hooks", "_forward_pre_hooks"):
                called = {key: functools.partial(_call_hook, hook, module) for key, hook in hooks.items()}
                shared[id(hooks)] = OrderedDict(called)
            elif name.endswith("_hooks") and not name.startswith("_forward"):  # of gradients and state dictionaries
                shared[id(hooks)] = OrderedDict()
    return shared


def _call_hook(hook: Callable[..., Any], module: nn.Module, _copied: nn.Module, *seen: Any) -> Any:
    return hook(module, *seen)


def _check_unpatched(model: PreTrainedModel) -> None:
    if any("forward" in vars(m) and not isinstance(m.forward, PatchedForward) for m in model.modules() if isinstance(m, LINEAR)):
        raise UnsupportedModelError(f"a linear layer of {type(model).__name__} has a forward of its own already; pass the model unpatched")


def serve_head(head: nn.Module, is_fast: bool = False, quantization: str | None = None) -> None:
    """Patch a head with our operations; weights stay beside the packed ones, since heads read some of them."""
    with torch.inference_mode():
        patch_elementwise(head)
    patch_linear(head, True, packing_of(quantization, is_fast, next(head.parameters()).device))


def _served(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    name: str,
    keep_weights: bool,
    packing: Packing,
    in_place: bool,
    quantization: str | None,
) -> LoadedModel:
    """Patch the model with our operations; `in_place`: nobody else has its weights, so packed ones may take their memory."""
    replaced, original_context = patch_model(model, keep_weights, packing, in_place)
    return LoadedModel(model, tokenizer, name, replaced, original_context, packing.is_fast, quantization)


def _is_fast(model: PreTrainedModel, numerics: str) -> bool:
    return numerics == "fast" and devices.by_triton(next(model.parameters()))


def _check_published(name: str, scheme: Scheme, quantization: str | None, device: torch.device) -> None:
    """Raise ConfigError where a checkpoint in integers is wanted otherwise, or nothing here multiplies them."""
    if quantization not in (None, scheme.quantization):
        raise ConfigError(f"quantization = {quantization!r} is wanted, and {name} is published in {scheme.bits} bits; leave it out")
    check_integers(f"{name}, which is published in {scheme.bits} bits,", "use the checkpoint in bfloat16", device)


def _read(
    folder: Folder, raw: dict[str, Any], dtype: str, attention: str, scheme: Scheme | None = None, packing: Packing | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A model and its tokenizer, read into memory of their own; nothing of what they are made of changes with the files any more.

    Weights that `scheme` describes are packed as they are published, and others as `packing` has it where it rounds them.
    """
    with open_weights(folder, weight_files(folder)) as stored:
        weights = stored if scheme is None else with_published(stored, scheme)
        check_counts(folder.shown, raw, len(weights.tensors), weights.largest_dimension)
        tokenizer = _read_tokenizer(folder)
        config = read_config(folder)
        cls = type(built_without_memory(folder, config, weights))
        rounding = rounded_as_read(packing, config.get_text_config().vocab_size) if packing and packing.bits else nullcontext()
        with rounding:
            model = _read_weights(cls, config, dtype, attention, weights)
    if scheme is not None:
        check_published(model, folder.shown)
    return model, tokenizer


def settings_of(folder: Folder) -> dict[str, Any]:
    """Read config.json, refusing what could not be served in any form."""
    if not folder.has("config.json"):
        raise ModelLoadError(f"{folder.shown} holds no config.json; point to the folder that `save_pretrained` wrote")
    raw = folder.read_json("config.json")
    refuse_own_code(folder.shown, raw)
    folder.read_as("config.json", ModelConfig)
    return raw


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


def _read_weights(cls: type[PreTrainedModel], config: Any, dtype: str, attention: str, weights: Weights) -> PreTrainedModel:
    """A model of `cls` filled from `weights`, one tensor after the other."""
    folder = weights.folder
    wanted = DTYPES.get(dtype) or getattr(config, "dtype", None) or weights.first_float()
    if wanted not in DTYPES.values():
        raise UnsupportedModelError(f"{folder.shown} is stored in {wanted}; served are {', '.join(DTYPES)}: pass dtype=")
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
    before = os.environ.get(IN_TURN)
    os.environ[IN_TURN] = "1"
    try:
        yield
    finally:
        os.environ.pop(IN_TURN) if before is None else os.environ.update({IN_TURN: before})


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


def _check_weights(name: str, info: dict[str, Any], files: dict[str, str]) -> None:
    """Refuse a checkpoint with missing or surplus tensors."""
    for key, what in (("missing_keys", "lacks"), ("unexpected_keys", "has surplus")):
        if names := sorted(str(n) for n in info.get(key) or ()):
            listed = ", ".join(f"{shown(n, quote=False)} ({files[n]})" if n in files else shown(n, quote=False) for n in names[:5])
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ModelLoadError(f"the checkpoint {name} {what} tensors: {listed}{more}; it does not fit its config.json")


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


def check_vocabularies(target: LoadedModel, draft: LoadedModel) -> None:
    """Refuse a draft model that does not mean the same by every token id; how far the two vocabularies are padded does not matter.

    Raises
    ------
    ConfigError  they differ, with the first token that does, or cannot be compared for lack of a tokenizer
    """
    if target.tokenizer is None or draft.tokenizer is None:
        if target.vocab_size != draft.vocab_size:
            raise ConfigError(
                f"the draft model {draft.name!r} has {draft.vocab_size:,} tokens, the target {target.vocab_size:,}, and without both "
                "tokenizers they cannot be compared; a draft model must share the target's vocabulary"
            )
        return
    pieces = [{i: piece for piece, i in m.tokenizer.get_vocab().items()} for m in (target, draft) if m.tokenizer is not None]
    for token in sorted(pieces[0].keys() | pieces[1].keys()):
        ours, theirs = (p.get(token) for p in pieces)
        if ours != theirs:
            raise ConfigError(
                f"token {token} is {theirs!r} in the draft model {draft.name!r} and {ours!r} in the target; "
                "a draft model must share the target's vocabulary"
            )
