"""The numbers that training multiplies: bfloat16 where the device does so itself, float32 where it would be emulated."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

# Products of bfloat16 on this processor, which then take some thirty times as long as those of float32 (x86 without AVX-512).
IS_EMULATED: bool = torch.backends.mkldnn.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-untyped-call]


def teaching(target: PreTrainedModel) -> PreTrainedModel:
    """A frozen target to learn from: itself, or a copy in float32 where its device would emulate its own numbers."""
    return copy.deepcopy(target).float() if _emulates(target.device) and target.dtype != torch.float32 else target


def mixed_precision(target: PreTrainedModel) -> torch.autocast:
    """Products in bfloat16 of `target` and of what learns from it; in float32 where its device would emulate them and it has no others."""
    return torch.autocast(target.device.type, torch.bfloat16, enabled=not _emulates(target.device) or target.dtype != torch.float32)


def _emulates(device: torch.device) -> bool:
    return IS_EMULATED and device.type == "cpu"
