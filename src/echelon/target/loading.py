"""Reading a causal language model from a folder or the hub: safetensors only, no code from the checkpoint, self-tested."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from echelon.errors import ConfigError, ModelLoadError, UnsupportedModelError
from echelon.ops import devices
from echelon.target.attention import IMPLEMENTATION
from echelon.target.flat import flatten, restore_flat
from echelon.target.fused import fuse, restore_fused
from echelon.target.layers import LINEAR, replace_layers, restore_layers
from echelon.target.rope import OriginalContext, replace_rope, restore_rope
from echelon.target.selftest import self_test
from echelon.target.vectors import fill_vectors, restore_vectors
from echelon.target.weights import Served

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class LoadedModel:
    """A self-tested model, its tokenizer if it has one, and where they came from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    replaced: dict[str, int]  # class → number of modules that run our operations
    original_context: OriginalContext | None  # where longer texts have rotary frequencies of their own
    is_fast: bool = False  # linear layers may round by the batch (`EngineConfig.numerics`)

    @property
    def device(self) -> torch.device:
        """Where its weights are, and so its cache and its logits."""
        device: torch.device = self.model.device
        return device

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
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        if ids is None:
            ids = getattr(self.model.config.get_text_config(), "eos_token_id", None)
        return frozenset([ids] if isinstance(ids, int) else ids or [])


def load_model(name: str, dtype: str = "auto", device: str = "cpu", numerics: str = "invariant") -> LoadedModel:
    """Load `name`, a folder or a hub name, to a device, with numerics, as in `EngineConfig`.

    Raises
    ------
    ModelLoadError          the files are missing, unsafe, torn or do not fit the architecture
    UnsupportedModelError   the architecture cannot be batched exactly
    ConfigError             there is no such device
    """
    chosen = devices.chosen_device(device)
    _check_folder(name)
    config = _read_config(name)
    model, info = _read_weights(name, config, dtype)
    _check_weights(name, info)
    self_test(type(model), model.config, model.dtype)
    model.to(chosen).eval().requires_grad_(False)
    return _served(model, _read_tokenizer(name), name, keep_weights=False, numerics=numerics)


def load_plain(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """The model as transformers would run it, nothing replaced, and its tokenizer; the same refusals as `load_model`."""
    _check_folder(name)
    model, info = _read_weights(name, _read_config(name), "auto", attention="sdpa")
    _check_weights(name, info)
    return model.eval().requires_grad_(False), _read_tokenizer(name)


def adopt_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    name: str,
    keep_weights: bool = True,
    numerics: str = "invariant",
) -> LoadedModel:
    """A model built in memory is served: self-tested, attention and layers replaced; its weights stay beside the packed ones if asked."""
    _check_unpatched(model)
    self_test(type(model), model.config, model.dtype)
    model.set_attn_implementation(IMPLEMENTATION)
    model.eval().requires_grad_(False)
    return _served(model, tokenizer, name, keep_weights, numerics)


@contextmanager
def borrowed(model: PreTrainedModel) -> Iterator[LoadedModel]:
    """A model that belongs to the caller, served for a while and given back as it was."""
    _check_unpatched(model)
    self_test(type(model), model.config, model.dtype)
    before = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield _served(model, None, type(model).__name__, True, "invariant")
    finally:
        restore_vectors(model)
        restore_flat(model)
        restore_rope(model)
        restore_fused(model)
        restore_layers(model)
        model.set_attn_implementation(before)


def _check_unpatched(model: PreTrainedModel) -> None:
    if any("forward" in vars(m) and not isinstance(m.forward, Served) for m in model.modules() if isinstance(m, LINEAR)):
        raise UnsupportedModelError(f"a linear layer of {type(model).__name__} has a forward of its own already; pass the model unpatched")


def serve_head(head: nn.Module, is_fast: bool = False) -> None:
    """Our operations in the place of a head's own; weights stay beside the packed ones, since heads read some of them."""
    with torch.inference_mode():
        fuse(head)
    replace_layers(head, True, is_fast)


def _served(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str, keep_weights: bool, numerics: str) -> LoadedModel:
    """Our operations in the place of the model's own."""
    is_fast = numerics == "fast" and devices.by_triton(next(model.parameters()))
    with torch.inference_mode():
        original_context = replace_rope(model)
        replaced = fuse(model)
    replaced |= replace_layers(model, keep_weights, is_fast)
    replaced |= flatten(model)
    fill_vectors(model)
    return LoadedModel(model, tokenizer, name, replaced, original_context, is_fast)


