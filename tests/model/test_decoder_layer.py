"""Decoder layers as one function: found where they compute the same bits, left alone elsewhere, and out of the way of hooks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import toys
from decoders import decoders
from torch import nn

from echelon import LLM, SamplingParams
from echelon.batch import Span
from echelon.model.load.loading import LoadedModel, adopt_model, served_copy
from echelon.model.patches.decoder_layer import DecoderLayerForward, patch_decoder_layers
from echelon.ops.compiled import is_built

pytestmark = pytest.mark.skipif(not is_built(), reason="the compiled kernels are not built")
DECODERS = decoders(window=12, original_context=32)
FLAT = {"llama", "mistral", "qwen2", "qwen3"}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def loaded(name: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    cls, config = DECODERS[name]
    model = toys.randomised(cls, copy.deepcopy(config), seed=4, spread=0.2)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data = parameter.data + torch.linspace(-0.1, 0.1, len(parameter))
    return adopt_model(model.to(dtype), None, name)


def flat_layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(vars(m).get("forward"), DecoderLayerForward)]


def logits(target: LoadedModel) -> torch.Tensor:
    """Of a ragged batch: a prompt, a row that goes on, and a tree."""
    llm = LLM(target, max_num_seqs=4, block_size=8, kv_cache_memory_bytes=1 << 20)
    runner = llm.engine.target
    for row in range(3):
        assert runner.cache.tables.reserve(row, 40)
    runner.feed([Span(1, 0, [5, 6, 7, 8], 1, 4), Span(2, 0, [9, 10], 1, 2)])
    spans = [
        Span(0, 0, list(range(20)), 20, 20),
        Span(1, 4, [3], 1, 5),
        Span(2, 2, [11, 12, 13, 14], 4, 3, 3, [-1, -1, 0]),
    ]
    return runner.run(runner.pack(spans))[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_logits_have_the_same_bits(name: str, dtype: torch.dtype) -> None:
    target = loaded(name, dtype)
    assert len(flat_layers(target.model)) == (2 if name in FLAT else 0)
    flat = logits(target)
    toys.unpatch(target.model, DecoderLayerForward)
    assert not flat_layers(target.model)
    assert torch.equal(flat, logits(target))


class Scaled(nn.Module):
    """An attention whose answer is doubled, everywhere or far from the start."""

    def __init__(self, inner: Any, start: int) -> None:
        super().__init__()
        self.inner, self.start = inner, start
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "layer_idx"):
            setattr(self, name, getattr(inner, name))

    def forward(self, *args: Any, position_ids: torch.Tensor, **keywords: Any) -> Any:
        out, weights = self.inner(*args, position_ids=position_ids, **keywords)
        return torch.where(position_ids[..., None] >= self.start, 2 * out, out), weights


@pytest.mark.parametrize("start", [0, toys.CONTEXT - 8])
def test_a_layer_that_computes_something_else_stays(start: int) -> None:
    model: Any = toys.llama()
    model.model.layers[1].self_attn = Scaled(model.model.layers[1].self_attn, start)
    served: Any = toys.adopted(model).model
    assert flat_layers(served) == [served.model.layers[0]]


def test_hooks_inside_a_layer_are_called_while_they_hang_there() -> None:
    target = loaded("llama")
    layer: Any = target.model.model.layers[1]  # type: ignore[attr-defined]
    before, seen = logits(target), []
    handle = layer.mlp.up_proj.register_forward_hook(lambda _m, _i, out: seen.append(out) or out * 0)
    changed = logits(target)
    assert seen
    assert not torch.equal(before, changed)
    handle.remove()
    seen.clear()
    assert torch.equal(before, logits(target))
    assert not seen


def test_a_layer_with_hooks_or_a_forward_from_elsewhere_stays() -> None:
    hooked: Any = toys.llama()
    handle = hooked.model.layers[0].mlp.up_proj.register_forward_hook(lambda _m, _i, out: out * 2)
    hooked.model.layers[1].self_attn.forward = hooked.model.layers[1].self_attn.forward
    assert not flat_layers(toys.adopted(hooked).model)
    handle.remove()


def test_a_served_copy_leaves_the_model_as_it_is() -> None:
    model = toys.llama()
    tokens = torch.arange(7)[None]
    before = model(tokens).logits
    assert len(flat_layers(served_copy(model).model)) == 2
    assert not any("forward" in vars(m) for m in model.modules())
    assert torch.equal(model(tokens).logits, before)


def test_nothing_is_replaced_twice() -> None:
    target = loaded("qwen3")
    assert patch_decoder_layers(target.model) == {}


def test_texts_are_those_of_whole_layers() -> None:
    asked = SamplingParams(temperature=0.8, seed=3, max_tokens=24)
    flat, whole = loaded("qwen2"), loaded("qwen2")
    toys.unpatch(whole.model, DecoderLayerForward)
    texts = [[o.outputs[0].token_ids for o in LLM(t, max_num_seqs=3).generate([[4, 5], [6], [7, 8, 9]], asked)] for t in (flat, whole)]
    assert texts[0] == texts[1]
