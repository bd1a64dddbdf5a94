"""LongRoPE (Ding et al. 2024), row by row.

Its rotary embedding has two sets of frequencies, one for positions within the original context and one for longer texts. `transformers`
picks the set by the largest position of the whole call, so that a short row would change beside a long one. Here each token has the set
that `generate` gives it when its row runs alone:

* a prompt longer than the original context has the long set from its first token on;
* what grows past the original context has the long set from there on, and what is cached keeps the short one;
* unless the model, as Phi-3 does, then reads the whole text anew (`OriginalContext.is_read_anew`): the scheduler lets no step straddle
  the limit, and the text has one set.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from echelon.batch import RaggedBatch
from echelon.errors import Refusal, UnsupportedModelError

LONG_TEXT = 1 << 30  # added to the positions of tokens that have the long set


@dataclass(frozen=True)
class OriginalContext:
    """`length`: the longest text, in tokens, that has the short set. `is_read_anew`: `generate` drops what is cached of a text that
    outgrows it, and computes all of it with the long set.
    """

    length: int
    is_read_anew: bool


class RowwiseRope:
    """The forward of a rotary embedding whose positions say which set of frequencies they want. A pass writes nothing to any module."""

    def __init__(self, module: nn.Module) -> None:
        self._forward = inspect.unwrap(type(module).forward)  # without the choice by the whole call
        self._limit = _original_length(module)
        self._short, self._long = (_with_frequencies(module, position) for position in (0, self._limit))

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [1, T, D] for x [1, T, hidden] and positions int [1, T]."""
        is_long = position_ids >= LONG_TEXT
        short = self._forward(self._short, x, position_ids.masked_fill(is_long, 0))
        # some modules look at the largest position here too: one more, past the limit, speaks for all
        long = self._forward(self._long, x, nn.functional.pad((position_ids - LONG_TEXT) * is_long, (0, 1), value=self._limit))
        cos, sin = (torch.where(is_long[..., None], b[:, :-1], a) for a, b in zip(short, long, strict=True))
        return cos, sin


def _with_frequencies(module: nn.Module, position: int) -> nn.Module:
    """A copy with the frequencies that the module's own forward takes for a text up to this position."""
    own = copy.deepcopy(module)
    buffer: Tensor = own.inv_freq  # type: ignore[assignment]
    type(own).forward(own, buffer[None, None], torch.tensor([[position]], device=buffer.device))
    return own


def _original_length(module: nn.Module) -> int:
    config: Any = module.config
    return int(config.rope_parameters["original_max_position_embeddings"])


def patch_rope(model: nn.Module) -> OriginalContext | None:
    """Patch rotary embeddings of this kind; returns the original context, or None where the model has none.

    Raises
    ------
    UnsupportedModelError  a rotary embedding takes its frequencies from the whole call in another way
    """
    modules = []
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        if kind == "longrope":
            modules.append(module)
        elif kinds & {"dynamic", "longrope"}:
            detail = f"{type(module).__name__} takes its rotary frequencies from the longest text of a call: rope_type {kind!r}"
            raise UnsupportedModelError.because(type(model).__name__, Refusal.BATCH, detail)
    for module in modules:
        module.forward = RowwiseRope(module)
    return OriginalContext(_original_length(modules[0]), _is_read_anew(model, _original_length(modules[0]))) if modules else None


def _is_read_anew(model: Any, length: int) -> bool:
    """Whether the model's own preparation of a step drops a cache of `length` tokens when the next one comes."""
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, length, 1), torch.zeros(1, 1, length, 1), 0)
    tokens = torch.zeros(1, length + 1, dtype=torch.int64)
    mask = torch.ones_like(tokens)
    inputs = model.prepare_inputs_for_generation(tokens, past_key_values=cache, attention_mask=mask, next_sequence_length=1)
    return inputs.get("past_key_values") is None


def coded_positions(batch: RaggedBatch, original: OriginalContext | None) -> Tensor:
    """Positions int32[T] that a patched model is fed."""
    if original is None:
        return batch.positions
    if original.is_read_anew:
        is_long = batch.text_len_of > original.length
    else:
        is_long = (batch.prompt_len_of > original.length) | (batch.positions >= original.length)
    return batch.positions + LONG_TEXT * is_long.to(batch.positions.dtype)
