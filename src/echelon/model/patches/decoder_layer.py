"""The decoder layer of Llama, Mistral, Qwen2 and Qwen3 as one function, with the bits of the layer that it replaces.

A layer of `transformers` hands a dozen keywords through four forwards to make the fifteen calls that do the work; beside a small batch that
Python is most of what a step costs besides its linear layers and attention. Classes are named (`architectures`), since a trial cannot see
what a layer would do with other data; and each layer is tried all the same. The model runs once over a few tokens, a stand-in answering for
attention, and a layer is replaced if the function returns the same bits for the same call, and calls attention with the same bits. The
modules inside must not be exchanged afterwards; while hooks hang on them, the layer runs as a whole.

Over keys and values in blocks the compiled kernels run such a layer in one call, where they serve all of it, and that too is tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from echelon.batch import Span
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache, LayerShape
from echelon.model.attention import CONTEXT_KEYWORD, AttentionContext, CachedAttention, CompiledLayer, LayerCall
from echelon.model.pack import pack
from echelon.model.patches import PatchedForward
from echelon.model.patches.architectures import ARCHITECTURES
from echelon.model.patches.elementwise import gate_of, rms_norm_of
from echelon.model.patches.linear import projection_of
from echelon.model.patches.split import BackProjection, back_projection_of
from echelon.ops import cpu, devices
from echelon.ops.contract import Activation, Integers, PackedWeight

TOKENS = 6
LAYERS = {known.layer: known.attention for known in ARCHITECTURES.values() if known.layer is not None}  # with the attention within
GLOBAL_HOOKS = (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class DecoderLayerForward:
    """Norm and attention, norm and gated MLP, each added to the residual.

    Its parts are the forwards of the layer's modules; `query_norm` and `key_norm` normalise each head. `call` is how the layer calls its
    attention; its tensors give the shapes. `hooks` of the modules within: while there are any, `whole` runs.
    """

    whole: Callable[..., Any]
    input_norm: Forward
    query: Forward
    key: Forward
    value: Forward
    query_norm: Forward | None
    key_norm: Forward | None
    output: Forward
    mlp_norm: Forward
    gate: Forward
    up: Forward
    down: Forward
    activation: Activation
    call: LayerCall
    hooks: tuple[dict[int, Any], ...]
    compiled: CompiledLayer | None = None  # where the compiled kernels serve the layer

    def __call__(self, hidden_states: Tensor, **keywords: Any) -> Any:
        embeddings, context = keywords.get("position_embeddings"), keywords.get(CONTEXT_KEYWORD)
        others = keywords.get("attention_mask"), keywords.get("past_key_values")
        if context is None or embeddings is None or others != (None, None) or any(self.hooks) or any(GLOBAL_HOOKS):
            return self.whole(hidden_states, **keywords)
        cos, sin = embeddings
        if self.compiled is not None and isinstance(context, CachedAttention):
            return context.run_layers([self.compiled], self.call.layer, hidden_states, cos, sin)
        return self.run(hidden_states, cos, sin, context)

    def run(self, hidden_states: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        """hidden_states [1, T, d], cos and sin [1, T, R] → [1, T, d]."""
        count, call, backend = hidden_states.shape[1], self.call, devices.backend_of(hidden_states)
        x = self.input_norm(hidden_states)
        query = self.query(x).view(1, count, *call.query.shape[1:])
        key = self.key(x).view(1, count, *call.key.shape[1:])
        value = self.value(x).view(count, *call.value.shape[1:])
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query = backend.rotate(query.transpose(1, 2), cos, sin)[0].transpose(0, 1)
        key = backend.rotate(key.transpose(1, 2), cos, sin)[0].transpose(0, 1)
        attended = context.attend(LayerCall(call.layer, query, key, value, call.scale, call.window, call.softcap, call.sinks))
        hidden_states = hidden_states + self.output(attended.reshape(1, count, -1))
        x = self.mlp_norm(hidden_states)
        return hidden_states + self.down(backend.activate(self.gate(x), self.activation, self.up(x)))


class Echo:
    """Returns an attention layer's values, one a query head, and records its call."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []

    def attend(self, call: LayerCall) -> Tensor:
        self.calls.append(call)
        return call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], 1)


@torch.inference_mode()
def patch_decoder_layers(model: PreTrainedModel) -> dict[str, int]:
    """Replace the layers that can be, once everything inside them is served; returns how many of each class."""
    replaced: Counter[str] = Counter()
    is_served = devices.has_kernels(next(model.parameters()))
    layers = [m for m in model.modules() if "forward" not in vars(m) and _may_fit(m)] if is_served else []
    for layer, args, keywords, expected in _seen(model, layers):
        if (own := _same(layer, args, keywords, expected)) is not None:
            layer.forward = own
            replaced[type(layer).__name__] += 1
    return dict(replaced)


def _may_fit(module: Any) -> bool:
    """Whether it is of a class that is known, with nothing inside that a caller has changed."""
    if type(module) not in LAYERS or type(module.self_attn) is not LAYERS[type(module)] or gate_of(module.mlp) is None:
        return False
    return isinstance(vars(module.self_attn).get("forward"), PatchedForward) and not any(_hooks(module))


def _seen(model: PreTrainedModel, layers: list[nn.Module]) -> list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]]:
    """Record how each layer is called in a pass over a few tokens, and what it returns."""
    calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = []
    tokens = trial_tokens(model)
    handles = [layer.register_forward_hook(lambda *call: calls.append(call), with_kwargs=True) for layer in layers]
    try:
        if layers and tokens:
            model(**tokens, use_cache=False, logits_to_keep=1, **{CONTEXT_KEYWORD: Echo()})
    finally:
        for handle in handles:
            handle.remove()
    return calls


def trial_tokens(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """A few tokens [1, TOKENS] at positions from the first to the last that the model knows, since some layers scale what lies far from the
    start; None where it knows no last.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not limit:
        return None
    positions = torch.linspace(0, limit - 1, TOKENS, dtype=torch.float64).long()[None]
    return {"input_ids": torch.arange(TOKENS, device=model.device)[None], "position_ids": positions.to(model.device)}


def _same(layer: Any, args: tuple[Any, ...], keywords: dict[str, Any], expected: Any) -> DecoderLayerForward | None:
    """The layer as one function, if that returns the same bits and calls attention with the same."""
    theirs, ours = Echo(), Echo()
    layer.forward(*args, **keywords | {CONTEXT_KEYWORD: theirs})
    own = _flat(layer, theirs.calls[0])
    cos, sin = keywords["position_embeddings"]
    got = own.run(args[0], cos, sin, ours)
    inputs = [(getattr(theirs.calls[0], name), getattr(ours.calls[0], name)) for name in ("query", "key", "value")]
    if not all(torch.equal(a, b) for a, b in [*inputs, (expected, got)]):
        return None
    compiled = _compiled(own)
    return replace(own, compiled=compiled) if compiled is not None and _runs_alike(own, compiled, args[0], cos, sin) else own


def _compiled(layer: DecoderLayerForward) -> CompiledLayer | None:
    """The layer as one call of the compiled kernels; None where they do not serve all of it."""
    call = layer.call
    norms = [None if n is None else rms_norm_of(n) for n in (layer.input_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)]
    projections = _projections(layer)
    if projections is None or None in norms[:2] or devices.backend_of(call.query) is not cpu:
        return None
    back = [p for p in projections if isinstance(p, BackProjection)]
    share = [(part.first, part.whole) for p in back for part in (p.inner, p.outer)]
    how = layer.activation, call.query.shape[1], call.scale, call.window, call.softcap, call.sinks
    weights = cpu.decoder_layer(norms, [(p[0], p[1]) for p in projections], *how, share)
    return CompiledLayer(weights, back[0].ranks if back else None)


def _projections(layer: DecoderLayerForward) -> list[tuple[PackedWeight, Tensor | None] | BackProjection] | None:
    """The layer's linear layers in the order of `ops.cpu.decoder_layer`; None where the kernels do not serve all of them alike."""
    forwards = (layer.query, layer.key, layer.value, layer.output, layer.gate, layer.up, layer.down)
    found = [p for forward in forwards if (p := projection_of(forward) or back_projection_of(forward)) is not None]
    return found if len(found) == len(forwards) and _meet([p[0].integers for p in found]) else None


def _meet(projections: Sequence[Integers]) -> bool:
    """Whether one layer may have these: numbers, or as many bits everywhere, in groups that are alike where they multiply the same rows."""
    query, key, value, _, gate, up, _ = projections
    return query == key == value and gate == up and len({(i.bits, i.has_zeros) for i in projections}) == 1


def _runs_alike(layer: DecoderLayerForward, compiled: CompiledLayer, hidden: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether both give the same bits for tokens of one row, and leave the same keys and values."""
    _, num_kv_heads, key_size = layer.call.key.shape
    shape = LayerShape(num_kv_heads, key_size, layer.call.value.shape[2])
    tables = BlockTables(1, TOKENS, 1)
    tables.reserve(0, TOKENS)
    caches = [KVCache([shape], tables, hidden.dtype, hidden.device) for _ in range(2)]
    batch = pack([Span(0, 0, range(TOKENS), 1, TOKENS)], tables)
    ours, theirs = (CachedAttention(batch, cache) for cache in caches)
    index_free = replace(layer, call=replace(layer.call, layer=0))
    outputs = ours.run_layers([compiled], 0, hidden, cos, sin), index_free.run(hidden, cos, sin, theirs)
    pairs = [outputs, *((getattr(caches[0], name)[0], getattr(caches[1], name)[0]) for name in ("keys", "values"))]
    return all(torch.equal(a, b) for a, b in pairs)


def _hooks(layer: nn.Module) -> tuple[dict[int, Any], ...]:
    """Forward hooks of the modules inside."""
    return tuple(h for m in layer.modules() if m is not layer for h in (m._forward_hooks, m._forward_pre_hooks))


def _flat(layer: Any, call: LayerCall) -> DecoderLayerForward:
    attention, mlp, activation = layer.self_attn, layer.mlp, gate_of(layer.mlp)
    assert activation is not None
    return DecoderLayerForward(
        whole=layer.forward,
        input_norm=layer.input_layernorm.forward,
        query=attention.q_proj.forward,
        key=attention.k_proj.forward,
        value=attention.v_proj.forward,
        query_norm=_forward_of(attention, "q_norm"),
        key_norm=_forward_of(attention, "k_norm"),
        output=attention.o_proj.forward,
        mlp_norm=layer.post_attention_layernorm.forward,
        gate=mlp.gate_proj.forward,
        up=mlp.up_proj.forward,
        down=mlp.down_proj.forward,
        activation=activation,
        call=call,
        hooks=_hooks(layer),
    )


def _forward_of(module: Any, name: str) -> Forward | None:
    part = getattr(module, name, None)
    return None if part is None else part.forward