def _check_folder(name: str) -> None:
    folder = Path(name)
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise ModelLoadError(f"model folder {name!r} does not exist; give a folder with config.json, or a hub name such as 'org/model'")
        return
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{name!r} holds no config.json; point to the folder that `save_pretrained` wrote")
    if not list(folder.glob("*.safetensors")):
        pickled = [p.name for pattern in PICKLED for p in folder.glob(pattern)]
        found = f"only pickled weights ({', '.join(sorted(pickled))})" if pickled else "no weights"
        raise ModelLoadError(
            f"{name!r} holds {found}; safetensors are needed: convert with `model.save_pretrained(folder)` where you trust it"
        )
    try:
        raw = json.loads((folder / "config.json").read_text("utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{name}/config.json is not JSON ({error}); copy the checkpoint again") from error
    if "auto_map" in raw:
        raise UnsupportedModelError(
            f"{name!r} wants to run its own code (auto_map in config.json), which echelon never does; "
            "use a checkpoint whose architecture is part of transformers"
        )
    _tensors(name)


def _read_config(name: str) -> Any:
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read the configuration of {name!r}: {_first_line(error)}") from error
    if hasattr(config, "auto_map"):
        raise UnsupportedModelError(f"{name!r} wants to run its own code (auto_map in config.json), which echelon never does")
    return config


def _read_weights(name: str, config: Any, dtype: str, attention: str = IMPLEMENTATION) -> tuple[PreTrainedModel, dict[str, Any]]:
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=DTYPES.get(dtype, "auto"),
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except ValueError as error:
        if "Unrecognized configuration class" in str(error):
            raise UnsupportedModelError(f"{type(config).__name__} of {name!r} is no causal language model of transformers") from error
        raise ModelLoadError(f"cannot load {name!r}: {_first_line(error)}") from error
    except (OSError, RuntimeError, KeyError) as error:
        reason = "; ".join(_misshapen(name, config)) or _first_line(error)
        raise ModelLoadError(f"cannot load {name!r}: {reason}") from error
    if model.dtype not in DTYPES.values():
        raise UnsupportedModelError(f"{name!r} is stored in {model.dtype}; served are {', '.join(DTYPES)}: pass dtype=")
    return model, info


def _tensors(name: str) -> dict[str, tuple[str, list[int]]]:
    """Tensor → (file, shape), from the headers of a folder's weight files; nothing for a hub name."""
    found: dict[str, tuple[str, list[int]]] = {}
    for path in sorted(Path(name).glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                found |= {key: (path.name, file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ModelLoadError(f"{path} is torn: {_first_line(error)}; copy it again") from error
    return found


def _misshapen(name: str, config: Any) -> list[str]:
    """What is wrong with tensors whose shape is not that of the architecture."""
    with torch.device("meta"):
        expected = {key: list(t.shape) for key, t in AutoModelForCausalLM.from_config(config).state_dict().items()}
    return [
        f"{file}: tensor {key} has shape {shape}, and config.json asks for {expected[key]}"
        for key, (file, shape) in _tensors(name).items()
        if key in expected and shape != expected[key]
    ]


def _check_weights(name: str, info: dict[str, Any]) -> None:
    """Every tensor of the architecture must come from the checkpoint, and every tensor of the checkpoint must have a place."""
    files = {key: file for key, (file, _) in _tensors(name).items()}
    for key, what in (("missing_keys", "lacks"), ("unexpected_keys", "has surplus")):
        if names := sorted(str(n) for n in info.get(key) or ()):
            listed = ", ".join(f"{n} ({files[n]})" if n in files else n for n in names[:5])
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ModelLoadError(f"the checkpoint {name!r} {what} tensors: {listed}{more}; it does not fit its config.json")


def _read_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    folder = Path(name)
    if folder.is_dir() and not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read the tokenizer of {name!r}: {_first_line(error)}") from error
    return tokenizer


def check_vocabularies(target: LoadedModel, draft: LoadedModel) -> None:
    """A draft model must mean the same by every token id; how far the two vocabularies are padded does not matter.

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


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
