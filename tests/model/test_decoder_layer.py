"""Decoder layers as one function: found where they compute the same bits, left alone elsewhere, and out of the way of hooks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import toys
from decoders import decoders
from peak_memory import CLEAR_REFS, growth_during
from torch import nn

from echelon import LLM, SamplingParams
from echelon.batch import Span
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache
from echelon.model.attention import CONTEXT_KEYWORD, CachedAttention, record_layers
from echelon.model.hidden_states import HiddenStateReader
from echelon.model.load.loading import LoadedModel, adopt_model, served_copy
from echelon.model.pack import pack
from echelon.model.patches.causal_lm import CausalLMForward
from echelon.model.patches.decoder_layer import DecoderLayerForward, Echo, patch_decoder_layers
from echelon.model.runner import ModelRunner
from echelon.ops import cpu
from echelon.ops.compiled import is_built
from echelon.ops.contract import Activation, RmsWeight

pytestmark = pytest.mark.skipif(not is_built(), reason="the compiled kernels are not built")
DECODERS = decoders(window=12, original_context=32)
FLAT = {"llama", "mistral", "qwen2", "qwen3"}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def loaded(name: str, dtype: torch.dtype = torch.float32, **others: Any) -> LoadedModel:
    cls, config = copy.deepcopy(DECODERS[name])
    config.update(others)
    model = toys.randomised(cls, config, seed=4, spread=0.2)
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
    layers = flat_layers(target.model)
    assert len(layers) == (2 if name in FLAT else 0)
    assert all(layer.forward.compiled is not None for layer in layers)
    assert isinstance(vars(target.model).get("forward"), CausalLMForward) == (name in FLAT)
    seen = [logits(target)]  # all layers in one call
    toys.unpatch(target.model, CausalLMForward)
    seen.append(logits(target))  # a call a layer
    for layer in layers:
        layer.forward = replace(layer.forward, compiled=None)
    seen.append(logits(target))  # a call a part
    toys.unpatch(target.model, DecoderLayerForward)
    assert not flat_layers(target.model)
    whole = logits(target)
    assert all(torch.equal(whole, one) for one in seen)


@pytest.mark.parametrize("inner", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_weights_whose_groups_differ_are_one_call(bits: str, inner: int) -> None:
    target = adopt_model(toys.llama(intermediate_size=inner), None, "toy", quantization=bits)
    layers = flat_layers(target.model)
    assert layers
    assert all(layer.forward.compiled is not None for layer in layers)
    at_once = logits(target)
    for layer in layers:
        layer.forward = replace(layer.forward, compiled=None)
    toys.unpatch(target.model, CausalLMForward)
    assert torch.equal(logits(target), at_once)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(FLAT))
def test_calls_of_many_rows_have_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """More tokens than one pass over the weights takes, by one thread and by several."""
    target = loaded(name, dtype)
    expected = prompts(target)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(expected, prompts(target))
    finally:
        torch.set_num_threads(threads)
    toys.unpatch(target.model, DecoderLayerForward, CausalLMForward)
    assert torch.equal(expected, prompts(target))


def prompts(target: LoadedModel) -> torch.Tensor:
    """Logits of two prompts of several hundred tokens."""
    lengths = (530, 45)
    tables = BlockTables(80, 8, 70)
    runner = ModelRunner(target, KVCache(record_layers(target.model), tables, target.model.dtype, target.device))
    spans = [Span(row, 0, [1 + (7 * i + row) % 60 for i in range(n)], 2, n) for row, n in enumerate(lengths)]
    for row, n in enumerate(lengths):
        assert tables.reserve(row, n)
    return runner.run(runner.pack(spans))[0]


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


def test_hooks_on_a_layer_or_on_the_model_within_are_called() -> None:
    target = loaded("llama")
    inner: Any = target.model.model  # type: ignore[attr-defined]
    before = logits(target)
    for module in (inner.layers[0], inner, inner.embed_tokens, inner.norm, target.model.lm_head):  # type: ignore[attr-defined]
        seen: list[nn.Module] = []
        handle = module.register_forward_hook(lambda m, _i, _o, seen=seen: seen.append(m))
        assert torch.equal(before, logits(target))
        handle.remove()
        assert set(seen) == {module}


def test_layers_between_those_with_hooks_run_as_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a head reads, a layer's input or what the output layer reads, keeps no other layer from it."""
    target, parts = loaded("llama", num_hidden_layers=5), []
    run_layers = CachedAttention.run_layers

    def counted(self: CachedAttention, layers: Sequence[Any], first: int, *hidden: torch.Tensor) -> torch.Tensor:
        parts.append((first, len(layers)))
        return run_layers(self, layers, first, *hidden)

    monkeypatch.setattr(CachedAttention, "run_layers", counted)
    before = logits(target)
    for names, expected in ((("last", "last_unnormed"), [(0, 5)]), (("layer:1", "layer:4", "last"), [(0, 1), (1, 1), (2, 2), (4, 1)])):
        with HiddenStateReader(target.model, names).reading() as states:
            parts.clear()
            assert torch.equal(before, logits(target))
        assert parts == 2 * expected, "of two passes"
        assert states.keys() == set(names)


