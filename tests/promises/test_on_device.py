"""The whole engine by the kernels for CUDA: interpreted on CPU tensors everywhere, compiled where there is a device.

Whatever drafts and however many rows run, token ids are those of plain decoding, one row alone, by the same kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import OPTConfig, OPTForCausalLM, Qwen3Config, Qwen3ForCausalLM

pytest.importorskip("triton")

import card
import toys

import heads
from benchmarks.prefill import PrefilledRun, read_prefixes
from benchmarks.replayed import AcceptanceHistogram, replay
from echelon import LLM, ConfigError, SamplingParams, build, ops
from echelon.bench.framework import FrameworkRun
from echelon.bench.throughput import DecodingMethod
from echelon.bench.verify import STRATEGY_SETTINGS
from echelon.config import EngineConfig
from echelon.heads.checkpoints import build_head
from echelon.memory import pool
from echelon.memory.pool import plan_kv
from echelon.model.load import loading
from echelon.model.load.loading import LoadedModel, adopt_model, serve_head
from echelon.ops import compiled, devices, sample
from echelon.ops import triton as on_triton
from echelon.ops.compiled import is_built
from echelon.ops.contract import Activation
from echelon.ops.sample import SampleRow, choose, raw_rows
from echelon.ops.triton import attention as triton_attention
from echelon.ops.triton import linear as triton_linear
from echelon.sampling import Sampler

VOCABULARY = 96
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_k": 40},
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
    "head": {"method": "eagle", "tree": "dynamic", "num_speculative_tokens": 6, "tree_top_k": 3, "tree_depth": 3},
}
DTYPES = [torch.float32, torch.bfloat16]
HAS_DEVICE = torch.cuda.is_available()


@dataclass(frozen=True)
class Scale:
    """How much is generated, and by how large a model."""

    num_layers: int
    num_tokens: int
    lengths: tuple[int, ...]  # of the prompts


def scale() -> Scale:
    """Triton's interpreter takes milliseconds for each program of a kernel."""
    return Scale(2, 12, (1, 4, 2, 9, 3)) if HAS_DEVICE else Scale(1, 4, (1, 4, 2))


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Every operation by Triton, and none by compiled kernels: on the device, or interpreted on CPU tensors."""
    if not HAS_DEVICE:
        monkeypatch.setattr(devices, "by_triton", lambda _tensor: True)
        monkeypatch.setattr(loading, "self_test", lambda *_: None)  # interpreted, it takes long
        monkeypatch.setattr(compiled, "kernels", compiled.MISSING)
        monkeypatch.setattr(build, "warn_of_chance", lambda *_: None)
        monkeypatch.setattr(triton_linear, "ROWS", 16)  # blocks for the interpreter, and lanes likewise
        monkeypatch.setattr(triton_attention, "lanes_of", lambda _dtype, _group: 16)
    return torch.device("cuda" if HAS_DEVICE else "cpu")


def sizes() -> dict[str, Any]:
    few = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 64}
    return few | {"num_hidden_layers": scale().num_layers}


def opt() -> Any:
    values = sizes() | {"ffn_dim": 32, "word_embed_proj_dim": 32, "dropout": 0.0}
    return toys.randomised(OPTForCausalLM, OPTConfig(**values, **NO_ENDS), seed=0, spread=0.35)


def qwen() -> Any:
    values = sizes() | {"intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}
    return toys.randomised(Qwen3ForCausalLM, Qwen3Config(**values, **NO_ENDS), seed=0, spread=0.35)


def llama() -> Any:
    return toys.llama(**sizes() | {"intermediate_size": 32, "num_key_value_heads": 1})


MODELS = {"llama": llama, "qwen": qwen, "opt": opt}


@cache
def served(name: str, dtype: torch.dtype, noise: float = 0.0) -> LoadedModel:
    model = MODELS[name]()
    model = toys.noisy_copy(model, noise) if noise else model
    return adopt_model(model.to("cuda" if HAS_DEVICE else "cpu", dtype), None, name, keep_weights=False)


def params(mode: str) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=scale().num_tokens, seed=100 + i, **MODES[mode]) for i in range(len(scale().lengths))]


def generated(llm: LLM, mode: str) -> list[list[int]]:
    outputs = [o.token_ids for r in llm.generate(toys.prompts(scale().lengths), params(mode)) for o in r.outputs]
    toys.assert_all_blocks_free(llm)
    return outputs


@cache
def truth(name: str, dtype: torch.dtype, mode: str) -> list[list[int]]:
    """Plain decoding, one row at a time."""
    return generated(LLM(served(name, dtype), max_num_seqs=1, kv_cache_memory_bytes=1 << 20), mode)


@cache
def head(name: str, dtype: torch.dtype, mode: str) -> Any:
    """EAGLE's layer, served, which has also read the texts."""
    target = served(name, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        inner = build_head("eagle", target.model).to(target.device, dtype).eval().requires_grad_(False)
    serve_head(inner)
    own = heads.Knowing(inner, truth(name, dtype, mode), VOCABULARY)
    own.follows, own.knows = own.follows.to(target.device), own.knows.to(target.device)
    return own


def engine(name: str, dtype: torch.dtype, mode: str, drafter: str, **settings: Any) -> LLM:
    config = DRAFTERS[drafter] or None
    draft = served(name, dtype, noise=0.02) if drafter == "draft_model" else None
    own = head(name, dtype, mode) if drafter == "head" else None
    llm = LLM(served(name, dtype), config, draft, own, block_size=8, kv_cache_memory_bytes=1 << 20, **settings)
    return toys.watch(llm)


def check(name: str, dtype: torch.dtype, mode: str, drafter: str, batch_size: int, **settings: Any) -> None:
    llm = engine(name, dtype, mode, drafter, max_num_seqs=batch_size, **settings)
    assert generated(llm, mode) == truth(name, dtype, mode)
    assert drafter in ("none", "ngram") or llm.stats.num_accepted_tokens > 0, "the drafter should be right sometimes"


CELLS = [("llama", torch.float32, "sampled", drafter, 1 if drafter == "ngram" else 3) for drafter in DRAFTERS]
CELLS += [("opt", torch.bfloat16, "greedy", "draft_model", 3)]


@pytest.mark.parametrize(("name", "dtype", "mode", "drafter", "batch_size"), CELLS)
def test_no_draft_and_no_neighbour_changes_a_token(
    triton: torch.device, name: str, dtype: torch.dtype, mode: str, drafter: str, batch_size: int
) -> None:
    check(name, dtype, mode, drafter, batch_size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", Activation, ids=lambda a: a.name)
def test_a_linear_layer_ends_as_the_compiled_one_does(triton: torch.device, activation: Activation, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((3, 40), (5, 40), (5,)))
    x, weight = (t.to(triton, dtype) for t in (x, weight))
    act = {"NONE": lambda t: t, "RELU": F.relu, "SILU": F.silu, "GELU": F.gelu, "GELU_TANH": partial(F.gelu, approximate="tanh")}
    expected = act[activation.name](x.double() @ weight.double().T + bias.to(triton).double())
    packed = on_triton.pack(weight)
    got = on_triton.packed_linear(x, packed, bias.to(triton), activation)
    assert got.dtype == dtype
    assert torch.allclose(got.double(), expected, rtol=2e-5 if dtype == torch.float32 else 2.0**-8, atol=1e-5)
    in_float32 = on_triton.packed_linear(x, packed, bias.to(triton), activation, float32=True)
    assert torch.equal(in_float32.to(dtype), got)
    assert torch.equal(on_triton.packed_rows(packed, torch.tensor([4, 0], device=triton)), weight[[4, 0]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fast_linear_layer_is_the_frameworks(triton: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).to(triton, dtype) for shape in ((3, 40), (5, 40), (5,)))
    packed = on_triton.pack(weight, is_fast=True)
    assert torch.equal(
        on_triton.packed_linear(x, packed, bias, float32=True), triton_linear.linear_invariant(x, weight, bias, float32=True)
    )
    monkeypatch.setattr(triton_linear, "linear_invariant", None)
    by_framework = F.linear(x, weight, bias)
    assert torch.equal(on_triton.packed_linear(x, packed, bias.float()), by_framework)
    assert torch.equal(on_triton.packed_linear(x, packed, bias, Activation.RELU), by_framework.relu())


def test_fast_numerics_are_a_leave_that_models_carry(triton: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = adopt_model(llama().to(triton), None, "toy", keep_weights=False, numerics="fast")
    assert fast.is_fast and not served("llama", torch.float32).is_fast
    with pytest.raises(ConfigError, match=r"'toy' was loaded with numerics = 'fast', and 'invariant' is wanted"):
        LLM(fast, kv_cache_memory_bytes=1 << 20)
    asked, by_framework = [], F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: (asked.append(len(x)), by_framework(x, *rest))[1])
    llm = LLM(fast, numerics="fast", kv_cache_memory_bytes=1 << 20)
    assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=1, temperature=0.0))[0].outputs[0].token_ids) == 1
    assert len(asked) >= 7 * scale().num_layers
    assert LLM(served("llama", torch.float32), numerics="fast", kv_cache_memory_bytes=1 << 20).target is served("llama", torch.float32)


