"""LongRoPE (Ding et al. 2024), row by row.

Its rotary embedding has two sets of frequencies, one for texts up to the original context and one for longer texts. `transformers` picks
the set by the largest position of the whole call, so that a short row would change beside a long one, and `generate` computes a row anew
when its text outgrows the original context. Here each row has the set of its own text; the scheduler lets no step straddle the limit.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from echelon.batch import PaddedBatch, RaggedBatch

LONG_TEXT = 1 << 30  # added to the positions of rows whose text is longer than the original context


class RowRope:
    """The forward of a rotary embedding whose positions say which set of frequencies they want."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forward = inspect.unwrap(type(module).forward)  # without the choice by the whole call
        limit = original_context(module)
        sets = (ROPE_INIT_FUNCTIONS["longrope"](module.config, None, seq_len=n)[0] for n in (limit, limit + 1))
        self._sets = tuple(frequencies.to(module.inv_freq.device) for frequencies in sets)

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [1, T, D] for x [1, T, hidden] and positions int [1, T]."""
        is_long = position_ids >= LONG_TEXT
        positions = torch.where(is_long, position_ids - LONG_TEXT, position_ids)
        short, long = (self._with(frequencies, x, positions) for frequencies in self._sets)
        cos, sin = (torch.where(is_long[..., None], b, a) for a, b in zip(short, long, strict=True))
        return cos, sin

    def _with(self, frequencies: Tensor, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        self._module.inv_freq.copy_(frequencies)  # type: ignore[operator]
        cos, sin = self._forward(self._module, x, positions)
        return cos, sin

    def restore(self) -> None:
        self._module.inv_freq.copy_(self._module.original_inv_freq)  # type: ignore[operator,arg-type]
        del self._module.forward


def original_context(module: nn.Module) -> int:
    """Longest text, in tokens, that the first set of frequencies serves."""
    config: Any = module.config
    return int(config.rope_parameters["original_max_position_embeddings"])


def replace_rope(model: nn.Module) -> int | None:
    """Patch rotary embeddings of this kind; returns the original context, or None where the model has none."""
    found = [m for m in model.modules() if getattr(m, "rope_type", None) == "longrope"]
    for module in found:
        module.forward = RowRope(module)
    return original_context(found[0]) if found else None


def restore_rope(model: nn.Module) -> None:
    """Undo `replace_rope`."""
    for module in model.modules():
        if isinstance(patched := vars(module).get("forward"), RowRope):
            patched.restore()


def coded_positions(batch: RaggedBatch | PaddedBatch, original: int | None) -> Tensor:
    """int32[T]: what a patched model is given as positions."""
    if original is None:
        return batch.positions
    is_long = batch.text_len_of > original
    return batch.positions + LONG_TEXT * is_long.to(batch.positions.dtype)
