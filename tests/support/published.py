"""Checkpoints in integers, written as other libraries write them: word by word, from the definitions of their formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

Parts = dict[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each place of a word holds


def words_of(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Integers 0 … 15 [R, 8 W] to int32 [R, W], place i of a word from entry `order[i]` of eight."""
    out = torch.zeros(len(values), values.shape[1] // 8, dtype=torch.int64)
    for place, entry in enumerate(order):
        out |= values[:, entry::8].long() << (4 * place)
    return torch.where(out >= 2**31, out - 2**32, out).int()


def by_channel(weight: Tensor) -> tuple[Parts, Tensor]:
    """int-quantized: parts, and the weight that they stand for."""
    scale = weight.abs().amax(1, keepdim=True) / 127.5
    values = (weight / scale).round().clamp(-128, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scale}, values * scale


def in_groups(weight: Tensor, size: int, has_zeros: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """values [N, K] and zeros [N, G] of 0 … 15, scales [N, G], and the weight that they stand for."""
    groups = weight.unflatten(1, (-1, size))
    low, high = groups.amin(2), groups.amax(2)
    if has_zeros:
        scale = (high - low).half().float() / 15
        zeros = (-low / scale).round().clamp(1, 15)
    else:
        scale = (groups.abs().amax(2) / 7.5).half().float()
        zeros = torch.full_like(scale, 8)
    scale = scale.half().float()
    values = ((groups / scale[..., None]).round() + zeros[..., None]).clamp(0, 15)
    meant = ((values - zeros[..., None]) * scale[..., None]).flatten(1)
    return values.flatten(1), zeros, scale, meant


def packed(weight: Tensor, size: int, has_zeros: bool) -> tuple[Parts, Tensor]:
    """pack-quantized."""
    values, zeros, scale, meant = in_groups(weight, size, has_zeros)
    parts = {"weight_packed": words_of(values), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    if has_zeros:
        parts["weight_zero_point"] = words_of(zeros.t().contiguous()).t().contiguous()
    return parts, meant


def gptq(weight: Tensor, size: int, has_zeros: bool, shift: int = 1) -> tuple[Parts, Tensor]:
    """GPTQ, whose zeros are one less than they mean; version 2 of its format has them as they are."""
    values, zeros, scale, meant = in_groups(weight, size, has_zeros)
    parts = {
        "qweight": words_of(values).t().contiguous(),
        "qzeros": words_of((zeros - shift).t().contiguous()),
        "scales": scale.t().contiguous().half(),
        "g_idx": (torch.arange(weight.shape[1]) // size).int(),
    }
    return parts, meant


def awq(weight: Tensor, size: int, has_zeros: bool = True) -> tuple[Parts, Tensor]:
    """AWQ."""
    values, zeros, scale, meant = in_groups(weight, size, has_zeros)
    parts = {
        "qweight": words_of(values.t().contiguous(), AWQ_ORDER),
        "qzeros": words_of(zeros.t().contiguous(), AWQ_ORDER),
        "scales": scale.t().contiguous().half(),
    }
    return parts, meant


def compressed(bits: int, strategy: str, size: int | None = None, **others: Any) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors."""
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": size, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations if bits == 8 else None}
    name = "int-quantized" if bits == 8 else "pack-quantized"
    own = {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return own | {"quantization_status": "compressed"} | others


KINDS: dict[str, tuple[dict[str, Any], Callable[[Tensor], tuple[Parts, Tensor]]]] = {
    "int-quantized": (compressed(8, "channel"), by_channel),
    "pack-quantized": (compressed(4, "group", 32), lambda w: packed(w, 32, False)),
    "pack-quantized with zeros": (compressed(4, "group", 32), lambda w: packed(w, 32, True)),
    "pack-quantized by row": (compressed(4, "channel"), lambda w: packed(w, w.shape[1], False)),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}, lambda w: gptq(w, 32, False)),
    "gptq with zeros": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}, lambda w: gptq(w, 32, True)),
    "gptq_v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, 32, True, shift=0),
    ),
    "gptq by row": ({"quant_method": "gptq", "bits": 4, "group_size": -1}, lambda w: gptq(w, w.shape[1], True)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, lambda w: awq(w, 32)),
}


def publish(model: PreTrainedModel, kind: str, folder: Path) -> dict[str, Tensor]:
    """Save the model with its linear layers, all but routers and the output layer, in integers; returns what those stand for, by name."""
    model.save_pretrained(folder)
    settings, quantised = KINDS[kind]
    kept: Parts = {}
    meant: Parts = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim != 2 or "_proj" not in name:
            kept[name] = tensor
            continue
        parts, meant[name] = quantised(tensor)
        kept |= {f"{name.removesuffix('.weight')}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    set_config(folder, quantization_config=settings)
    return meant


def set_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
