"""Engines whose steps are CUDA graphs, on a card and with graphs that are not there (tests/support/card.py, tests/support/recorded.py).

Attention and drawing run as Triton kernels, interpreted; kernels of the CPU stand in for the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM, Qwen3Config, Qwen3ForCausalLM

pytest.importorskip("triton")

import toys
from recorded import Recorder

import heads
from echelon import LLM, SamplingParams, build
from echelon.heads.checkpoints import build_head
from echelon.model.graphs import ahead, buckets, graphs
from echelon.model.graphs import buffers as frames
from echelon.model.graphs import programs as captured
from echelon.model.load import loading
from echelon.model.load.loading import LoadedModel, adopt_model, serve_head
from echelon.ops import cpu, devices, triton
from echelon.ops.compiled import is_built
from echelon.ops.triton import attention as triton_attention
from echelon.ops.triton import linear as triton_linear
from echelon.ops.triton import plan
from echelon.ops.triton import sample as triton_sample
from echelon.ops.triton.plan import DevicePlan
from echelon.sampling import kept_tokens, noise_at

PLANNED_ATTENTION, DRAW_ROWS, DIGITS = triton_attention.planned_attention, triton_sample.draw_rows, buckets.DIGITS

VOCABULARY, LENGTHS, NUM_TOKENS = 96, (3, 9, 5, 1, 6, 12), (9, 5, 8, 7, 4, 6)
SEEDS = (5, 6)  # of the prompts
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
MODES: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.9, "top_k": 40}}
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
    "head": {"method": "eagle", "tree": "dynamic", "num_speculative_tokens": 6, "tree_top_k": 3, "tree_depth": 3},
}


NEEDED = pytest.mark.skipif(torch.cuda.is_available() or not is_built(), reason="a device finds it by itself; nothing can stand in")


@contextmanager
def card_with_graphs() -> Iterator[Recorder]:
    """A card, and on it what the engine launches; buckets are coarse, and captured at their first use."""
    for made_for_another in (served, head, truth, windowed):
        made_for_another.cache_clear()
    with pytest.MonkeyPatch.context() as monkeypatch:
        card = _card(monkeypatch)
        with card:
            yield card


def _card(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    card = Recorder()

    def linear_of_the_cpu(x: Tensor, weight: Tensor, bias: Any = None, float32: bool = False) -> Tensor:
        return cpu.packed_linear(x, cpu.pack(weight), bias, float32=float32)

    monkeypatch.setattr(triton_attention, "lanes_of", lambda _dtype, _group: 16)
    for module, name in ((triton_attention, "_attend"), (triton_attention, "_merge_splits"), (triton_sample, "_sample_rows")):
        monkeypatch.setattr(module, name, card.jit(getattr(module, name)))
    monkeypatch.setattr(triton_attention, "planned_attention", card.kernel(attention_by_tables))
    monkeypatch.setattr(captured, "planned_attention", card.kernel(attention_by_tables))
    for module in (triton_sample, captured, ahead):
        monkeypatch.setattr(module, "draw_rows", card.kernel(drawn))
    monkeypatch.setattr(graphs, "EAGER_USES", 0)
    monkeypatch.setattr(buckets, "DIGITS", 2)  # small passes are padded too
    monkeypatch.setattr(triton_linear, "linear_invariant", card.kernel(linear_of_the_cpu))
    for name in ("rms_norm", "layer_norm", "activate", "rotate", "write_slots"):
        monkeypatch.setattr(triton, name, card.kernel(getattr(cpu, name)))
    monkeypatch.setattr(build, "warn_of_chance", lambda *_: None)
    monkeypatch.setattr(loading, "self_test", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (1 << 30, 1 << 31))
    monkeypatch.setattr(devices, "current", lambda _device: nullcontext())
    card.cuda(monkeypatch)
    return card


def attention_by_tables(
    query: Tensor, keys: Tensor, values: Tensor, tables: DevicePlan, block_size: int, scale: float, window: int | None, *_: Any
) -> Tensor:
    """What the kernels make of a plan, token by token in float64."""
    table, paths, positions = (t.numpy() for t in (tables.table, tables.paths, tables.positions))
    places: dict[int, list[tuple[int, int]]] = {}
    for row, first, end, low, high, path, held_from, _mode in np.concatenate([tables.items.numpy(), tables.late.numpy()]).tolist():
        for token in range(first, end):
            seen = range(max(low, positions[token] - (window or 1 << 30) + 1), min(high, positions[token] + 1))
            found = (paths[path, key - held_from] if path >= 0 and key >= held_from else key for key in seen)
            places.setdefault(token, []).extend((table[row, place // block_size], place % block_size) for place in found)
    out = np.full((*query.shape[:2], values.shape[3]), 0.0 if tables.has_pads else np.nan)
    group = query.shape[1] // keys.shape[1]
    for token, seen_places in places.items():
        blocks, offsets = np.array(seen_places).T
        key, value = (s.numpy()[blocks, :, offsets].astype(np.float64).repeat(group, 1) for s in (keys, values))
        scores = (key * query[token].double().numpy()).sum(-1) * scale
        weights = np.exp(scores - scores.max(0))
        out[token] = (weights[..., None] * value).sum(0) / weights.sum(0)[:, None]
    return torch.from_numpy(out).to(query.dtype)


def drawn(logits: Tensor, *columns: Tensor) -> Tensor:
    """`draw_rows` by the definition."""
    tokens = []
    for values, temperature, top_k, top_p, log_min_p, key in zip(logits.numpy(), *(c.tolist() for c in columns), strict=True):
        if not np.isfinite(values.max()):
            tokens.append(-1)
            continue
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p or 1.0, min_p=math.exp(log_min_p))
        scaled = values / np.float32(temperature or 1.0)
        ids = kept_tokens(scaled, params)
        noise = -np.log(-np.log(noise_at(np.uint64(key % 2**64), ids)))
        tokens.append(int(ids[np.argmax(scaled[ids] + noise)]) if temperature else int(values.argmax()))
    return torch.tensor(tokens)


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
    settings = {"block_size": 8, "kv_cache_memory_bytes": 1 << 18} | settings
    llm = LLM(served(name), DRAFTERS[drafter] or None, draft, own, **settings)
    return toys.watch(llm)


def generated(llm: LLM, mode: str, seed: int) -> list[list[int]]:
    params = [SamplingParams(max_tokens=n, seed=100 + i, **MODES[mode]) for i, n in enumerate(NUM_TOKENS)]
    outputs = [o.token_ids for r in llm.generate(toys.prompts(LENGTHS, seed=seed), params) for o in r.outputs]
    toys.assert_all_blocks_free(llm)
    return outputs


@cache
def truth(name: str, mode: str, seed: int = SEEDS[0]) -> list[list[int]]:
    """Plain decoding without graphs."""
    llm = engine(name, mode, "none", max_num_seqs=6, enforce_eager=True)
    outputs = generated(llm, mode, seed)
    assert llm.stats.target.num_replays == llm.stats.target.num_captures == 0 == len(llm.engine.target.cache.null_slots)
    return outputs


def check(llm: LLM, name: str, mode: str) -> None:
    """Twice over, with other prompts the second time, when most graphs are there already."""
    for seed in SEEDS:
        assert generated(llm, mode, seed) == truth(name, mode, seed)


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on Triton's own attention and drawing, with small tiles."""
    for module in (triton_attention, captured):
        monkeypatch.setattr(module, "planned_attention", PLANNED_ATTENTION)
    for module in (triton_sample, captured, ahead):
        monkeypatch.setattr(module, "draw_rows", DRAW_ROWS)
    use_small_tiles(monkeypatch)


def use_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and splits so short that short texts have several."""
    for module in (plan, triton_attention, buckets, frames):
        monkeypatch.setattr(module, "SPLIT", 16)
    for module in (plan, triton_attention):
        monkeypatch.setattr(module, "KEY_TILE", 8)


@cache
def windowed(noise: float = 0.0) -> LoadedModel:
    """A layer that sees everything, and one with a window."""
    layers = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 11}
    sizes = SIZES | {"intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}
    model = toys.randomised(Qwen3ForCausalLM, Qwen3Config(**sizes, **layers, **NO_ENDS), seed=0, spread=0.35)
    return adopt_model((toys.noisy_copy(model, noise) if noise else model).to("cuda"), None, "qwen", keep_weights=False)
