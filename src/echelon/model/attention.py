"""The attention function that `transformers` models call, and what it needs to know about a pass.

The model is told `attn_implementation="echelon"`. No mask function is registered under that name, so the model builds no mask; the
context of a pass travels from `model(...)` to here as the keyword `CONTEXT_KEYWORD`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from echelon.batch import RaggedBatch
from echelon.errors import Refusal, UnsupportedModelError
from echelon.kv.cache import KVCache, LayerShape
from echelon.ops import cpu, devices

IMPLEMENTATION = "echelon"
CONTEXT_KEYWORD = "echelon_context"
# keywords that models hand through and that change nothing in inference without a mask
IGNORED = {
    "dropout",
    "is_causal",
    "output_attentions",
    "output_router_logits",
    "position_ids",
    "use_cache",
    "cache_position",
    "return_dict",
    "logits_to_keep",
}


@dataclass(frozen=True)
class LayerCall:
    """Arguments of one attention layer: query [T', H, D], key [T', Hkv, D], value [T', Hkv, Dv]; T' may exceed the real tokens."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class AttentionContext(Protocol):
    """Computes the attention of all layers in one forward pass."""

    def attend(self, call: LayerCall) -> Tensor:
        """Attention [T', H, Dv] of one layer's call."""


class Ranks(Protocol):
    """The ranks that share a compiled layer."""

    def within(self, run: Callable[[cpu.RankArguments], Tensor]) -> Tensor:
        """What `run` returns, in which layers gather what all ranks have.

        Raises
        ------
        RankError  another rank has ended, hangs or runs something else
        """


class CompiledLayer(NamedTuple):
    """A decoder layer as the compiled kernels run it in one call (`ops.cpu.decoder_layer`), and the ranks that share it."""

    weights: Tensor
    ranks: Ranks | None


class CachedAttention:
    """Write the batch's keys and values into the cache, then attend."""

    def __init__(self, batch: RaggedBatch, cache: KVCache) -> None:
        self.batch, self.cache, self.slots = batch, cache, batch.slots.to(cache.device)

    def attend(self, call: LayerCall) -> Tensor:
        num_tokens, num_inputs = self.batch.num_tokens, len(call.query)
        query, key, value = (x[:num_tokens] if num_inputs > num_tokens else x for x in (call.query, call.key, call.value))
        self.cache.write(call.layer, key, value, self.slots)
        keys, values = self.cache.keys[call.layer], self.cache.values[call.layer]
        backend = devices.backend_of(query)
        out = backend.ragged_attention(query, keys, values, self.batch, call.scale, call.window, call.softcap, call.sinks)
        return F.pad(out, (0, 0, 0, 0, 0, num_inputs - num_tokens)) if num_inputs > num_tokens else out

    def run_layers(self, layers: Sequence[CompiledLayer], first: int, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Run whole layers from the model's `first` on: hidden [1, T, d], cos and sin [1, T, R] → [1, T, d]."""
        keys, values = (storage[first : first + len(layers)] for storage in (self.cache.keys, self.cache.values))
        weights, ranks = [layer.weights for layer in layers], layers[0].ranks
        run = partial(cpu.run_layers, weights, hidden, cos, sin, keys, values, self.slots, self.batch)
        return run() if ranks is None else ranks.within(run)


class RecordingAttention:
    """Attend to nothing and note what every layer stores: the cache is laid out from this. `look` sees every call."""

    def __init__(self, look: Callable[[LayerCall], None] = lambda _: None) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self._look = look

    def attend(self, call: LayerCall) -> Tensor:
        self._look(call)
        if call.layer in self.shapes:
            raise UnsupportedModelError.because("the model", Refusal.ATTENTION, f"layer {call.layer} calls it twice")
        value_size = call.value.shape[2]
        self.shapes[call.layer] = LayerShape(call.key.shape[1], call.key.shape[2], value_size)
        return call.query.new_zeros(*call.query.shape[:2], value_size)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, Hkv, T, D] → [1, T, H, Dv], in the form that `transformers` expects."""
    context: AttentionContext | None = others.pop(CONTEXT_KEYWORD, None)
    if context is None:
        raise UnsupportedModelError.because(type(module).__name__, Refusal.ATTENTION, "the keywords do not arrive")
    changes = {k for k, v in others.items() if v is not None and k not in IGNORED}
    if attention_mask is not None or changes:
        what = "a mask" if attention_mask is not None else ", ".join(sorted(changes))
        raise UnsupportedModelError.because(type(module).__name__, Refusal.MASK, f"it hands over {what}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    call = LayerCall(int(module.layer_idx), query, key, value, scale, sliding_window, softcap, s_aux)  # type: ignore[arg-type]
    return context.attend(call)[None], None


AttentionInterface.register(IMPLEMENTATION, attention)


@torch.inference_mode()
def run_one_token(model: nn.Module, context: AttentionContext) -> None:
    """Run a forward pass over one token, for what is seen in it."""
    zero = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    model(input_ids=zero, position_ids=zero, use_cache=False, **{CONTEXT_KEYWORD: context})


def record_layers(model: nn.Module, look: Callable[[LayerCall], None] = lambda _: None) -> list[LayerShape]:
    """Return what each attention layer stores per token, from a pass over one token, of which `look` sees every call."""
    context = RecordingAttention(look)
    run_one_token(model, context)
    if sorted(context.shapes) != list(range(len(context.shapes))) or not context.shapes:
        raise UnsupportedModelError.because(type(model).__name__, Refusal.ATTENTION, f"layers that call it: {sorted(context.shapes)}")
    return [context.shapes[i] for i in range(len(context.shapes))]