@pytest.mark.parametrize("asked", [{"logits_to_keep": 2}, {"logits_to_keep": torch.tensor([3, 4]), "return_dict": False}])
def test_a_call_that_asks_for_another_form_gets_it(asked: dict[str, Any]) -> None:
    target = loaded("qwen2")
    tokens = torch.arange(5)[None]
    known = {"input_ids": tokens, "position_ids": tokens, "use_cache": False, CONTEXT_KEYWORD: Echo()}
    with torch.inference_mode():
        expected = target.model(**known, logits_to_keep=torch.tensor([3, 4])).logits
        assert torch.equal(expected, target.model(**known, **asked)[0])


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


def test_a_copy_of_a_served_model_is_refused_when_it_runs() -> None:
    """Its layers would read the weights of the first one, which may be gone."""
    target = loaded("qwen2")
    twin = replace(target, model=copy.deepcopy(target.model))
    LLM(target).generate([[4, 5]], SamplingParams(max_tokens=2))
    with pytest.raises(RuntimeError, match="a copy of a layer's bytes"):
        LLM(twin).generate([[4, 5]], SamplingParams(max_tokens=2))


def test_nothing_is_replaced_twice() -> None:
    target = loaded("qwen3")
    assert patch_decoder_layers(target.model) == {}


def test_texts_are_those_of_whole_layers() -> None:
    asked = SamplingParams(temperature=0.8, seed=3, max_tokens=24)
    flat, whole = loaded("qwen2"), loaded("qwen2")
    toys.unpatch(whole.model, DecoderLayerForward, CausalLMForward)
    texts = [[o.outputs[0].token_ids for o in LLM(t, max_num_seqs=3).generate([[4, 5], [6], [7, 8, 9]], asked)] for t in (flat, whole)]
    assert texts[0] == texts[1]


# ---- layers of one call

WIDTH, INNER = 48, 72


def layer_of(heads: int, kv_heads: int, sizes: tuple[int, int], window: int | None) -> torch.Tensor:
    """A layer of random weights as the kernels run it; `sizes` of its heads' keys and values."""
    generator = torch.Generator().manual_seed(heads)
    columns = [heads * sizes[0], kv_heads * sizes[0], kv_heads * sizes[1], WIDTH, INNER, INNER, WIDTH]
    depths = [WIDTH, WIDTH, WIDTH, heads * sizes[1], WIDTH, WIDTH, INNER]
    weights = [cpu.pack(torch.randn(n, k, generator=generator) * k**-0.5) for n, k in zip(columns, depths, strict=True)]
    norm = torch.ones(WIDTH), 1e-6, RmsWeight.AFTER_ROUNDING
    return cpu.decoder_layer([norm, norm, None, None], [(w, None) for w in weights], Activation.SILU, heads, 0.3, window, None, None)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def test_layers_that_differ_in_window_or_heads_have_in_one_call_the_bits_of_calls_of_their_own() -> None:
    """A tree behind a text of 1,500 tokens, by one thread and by three."""
    kinds = [(6, 2, None), (6, 2, 512), (6, 2, None), (6, 2, 512), (3, 1, None), (4, 4, 513), (6, 2, 1), (6, 2, None)]
    layers = [layer_of(heads, kv_heads, (8, 8), window) for heads, kv_heads, window in kinds]
    tables = BlockTables(100, 16, 100)
    assert tables.reserve(0, 1510)
    batch = pack([Span(0, 1499, [0] * 11, 1, 1500, 10, [-1, 0, 1, 2, -1, 4, 0, 6, 7, 3])], tables)
    known = [drawn(100, kv_heads, 16, 8) for _, kv_heads, _ in kinds]
    hidden, cos, sin = drawn(1, 11, WIDTH), drawn(1, 11, 8).cos(), drawn(1, 11, 8).sin()

    def run(at_once: int) -> list[torch.Tensor]:
        """What so many layers a call come to, and the keys and values that they leave."""
        out, keys, values = hidden, [k.clone() for k in known], [2 * k for k in known]
        for i in range(0, len(layers), at_once):
            own = slice(i, i + at_once)
            out = cpu.run_layers(layers[own], out, cos, sin, keys[own], values[own], batch.slots, batch)
        return [out, *keys, *values]

    expected, threads = run(1), torch.get_num_threads()
    assert bool(expected[0].isfinite().all())
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for at_once in (1, 3, len(layers)):
                assert all(map(torch.equal, run(at_once), expected)), (count, at_once)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="the peak of memory cannot be asked for")
def test_layers_of_one_call_have_one_place_for_partial_results() -> None:
    """Of 64 layers whose keys are split, and whose values are as long as may be."""
    layer, tables = layer_of(1, 1, (16, 1024), 16), BlockTables(1, 1024, 1)
    assert tables.reserve(0, 544)
    batch = pack([Span(0, 480, [0] * 64, 1, 544)], tables)  # over the end of a section
    keys, values = drawn(1, 1, 1024, 16), drawn(1, 1, 1024, 1024)
    hidden, cos, sin = drawn(1, 64, WIDTH), drawn(1, 64, 16).cos(), drawn(1, 64, 16).sin()

    def run(count: int) -> torch.Tensor:
        return cpu.run_layers([layer] * count, hidden, cos, sin, [keys] * count, [values] * count, batch.slots, batch)

    run(1)
    out, growth = growth_during(lambda: run(64))
    assert out.shape == hidden.shape
    assert growth < 2**24, f"{growth:,} bytes"
