"""The forward of Llama, Mistral, Qwen2 and Qwen3 from tokens to logits, where all decoder layers run as one function each.

What `transformers` does around the layers (configurations merged, outputs captured, masks that nobody reads) costs a small draft model more
than its layers. Modules are called as before, so that their hooks run; while hooks hang on the model within, its own forward runs, and
layers without hooks go on as one call between those that have some. As with the layers, classes are named and each model is tried: it
is replaced if both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from echelon.model.attention import CONTEXT_KEYWORD, CachedAttention, CompiledLayer
from echelon.model.patches.architectures import ARCHITECTURES
from echelon.model.patches.decoder_layer import GLOBAL_HOOKS, DecoderLayerForward, Echo, trial_tokens


@dataclass(frozen=True, slots=True)
class CausalLMForward:
    """Embedding, layers, norm, and the output layer for the tokens that want logits. `whole` runs where a call asks for more."""

    whole: Callable[..., Any]
    inner: Any
    layers: tuple[nn.Module, ...]
    output_layer: nn.Module
    hooks: tuple[tuple[dict[int, Any], ...], ...]  # of each layer and of what is inside it
    compiled: tuple[CompiledLayer, ...]  # where the compiled kernels serve all layers

    def __call__(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> Any:
        inner, has_hooks = self.inner, self.inner._forward_hooks or self.inner._forward_pre_hooks
        is_plain = others.keys() == {CONTEXT_KEYWORD} and use_cache is False and isinstance(logits_to_keep, Tensor)
        if not is_plain or has_hooks or input_ids is None or position_ids is None:
            return self.whole(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, logits_to_keep=logits_to_keep, **others)
        hidden = inner.embed_tokens(input_ids)
        embeddings = inner.rotary_emb(hidden, position_ids=position_ids)
        context, num_done = others[CONTEXT_KEYWORD], 0
        can_run = self.compiled and isinstance(context, CachedAttention) and not any(GLOBAL_HOOKS)
        keywords = others | {"attention_mask": None, "position_ids": position_ids, "past_key_values": None, "use_cache": False}
        for number in (i for i, own in enumerate(self.hooks) if not can_run or any(own)):  # layers that are called as modules
            if num_done < number:
                hidden = context.run_layers(self.compiled[num_done:number], num_done, hidden, *embeddings)
            hidden, num_done = self.layers[number](hidden, position_embeddings=embeddings, **keywords), number + 1
        if num_done < len(self.layers):
            hidden = context.run_layers(self.compiled[num_done:], num_done, hidden, *embeddings)
        return CausalLMOutputWithPast(logits=self.output_layer(inner.norm(hidden).index_select(1, logits_to_keep)))


def _is_named(model: Any, inner: Any) -> bool:
    known = ARCHITECTURES.get(type(model))
    return known is not None and known.inner is type(inner)


@torch.inference_mode()
def patch_causal_lm(model: Any) -> dict[str, int]:
    """Replace the forward of a model whose layers are all replaced; returns its class with 1, or nothing."""
    inner: Any = getattr(model, "model", None)
    if "forward" in vars(model) or not _is_named(model, inner) or (tokens := trial_tokens(model)) is None:
        return {}
    layers: tuple[nn.Module, ...] = tuple(inner.layers[: model.config.num_hidden_layers])
    forwards = [f for layer in layers if isinstance(f := vars(layer).get("forward"), DecoderLayerForward)]
    if len(forwards) < len(layers) or [f.call.layer for f in forwards] != list(range(len(layers))):
        return {}
    hooks = tuple(tuple(h for m in layer.modules() for h in (m._forward_hooks, m._forward_pre_hooks)) for layer in layers)
    compiled = tuple(f.compiled for f in forwards if f.compiled is not None)
    is_compiled = len(compiled) == len(layers)
    own = CausalLMForward(model.forward, inner, layers, model.get_output_embeddings(), hooks, compiled if is_compiled else ())
    rows = torch.tensor([0, tokens["input_ids"].shape[1] - 1], device=model.device)
    asked: dict[str, Any] = {**tokens, "use_cache": False, "logits_to_keep": rows, CONTEXT_KEYWORD: Echo()}
    theirs, ours = (f(**asked) for f in (model.forward, own))
    if not torch.equal(theirs.logits, ours.logits):
        return {}
    model.forward = own
    return {type(model).__name__: 1}
