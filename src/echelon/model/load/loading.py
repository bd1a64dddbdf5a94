"""Models as engines run them: read from a folder or the hub, adopted from memory or copied, then self-tested and patched."""

from __future__ import annotations

import copy
import functools
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel, PreTrainedTokenizerBase

from echelon.checkpoint.facts import context_of
from echelon.checkpoint.folder import Folder
from echelon.checkpoint.quantization import Scheme, scheme_of
from echelon.checkpoint.schemas import refuse_quantised
from echelon.config import check_settings
from echelon.errors import ConfigError, UnsupportedModelError
from echelon.inputs import check_kind, first_line, name_of
from echelon.model.attention import IMPLEMENTATION
from echelon.model.load.reading import in_turn, read_config, read_model, settings_of
from echelon.model.load.selftest import self_test
from echelon.model.patches import PatchedForward
from echelon.model.patches.apply import patch_model
from echelon.model.patches.elementwise import patch_elementwise
from echelon.model.patches.linear import LINEAR, patch_linear
from echelon.model.patches.packing import Packing, check_integers, packing_of
from echelon.model.patches.rope import OriginalContext
from echelon.model.patches.split import Share, check_split, plan_of
from echelon.model.patches.stages import Stage, check_stages
from echelon.model.patches.vectors import patch_sensitive
from echelon.ops import devices


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
    stage: Stage | None = None  # where other ranks have some of the layers

    @property
    def device(self) -> torch.device:
        """Device of its weights, and so of its cache and its logits."""
        return torch.device(self.model.device)

    @functools.cached_property
    def vocab_size(self) -> int:
        """Width of a row of logits."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def max_len(self) -> int:
        """The context, in tokens."""
        return context_of(self.model.config)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a text, from the generation settings or the configuration, as far as they can be drawn."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        if ids is None:
            ids = getattr(self.model.config.get_text_config(), "eos_token_id", None)
        return frozenset(t for t in ([ids] if isinstance(ids, int) else ids or []) if 0 <= t < self.vocab_size)


@in_turn
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
    dtype         "bfloat16", "float16" or "float32", or PyTorch's own; "auto": as stored
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
    dtype = check_settings(dtype=dtype, device=device, numerics=numerics, quantization=quantization).dtype
    chosen = devices.chosen_device(device)
    folder = Folder.locate(name, "model")
    raw = settings_of(folder)
    scheme = scheme_of(folder.shown, raw)
    if scheme is not None:
        _check_published(folder.shown, scheme, quantization, chosen)
    packing = packing_of(quantization if scheme is None else None, False, chosen)
    model, tokenizer = read_model(folder, raw, dtype, IMPLEMENTATION, scheme, packing)
    model.config.name_or_path = name
    self_test(type(model), model.config, model.dtype)
    model.to(chosen).eval().requires_grad_(False)
    packing = replace(packing, is_fast=_is_fast(model, numerics))
    return _served(model, tokenizer, name, False, packing, True, scheme.quantization if scheme else quantization)


def check_ranks(name: str, size: int, are_stages: bool) -> None:
    """Raise where a checkpoint cannot be split among so many ranks, by columns or in stages; only its configuration is read.

    Raises
    ------
    ConfigError, ModelLoadError, UnsupportedModelError
    """
    folder = Folder.locate(name, "model")
    scheme = scheme_of(folder.shown, settings_of(folder))
    if scheme is not None:
        raise ConfigError(f"{folder.shown} is published in {scheme.bits} bits, which is served by one rank; use the checkpoint in bfloat16")
    config = read_config(folder)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), type(config))
    if are_stages:
        check_stages(cls, config, name, size)
    else:
        plan_of(cls, config)
        check_split(config, name, size)


@in_turn
def load_share(name: str, share: Share, dtype: str, quantization: str | None) -> LoadedModel:
    """Load one rank's share of a checkpoint that `check_ranks` has passed, on the CPU; otherwise as `load_model`. It is cut before it is
    rounded and packed; rank 0 tests it for all.
    """
    folder, packing = Folder.locate(name, "model"), packing_of(quantization, False, torch.device("cpu"))
    model, tokenizer = read_model(folder, settings_of(folder), dtype, IMPLEMENTATION, part=share)
    model.config.name_or_path = name
    if share.rank == 0:
        self_test(type(model), model.config, model.dtype)
    return _served(model.eval().requires_grad_(False), tokenizer, name, False, packing, True, quantization, share)


@in_turn
def load_stage(name: str, stage: Stage, dtype: str, quantization: str | None) -> LoadedModel:
    """Load one rank's layers of a checkpoint that `check_ranks` has passed, on the CPU; otherwise as `load_model`. Rank 0 tests it for
    all.
    """
    folder, packing = Folder.locate(name, "model"), packing_of(quantization, False, torch.device("cpu"))
    model, tokenizer = read_model(folder, settings_of(folder), dtype, IMPLEMENTATION, packing=packing, part=stage)
    model.config.name_or_path = name
    if stage.rank == 0:
        self_test(type(model), model.config, model.dtype)
    stage.enter(model)
    loaded = _served(model.eval().requires_grad_(False), tokenizer, name, False, packing, True, quantization)
    stage.connect(model)
    return replace(loaded, stage=stage)


@in_turn
def load_plain(name: str | os.PathLike[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """The model as transformers would run it, nothing replaced, and its tokenizer; the same refusals as `load_model`."""
    folder = Folder.locate(name_of(name), "model")
    raw = settings_of(folder)
    refuse_quantised(folder.shown, raw)
    model, tokenizer = read_model(folder, raw, "auto", None)
    model.config.name_or_path = name_of(name)
    return model.eval().requires_grad_(False), tokenizer


@in_turn
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
    with devices.current(model.device):
        return _served(model, tokenizer, name, keep_weights, packing, False, quantization)


@in_turn
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
    with devices.current(copied.device):
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
    patch_sensitive(head)


def _served(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    name: str,
    keep_weights: bool,
    packing: Packing,
    in_place: bool,
    quantization: str | None,
    share: Share | None = None,
) -> LoadedModel:
    """Patch the model with our operations; `in_place`: nobody else has its weights, so packed ones may take their memory. With `share` it
    is cut to that first.
    """
    replaced, original_context = patch_model(model, keep_weights, packing, in_place, share)
    return LoadedModel(model, tokenizer, name, replaced, original_context, packing.is_fast, quantization)


def _is_fast(model: PreTrainedModel, numerics: str) -> bool:
    return numerics == "fast" and devices.by_triton(next(model.parameters()))


def _check_published(name: str, scheme: Scheme, quantization: str | None, device: torch.device) -> None:
    """Raise ConfigError where a checkpoint in integers is wanted otherwise, or nothing here multiplies them."""
    if quantization not in (None, scheme.quantization):
        raise ConfigError(f"quantization = {quantization!r} is wanted, and {name} is published in {scheme.bits} bits; leave it out")
    check_integers(f"{name}, which is published in {scheme.bits} bits,", "use the checkpoint in bfloat16", device)


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
