"""Steps as CUDA graphs, on a card and with graphs that are not there (tests/card.py, tests/recorded.py): the tokens of the eager engine.

Attention and drawing run as Triton kernels, interpreted; kernels of the CPU stand in for the others.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

pytest.importorskip("triton")

import heads
import toys
from echelon import LLM, SamplingParams, api
from echelon.drafters.guard import GuardedDrafter
from echelon.heads.loading import build_head
from echelon.ops import elementwise
from echelon.ops.compiled import is_built
from echelon.ops.linear import PackedWeight, packed_linear
from echelon.ops.triton import attention as triton_attention
from echelon.ops.triton import elementwise as triton_elementwise
from echelon.ops.triton import linear as triton_linear
from echelon.ops.triton import sample as triton_sample
from echelon.target import loading
from echelon.target.buckets import filled_up, power_up
from echelon.target.captured import MOST_TOKENS
from echelon.target.loading import LoadedModel, adopt_model, serve_head
from recorded import Recorder

pytestmark = pytest.mark.skipif(torch.cuda.is_available() or not is_built(), reason="a device finds it by itself; nothing can stand in")

VOCABULARY, LENGTHS, NUM_TOKENS = 96, (3, 9, 5, 1, 6, 2, 12), (9, 5, 12, 7, 10, 3, 8)
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
MODES: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.9, "top_k": 40}}
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
    "head": {"method": "eagle", "tree": "dynamic", "num_speculative_tokens": 6, "tree_top_k": 3, "tree_depth": 3},
}


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A card, and on it what the engine launches."""
    card = Recorder()

    def linear_of_the_cpu(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, float32: bool = False) -> torch.Tensor:
        return packed_linear(x, PackedWeight.pack(weight), bias, float32=float32)

    monkeypatch.setattr(triton_attention, "LANES", dict.fromkeys(triton_attention.LANES, 16))
    for module, name in ((triton_attention, "_attend"), (triton_attention, "_merge_splits"), (triton_sample, "_sample_rows")):
        monkeypatch.setattr(module, name, card.jit(getattr(module, name)))
    monkeypatch.setattr(triton_linear, "linear_invariant", card.kernel(linear_of_the_cpu))
    for name in ("rms_norm", "layer_norm", "activate", "rotate", "write_slots"):
        monkeypatch.setattr(triton_elementwise, name, card.kernel(getattr(elementwise, name)))
    monkeypatch.setattr(api, "warn_of_chance", lambda *_: None)
    monkeypatch.setattr(loading, "self_test", lambda *_: None)
    card.cuda(monkeypatch)
    made = (served, truth, head)
    for one in made:
        one.cache_clear()
    with card:
        yield card
    for one in made:
        one.cache_clear()


def opt() -> Any:
    sizes = SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
    return toys.randomised(OPTForCausalLM, OPTConfig(**sizes, **NO_ENDS), seed=0, spread=0.35)


def llama() -> Any:
    return toys.llama(**SIZES | {"intermediate_size": 48, "num_key_value_heads": 1})


MODELS = {"llama": llama, "opt": opt}


@cache
def served(name: str, noise: float = 0.0) -> LoadedModel:
    model = MODELS[name]()
    return adopt_model((toys.noisy_copy(model, noise) if noise else model).to("cuda"), None, name, keep_weights=False)


@cache
def head(name: str, mode: str) -> Any:
    target = served(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        inner = build_head("eagle", target.model).to(target.device).eval().requires_grad_(False)
    serve_head(inner)
    own = heads.Knowing(inner, truth(name, mode), VOCABULARY)
    own.follows, own.knows = own.follows.to(target.device), own.knows.to(target.device)
    return own


def engine(name: str, mode: str, drafter: str, **settings: Any) -> LLM:
    draft = served(name, noise=0.02) if drafter == "draft_model" else None
    own = head(name, mode) if drafter == "head" else None
    llm = LLM(served(name), DRAFTERS[drafter] or None, draft, own, block_size=8, kv_cache_memory_bytes=1 << 18, **settings)
    if isinstance(llm.engine.drafter, GuardedDrafter):
        llm.engine.drafter._time_limit = math.inf  # not for the interpreter
    return toys.watch(llm)


def generated(llm: LLM, mode: str) -> list[list[int]]:
    params = [SamplingParams(max_tokens=n, seed=100 + i, **MODES[mode]) for i, n in enumerate(NUM_TOKENS)]
    outputs = [o.token_ids for r in llm.generate(toys.prompts(LENGTHS), params) for o in r.outputs]
    toys.assert_all_blocks_free(llm)
    return outputs


@cache
def truth(name: str, mode: str) -> list[list[int]]:
    """Plain decoding without graphs."""
    llm = engine(name, mode, "none", max_num_seqs=7, enforce_eager=True)
    outputs = generated(llm, mode)
    assert llm.stats.target.num_replays == llm.stats.target.num_captures == 0 == len(llm.engine.target.cache.null_slots)
    return outputs


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", MODES)
def test_replayed_steps_give_the_tokens_of_eager_ones(there: Recorder, name: str, mode: str) -> None:
    for drafter in DRAFTERS:
        for batch_size in (1, 3, 5):
            llm = engine(name, mode, drafter, max_num_seqs=batch_size)
            assert generated(llm, mode) == truth(name, mode), (drafter, batch_size)
            usage = llm.stats.target
            assert 0 < usage.num_captures < usage.num_replays <= usage.num_passes
            print(name, mode, drafter, batch_size, usage.num_captures, usage.num_replays, usage.num_passes, llm.stats.draft.num_replays)
