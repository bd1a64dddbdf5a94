"""A checkpoint in integers, as compressed-tensors has it, so that other engines load it too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from echelon.checkpoint.folder import Folder
from echelon.checkpoint.schemas import refuse_quantised
from echelon.checkpoint.tensors import INDEX, WEIGHTS, StoredTensor, Weights, open_weights, weight_files
from echelon.errors import OutputError, UnsupportedModelError
from echelon.inputs import made_apart
from echelon.model.load.reading import GENERATION, TOKENIZER_FILES, built_without_memory, read_config, settings_of
from echelon.model.patches.experts import is_experts
from echelon.model.patches.linear import is_indexed_stack, is_plain_linear
from echelon.ops import compiled, cpu
from echelon.ops.contract import GROUPS
from echelon.settings import Quantization

SHARD_BYTES = 2 * 10**9
WORD = 8  # entries of 4 bits


@dataclass(frozen=True)
class PublishedModel:
    """What was written."""

    num_layers: int  # linear layers in integers
    ignored: list[str]  # linear layers as they were
    num_bytes: int
    before_bytes: int


def publish(name: str, destination: Path, quantization: Quantization) -> PublishedModel:
    """Write the checkpoint `name` to the folder `destination` with its linear layers rounded: 8 bits by column and activations of 8 bits by
    token (W8A8), or 4 bits in groups; output layer and embedding stay. At most a shard of it is in memory at a time.

    Raises
    ------
    ConfigError            there are no compiled kernels, or the destination is the source
    OutputError            the destination cannot be made, or holds weights already
    ModelLoadError         as `load_model`
    UnsupportedModelError  it is quantised already, or has no linear layers that this format describes
    """
    compiled.check_built("rounding weights")
    folder = Folder.locate(name, "model")
    made_apart(destination, folder.path, "DST")
    if any(destination.glob("*.safetensors")) or (destination / INDEX).exists():
        raise OutputError(f"{str(destination)!r} holds weights already; choose an empty folder for DST")
    raw = settings_of(folder)
    refuse_quantised(folder.shown, raw)
    with open_weights(folder, weight_files(folder)) as weights:
        layers, others = _linear_layers(built_without_memory(folder, read_config(folder), weights), weights)
        size = 0 if quantization == "int8" else _group_size(weights, layers)
        rounded = [k for k in layers if not size or weights.tensors[f"{k}.weight"].shape[1] % size == 0]
        if not rounded:
            raise UnsupportedModelError(f"{folder.shown} has no layer whose width a group of {size} divides; write it in int8")
        ignored = sorted({*others, *layers} - set(rounded))
        tensors = _written(weights, set(rounded), size)
        num_bytes = _save(tensors, destination)
        before = sum(t.numel * t.dtype.itemsize for t in weights.tensors.values())
    config = raw | {"quantization_config": _description(quantization, size, ignored)}
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    for path in sorted(folder.path.iterdir()):
        if path.name.startswith(TOKENIZER_FILES) or path.name == GENERATION:
            copy = shutil.copytree if path.is_dir() else shutil.copyfile
            copy(path, destination / path.name)
    return PublishedModel(len(rounded), ignored, num_bytes, before)


def _linear_layers(model: PreTrainedModel, weights: Weights) -> tuple[list[str], list[str]]:
    """Names of linear layers to be rounded, and of others."""
    stacks = (is_indexed_stack(module, *own) for module in model.modules() for own in module.named_parameters(recurse=False))
    if any(map(is_experts, model.modules())) or any(stacks):
        raise UnsupportedModelError(
            f"{weights.folder.shown} is a mixture of experts, whose weights this format has one by one; load it with quantization= instead"
        )
    output = model.get_output_embeddings()
    linear = {n: m for n, m in model.named_modules() if type(m) is nn.Linear and is_plain_linear(m)}
    layers = [n for n, m in linear.items() if m is not output and f"{n}.weight" in weights.tensors]
    if not layers:
        raise UnsupportedModelError(f"{weights.folder.shown} has no linear layers of its own to round; load it with quantization= instead")
    return layers, [n for n in linear if n not in layers]


def _group_size(weights: Weights, layers: list[str]) -> int:
    """The largest that divides every K, or the smallest, where none does."""
    depths = [weights.tensors[f"{k}.weight"].shape[1] for k in layers]
    return next((size for size in GROUPS if all(depth % size == 0 for depth in depths)), GROUPS[-1])


def _written(weights: Weights, layers: set[str], size: int) -> Iterator[tuple[str, Tensor]]:
    for name, stored in weights.tensors.items():
        layer = name.removesuffix(".weight")
        if layer in layers and name != layer:
            for part, tensor in (_in_8_bits(stored) if not size else _in_4_bits(stored, size)).items():
                yield f"{layer}.{part}", tensor
        else:
            yield name, stored.read()


def _in_8_bits(stored: StoredTensor) -> dict[str, Tensor]:
    weight = stored.read().float()
    scale = _representable(weight.abs().amax(1, keepdim=True) / 127, stored.dtype)
    values = (weight / scale.float()).round().clamp(-127, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scale}


def _in_4_bits(stored: StoredTensor, size: int) -> dict[str, Tensor]:
    """Scales by least squared error, then rounded to the checkpoint's dtype; entries by those."""
    weight = stored.read()
    scale = _representable(cpu.round_weight(weight, 4, size)[1], stored.dtype)
    groups = weight.float().view(len(weight), -1, size) / scale.float()[..., None]
    values = (groups.round().clamp(-8, 7) + 8).flatten(1).to(torch.int32)
    words = torch.zeros(len(values), values.shape[1] // WORD, dtype=torch.int32)
    for i in range(WORD):
        words |= values[:, i::WORD] << (4 * i)
    return {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def _representable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in another dtype, none of them 0 or without its full precision."""
    least = torch.finfo(dtype).smallest_normal
    return torch.where(scale.abs() < least, least, scale).to(dtype)


def _save(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> int:
    """Write shards and their index; returns the bytes of all tensors."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        save_file(held, folder / f"part-{len(shards)}.safetensors", {"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > SHARD_BYTES:
            flush()
            size = 0
        held[name] = tensor.contiguous()
        total, size = total + tensor.nbytes, size + tensor.nbytes
    flush()
    names = [WEIGHTS] if len(shards) == 1 else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for i, file in enumerate(names):
        (folder / f"part-{i}.safetensors").replace(folder / file)
    if len(shards) > 1:
        weight_map = {name: file for file, own in zip(names, shards, strict=True) for name in own}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2), "utf-8")
    return total


def _description(quantization: Quantization, size: int, ignored: list[str]) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors."""
    symmetric = {"type": "int", "symmetric": True}
    is_8 = quantization == "int8"
    weights = {"num_bits": 8, "strategy": "channel"} if is_8 else {"num_bits": 4, "strategy": "group", "group_size": size}
    group = {
        "targets": ["Linear"],
        "weights": symmetric | weights | {"dynamic": False},
        "input_activations": symmetric | {"num_bits": 8, "strategy": "token", "dynamic": True} if is_8 else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if is_8 else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }
