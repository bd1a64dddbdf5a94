"""A decoder layer as one function, where it is seen to give the same bits as the layer it replaces.

A layer of `transformers` hands a dozen keywords through four forwards to make the fifteen calls that do the work; beside a small batch that
Python is most of what a step costs besides its linear layers and attention. What a layer computes is found by trying, as in `fused`: the
model runs once over a few tokens, a stand-in answering for attention, and a layer is replaced if the function answers the same call with
the same bits, having asked for attention in the same bits. Everything else stays as it is; and so does a layer while hooks hang inside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from echelon.ops import elementwise
from echelon.ops.compiled import is_built
from echelon.ops.elementwise import Activation
from echelon.target.attention import STEP_KEYWORD, LayerCall
from echelon.target.fused import gate_of

TOKENS = 6
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "layer_idx")
MLP = ("gate_proj", "up_proj", "down_proj")
GLOBAL_HOOKS = (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class FlatLayer:
    """Norm, attention, norm, gated MLP, each added to the residual: the layer of Llama, Mistral, Qwen2 and Qwen3.

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

    def __call__(self, hidden_states: Tensor, *args: Any, position_embeddings: Any = None, **keywords: Any) -> Any:
        step = keywords.get(STEP_KEYWORD)
        if args or step is None or position_embeddings is None or keywords.get("attention_mask") is not None or any(self.hooks):
            return self.whole(hidden_states, *args, position_embeddings=position_embeddings, **keywords)
        count, (cos, sin), call = hidden_states.shape[1], position_embeddings, self.call
        x = self.input_norm(hidden_states)
        query = self.query(x).view(1, count, *call.query.shape[1:])
        key = self.key(x).view(1, count, *call.key.shape[1:])
        value = self.value(x).view(count, *call.value.shape[1:])
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query = elementwise.rotate(query.transpose(1, 2), cos, sin)[0].transpose(0, 1)
        key = elementwise.rotate(key.transpose(1, 2), cos, sin)[0].transpose(0, 1)
        attended = step.attend(LayerCall(call.layer, query, key, value, call.scale, call.window, call.softcap, call.sinks))
        hidden_states = hidden_states + self.output(attended.reshape(1, count, -1))
        x = self.mlp_norm(hidden_states)
        return hidden_states + self.down(elementwise.activate(self.gate(x), self.activation, self.up(x)))


class Flat(functools.partial[Any]):
    """A forward of ours, so that `restore_flat` knows it."""


class _Echo:
    """Answers an attention layer with its values, one a query head, and notes what it asked."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []

    def attend(self, call: LayerCall) -> Tensor:
        self.calls.append(call)
        return call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], 1)


@torch.inference_mode()
def flatten(model: PreTrainedModel) -> dict[str, int]:
    """Replace the layers that can be, once everything inside them is served; returns how many of each class."""
    replaced: dict[str, int] = {}
    layers = [m for m in model.modules() if "forward" not in vars(m) and _may_fit(m)] if is_built() else []
    for layer, args, keywords, expected in _seen(model, layers):
        if (own := _same(layer, args, keywords, expected)) is not None:
            layer.forward = Flat(own)
            name = type(layer).__name__
            replaced[name] = replaced.get(name, 0) + 1
    return replaced


def restore_flat(model: nn.Module) -> None:
    """Undo `flatten`."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), Flat):
            del module.forward


def _may_fit(module: nn.Module) -> bool:
    attention, mlp = getattr(module, "self_attn", None), getattr(module, "mlp", None)
    has_norms = all(isinstance(getattr(module, n, None), nn.Module) for n in ("input_layernorm", "post_attention_layernorm"))
    has_parts = all(hasattr(attention, n) for n in ATTENTION) and all(hasattr(mlp, n) for n in MLP)
    return has_norms and has_parts and isinstance(mlp, nn.Module) and gate_of(mlp) is not None


def _seen(model: PreTrainedModel, layers: list[nn.Module]) -> list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]]:
    """How each layer was called in a pass over a few tokens, and what it answered.

    Positions go from the first to the last that the model knows: some layers scale what lies far from the start.
    """
    found: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = []
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    handles = [layer.register_forward_hook(lambda *seen: found.append(seen), with_kwargs=True) for layer in layers]
    try:
        if layers and limit:
            positions = torch.linspace(0, limit - 1, TOKENS, dtype=torch.float64).long()[None]
            tokens = torch.arange(TOKENS)[None]
            model(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=1, **{STEP_KEYWORD: _Echo()})
    finally:
        for handle in handles:
            handle.remove()
    return found


def _same(layer: Any, args: tuple[Any, ...], keywords: dict[str, Any], expected: Any) -> FlatLayer | None:
    """The layer as one function, if that answers with the same bits and asks for the same attention."""
    theirs, ours = _Echo(), _Echo()
    layer.forward(*args, **keywords | {STEP_KEYWORD: theirs})
    if len(theirs.calls) != 1:
        return None
    own = _flat(layer, theirs.calls[0])
    try:
        got = own(*args, **keywords | {STEP_KEYWORD: ours})
    except RuntimeError:  # other shapes than this layer's
        return None
    asks_the_same = len(ours.calls) == 1 and all(
        _equal(getattr(theirs.calls[0], f.name), getattr(ours.calls[0], f.name)) for f in fields(LayerCall)
    )
    return own if asks_the_same and _equal(expected, got) else None


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.dtype == b.dtype and torch.equal(a, b))
    return type(a) is type(b) and bool(a == b)


def _flat(layer: Any, call: LayerCall) -> FlatLayer:
    attention, mlp, activation = layer.self_attn, layer.mlp, gate_of(layer.mlp)
    assert activation is not None
    inside = [m for m in layer.modules() if m is not layer]
    return FlatLayer(
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
        hooks=tuple(h for m in inside for h in (m._forward_hooks, m._forward_pre_hooks)) + GLOBAL_HOOKS,
    )


def _forward_of(module: Any, name: str) -> Forward | None:
    part = getattr(module, name, None)
    return None if part is None else part.forward