def test_fast_numerics_change_nothing_on_the_cpu() -> None:
    assert not adopt_model(toys.llama(), None, "toy", numerics="fast").is_fast


def places(logits: torch.Tensor, asked: list[dict[str, Any]]) -> list[SampleRow]:
    rows = raw_rows(logits)
    return [SampleRow(Sampler(SamplingParams(**q), 7 * i, 0, 1), rows[i], [3, 5], [2]) for i, q in enumerate(asked)]


def test_places_are_chosen_as_on_the_host(triton: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the device has no token for, and those whose logits the request changes, too; and what fails fails by the same name."""
    asked: list[dict[str, Any]] = [
        {"temperature": 0.8}, {"temperature": 0.0, "logit_bias": {9: 50.0}}, {"top_p": 0.5}, {"temperature": 0.7},
        {"temperature": 0.9, "repetition_penalty": 1.5}, {"allowed_token_ids": [200]}, {"top_k": 3},
    ]  # fmt: skip
    logits = torch.randn(len(asked), 300, generator=torch.Generator().manual_seed(3)) * 3
    logits[3, 17], logits[5, 200] = torch.nan, -torch.inf
    failed: dict[int, Any] = {}
    tokens = choose(places(logits.to(triton), asked), failed)
    monkeypatch.undo()
    expected: dict[int, Any] = {}
    assert tokens == choose(places(logits, asked), expected)
    assert tokens[1] == 9 and [i for i, t in enumerate(tokens) if t < 0] == sorted(failed) == [3, 5]
    assert {i: str(e) for i, e in failed.items()} == {i: str(e) for i, e in expected.items()}
    assert choose([], {}) == []


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_are_ranked_as_on_the_host(triton: torch.device, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(4, 900, generator=torch.Generator().manual_seed(3)).round(decimals=1)
    logits[2] = torch.nan
    samplers = [Sampler(SamplingParams(temperature=temperature, top_p=0.9), i, 0, 1) for i in range(4)]
    tokens, scores = sample.likeliest(logits.to(triton), samplers, [5, 6, 7, 8], 10)
    monkeypatch.undo()
    by_host = sample.likeliest(logits, samplers, [5, 6, 7, 8], 10)
    sound = [0, 1, 3]
    assert np.array_equal(tokens[sound], by_host[0][sound])
    assert np.allclose(scores, by_host[1], rtol=1e-5, atol=1e-5)


def test_memory_of_a_device_is_what_the_device_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (asked.append(device), (10_000, 80_000))[1])
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    device = torch.device("cuda", 1)
    plan = plan_kv(10, 16, 64, 1024, "auto", device)
    assert asked == [device] and plan.num_blocks == 8_000 // 160 and "80% of" in plan.reason
    assert plan_kv(10, 16, 1, 32, "auto", device).num_blocks == 2
    assert plan_kv(10, 16, 1, 32, 480, device).num_blocks == 3
    with pytest.raises(ConfigError, match="less than one block of 16 tokens"):
        plan_kv(10_000, 16, 1, 32, "auto", device)
    assert pool.available_memory(torch.device("cpu")) > 1 << 20


def test_the_device_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [devices.chosen_device(n).type for n in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match=r"no CUDA device.*use device = 'cpu'"):
        devices.chosen_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [devices.chosen_device(n).type for n in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    with pytest.raises(ConfigError, match="device"):
        EngineConfig(device="tpu")


def test_a_model_that_is_loaded_stays_where_it_is() -> None:
    loaded = toys.adopted(toys.llama())
    assert LLM(loaded, device="cpu", kv_cache_memory_bytes=1 << 20).target is loaded
    with pytest.raises(ConfigError, match=r"'toy' is on cpu, and device = 'cuda' is wanted"):
        LLM(loaded, device="cuda")


def test_what_serves_a_device_is_named(triton: torch.device) -> None:
    assert all(name.startswith("Triton") for op, name in ops.which(triton).items() if op != "ranking drafts")


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_DEVICE, reason="needs a CUDA device")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_everything_holds_on_a_device(triton: torch.device, name: str, dtype: torch.dtype, drafter: str, mode: str) -> None:
    for batch_size in (1, 5):
        check(name, dtype, mode, drafter, batch_size)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_DEVICE, reason="needs a CUDA device")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", STRATEGY_SETTINGS)
def test_every_strategy_holds_on_a_device(triton: torch.device, strategy: str, name: str) -> None:
    check(name, torch.float32, "greedy", "draft_model", 5, **STRATEGY_SETTINGS[strategy])


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[card.Card]:
    """A card that is not there (tests/support/card.py), kernels of the CPU standing in for Triton's."""
    if HAS_DEVICE or not is_built():
        pytest.skip("a device finds it by itself; without kernels of the CPU nothing can stand in")
    there = card.stand_in(monkeypatch)
    monkeypatch.setattr(sys.modules[__name__], "HAS_DEVICE", True)
    for made in (served, truth, head):
        made.cache_clear()
    with there:
        yield there
    for made in (served, truth, head):
        made.cache_clear()


@pytest.mark.parametrize("mode", MODES)
def test_nothing_mixes_host_and_card(mode: str, there: card.Card) -> None:
    """Every drafter, and every strategy with one of them."""
    for drafter in DRAFTERS:
        check("llama", torch.float32, mode, drafter, 5)
    for name in ("opt", "qwen"):
        check(name, torch.bfloat16, mode, "draft_model", 5)
    for settings in STRATEGY_SETTINGS.values() if mode == "greedy" else ():
        check("llama", torch.float32, mode, "draft_model", 5, **settings)
    assert served("llama", torch.float32).device == card.CUDA


def test_benchmarks_mix_neither(there: card.Card) -> None:
    """Prompts read once, replayed acceptance, other strategies and the framework beside them."""
    target, draft, prompts = served("llama", torch.float32), served("llama", torch.float32, 0.02), toys.prompts((9, 4))
    law = AcceptanceHistogram.from_tokens_per_step(2.0, 3)
    prefixes = read_prefixes(target, prompts)
    assert all(there.holds(t) for p in prefixes for t in (*p.keys, *p.values))
    drafted = DecodingMethod("draft model", {"method": "draft_model", "num_speculative_tokens": 3}, "padded")
    replayed = DecodingMethod("replay", {"method": "ngram", "num_speculative_tokens": 3}, "realign", partial(replay, law=law))
    runs = [PrefilledRun(m, target, draft, prefixes, 40, num_rehearsals=1) for m in (DecodingMethod("plain", None), drafted, replayed)]
    runs.append(PrefilledRun(replace(drafted, prepare=partial(replay, law=law)), target, draft, prefixes, 40))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    outputs = [run.run(prompts, params).outputs for run in runs]
    assert outputs[0] == outputs[1]
    framework = FrameworkRun("transformers", toys.llama().to("cuda"), 2)
    assert [len(o) for o in framework.run(prompts, params).outputs] == [8, 8]
